"""Rows of numbers kept as numbers: a tenth of the memory of tuples, for reports on thousands of runs."""
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any, Generic, TypeVar, overload

from mlperf_rn50.mlperf.run import Evaluation, Run, Stretch

_Row = TypeVar('_Row', bound=tuple)


def _column(values: Sequence[float | None]) -> tuple[array, bool]:
    """Whole numbers, or floats of which some may be missing; and whether some are."""
    if all(type(v) is int for v in values):
        is_small = -2**31 <= min(values) and max(values) < 2**31  # type: ignore[type-var, operator]
        return array('i' if is_small else 'q', values), False
    return array('d', (nan if v is None else v for v in values)), None in values


class Packed(Sequence[_Row], Generic[_Row]):
    """Tuples that are made when they are asked for."""

    __slots__ = ('_make', '_columns')

    def __init__(self, kind: type[_Row], rows: Iterable[_Row]):
        """kind: of tuple; no value of a row is NaN."""
        self._make, self._columns = partial(tuple.__new__, kind), [_column(values) for values in zip(*rows)]

    def __len__(self) -> int:
        return len(self._columns[0][0]) if self._columns else 0

    @overload
    def __getitem__(self, place: int) -> _Row: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[_Row, ...]: ...

    def __getitem__(self, place):
        if isinstance(place, slice):
            return tuple(self._rows([(values[place], has_gaps) for values, has_gaps in self._columns]))
        return self._make([None if (v := values[place]) != v and has_gaps else v for values, has_gaps in self._columns])

    def __iter__(self) -> Iterator[_Row]:
        return self._rows(self._columns)

    def _rows(self, columns: list[tuple[array, bool]]) -> Iterator[_Row]:
        return map(self._make, zip(*([None if v != v else v for v in values] if has_gaps else values
                                     for values, has_gaps in columns)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))


def pack(run: Run) -> Run:
    """The same run, its rows of numbers packed."""
    return replace(run, evaluations=Packed(Evaluation, run.evaluations),
                   stretches=Packed(Stretch, run.stretches), learning_rates=Packed(tuple, run.learning_rates))
