"""How well is predicted? Sets of several nodes from the one-node set of their maker, beside what was measured. Pure."""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.known import KnownSet, known_of
from mlperf_rn50.study.predict import (
    PUBLISHED_BYTES,
    PUBLISHED_GBIT_S,
    Costs,
    Prediction,
    base_for,
    base_of,
    costs_without,
    is_pair,
    layout_of,
    predict_layout,
    published_link,
)
from mlperf_rn50.study.report_text import markdown_text


@dataclass(frozen=True)
class Judged:
    """A set of several nodes, and what was predicted of it.

    Args:
        base: the one-node set it was predicted from; None for an unpaired one.
        prediction: None for an unpaired one.
        reason: why it is not predicted; None where it is.
    """

    target: KnownSet
    base: KnownSet | None
    prediction: Prediction | None
    reason: str | None
    doubts: tuple[str, ...] = ()
    costs: Costs | None = None

    @property
    def measured_minutes(self) -> float | None:
        return self.target.time_s / 60 if self.target.time_s else None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if not self.prediction or not self.prediction.minutes or not self.measured_minutes:
            return None
        return self.prediction.minutes / self.measured_minutes - 1

    @property
    def is_held(self) -> bool | None:
        """Whether the interval holds what was measured."""
        p, measured = self.prediction, self.measured_minutes
        if self.error is None or p is None or p.low_minutes is None or p.high_minutes is None or measured is None:
            return None
        return p.low_minutes <= measured <= p.high_minutes


