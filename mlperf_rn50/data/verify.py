"""Is a prepared folder still what was written? Its manifest, its indexes, and every record of its images.

manifest.json holds a SHA-256 of itself and of every file; <split>.crc.npy holds the CRC-32 of every record. Older
folders have no checksums of records: there the SHA-256 of the whole file shows whether something differs, not what.
What is missing or not what was written raises DataError.
"""
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mlperf_rn50.data.records import MANIFEST_NAME, RecordFile, index_path, load_manifest, parse_index
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, DataError
from mlperf_rn50.files import regular_file, write_atomically

_BLOCK_BYTES = 1 << 24
_NUM_NAMED = 10
_AGAIN = 'copy the folder again from where it is right, or prepare it again into an empty one'


def checksums_path(rec_path: Path) -> Path:
    """The checksums of the records of a .rec: CRC-32 of each, framing included, in the order of its index.

    NumPy's format, uint32, (num_images,).
    """
    return rec_path.with_suffix('.crc.npy')


def checksum(file: int, start: int, length: int) -> int | None:
    """The CRC-32 of a record of an open file; None where the file ends before it does or cannot be read."""
    try:
        stored = os.pread(file, length, start)
    except OSError:
        return None
    return zlib.crc32(stored) if len(stored) == length else None


def dump_array(path: Path, array: np.ndarray) -> str:
    """Write an array in NumPy's format; return the SHA-256 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def load_checksums(rec_path: Path, entry: dict[str, Any]) -> np.ndarray | None:
    """The checksums of the records of a split, uint32, (num_images,); None for an older folder, which has none."""
    path = checksums_path(rec_path)
    if 'crc_sha256' not in entry:
        return None
    if problem := _file_problem(path, entry['crc_sha256']):
        raise DataError(f'{problem}; {_AGAIN}')
    return np.load(path)


def _size_problem(rec_path: Path, entry: dict[str, Any]) -> str:
    """Return that a .rec is missing or has another size than its entry in the manifest says; '' where it is right."""
    try:
        size = rec_path.stat().st_size
    except OSError as e:
        return f'{rec_path}: {e.strerror}'
    return '' if size == entry['rec_bytes'] else f'{rec_path}: got {size:,} bytes, expected {entry["rec_bytes"]:,}'


def check_size(rec_path: Path, entry: dict[str, Any]) -> None:
    """Raise DataError for a .rec that is missing or has another size than its entry in the manifest says."""
    if problem := _size_problem(rec_path, entry):
        raise DataError(f'{problem}; {_AGAIN}')


def check_sample(records: RecordFile, entry: dict[str, Any], num_records: int, seed: int) -> int:
    """Reads some records, drawn by a seed, and the last one; returns how many."""
    checksums = load_checksums(records.path, entry)
    last = len(records) - 1
    drawn = np.random.default_rng(seed).permutation(last)[:num_records - 1]
    for position in [*map(int, drawn), last]:
        records.read(position)
        if checksums is not None and checksum(*records.place(position)) != checksums[position]:
            raise DataError(f'{records.path}, record {position}: not what was written; {_AGAIN}')
    return len(drawn) + 1


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own."""
    content = {k: v for k, v in manifest.items() if k != 'sha256'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def dump_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a folder, with its digest."""
    manifest['sha256'] = manifest_digest(manifest)
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=1) + '\n')


def _sha256(path: Path, progress: Callable[[int], Any] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with open(path, 'rb', opener=regular_file) as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _file_problem(path: Path, sha256: str) -> str:
    """Return why a file is not the one whose SHA-256 the manifest has; '' where it is."""
    try:
        return '' if _sha256(path) == sha256 else f'{path}: not the file whose SHA-256 {MANIFEST_NAME} holds'
    except OSError as e:
        return f'{path}: {e.strerror}'


def _blocks(index: np.ndarray) -> list[np.ndarray]:
    """Positions of records that lie one after another, in blocks that are worth a thread's turn."""
    ordered = np.argsort(index[0])
    ends = np.cumsum(index[1][ordered])
    return [b for b in np.split(ordered, np.searchsorted(ends, np.arange(_BLOCK_BYTES, ends[-1], _BLOCK_BYTES)))
            if b.size]


def _differing(rec_path: Path, index: np.ndarray, checksums: np.ndarray, num_workers: int) -> list[int]:
    """Positions of the records that are not what was written."""
    with (open(rec_path, 'rb', buffering=0, opener=regular_file) as f, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(checksums), desc=f'verify {rec_path.stem}', unit='img', disable=None) as bar):
        def look(block: np.ndarray) -> tuple[int, list[int]]:
            return len(block), [int(p) for p in block
                                if checksum(f.fileno(), int(index[0, p]), int(index[1, p])) != checksums[p]]
        found = []
        for done in as_completed([pool.submit(look, block) for block in _blocks(index)]):
            bar.update(done.result()[0])
            found += done.result()[1]
    return sorted(found)


