"""Writing files so that nothing half-written is ever found."""
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is either the old or the new one, whatever happens."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    with open(temporary, 'wb') as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def dump_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as indented JSON, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2) + '\n')


class HashedFile:
    """A binary file that is written from its start to its end, and hashed meanwhile."""

    def __init__(self, file: BinaryIO):
        self._file, self._sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Adds to the file."""
        self._sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def read(self, *_: int) -> bytes:
        """Only here because NumPy takes nothing without it for a file."""
        raise io.UnsupportedOperation

    def hexdigest(self) -> str:
        """The SHA-256 of what was written."""
        return self._sha256.hexdigest()


def sync(file: BinaryIO) -> None:
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())
