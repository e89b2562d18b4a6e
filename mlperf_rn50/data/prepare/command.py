"""Packing of images into RecordIO: <out>/{train,validation}.{rec,idx,index.npy,crc.npy,names.txt} and manifest.json.

Threads check and convert the images, PART_SIZE at a time. An interrupted preparation resumes after the last whole part.
"""
import hashlib
import os
import shutil
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain, count, repeat, takewhile
from pathlib import Path

import msgspec
from tqdm import tqdm

from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits
from mlperf_rn50.data.prepare.train_yaml import write_train_yaml
from mlperf_rn50.data.records import MANIFEST_FORMAT, MANIFEST_NAME, load_manifest, pack_record, parse_record
from mlperf_rn50.data.verify import REPAIR, describe_records, dump_manifest, verify
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, DataError
from mlperf_rn50.files import describe_disk, make_folder, no_link, read_bytes, sync, write_atomically
from mlperf_rn50.runfolder.jsonl import decode
from mlperf_rn50.text import plural, some

PART_SIZE = 1000


class _Part(msgspec.Struct):
    """Names and CRC-32 of the records of a part, sizes of those written, and damaged images with the reasons."""

    names: list[str] = []
    checksums: list[int] = []
    sizes: list[int] = []
    damaged: list[tuple[str, str]] = []


def find_dataset(options: Namespace, name: str) -> Dataset:
    source = Path(options.source) if options.source else None
    try:
        if options.dataset == 'digits':
            return digits()
        if options.dataset == 'cifar10':
            return cifar10(source)
        if source is None:
            raise DataError(f'--source: missing; expected the folder of the {options.dataset} images')
        if options.dataset == 'imagenet':
            return imagenet(source, options.ground_truth and Path(options.ground_truth), options.allow_partial)
        return im2rec(source, name) if options.dataset == 'im2rec' else folder(source, name, options.validation)
    except OSError as e:
        is_link = isinstance(e, FileNotFoundError) and os.path.islink(e.filename)
        reason = 'link to a missing file' if is_link else e.strerror
        raise DataError(f'--source: {e.filename or source}: {reason}; repair, move or remove it') from e


def make_record(sample: Sample, sample_id: int, encode: Callable[[bytes], bytes]) -> bytes | str:
    """Return the record to store for an image, or the reason why the image is damaged."""
    encoded = sample.read()
    try:
        if not sample.is_record:
            return pack_record(sample.label, sample_id, encode(encoded))
        image = parse_record(encoded, sample.name).image.tobytes()
        if encode(image) != image:
            raise ValueError('DALI cannot decode it')
        return encoded
    except Exception as e:
        reason = ' '.join(str(e).split()).partition(' <_io')[0]  # without the name of a buffer
        return f'{type(e).__name__}: {reason[:120]}'


def _write_parts(rec_path: Path, samples: list[Sample], encode: Callable[[bytes], bytes], num_workers: int) -> _Part:
    """Append the missing parts of a split to its .rec, and a JSON file beside it for each. Return all parts as one."""
    starts = range(0, len(samples), PART_SIZE)
    paths = [rec_path.with_name(f'{rec_path.stem}_{i:05d}.json') for i in range(len(starts))]
    found = (decode(read_bytes(path), _Part) for path in takewhile(Path.exists, paths))
    parts = [part for part in takewhile(bool, found) if part]
    with (open(rec_path, 'ab', opener=no_link) as rec, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(samples), initial=sum(len(part.names) + len(part.damaged) for part in parts),
               desc=f'prepare {rec_path.stem}', unit='img', disable=None) as bar):
        size = sum(chain.from_iterable(part.sizes for part in parts))
        if rec.seek(0, os.SEEK_END) < size:  # truncated, or already moved when the program was killed
            parts, size = [], 0
        rec.truncate(size)
        for path, start in list(zip(paths, starts))[len(parts):]:
            part, group = _Part(), samples[start:start + PART_SIZE]
            for sample, record in zip(group, pool.map(make_record, group, count(start), repeat(encode))):
                bar.update()
                if isinstance(record, str):
                    part.damaged.append((sample.name, record))
                    continue
                part.names.append(sample.name)
                part.checksums.append(zlib.crc32(record))
                if not sample.is_record:
                    part.sizes.append(len(record))
                    rec.write(record)
            sync(rec)
            write_atomically(path, msgspec.json.encode(part))
            parts.append(part)
    return _Part(*(list(chain.from_iterable(lists)) for lists in zip(*map(msgspec.structs.astuple, parts))))


def _link(rec: Path, target: Path) -> None:
    """Link to a .rec and its .idx, unless they are at target already."""
    for suffix in ('.rec', '.idx'):
        path, link = rec.with_suffix(suffix), target.with_suffix(suffix)
        if not (link.exists() and link.samefile(path)):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(path.resolve(), link.parent.resolve()))


def is_prepared(out: Path, dataset_name: str) -> bool:
    """Return whether a folder contains this complete data set. Raise DataError if it contains a different one."""
    if not (out / MANIFEST_NAME).exists():
        return False
    manifest = load_manifest(out)
    if manifest['dataset'] != dataset_name:
        raise DataError(f'--out: {out} contains {manifest["dataset"]}, expected {dataset_name}; use a new folder')
    recs = {out / f'{name}.rec': split['rec_bytes'] for name, split in manifest['splits'].items()}
    return all(rec.is_file() and rec.stat().st_size == size for rec, size in recs.items())


