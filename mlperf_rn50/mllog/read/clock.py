"""A run on its clock: evaluations, training in stretches, learning rates; and where its times do not nest. Pure."""
import bisect
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.read.raw_log import RUN_FINAL, LinePosition, RawLog, integer, number
from mlperf_rn50.mllog.run import Evaluation, TrainSegment

# Clocks of nodes and of processes may differ by so much; published logs have milliseconds.
SKEW_S = 2.0
# A gap that is reported, however short the epochs are.
_GAP_S = 60.0
# No run is older: what seems so has its times in seconds where milliseconds belong.
_OLDEST_S = 1e9
T = TypeVar('T')


def renumber(found: RawLog) -> None:
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


def _last_begun(found: RawLog, mark: LinePosition) -> int:
    """Return the last epoch, as the log counts, that begins before a mark."""
    return max((first + count - 1 for first, (start, count) in (found.epochs or found.blocks).items()
                if start.line < mark.line), default=0)


def evaluations_of(found: RawLog) -> tuple[Evaluation, ...]:
    """The evaluations in the order of their epochs."""
    clock_s = found.clock_s
    return tuple(Evaluation(epoch, accuracy, mark.line, clock_s(mark), clock_s(found.eval_starts.get(epoch)),
                            clock_s(found.eval_stops.get(epoch, mark)))
                 for epoch, (mark, accuracy) in sorted(found.accuracies.items()))


def stretches_of(found: RawLog, end_s: float | None) -> tuple[TrainSegment, ...]:
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
            result.append(TrainSegment(epoch, num_epochs, start_s, stop_s, number(rate, 0, 1e12), mark.line))
    return tuple(result)


def learning_rates_of(found: RawLog) -> tuple[tuple[float, float], ...]:
    """(seconds since run_start, learning rate) in the order of time."""
    pairs = [(found.clock_s(mark), number(rate, 0, 1e9)) for mark, rate in found.rates]
    return tuple(sorted((t, lr) for t, lr in pairs if t is not None and lr is not None))


class Oddity(NamedTuple):
    """A line, what is odd about it, and how to say it of many such lines."""

    line: int
    text: str
    many: str = ''


Moment = tuple[LinePosition, str]  # when something happens, and what


def _training(found: RawLog) -> list[Moment]:
    return [(mark, f'{name} {k}') for name, starts in (('epoch', found.epochs), ('block', found.blocks))
            for k, (mark, _) in starts.items()]


def _evaluations(found: RawLog) -> list[Moment]:
    return [*((mark, f'evaluation {k}') for k, mark in found.eval_starts.items()),
            *((mark, f'accuracy {k}') for k, (mark, _) in found.accuracies.items())]


def contradictions(found: RawLog) -> list[Oddity]:
    """Where the clock of a log contradicts itself; of a resumed run, whose epochs come from several, at its resumes."""
    if found.resumes:
        return list(_resumes(found))
    if keys.RUN_START not in found.single:
        return []
    return [*_around_start(found), *_around_stop(found), *_out_of_order('epoch', found.epochs)]


def _resumes(found: RawLog) -> Iterator[Oddity]:
    """Resumes whose clock is not told, or goes on before what the checkpoint holds, or after the resume itself."""
    for part, (mark, event) in enumerate(found.resumes):
        clock_s = number(event.metadata.get('clock_s'), 0, 1e9)
        if clock_s is None:
            yield Oddity(mark.line, 'run_resumed has no clock_s, the seconds of the run so far',
                         'run_resumed has no clock_s')
            continue
        epoch = integer(event.metadata.get('epoch_num'), 1)
        # An evaluation may come after the checkpoint of its epoch.
        kept = [*((k, start) for k, (start, _) in found.epochs.items()),
                *((k + 1, stop) for k, stop in found.epoch_stops.items()),
                *((k + 2, accuracy) for k, (accuracy, _) in found.accuracies.items())]
        before_s = max([found.clock_s(m) or 0.0 for k, m in kept if epoch and k <= epoch and m.part <= part],
                       default=0.0)
        if clock_s < before_s - SKEW_S:
            yield Oddity(mark.line, f'run_resumed goes on at {clock_s:.1f} s, before the {before_s:.1f} s of what was '
                                    'trained', 'run_resumed goes on before what was trained')
        now_s = found.clock_s(mark._replace(part=part))
        if now_s is not None and 0 <= now_s < clock_s - SKEW_S:
            yield Oddity(mark.line, f'run_resumed goes on at {clock_s:.1f} s, {now_s:.1f} s after the start',
                         'run_resumed goes on after its own time')


def misplaced(found: RawLog) -> list[Oddity]:
    """Evaluations, and ends, whose times are odd, though the clock of the run is not."""
    if found.resumes or keys.RUN_START not in found.single:
        return []
    return [*_early_evaluations(found), *_out_of_order('accuracy', found.accuracies), *_ends(found)]


