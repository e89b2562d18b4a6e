"""Packing of images into RecordIO: <out>/{train,validation}.{rec,idx,index.npy,crc.npy} and manifest.json.

Parallel workers pack parts of PART_SIZE images. Finished parts are kept until they are joined at the end, so that an
interrupted preparation can resume.
"""
import ctypes
import hashlib
import io
import json
import os
import shutil
import signal
from argparse import Namespace
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import chain
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Thread

import numpy as np
from tqdm import tqdm

from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits, folder
from mlperf_rn50.data.records import MANIFEST_FORMAT, MANIFEST_NAME, index_path, load_manifest, parse_index
from mlperf_rn50.data.verify import checksum, checksums_path, dump_array, dump_manifest, print_verdict, size_problem
from mlperf_rn50.errors import EXIT_OK, DataError
from mlperf_rn50.files import HashedFile, no_link, read_bytes, replacing, write_atomically
from mlperf_rn50.jsonl import decode
from mlperf_rn50.text import plural, some

_CLOSING_LIMIT_S = 5.0
PART_SIZE = 1000
_COPY_BYTES = 1 << 24
_JPEG_QUALITY = 95


def find_dataset(options: Namespace, name: str) -> Dataset:
    source = Path(options.source) if options.source else None
    if options.dataset == 'digits':
        return digits()
    if options.dataset == 'cifar10':
        return cifar10(source)
    if source is None:
        raise DataError(f'--source: missing; expected the folder of the {options.dataset} images')
    if options.dataset == 'imagenet':
        truth = Path(options.ground_truth) if options.ground_truth else None
        return imagenet(source, truth, options.allow_partial)
    return folder(source, name)


def pack_image(encoded: bytes, resize_shorter: int | None) -> bytes:
    """Check an image by decoding it, and return the bytes to store: unchanged, or resized. May raise any exception."""
    from PIL import Image
    with Image.open(io.BytesIO(encoded)) as image:
        image.load()
        if resize_shorter is None or min(image.size) == resize_shorter:
            return encoded
        scale = resize_shorter / min(image.size)
        width, height = (max(resize_shorter, round(side * scale)) for side in image.size)
        buffer = io.BytesIO()
        resized = image.convert('RGB').resize((width, height), Image.Resampling.BICUBIC)
        resized.save(buffer, 'JPEG', quality=_JPEG_QUALITY)
        return buffer.getvalue()


def write_part(stem: Path, first_id: int, samples: list[Sample], resize_shorter: int | None) -> int:
    """Write <stem>.rec, .idx and finally .json, a list of the damaged images; return the number of samples."""
    import mxnet as mx
    damaged = []
    for suffix in ('.idx', '.rec'):  # a link, which MXNet would follow
        stem.with_suffix(suffix).unlink(missing_ok=True)
    record = mx.recordio.MXIndexedRecordIO(f'{stem}.idx', f'{stem}.rec', 'w')
    for sample_id, sample in enumerate(samples, start=first_id):
        try:
            stored = pack_image(sample.read(), resize_shorter)
        except ModuleNotFoundError:  # Pillow is missing or incomplete; the image is not damaged
            raise
        except Exception as e:  # Pillow's decoders raise many types of exceptions
            damaged.append([sample.name, f'{type(e).__name__}: {" ".join(str(e).split())[:120]}'])
            continue
        header = mx.recordio.IRHeader(0, sample.label, sample_id, 0)
        record.write_idx(sample_id, mx.recordio.pack(header, stored))
    record.close()
    write_atomically(stem.with_suffix('.json'), json.dumps(damaged))
    return len(samples)


