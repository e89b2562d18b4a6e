"""Evaluations and training segments, with times since run_start, and findings about inconsistent
times."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import SKEW_S, gaps_of, outside_s
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import Evaluation, TrainSegment
from mlperf_rn50.mllog.read.raw_log import RUN_FINAL, ByEpoch, RawLog

STEP_S = 1.0  # tolerated difference between the wall clock and the monotonic clock over a run
# tolerated time between the last evaluation and run_stop, however short the epochs are
_GAP_S = 60.0
# tolerated time between ends of epochs and their evaluations, as a share of the training
_MAX_QUEUED = 0.05
_OLDEST_S = 1e9  # an earlier time was probably logged in seconds instead of milliseconds


def renumber(log: RawLog) -> bool:
    """Make the epochs of a log that counts them from 0 count from 1. Return whether its evaluations
    did so too.

    They did if none has a higher number than the last epoch that began before it.
    """
    # 0 in logs of TensorFlow (v0.7 to v1.0) and MosaicML (v2.0)
    if min([*log.epochs, *log.blocks], default=1) != 0:
        return False
    is_from_0 = all(
        epoch <= _last_begun(log, log.eval_starts.get(epoch, event))
        for epoch, event in log.accuracies.items()
    )
    from_0 = [log.epochs, log.blocks]
    # MosaicML counts starts from 0, but stops from 1
    stops = log.epoch_stops.items()
    if not any(k in log.epochs and stop.line < log.epochs[k].line for k, stop in stops):
        from_0.append(log.epoch_stops)
    if is_from_0:
        from_0 += [log.accuracies, log.eval_starts, log.eval_stops]
    for by_epoch in from_0:
        shifted = {epoch + 1: event for epoch, event in by_epoch.items()}
        by_epoch.clear()
        by_epoch.update(shifted)
    return is_from_0


def join_blocks(log: RawLog) -> None:
    """Multiply the length of a block by its start lines if it then ends at the next block or the
    last evaluation."""
    firsts = [*sorted(log.blocks), max(log.accuracies, default=0) + 1]
    for first, repeats in log.block_repeats.items():
        start = log.blocks[first]
        following = firsts[bisect.bisect_right(firsts, first, hi=len(firsts) - 1)]
        length = start.value * ((1 + repeats) // log.num_loggers)
        if length and first + length == following:
            log.blocks[first] = replace(start, value=following - first)


def _last_begun(log: RawLog, event: LogEvent) -> int:
    """Return the number, as logged, of the last epoch that begins before an event in the log; 0 if
    there is none."""
    starts = (log.epochs or log.blocks).items()
    begun = (first + start.value - 1 for first, start in starts if start.line < event.line)
    return max(begun, default=0)


def evaluations(log: RawLog) -> tuple[Evaluation, ...]:
    """Return the evaluations in order of their epochs."""
    return tuple(
        Evaluation(
            epoch,
            accuracy=event.value,
            line=event.line,
            time_s=log.clock_s(event),
            start_s=log.clock_s(log.eval_starts.get(epoch)),
            stop_s=log.clock_s(log.eval_stops.get(epoch, event)),
        )
        for epoch, event in sorted(log.accuracies.items())
    )


def train_segments(log: RawLog, end_s: float | None) -> tuple[TrainSegment, ...]:
    """Return epochs or, without any, blocks. One without a logged end ends at the next start,
    evaluation or end_s."""
    starts = log.epochs or log.blocks
    times = [end_s, *map(log.clock_s, [*starts.values(), *log.eval_starts.values()])]
    borders = sorted(t for t in times if t is not None)
    segments = []
    for epoch, start in sorted(starts.items()):
        start_s = log.clock_s(start)
        if start_s is None:
            continue
        stop_s = log.clock_s(log.epoch_stops.get(epoch + start.value - 1))
        following = bisect.bisect_right(borders, start_s)
        if stop_s is None and following < len(borders):
            stop_s = borders[following]
        if stop_s is not None and stop_s >= max(start_s, 0.0) and start_s >= -SKEW_S:
            segments.append(
                TrainSegment(
                    epoch,
                    num_epochs=start.value,
                    start_s=max(start_s, 0.0),
                    stop_s=stop_s,
                    line=start.line,
                )
            )

    # Some logs record epoch ends when the steps are queued, not done. Their training continues up
    # to the evaluation.
    evals = {*map(log.clock_s, log.eval_starts.values())}
    borders.append(math.inf)
    ends = []
    for segment in segments:
        following_s = borders[bisect.bisect_left(borders, segment.stop_s)]
        ends.append(following_s if following_s in evals else segment.stop_s)
    queued_s = sum(end - s.stop_s for s, end in zip(segments, ends))
    gaps = gaps_of(log.resumes)
    trained_s = sum(outside_s(gaps, s.start_s, s.stop_s) for s in segments)
    if queued_s <= _MAX_QUEUED * trained_s:
        return tuple(segments)
    return tuple(s._replace(stop_s=end) for s, end in zip(segments, ends))


Moment = tuple[LogEvent, str]  # an event, and its name


def _moments(**by_name: ByEpoch) -> list[Moment]:
    return [
        (event, f'{name} {epoch}')
        for name, by_epoch in by_name.items()
        for epoch, event in by_epoch.items()
    ]


def _train_moments(log: RawLog) -> list[Moment]:
    return _moments(epoch=log.epochs, block=log.blocks)


def _eval_moments(log: RawLog) -> list[Moment]:
    return _moments(evaluation=log.eval_starts, accuracy=log.accuracies)


def check_times(log: RawLog, duration_s: float | None) -> bool:
    """Add findings about inconsistent times. Return whether the time to train is valid.

    duration_s: as the run itself measured it; None if unknown.
    """
    contradictions, others = list[Finding](), list[Finding]()
    if keys.RUN_START in log.single:
        start = log.single[keys.RUN_START]
        contradictions = [
            *log.early_resumes,
            *_check_start(log, start),
            *_check_stop(log),
            *_check_order('epoch_back', log.epochs),
        ]
        others = [*_misplaced(log, start)]
    contradictions += _check_duration(log, duration_s)
    for finding in contradictions + others:
        log.findings.add(finding)
    return not contradictions


def _misplaced(log: RawLog, start: LogEvent) -> Iterator[Finding]:
    """Yield findings about misplaced init_stop, evaluations and ends of epochs; the time to train
    stays usable."""
    init = log.single.get(keys.INIT_STOP)
    if init and (early_s := init.time_s - start.time_s) > SKEW_S:
        yield make_finding('init_stop_late', start.line, early_s, init.line)
    for event, name in _eval_moments(log) if log.epochs or log.blocks else []:
        if (early_s := start.time_s - event.time_s) > SKEW_S:
            yield make_finding('evaluation_before_start', event.line, name, early_s, start.line)
    yield from _check_order('accuracy_back', log.accuracies)
    for name, starts, ends in (
        ('epoch', log.epochs, log.epoch_stops),
        ('evaluation', log.eval_starts, log.accuracies),
    ):
        for epoch in sorted(starts.keys() & ends.keys()):
            begin, end = starts[epoch], ends[epoch]
            if (back_s := begin.time_s - end.time_s) > SKEW_S:
                yield make_finding('end_before_start', end.line, name, epoch, back_s, begin.line)


def _time(moment: Moment) -> float:
    return moment[0].time_s


def _check_start(log: RawLog, start: LogEvent) -> Iterator[Finding]:
    first, name = min(_train_moments(log) or _eval_moments(log) or [(start, '')], key=_time)
    if (late_s := start.time_s - first.time_s) > SKEW_S:
        yield make_finding('start_late', start.line, late_s, name, first.line)
    if start.time_s < _OLDEST_S:
        yield make_finding('start_1970', start.line)


def _check_stop(log: RawLog) -> Iterator[Finding]:
    if keys.RUN_STOP not in log.single:
        return
    stop, final = log.single[keys.RUN_STOP], log.single.get(RUN_FINAL)
    ends = {'the end of evaluation': log.eval_stops, 'the end of epoch': log.epoch_stops}
    moments = [*_train_moments(log), *_eval_moments(log), *_moments(**ends)]
    if log.resumes:
        moments += [(event, 'the resume') for event in log.resumed]
    if log.last_block_stop:
        moments.append((log.last_block_stop, 'the end of a block'))
    last, name = max(moments or [(stop, '')], key=_time)
    if (early_s := last.time_s - stop.time_s) > SKEW_S:
        yield make_finding('stop_early', stop.line, early_s, name, last.line)
    if final and (late_s := stop.time_s - final.time_s) > SKEW_S:
        yield make_finding('stop_after_final', stop.line, late_s, final.line)


def _check_duration(log: RawLog, duration_s: float | None) -> Iterator[Finding]:
    stop = log.single.get(keys.RUN_STOP)
    logged_s = log.clock_s(stop)
    if stop is None or logged_s is None or duration_s is None:
        return
    if abs(logged_s - duration_s) > STEP_S:
        yield make_finding('clock_changed', stop.line, logged_s, duration_s)


def _check_order(kind: str, starts: ByEpoch) -> Iterator[Finding]:
    pairs = sorted(starts.items())
    for (before, earlier), (epoch, later) in zip(pairs, pairs[1:]):
        if (back_s := earlier.time_s - later.time_s) > SKEW_S:
            yield make_finding(kind, later.line, epoch, back_s, before, earlier.line)


def check_gap(
    log: RawLog, done: tuple[Evaluation, ...], segments: tuple[TrainSegment, ...]
) -> Iterator[Finding]:
    """Yield a note if run_stop is so late that training and evaluation cannot explain it."""
    ends = [t for e in done for t in (e.time_s, e.stop_s) if t is not None]
    if log.resumes or not ends or not log.single.keys() >= {keys.RUN_START, keys.RUN_STOP}:
        return
    stop = log.single[keys.RUN_STOP]
    usual_s = max(
        [e.stop_s - e.start_s for e in done if e.start_s is not None and e.stop_s is not None],
        default=0.0,
    )
    if not log.is_success(stop):  # a successful run trains nothing after it reaches the target
        usual_s += max([(s.stop_s - s.start_s) / s.num_epochs for s in segments], default=0.0)
    limit_s = max(_GAP_S, usual_s)
    if (gap_s := (log.clock_s(stop) or 0.0) - max(ends)) > limit_s:
        yield make_finding('stop_late', stop.line, gap_s, limit_s)
