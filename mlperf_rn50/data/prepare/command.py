"""Packing of images into RecordIO: <out>/{train,validation}.{rec,idx,index.npy,crc.npy,names.txt}
and manifest.json.

Threads check and convert the images, PART_SIZE at a time. An interrupted preparation resumes after
the last whole part whose images have the same contents as before. No file is replaced that prepare
did not write.
"""

import hashlib
import os
import re
import shutil
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import BinaryIO

import msgspec
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits
from mlperf_rn50.data.prepare.train_yaml import TRAIN_YAML, write_train_yaml
from mlperf_rn50.data.records import (
    CHECKSUMS,
    INDEX,
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    NAMES,
    load_manifest,
    pack_record,
    parse_record,
)
from mlperf_rn50.data.verify import (
    REPAIR,
    describe_records,
    described,
    dump_manifest,
    is_edited,
    verify,
)
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, DataError
from mlperf_rn50.files import (
    describe_disk,
    make_folder,
    no_link,
    read_bytes,
    refuse_existing,
    sync,
    walk,
    write_atomically,
)
from mlperf_rn50.runfolder.jsonl import decode
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock
from mlperf_rn50.text import plural, printable, some

PART_SIZE = 1000
_PARTS, _DAMAGED = '.parts', 'damaged.txt'
# Files in --out: those that are published together, the manifest last; the list of damaged images;
# and, for images of the user, a configuration.
_OUTPUTS = (
    *(
        f'{split}{ending}'
        for split in ('train', 'validation')
        for ending in ('.rec', '.idx', INDEX, CHECKSUMS, NAMES)
    ),
    MANIFEST_NAME,
    _DAMAGED,
    TRAIN_YAML,
)
_IN_PARTS = re.compile(r'[0-9a-f]{64}(/\.?(train|validation|manifest|damaged)[_.].+)?')


class _Part(msgspec.Struct):
    """Names and CRC-32 of the records of a part, sizes of those written, damaged images with the
    reasons, sources."""

    names: list[str] = []
    checksums: list[int] = []
    sizes: list[int] = []
    damaged: list[tuple[str, str]] = []
    sources: list[int] = []  # CRC-32 of each image as read, also of damaged ones


def find_dataset(options: Namespace, name: str) -> Dataset:
    source = Path(options.source) if options.source else None
    try:
        if options.dataset == 'digits':
            return digits()
        if options.dataset == 'cifar10':
            return cifar10(source)
        if source is None:
            raise DataError(
                f'--source: missing; expected the folder of the {options.dataset} images'
            )
        if options.dataset == 'imagenet':
            return imagenet(
                source, options.ground_truth and Path(options.ground_truth), options.allow_partial
            )
        return (
            im2rec(source, name)
            if options.dataset == 'im2rec'
            else folder(source, name, options.validation)
        )
    except OSError as e:
        is_link = isinstance(e, FileNotFoundError) and os.path.islink(e.filename)
        reason = 'link to a missing file' if is_link else e.strerror
        raise DataError(
            f'--source: {e.filename or source}: {reason}; repair, move or remove it'
        ) from e


def make_record(
    sample: Sample, sample_id: int, encode: Callable[[bytes], bytes]
) -> tuple[int, bytes | str]:
    """Return the CRC-32 of an image as read, and the record to store, or the reason why the image
    is damaged."""
    encoded = sample.read()
    source = zlib.crc32(encoded)
    try:
        if not sample.is_record:
            return source, pack_record(sample.label, sample_id, encode(encoded))
        image = parse_record(encoded, sample.name).image.tobytes()
        if encode(image) != image:
            raise ValueError('DALI cannot decode it')
        return source, encoded
    except Exception as e:
        reason = ' '.join(str(e).split()).partition(' <_io')[0]  # without the name of a buffer
        return source, f'{type(e).__name__}: {reason[:120]}'


def _source_of(sample: Sample) -> int:
    return zlib.crc32(sample.read())


def _make_part(
    group: list[Sample], made: Iterable[tuple[int, bytes | str]], rec: BinaryIO, bar: tqdm
) -> _Part:
    """Append the records that make_record has made of a group of images to a .rec. Return their
    part."""
    part = _Part()
    for sample, (source, record) in zip(group, made):
        bar.update()
        part.sources.append(source)
        if isinstance(record, str):
            part.damaged.append((sample.name, record))
            continue
        part.names.append(sample.name)
        part.checksums.append(zlib.crc32(record))
        if not sample.is_record:
            part.sizes.append(len(record))
            rec.write(record)
    sync(rec)
    return part