def _write_parts(parts: Path, split: str, samples: list[Sample], num_workers: int,
                 resize_shorter: int | None) -> list[Path]:
    """Write the missing parts of a split; return the stems of all parts."""
    starts = range(0, len(samples), PART_SIZE)
    stems = [parts / f'{split}_{i:05d}' for i in range(len(starts))]
    missing = [(stem, start, samples[start:start + PART_SIZE], resize_shorter)
               for stem, start in zip(stems, starts) if not stem.with_suffix('.json').exists()]
    num_done = len(samples) - sum(len(m[2]) for m in missing)
    with tqdm(total=len(samples), initial=num_done, desc=f'prepare {split}', unit='img', disable=None) as bar:
        if len(missing) <= 1 or num_workers == 1:
            for part in missing:
                bar.update(write_part(*part))
            return stems
        # A forked process may hang, because MXNet has threads.
        pool = ProcessPoolExecutor(num_workers, get_context('spawn'), _follow_parent)
        with ExitStack() as cleanup:
            cleanup.callback(pool.shutdown)
            try:
                for done in as_completed(_submit(pool, missing)):
                    bar.update(done.result())
            except KeyboardInterrupt:
                cleanup.pop_all()
                for worker in active_children():
                    worker.kill()
                # Python before 3.11.5 waits forever if a worker is killed while work is being sent to it.
                closing = Thread(target=pool.shutdown, daemon=True)
                closing.start()
                closing.join(_CLOSING_LIMIT_S)
                raise
    return stems


def _submit(pool: ProcessPoolExecutor, parts: list) -> list[Future]:
    """Start the workers with SIGINT blocked, because the parent ends them on Ctrl-C."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return [pool.submit(write_part, *part) for part in parts]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _follow_parent() -> None:
    """Let the kernel kill this worker when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _damaged_images(stems: Iterable[Path]) -> list[tuple[str, str]]:
    """Return (name, reason) for each image in these parts that cannot be decoded."""
    images: list[tuple[str, str]] = []
    for path in (stem.with_suffix('.json') for stem in stems):
        damaged = decode(read_bytes(path), list[tuple[str, str]])
        if damaged is None:
            raise DataError(f'{path}: damaged; remove {path.parent} and run prepare again')
        images += damaged
    return images


def _write_index(rec_path: Path) -> str:
    """Write the memory-mapped index of a .rec from its .idx; return the SHA-256 of the new index."""
    return dump_array(index_path(rec_path), parse_index(rec_path.with_suffix('.idx'), rec_path.stat().st_size))


def _checksums(part: Path) -> list[int]:
    """Return the record checksums of a part, in the order of its .idx."""
    size = part.stat().st_size
    if not size:  # all images are damaged
        return []
    index = parse_index(part.with_suffix('.idx'), size)
    with open(part, 'rb', buffering=0) as f:
        checksums = [checksum(f.fileno(), int(start), int(length)) for start, length in index.T]
    known = [c for c in checksums if c is not None]
    if len(known) < len(checksums):
        raise DataError(f'{part}: truncated or unreadable; remove {part.parent} and run prepare again')
    return known


def _join(stems: list[Path], target: Path) -> dict:
    """Join parts into target.rec with indexes and checksums; return the manifest entry of the split."""
    offset, lines, checksums = 0, [], []
    rec_path = target.with_suffix('.rec')
    with replacing(rec_path) as rec:
        hashed = HashedFile(rec)
        for stem in stems:
            for line in stem.with_suffix('.idx').read_text().splitlines():
                key, start = line.split()
                lines.append(f'{key}\t{int(start) + offset}\n')
            checksums += _checksums(stem.with_suffix('.rec'))
            with open(stem.with_suffix('.rec'), 'rb', opener=no_link) as part:
                shutil.copyfileobj(part, hashed, _COPY_BYTES)
            offset = rec.tell()
        index = ''.join(lines)
        write_atomically(target.with_suffix('.idx'), index)
    return {'num_images': len(lines), 'rec_bytes': offset, 'rec_sha256': hashed.hexdigest(),
            'crc_sha256': dump_array(checksums_path(rec_path), np.array(checksums, np.uint32)),
            'idx_sha256': hashlib.sha256(index.encode()).hexdigest(), 'index_sha256': _write_index(rec_path)}


def _open_parts(parts: Path, dataset: Dataset, resize_shorter: int | None) -> None:
    """Create the folder for parts. Empty it first unless its fingerprint file matches the present input."""
    digest = hashlib.sha256(repr((PART_SIZE, resize_shorter)).encode())
    for s in chain(dataset.train, dataset.validation):
        digest.update(f'{s.label} {s.name} {s.size}\n'.encode())
    note = parts / 'fingerprint'
    if parts.exists() and not (note.exists() and note.read_text() == digest.hexdigest()):
        shutil.rmtree(parts)
    parts.mkdir(parents=True, exist_ok=True)
    write_atomically(note, digest.hexdigest())