@dataclass(frozen=True)
class Validation:
    """All sets of several nodes, judged; left_out: the systems that are no set to judge or to start from, and why."""

    judged: tuple[Judged, ...]
    left_out: tuple[str, ...] = ()

    @property
    def predicted(self) -> tuple[Judged, ...]:
        return tuple(j for j in self.judged if j.error is not None)

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute errors, as shares, ascending."""
        return tuple(sorted(abs(j.error) for j in self.predicted if j.error is not None))

    @property
    def median_error(self) -> float | None:
        return statistics.median(self.errors) if self.errors else None

    @property
    def high_error(self) -> float | None:
        """The 90th percentile of the absolute errors; of one, itself."""
        errors = self.errors
        return (statistics.quantiles(errors, n=10, method='inclusive')[-1] if len(errors) > 1 else
                errors[0] if errors else None)

    @property
    def num_held(self) -> int:
        return sum(bool(j.is_held) for j in self.predicted)


def _unpaired(target: KnownSet, sets: Sequence[KnownSet]) -> str:
    """Why a set has none to be predicted from."""
    kind = f'with {target.accelerator}' if target.accelerator else 'like it (its accelerator is not named)'
    timeless = [s.name for s in sets if is_pair(s, target) and not base_of(s)]
    why = f', but {timeless[0]}, whose logs do not tell the times of a run that ended' if timeless else ''
    return f'unpaired: no one-node set of {target.org or "its maker"} {kind}{why}'


def _judge(target: KnownSet, sets: Sequence[KnownSet]) -> Judged:
    one, layout = base_for(target, sets), layout_of(target)
    base = base_of(one) if one else None
    if one is None or base is None:
        return Judged(target, None, None, _unpaired(target, sets))
    if layout is None or target.time_s is None:
        return Judged(target, one, None, 'nothing to judge by: its logs do not tell its layout, or none converged')
    doubts = () if target.accelerator else ('neither names its accelerator: they have as many on a node',)
    costs = costs_without(target, one)
    prediction = predict_layout(base, layout, published_link(), costs)
    return Judged(target, one, prediction, prediction.refusal, doubts, costs)


def validate(sets: Sequence[KnownSet], left_out: Sequence[str] = ()) -> Validation:
    """Predicts every ImageNet set of several nodes from the one-node sets, with costs of other rounds only."""
    return Validation(tuple(_judge(s, sets) for s in sets if (s.num_nodes or 0) > 1 and s.is_imagenet),
                      tuple(left_out))


def _why_no_set(system: System) -> str:
    if system.is_copy:
        return 'all of its logs are copies of those of another system'
    return system.refusal or 'its logs do not tell the batch'


def validate_systems(systems: Sequence[System]) -> Validation:
    """The same of what lies in a tree; a set that is refused, and a copy of another, counts for nothing."""
    known = [(s, None if s.is_copy else known_of(s)) for s in systems]
    return validate([k for _, k in known if k],
                    [f'{s.round} {s.name}: left out: {_why_no_set(s)}' for s, k in known if not k])


def _cells(judged: Judged) -> list[str]:
    target, p = judged.target, judged.prediction
    name = [target.round, target.org or '-', target.name, judged.base.name if judged.base else '-']
    measured = f'{judged.measured_minutes:.2f}' if judged.measured_minutes else '-'
    if judged.error is None or p is None or p.epochs is None:
        return [*name, '-', '-', '-', measured, '-', '-']
    is_held = 'yes' if judged.is_held else 'no'
    return [*name, f'{p.epochs.mean:g}', f'{p.minutes:.2f}', f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', measured,
            f'{100 * judged.error:+.1f} %', is_held]


def costs_text(costs: Costs) -> str:
    """What several nodes cost beside computing and exchange, and who says so."""
    low = 100 * costs.epochs_low
    epochs = 'as many epochs as a schedule has' if low >= 99.5 else f'{low:.0f} to 100 % of the epochs of a schedule'
    return (f'{1e3 * costs.step_s:.1f} ± {1e3 * costs.step_spread_s:.1f} ms a step, first epoch and gaps '
            f'{costs.outside_s or 0.0:.1f} s ({costs.outside_low_s:.1f} to {costs.outside_high_s:.1f}), {epochs}; '
            f'from {costs.source}')


def _constants(validation: Validation) -> list[str]:
    """What the predictions were made with, of each round."""
    all_costs = dict.fromkeys((j.target.round, j.costs) for j in validation.predicted if j.costs)
    return [f'{name}: {costs_text(c)}' for name, c in all_costs]


def render_validation(validation: Validation, is_markdown: bool = False) -> str:
    """The table, the errors, the constants, and what was not predicted."""
    clean = markdown_text if is_markdown else printable
    head = ['round', 'organisation', 'system', 'from', 'epochs', 'predicted min', '80 % interval', 'measured min',
            'error', 'held']
    rows = [[clean(text) for text in _cells(j)] for j in validation.judged]
    lines = [tabulate(rows, head, 'github' if is_markdown else 'simple', disable_numparse=True) if rows else
             'No set of several nodes that was trained on ImageNet: there is nothing to predict', '']
    number = len(validation.predicted)
    if validation.median_error is not None and validation.high_error is not None:
        lines.append(f'{number} predicted: absolute error {100 * validation.median_error:.1f} % (median), '
                     f'{100 * validation.high_error:.1f} % (90th percentile), {100 * validation.errors[-1]:.1f} % '
                     f'(worst); the interval held {validation.num_held} of {number} times '
                     f'({100 * validation.num_held / number:.0f} %)')
    lines += [clean(f'{j.target.round} {j.target.name}: not predicted: {j.reason}')
              for j in validation.judged if j.reason]
    lines += [clean(f'{j.target.round} {j.target.name}: {doubt}') for j in validation.predicted for doubt in j.doubts]
    lines += map(clean, validation.left_out)
    if not validation.predicted:
        return '\n'.join(lines).rstrip()
    lines += ['', f'Ring all-reduce of {PUBLISHED_BYTES / 1e6:.0f} MB (float16 gradients) at {PUBLISHED_GBIT_S:g} '
              'Gbit/s (one port), nothing hidden. Other costs on several nodes, of each round from other rounds only:',
              *_constants(validation)]
    return '\n'.join(lines)