def _verify_whole(rec_path: Path, entry: dict[str, Any]) -> tuple[bool, str]:
    """Return the verdict on a .rec whose records have no usable checksums, and the line for it."""
    with tqdm(total=entry['rec_bytes'], desc=f'verify {rec_path.stem}', unit='B', unit_scale=True, disable=None) as bar:
        is_right = _sha256(rec_path, bar.update) == entry['rec_sha256']
    why = ('the checksums of its records or its indexes are damaged' if 'crc_sha256' in entry else
           'an older folder, without checksums of records')
    verdict = 'as it was written' if is_right else 'not what was written'
    unknown = '' if is_right else '; which records differ is unknown'
    return is_right, f'{rec_path}: {verdict}, by the SHA-256 of the whole file{unknown} ({why})'


def _verify_records(rec_path: Path, index: np.ndarray, num_workers: int) -> tuple[bool, str]:
    """Return the verdict on the records of a .rec, and the line for it."""
    checksums = np.load(checksums_path(rec_path))
    positions = _differing(rec_path, index, checksums, num_workers)
    if not positions:
        return True, f'{rec_path}: {len(checksums):,} records are as they were written'
    named = ', '.join(map(str, positions[:_NUM_NAMED]))
    if len(positions) > _NUM_NAMED:
        named += f' and {len(positions) - _NUM_NAMED:,} more'
    return False, (f'{rec_path}: {len(positions):,} of {len(checksums):,} records are not what was written: {named} '
                   '(counted from 0)')


def _verify_split(rec_path: Path, entry: dict[str, Any], num_workers: int) -> Iterator[tuple[bool, str]]:
    """Verdicts on the files of a split, right or wrong, and the line for each."""
    paths = {'index_sha256': index_path(rec_path), 'idx_sha256': rec_path.with_suffix('.idx'),
             'crc_sha256': checksums_path(rec_path)}
    problems = {key: _file_problem(path, entry[key]) for key, path in paths.items() if key in entry}
    whole = {key for key, problem in problems.items() if not problem}
    yield from ((False, problem) for problem in problems.values() if problem)
    if problem := _size_problem(rec_path, entry):
        yield False, problem
    if not rec_path.exists():
        return
    if 'crc_sha256' in whole and len(whole) > 1:
        index = (np.load(paths['index_sha256']) if 'index_sha256' in whole else
                 parse_index(paths['idx_sha256'], entry['rec_bytes']))
        yield _verify_records(rec_path, index, num_workers)
    else:
        yield _verify_whole(rec_path, entry)


def verify(folder: Path, num_workers: int) -> tuple[list[str], list[str]]:
    """Return what is right of a prepared folder, and what is not, in lines.

    Raises:
        DataError: there is no manifest.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise DataError(f'--verify: {folder} holds no {MANIFEST_NAME}; expected a folder that prepare has made')
    found: list[tuple[bool, str]] = []
    try:
        manifest = load_manifest(folder)
        if manifest_digest(manifest) != manifest.get('sha256', manifest_digest(manifest)):
            found.append((False, f'{path}: changed since it was written'))
        for name, entry in manifest['splits'].items():
            found += _verify_split(folder / f'{name}.rec', entry, num_workers)
    except DataError as e:
        found.append((False, str(e)))
    except OSError as e:
        found.append((False, f'{e.filename or folder}: {e.strerror}'))
    except (LookupError, TypeError, ValueError, AttributeError) as e:  # what a manifest lacks
        found.append((False, f'{path}: not a manifest ({type(e).__name__}: {e})'))
    return [line for is_right, line in found if is_right], [line for is_right, line in found if not is_right]


def print_verdict(folder: Path, num_workers: int) -> int:
    """Verify a folder and print the verdict; return the exit code."""
    right, wrong = verify(folder, num_workers)
    for line in right + wrong:
        print(line)
    if wrong:
        print(f'{folder}: not what was written; {_AGAIN}')
    return EXIT_FAILED if wrong else EXIT_OK
