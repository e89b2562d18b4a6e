"""Tables for every output format, with a sort value and the source log lines in each cell. Pure."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from mlperf_rn50.text import cut_names, percent, plural

Ref = tuple[Path, int]  # a log and a line number
_LEAST_CUT = 12  # texts up to this length, such as the status of a run in colour, are never cut
# level of the status of a run or of a check
STATUS_LEVELS = {
    **dict.fromkeys(('converged', 'pass', 'ok'), 'good'),
    **dict.fromkeys(('aborted', 'interrupted', 'running', 'warning'), 'warn'),
    **dict.fromkeys(('FAIL', 'failed', 'unreadable'), 'bad'),
}


@dataclass(frozen=True)
class Cell:
    """Text of a table cell with its sort value and its source."""

    text: str
    value: float | None = None
    refs: tuple[Ref, ...] = ()
    span: int = 1  # number of columns
    study: int | None = None  # number of the linked study, counted from 1
    share: float | None = None  # shown by the tint of the cell on a page
    more: tuple[str, ...] = ()  # small lines below the text, on a page
    level: str = ''  # 'good', 'warn' or 'bad', shown in colour


@dataclass(frozen=True)
class Table:
    """A table with a title and an explanatory note. Without a head, its rows are names and
    texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ''
    minor: tuple[str, ...] = ()  # columns that a narrow screen hides, the last first
    choices: tuple[str, ...] = ()  # columns with a filter

    @property
    def whole_rows(self) -> list[tuple[Cell, ...]]:
        """Rows with a cell in each column."""
        return [row for row in self.rows if len(row) == len(self.head)]

    @property
    def are_numbers(self) -> list[bool]:
        """For each column, True if it contains only numbers and '-'."""
        rows = self.whole_rows
        return [
            all(row[i].value is not None or row[i].text == '-' for row in rows)
            for i in range(len(self.head))
        ]


def status_cell(text: str) -> Cell:
    return Cell(text, level=STATUS_LEVELS.get(text, ''))


def number_cell(value: float | None, form: str = ',.0f', refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a cell with a formatted number, or '-' for None."""
    return Cell('-' if value is None else format(value, form), value, refs)


def figures_cell(value: float | None, refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a cell with a number that has at least three significant digits."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value else 0
    return number_cell(value, f',.{digits}f', refs)


def percent_cell(value: float | None, form: str = '.0f', refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a cell with a fraction as a percentage, or '-' for None."""
    return Cell('-' if value is None else percent(value, form), value, refs)


def fit_columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    minor: Sequence[str] = (),
    sides: Sequence[str] = (),
    table_format: str = 'simple',
) -> str:
    """Return a table of texts as text that fits a terminal, with the number of omitted columns
    below it.

    Args:
        width: columns of the terminal; None omits nothing. Texts longer than a third of it are cut
            in the middle.
        minor: columns that are omitted first, the last first; then others are, from the right. The
            first two remain.
        sides: 'left' or 'right' for each column.
    """

    def render() -> str:
        shown, *body = zip(*(columns[i] for i in kept))
        return tabulate(
            body,
            shown,
            table_format,
            disable_numparse=True,
            colalign=[sides[i] for i in kept] if sides else None,
        )

    columns: list[Sequence[str]] = [*zip(head, *rows)]
    kept = list(range(len(head)))
    text = render()
    if width is not None and len(text.splitlines()[1]) > width:
        columns = [cut_names(texts, max(width // 3, _LEAST_CUT)) for texts in columns]
        names = [*(h for h in head if h not in minor), *minor]
        dropped = sorted(kept[2:], key=lambda i: (names.index(head[i]), i))
        while len((text := render()).splitlines()[1]) > width and dropped:
            kept.remove(dropped.pop())
    more = len(head) - len(kept)
    return text + (f'\n{plural(more, "more column")}: --wide' if more else '')


def wrap_line(text: str, width: int | None, indent: str = '') -> str:
    """Wrap a line to a width in characters, or return it unchanged if width is None. indent begins
    further lines."""
    return (
        text
        if width is None
        else textwrap.fill(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    )
