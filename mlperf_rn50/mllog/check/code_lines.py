"""Whether submitted code is the code that ran: the lines of source files that a log names.

Each log line names the file and line of the call that wrote it. Code that ran has a call there.
"""

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

from mlperf_rn50.files import read_text
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read.reader import read_events

_MAX_BYTES = 4 << 20  # of a source file
_LIBRARIES = ('site-packages', 'dist-packages')  # folders of code that a version identifies
Place = tuple[str, int]  # file as logged, and line number


def named_places(logs: Iterable[Path]) -> set[Place]:
    """Return the places of source files that logs name, without those of libraries and of code
    without a file, such as '<string>'."""
    metadata = [
        event.metadata
        for log in logs
        for _, event in read_events(log)
        if isinstance(event, LogEvent)
    ]
    places = {
        (str(m.get('file')), m['lineno']) for m in metadata if isinstance(m.get('lineno'), int)
    }
    return {
        (file, line)
        for file, line in places
        if PurePosixPath(file).suffix[1:].isalnum() and not any(name in file for name in _LIBRARIES)
    }


def source_files(folder: Path) -> dict[str, list[Path]]:
    """Return the regular files below a folder by their names. Links are not followed."""
    found: dict[str, list[Path]] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if path.is_file() and not path.is_symlink():
                found.setdefault(path.name, []).append(path)
    return found


def strange_places(places: Iterable[Place], files: Mapping[str, list[Path]]) -> list[Place]:
    """Return the places, in order, that no file of that name has, or where no call is."""
    lines = cache(_lines)  # many places are in one file
    return sorted(
        (file, line)
        for file, line in places
        if not any(line in lines(path) for path in files.get(PurePosixPath(file).name, ()))
    )


def _lines(path: Path) -> set[int]:
    """Return the lines that are parts of calls or, if the file is not in this version of Python,
    those with text."""
    try:
        text = read_text(path, _MAX_BYTES, 'replace')
    except (OSError, ValueError):
        return set()
    if path.suffix == '.py':
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return set(_call_lines(ast.parse(text)))
    return {n for n, line in enumerate(text.splitlines(), start=1) if line.strip()}


def _call_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
