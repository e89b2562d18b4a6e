"""Folders of outputs, in which a command replaces only files that it wrote and that have not been
changed since.

LISTING contains the SHA-256 and the path of each such file, as sha256sum prints them. Commands that
are not repeated into the same folder have no listing and replace no file.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mlperf_rn50.files import (
    digest_of,
    read_text,
    refuse_existing,
    write_atomically,
    writing_folder,
)
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock

LISTING = '.mlperf_rn50.sha256'
_MAX_LISTING_BYTES = 1 << 22


def _line_of(path: Path, name: str = '') -> str:
    return f'{digest_of(path)}  {name or path.name}'


def _name_in(line: str) -> str:
    return line.partition('  ')[2]


def _read_listing(path: Path) -> list[str]:
    """Return the lines of a listing, if any. Raise ConfigError for another file of this name."""
    lines = list[str]()
    if os.path.lexists(path):
        with suppress(OSError, ValueError):
            lines = read_text(path, _MAX_LISTING_BYTES).splitlines()
        if not lines or not all(re.fullmatch('[0-9a-f]{64}  .+', line) for line in lines):
            refuse_existing([path])
    return lines


@contextmanager
def new_files(folder: Path, is_repeatable: bool = True) -> Iterator[Path]:
    """Yield a scratch folder. After a block without error, move its files to a folder, which is
    locked meanwhile.

    Raise ConfigError before the first move if a file of the user would be replaced. is_repeatable:
    replace files that an earlier call wrote.
    """
    with (
        writing_folder(folder),
        folder_lock(folder, '--out', OUTPUT_LOCK),
        TemporaryDirectory(prefix='.new-', dir=folder) as scratch,
    ):
        yield Path(scratch)
        new, listing = sorted(Path(scratch).iterdir()), folder / LISTING
        old = [folder / path.name for path in new]
        lines = _read_listing(listing) if is_repeatable else []
        found = {path: _line_of(path) for path in old if lines and path.is_file()}
        refuse_existing(path for path in old if found.get(path) not in lines or path.is_symlink())
        if is_repeatable:  # before the moves, so that an interrupted command can be repeated
            others = {line for line in lines if folder / _name_in(line) not in old}
            write_atomically(
                listing, '\n'.join(sorted({*others, *found.values(), *map(_line_of, new)})) + '\n'
            )
        for path, target in zip(new, old):
            path.replace(target)


def refuse_changed(folder: Path, paths: Iterable[Path]) -> None:
    """Raise ConfigError for a listed file in a folder that was changed since."""
    lines = _read_listing(folder / LISTING)
    listed = set(map(_name_in, lines))
    named = {path: str(path.relative_to(folder)) for path in paths}
    refuse_existing(p for p, n in named.items() if n in listed and _line_of(p, n) not in lines)


def list_files(folder: Path, source: Path, paths: Iterable[Path]) -> None:
    """List files of a source folder before they are moved to the same places in a folder."""
    new = {str(path.relative_to(source)): path for path in paths}
    old = {_line_of(folder / name, name) for name in new if (folder / name).is_file()}
    lines = [line for line in _read_listing(folder / LISTING) if _name_in(line) not in new]
    listed = {*lines, *old, *(_line_of(path, name) for name, path in new.items())}
    write_atomically(folder / LISTING, '\n'.join(sorted(listed)) + '\n')
