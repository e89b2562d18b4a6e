"""Evaluations and training segments, with times since run_start, and findings about inconsistent
times."""

import bisect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import SKEW_S, gaps_of, outside_s
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.read.raw_log import RUN_FINAL, LinePosition, RawLog
from mlperf_rn50.mllog.run import Evaluation, TrainSegment
from mlperf_rn50.runfolder.jsonl import number

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
    marks = {epoch: log.eval_starts.get(epoch, mark) for epoch, (mark, _) in log.accuracies.items()}
    is_from_0 = all(epoch <= _last_begun(log, mark) for epoch, mark in marks.items())
    if not any(
        k in log.epochs and stop.line < log.epochs[k][0].line for k, stop in log.epoch_stops.items()
    ):
        # MosaicML counts starts from 0, but stops from 1
        log.epoch_stops = _shifted(log.epoch_stops)
    log.epochs, log.blocks, log.stats = (
        _shifted(log.epochs),
        _shifted(log.blocks),
        _shifted(log.stats),
    )
    if is_from_0:
        log.accuracies = _shifted(log.accuracies)
        log.eval_starts, log.eval_stops = _shifted(log.eval_starts), _shifted(log.eval_stops)
    return is_from_0


def _shifted(by_epoch: dict[int, Any]) -> dict[int, Any]:
    return {epoch + 1: value for epoch, value in by_epoch.items()}


