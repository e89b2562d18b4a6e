"""How well is predicted? Sets of several nodes from the one-node set of their maker, beside what was measured. Pure."""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.known import KnownSet, load_published
from mlperf_rn50.study.predict import (
    PUBLISHED_BYTES,
    PUBLISHED_GBIT_S,
    Prediction,
    base_for,
    base_of,
    find_costs,
    layout_of,
    predict_layout,
    published_link,
)


@dataclass(frozen=True)
class Judged:
    """A set of several nodes, and what was predicted of it.

    Args:
        base: the one-node set it was predicted from; None for an unpaired one.
        prediction: None for an unpaired one.
        reason: why it is not predicted; None where it is.
        doubts: what weakens the pair.
    """

    target: KnownSet
    base: KnownSet | None
    prediction: Prediction | None
    reason: str | None
    doubts: tuple[str, ...] = ()

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
    """All sets of several nodes, judged, and the costs that each round was predicted with."""

    judged: tuple[Judged, ...]

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


def _judge(target: KnownSet, sets: Sequence[KnownSet]) -> Judged:
    one, layout = base_for(target, sets), layout_of(target)
    base = base_of(one) if one else None
    if one is None or base is None:
        kind = target.accelerator or 'an accelerator that nobody names'
        return Judged(target, None, None, f'unpaired: no one-node set of {target.org or "its maker"} with {kind}')
    if layout is None or target.time_s is None:
        return Judged(target, one, None, 'nothing to judge by: its logs do not tell its layout, or none converged')
    doubts = () if target.accelerator else ('neither names its accelerator: they have as many on a node',)
    prediction = predict_layout(base, layout, published_link(), find_costs(load_published(), target.round))
    return Judged(target, one, prediction, prediction.refusal, doubts)


def validate(sets: Sequence[KnownSet]) -> Validation:
    """Predicts every ImageNet set of several nodes from the one-node sets, with costs of other rounds only."""
    return Validation(tuple(_judge(s, sets) for s in sets if (s.num_nodes or 0) > 1 and s.is_imagenet))


def _cells(judged: Judged) -> list[str]:
    target, p = judged.target, judged.prediction
    name = [target.round, printable(target.org or '-'), printable(target.name),
            printable(judged.base.name) if judged.base else '-']
    measured = f'{judged.measured_minutes:.2f}' if judged.measured_minutes else '-'
    if judged.error is None or p is None or p.epochs is None:
        return [*name, '-', '-', '-', measured, '-', '-']
    is_held = 'yes' if judged.is_held else 'no'
    return [*name, f'{p.epochs.mean:g}', f'{p.minutes:.2f}', f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', measured,
            f'{100 * judged.error:+.1f} %', is_held]


def _constants(validation: Validation) -> list[str]:
    """What the predictions were made with, of each round."""
    rounds = dict.fromkeys(j.target.round for j in validation.predicted)
    all_costs = [(name, find_costs(load_published(), name)) for name in rounds]
    return [f'{name}: a step on several nodes costs {1e3 * c.step_s:.1f} ± {1e3 * c.step_spread_s:.1f} ms more, first '
            f'epoch and gaps {c.outside_s or 0.0:.1f} s ({c.outside_low_s:.1f} to {c.outside_high_s:.1f}), epochs '
            f'{100 * c.epochs_low:.0f} to 100 % of the schedule; from {c.source}' for name, c in all_costs]


def render_validation(validation: Validation, table_format: str = 'simple') -> str:
    """The table, the errors, the constants, and what was not predicted."""
    head = ['round', 'organisation', 'system', 'from', 'epochs', 'predicted min', '80 % interval', 'measured min',
            'error', 'held']
    lines = [tabulate([_cells(j) for j in validation.judged], head, table_format, disable_numparse=True), '']
    number = len(validation.predicted)
    if validation.median_error is not None and validation.high_error is not None:
        lines.append(f'{number} predicted: absolute error {100 * validation.median_error:.1f} % (median), '
                     f'{100 * validation.high_error:.1f} % (90th percentile), {100 * validation.errors[-1]:.1f} % '
                     f'(worst); the interval held {validation.num_held} of {number} times '
                     f'({100 * validation.num_held / number:.0f} %)')
    lines += [f'{j.target.round} {printable(j.target.name)}: not predicted: {printable(j.reason)}'
              for j in validation.judged if j.reason]
    lines += [f'{j.target.round} {printable(j.target.name)}: {doubt}' for j in validation.predicted
              for doubt in j.doubts]
    lines += ['', f'Ring all-reduce of {PUBLISHED_BYTES / 1e6:.0f} MB (float16 gradients) at {PUBLISHED_GBIT_S:g} '
              'Gbit/s (one port), nothing hidden. Each round is predicted with the costs of the others only:',
              *_constants(validation)]
    return '\n'.join(lines)
