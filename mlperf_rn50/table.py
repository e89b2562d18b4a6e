"""Tables for every output format, with a sort value and the source log lines in each cell. Pure."""
import math
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.text import percent

Ref = tuple[Path, int]  # a log and a line number


@dataclass(frozen=True)
class Cell:
    """Text of a table cell with its sort value and its source."""

    text: str
    value: float | None = None
    refs: tuple[Ref, ...] = ()
    span: int = 1  # number of columns
    study: int | None = None  # number of the linked study, counted from 1


@dataclass(frozen=True)
class Table:
    """A table with a title and an explanatory note."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ''
    minor: tuple[str, ...] = ()  # columns that a narrow screen hides by default
    choices: tuple[str, ...] = ()  # columns with a filter

    @property
    def whole_rows(self) -> list[tuple[Cell, ...]]:
        """Rows with a cell in each column."""
        return [row for row in self.rows if len(row) == len(self.head)]

    @property
    def are_numbers(self) -> list[bool]:
        """For each column, True if it contains only numbers and '-'."""
        rows = self.whole_rows
        return [all(row[i].value is not None or row[i].text == '-' for row in rows) for i in range(len(self.head))]


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
