"""Random access to the images of an MXNet RecordIO file, and the manifest of a prepared folder.

Readers raise DataError for missing or damaged files and for a mismatch with the configuration or
the manifest. Sources: dmlc-core recordio.h (framing) and mxnet.recordio.IRHeader (the 24-byte
header of an image).
"""

import errno
import hashlib
import os
import re
import shlex
import struct
import threading
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from mlperf_rn50.data.options import IMAGENET, MANIFEST_NAME, DataConfig, read_manifest
from mlperf_rn50.errors import DataError, StorageError
from mlperf_rn50.files import PASSING_FAULTS, open_regular, read_bytes, regular_file
from mlperf_rn50.npz import map_array
from mlperf_rn50.text import printable

MANIFEST_FORMAT = 1
REPAIR = 'copy the folder from an intact source, or prepare it again in an empty folder'
# Endings of the files beside a .rec, with one entry per record in the order of the index.
INDEX = '.index.npy'  # memory-mapped index: starts and lengths in bytes; int64, (2, images)
CHECKSUMS = '.crc.npy'  # CRC-32 of each record, framing included; uint32
NAMES = '.names.txt'  # source of each image on a line
MAGIC = struct.pack('<I', 0xCED7230A)
_FRAME = struct.Struct('<4sI')
_HEADER = struct.Struct('<IfQQ')
_LENGTH_BITS = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)  # kinds of the parts of records
_INDEX_LINE = re.compile(rb'(?m)^[ \t]*\d+[ \t]+\d+\s*(?:\n|\Z)')
# one in so many reads is compared with its checksum; all would take 1.16 % of the decoding time
_CHECK_PERIOD = 4
_GOLDEN = 0x9E3779B1


class _Split(msgspec.Struct):
    num_images: Annotated[int, msgspec.Meta(ge=0)]
    rec_bytes: Annotated[int, msgspec.Meta(ge=0)]


class _Splits(msgspec.Struct, forbid_unknown_fields=True):
    train: _Split
    validation: _Split


class _Manifest(msgspec.Struct):
    """The checked fields of a manifest. Further fields are ignored."""

    format: Literal[1]  # MANIFEST_FORMAT
    dataset: str
    classes: list[str]
    splits: _Splits
    skipped: list[str] = []


@dataclass(frozen=True)
class Record:
    """An image as encoded bytes (uint8, 1-D), with its class label and id."""

    image: np.ndarray
    label: int
    sample_id: int


