"""Tables for every form of output: their cells know their value and their log lines. Pure."""
import math
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.text import percent

Ref = tuple[Path, int]  # a log and a line of it


@dataclass(frozen=True)
class Cell:
    """What a table shows, what it sorts by, and where it comes from."""

    text: str
    value: float | None = None
    refs: tuple[Ref, ...] = ()
    span: int = 1  # columns
    study: int | None = None  # number, from 1, of the one that it leads to


@dataclass(frozen=True)
class Table:
    """A table with its title, and a sentence that says how to read it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ''
    minor: tuple[str, ...] = ()  # columns that a narrow screen leaves out until they are asked for
    choices: tuple[str, ...] = ()  # columns by whose texts rows can be chosen

    @property
    def whole_rows(self) -> list[tuple[Cell, ...]]:
        """The rows with a cell in each column."""
        return [row for row in self.rows if len(row) == len(self.head)]

    @property
    def are_numbers(self) -> list[bool]:
        """Of each column, whether it has nothing but numbers."""
        rows = self.whole_rows
        return [all(row[i].value is not None or row[i].text == '-' for row in rows) for i in range(len(self.head))]


def number_cell(value: float | None, form: str = ',.0f', refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a number in a format, '-' without one."""
    return Cell('-' if value is None else format(value, form), value, refs)


def figures_cell(value: float | None, refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a number with three figures, or more of a large one."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value else 0
    return number_cell(value, f',.{digits}f', refs)


def percent_cell(value: float | None, form: str = '.0f', refs: tuple[Ref, ...] = ()) -> Cell:
    """Return a fraction as per cent."""
    return Cell('-' if value is None else percent(value, form), value, refs)
