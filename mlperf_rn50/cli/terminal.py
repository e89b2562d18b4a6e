"""Colour and width of output. FORCE_COLOR enables colour without a terminal, unless NO_COLOR
(no-color.org) is set."""

import os
import shutil
from typing import TextIO

_CODES = {'bold': 1, 'bad': 31, 'good': 32, 'warn': 33}


def has_colour(stream: TextIO | None) -> bool:
    """Return whether output to a stream is coloured. The stream is None if it was closed at
    start-up."""
    if stream is None or os.environ.get('NO_COLOR'):
        return False
    return bool(os.environ.get('FORCE_COLOR')) or (
        stream.isatty() and os.environ.get('TERM') != 'dumb'
    )


def width_of(stream: TextIO | None, is_wide: bool = False) -> int | None:
    """Return the width of a terminal in columns (COLUMNS, if set); None, no limit, for other
    streams, with --wide, and for a terminal without a size, such as that of a rank of Open MPI."""
    if stream is None or not stream.isatty() or is_wide:
        return None
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def paint(text: str, level: str) -> str:
    """Return a text in the colour of a level of a cell, or bold. Without a level, it is
    unchanged."""
    return f'\x1b[{_CODES[level]}m{text}\x1b[0m' if level else text