def pack_record(label: int, sample_id: int, image: bytes) -> bytes:
    """Return the record of an image with its framing, as written by MXIndexedRecordIO."""
    payload = _HEADER.pack(0, label, sample_id, 0) + image
    if len(payload) >> _LENGTH_BITS:
        raise ValueError(
            f'got {len(payload)} bytes, expected less than {1 << _LENGTH_BITS}, the limit of '
            'RecordIO'
        )
    # The magic number is not stored at multiples of 4 bytes, because it separates the parts of a
    # record there.
    words = np.frombuffer(payload, 'S4', len(payload) // 4)
    cuts = 4 * np.flatnonzero(words == MAGIC)
    starts, stops = [0, *cuts + len(MAGIC)], [*cuts, len(payload)]
    parts = [payload[start:stop] for start, stop in zip(starts, stops)]
    kinds = [_WHOLE]
    if len(parts) > 1:
        kinds = [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST]
    return b''.join(
        _FRAME.pack(MAGIC, kind << _LENGTH_BITS | len(part)) + part + bytes(-len(part) % 4)
        for kind, part in zip(kinds, parts)
    )


def _payload(frames: bytes, where: str) -> bytes:
    """Return a record without its framing. A record that contains the magic number is stored in
    several parts."""
    parts: list[bytes] = []
    offset, kind = 0, _FIRST
    while kind not in (_WHOLE, _LAST):
        if offset + _FRAME.size > len(frames):
            raise DataError(f'{where}: the record is truncated; prepare the data again')
        magic, word = _FRAME.unpack_from(frames, offset)
        kind, length = divmod(word, 1 << _LENGTH_BITS)
        expected = (_MIDDLE, _LAST) if parts else (_WHOLE, _FIRST)
        start = offset + _FRAME.size
        offset = start + (length + 3 & ~3)  # the next multiple of 4 bytes
        if magic != MAGIC or kind not in expected or offset > len(frames):
            raise DataError(
                f'{where}: not a RecordIO record, because the file is damaged or its .idx '
                'belongs to a different .rec; prepare the data again'
            )
        parts.append(frames[start : start + length])
    if offset < len(frames):
        raise DataError(
            f'{where}: {len(frames) - offset} bytes after it are in no record of the index, '
            'because the index is damaged or cut, or belongs to a different .rec; create the index '
            'again'
        )
    return MAGIC.join(parts)


def parse_record(frames: bytes, where: str) -> Record:
    """Parse a record with its framing."""
    payload = _payload(frames, where)
    if len(payload) < _HEADER.size:
        raise DataError(
            f'{where}: got {len(payload)} bytes, expected an image header; prepare the data again'
        )
    num_labels, label, sample_id, _ = _HEADER.unpack_from(payload)
    start = _HEADER.size
    if 4 * num_labels > len(payload) - start:
        raise DataError(
            f'{where}: got a header of {num_labels} labels in {len(payload)} bytes; prepare the '
            'data again'
        )
    if num_labels:  # after the header comes a vector of labels, the first of which is the class
        label = float(np.frombuffer(payload, np.float32, 1, start)[0])
        start += 4 * num_labels
    if not label.is_integer():  # also refuses NaN and infinity
        raise DataError(
            f'{where}: got the label {label:g}, expected a whole number; prepare the data again'
        )
    return Record(np.frombuffer(payload, np.uint8, offset=start), int(label), sample_id)


def _refuse_passing(error: Exception, path: object) -> None:
    """Raise StorageError for a fault of storage that may pass, so that a restart may succeed."""
    if isinstance(error, OSError) and error.errno in PASSING_FAULTS:
        raise StorageError(
            f'{path}: {error.strerror}; repair the storage of the data, then repeat or resume'
        ) from error


def existing_index(rec_path: Path) -> Path:
    """Return the path of a .rec's memory-mapped index, or of its .idx if it has no mapped index."""
    mapped = rec_path.with_suffix(INDEX)
    # unlike Path.exists(), this raises no fault of storage, which the next access reports
    return mapped if os.path.exists(mapped) else rec_path.with_suffix('.idx')


def map_index(path: Path, size: int) -> np.ndarray:
    """Map an index into memory; raise DataError unless its records cover a .rec of `size` bytes,
    each once."""
    try:
        with open_regular(path) as f:
            index = map_array(f, np.int64)
    except (OSError, ValueError) as e:
        _refuse_passing(e, path)
        raise DataError(
            f'{path}: not an index ({getattr(e, "strerror", e)}); remove it to use the .idx'
        ) from e
    is_index = index.ndim == 2 and index.shape[0] == 2 and index.shape[1] > 0
    if not is_index or not _covers(index, size):
        raise DataError(
            f'{path}: does not match its .rec of {size} bytes; remove it to use the .idx'
        )
    return index


def _covers(index: np.ndarray, size: int) -> bool:
    """Return whether records, given as starts and lengths in any order, follow each other from 0 to
    `size`."""
    starts, lengths = index[:, np.argsort(index[0], kind='stable')]
    return lengths.min() > 0 and np.array_equal(
        np.append(starts, size), np.append(0, starts + lengths)
    )


def parse_index(path: Path, size: int) -> np.ndarray:
    """Parse the text index (.idx) of a .rec of `size` bytes. Return an array like that in INDEX."""
    try:
        text = read_bytes(path).removeprefix(BOM_UTF8)
    except OSError as e:
        _refuse_passing(e, path)
        raise DataError(
            f'{path}: {e.strerror}; create it with rec2idx.py of MXNet, or prepare the data again'
        ) from e
    rest = _INDEX_LINE.sub(b'', text)
    if rest or not text:
        line = rest.partition(b'\n')[0][:40].decode('latin-1')
        raise DataError(
            f'{path}: got the line {line!r}, expected two numbers per image; create it again with '
            'rec2idx.py of MXNet, or prepare the data again'
        )
    starts = np.fromstring(text, np.int64, sep=' ')[1::2]
    ordered = np.sort(starts)
    if ordered[0] != 0 or ordered[-1] >= size or np.any(ordered[1:] == ordered[:-1]):
        raise DataError(
            f'{path}: the offsets do not match the .rec of {size} bytes; create the .idx again '
            'with rec2idx.py of MXNet, or prepare the data again'
        )
    ends = np.append(ordered[1:], size)
    return np.stack([starts, ends[np.searchsorted(ordered, starts)] - starts])


def load_checksums(rec_path: Path, num_records: int) -> np.ndarray | None:
    """Return the CRC-32 of each record, or None if a .rec has no checksums, as in older folders."""
    path = rec_path.with_suffix(CHECKSUMS)
    try:
        with open_regular(path) as f:
            found = np.array(map_array(f, np.uint32))
        if found.shape != (num_records,):
            raise ValueError(f'got the shape {found.shape}, expected {num_records} numbers')
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        _refuse_passing(e, path)
        raise DataError(
            f'{path}: not the checksums of the records ({getattr(e, "strerror", e)}); copy the '
            'file again, or prepare the data again'
        ) from e


class RecordFile:
    """An open .rec file. Threads can share it, because read() uses pread, which also releases the
    GIL."""

    def __init__(self, rec_path: Path):
        """Open a .rec with its memory-mapped index (INDEX), or parse its .idx if it has no mapped
        index."""
        self.path = rec_path
        try:
            self._file = open_regular(rec_path)
        except OSError as e:
            _refuse_passing(e, rec_path)
            raise DataError(
                f'{e.filename}: {e.strerror}; copy it again, or prepare the data again'
            ) from e
        size = os.fstat(self._file.fileno()).st_size
        path = existing_index(rec_path)
        read_index = parse_index if path.suffix == '.idx' else map_index
        self._starts, self._lengths = read_index(path, size)
        self.checksums = load_checksums(rec_path, len(self))
        self._num_reads = count()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, position: int) -> Record:
        """Return the record at a position in the index, which may differ from the record's key."""
        where = f'{self.path}, record {position}'
        file, start, length = self.location(position)
        try:
            frames = os.pread(file, length, start)
        except OSError as e:
            raise StorageError(
                f'{where}: cannot read: {e.strerror}; repair the storage of the data, then resume'
            ) from e
        # Multiples of a number near the golden ratio spread over all records. With every fourth
        # read, an evaluation in the order of the file would check the same records each time.
        spread = next(self._num_reads) * _GOLDEN % 2**32
        is_sampled = spread * _CHECK_PERIOD < 2**32
        if (
            is_sampled
            and self.checksums is not None
            and zlib.crc32(frames) != self.checksums[position]
        ):
            raise DataError(
                f'{where}: does not match its checksum; copy the file again, or prepare the data '
                'again'
            )
        return parse_record(frames, where)

    def describe(self, position: int) -> str:
        """Return the file and number of a record for messages, with the source of its image if it
        is known."""
        names = self.path.with_suffix(NAMES)
        with (
            suppress(OSError),
            open(names, errors='replace', newline='\n', opener=regular_file) as f,
        ):
            if name := printable(next(islice(f, position, None), '').strip()):
                return f'{self.path}, record {position}, from {name}'
        return f'{self.path}, record {position}'

    def location(self, position: int) -> tuple[int, int, int]:
        """Return the file descriptor, and the start and length in bytes of the record at a position
        in the index."""
        return self._file.fileno(), int(self._starts[position]), int(self._lengths[position])

    def num_bytes(self, positions: np.ndarray) -> int:
        """Return the total size in bytes of the records at these positions in the index."""
        return int(self._lengths[positions].sum())

    def close(self) -> None:
        self._file.close()


