"""Random access to the images of an MXNet RecordIO file, and the manifest of a prepared folder.

Whatever reads raises DataError for what is missing, damaged, or not what the configuration or the manifest says.
Source: dmlc-core recordio.h (framing) and mxnet.recordio.IRHeader (the 24-byte header of an image).
"""
import os
import struct
import threading
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import parse_json, read_text, regular_file

MANIFEST_NAME = 'manifest.json'
MANIFEST_FORMAT = 1
_MAX_MANIFEST_BYTES = 1 << 28  # it names every image that was left out
MAGIC = struct.pack('<I', 0xCED7230A)
_FRAME = struct.Struct('<4sI')
_HEADER = struct.Struct('<IfQQ')
_LENGTH_BITS = 29


class _Split(msgspec.Struct):
    num_images: Annotated[int, msgspec.Meta(ge=0)]
    rec_bytes: Annotated[int, msgspec.Meta(ge=0)]


class _Splits(msgspec.Struct, forbid_unknown_fields=True):
    train: _Split
    validation: _Split


class _Manifest(msgspec.Struct):
    """What every reader of a manifest takes from it; more may be there."""

    format: Literal[1]  # MANIFEST_FORMAT
    dataset: str
    classes: list[str]
    splits: _Splits


@dataclass(frozen=True)
class Record:
    """One image: its encoded bytes (uint8, 1-D), class label and id."""

    image: np.ndarray
    label: int
    sample_id: int


def _payload(frames: bytes, where: str) -> bytes:
    """A record without its framing; one that contains the magic number was written in several parts."""
    parts, offset = [], 0
    while True:
        if offset + _FRAME.size > len(frames):
            raise DataError(f'{where}: the record is cut off; prepare the data again')
        magic, word = _FRAME.unpack_from(frames, offset)
        kind, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
        offset += _FRAME.size
        if magic != MAGIC or offset + length > len(frames):
            raise DataError(f'{where}: not a RecordIO record; the .idx does not belong to the .rec, '
                            'or the file is damaged: prepare the data again')
        parts.append(frames[offset:offset + length])
        offset += (length + 3) & ~3
        if kind in (0, 3):  # whole, or the last part
            return MAGIC.join(parts)


def _parse_record(payload: bytes, where: str) -> Record:
    if len(payload) < _HEADER.size:
        raise DataError(f'{where}: got {len(payload)} bytes, expected an image header; prepare the data again')
    num_labels, label, sample_id, _ = _HEADER.unpack_from(payload)
    start = _HEADER.size
    if 4 * num_labels > len(payload) - start:
        raise DataError(f'{where}: its header says {num_labels} labels, the record has {len(payload)} bytes; '
                        'prepare the data again')
    if num_labels:  # the label is then a vector after the header; its first entry is the class
        label = float(np.frombuffer(payload, np.float32, 1, start)[0])
        start += 4 * num_labels
    if not label.is_integer():  # nor NaN or infinity
        raise DataError(f'{where}: got the label {label:g}, expected a whole number; prepare the data again')
    return Record(np.frombuffer(payload, np.uint8, offset=start), int(label), sample_id)


def index_path(rec_path: Path) -> Path:
    """The mapped index of a .rec: int64 in NumPy's format, (2, num_images), starts and lengths in bytes."""
    return rec_path.with_suffix('.index.npy')


def _map_index(path: Path, size: int) -> np.ndarray:
    """A mapped index, held against the size of its .rec without a look at all of it."""
    try:
        os.close(regular_file(os.fspath(path), os.O_RDONLY))  # NumPy would wait for the writer of a named pipe
        index = np.lib.format.open_memmap(path, mode='r')
    # What NumPy lets out of a header that is cut off or overwritten.
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError, tokenize.TokenError, MemoryError,
            RecursionError) as e:
        reason = getattr(e, 'strerror', None) or type(e).__name__
        raise DataError(f'{path}: not an index ({reason}); make it again with: mlperf-rn50 prepare') from e
    is_index = index.dtype == np.int64 and index.ndim == 2 and index.shape[0] == 2 and index.shape[1] > 0
    if not is_index or index[0, 0] != 0 or index[:, -1].sum() != size:
        raise DataError(f'{path}: does not fit its .rec of {size} bytes; make it again with: mlperf-rn50 prepare')
    return index


