"""The course of a run on its clock: its epochs, evaluations, training in stretches, learning rates."""
import bisect
from typing import TypeVar

from mlperf_rn50.mlperf.collect import Found, Mark, number
from mlperf_rn50.mlperf.run import Evaluation, Stretch

T = TypeVar('T')


def renumber(found: Found) -> None:
    """Make the epochs of a log start from 1; its evaluations, too, where none is of an epoch that is not yet begun.

    TensorFlow of v0.7 to v1.0 and MosaicML of v2.0 count from 0.
    """
    if min([*found.epochs, *found.blocks], default=1) != 0:
        return
    marks = {epoch: found.eval_starts.get(epoch, mark) for epoch, (mark, _) in found.accuracies.items()}
    is_from_0 = all(epoch <= _last_begun(found, mark) for epoch, mark in marks.items())
    found.epochs, found.blocks = _shifted(found.epochs), _shifted(found.blocks)
    found.epoch_stops, found.stats = _shifted(found.epoch_stops), _shifted(found.stats)
    if is_from_0:
        found.accuracies = _shifted(found.accuracies)
        found.eval_starts, found.eval_stops = _shifted(found.eval_starts), _shifted(found.eval_stops)


def _shifted(where: dict[int, T]) -> dict[int, T]:
    return {epoch + 1: value for epoch, value in where.items()}


def _last_begun(found: Found, mark: Mark) -> int:
    """Return the last epoch, as the log counts, that begins before a mark."""
    return max((first + count - 1 for first, (start, count) in (found.epochs or found.blocks).items()
                if start.line < mark.line), default=0)


def evaluations_of(found: Found) -> tuple[Evaluation, ...]:
    """The evaluations in the order of their epochs."""
    clock_s = found.clock_s
    return tuple(Evaluation(epoch, accuracy, mark.line, clock_s(mark), clock_s(found.eval_starts.get(epoch)),
                            clock_s(found.eval_stops.get(epoch, mark)))
                 for epoch, (mark, accuracy) in sorted(found.accuracies.items()))


def stretches_of(found: Found, end_s: float | None) -> tuple[Stretch, ...]:
    """Return training in one piece: an epoch, or where the log has none a block up to its evaluation."""
    clock_s = found.clock_s
    starts = found.epochs or found.blocks
    borders = sorted(t for t in [end_s, *(clock_s(mark) for mark, _ in starts.values()),
                                 *map(clock_s, found.eval_starts.values())] if t is not None)
    result = []
    for epoch, (mark, num_epochs) in sorted(starts.items()):
        start_s, stop_s = clock_s(mark), clock_s(found.epoch_stops.get(epoch + num_epochs - 1))
        if start_s is None:
            continue
        following = bisect.bisect_right(borders, start_s)
        if stop_s is None and following < len(borders):
            stop_s = borders[following]
        stats = found.stats[epoch][1] if epoch in found.stats else {}
        rate = stats.get('throughput', stats.get('imgs_sec'))
        if stop_s is not None and stop_s >= start_s >= 0:
            result.append(Stretch(epoch, num_epochs, start_s, stop_s, number(rate, 0, 1e12), mark.line))
    return tuple(result)


def learning_rates_of(found: Found) -> tuple[tuple[float, float], ...]:
    """(seconds since run_start, learning rate) in the order of time."""
    pairs = [(found.clock_s(mark), number(rate, 0, 1e9)) for mark, rate in found.rates]
    return tuple(sorted((t, lr) for t, lr in pairs if t is not None and lr is not None))
