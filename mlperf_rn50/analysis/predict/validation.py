"""Errors of the model when published multi-node sets are predicted from paired one-node sets. Pure functions."""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tabulate import tabulate

from mlperf_rn50.analysis.predict.model import base_for, base_of, is_pair, layout_of, overheads_without, predict_layout
from mlperf_rn50.analysis.predict.prediction import PUBLISHED_LINK, Base, Overheads, Prediction, relative_error
from mlperf_rn50.analysis.report.text import markdown_text
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.mllog.events import printable


@dataclass(frozen=True)
class ValidationCase:
    """A multi-node set and its prediction from a one-node set; reason: why there is no prediction."""

    target: RunSet
    base: Base | None
    prediction: Prediction | None = None
    reason: str | None = None
    overheads: Overheads | None = None

    @property
    def error(self) -> float | None:
        return relative_error(self.prediction.minutes, self.target.minutes) if self.prediction else None

    @property
    def is_held(self) -> bool:
        """Whether the interval contains the measured time."""
        interval, measured = self.prediction.interval if self.prediction else None, self.target.minutes
        return interval is not None and measured is not None and interval[0] <= measured <= interval[1]


@dataclass(frozen=True)
class Validation:
    """Cases of all multi-node sets; left_out: lines about systems that are neither predicted nor a base."""

    judged: tuple[ValidationCase, ...]
    left_out: tuple[str, ...] = ()

    @property
    def predicted(self) -> tuple[ValidationCase, ...]:
        return tuple(j for j in self.judged if j.error is not None)

    @property
    def num_predicted(self) -> int:
        return len(self.predicted)

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute errors as fractions, in ascending order."""
        return tuple(sorted(abs(j.error) for j in self.predicted if j.error is not None))

    @property
    def median_error(self) -> float | None:
        return statistics.median(self.errors) if self.errors else None

    @property
    def high_error(self) -> float | None:
        """90th percentile of the absolute errors."""
        errors = self.errors * 2 if len(self.errors) == 1 else self.errors
        return statistics.quantiles(errors, n=10, method='inclusive')[-1] if errors else None

    @property
    def num_held(self) -> int:
        return sum(j.is_held for j in self.predicted)


def _unpaired(target: RunSet, sets: Sequence[RunSet]) -> str:
    kind = f'with {target.accelerator}' if target.accelerator else 'with as many unnamed accelerators per node'
    timeless = [s.name for s in sets if is_pair(s, target) and not base_of(s)]
    exception = f' except {timeless[0]}, whose logs lack the times of a finished run' if timeless else ''
    return f'no one-node set of {target.org or "the same organisation"} {kind}{exception}'


def _judge(target: RunSet, sets: Sequence[RunSet]) -> ValidationCase:
    base, layout = base_for(target, sets), layout_of(target)
    if base is None or base.run_set is None:
        return ValidationCase(target, None, reason=_unpaired(target, sets))
    if layout is None or target.time_s is None:
        return ValidationCase(target, base, reason='the logs lack the layout, or no run converged')
    overheads = overheads_without(target, base.run_set)
    prediction = predict_layout(base, layout, PUBLISHED_LINK, overheads)
    return ValidationCase(target, base, prediction, prediction.refusal, overheads)


def validate(sets: Sequence[RunSet], left_out: Sequence[str] = ()) -> Validation:
    """Predict every multi-node ImageNet set from the one-node sets, with overheads of other rounds only."""
    return Validation(tuple(_judge(s, sets) for s in sets if (s.num_nodes or 0) > 1 and s.is_imagenet), tuple(left_out))


@cache
def validate_published() -> Validation:
    return validate(load_published())


def validate_systems(run_sets: Sequence[RunSet]) -> Validation:
    """Predict the multi-node sets among these, except refused and duplicate sets."""
    usable = [s for s in run_sets if s.has_recipe and not s.is_duplicate]
    duplicate = 'all logs duplicate logs of a different system'
    return validate(usable, [
        f'{s.round} {s.name} left out: {duplicate if s.is_duplicate else s.refusal or "the logs lack the batch"}'
        for s in run_sets if s not in usable])


def _cells(case: ValidationCase) -> list[str]:
    target, p = case.target, case.prediction
    name = [target.round, target.org or '-', target.name, case.base.name if case.base else '-']
    measured = f'{target.minutes:.2f}' if target.minutes else '-'
    if case.error is None or p is None or p.epochs is None:
        return [*name, '-', '-', '-', measured, '-', '-']
    return [*name, f'{p.epochs.mean:g}', f'{p.minutes:.2f}', f'{p.low_minutes:.2f} to {p.high_minutes:.2f}', measured,
            f'{100 * case.error:+.1f} %', 'yes' if case.is_held else 'no']


def errors_text(validation: Validation, worst: str = '') -> str:
    """Describe the absolute errors, and how many intervals contain the measured time, for one or more predictions."""
    return (f'{100 * (validation.median_error or 0.0):.1f} % (median), {100 * (validation.high_error or 0.0):.1f} % '
            f'(90th percentile){worst}; {validation.num_held} of {validation.num_predicted} measured times are within '
            'the 80 % interval')


def overheads_text(overheads: Overheads) -> str:
    """Describe the extra time and epochs on several nodes, and their source."""
    low = 100 * overheads.epochs_low
    epochs = 'all scheduled epochs' if low >= 99.5 else f'{low:.0f} to 100 % of the scheduled epochs'
    outside = f'{overheads.outside_s or 0.0:.1f} s ({overheads.outside_low_s:.1f} to {overheads.outside_high_s:.1f})'
    return (f'{1e3 * overheads.step_s:.1f} ± {1e3 * overheads.step_spread_s:.1f} ms per step, first epoch and gaps '
            f'{outside}, {epochs}; source: {overheads.source}')


def render_validation(validation: Validation, is_markdown: bool = False) -> str:
    """Return the table, the errors, the excluded sets and the overheads as text."""
    clean = markdown_text if is_markdown else printable
    head = ['round', 'organisation', 'system', 'base', 'epochs', 'predicted min', '80 % interval', 'measured min',
            'error', 'in interval']
    rows = [[clean(text) for text in _cells(j)] for j in validation.judged]
    lines = [tabulate(rows, head, 'github' if is_markdown else 'simple', disable_numparse=True) if rows else
             'No multi-node ImageNet set to predict', '']
    if number := validation.num_predicted:
        worst = f', {100 * validation.errors[-1]:.1f} % (worst)'
        lines.append(f'{number} predicted: absolute error {errors_text(validation, worst)} '
                     f'({100 * validation.num_held / number:.0f} %)')
    lines += [clean(f'{j.target.round} {j.target.name} not predicted: {j.reason}')
              for j in validation.judged if j.reason]
    lines += [clean(f'{j.target.round} {j.target.name}: accelerators unnamed, paired by their number per node')
              for j in validation.predicted if not j.target.accelerator]
    lines += map(clean, validation.left_out)
    if not validation.predicted:
        return '\n'.join(lines).rstrip()
    overheads = dict.fromkeys((j.target.round, j.overheads) for j in validation.predicted if j.overheads)
    lines += ['', f'Ring all-reduce of {PUBLISHED_LINK.exchange_bytes / 1e6:.0f} MB (float16 gradients) at '
              f'{PUBLISHED_LINK.gbit_s:g} Gbit/s (one port), no overlap. Overheads on several nodes, for each round '
              'from other rounds only:', *(f'{name}: {overheads_text(c)}' for name, c in overheads)]
    return '\n'.join(lines)
