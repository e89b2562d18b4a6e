"""A run's accuracy beside that of its reference runs, at the same part of the schedule. Pure.

A band at a point is the mean of the reference runs there, and three times the spread that one more run of them would
have. A run that is below its band twice in a row is behind: that is the alarm.
"""
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlperf_rn50.analysis.recipe.choose import reached_epoch
from mlperf_rn50.analysis.recipe.reference import MIN_RUNS, Reference, schedule_phase
from mlperf_rn50.text import span

# Of the replay (benchmarks/replay.py): how far below its references a run is an outlier, how often in a row.
SIGMAS, IN_A_ROW = 3.0, 2
Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Band:
    """The accuracies of the reference runs at a point of the schedule, as fractions.

    Args:
        epoch: epochs trained.
        point: the same as a fraction of the schedule; None where it has no length.
        values: of each run that goes so far, at least one.
        low: below it a run is an outlier; None with too few runs.
    """

    epoch: int
    point: float | None
    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


def _value_at(curve: Curve, epoch: float, drops: Sequence[float]) -> float | None:
    """Return the accuracy of a curve after some epochs, interpolated between two evaluations.

    None before the first and after the last, and where the learning rate drops between the two.
    """
    for (e0, a0), (e1, a1) in zip(curve, curve[1:]):
        if e0 < epoch < e1:
            return None if any(e0 <= d < e1 for d in drops) else a0 + (a1 - a0) * (epoch - e0) / (e1 - e0)
    return next((a for e, a in curve if math.isclose(e, epoch)), None)


def _least_spread(reference: Reference, epoch: int, mean: float) -> float:
    """Return the least that runs differ: as published runs do there, or by the chance of so many images."""
    phase = schedule_phase(reference.recipe, epoch)
    chance = math.sqrt(mean * (1 - mean) / reference.eval_samples) if reference.eval_samples else 0.0
    return max(chance, reference.spreads.get(phase, 0.0) if phase is not None else 0.0)


def _point(reference: Reference, epoch: int) -> float | None:
    """Return the part of the schedule that is over."""
    return epoch / reference.recipe.decay_epochs if reference.recipe.decay_epochs else None


def band_at(reference: Reference, epoch: int) -> Band | None:
    """Return the band after a number of epochs; None where no reference run goes so far, or began so early."""
    drops = reference.recipe.step_epochs or ()
    found = (_value_at(run.curve, epoch * scale, drops) for run, scale in reference.runs)
    values = tuple(v for v in found if v is not None)
    if not values:
        return None
    mean = statistics.fmean(values)
    low = high = None
    if len(values) >= MIN_RUNS:
        spread = max(statistics.stdev(values), _least_spread(reference, epoch, mean))
        reach = SIGMAS * spread * math.sqrt(1 + 1 / len(values))  # the mean is as uncertain as it has few runs
        low, high = max(0.0, mean - reach), min(1.0, mean + reach)
    return Band(epoch, _point(reference, epoch), values, mean, low, high)


def band(reference: Reference, epochs: Sequence[int]) -> dict[int, Band]:
    """Return the bands at some epochs, by epoch, without those where there is no reference."""
    return {epoch: b for epoch in epochs if (b := band_at(reference, epoch))}


def is_below(here: Band | None, accuracy: float) -> bool:
    """Whether an evaluation is an outlier below its band."""
    return here is not None and here.low is not None and accuracy < here.low


def is_behind(bands: Mapping[int, Band], curve: Curve) -> bool:
    """The alarm: whether the last evaluations of a curve are all below their bands, which are given by epoch."""
    last = curve[-IN_A_ROW:]
    return len(last) == IN_A_ROW and all(is_below(bands.get(epoch), accuracy) for epoch, accuracy in last)


def reached(reference: Reference) -> list[int]:
    """Return the epochs, of the schedule that is compared, at which reference runs came to the target; lowest first."""
    target = reference.recipe.target_accuracy or math.inf
    found = ((reached_epoch(run, target), scale) for run, scale in reference.runs)
    return sorted(math.ceil(epoch / scale - 1e-6) for epoch, scale in found if epoch is not None)


@dataclass(frozen=True)
class Standing:
    """An evaluation beside the reference runs.

    Args:
        epoch: epochs trained.
        point: the same as a fraction of the schedule; None where it has no length.
        here: the band; None where no reference run is.
        is_behind: the alarm: whether this evaluation and the one before are below.
        reference_epochs: first and last at which reference runs came to the target; None where none did.
        seconds_left: until then, at the pace of this run so far; None where that is over.
    """

    epoch: int
    point: float | None
    accuracy: float
    here: Band | None
    is_below: bool
    is_behind: bool
    reference_epochs: tuple[int, int] | None
    seconds_left: tuple[float, float] | None
    text: str


def stand(reference: Reference, bands: Mapping[int, Band], curve: Curve, time_s: float) -> Standing:
    """Return the last of one or more evaluations beside the reference runs."""
    epoch, accuracy = curve[-1]
    here, epochs = bands.get(epoch), reached(reference)
    ends = (epochs[0], epochs[-1]) if epochs else None
    first_s, last_s = (max(0.0, (e - epoch) * time_s / epoch) for e in ends or (0, 0))
    left_s = (first_s, last_s) if last_s else None
    below, behind = is_below(here, accuracy), is_behind(bands, curve)
    text = '; '.join([_place_text(reference, here, accuracy, below, behind), _end_text(reference, epochs, left_s)])
    return Standing(epoch, _point(reference, epoch), accuracy, here, below, behind, ends, left_s, text)


def _place_text(reference: Reference, here: Band | None, accuracy: float, below: bool, behind: bool) -> str:
    if here is None:
        return 'no reference run so far here'
    num, points = len(here.values), 100 * (accuracy - here.mean)
    side = f'{abs(points):.1f} points {"under" if points < 0 else "over"}'
    if here.low is None:
        return f'1 reference run here, this run is {side} it; an alarm needs {MIN_RUNS}'
    if below:
        times = f'{IN_A_ROW} evaluations in a row' if behind else f'once; {IN_A_ROW} in a row are an alarm'
        return (f'{"behind" if behind else "below"}: {side} the mean of {num} reference runs here, more than '
                f'{SIGMAS:g} sigma ({100 * (here.mean - here.low):.1f} points), {times}')
    most = max(abs(accuracy - v) for v in here.values)
    return f'on course: {num} of {reference.num_runs} reference runs within {100 * most:.1f} points here'


def _end_text(reference: Reference, epochs: Sequence[int], left_s: tuple[float, float] | None) -> str:
    target = f'{100 * (reference.recipe.target_accuracy or 0):.2f} %'
    if not epochs:
        return f'none of them came to {target}'
    who = 'they converged' if len(epochs) == reference.num_runs else \
        f'{len(epochs)} of {reference.num_runs} came to {target}'
    when = f'epoch {epochs[0]}' if epochs[0] == epochs[-1] else f'epochs {epochs[0]} to {epochs[-1]}'
    return f'{who} at {when}' + (f', {span(*left_s)} from now' if left_s else '')
