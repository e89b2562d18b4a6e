"""Packing of images into RecordIO: <out>/{train,validation}.{rec,idx,index.npy,crc.npy} and manifest.json.

Parallel workers pack parts of PART_SIZE images. Finished parts are kept until they are joined at the end, so that an
interrupted preparation can resume.
"""
import ctypes
import hashlib
import os
import re
import shutil
import signal
import struct
from argparse import Namespace
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from itertools import chain
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Thread

import msgspec
from tqdm import tqdm

from mlperf_rn50.data import verify
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.samples import Dataset, Sample, digits
from mlperf_rn50.data.records import MAGIC, MANIFEST_FORMAT, MANIFEST_NAME, index_path, load_manifest
from mlperf_rn50.data.verify import dump_manifest, print_verdict, record_checksums, size_problem, write_index
from mlperf_rn50.errors import EXIT_OK, DataError, RunFailed
from mlperf_rn50.files import HashedFile, describe_disk, no_link, read_bytes, replacing, sync, write_atomically
from mlperf_rn50.jsonl import decode
from mlperf_rn50.text import plural, some

_CLOSING_LIMIT_S = 5.0
PART_SIZE = 1000
_COPY_BYTES = 1 << 24


class _Part(msgspec.Struct):
    """Names of the images that are stored in a part, stored in another format, and not stored with the reason."""

    names: list[str] = []
    converted: list[str] = []
    damaged: list[tuple[str, str]] = []


def find_dataset(options: Namespace, name: str) -> Dataset:
    source = Path(options.source) if options.source else None
    if options.dataset == 'digits':
        return digits()
    if options.dataset == 'cifar10':
        return cifar10(source)
    if source is None:
        raise DataError(f'--source: missing; expected the folder of the {options.dataset} images')
    if options.dataset == 'imagenet':
        return imagenet(source, Path(options.ground_truth) if options.ground_truth else None, options.allow_partial)
    return im2rec(source, name) if options.dataset == 'im2rec' else folder(source, name, options.validation)


def frame(payload: bytes) -> bytes:
    """Return a payload as a RecordIO record, like MXNet's writer, which ignores late errors of the disk."""
    if len(payload) >= 1 << 29:
        raise ValueError(f'got {len(payload)} bytes, expected less than {1 << 29}')
    cuts = [m.start() for m in re.finditer(re.escape(MAGIC), payload) if m.start() % 4 == 0]
    pieces = [payload[start:end] for start, end in zip([0, *(cut + 4 for cut in cuts)], [*cuts, len(payload)])]
    kinds = [1, *[2] * len(cuts[1:]), 3] if cuts else [0]  # first, middle, last and whole
    heads = [MAGIC + struct.pack('<I', kind << 29 | len(piece)) for kind, piece in zip(kinds, pieces)]
    return b''.join(chain(*zip(heads, pieces))) + bytes(-len(payload) % 4)


def write_part(stem: Path, first_id: int, samples: list[Sample], resize_shorter: int | None) -> int:
    """Write <stem>.rec, .idx and finally .json, a _Part; return the number of samples."""
    import mxnet as mx

    from mlperf_rn50.data.pictures import encode_image
    from mlperf_rn50.data.pipeline import DecoderTest
    part, test = _Part(), DecoderTest()
    for suffix in ('.idx', '.rec'):  # a link, which open() would follow
        stem.with_suffix(suffix).unlink(missing_ok=True)
    with open(stem.with_suffix('.rec'), 'xb') as rec, open(stem.with_suffix('.idx'), 'x') as idx:
        for sample_id, sample in enumerate(samples, start=first_id):
            encoded = sample.read()
            try:
                stored = encode_image(encoded, test, resize_shorter)
                if sample.is_record and stored != encoded:
                    raise ValueError('DALI cannot decode it')
                record = b'' if sample.is_record else frame(mx.recordio.pack((0, sample.label, sample_id, 0), stored))
            except ModuleNotFoundError:  # Pillow is missing or incomplete; the image is not damaged
                raise
            except Exception as e:
                reason = ' '.join(str(e).split()).partition(' <_io')[0]  # without the name of a buffer
                part.damaged.append((sample.name, f'{type(e).__name__}: {reason[:120]}'))
                continue
            part.names.append(sample.name)
            if resize_shorter is None and stored != encoded:
                part.converted.append(sample.name)
            if record:
                idx.write(f'{sample_id}\t{rec.tell()}\n')
                rec.write(record)
        sync(rec)
    write_atomically(stem.with_suffix('.json'), msgspec.json.encode(part))
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


def _read_part(stem: Path) -> _Part:
    path = stem.with_suffix('.json')
    if (part := decode(read_bytes(path), _Part)) is None:
        raise DataError(f'{path}: damaged; remove {path.parent} and run prepare again')
    return part