class RecordCache:
    """A cache for the records read first, up to a total size. DALI's own image cache works only
    with DALI's readers."""

    def __init__(self, read: Callable[[int], Record], max_bytes: int):
        self._read, self._free_bytes = read, max_bytes
        self._records: dict[int, Record] = {}
        self._lock = threading.Lock()

    def read(self, position: int) -> tuple[Record, bool]:
        """Return the record at a position, and whether it was read from storage. Thread-safe."""
        record = self._records.get(position)
        if record is not None:
            return record, False
        record = self._read(position)
        with self._lock:
            if record.image.nbytes <= self._free_bytes and position not in self._records:
                self._free_bytes -= record.image.nbytes
                self._records[position] = record
        return record, True


def _create(folder: Path, dataset: str) -> str:
    """Return the command that prepares a data set in a folder."""
    source = '' if dataset in ('digits', 'cifar10') else ' --source DIR'
    kind = dataset if dataset in ('digits', 'cifar10', IMAGENET) else 'folder'
    return f'mlperf-rn50 prepare {kind}{source} --out {shlex.quote(str(folder))}'


def load_manifest(folder: Path, dataset: str = '') -> dict:
    """Return the validated manifest of a prepared folder. dataset: expected one, for a message."""
    path = folder / MANIFEST_NAME
    try:
        manifest = read_manifest(folder)
        msgspec.convert(manifest, _Manifest)
        return manifest
    except FileNotFoundError as e:
        raise DataError(
            f'{path}: no such file; create the data with: {_create(folder, dataset)}'
        ) from e
    except OSError as e:
        _refuse_passing(e, path)
        fix = 'correct its permissions' if e.errno == errno.EACCES else 'prepare the data again'
        raise DataError(f'{path}: {e.strerror}; {fix}') from e
    except ValueError as e:
        raise DataError(
            f'{path}: not a manifest ({" ".join(str(e).split())[:200]}); prepare the data again in '
            'another folder'
        ) from e


