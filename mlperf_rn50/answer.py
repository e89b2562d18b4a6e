"""The answer of a command: sentences, tables and notes, for every output format. Pure.

mlperf_rn50/analysis/show renders it. A cell of a table or a sentence has a sort value and the
source log lines of its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import EXIT_OK
from mlperf_rn50.text import percent

Ref = tuple[Path, int]  # a log and a line number
Refs = tuple[Ref, ...]
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
    refs: Refs = ()
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
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ''
    minor: Sequence[str] = ()  # columns that a narrow screen hides, the last first
    choices: Sequence[str] = ()  # columns with a filter, on a page
    is_whole: bool = False  # on a wide screen, a page shows all its columns

    @property
    def whole_rows(self) -> list[Sequence[Cell]]:
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


def columns(text: str) -> tuple[str, ...]:
    """Return the headings of a table from a line in which bars separate them."""
    return tuple(text.split(' | '))


def status_cell(text: str) -> Cell:
    return Cell(text, level=STATUS_LEVELS.get(text, ''))


def number_cell(value: float | None, form: str = ',.0f', refs: Refs = ()) -> Cell:
    """Return a cell with a formatted number, or '-' for None."""
    return Cell('-' if value is None else format(value, form), value, refs)


def figures_cell(value: float | None, refs: Refs = ()) -> Cell:
    """Return a cell with a number that has at least three significant digits."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value else 0
    return number_cell(value, f',.{digits}f', refs)


def percent_cell(value: float | None, form: str = '.0f', refs: Refs = ()) -> Cell:
    """Return a cell with a fraction as a percentage, or '-' for None."""
    return Cell('-' if value is None else percent(value, form), value, refs)


# The cells of a sentence can refer to their log lines, and give the sentence a colour.
Sentence = str | tuple[Cell, ...]


@dataclass(frozen=True)
class Answer:
    """Sentences that answer first, then their evidence, notes, and the answers about its parts."""

    title: str = ''
    sentences: Sequence[Sentence] = ()  # list items below a title, otherwise paragraphs
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()  # list items below their title, otherwise paragraphs
    notes_title: str = ''
    parts: Sequence[Answer] = ()  # such as one per study or run
    summary: str | None = None  # of a part that a page folds below its title and this text
    # draws the plots (show.figure.Plot) for a page or the folder of --out
    figures: Callable[[], Iterable[Any]] = tuple
    # object of --format json; iterators in it are written as lists, item by item
    data: Any = None
    exit_code: int = EXIT_OK


def sentence_text(sentence: Sentence) -> str:
    return sentence if isinstance(sentence, str) else ''.join(cell.text for cell in sentence)
