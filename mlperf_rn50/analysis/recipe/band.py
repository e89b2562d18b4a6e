"""Compare a run's accuracy with its reference runs at the same fraction of the schedule. Pure
functions.

A band is the mean of the reference runs plus and minus three times the spread expected for one more
run. A run that is below its band at two consecutive evaluations is behind, which raises the alarm.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.recipe.choose import reached_epoch
from mlperf_rn50.analysis.recipe.reference import MIN_RUNS, Reference, schedule_phase
from mlperf_rn50.runfolder.records import CourseRecord
from mlperf_rn50.text import span

# Half of the band width in sigmas, and consecutive outliers that raise an alarm; tuned with
# benchmarks/replay.py.
SIGMAS, IN_A_ROW = 3.0, 2
Curve = Sequence[tuple[int, float]]  # (epochs trained, Top-1 as a fraction)


@dataclass(frozen=True)
class Band:
    """Accuracies of the reference runs at an epoch, as fractions. low and high are None if there
    are too few runs."""

    epoch: int
    point: float | None  # fraction of the schedule; None if its length is not set
    values: tuple[float, ...]  # one for each run that reaches this point; at least one
    mean: float
    low: float | None
    high: float | None


def _value_at(curve: Curve, epoch: float, drops: Sequence[float]) -> float | None:
    """Interpolate a curve. Return None outside its range and between evaluations around a
    learning-rate drop."""
    for (e0, a0), (e1, a1) in zip(curve, curve[1:]):
        if e0 < epoch < e1:
            if any(e0 <= d < e1 for d in drops):
                return None
            return a0 + (a1 - a0) * (epoch - e0) / (e1 - e0)
    return next((a for e, a in curve if math.isclose(e, epoch)), None)


def _point(reference: Reference, epoch: int) -> float | None:
    return epoch / reference.recipe.decay_epochs if reference.recipe.decay_epochs else None


def band_at(reference: Reference, epoch: int) -> Band | None:
    """Return the band at an epoch, or None if no reference run has a value there."""
    drops = reference.recipe.step_epochs or ()
    known = (_value_at(run.curve, epoch * scale, drops) for run, scale in reference.runs)
    values = tuple(v for v in known if v is not None)
    if not values:
        return None
    mean = statistics.fmean(values)
    found = Band(epoch, _point(reference, epoch), values, mean, low=None, high=None)
    if len(values) < MIN_RUNS:
        return found
    phase = schedule_phase(reference.recipe, epoch)
    typical = reference.spreads.get(phase, 0.0) if phase is not None else 0.0
    sampling = 0.0
    if reference.eval_samples:
        sampling = math.sqrt(mean * (1 - mean) / reference.eval_samples)
    spread = max(statistics.stdev(values), typical, sampling)
    # includes the uncertainty of the mean
    reach = SIGMAS * spread * math.sqrt(1 + 1 / len(values))
    return replace(found, low=max(0.0, mean - reach), high=min(1.0, mean + reach))


def band(reference: Reference, epochs: Sequence[int]) -> dict[int, Band]:
    """Return the bands by epoch, for the epochs at which a reference run has a value."""
    return {epoch: b for epoch in epochs if (b := band_at(reference, epoch))}


def _is_below(found: Band | None, accuracy: float) -> bool:
    return found is not None and found.low is not None and accuracy < found.low


def is_behind(bands: Mapping[int, Band], curve: Curve) -> bool:
    """Return whether the last IN_A_ROW evaluations of a curve are all below the bands of their
    epochs."""
    last = curve[-IN_A_ROW:]
    return len(last) == IN_A_ROW and all(
        _is_below(bands.get(epoch), accuracy) for epoch, accuracy in last
    )


def target_epochs(reference: Reference) -> list[int]:
    """Return the epochs of the compared run's schedule at which reference runs reached the target,
    ascending."""
    found = (
        (reached_epoch(run, reference.recipe.target_accuracy or math.inf), scale)
        for run, scale in reference.runs
    )
    return sorted(math.ceil(epoch / scale - 1e-6) for epoch, scale in found if epoch is not None)


def standing_of(
    reference: Reference, bands: Mapping[int, Band], curve: Curve, time_s: float
) -> CourseRecord:
    """Compare the last evaluation of a non-empty curve with the reference runs. time_s is since
    run_start."""
    epoch, accuracy = curve[-1]
    found, epochs = bands.get(epoch), target_epochs(reference)
    ends, left_s = None, None
    if epochs:
        ends = epochs[0], epochs[-1]
        first_s, last_s = (max(0.0, (e - epoch) * time_s / epoch) for e in ends)
        if last_s:
            left_s = first_s, last_s
    below, behind = _is_below(found, accuracy), is_behind(bands, curve)
    place = _place_text(reference, found, accuracy, below, behind)
    return CourseRecord(
        epoch=epoch,
        point=_point(reference, epoch),
        accuracy=accuracy,
        mean=found.mean if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        num_reference=len(found.values) if found else 0,
        below=below,
        behind=behind,
        reference_epochs=ends,
        seconds_left=left_s,
        text=f'{place}; {_end_text(reference, epochs, left_s)}',
    )


def _place_text(
    reference: Reference, found: Band | None, accuracy: float, below: bool, behind: bool
) -> str:
    if found is None:
        return 'no reference run at this epoch'
    num, points = len(found.values), 100 * (accuracy - found.mean)
    distance = f'{abs(points):.1f} points {"below" if points < 0 else "above"}'
    if found.low is None:
        return f'{distance} the only reference run; an alarm needs {MIN_RUNS} runs'
    if below:
        word, times = 'outlier', f'once; {IN_A_ROW} in a row raise the alarm'
        if behind:
            word, times = 'behind', f'at {IN_A_ROW} evaluations in a row'
        return (
            f'{word}: {distance} the mean of {num} reference runs, more than {SIGMAS:g} sigma '
            f'({100 * (found.mean - found.low):.1f} points), {times}'
        )
    most = max(abs(accuracy - v) for v in found.values)
    return f'on course: {num} of {reference.num_runs} reference runs within {100 * most:.1f} points'


def _end_text(
    reference: Reference, epochs: Sequence[int], left_s: tuple[float, float] | None
) -> str:
    target = f'{100 * (reference.recipe.target_accuracy or 0):.2f} %'
    if not epochs:
        return f'none reached {target}'
    runs = f'{len(epochs)} of {reference.num_runs} reached {target}'
    if len(epochs) == reference.num_runs:
        runs = 'all converged'
    when = f'epochs {epochs[0]} to {epochs[-1]}'
    if epochs[0] == epochs[-1]:
        when = f'epoch {epochs[0]}'
    left = f', {span(*left_s)} from now' if left_s else ''
    return f'{runs} at {when}{left}'
