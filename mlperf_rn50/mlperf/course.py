"""The course of a run on its clock: its evaluations, its training in stretches, its learning rates."""
import bisect

from mlperf_rn50.mlperf.collect import Found, number
from mlperf_rn50.mlperf.run import Evaluation, Stretch


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