def _join(stems: list[Path], target: Path, names: list[str]) -> dict:
    """Join parts into target.rec with indexes and checksums; return the manifest entry of the split."""
    offset, lines, checksums = 0, [], []
    rec_path = target.with_suffix('.rec')
    with replacing(rec_path) as rec:
        hashed = HashedFile(rec)
        for stem in stems:
            for line in stem.with_suffix('.idx').read_text().splitlines():
                key, start = line.split()
                lines.append(f'{key}\t{int(start) + offset}\n')
            checksums += record_checksums(stem.with_suffix('.rec'))
            with open(stem.with_suffix('.rec'), 'rb', opener=no_link) as part:
                shutil.copyfileobj(part, hashed, _COPY_BYTES)
            offset = rec.tell()
        write_atomically(target.with_suffix('.idx'), ''.join(lines))
    return verify.describe_records(rec_path, names, hashed.hexdigest(), checksums)


def _link(rec: Path, target: Path, names: list[str]) -> dict:
    """Link to a .rec and its .idx, unless they are at target already; return the manifest entry of the split."""
    for suffix in ('.rec', '.idx'):
        path, link = rec.with_suffix(suffix), target.with_suffix(suffix)
        if not (link.exists() and link.samefile(path)):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(path.resolve(), link.parent.resolve()))
    return verify.describe_records(target.with_suffix('.rec'), names)


def _open_parts(parts: Path, dataset: Dataset, resize_shorter: int | None) -> None:
    """Create the folder for parts. Empty it first unless its fingerprint file matches the present input."""
    digest = hashlib.sha256(repr((PART_SIZE, resize_shorter, 'names')).encode())
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
            split['index_sha256'] = write_index(out / f'{name}.rec')
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
    finished = {name: [_read_part(stem) for stem in group] for name, group in stems.items()}
    damaged = [image for part in chain(*finished.values()) for image in part.damaged]
    first = some([f'{name} ({why})' for name, why in damaged], 5)
    if damaged and dataset.recs:
        shutil.rmtree(parts)
        with suppress(OSError):  # there are other files
            out.rmdir()
        raise DataError(f'--source: {dataset.source}: {plural(len(damaged), "image")} cannot be decoded: {first}; run '
                        'im2rec again without them')
    if damaged and not skip_damaged:
        listed = out / 'damaged.txt'
        write_atomically(listed, ''.join(f'{name}\t{why}\n' for name, why in damaged))
        raise DataError(f'{plural(len(damaged), "image")} cannot be decoded: {first}; replace those listed in {listed} '
                        'or skip them with --skip-corrupt')
    splits = {}
    for name, group in stems.items():
        names = [image for part in finished[name] for image in part.names]
        splits[name] = (_link(dataset.recs[name], out / name, names) if dataset.recs else
                        _join(group, out / name, names))
    manifest = {'format': MANIFEST_FORMAT, 'dataset': dataset.name, 'source': dataset.source,
                'resize_shorter': resize_shorter, 'classes': dataset.classes,
                'splits': splits, 'skipped': [name for name, _ in damaged], 'notes': dataset.notes,
                'converted': [name for part in chain(*finished.values()) for name in part.converted]}
    dump_manifest(out, manifest)
    shutil.rmtree(parts)
    return manifest


def prepare(options: Namespace) -> int:
    """Run the prepare command; return the exit code."""
    num_workers = options.workers or len(os.sched_getaffinity(0))
    if options.verify is not None:
        return print_verdict(Path(options.verify), num_workers)
    out = Path(options.out)
    name = options.name if options.dataset in ('folder', 'im2rec') and options.name else options.dataset
    if is_prepared(out, name):
        try:
            added = add_indexes(out)
        except OSError as e:
            raise DataError(f'--out: {e.filename or out}: {e.strerror}; cannot write the missing indexes') from e
        print(f'{out}: {name} is already prepared'
              + (f'; added {", ".join(p.name for p in added)}, images unchanged' if added else ''))
        return EXIT_OK
    try:
        found = find_dataset(options, name)
    except OSError as e:
        is_link = isinstance(e, FileNotFoundError) and os.path.islink(e.filename)
        reason = 'link to a missing file' if is_link else e.strerror
        raise DataError(f'--source: {e.filename or options.source}: {reason}; repair, move or remove it') from e
    if found.notes:
        print(*found.notes, sep='\n', flush=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest = pack(found, out, num_workers, options.resize_shorter, options.skip_corrupt)
    except OSError as e:
        raise DataError(f'--out: {e.filename or out}: {e.strerror}; {describe_disk(out)}; free space or fix the '
                        'permissions, then run prepare again (it keeps finished parts)') from e
    except BrokenProcessPool as e:
        raise RunFailed('a worker was killed, as if memory runs out; run prepare again with fewer --workers') from e
    for split, entry in manifest['splits'].items():
        print(f'{out}/{split}.rec: {entry["num_images"]:,} images of {name}, {entry["rec_bytes"] / 1e6:,.1f} MB')
    if converted := manifest['converted']:
        print(f'converted {plural(len(converted), "image")} to PNG, because DALI cannot use them: {some(converted, 5)}')
    if manifest['skipped']:
        print(f'skipped {plural(len(manifest["skipped"]), "damaged image")}, listed in {out / MANIFEST_NAME}')
    return EXIT_OK
