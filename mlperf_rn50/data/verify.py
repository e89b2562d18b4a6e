"""Verification of a prepared folder (manifest, indexes and image records), and the format of its checksums.

manifest.json contains SHA-256 digests of itself and of every file; <split>.crc.npy contains the CRC-32 of each record.
Older folders have no record checksums; their whole-file SHA-256 detects a difference but does not locate it.
"""
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mlperf_rn50.data.records import (
    MANIFEST_NAME,
    RecordFile,
    checksums_path,
    index_path,
    load_manifest,
    names_path,
    parse_index,
)
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, DataError
from mlperf_rn50.files import regular_file, write_atomically
from mlperf_rn50.text import some

_BLOCK_BYTES = 1 << 24
_NUM_NAMED = 10
_REPAIR = 'copy the folder from an intact source, or prepare it again in an empty folder'


def checksum(file: int, start: int, length: int) -> int | None:
    """Return the CRC-32 of a record in an open file; None if it is truncated or unreadable."""
    try:
        stored = os.pread(file, length, start)
    except OSError:
        return None
    return zlib.crc32(stored) if len(stored) == length else None


def dump_array(path: Path, array: np.ndarray) -> str:
    """Write an array in .npy format; return the SHA-256 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def write_index(rec_path: Path) -> str:
    """Write the memory-mapped index of a .rec from its .idx; return the SHA-256 of the new index."""
    return dump_array(index_path(rec_path), parse_index(rec_path.with_suffix('.idx'), rec_path.stat().st_size))


def record_checksums(part: Path) -> list[int]:
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


def describe_records(rec_path: Path, names: list[str], sha256: str = '', checksums: Sequence[int] = ()) -> dict:
    """Write the files that describe a .rec with its .idx; return the manifest entry; compute missing digests."""
    checksums = checksums or record_checksums(rec_path)
    lines = ''.join(f'{name}\n' for name in names)
    write_atomically(names_path(rec_path), lines)
    return {'num_images': len(checksums), 'rec_bytes': rec_path.stat().st_size,
            'rec_sha256': sha256 or sha256_of(rec_path),
            'crc_sha256': dump_array(checksums_path(rec_path), np.array(checksums, np.uint32)),
            'idx_sha256': sha256_of(rec_path.with_suffix('.idx')), 'index_sha256': write_index(rec_path),
            'names_sha256': hashlib.sha256(lines.encode()).hexdigest()}


def size_problem(rec_path: Path, entry: dict[str, Any]) -> str:
    """Return an error message if a .rec is missing or its size differs from its manifest entry, else ''."""
    try:
        size = rec_path.stat().st_size
    except OSError as e:
        return f'{rec_path}: {e.strerror}'
    return '' if size == entry['rec_bytes'] else f'{rec_path}: got {size:,} bytes, expected {entry["rec_bytes"]:,}'


def check_sample(records: RecordFile, entry: dict[str, Any], num_records: int, seed: int) -> int:
    """Check a split's last record and some random ones; return their number. Raise DataError if one does not match."""
    path, checksums = checksums_path(records.path), None
    if 'crc_sha256' in entry:  # missing in older folders
        if problem := _file_problem(path, entry['crc_sha256']):
            raise DataError(f'{problem}; {_REPAIR}')
        checksums = np.load(path)
    last = len(records) - 1
    drawn = np.random.default_rng(seed).permutation(last)[:num_records - 1]
    for position in [*map(int, drawn), last]:
        records.read(position)
        if checksums is not None and checksum(*records.place(position)) != checksums[position]:
            raise DataError(f'{records.path}, record {position}: does not match its checksum; {_REPAIR}')
    return len(drawn) + 1


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest, excluding the digest in it."""
    content = {k: v for k, v in manifest.items() if k != 'sha256'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_edited(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest does not match its own digest, which older ones do not have."""
    return manifest.get('sha256', digest := manifest_digest(manifest)) != digest


def dump_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    manifest['sha256'] = manifest_digest(manifest)
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=1) + '\n')