def pack(dataset: Dataset, out: Path, num_workers: int = 1, resize_shorter: int | None = None,
         skip_damaged: bool = False) -> dict:
    """Pack a data set. Return the manifest, written last. Raise DataError for damaged images unless skip_damaged."""
    from mlperf_rn50.data.pictures import MAX_STORED_PIXELS, DecoderTest, encode_image
    samples = {'train': dataset.train, 'validation': dataset.validation}
    contents = [(s.label, s.name, s.size) for s in chain(*samples.values())]
    folder = out / '.parts' / hashlib.sha256(repr((PART_SIZE, resize_shorter, contents)).encode()).hexdigest()
    if folder.parent.exists() and not folder.exists():  # parts of a different input
        shutil.rmtree(folder.parent)
    make_folder(folder)
    encode = partial(encode_image, test=DecoderTest(), resize_shorter=resize_shorter, max_pixels=MAX_STORED_PIXELS)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Pillow warns of a large image and rejects one of twice that size
        parts = {name: _write_parts(folder / f'{name}.rec', of_split, encode, num_workers)
                 for name, of_split in samples.items()}
    damaged = [image for part in parts.values() for image in part.damaged]
    if damaged and not skip_damaged:
        first, listed = some([f'{name} ({why})' for name, why in damaged], 5), out / 'damaged.txt'
        write_atomically(listed, ''.join(f'{name}\t{why}\n' for name, why in damaged))
        advice = (f'run im2rec again without those listed in {listed}' if dataset.recs else
                  f'replace those listed in {listed} or skip them with --skip-corrupt')
        raise DataError(f'{plural(len(damaged), "image")} cannot be decoded: {first}; {advice}')
    splits = {}
    for name, part in parts.items():
        rec_path = (out if dataset.recs else folder) / f'{name}.rec'
        if dataset.recs:
            _link(dataset.recs[name], rec_path)
        else:
            starts = [0, *accumulate(part.sizes)][:-1]
            write_atomically(rec_path.with_suffix('.idx'), ''.join(f'{key}\t{s}\n' for key, s in enumerate(starts)))
        splits[name] = describe_records(rec_path, part.names, part.checksums)
    manifest = {'format': MANIFEST_FORMAT, 'dataset': dataset.name, 'source': dataset.source,
                'resize_shorter': resize_shorter, 'classes': dataset.classes,
                'splits': splits, 'skipped': [name for name, _ in damaged], 'notes': dataset.notes}
    dump_manifest(folder, manifest)
    made = [] if dataset.recs else [*folder.glob('train.*'), *folder.glob('validation.*')]
    for path in (*made, folder / MANIFEST_NAME):
        path.replace(out / path.name)
    shutil.rmtree(folder.parent)
    return manifest


def prepare(options: Namespace) -> int:
    """Run the prepare command. Return the exit code."""
    num_workers = options.workers or len(os.sched_getaffinity(0))
    if options.verify is not None:
        intact, damaged = verify(Path(options.verify), num_workers)
        print(*intact, *damaged, sep='\n')
        if damaged:
            print(f'{options.verify}: damaged; {REPAIR}')
        return EXIT_FAILED if damaged else EXIT_OK
    out, name, is_own = Path(options.out), options.dataset, options.dataset in ('folder', 'im2rec')
    if is_own:
        source = Path(options.source or '').resolve().name
        name = options.name or (source if source != IMAGENET else name)  # other images must not count as ImageNet
    try:
        if is_prepared(out, name):
            if options.dataset == 'folder' and Path(options.source or '').is_dir():
                _check_same(load_manifest(out), options, name)
            print(f'{out}: {name} is already prepared; to prepare it again, remove this folder or use another --out')
        else:
            _prepare_new(options, out, name, num_workers)
        if is_own and name != IMAGENET:
            print(f'next: {write_train_yaml(out, name)}')
    except OSError as e:
        raise DataError(f'--out: {e.filename or out}: {e.strerror}; {describe_disk(out)}; free space or fix the '
                        'permissions, then run prepare again (it keeps finished parts)') from e
    return EXIT_OK


def _check_same(manifest: dict, options: Namespace, name: str) -> None:
    """Raise DataError if a folder of images has other classes or numbers of images than when it was prepared."""
    found, skipped = find_dataset(options, name), {*manifest['skipped']}
    now = [sum(s.name not in skipped for s in samples) for samples in (found.train, found.validation)]
    before = [split['num_images'] for split in manifest['splits'].values()]
    if (now, found.classes) != (before, manifest['classes']):
        raise DataError(f'--source: got {now} images of {len(found.classes)} classes, expected {before} of '
                        f'{len(manifest["classes"])}, as in --out; remove that folder or use another one')


def _prepare_new(options: Namespace, out: Path, name: str, num_workers: int) -> None:
    found = find_dataset(options, name)
    for note in found.notes:
        print(note, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    manifest = pack(found, out, num_workers, options.resize_shorter, options.skip_corrupt)
    for split, entry in manifest['splits'].items():
        print(f'{out}/{split}.rec: {entry["num_images"]:,} images of {name}, {entry["rec_bytes"] / 1e6:,.1f} MB')
    if manifest['skipped']:
        print(f'skipped {plural(len(manifest["skipped"]), "damaged image")}, listed in {out / MANIFEST_NAME}')
