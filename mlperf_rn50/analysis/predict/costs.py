"""Fit the costs of several nodes to published sets, and estimate the errors by leaving out rounds or organisations.

A step's time beside computing and exchange is a latency by generation of the accelerator, with an addition for the
software of early rounds. Sets predicted from a set of another machine count less. Pure functions.
"""
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mlperf_rn50.analysis.predict.anchors import (
    base_of,
    is_early,
    layout_of,
    link_of,
    logs_schedule,
    other_base,
    own_base,
    second_set,
)
from mlperf_rn50.analysis.predict.model import parts_of, predict_layout
from mlperf_rn50.analysis.predict.prediction import (
    KNOWLEDGE,
    NO_COSTS,
    Base,
    Costs,
    Epochs,
    Knowledge,
    Layout,
    Link,
    Prediction,
)
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.run_set import RunSet

# Prior knowledge: latency and its differences between generations and to early rounds, in seconds.
_LATENCY_S, _LATENCY_SPREAD_S, _GENERATION_SPREAD_S, _EARLY_SPREAD_S = 0.004, 0.010, 0.0015, 0.010
_STEP_SPREAD, _HUBER = 0.06, 1.5  # typical relative error of a step; errors beyond 1.5 times this count less
_OTHER_WEIGHT = 0.2  # of a set that is predicted from another machine
_ITERATIONS = 15
_COVERAGE = 0.8
_MIN_ERRORS = 5  # minimum number of errors for an interval
_SIMILAR = 5  # number of sets with the most similar batches that give the epochs of a recipe without a schedule


@dataclass(frozen=True)
class MultiNodeCase:
    """A set on several nodes and the sets that it can be predicted from."""

    target: RunSet
    layout: Layout
    step_s: float
    own: Base | None
    other: Base | None
    second: RunSet | None

    @cached_property
    def link(self) -> Link:
        return link_of(self.target)

    def predict(self, knowledge: Knowledge, costs: Costs) -> Prediction | None:
        """Predict the set with the given knowledge; None without it."""
        base, second = (self.other, None) if knowledge == 'other' else (self.own, self.second)
        if base is None or self.layout.epochs is None or knowledge == 'two' and second is None:
            return None
        used = None if knowledge == 'own' else second
        return predict_layout(base, self.layout, self.link, costs, knowledge if knowledge == 'other' else 'own', used)


def distinct(sets: Sequence[RunSet]) -> list[RunSet]:
    """Return the usable ImageNet sets, without those whose logs were submitted before."""
    kept, times = [], set[tuple[int | None, float]]()
    for s in sets:
        own = {(r.epochs_to_converge, round(r.time_to_train_s, 2)) for r in s.readable if r.time_to_train_s}
        if s.has_recipe and s.is_imagenet and not s.is_duplicate and not own & times:
            kept.append(s)
        times |= own
    return kept


def _epochs_of(target: RunSet, sets: Sequence[RunSet]) -> Epochs | None:
    """Return the epochs of other rounds' sets with the most similar batches, for a recipe without a schedule."""
    if target.recipe.last_eval_epoch:
        last = target.recipe.last_eval_epoch
        return Epochs(last, last, last, 'schedule')
    recipe = target.recipe
    known = [(s.recipe.target_accuracy != recipe.target_accuracy,
              abs(math.log(s.recipe.global_batch_size / recipe.global_batch_size)), s.name, s.epochs_mean)
             for s in sets if s.round != target.round and s.epochs_mean]
    epochs = [e for *_, e in sorted(known)[:_SIMILAR]]
    return Epochs(statistics.median(epochs), min(epochs), max(epochs), 'sets at similar batches') if epochs else None


def make_cases(sets: Sequence[RunSet]) -> list[MultiNodeCase]:
    """Return the sets on several nodes with a time and a layout."""
    found = []
    for s in sets:
        base, layout = base_of(s), layout_of(s)
        if (s.num_nodes or 0) > 1 and base and layout and s.minutes:
            own, other = own_base(s, sets), other_base(s, sets)
            if not logs_schedule(s):  # as in v0.5, whose software differs from that of other sets
                own, other = None, own or other
            found.append(MultiNodeCase(s, replace(layout, epochs=_epochs_of(s, sets)), base.step_s, own, other,
                              second_set(layout, own, sets, s) if own else None))
    return found


