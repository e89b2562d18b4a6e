"""Epochs of logs that count from another number than their format: from 0 in later rounds, from 1 in v0.5."""
from bisect import bisect_left
from itertools import accumulate
from typing import TypeVar

from mlperf_rn50.mlperf.collect import Found, Mark

T = TypeVar('T')


def renumber(found: Found) -> None:
    """Lets the epochs of a log start from 1, and its evaluations count what was trained before them."""
    shift = _training_shift(found)
    if not shift:
        return
    found.epochs, found.blocks = _shifted(found.epochs, shift), _shifted(found.blocks, shift)
    found.epoch_stops, found.stats = _shifted(found.epoch_stops, shift), _shifted(found.stats, shift)
    shift = _evaluation_shift(found, shift)
    found.accuracies = _shifted(found.accuracies, shift)
    found.eval_starts, found.eval_stops = _shifted(found.eval_starts, shift), _shifted(found.eval_stops, shift)


def _shifted(where: dict[int, T], shift: int) -> dict[int, T]:
    return {epoch + shift: value for epoch, value in where.items()}


def _training_shift(found: Found) -> int:
    first = min([*found.epochs, *found.blocks], default=1)
    if first == 0:
        return 1
    # Where the line of the first epoch is lost, the clock runs for as long as one before the second.
    return -1 if first == 2 and found.format == 'MLPv0.5.0' and not found.resumes and not _is_first_lost(found) else 0


def _is_first_lost(found: Found) -> bool:
    start_s = found.clock_s(found.epochs[2][0]) if 2 in found.epochs else None
    next_s = found.clock_s(found.epochs[3][0]) if 3 in found.epochs else None
    return start_s is None or next_s is None or start_s >= next_s - start_s


def _evaluation_shift(found: Found, shift: int) -> int:
    """Whether evaluations count as the epochs do (shift) or as the format does (0), by all of them; says doubts.

    An evaluation is of an epoch that was begun before it; one that runs beside the training may come some epochs later.
    """
    if not found.accuracies:
        return 0
    places = {epoch: found.eval_starts.get(epoch, mark) for epoch, (mark, _) in found.accuracies.items()}
    place = _Place(found)
    bounds = [(place.done(mark) - epoch, place.begun(mark) - epoch) for epoch, mark in places.items()]
    latest, earliest = min(begun for _, begun in bounds), max(done for done, _ in bounds)
    possible = [s for s in sorted((0, shift)) if earliest <= s <= latest]
    if len(possible) == 1:
        return possible[0]
    if not possible:
        return max((s for s in (0, shift) if s <= latest), default=min(0, shift))
    # Inside of an epoch: at its end it is of this one, soon after its start of the one before.
    early = [is_early for mark in places.values() if (is_early := place.is_early(mark)) is not None]
    if 2 * sum(early) <= len(early):
        return possible[-1]
    mark = min(places.values(), key=lambda m: m.line)
    found.warn(mark.line, 'whether evaluations count epochs from 0 or from 1 is not clear: they stand in the first half'
                          ' of an epoch, and are taken to be of the one before')
    return possible[0]


class _Place:
    """Where marks stand among the starts and ends of epochs, in the order of the log."""

    def __init__(self, found: Found):
        where = found.epochs or found.blocks
        self._starts = sorted((start.line, start.time_s, first + count - 1) for first, (start, count) in where.items())
        self._lines = [line for line, _, _ in self._starts]
        self._last = [0, *accumulate((epoch for _, _, epoch in self._starts), max)]
        stops = sorted((stop.line, epoch) for epoch, stop in found.epoch_stops.items())
        self._stop_lines = [line for line, _ in stops]
        self._ended = [0, *accumulate((epoch for _, epoch in stops), max)]

    def begun(self, mark: Mark) -> int:
        """The last epoch that begins before a mark."""
        return self._last[bisect_left(self._lines, mark.line)]

    def done(self, mark: Mark) -> int:
        """The last epoch that certainly ended before: its end stands there, or it is not the last that was begun."""
        return max(self._last[max(bisect_left(self._lines, mark.line) - 1, 0)],
                   self._ended[bisect_left(self._stop_lines, mark.line)])

    def is_early(self, mark: Mark) -> bool | None:
        """Whether a mark is nearer to the start of the epoch it stands in than to its end; None where unknown."""
        place = bisect_left(self._lines, mark.line)
        if not place or place == len(self._starts):
            return None
        return mark.time_s - self._starts[place - 1][1] < self._starts[place][1] - mark.time_s
