"""Colour on a terminal, and nowhere else; NO_COLOR (no-color.org) turns it off there, FORCE_COLOR on elsewhere."""
import os
import re
from typing import TextIO

_CODES = {'bold': 1, 'red': 31, 'green': 32, 'yellow': 33}
_COLOURS = {'converged': 'green', 'pass': 'green', 'ok': 'green', 'aborted': 'yellow', 'interrupted': 'yellow',
            'running': 'yellow', 'warning': 'yellow', 'FAIL': 'red', 'failed': 'red', 'unreadable': 'red'}


def has_colour(stream: TextIO | None) -> bool:
    """Whether what goes to a stream is coloured; None is one that was closed before the program began."""
    if stream is None or os.environ.get('NO_COLOR'):
        return False
    return bool(os.environ.get('FORCE_COLOR')) or (stream.isatty() and os.environ.get('TERM') != 'dumb')


def paint(text: str, colour: str) -> str:
    """Text in a colour: bold, red, green or yellow."""
    return f'\x1b[{_CODES[colour]}m{text}\x1b[0m'


def paint_status(text: str) -> str:
    """A word that says how a run or a check ended, in its colour; any other text as it is."""
    return paint(text, _COLOURS[text]) if text in _COLOURS else text


def paint_statuses(text: str, stream: TextIO | None) -> str:
    """Lines, the first such word of each in its colour where it stands between spaces; for a stream with colour."""
    if not has_colour(stream):
        return text
    return re.sub(rf'(?m)^(.*?(?:^| ))({"|".join(_COLOURS)})(?=[ ,]|$)', lambda m: m[1] + paint_status(m[2]), text)
