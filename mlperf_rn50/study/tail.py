"""Reads a .jsonl file that somebody else goes on writing: a little at a time, and believed of nothing."""
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mlperf_rn50.files import parse_json, regular_file

_MAX_LINE_BYTES, _MAX_LOOK_BYTES = 1 << 20, 1 << 26
_LAST_BYTES = 64  # before the place where reading stopped, by which a file is known again


class Tail:
    """The records of a .jsonl file, each once, as they come: whole lines that are objects."""

    def __init__(self, path: Path):
        self.path = path
        self._start_anew()

    def _start_anew(self) -> None:
        self._offset, self._last, self._is_skipping = 0, b'', False
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file is another one than before, or was cut, and what is new in it; nothing without a file."""
        try:
            with open(self.path, 'rb', opener=regular_file) as f:
                is_anew = not self._is_known(f)
                if is_anew:
                    self._start_anew()
                self._inode = os.fstat(f.fileno()).st_ino
                return is_anew, self._more(f)
        except OSError:
            is_gone = self._inode is not None and not self.path.exists()
            if is_gone:
                self._start_anew()
            return is_gone, []

    def _is_known(self, f: BinaryIO) -> bool:
        """Whether the file still has what was read of it."""
        if self._inode not in (None, os.fstat(f.fileno()).st_ino):
            return False
        f.seek(self._offset - len(self._last))
        return f.read(len(self._last)) == self._last

    def _more(self, f: BinaryIO) -> list[dict[str, Any]]:
        records, start = [], self._offset
        f.seek(start)
        while self._offset - start < _MAX_LOOK_BYTES and (line := f.readline(_MAX_LINE_BYTES)):
            is_whole = line.endswith(b'\n')
            if not is_whole and len(line) < _MAX_LINE_BYTES:  # torn, or its end is still to come
                break
            self._offset += len(line)
            self._last = (self._last + line)[-_LAST_BYTES:]
            if is_whole and not self._is_skipping and (record := object_of(line)) is not None:
                records.append(record)
            self._is_skipping = not is_whole  # the rest of a line that is too long
        return records


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None for anything else."""
    with suppress(ValueError):
        value = parse_json(line.decode('utf-8', 'replace'))
        return value if isinstance(value, dict) else None
    return None