def data_digest(data: DataConfig) -> str:
    """Return a SHA-256 of the classes and file digests in a prepared folder's manifest, or '' for
    synthetic images."""
    if data.synthetic:
        return ''
    manifest = load_manifest(Path(data.dir), data.dataset)
    keys = ('num_images', 'rec_bytes', 'rec_sha256', 'idx_sha256')
    content = [
        manifest['classes'],
        [[split.get(k) for k in keys] for _, split in sorted(manifest['splits'].items())],
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def class_names(data: DataConfig) -> list[str]:
    """Return the class names in the order of their labels, or the labels if there is no
    manifest."""
    folder = Path(data.dir)
    if data.synthetic or not (folder / MANIFEST_NAME).exists():
        return [str(i) for i in range(data.num_classes)]
    names = load_manifest(folder)['classes']
    _check_value(data, 'num_classes', len(names))
    return names


def _check_value(data: DataConfig, key: str, expected: int | str) -> None:
    """Raise DataError if a configured value differs from that of the manifest."""
    if getattr(data, key) != expected:
        raise DataError(
            f'data.{key}: got {getattr(data, key)}, expected {expected} from '
            f'{Path(data.dir) / MANIFEST_NAME}; set data.{key} or data.dir'
        )


def find_split(data: DataConfig, split: str) -> Callable[[], RecordFile]:
    """Check a split ('train' or 'validation') against configuration and manifest. Return a function
    that opens it.

    The check opens neither the .rec nor its index, because MLPerf allows no access to data before
    run_start.
    """
    folder = Path(data.dir)
    manifest = load_manifest(folder, data.dataset)
    entry = manifest['splits'][split]
    num_images, num_bytes = entry['num_images'], entry['rec_bytes']
    _check_value(data, 'dataset', manifest['dataset'])
    _check_value(data, 'num_classes', len(manifest['classes']))
    _check_value(data, 'num_train' if split == 'train' else 'num_val', num_images)
    path = folder / f'{split}.rec'
    paths = [path, existing_index(path)]
    if 'crc_sha256' in entry:  # missing in older folders
        paths.append(path.with_suffix(CHECKSUMS))
    try:
        size = [p.stat().st_size for p in paths][0]
    except OSError as e:
        _refuse_passing(e, e.filename)
        raise DataError(
            f'{e.filename}: {e.strerror}, expected as listed in {MANIFEST_NAME}; {REPAIR}'
        ) from e
    if path.is_file() and size != num_bytes:  # RecordFile refuses named pipes and folders
        raise DataError(
            f'{path}: got {size} bytes, expected {num_bytes} as in {MANIFEST_NAME}; prepare the '
            'data again'
        )

    def open_records() -> RecordFile:
        records = RecordFile(path)
        if len(records) != num_images:
            raise DataError(
                f'{path}: got {len(records)} records, expected {num_images}; prepare the data again'
            )
        return records

    return open_records