def join_blocks(log: RawLog) -> None:
    """Multiply the length of a block by its start lines if it then ends at the next block or the
    last evaluation."""
    firsts = [*sorted(log.blocks), max(log.accuracies, default=0) + 1]
    for first, repeats in (+log.block_repeats).items():
        mark, count = log.blocks[first]
        following = firsts[bisect.bisect_right(firsts, first, hi=len(firsts) - 1)]
        if first + count * ((1 + repeats) // log.num_loggers) == following:
            log.blocks[first] = mark, following - first


def _last_begun(log: RawLog, mark: LinePosition) -> int:
    """Return the number, as logged, of the last epoch that begins before a position in the log; 0
    if there is none."""
    return max(
        (
            first + count - 1
            for first, (start, count) in (log.epochs or log.blocks).items()
            if start.line < mark.line
        ),
        default=0,
    )


def evaluations(log: RawLog) -> tuple[Evaluation, ...]:
    """Return the evaluations in order of their epochs."""
    return tuple(
        Evaluation(
            epoch,
            accuracy,
            mark.line,
            log.clock_s(mark),
            log.clock_s(log.eval_starts.get(epoch)),
            log.clock_s(log.eval_stops.get(epoch, mark)),
        )
        for epoch, (mark, accuracy) in sorted(log.accuracies.items())
    )


def train_segments(log: RawLog, end_s: float | None) -> tuple[TrainSegment, ...]:
    """Return epochs or, without any, blocks. One without a logged end ends at the next start,
    evaluation or end_s."""
    starts = log.epochs or log.blocks
    borders = sorted(
        t
        for t in [
            end_s,
            *(log.clock_s(mark) for mark, _ in starts.values()),
            *map(log.clock_s, log.eval_starts.values()),
        ]
        if t is not None
    )
    segments, gaps = [], gaps_of(log.resumes)
    for epoch, (mark, num_epochs) in sorted(starts.items()):
        start_s, stop_s = (
            log.clock_s(mark),
            log.clock_s(log.epoch_stops.get(epoch + num_epochs - 1)),
        )
        if start_s is None:
            continue
        following = bisect.bisect_right(borders, start_s)
        if stop_s is None and following < len(borders):
            stop_s = borders[following]
        stats = log.stats[epoch][1] if epoch in log.stats else {}
        rate = stats.get('throughput', stats.get('imgs_sec'))
        if stop_s is not None and stop_s >= max(start_s, 0.0) and start_s >= -SKEW_S:
            rate = number(rate, 0, 1e12)
            segments.append(
                TrainSegment(epoch, num_epochs, max(start_s, 0.0), stop_s, rate, mark.line)
            )
    # Some logs record epoch ends when the steps are queued, not done. Their training continues up
    # to the evaluation.
    borders, evals = [*borders, math.inf], {log.clock_s(mark) for mark in log.eval_starts.values()}
    ends = [
        end if (end := borders[bisect.bisect_left(borders, s.stop_s)]) in evals else s.stop_s
        for s in segments
    ]
    queued_s = sum(end - s.stop_s for s, end in zip(segments, ends))
    is_queued = queued_s > _MAX_QUEUED * sum(outside_s(gaps, s.start_s, s.stop_s) for s in segments)
    return tuple(s._replace(stop_s=end) if is_queued else s for s, end in zip(segments, ends))


Moment = tuple[LinePosition, str]  # position of an event in the log, and name of the event


def _train_moments(log: RawLog) -> list[Moment]:
    return [
        (mark, f'{name} {k}')
        for name, starts in (('epoch', log.epochs), ('block', log.blocks))
        for k, (mark, _) in starts.items()
    ]


def _eval_moments(log: RawLog) -> list[Moment]:
    return [
        *((mark, f'evaluation {k}') for k, mark in log.eval_starts.items()),
        *((mark, f'accuracy {k}') for k, (mark, _) in log.accuracies.items()),
    ]


def contradictions(log: RawLog) -> list[Finding]:
    """Return the findings that make the time to train unusable."""
    if keys.RUN_START not in log.single:
        return []
    return [
        *log.early_resumes,
        *_check_start(log),
        *_check_stop(log),
        *_check_order('epoch_back', log.epochs),
    ]


def misplaced(log: RawLog) -> Iterator[Finding]:
    """Yield findings about misplaced init_stop, evaluations and ends of epochs; the time to train
    stays usable."""
    if keys.RUN_START not in log.single:
        return
    start, init = log.single[keys.RUN_START][0], log.single.get(keys.INIT_STOP)
    if init and (early_s := init[0].time_s - start.time_s) > SKEW_S:
        yield make_finding('init_stop_late', start.line, early_s, init[0].line)
    for mark, name in _eval_moments(log) if log.epochs or log.blocks else []:
        if (early_s := start.time_s - mark.time_s) > SKEW_S:
            yield make_finding('evaluation_before_start', mark.line, name, early_s, start.line)
    yield from _check_order('accuracy_back', log.accuracies)
    epochs, accuracies = (
        {k: mark for k, (mark, _) in marks.items()} for marks in (log.epochs, log.accuracies)
    )
    for name, starts, ends in (
        ('epoch', epochs, log.epoch_stops),
        ('evaluation', log.eval_starts, accuracies),
    ):
        for epoch in sorted(starts.keys() & ends.keys()):
            if (back_s := starts[epoch].time_s - ends[epoch].time_s) > SKEW_S:
                yield make_finding(
                    'end_before_start', ends[epoch].line, name, epoch, back_s, starts[epoch].line
                )


def _check_start(log: RawLog) -> Iterator[Finding]:
    start = log.single[keys.RUN_START][0]
    first, name = min(
        _train_moments(log) or _eval_moments(log), key=lambda m: m[0].time_s, default=(start, '')
    )
    if (late_s := start.time_s - first.time_s) > SKEW_S:
        yield make_finding('start_late', start.line, late_s, name, first.line)
    if start.time_s < _OLDEST_S:
        yield make_finding('start_1970', start.line)


def _check_stop(log: RawLog) -> Iterator[Finding]:
    if keys.RUN_STOP not in log.single:
        return
    stop, final = log.single[keys.RUN_STOP][0], log.single.get(RUN_FINAL)
    ends = [
        *((mark, f'the end of evaluation {k}') for k, mark in log.eval_stops.items()),
        *((mark, f'the end of epoch {k}') for k, mark in log.epoch_stops.items()),
    ]
    if log.last_block_stop:
        ends.append((log.last_block_stop, 'the end of a block'))
    last, name = max(
        [*_train_moments(log), *_eval_moments(log), *ends],
        key=lambda m: m[0].time_s,
        default=(stop, ''),
    )
    if (early_s := last.time_s - stop.time_s) > SKEW_S:
        yield make_finding('stop_early', stop.line, early_s, name, last.line)
    if final and (late_s := stop.time_s - final[0].time_s) > SKEW_S:
        yield make_finding('stop_after_final', stop.line, late_s, final[0].line)


def check_duration(log: RawLog, duration_s: float | None) -> Iterator[Finding]:
    """Yield a finding if the log's wall clock contradicts the duration that the run itself measured
    (None: unknown)."""
    mark = log.single[keys.RUN_STOP][0] if keys.RUN_STOP in log.single else None
    logged_s = log.clock_s(mark)
    if (
        mark
        and logged_s is not None
        and duration_s is not None
        and abs(logged_s - duration_s) > STEP_S
    ):
        yield make_finding('clock_changed', mark.line, logged_s, duration_s)


def _check_order(kind: str, starts: Mapping[int, tuple[LinePosition, float]]) -> Iterator[Finding]:
    pairs = sorted((epoch, mark) for epoch, (mark, _) in starts.items())
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
    stop, event = log.single[keys.RUN_STOP]
    usual_s = max(
        [e.stop_s - e.start_s for e in done if e.start_s is not None and e.stop_s is not None],
        default=0.0,
    )
    if not log.is_success(event):  # a successful run trains nothing after it reaches the target
        usual_s += max([(s.stop_s - s.start_s) / s.num_epochs for s in segments], default=0.0)
    limit_s = max(_GAP_S, usual_s)
    if (gap_s := (log.clock_s(stop) or 0.0) - max(ends)) > limit_s:
        yield make_finding('stop_late', stop.line, gap_s, limit_s)
