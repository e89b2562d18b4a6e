"""Errors of the model on sets of several nodes, with costs from other rounds or organisations only. Pure functions."""
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from mlperf_rn50.analysis.predict.anchors import organisation
from mlperf_rn50.analysis.predict.costs import MultiNodeCase, distinct, make_cases, make_costs
from mlperf_rn50.analysis.predict.prediction import KNOWLEDGE, Knowledge, Prediction, relative_error
from mlperf_rn50.analysis.report.text import MARKDOWN, TERMINAL, render_section
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.table import Cell, Table, number_cell, percent_cell
from mlperf_rn50.text import percent

KNOWLEDGE_TEXTS: dict[Knowledge, str] = {'own': 'own set', 'two': 'own set and a second set', 'other': 'other set'}


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of predictions, ascending, and the number of measured times within the intervals."""

    absolute: list[float]
    num_held: int

    @property
    def median(self) -> float:
        return statistics.median(self.absolute)

    @property
    def high(self) -> float:
        """90th percentile."""
        return statistics.quantiles(self.absolute * (1 + (len(self.absolute) == 1)), n=10, method='inclusive')[-1]


@dataclass(frozen=True)
class Validation:
    """Predictions of all sets with costs from other rounds, and the errors by knowledge and by the group left out."""

    rows: tuple[tuple[MultiNodeCase, Prediction | None], ...]
    errors: dict[tuple[Knowledge, str], Errors]  # only for keys with at least one predicted set
    left_out: tuple[str, ...] = ()


def _is_held(case: MultiNodeCase, p: Prediction) -> bool:
    interval, minutes = p.interval, case.target.minutes
    return interval is not None and minutes is not None and interval[0] <= minutes <= interval[1]


def validate(sets: Sequence[RunSet]) -> Validation:
    """Predict every set on several nodes, except refused and duplicate ones, without its round or organisation.

    The costs are fitted to these sets and to the packaged ones, except copies of these.
    """
    duplicate = 'all logs duplicate logs of a different system'
    judged, fitted = set(sets), make_cases(distinct(dict.fromkeys([*sets, *load_table()])))
    cases = [c for c in fitted if c.target in judged]
    groups: dict[str, Callable[[RunSet], Hashable]] = {'round': lambda s: s.round, 'organisation': organisation}
    found: dict[tuple[Knowledge, str], list[tuple[MultiNodeCase, Prediction]]] = {}
    for name, group_of in groups.items():
        costs = {group: make_costs([c for c in fitted if group_of(c.target) != group], group_of)
                 for group in dict.fromkeys(group_of(c.target) for c in cases)}
        for knowledge in KNOWLEDGE_TEXTS:
            pairs = [(c, c.predict(knowledge, costs[group_of(c.target)])) for c in cases]
            found[knowledge, name] = [(c, p) for c, p in pairs if p and p.minutes]
    best = {id(c): p for knowledge in KNOWLEDGE[:2] for c, p in found[knowledge, 'round']}  # own replaces other
    errors = {key: Errors(sorted(abs(relative_error(p.minutes, c.target.minutes) or 0.0) for c, p in pairs),
                          sum(_is_held(c, p) for c, p in pairs)) for key, pairs in found.items() if pairs}
    return Validation(tuple((c, best.get(id(c))) for c in cases), errors, tuple(
        f'{s.round} {s.name} left out: {duplicate if s.is_duplicate else s.refusal or "the logs lack the batch"}'
        for s in sets if not s.is_published and (s.is_duplicate or not s.has_recipe)))


@cache
def validate_published() -> Validation:
    return validate(load_table())


def _cells(case: MultiNodeCase, p: Prediction | None) -> tuple[Cell, ...]:
    target = case.target
    names = Cell(target.round), Cell(target.org or '-'), Cell(target.name)
    measured = number_cell(target.minutes, '.2f')
    if p is None or p.interval is None or p.layout.epochs is None or p.knowledge is None:
        return *names, *[Cell('-')] * 5, measured, Cell('-'), Cell('-')
    return (*names, Cell(p.base.name), Cell(KNOWLEDGE_TEXTS[p.knowledge]), number_cell(p.layout.epochs.mean, 'g'),
            number_cell(p.minutes, '.2f'), Cell(f'{p.interval[0]:.2f} to {p.interval[1]:.2f}', p.interval[0]), measured,
            percent_cell(relative_error(p.minutes, target.minutes), '+.1f'), Cell('yes' if _is_held(case, p) else 'no'))


def render_validation(validation: Validation, is_markdown: bool = False) -> str:
    """Return as text the errors by knowledge, the predictions without each set's round, and the excluded sets."""
    if not validation.errors:
        return '\n'.join(map(printable, ('No set on several nodes can be predicted', *validation.left_out)))
    summary = Table('Errors', ('basis', 'left out', 'sets', 'median error', '90th percentile', 'worst',
                               'in 80 % interval'),
                    tuple(tuple(map(Cell, (
                        KNOWLEDGE_TEXTS[knowledge], name, f'{len(e.absolute)}', percent(e.median, '.1f'),
                        percent(e.high, '.1f'), percent(e.absolute[-1], '.1f'),
                        f'{e.num_held} ({percent(e.num_held / len(e.absolute), ".0f")})')))
                        for (knowledge, name), e in validation.errors.items()))
    rows = Table('Predictions without the costs of the same round', (
        'round', 'organisation', 'system', 'source', 'basis', 'epochs', 'predicted min', '80 % interval',
        'measured min', 'error', 'in interval'), tuple(_cells(c, p) for c, p in validation.rows))
    missing = [f'{c.target.round} {c.target.name} not predicted: no one-node set with '
               f'{c.target.accelerator or "unnamed accelerators"}' for c, p in validation.rows if p is None]
    return render_section('Errors of predict on sets that it was not fitted to', (), [summary, rows],
                          [*missing, *validation.left_out], MARKDOWN if is_markdown else TERMINAL, 'Left out')