def fit(cases: Sequence[MultiNodeCase]) -> Costs:
    """Return the latencies that minimise the relative errors of the steps, by iteratively reweighted least squares."""
    data = [(c, base) for c in cases if (base := c.own or c.other)]
    generations = sorted({base.generation for _, base in data})
    prior = np.array([_LATENCY_S, 0.0, *[0.0] * len(generations)])
    spread = np.array([_LATENCY_SPREAD_S, _EARLY_SPREAD_S, *[_GENERATION_SPREAD_S] * len(generations)])
    matrix = np.array([[1.0, is_early(c.target), *(base.generation == g for g in generations)] for c, base in data],
                      dtype=float).reshape(len(data), len(prior))
    steps = np.array([c.step_s for c, _ in data])
    known = [parts_of(base, c.layout, c.link, NO_COSTS) for c, base in data]
    extra = np.array([c.step_s - computed_s - exchanged_s + hidden_s
                      for (c, _), (computed_s, exchanged_s, hidden_s, _) in zip(data, known)])
    scale = np.array([(1.0 if c.own else _OTHER_WEIGHT) for c, _ in data]) / (_STEP_SPREAD * steps) ** 2
    huber, found = np.ones(len(data)), prior
    for _ in range(_ITERATIONS):
        weight = huber * scale
        normal = matrix.T @ (matrix * weight[:, None]) + np.diag(spread ** -2)
        found = np.linalg.solve(normal, matrix.T @ (weight * extra) + prior / spread ** 2)
        errors = np.abs(extra - matrix @ found) / (_STEP_SPREAD * steps)
        huber = np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9))
    common, early, *differences = (float(v) for v in found)
    rounds = ', '.join(dict.fromkeys(c.target.round for c, _ in data))
    starts = tuple((c.layout.num_nodes, c.target.times.outside_s) for c, _ in data if c.target.times and c.own)
    return Costs({g: max(0.0, common + d) for g, d in zip(generations, differences) if g}, max(0.0, common),
                 max(0.0, early), starts, {}, max((c.layout.num_nodes for c, _ in data), default=0),
                 min((c.layout.local_batch_size for c, _ in data), default=0.0),
                 f'{len(data)} published sets of {rounds}')


def _quantile(errors: Sequence[float]) -> float:
    """Return the half width that holds 80 % of the errors of sets that were left out (conformal prediction)."""
    ordered = sorted(errors)
    return ordered[max(1, int(len(ordered) * _COVERAGE)) - 1]


def make_costs(cases: Sequence[MultiNodeCase], group_of: Callable[[RunSet], Hashable]) -> Costs:
    """Return the costs, with the errors of each group's sets when the costs are fitted without the group."""
    errors: dict[Knowledge, list[float]] = {k: [] for k in KNOWLEDGE}
    for group in dict.fromkeys(group_of(c.target) for c in cases):
        costs = fit([c for c in cases if group_of(c.target) != group])
        for case in (c for c in cases if group_of(c.target) == group):
            for knowledge in KNOWLEDGE:
                p = case.predict(knowledge, costs)
                if p and p.minutes and case.target.minutes:
                    errors[knowledge].append(abs(math.log(p.minutes / case.target.minutes)))
    widths: dict[Knowledge, float] = {}
    most = 0.0
    for knowledge in reversed(KNOWLEDGE):  # less knowledge never has a narrower interval
        most = max(most, _quantile(errors[knowledge]) if len(errors[knowledge]) >= _MIN_ERRORS else most)
        widths[knowledge] = most
    return replace(fit(cases), errors=widths)


def costs_without(judged: RunSet | None) -> Costs:
    """Return the costs fitted to the packaged sets, except those of a set's round."""
    sets = distinct(load_table())
    cases = [c for c in make_cases(sets) if judged is None or c.target.round != judged.round]
    return make_costs(cases, lambda s: s.round)