def _is_stored(part: _Part, rec: BinaryIO, group: list[Sample]) -> bool:
    """Return whether a .rec continues with the records of a part. They are not stored again if they
    are in others."""
    stored = [zlib.crc32(rec.read(size)) for size in part.sizes]
    return stored == ([] if group[0].is_record else part.checksums)


def _write_parts(
    rec_path: Path, samples: list[Sample], encode: Callable[[bytes], bytes], num_workers: int
) -> _Part:
    """Append the missing parts of a split to its .rec, and a JSON file beside it for each. Return
    all parts as one."""
    parts, size, is_kept = list[_Part](), 0, True
    with (
        open(rec_path, 'a+b', opener=no_link) as rec,
        ThreadPoolExecutor(num_workers) as pool,
        tqdm(total=len(samples), desc=f'prepare {rec_path.stem}', unit='img', disable=None) as bar,
    ):
        rec.seek(0)
        for start in range(0, len(samples), PART_SIZE):
            path = rec_path.with_name(f'{rec_path.stem}_{len(parts):05d}.json')
            group = samples[start : start + PART_SIZE]
            part = decode(read_bytes(path), _Part) if is_kept and path.exists() else None
            is_kept = bool(
                part
                and _is_stored(part, rec, group)
                and part.sources == [*pool.map(_source_of, group)]
            )
            if part and is_kept:
                bar.update(len(group))
            else:
                rec.seek(size)
                rec.truncate()
                made = pool.map(make_record, group, count(start), repeat(encode))
                part = _make_part(group, made, rec, bar)
                write_atomically(path, msgspec.json.encode(part))
            parts.append(part)
            size += sum(part.sizes)
        rec.truncate(size)
    return _Part(
        *(list(chain.from_iterable(lists)) for lists in zip(*map(msgspec.structs.astuple, parts)))
    )


def _links(dataset: Dataset, out: Path) -> dict[Path, Path]:
    """Return the links to the records of im2rec and their indexes, and where they lead."""
    return {
        out / f'{split}{suffix}': rec.with_suffix(suffix)
        for split, rec in dataset.recs.items()
        for suffix in ('.rec', '.idx')
    }


def _publish(path: Path, out: Path) -> None:
    """Add a finished part of the data to --out. Its other name in the parts marks it as written by
    prepare."""
    refuse_existing([out / path.name])
    try:
        os.link(path, out / path.name)
    except OSError:  # a file system without hard links
        path.rename(out / path.name)


def _claim(out: Path, dataset: Dataset, is_own: bool) -> None:
    """Remove what a stopped preparation has published. Raise ConfigError for a file that prepare
    did not write."""
    parts = out / _PARTS
    inner = (
        [parts]
        if parts.is_symlink() or not parts.is_dir()
        else [p for p in parts.rglob('*') if not _IN_PARTS.fullmatch(str(p.relative_to(parts)))]
    )
    refuse_existing(inner)
    for part in parts.glob('*/*'):
        path = out / part.name
        if path.is_file() and not path.is_symlink() and path.samefile(part):
            path.unlink()
    links = _links(dataset, out)
    paths = [out / name for name in _OUTPUTS[: None if is_own else -1]]
    refuse_existing(p for p in paths if not (p in links and p.exists() and p.samefile(links[p])))


def is_prepared(out: Path, dataset_name: str) -> bool:
    """Return whether a folder contains this data set. Raise DataError if it is another one, or not
    complete."""
    if not os.path.lexists(out / MANIFEST_NAME):
        return False
    manifest = load_manifest(out)
    if manifest['dataset'] != dataset_name:
        raise DataError(
            f'--out: {out} contains {manifest["dataset"]}, expected {dataset_name}; use a new '
            'folder'
        )
    if is_edited(manifest):
        raise DataError(f'{out / MANIFEST_NAME}: does not match its own SHA-256; {REPAIR}')
    for split, entry in manifest['splits'].items():
        rec = out / f'{split}.rec'
        for path in (rec, *(path for key, path in described(rec).items() if key in entry)):
            if not path.is_file():
                raise DataError(f'{path}: missing, expected as listed in {MANIFEST_NAME}; {REPAIR}')
        if (size := rec.stat().st_size) != entry['rec_bytes']:
            raise DataError(f'{rec}: got {size:,} bytes, expected {entry["rec_bytes"]:,}; {REPAIR}')
    return True