def is_prepared(out: Path, dataset_name: str) -> bool:
    """Return whether a folder contains this complete data set; raise DataError if it contains a different one."""
    if not (out / MANIFEST_NAME).exists():
        return False
    manifest = load_manifest(out)
    if manifest['dataset'] != dataset_name:
        raise DataError(f'--out: {out} contains {manifest["dataset"]}, expected {dataset_name}; use a new folder')
    return not any(size_problem(out / f'{name}.rec', split) for name, split in manifest['splits'].items())


def add_indexes(out: Path) -> list[Path]:
    """Write the missing or damaged memory-mapped indexes of a prepared folder; return the paths written."""
    manifest, added = load_manifest(out), []
    for name, split in manifest['splits'].items():
        path = index_path(out / f'{name}.rec')
        if not path.exists() or hashlib.sha256(read_bytes(path)).hexdigest() != split.get('index_sha256'):
            split['index_sha256'] = _write_index(out / f'{name}.rec')
            added.append(path)
    if added:
        dump_manifest(out, manifest)
    return added


def pack(dataset: Dataset, out: Path, num_workers: int = 1, resize_shorter: int | None = None,
         skip_damaged: bool = False) -> dict:
    """Pack a data set; return the manifest, written last. Raise DataError for damaged images unless skip_damaged."""
    parts = out / '.parts'
    _open_parts(parts, dataset, resize_shorter)
    stems = {name: _write_parts(parts, name, samples, num_workers, resize_shorter)
             for name, samples in (('train', dataset.train), ('validation', dataset.validation))}
    damaged = _damaged_images(chain.from_iterable(stems.values()))
    if damaged and not skip_damaged:
        listed = out / 'damaged.txt'
        write_atomically(listed, ''.join(f'{name}\t{why}\n' for name, why in damaged))
        names = some([f'{name} ({why})' for name, why in damaged], 5)
        raise DataError(f'{plural(len(damaged), "image")} cannot be decoded: {names}; replace those listed in {listed} '
                        'or skip them with --skip-corrupt')
    manifest = {'format': MANIFEST_FORMAT, 'dataset': dataset.name, 'source': dataset.source,
                'resize_shorter': resize_shorter, 'classes': dataset.classes,
                'splits': {name: _join(group, out / name) for name, group in stems.items()},
                'skipped': [name for name, _ in damaged]}
    dump_manifest(out, manifest)
    shutil.rmtree(parts)
    return manifest


def prepare(options: Namespace) -> int:
    """Run the prepare command; return the exit code."""
    num_workers = options.workers or len(os.sched_getaffinity(0))
    if options.verify is not None:
        return print_verdict(Path(options.verify), num_workers)
    out = Path(options.out)
    name = options.name if options.dataset == 'folder' and options.name else options.dataset
    if is_prepared(out, name):
        try:
            added = add_indexes(out)
        except OSError as e:
            raise DataError(f'--out: {e.filename or out}: {e.strerror}; cannot write the missing indexes') from e
        print(f'{out}: {name} is already prepared'
              + (f'; added {", ".join(p.name for p in added)}, images unchanged' if added else ''))
        return EXIT_OK
    dataset = find_dataset(options, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest = pack(dataset, out, num_workers, options.resize_shorter, options.skip_corrupt)
    except OSError as e:
        raise DataError(f'--out: {e.filename or out}: {e.strerror}; run prepare again (it keeps finished parts)') from e
    for split, entry in manifest['splits'].items():
        print(f'{out}/{split}.rec: {entry["num_images"]:,} images of {name}, {entry["rec_bytes"] / 1e6:,.1f} MB')
    if manifest['skipped']:
        print(f'skipped {plural(len(manifest["skipped"]), "damaged image")}, listed in {out / MANIFEST_NAME}')
    return EXIT_OK
