"""Records as JSON lines: writing them, and decoding those of untrusted files into msgspec
Structs."""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from mlperf_rn50.files import PASSING_FAULTS, no_link, numbered_lines, regular_file

MAX_LINE_BYTES = 1 << 24  # maximum length of a line; the times of 10,000 ranks take 8.1 MB
_MAX_LINES, MAX_BYTES = 1 << 22, 1 << 29  # maximum read from one file
_MAX_LOOK_BYTES = 1 << 26  # maximum number of bytes read in one call of Tail.read
# number of bytes before the read position that Tail keeps to detect a replaced file
_LAST_BYTES = 64
T = TypeVar('T')


def encode(record: Any) -> str:
    """Return a record, such as a msgspec Struct, as JSON on one line."""
    return json.dumps(msgspec.to_builtins(record))


def decode(content: bytes | str, kind: type[T]) -> T | None:
    """Decode JSON to a value of a type; return None for malformed JSON, which includes NaN, or a
    different type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def number(value: Any, low: float, high: float) -> float | None:
    """Return a value of untrusted JSON if it is a number in the range, otherwise None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and low <= value <= high else None


def append(path: Path, record: Any) -> None:
    """Append a record as a line to a file; ignore errors, which the run reports elsewhere."""
    with suppress(OSError), open(path, 'a+b', opener=no_link) as f:
        line = f'{encode(record)}\n'
        if f.seek(0, os.SEEK_END):
            f.seek(-1, os.SEEK_END)
            if f.read() != b'\n':  # a full disk has cut the last line
                line = f'\n{line}'
        f.write(line.encode())


def read_lines(
    path: Path, kind: type[T], mark: bytes = b'', must_end: bool = False
) -> Iterator[tuple[int, T]]:
    """Yield (number, value) of each complete line that contains mark and decodes to kind; a missing
    file has none.

    An error of the file ends the lines. But with must_end, raise OSError if storage fails.
    """
    num_left = MAX_BYTES
    try:
        for number, line in itertools.islice(numbered_lines(path, MAX_LINE_BYTES), _MAX_LINES):
            if (num_left := num_left - len(line)) < 0:
                return
            if mark in line and line.endswith(b'\n') and (value := decode(line, kind)) is not None:
                yield number, value
    except OSError as e:
        if must_end and e.errno in PASSING_FAULTS:
            raise


class Tail:
    """Incremental reader of a growing file, which returns each complete line of a type once."""

    def __init__(self, path: Path, kind: Any):
        self.path, self._kind = path, kind
        self._reset()

    def _reset(self) -> None:
        self._offset, self._last, self._is_skipping = 0, b'', False
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[Any]]:
        """Return whether the file was replaced, truncated or removed, and its new values, if
        any."""
        try:
            with open(self.path, 'rb', opener=regular_file) as f:
                f.seek(self._offset - len(self._last))
                inode = os.fstat(f.fileno()).st_ino
                is_other = self._inode not in (None, inode)
                is_replaced = is_other or f.read(len(self._last)) != self._last
                if is_replaced:
                    self._reset()
                self._inode = inode
                return is_replaced, self._more(f)
        except OSError:
            is_gone = self._inode is not None and not self.path.exists()
            if is_gone:
                self._reset()
            return is_gone, []

    def _more(self, f: BinaryIO) -> list[Any]:
        records, start = [], self._offset
        f.seek(start)
        while self._offset - start < _MAX_LOOK_BYTES and (line := f.readline(MAX_LINE_BYTES)):
            is_whole = line.endswith(b'\n')
            if not is_whole and len(line) < MAX_LINE_BYTES:  # the line is still being written
                break
            self._offset += len(line)
            self._last = (self._last + line)[-_LAST_BYTES:]
            if is_whole and not self._is_skipping:
                records.append(decode(line, self._kind))
            self._is_skipping = not is_whole  # the next part is the rest of an overlong line
        return [record for record in records if record is not None]
