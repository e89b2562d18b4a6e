"""Where does the time of a run go? Initialisation, first epoch, later epochs, evaluation, the rest. Pure."""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.run import Run


@dataclass(frozen=True)
class Parts:
    """Where the time of a run goes, in seconds; all but init_s is on the clock.

    Args:
        init_s: before run_start; None where it is not logged.
        first_s: the first epoch, or the first piece of training that is logged.
        training_s: the epochs after it.
    """

    init_s: float | None
    first_s: float
    training_s: float
    evaluation_s: float
    other_s: float

    @property
    def on_clock_s(self) -> float:
        return self.first_s + self.training_s + self.evaluation_s + self.other_s


def _covered_s(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float('-inf')
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def parts_of(run: Run) -> Parts | None:
    """Where a run's time goes; None where the log has no epochs or no end."""
    if not run.segments or run.time_to_train_s is None:
        return None
    training = [(s.start_s, s.stop_s) for s in run.segments]
    evaluation = [(e.start_s, e.stop_s) for e in run.evaluations
                  if e.start_s is not None and e.stop_s is not None and e.stop_s >= e.start_s]
    first, rest = training[0], training[1:]
    return Parts(run.init_s, first[1] - first[0], sum(b - a for a, b in rest), sum(b - a for a, b in evaluation),
                 run.time_to_train_s - _covered_s(training + evaluation))


def mean_parts(runs: Sequence[Run]) -> Parts | None:
    """The mean of the parts of several runs; None where one of them has none."""
    parts = [p for p in map(parts_of, runs) if p]
    if not parts or len(parts) < len(runs):
        return None
    inits = [p.init_s for p in parts if p.init_s is not None]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(p, name) for p in parts)
    return Parts(statistics.fmean(inits) if inits else None, mean('first_s'), mean('training_s'), mean('evaluation_s'),
                 mean('other_s'))


def seconds_per_epoch(runs: Sequence[Run]) -> float | None:
    """Seconds of an epoch of several runs, without the first one of each where there are others."""
    epochs, seconds = 0, 0.0
    for run in runs:
        for segment in run.segments[1:] or run.segments:
            epochs += segment.num_epochs
            seconds += segment.stop_s - segment.start_s
    return seconds / epochs if epochs else None