def parse_index(path: Path, size: int) -> np.ndarray:
    """A text index (.idx) of a .rec of some bytes, as index_path() has it."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            numbers = np.fromfile(f, dtype=np.int64, sep=' ')
    except OSError as e:
        raise DataError(f'{path}: {e.strerror}; make it with: mlperf-rn50 prepare') from e
    if not numbers.size or numbers.size % 2:
        raise DataError(f'{path}: got {numbers.size} numbers, expected two per image; prepare the data again')
    starts = numbers[1::2]
    ordered = np.sort(starts)
    if ordered[0] != 0 or ordered[-1] >= size or np.any(ordered[1:] == ordered[:-1]):
        raise DataError(f'{path}: its offsets do not fit the .rec of {size} bytes; prepare the data again')
    ends = np.append(ordered[1:], size)
    return np.stack([starts, ends[np.searchsorted(ordered, starts)] - starts])


class RecordFile:
    """An open .rec file. read() uses pread, so threads share one object and the GIL is free meanwhile."""

    def __init__(self, rec_path: Path):
        """Opens a .rec and the index beside it: mapped where there is one (index_path), else its .idx parsed."""
        self.path = rec_path
        try:
            self._file = open(rec_path, 'rb', buffering=0, opener=regular_file)
        except OSError as e:
            raise DataError(f'{e.filename}: {e.strerror}; make it with: mlperf-rn50 prepare') from e
        self._size = os.fstat(self._file.fileno()).st_size
        mapped = index_path(rec_path)
        self._starts, self._lengths = (_map_index(mapped, self._size) if mapped.exists()
                                       else parse_index(rec_path.with_suffix('.idx'), self._size))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, position: int) -> Record:
        """The record at a position of the index (not its key)."""
        where = f'{self.path}, record {position}'
        start, length = int(self._starts[position]), int(self._lengths[position])
        if start < 0 or length < 0 or start + length > self._size:
            raise DataError(f'{where}: its index says {length} bytes from {start} on, the file has {self._size}; '
                            'prepare the data again')
        frames = os.pread(self._file.fileno(), length, start)
        return _parse_record(_payload(frames, where), where)

    def place(self, position: int) -> tuple[int, int, int]:
        """The number of the open file, and start and length in bytes, of the record at a position of the index."""
        return self._file.fileno(), int(self._starts[position]), int(self._lengths[position])

    def num_bytes(self, positions: np.ndarray) -> int:
        """Bytes in the file of the records at some positions of the index."""
        return int(self._lengths[positions].sum())

    def close(self) -> None:
        self._file.close()


class KeptRecords:
    """Records that stay in memory once they were read, until they fill it; none makes room for another.

    DALI's own cache of images would want to know which image is which, and learns that from its own readers only.
    """

    def __init__(self, read: Callable[[int], Record], max_bytes: int):
        """read: gives the record at a position; max_bytes: of encoded images, 0 to keep none."""
        self._read, self._room = read, max_bytes
        self._kept: dict[int, Record] = {}
        self._lock = threading.Lock()

    def read(self, position: int) -> tuple[Record, bool]:
        """The record at a position, and whether it was read for this; threads may call it at the same time."""
        record = self._kept.get(position)
        if record is not None:
            return record, False
        record = self._read(position)
        with self._lock:
            if record.image.nbytes <= self._room and position not in self._kept:
                self._room -= record.image.nbytes
                self._kept[position] = record
        return record, True


def load_manifest(folder: Path) -> dict:
    """The manifest of a prepared folder: dataset, classes and splits are there, in their types."""
    path = folder / MANIFEST_NAME
    try:
        manifest = parse_json(read_text(path, _MAX_MANIFEST_BYTES))
        msgspec.convert(manifest, _Manifest)
        return manifest
    except FileNotFoundError as e:
        raise DataError(f'{path}: no such file; make the data with: mlperf-rn50 prepare') from e
    except OSError as e:
        raise DataError(f'{path}: {e.strerror}; prepare the data again') from e
    except (ValueError, MemoryError) as e:
        raise DataError(f'{path}: not a manifest ({" ".join(str(e).split())[:200]}); remove it and prepare the data '
                        'again') from e


def class_names(data: DataConfig) -> list[str]:
    """Return the names of the classes in the order of their numbers; the numbers where there is no manifest."""
    folder = Path(data.dir)
    if data.synthetic or not (folder / MANIFEST_NAME).exists():
        return [str(i) for i in range(data.num_classes)]
    names = load_manifest(folder)['classes']
    if len(names) != data.num_classes:
        raise DataError(f'data.num_classes: {folder / MANIFEST_NAME} says {len(names)}, the configuration '
                        f'{data.num_classes}; set data.num_classes or data.dir')
    return names


def open_split(data: DataConfig, split: str) -> RecordFile:
    """The records of a split ('train' or 'validation'), checked against configuration and manifest."""
    folder = Path(data.dir)
    manifest = load_manifest(folder)
    num_images = manifest['splits'][split]['num_images']
    for key, got in [('dataset', manifest['dataset']), ('num_classes', len(manifest['classes'])),
                     ('num_train' if split == 'train' else 'num_val', num_images)]:
        if got != getattr(data, key):
            raise DataError(f'data.{key}: {folder / MANIFEST_NAME} says {got}, the configuration {getattr(data, key)}; '
                            f'set data.{key} or data.dir')
    records = RecordFile(folder / f'{split}.rec')
    if len(records) != num_images:
        raise DataError(f'{records.path}: its index has {len(records)} images, the manifest {num_images}; '
                        'prepare the data again')
    return records
