"""Time of a run split into initialisation, first epoch, later epochs, evaluation and the rest. Pure
functions."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.elapsed import gaps_of, outside_s, union_s
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import Run

# tolerated relative difference between the speeds over the logged epochs and over all training
MAX_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Parts:
    """Time of a run by phase, in seconds. All phases but init_s are part of the time to train."""

    init_s: float | None  # before run_start; None if not logged
    first_s: float  # first epoch, or first logged block of epochs
    training_s: float  # later epochs
    evaluation_s: float  # without training at the same time
    other_s: float  # with training that was lost, pauses, and times between a fault and the resume

    @property
    def on_clock_s(self) -> float:
        return self.first_s + self.training_s + self.evaluation_s + self.other_s


def parts_of(run: Run) -> Parts | None:
    """Return the time by phase, or None if the log has no epochs or no end."""
    if not run.segments or run.time_to_train_s is None:
        return None
    end_s = run.time_to_train_s
    training = [(s.start_s, min(s.stop_s, end_s)) for s in run.segments]
    evaluation = [
        (max(e.start_s, 0.0), min(e.stop_s, end_s))
        for e in run.evaluations
        if e.start_s is not None and e.stop_s is not None
    ]
    gaps = gaps_of(run.resumes)
    first_s, trained_s, total_s = (
        union_s(intervals, gaps) for intervals in (training[:1], training, training + evaluation)
    )
    return Parts(
        init_s=run.init_s,
        first_s=first_s,
        training_s=trained_s - first_s,
        evaluation_s=total_s - trained_s,
        other_s=end_s - total_s,
    )


def mean_parts(runs: Sequence[Run]) -> Parts | None:
    """Return the mean time by phase, or None if the phases of any run are unknown."""
    parts = [p for p in map(parts_of, runs) if p]
    if not parts or len(parts) < len(runs):
        return None
    inits = [p.init_s for p in parts if p.init_s is not None]
    on_clock = ('first_s', 'training_s', 'evaluation_s', 'other_s')
    return Parts(
        statistics.fmean(inits) if inits else None,
        *(statistics.fmean(getattr(p, name) for p in parts) for name in on_clock),
    )


def seconds_per_epoch(runs: Sequence[Run]) -> float | None:
    """Return the mean seconds per epoch. A run's first epoch counts only if it is the only one."""
    segments = [(run, s) for run in runs for s in run.segments[1:] or run.segments]
    epochs = sum(s.num_epochs for _, s in segments)
    seconds = sum(outside_s(gaps_of(run.resumes), s.start_s, s.stop_s) for run, s in segments)
    return seconds / epochs if epochs else None


def _span_s(run: Run) -> float:
    """Return the time from the first logged epoch to the end of the last epoch or evaluation."""
    ends = [s.stop_s for s in run.segments] + [
        e.stop_s for e in run.evaluations if e.stop_s is not None
    ]
    start_s, stop_s = run.segments[0].start_s, min(max(ends), run.time_to_train_s or 0.0)
    return outside_s(gaps_of(run.resumes), start_s, stop_s)


def speed_doubt(runs: Sequence[Run]) -> Finding | None:
    """Return why the speed cannot be derived from the logged epochs, or None if it can, or if a
    time is unknown."""
    parts = mean_parts(runs)
    if parts is None or any(not r.last_epoch for r in runs):
        return None
    logged_s = parts.first_s + parts.training_s
    logged = sum(s.num_epochs for r in runs for s in r.segments) / len(runs)
    trained = statistics.fmean(r.last_epoch or 0 for r in runs)
    actual_s = max(statistics.fmean(map(_span_s, runs)) - parts.evaluation_s, 0.0)
    if abs(logged * actual_s - trained * logged_s) <= MAX_DIFFERENCE * trained * logged_s:
        return None
    return make_finding('speed_unknown', None, logged, logged_s, trained, actual_s)


@dataclass(frozen=True)
class RunTimes:
    """Mean times of the runs of a set, in seconds."""

    epoch_s: float  # an epoch at full speed, without evaluation
    evaluation_s: float  # a single evaluation
    outside_s: float  # the rest of the time to train: extra time of the first epoch, and gaps


def make_times(
    epoch_s: float | None, runs: Sequence[tuple[float | None, int | None, int, float]]
) -> RunTimes | None:
    """Return mean times or None. A run is (seconds to train, epochs, number of evaluations, their
    seconds)."""
    known = [(t, e, n, s) for t, e, n, s in runs if t is not None and e and n]
    if not epoch_s or not known:
        return None
    evaluation_s = sum(s for *_, s in known) / sum(n for _, _, n, _ in known)
    return RunTimes(
        epoch_s, evaluation_s, statistics.fmean(t - e * epoch_s - s for t, e, _, s in known)
    )
