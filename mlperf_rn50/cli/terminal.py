"""Colour and width of output. FORCE_COLOR enables colour without a terminal, unless NO_COLOR
(no-color.org) is set."""

import os
import re
import shutil
from typing import TextIO

_CODES = {'bold': 1, 'red': 31, 'green': 32, 'yellow': 33}
_COLOURS = {
    'converged': 'green',
    'pass': 'green',
    'ok': 'green',
    'aborted': 'yellow',
    'interrupted': 'yellow',
    'running': 'yellow',
    'warning': 'yellow',
    'FAIL': 'red',
    'failed': 'red',
    'unreadable': 'red',
}


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
    streams or with --wide."""
    return (
        shutil.get_terminal_size().columns
        if stream is not None and stream.isatty() and not is_wide
        else None
    )


def paint(text: str, colour: str) -> str:
    return f'\x1b[{_CODES[colour]}m{text}\x1b[0m'


def paint_status(text: str) -> str:
    """Colour a status of a run or a check. Return other text unchanged."""
    return paint(text, _COLOURS[text]) if text in _COLOURS else text


def paint_statuses(text: str, stream: TextIO | None) -> str:
    """On each line, colour the first status that is a separate word, if the stream has colour."""
    if not has_colour(stream):
        return text
    return re.sub(
        rf'(?m)^(.*?(?:^| ))({"|".join(_COLOURS)})(?=[ ,]|$)',
        lambda m: m[1] + paint_status(m[2]),
        text,
    )
