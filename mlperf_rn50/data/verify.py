"""Verification of a prepared folder (manifest, indexes and image records), and the format of its
checksums.

manifest.json contains SHA-256 digests of itself, and of the records, indexes and checksums of each
split. <split>.crc.npy contains the CRC-32 of each record. Older folders have no record checksums;
their whole-file SHA-256 detects a difference but does not locate it.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.contrib.concurrent import thread_map

from mlperf_rn50.data.recordio import (
    CHECKSUMS,
    INDEX,
    MANIFEST_NAME,
    NAMES,
    REPAIR,
    RecordFile,
    load_checksums,
    load_manifest,
    map_index,
    parse_index,
)
from mlperf_rn50.errors import DataError, StorageError
from mlperf_rn50.files import (
    check_exists,
    digest_of,
    dump_json,
    open_regular,
    replacing,
    write_atomically,
)
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, is_locked, read_holder
from mlperf_rn50.text import some

_BLOCK = 256  # number of records that a thread verifies at once


def checksum(file: int, start: int, length: int) -> int | None:
    """Return the CRC-32 of a record in an open file, or None if it is truncated or unreadable."""
    try:
        stored = os.pread(file, length, start)
    except OSError:
        return None
    return zlib.crc32(stored) if len(stored) == length else None


def described(rec_path: Path) -> dict[str, Path]:
    """Return the files that describe the records of a .rec, by the manifest keys of their
    SHA-256."""
    return {
        'index_sha256': rec_path.with_suffix(INDEX),
        'idx_sha256': rec_path.with_suffix('.idx'),
        'crc_sha256': rec_path.with_suffix(CHECKSUMS),
        'names_sha256': rec_path.with_suffix(NAMES),
    }


def check_sample(records: RecordFile, entry: dict, num_records: int, seed: int) -> int:
    """Check a split's last record and some random ones. Return their number. Raise DataError if one
    does not match."""
    if 'crc_sha256' in entry:  # missing in older folders
        if problem := _file_problem(records.path.with_suffix(CHECKSUMS), entry['crc_sha256']):
            raise DataError(f'{problem}; {REPAIR}')
    last, checksums = len(records) - 1, records.checksums
    drawn = np.random.default_rng(seed).permutation(last)[: num_records - 1]
    for position in [*map(int, drawn), last]:
        records.read(position)
        stored = checksum(*records.location(position))
        if checksums is not None and stored != checksums[position]:
            raise DataError(
                f'{records.path}, record {position}: does not match its checksum; {REPAIR}'
            )
    return len(drawn) + 1


def manifest_digest(manifest: dict) -> str:
    """Return the SHA-256 of a manifest, excluding the digest in it."""
    content = {k: v for k, v in manifest.items() if k != 'sha256'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_edited(manifest: dict) -> bool:
    """Return whether a manifest does not match its own digest; False for older manifests, which
    have none."""
    digest = manifest_digest(manifest)
    return manifest.get('sha256', digest) != digest


def dump_manifest(folder: Path, manifest: dict) -> None:
    manifest['sha256'] = manifest_digest(manifest)
    dump_json(folder / MANIFEST_NAME, manifest, indent=1)


def _file_problem(path: Path, sha256: str) -> str:
    """Return an error message if a file is unreadable or does not match a SHA-256, else ''."""
    try:
        if digest_of(path) == sha256:
            return ''
        return f'{path}: does not match its SHA-256 in {MANIFEST_NAME}'
    except OSError as e:
        return f'{path}: {e.strerror}'


def describe_records(rec_path: Path, made: Path, names: list[str], checksums: list[int]) -> dict:
    """Write index, checksums and names of a .rec with an .idx beside `made`. Return the manifest
    entry of the split."""
    write_atomically(made.with_suffix(NAMES), ''.join(f'{name}\n' for name in names))
    size, idx = rec_path.stat().st_size, rec_path.with_suffix('.idx')
    arrays = {INDEX: parse_index(idx, size), CHECKSUMS: np.array(checksums, np.uint32)}
    for ending, array in arrays.items():
        # NumPy would write to a file by itself, without the reason of an error
        content = io.BytesIO()
        np.save(content, array)
        with replacing(made.with_suffix(ending)) as f:
            f.write(content.getbuffer())
    paths = {'rec_sha256': rec_path, **described(made), 'idx_sha256': idx}
    digests = {key: digest_of(path) for key, path in paths.items()}
    return {'num_images': len(names), 'rec_bytes': size, **digests}


def _verify_records(
    rec_path: Path, index: np.ndarray, checksums: np.ndarray, num_workers: int
) -> tuple[bool, str]:
    """Return whether the records of a .rec are intact, and a line to print."""
    with open_regular(rec_path) as f:

        def is_whole(position: int) -> bool:
            start, length = map(int, index[:, position])
            return checksum(f.fileno(), start, length) == checksums[position]

        def check_block(block: np.ndarray) -> list[int]:
            return [int(position) for position in block if not is_whole(position)]

        ordered = np.argsort(index[0])
        blocks = np.split(ordered, range(_BLOCK, len(ordered), _BLOCK))
        title = f'verify {rec_path.stem}'
        found = thread_map(check_block, blocks, max_workers=num_workers, desc=title, disable=None)
    differing = sorted(chain.from_iterable(found))
    if not differing:
        return True, f'{rec_path}: {len(checksums):,} records match their checksums'
    return False, (
        f'{rec_path}: {len(differing):,} of {len(checksums):,} records do not match their '
        f'checksums: {some(differing, 10)} (counted from 0)'
    )


def _verify_split(rec_path: Path, entry: dict, num_workers: int) -> Iterator[tuple[bool, str]]:
    """For each file of a split, yield whether it is intact, and a line to print."""
    paths, size = described(rec_path), rec_path.stat().st_size
    whole = set()
    for key in (key for key in paths if key in entry):
        if problem := _file_problem(paths[key], entry[key]):
            yield False, problem
        else:
            whole.add(key)
    if size != entry['rec_bytes']:
        yield False, f'{rec_path}: got {size:,} bytes, expected {entry["rec_bytes"]:,}'
    if 'crc_sha256' in whole and whole & {'index_sha256', 'idx_sha256'}:
        if 'index_sha256' in whole:
            index = map_index(paths['index_sha256'], entry['rec_bytes'])
        else:
            index = parse_index(paths['idx_sha256'], entry['rec_bytes'])
        if (checksums := load_checksums(rec_path, index.shape[1])) is not None:
            yield _verify_records(rec_path, index, checksums, num_workers)
        return
    problem = _file_problem(rec_path, entry['rec_sha256'])
    line = f'{rec_path}: matches its SHA-256 (no usable record checksums)'
    yield not problem, problem or line


def verify(folder: Path, num_workers: int) -> tuple[list[str], list[str]]:
    """Return the lines to print for intact and for damaged files of a folder. Raise DataError if it
    has no manifest."""
    path = folder / MANIFEST_NAME
    expected = 'a folder written by prepare'
    check_exists(folder, expected)
    if not path.exists():
        raise DataError(f'--verify: {folder} has no {MANIFEST_NAME}; expected {expected}')
    if is_locked(lock := folder / OUTPUT_LOCK):
        raise DataError(f'--verify: {folder} is in use by {read_holder(lock)}; wait for it')
    results: list[tuple[bool, str]] = []
    try:
        manifest = load_manifest(folder)
        if is_edited(manifest):
            results.append((False, f'{path}: does not match its own SHA-256'))
        for name, entry in manifest['splits'].items():
            try:
                results += _verify_split(folder / f'{name}.rec', entry, num_workers)
            except OSError as e:
                results.append((False, f'{e.filename}: {e.strerror}'))
    except (DataError, StorageError) as e:
        results.append((False, str(e)))
    # from missing or malformed fields
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        results.append((False, f'{path}: not a manifest ({type(e).__name__}: {e})'))
    intact, damaged = ([line for ok, line in results if ok == is_ok] for is_ok in (True, False))
    return intact, damaged
