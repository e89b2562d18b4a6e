"""JSON objects and lines of untrusted files, decoded into msgspec Structs."""
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from mlperf_rn50.files import numbered_lines

_MAX_LINES = 1 << 22
T = TypeVar('T')


def decode(content: bytes | str, kind: type[T]) -> T | None:
    """Return JSON as a value of a type; None where it is not JSON (NaN is not) or does not fit the type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def read_lines(path: Path, kind: type[T], mark: bytes = b'') -> Iterator[tuple[int, T]]:
    """Yield (line number, value) of the whole lines that fit a type; nothing without a regular file.

    Args:
        mark: bytes that a line must contain to be decoded.
    """
    try:
        for number, line in itertools.islice(numbered_lines(path), _MAX_LINES):
            if mark in line and line.endswith(b'\n') and (value := decode(line, kind)) is not None:
                yield number, value
    except OSError:
        return
