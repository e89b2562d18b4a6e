"""Costs of several nodes, fitted to published sets, and the errors of predictions of left-out sets.
Pure functions."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mlperf_rn50.analysis.predict import anchors, prediction
from mlperf_rn50.analysis.predict.model import predict_layout, step_parts
from mlperf_rn50.analysis.predict.prediction import (
    Base,
    Costs,
    Epochs,
    Knowledge,
    Layout,
    Prediction,
)
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.run_set import RunSet

# Prior in seconds: latency and its spread, spread between generations, and spread of the addition
# before v1.0.
_LATENCY_S, _LATENCY_SPREAD_S, _GENERATION_SPREAD_S, _EARLY_SPREAD_S = 0.004, 0.010, 0.0015, 0.010
# typical relative error of a step; errors beyond 1.5 times this have less weight
_STEP_SPREAD, _HUBER = 0.06, 1.5
_OTHER_WEIGHT = 0.2  # of a set that is predicted from another machine
_ITERATIONS = 15
_COVERAGE = 0.8
_MIN_ERRORS = 5  # minimum number of errors for an interval
# number of sets with the most similar batches that give the epochs of a recipe without a schedule
_SIMILAR = 5


@dataclass(frozen=True)
class MultiNodeCase:
    """A set on several nodes and the sets that it can be predicted from."""

    target: RunSet
    layout: Layout
    step_s: float
    own: Base | None
    other: Base | None
    second: Base | None

    def predict(self, knowledge: Knowledge, costs: Costs) -> Prediction | None:
        """Predict the set with the given knowledge. Return None if that knowledge is missing."""
        base = self.other if knowledge == 'other' else self.own
        second = self.second if knowledge == 'two' else None
        if base is None or self.layout.epochs is None or knowledge == 'two' and second is None:
            return None
        return predict_layout(
            base, self.layout, anchors.link_of(self.target), costs, knowledge, second
        )

    def is_held(self, p: Prediction) -> bool:
        """Return whether the measured time is within the interval of a prediction."""
        minutes = self.target.minutes
        return (
            p.interval is not None
            and minutes is not None
            and p.interval[0] <= minutes <= p.interval[1]
        )


def distinct(sets: Iterable[RunSet]) -> list[RunSet]:
    """Return the usable ImageNet sets, without those whose logs were submitted before."""
    kept, times = [], set[tuple[int | None, float]]()
    for s in sets:
        own = {
            (r.epochs_to_converge, round(r.time_to_train_s, 2))
            for r in s.readable
            if r.time_to_train_s
        }
        if s.has_recipe and s.is_imagenet and not s.is_duplicate and not own & times:
            kept.append(s)
        times |= own
    return kept


def _epochs_of(target: RunSet, sets: Sequence[RunSet]) -> Epochs | None:
    """Return the epochs of the schedule or, without one, of other rounds' sets with the most
    similar batches."""
    recipe = target.recipe
    if last := recipe.last_eval_epoch:
        return Epochs(last, last, last, 'schedule')
    known = sorted(
        (
            s.recipe.target_accuracy != recipe.target_accuracy,
            abs(math.log(s.recipe.global_batch_size / recipe.global_batch_size)),
            s.name,
            s.epochs_mean,
        )
        for s in sets
        if s.round != target.round and s.epochs_mean
    )
    epochs = [e for *_, e in known[:_SIMILAR]]
    return (
        Epochs(statistics.median(epochs), min(epochs), max(epochs), 'sets at similar batches')
        if epochs
        else None
    )


def multi_node_cases(sets: Sequence[RunSet]) -> list[MultiNodeCase]:
    """Return the sets on several nodes that have a time and equal nodes, with the sets to predict
    them from."""
    found = []
    for s in sets:
        base = anchors.base_of(s)
        if base and base.num_nodes > 1 and not base.num_units % base.num_nodes and s.minutes:
            own, other = (anchors.one_node_base(s, sets, is_own) for is_own in (True, False))
            # the costs are of other software, so its own set counts as another machine's
            if anchors.lacks_schedule(s):
                own, other = None, own or other
            layout = replace(base.layout, epochs=_epochs_of(s, sets))
            second = anchors.second_base(layout, own, sets, s) if own else None
            found.append(MultiNodeCase(s, layout, base.step_s, own, other, second))
    return found


def fit(cases: Sequence[MultiNodeCase]) -> Costs:
    """Return the latencies that minimise the relative errors of the steps, by iteratively
    reweighted least squares."""
    data = [(c, base) for c in cases if (base := c.own or c.other)]
    generations = sorted({base.generation for _, base in data})
    prior = np.array([_LATENCY_S, 0.0, *[0.0] * len(generations)])
    spread = np.array(
        [_LATENCY_SPREAD_S, _EARLY_SPREAD_S, *[_GENERATION_SPREAD_S] * len(generations)]
    )
    matrix = np.array(
        [
            [1.0, anchors.is_early(c.target), *(base.generation == g for g in generations)]
            for c, base in data
        ],
        dtype=float,
    ).reshape(len(data), len(prior))
    steps = np.array([c.step_s for c, _ in data])
    parts = [step_parts(base, c.layout, anchors.link_of(c.target), Costs()) for c, base in data]
    extra = steps - np.array(
        [computed_s + exchanged_s - hidden_s for computed_s, exchanged_s, hidden_s, _ in parts]
    )
    scale = (
        np.array([(1.0 if c.own else _OTHER_WEIGHT) for c, _ in data]) / (_STEP_SPREAD * steps) ** 2
    )
    huber, found = np.ones(len(data)), prior
    for _ in range(_ITERATIONS):
        weight = huber * scale
        normal = matrix.T @ (matrix * weight[:, None]) + np.diag(spread**-2)
        found = np.linalg.solve(normal, matrix.T @ (weight * extra) + prior / spread**2)
        errors = np.abs(extra - matrix @ found) / (_STEP_SPREAD * steps)
        huber = np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9))
    common, early, *differences = (float(v) for v in found)
    rounds = ', '.join(dict.fromkeys(c.target.round for c, _ in data))
    # Sets without an own one-node set are mostly of TPUs and Gaudis, whose starts differ (median
    # 4.8 instead of 1.6 s).
    starts = tuple(
        (c.layout.num_nodes, c.target.times.outside_s) for c, _ in data if c.target.times and c.own
    )
    return Costs(
        {g: max(0.0, common + d) for g, d in zip(generations, differences) if g},
        max(0.0, common),
        max(0.0, early),
        starts,
        {},
        max((c.layout.num_nodes for c, _ in data), default=0),
        min((c.layout.local_batch_size for c, _ in data), default=0.0),
        f'fitted to {len(data)} published sets of {rounds}',
    )


def make_costs(cases: Sequence[MultiNodeCase], group_of: Callable[[RunSet], Hashable]) -> Costs:
    """Return the costs fitted to all cases, and half of the 80 % interval for each knowledge.

    It is the 80 % quantile of the errors with costs fitted without the group of each set (conformal
    prediction).
    """
    costs = {
        group: fit([c for c in cases if group_of(c.target) != group])
        for group in {group_of(c.target) for c in cases}
    }
    widths, most = dict.fromkeys(prediction.KNOWLEDGE, 0.0), 0.0
    for knowledge in reversed(prediction.KNOWLEDGE):  # less knowledge never has a narrower interval
        errors = sorted(
            abs(math.log(p.minutes / c.target.minutes))
            for c in cases
            if c.target.minutes
            and (p := c.predict(knowledge, costs[group_of(c.target)]))
            and p.minutes
        )
        most = (
            max(most, errors[int(len(errors) * _COVERAGE) - 1])
            if len(errors) >= _MIN_ERRORS
            else most
        )
        widths[knowledge] = most
    return replace(fit(cases), errors=widths)


@cache
def costs_without(round_: str | None) -> Costs:
    """Return the costs fitted to the packaged sets, except those of a round. None excludes no
    round."""
    cases = multi_node_cases(distinct(load_table()))
    return make_costs([c for c in cases if c.target.round != round_], lambda s: s.round)


_Pairs = Sequence[tuple[MultiNodeCase, Prediction]]


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of predictions, and the number of measured times within the
    intervals."""

    num_predicted: int
    num_held: int
    median_error: float
    high_error: float  # 90th percentile
    worst_error: float