def _sources_digest(dataset: Dataset, resize_shorter: int | None, sources: Iterable[int]) -> str:
    """Return a SHA-256 of what determines the records: class, name and CRC-32 of each image, and
    the size."""
    images = [
        (s.label, s.name, source)
        for s, source in zip(chain(dataset.train, dataset.validation), sources)
    ]
    return hashlib.sha256(repr((dataset.classes, resize_shorter, images)).encode()).hexdigest()


def pack(
    dataset: Dataset,
    out: Path,
    num_workers: int = 1,
    resize_shorter: int | None = None,
    skip_damaged: bool = False,
    state: str = '',
) -> dict:
    """Pack a data set. Return the manifest, written last. Raise DataError for damaged images unless
    skip_damaged.

    state: of the files of the source, as find_state returns it.
    """
    from mlperf_rn50.data.pictures import MAX_STORED_PIXELS, DecoderTest, encode_image

    samples = {'train': dataset.train, 'validation': dataset.validation}
    contents = [[*dataset.recs], *((s.label, s.name, s.size) for s in chain(*samples.values()))]
    folder = (
        out
        / _PARTS
        / hashlib.sha256(repr((PART_SIZE, resize_shorter, contents)).encode()).hexdigest()
    )
    if folder.parent.exists() and not folder.exists():  # parts of a different input
        shutil.rmtree(folder.parent)
    make_folder(folder)
    encode = partial(
        encode_image,
        test=DecoderTest(),
        resize_shorter=resize_shorter,
        max_pixels=MAX_STORED_PIXELS,
    )
    with warnings.catch_warnings():
        # Pillow warns of a large image and rejects one of twice that size
        warnings.simplefilter('ignore')
        parts = {
            name: _write_parts(folder / f'{name}.rec', of_split, encode, num_workers)
            for name, of_split in samples.items()
        }
    damaged = [image for part in parts.values() for image in part.damaged]
    if damaged and not skip_damaged:
        first, listed = some([f'{name} ({why})' for name, why in damaged], 5), folder / _DAMAGED
        write_atomically(listed, ''.join(f'{name}\t{why}\n' for name, why in damaged))
        _publish(listed, out)
        advice = (
            f'run im2rec again without those listed in {out / _DAMAGED}'
            if dataset.recs
            else f'replace those listed in {out / _DAMAGED} or skip them with --skip-corrupt'
        )
        raise DataError(f'{plural(len(damaged), "image")} cannot be decoded: {first}; {advice}')
    splits = {}
    for name, part in parts.items():
        made = folder / f'{name}.rec'
        if not dataset.recs:
            starts = [0, *accumulate(part.sizes)][:-1]
            write_atomically(
                made.with_suffix('.idx'), ''.join(f'{key}\t{s}\n' for key, s in enumerate(starts))
            )
        splits[name] = describe_records(
            dataset.recs.get(name, made), made, part.names, part.checksums
        )
    sources = chain.from_iterable(part.sources for part in parts.values())
    manifest = {
        'format': MANIFEST_FORMAT,
        'dataset': dataset.name,
        'source': dataset.source,
        'resize_shorter': resize_shorter,
        'classes': dataset.classes,
        'splits': splits,
        'skipped': [name for name, _ in damaged],
        'notes': dataset.notes,
        'source_state': state,
        'source_sha256': _sources_digest(dataset, resize_shorter, sources),
    }
    dump_manifest(folder, manifest)
    for link, target in _links(dataset, out).items():
        (folder / link.name).unlink(missing_ok=True)  # an empty .rec
        if not os.path.lexists(link):
            link.symlink_to(os.path.relpath(target.resolve(), out.resolve()))
    for path in (folder / name for name in _OUTPUTS[:-2]):
        if path.exists():
            _publish(path, out)
    shutil.rmtree(folder.parent)
    return manifest


