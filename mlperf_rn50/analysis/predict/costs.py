"""Costs of several nodes, fitted to published sets, and the errors of predictions of left-out sets.
Pure functions."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

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

    @property
    def base(self) -> Base | None:
        """The most similar one-node set, one of the same machine if there is any."""
        return self.own or self.other

    def predict(self, knowledge: Knowledge, costs: Costs) -> Prediction | None:
        """Predict the set with the given knowledge. Return None if that knowledge is missing."""
        base = self.other if knowledge == 'other' else self.own
        second = self.second if knowledge == 'two' else None
        if base is None or self.layout.epochs is None or knowledge == 'two' and second is None:
            return None
        link = anchors.link_of(self.target)
        return predict_layout(base, self.layout, link, costs, knowledge=knowledge, second=second)

    def is_held(self, p: Prediction) -> bool:
        """Return whether the measured time is within the interval of a prediction."""
        low, high = p.interval or (math.inf, 0.0)
        return low <= (self.target.minutes or 0.0) <= high


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
    if not epochs:
        return None
    median = statistics.median(epochs)
    return Epochs(median, min(epochs), max(epochs), 'sets at similar batches')


def multi_node_cases(sets: Sequence[RunSet]) -> list[MultiNodeCase]:
    """Return the sets on several nodes that have a time and equal nodes, with the sets to predict
    them from."""
    found = []
    for s in sets:
        base = anchors.base_of(s)
        if not base or base.num_nodes == 1 or base.num_units % base.num_nodes or not s.minutes:
            continue
        own, other = (anchors.one_node_base(s, sets, is_own) for is_own in (True, False))
        # the costs are of other software, so its own set counts as another machine's
        if anchors.lacks_schedule(s):
            own, other = None, own or other
        layout = replace(base.layout, epochs=_epochs_of(s, sets))
        found.append(
            MultiNodeCase(
                target=s,
                layout=layout,
                step_s=base.step_s,
                own=own,
                other=other,
                second=anchors.second_base(layout, own, sets, s) if own else None,
            )
        )
    return found


def fit(cases: Sequence[MultiNodeCase]) -> Costs:
    """Return the latencies that minimise the relative errors of the steps, by iteratively
    reweighted least squares."""
    # The step of each case = known parts + matrix @ (common latency, early addition, differences of
    # the generations).
    data = [(c, base) for c in cases if (base := c.base)]
    generations = sorted({base.generation for _, base in data})
    prior = np.array([_LATENCY_S, 0.0, *[0.0] * len(generations)])
    spread = np.array(
        [_LATENCY_SPREAD_S, _EARLY_SPREAD_S, *[_GENERATION_SPREAD_S] * len(generations)]
    )
    rows = [
        [1.0, anchors.is_early(c.target), *(base.generation == g for g in generations)]
        for c, base in data
    ]
    matrix = np.array(rows, dtype=float).reshape(len(data), len(prior))
    steps = np.array([c.step_s for c, _ in data])
    parts = [step_parts(base, c.layout, anchors.link_of(c.target), Costs()) for c, base in data]
    extra = steps - np.array([known.step_s for known in parts])

    # Solve, with less weight for outliers in each iteration.
    trust = np.array([1.0 if c.own else _OTHER_WEIGHT for c, _ in data])
    scale = trust / (_STEP_SPREAD * steps) ** 2
    huber, found = np.ones(len(data)), prior
    for _ in range(_ITERATIONS):
        weight = huber * scale
        normal = matrix.T @ (matrix * weight[:, None]) + np.diag(spread**-2)
        found = np.linalg.solve(normal, matrix.T @ (weight * extra) + prior / spread**2)
        errors = np.abs(extra - matrix @ found) / (_STEP_SPREAD * steps)
        huber = np.minimum(1.0, _HUBER / np.maximum(errors, 1e-9))
    common, early, *differences = (float(v) for v in found)
    rounds = ', '.join(dict.fromkeys(c.target.round for c, _ in data))
    return Costs(
        latency_s={g: max(0.0, common + d) for g, d in zip(generations, differences) if g},
        other_latency_s=max(0.0, common),
        early_s=max(0.0, early),
        # Sets without an own one-node set are mostly of TPUs and Gaudis, whose starts differ
        # (median 4.8 instead of 1.6 s).
        starts=tuple(
            (c.layout.num_nodes, c.target.times.outside_s)
            for c, _ in data
            if c.target.times and c.own
        ),
        most_nodes=max((c.layout.num_nodes for c, _ in data), default=0),
        least_local=min((c.layout.local_batch_size for c, _ in data), default=0.0),
        source=f'fitted to {len(data)} published sets of {rounds}',
    )


_Group = Callable[[RunSet], Hashable]
_Pairs = list[tuple[MultiNodeCase, Prediction]]


def _predict_left_out(
    cases: Sequence[MultiNodeCase],
    fitted: Sequence[MultiNodeCase],
    group_of: _Group,
    costs_of: Callable[[list[MultiNodeCase]], Costs],
) -> dict[Knowledge, _Pairs]:
    """Predict cases by knowledge, each with the costs of the fitted cases without its group."""
    costs = {
        group: costs_of([c for c in fitted if group_of(c.target) != group])
        for group in {group_of(c.target) for c in cases}
    }
    return {
        knowledge: [
            (c, p)
            for c in cases
            if (p := c.predict(knowledge, costs[group_of(c.target)])) and p.minutes
        ]
        for knowledge in prediction.KNOWLEDGE_TEXTS
    }


def make_costs(cases: Sequence[MultiNodeCase], group_of: _Group) -> Costs:
    """Return the costs fitted to all cases, and half of the 80 % interval for each knowledge.

    It is the 80 % quantile of the errors with costs fitted without the group of each set (conformal
    prediction).
    """
    left_out = _predict_left_out(cases, cases, group_of, fit)
    widths, most = dict.fromkeys(prediction.KNOWLEDGE, 0.0), 0.0
    for knowledge in reversed(prediction.KNOWLEDGE):  # less knowledge never has a narrower interval
        errors = sorted(
            abs(math.log(p.minutes / c.target.minutes))
            for c, p in left_out[knowledge]
            if p.minutes and c.target.minutes
        )
        if len(errors) >= _MIN_ERRORS:
            most = max(most, errors[int(len(errors) * _COVERAGE) - 1])
        widths[knowledge] = most
    return replace(fit(cases), errors=widths)


@cache
def costs_without(round_: str | None) -> Costs:
    """Return the costs fitted to the packaged sets, except those of a round. None excludes no
    round."""
    cases = multi_node_cases(distinct(load_table()))
    return make_costs([c for c in cases if c.target.round != round_], lambda s: s.round)


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
    not_predicted: Sequence[str]  # sets without a prediction, with reasons


def _errors_of(pairs: _Pairs) -> Errors:
    errors = [abs(prediction.relative_error(p.minutes, c.target.minutes) or 0.0) for c, p in pairs]
    median, high, worst = (float(np.quantile(errors, q)) for q in (0.5, 0.9, 1))
    return Errors(
        num_predicted=len(pairs),
        num_held=sum(c.is_held(p) for c, p in pairs),
        median_error=median,
        high_error=high,
        worst_error=worst,
    )


def validate(sets: Sequence[RunSet]) -> Validation:
    """Predict every set on several nodes, except refused and duplicate ones.

    Costs are fitted to these and packaged sets, without copies and without the predicted set's
    round or organisation.
    """
    judged, fitted = set(sets), multi_node_cases(distinct(dict.fromkeys([*sets, *load_table()])))
    cases = [c for c in fitted if c.target in judged]
    groups: dict[str, _Group] = {'round': lambda s: s.round, 'organisation': anchors.organisation}
    found: dict[tuple[Knowledge, str], _Pairs] = {}
    for name, group_of in groups.items():
        left_out = _predict_left_out(
            cases, fitted, group_of, partial(make_costs, group_of=group_of)
        )
        found |= {(knowledge, name): pairs for knowledge, pairs in left_out.items()}
    # own replaces other
    best = {c.target: p for c, p in (*found['other', 'round'], *found['own', 'round'])}
    missing = [
        (c.target, f'no one-node set with {c.target.accelerator or "unnamed accelerators"}')
        for c in cases
        if c.target not in best
    ]
    for s in sets:
        if s.is_published:
            continue
        if s.is_duplicate:
            missing.append((s, 'all logs duplicate logs of a different system'))
        elif not s.has_recipe:
            missing.append((s, '; '.join(s.reasons) or 'the logs lack the batch'))
    return Validation(
        [(c, best[c.target]) for c in cases if c.target in best],
        {key: _errors_of(pairs) for key, pairs in found.items() if pairs},
        [f'{s.round} {s.name} not predicted: {reason}' for s, reason in missing],
    )


@cache
def validate_published() -> Validation:
    return validate(load_table())