@dataclass(frozen=True)
class Validation:
    """Predictions of sets without the costs of their round, and the errors by knowledge and by the
    group left out."""

    pairs: _Pairs
    errors: dict[tuple[Knowledge, str], Errors]  # only for keys with at least one predicted set
    not_predicted: tuple[str, ...]  # sets without a prediction, with reasons


def _errors_of(pairs: _Pairs) -> Errors:
    absolute = [
        abs(prediction.relative_error(p.minutes, c.target.minutes) or 0.0) for c, p in pairs
    ]
    median, high, worst = (float(np.quantile(absolute, q)) for q in (0.5, 0.9, 1))
    return Errors(len(pairs), sum(c.is_held(p) for c, p in pairs), median, high, worst)


def validate(sets: Sequence[RunSet]) -> Validation:
    """Predict every set on several nodes, except refused and duplicate ones.

    Costs are fitted to these and packaged sets, without copies and without the predicted set's
    round or organisation.
    """
    judged, fitted = set(sets), multi_node_cases(distinct(dict.fromkeys([*sets, *load_table()])))
    cases = [c for c in fitted if c.target in judged]
    groups: dict[str, Callable[[RunSet], Hashable]] = {
        'round': lambda s: s.round,
        'organisation': anchors.organisation,
    }
    found: dict[tuple[Knowledge, str], _Pairs] = {}
    for name, group_of in groups.items():
        costs = {
            group: make_costs([c for c in fitted if group_of(c.target) != group], group_of)
            for group in {group_of(c.target) for c in cases}
        }
        for knowledge in prediction.KNOWLEDGE_TEXTS:
            found[knowledge, name] = [
                (c, p)
                for c in cases
                if (p := c.predict(knowledge, costs[group_of(c.target)])) and p.minutes
            ]
    # own replaces other
    best = {c.target: p for c, p in (*found['other', 'round'], *found['own', 'round'])}
    reasons = {
        c.target: f'no one-node set with {c.target.accelerator or "unnamed accelerators"}'
        for c in cases
        if c.target not in best
    }
    reasons |= {
        s: 'all logs duplicate logs of a different system'
        if s.is_duplicate
        else '; '.join(s.reasons) or 'the logs lack the batch'
        for s in sets
        if not s.is_published and (s.is_duplicate or not s.has_recipe)
    }
    return Validation(
        [(c, best[c.target]) for c in cases if c.target in best],
        {key: _errors_of(pairs) for key, pairs in found.items() if pairs},
        tuple(f'{s.round} {s.name} not predicted: {reason}' for s, reason in reasons.items()),
    )


@cache
def validate_published() -> Validation:
    return validate(load_table())