def find_state(options: Namespace) -> str:
    """Return a digest of options, and of name, size, time of change and inode of each file of the
    source, unread.

    Return '' if the source is missing.
    """
    root, paths = Path(options.source or ''), [options.ground_truth]
    state = [options.validation, options.resize_shorter]
    if not root.exists():
        return ''
    if options.dataset == 'im2rec':  # resolved, because --out may be the same folder
        paths += sorted(
            {os.path.realpath(p) for p in root.iterdir() if p.suffix in ('.rec', '.idx', '.lst')}
        )
    elif root.is_dir() and options.source:
        paths += (
            os.path.join(place, name)
            for place, _, names in walk(root, lambda _: None)
            if _PARTS not in place.removeprefix(str(root))
            for name in names
            if name not in _OUTPUTS
        )
    else:
        paths.append(options.source)
    for path in filter(None, paths):
        with suppress(OSError):  # a link to nothing
            found = os.stat(path)
            state.append(
                (path.removeprefix(str(root)), found.st_size, found.st_ctime_ns, found.st_ino)
            )
    return hashlib.sha256(repr(state).encode()).hexdigest()


def prepare(options: Namespace) -> int:
    """Run the prepare command. Return the exit code."""
    num_workers = options.workers or len(os.sched_getaffinity(0))
    if options.verify is not None:
        intact, damaged = verify(Path(options.verify), num_workers)
        _print(*intact, *damaged)
        if damaged:
            _print(f'{options.verify}: damaged; {REPAIR}')
        return EXIT_FAILED if damaged else EXIT_OK
    out, name, is_own = Path(options.out), options.dataset, options.dataset in ('folder', 'im2rec')
    if is_own:
        source = Path(options.source or '').resolve().name
        # other images must not count as ImageNet
        name = options.name or (source if source != IMAGENET else name)
    try:
        if is_prepared(out, name):
            _check_same(load_manifest(out), options, name, num_workers)
            _print(f'{out}: {name} is already prepared; to prepare it again, use another --out')
        else:
            _prepare_new(options, out, name, is_own, num_workers)
        if is_own and name != IMAGENET:
            _print(f'next: {write_train_yaml(out, name)}')
    except OSError as e:
        raise DataError(
            f'--out: {e.filename or out}: {e.strerror}; {describe_disk(out)}; free space or fix '
            'the '
            'permissions, then run prepare again (it keeps finished parts)'
        ) from e
    return EXIT_OK


def _print(*lines: str) -> None:
    """Print lines with names of classes and files, which are not trusted."""
    for line in lines:
        print(printable(line), flush=True)


def _check_same(manifest: dict, options: Namespace, name: str, num_workers: int) -> None:
    """Raise DataError if the source has other classes or images than when it was prepared.

    Images are read only if the state of a file has changed. Older manifests have no state; for
    these, only the classes and numbers of images in folders are compared.
    """
    state = find_state(options)
    unknown = '' if options.dataset == 'folder' else state
    if state in ('', manifest.get('source_state', unknown)):
        return
    found, skipped = find_dataset(options, name), {*manifest.get('skipped', ())}
    splits = found.train, found.validation
    now = [sum(s.name not in skipped for s in samples) for samples in splits]
    before = [split['num_images'] for split in manifest['splits'].values()]
    if (now, found.classes) != (before, manifest['classes']):
        raise DataError(
            f'--source: got {now} images of {len(found.classes)} classes, expected {before} of '
            f'{len(manifest["classes"])}, as in --out; use another --out'
        )
    if 'source_sha256' in manifest:
        blocks = [s[k : k + PART_SIZE] for s in splits for k in range(0, len(s), PART_SIZE)]
        sources = chain.from_iterable(
            thread_map(
                lambda block: [*map(_source_of, block)],
                blocks,
                max_workers=num_workers,
                desc='compare',
                disable=None,
            )
        )
        if _sources_digest(found, options.resize_shorter, sources) != manifest['source_sha256']:
            raise DataError(
                '--source: got other images, names, labels or --resize-shorter than those in '
                f'{options.out}; use another --out'
            )


def _prepare_new(options: Namespace, out: Path, name: str, is_own: bool, num_workers: int) -> None:
    state = find_state(options)
    found = find_dataset(options, name)
    _print(*found.notes)
    with folder_lock(out, '--out', OUTPUT_LOCK):
        _claim(out, found, is_own)
        manifest = pack(
            found, out, num_workers, options.resize_shorter, options.skip_corrupt, state
        )
    for split, entry in manifest['splits'].items():
        _print(
            f'{out}/{split}.rec: {entry["num_images"]:,} images of {name}, '
            f'{entry["rec_bytes"] / 1e6:,.1f} MB'
        )
    if manifest['skipped']:
        _print(
            f'skipped {plural(len(manifest["skipped"]), "damaged image")}, listed in '
            f'{out / MANIFEST_NAME}'
        )