def sha256_of(path: Path, progress: Callable[[int], Any] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with open(path, 'rb', opener=regular_file) as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _file_problem(path: Path, sha256: str) -> str:
    """Return an error message if a file is unreadable or does not match a SHA-256, else ''."""
    try:
        return '' if sha256_of(path) == sha256 else f'{path}: does not match its SHA-256 in {MANIFEST_NAME}'
    except OSError as e:
        return f'{path}: {e.strerror}'


def _blocks(index: np.ndarray) -> list[np.ndarray]:
    """Return all positions of an index, in the order of the file, in blocks of about _BLOCK_BYTES."""
    ordered = np.argsort(index[0])
    ends = np.cumsum(index[1][ordered])
    return [b for b in np.split(ordered, np.searchsorted(ends, np.arange(_BLOCK_BYTES, ends[-1], _BLOCK_BYTES)))
            if b.size]


def _verify_whole(rec_path: Path, entry: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a .rec without usable record checksums is intact, and a line to print."""
    with tqdm(total=entry['rec_bytes'], desc=f'verify {rec_path.stem}', unit='B', unit_scale=True, disable=None) as bar:
        is_intact = sha256_of(rec_path, bar.update) == entry['rec_sha256']
    reason = ('record checksums or indexes are damaged' if 'crc_sha256' in entry else
              'older folder without record checksums')
    verdict = 'matches its SHA-256' if is_intact else 'does not match its SHA-256; the differing records are unknown'
    return is_intact, f'{rec_path}: {verdict} ({reason})'


def _verify_records(rec_path: Path, index: np.ndarray, num_workers: int) -> tuple[bool, str]:
    """Return whether the records of a .rec are intact, and a line to print."""
    checksums, differing = np.load(checksums_path(rec_path)), []
    with (open(rec_path, 'rb', buffering=0, opener=regular_file) as f, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(checksums), desc=f'verify {rec_path.stem}', unit='img', disable=None) as bar):
        def check_block(block: np.ndarray) -> tuple[int, list[int]]:
            return len(block), [int(p) for p in block
                                if checksum(f.fileno(), int(index[0, p]), int(index[1, p])) != checksums[p]]
        for num_done, positions in pool.map(check_block, _blocks(index)):
            bar.update(num_done)
            differing += positions
    if not differing:
        return True, f'{rec_path}: {len(checksums):,} records match their checksums'
    return False, (f'{rec_path}: {len(differing):,} of {len(checksums):,} records do not match their checksums: '
                   f'{some(sorted(differing), _NUM_NAMED)} (counted from 0)')


def _verify_split(rec_path: Path, entry: dict[str, Any], num_workers: int) -> Iterator[tuple[bool, str]]:
    """For each file of a split, yield whether it is intact, and a line to print."""
    paths = {'index_sha256': index_path(rec_path), 'idx_sha256': rec_path.with_suffix('.idx'),
             'crc_sha256': checksums_path(rec_path), 'names_sha256': names_path(rec_path)}
    problems = {key: _file_problem(path, entry[key]) for key, path in paths.items() if key in entry}
    whole = {key for key, problem in problems.items() if not problem}
    yield from ((False, problem) for problem in problems.values() if problem)
    if problem := size_problem(rec_path, entry):
        yield False, problem
    if not rec_path.exists():
        return
    if 'crc_sha256' in whole and whole & {'index_sha256', 'idx_sha256'}:
        index = (np.load(paths['index_sha256']) if 'index_sha256' in whole else
                 parse_index(paths['idx_sha256'], entry['rec_bytes']))
        yield _verify_records(rec_path, index, num_workers)
    else:
        yield _verify_whole(rec_path, entry)


def verify(folder: Path, num_workers: int) -> tuple[list[str], list[str]]:
    """Return the lines to print for intact and for damaged files of a folder; raise DataError if it has no manifest."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise DataError(f'--verify: {folder} has no {MANIFEST_NAME}; expected a folder written by prepare')
    results: list[tuple[bool, str]] = []
    try:
        manifest = load_manifest(folder)
        if is_edited(manifest):
            results.append((False, f'{path}: does not match its own SHA-256'))
        for name, entry in manifest['splits'].items():
            results += _verify_split(folder / f'{name}.rec', entry, num_workers)
    except DataError as e:
        results.append((False, str(e)))
    except OSError as e:
        results.append((False, f'{e.filename or folder}: {e.strerror}'))
    except (LookupError, TypeError, ValueError, AttributeError) as e:  # from missing or malformed fields
        results.append((False, f'{path}: not a manifest ({type(e).__name__}: {e})'))
    return [line for is_intact, line in results if is_intact], [line for is_intact, line in results if not is_intact]


def print_verdict(folder: Path, num_workers: int) -> int:
    """Verify a folder and print the result; return the exit code."""
    intact, damaged = verify(folder, num_workers)
    print(*intact, *damaged, sep='\n')
    if damaged:
        print(f'{folder}: damaged; {_REPAIR}')
    return EXIT_FAILED if damaged else EXIT_OK