def _around_start(found: RawLog) -> Iterator[Oddity]:
    start = found.single[keys.RUN_START][0]
    first, what = min(_training(found) or _evaluations(found), key=lambda m: m[0].time_s, default=(start, ''))
    if (late_s := start.time_s - first.time_s) > SKEW_S:
        yield Oddity(start.line, f'run_start stands {late_s:.1f} s after {what} (line {first.line})')
    init = found.single.get(keys.INIT_STOP)
    if init and (early_s := init[0].time_s - start.time_s) > SKEW_S:
        yield Oddity(start.line, f'run_start stands {early_s:.1f} s before init_stop (line {init[0].line})')
    if start.time_s < _OLDEST_S:
        yield Oddity(start.line, 'run_start is of 1970, as if its times were seconds, not milliseconds')


def _around_stop(found: RawLog) -> Iterator[Oddity]:
    if keys.RUN_STOP not in found.single:
        return
    stop, final = found.single[keys.RUN_STOP][0], found.single.get(RUN_FINAL)
    ends = [(mark, f'the end of {name} {k}') for name, stops in (('evaluation', found.eval_stops),
                                                                ('epoch', found.epoch_stops))
            for k, mark in stops.items()]
    if found.last_block_stop:
        ends.append((found.last_block_stop, 'the end of a block'))
    last, what = max([*_training(found), *_evaluations(found), *ends], key=lambda m: m[0].time_s, default=(stop, ''))
    if (early_s := last.time_s - stop.time_s) > SKEW_S:
        yield Oddity(stop.line, f'run_stop stands {early_s:.1f} s before {what} (line {last.line})')
    if final and (late_s := stop.time_s - final[0].time_s) > SKEW_S:
        yield Oddity(stop.line, f'run_stop stands {late_s:.1f} s after run_final (line {final[0].line})')


def _early_evaluations(found: RawLog) -> Iterator[Oddity]:
    start = found.single[keys.RUN_START][0]
    for mark, what in _evaluations(found) if found.epochs or found.blocks else []:
        if (early_s := start.time_s - mark.time_s) > SKEW_S:
            yield Oddity(mark.line, f'{what} stands {early_s:.1f} s before run_start (line {start.line})',
                         'evaluation before run_start')


def _out_of_order(name: str, starts: Mapping[int, tuple[LinePosition, float]]) -> Iterator[Oddity]:
    """What is older than that of an earlier epoch."""
    pairs = sorted((epoch, mark) for epoch, (mark, _) in starts.items())
    for (before, earlier), (epoch, later) in zip(pairs, pairs[1:]):
        if (back_s := earlier.time_s - later.time_s) > SKEW_S:
            yield Oddity(later.line, f'{name} {epoch} stands {back_s:.1f} s before {name} {before} '
                         f'(line {earlier.line})', f'{name} stands before that of an earlier epoch')


def _ends(found: RawLog) -> Iterator[Oddity]:
    """Ends that stand before their starts."""
    epochs = {k: mark for k, (mark, _) in found.epochs.items()}
    accuracies = {k: mark for k, (mark, _) in found.accuracies.items()}
    for name, starts, ends in (('epoch', epochs, found.epoch_stops), ('evaluation', found.eval_starts, accuracies)):
        for epoch in sorted(starts.keys() & ends.keys()):
            if (back_s := starts[epoch].time_s - ends[epoch].time_s) > SKEW_S:
                yield Oddity(ends[epoch].line, f'{name} {epoch} ends {back_s:.1f} s before its start '
                             f'(line {starts[epoch].line})', f'{name} ends before its start')


def stop_gap(found: RawLog, evaluations: tuple[Evaluation, ...],
             stretches: tuple[TrainSegment, ...]) -> Iterator[Oddity]:
    """Yield a run_stop later than training and evaluation explain."""
    ends = [t for e in evaluations for t in (e.time_s, e.stop_s) if t is not None]
    if found.resumes or not ends or not found.single.keys() >= {keys.RUN_START, keys.RUN_STOP}:
        return
    stop, event = found.single[keys.RUN_STOP]
    usual_s = max([e.stop_s - e.start_s for e in evaluations if e.start_s is not None and e.stop_s is not None],
                  default=0.0)
    if not found.says_success(event):  # else nothing is trained after the target is reached
        usual_s += max([(s.stop_s - s.start_s) / s.num_epochs for s in stretches], default=0.0)
    if (gap_s := (found.clock_s(stop) or 0.0) - max(ends)) > max(_GAP_S, usual_s):
        yield Oddity(stop.line, f'run_stop stands {gap_s:.1f} s after the last evaluation')
