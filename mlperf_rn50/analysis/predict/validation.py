"""Errors of the model on sets of several nodes, with costs from other rounds or organisations only. Pure functions."""
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mlperf_rn50.analysis.predict.anchors import organisation
from mlperf_rn50.analysis.predict.costs import MultiNodeCase, distinct, make_costs, multi_node_cases
from mlperf_rn50.analysis.predict.prediction import KNOWLEDGE, Knowledge, Prediction, relative_error
from mlperf_rn50.analysis.report.text import MARKDOWN, TERMINAL, render_section
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.table import Cell, Table, number_cell, percent_cell
from mlperf_rn50.text import percent, printable

KNOWLEDGE_TEXTS: dict[Knowledge, str] = {'own': 'own set', 'two': 'own set and a second set', 'other': 'other set'}
_Pairs = Sequence[tuple[MultiNodeCase, Prediction]]


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of predictions, and the number of measured times within the intervals."""

    num_predicted: int
    num_held: int
    median_error: float
    high_error: float  # 90th percentile
    worst_error: float


@dataclass(frozen=True)
class Validation:
    """Predictions of sets without the costs of their round, and the errors by knowledge and by the group left out."""

    pairs: _Pairs
    errors: dict[tuple[Knowledge, str], Errors]  # only for keys with at least one predicted set
    not_predicted: tuple[str, ...]  # sets without a prediction, with reasons


def _is_held(case: MultiNodeCase, p: Prediction) -> bool:
    interval, minutes = p.interval, case.target.minutes
    return interval is not None and minutes is not None and interval[0] <= minutes <= interval[1]


def _errors_of(pairs: _Pairs) -> Errors:
    absolute = [abs(relative_error(p.minutes, c.target.minutes) or 0.0) for c, p in pairs]
    median, high, worst = (float(np.quantile(absolute, q)) for q in (0.5, 0.9, 1))
    return Errors(len(pairs), sum(_is_held(c, p) for c, p in pairs), median, high, worst)


def validate(sets: Sequence[RunSet]) -> Validation:
    """Predict every set on several nodes, except refused and duplicate ones, without its round or organisation.

    The costs are fitted to these sets and to the packaged ones, except copies of these.
    """
    judged, fitted = set(sets), multi_node_cases(distinct(dict.fromkeys([*sets, *load_table()])))
    cases = [c for c in fitted if c.target in judged]
    groups: dict[str, Callable[[RunSet], Hashable]] = {'round': lambda s: s.round, 'organisation': organisation}
    found: dict[tuple[Knowledge, str], _Pairs] = {}
    for name, group_of in groups.items():
        costs = {group: make_costs([c for c in fitted if group_of(c.target) != group], group_of)
                 for group in {group_of(c.target) for c in cases}}
        for knowledge in KNOWLEDGE_TEXTS:
            found[knowledge, name] = [(c, p) for c in cases
                                      if (p := c.predict(knowledge, costs[group_of(c.target)])) and p.minutes]
    best = {c.target: p for knowledge in KNOWLEDGE[:2] for c, p in found[knowledge, 'round']}  # own replaces other
    reasons = {c.target: f'no one-node set with {c.target.accelerator or "unnamed accelerators"}'
               for c in cases if c.target not in best}
    reasons |= {s: 'all logs duplicate logs of a different system' if s.is_duplicate else
                s.refusal or 'the logs lack the batch'
                for s in sets if not s.is_published and (s.is_duplicate or not s.has_recipe)}
    return Validation([(c, best[c.target]) for c in cases if c.target in best],
                      {key: _errors_of(pairs) for key, pairs in found.items() if pairs},
                      tuple(f'{s.round} {s.name} not predicted: {reason}' for s, reason in reasons.items()))


@cache
def validate_published() -> Validation:
    return validate(load_table())


def _cells(case: MultiNodeCase, p: Prediction) -> tuple[Cell, ...]:
    target, (low, high) = case.target, p.interval or (0.0, 0.0)
    base = case.other if p.knowledge == 'other' else case.own
    return (Cell(target.round), Cell(target.org or '-'), Cell(target.name), Cell(base.name if base else '-'),
            Cell(KNOWLEDGE_TEXTS[p.knowledge or 'own']),
            number_cell(p.layout.epochs.mean if p.layout.epochs else None, 'g'), number_cell(p.minutes, '.2f'),
            Cell(f'{low:.2f} to {high:.2f}', low), number_cell(target.minutes, '.2f'),
            percent_cell(relative_error(p.minutes, target.minutes), '+.1f'), Cell('yes' if _is_held(case, p) else 'no'))


def render_validation(validation: Validation, is_markdown: bool = False) -> str:
    """Return as text the errors by knowledge, the predictions without each set's round, and the excluded sets."""
    if not validation.errors:
        return '\n'.join(map(printable, ('No set on several nodes can be predicted', *validation.not_predicted)))
    summary = Table('Errors', ('basis', 'left out', 'sets', 'median error', '90th percentile', 'worst',
                               'in 80 % interval'),
                    tuple(tuple(map(Cell, (
                        KNOWLEDGE_TEXTS[knowledge], name, f'{e.num_predicted}', percent(e.median_error, '.1f'),
                        percent(e.high_error, '.1f'), percent(e.worst_error, '.1f'),
                        f'{e.num_held} ({percent(e.num_held / e.num_predicted, ".0f")})')))
                        for (knowledge, name), e in validation.errors.items()))
    rows = Table('Predictions without the costs of the same round', (
        'round', 'organisation', 'system', 'source', 'basis', 'epochs', 'predicted min', '80 % interval',
        'measured min', 'error', 'in interval'), tuple(_cells(c, p) for c, p in validation.pairs))
    return render_section('Errors of predict on sets that it was not fitted to', (), [summary, rows],
                          validation.not_predicted, MARKDOWN if is_markdown else TERMINAL, 'Not predicted')
