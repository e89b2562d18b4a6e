"""Model of the training time on other layouts, whose terms docs/predict.md derives. Pure
functions."""

import math
import re
import statistics
from dataclasses import replace

from mlperf_rn50.analysis.predict.anchors import is_early, link_of
from mlperf_rn50.analysis.predict.prediction import (
    Base,
    Costs,
    Epochs,
    Knowledge,
    Layout,
    Link,
    Prediction,
    StepParts,
)

# The exchange can overlap with the backward pass, which takes two thirds of the computing time.
BACKWARD_SHARE = 2 / 3
# assumed for unknown ports, and the low end of the interval
UNKNOWN_GBIT_S, _SLOW_GBIT_S = 400.0, 100.0
# Latency of Horovod over TCP: per member of the ring, and for reductions within a node. Source:
# horovod/horovod#542
HOP_S, STAGES_S = 0.62e-3, 12e-3
EVALUATION_S = 0.015  # part of an evaluation that does not shrink with the number of nodes
# weight of a second set's step deviation, and its limit before weighting
_SECOND_WEIGHT, _MAX_DEVIATION = 0.5, 0.06
_NEAREST_STARTS = 15
_AGES = 'KMPVTALHB'  # first letters of NVIDIA's generations, the oldest first


def ring_s(num_bytes: int, num_members: int, gbit_s: float) -> float:
    """Return the time of a ring all-reduce. Each link carries 2 (n - 1) / n times the bytes
    (source: nccl-tests)."""
    return 2 * (num_members - 1) / num_members * num_bytes / (gbit_s * 1e9 / 8)


def _members(layout: Layout, link: Link) -> int:
    return layout.num_nodes if link.is_hierarchical else layout.num_units


def generation_with_costs(generation: str, costs: Costs) -> str:
    """Return the generation of NVIDIA accelerators with costs that is the next in age, the newer of
    two; '' for others."""
    if generation in costs.latency_s:
        return generation

    def age(name: str) -> int | None:
        found = re.search(rf'([{_AGES}])\d', name)
        return _AGES.index(found[1]) if found else None

    own = age(generation)
    if own is None:
        return ''
    ages = {g: a for g in costs.latency_s if (a := age(g)) is not None}
    return min(ages, default='', key=lambda g: (abs(ages[g] - own), -ages[g]))


def latency_s(base: Base, costs: Costs) -> float:
    """Return the fitted latency of a step on several nodes, for the base's accelerator and
    software."""
    early_s = costs.early_s if base.run_set and is_early(base.run_set) else 0.0
    return (
        costs.latency_s.get(generation_with_costs(base.generation, costs), costs.other_latency_s)
        + early_s
    )


def _several_nodes_s(base: Base, layout: Layout, link: Link, costs: Costs) -> tuple[float, float]:
    """Return the seconds of a step's exchange and the other seconds that several nodes add; (0, 0)
    on one node."""
    if layout.num_nodes == 1:
        return 0.0, 0.0
    members = _members(layout, link)
    other_s = latency_s(base, costs) if link.extra_s is None else link.extra_s
    if link.is_tcp:
        other_s += HOP_S * members
    if link.is_hierarchical and layout.units_per_node > 1:
        other_s += STAGES_S
    return ring_s(link.exchange_bytes, members, link.gbit_s or UNKNOWN_GBIT_S), other_s


def compute_s(base: Base, layout: Layout, link: Link, costs: Costs) -> float:
    """Return the computing time of a step: on the line through two measured local batches, or in
    proportion to one."""
    step_s = base.step_s - sum(_several_nodes_s(base, base.layout, link, costs))
    wanted, local = layout.local_batch_size, base.local_batch_size
    proportional_s = step_s * wanted / local
    if not base.steps:
        return proportional_s
    other = min(base.steps, key=lambda size: abs(math.log(size / wanted)))
    slope = max(0.0, (base.step_s - base.steps[other]) / (local - other))
    on_line = step_s + slope * (wanted - local)
    return on_line if on_line > 0 else proportional_s


def step_parts(base: Base, layout: Layout, link: Link, costs: Costs) -> StepParts:
    """Return the times of a step."""
    computed_s = compute_s(base, layout, link, costs)
    exchanged_s, other_s = _several_nodes_s(base, layout, link, costs)
    hidden_s = min(exchanged_s, BACKWARD_SHARE * computed_s)
    if link.extra_s is not None:  # measured
        hidden_s = min(link.overlap * exchanged_s, computed_s)
    elif base.num_nodes > 1:  # the computing time was derived without overlap
        hidden_s = 0.0
    # published sets show no overlap; assume just enough that TCP would not be faster
    elif not link.is_tcp:
        hidden_s = max(0.0, hidden_s - HOP_S * _members(layout, link))
    return StepParts(computed_s, exchanged_s, hidden_s, other_s)


def _run_spread(base: Base) -> float:
    """Return half of the 80 % interval of a further run's time, as a fraction of the base runs'
    mean; 0 for fewer than two runs."""
    runs = base.run_set.timed if base.run_set else ()
    times = [s for run in runs if (s := run.time_to_train_s)]
    if len(times) < 2:
        return 0.0
    k = 1 / (len(times) - 1)
    # Student's t, by Cornish and Fisher's expansion
    sigmas = 1.2816 + 0.8467 * k + 0.571 * k**2 + 0.2587 * k**3
    relative = statistics.stdev(times) / statistics.fmean(times)
    return sigmas * math.sqrt(1 + 1 / len(times)) * relative


def _total_s(base: Base, layout: Layout, costs: Costs, epochs: float, step_s: float) -> float:
    """Return the time of a run. On another number of nodes, its start is the median of sets with
    similar numbers."""
    recipe, evaluations = layout.recipe, epochs
    if recipe.eval_period and recipe.first_eval_epoch is not None:
        evaluations = max(0.0, 1 + (epochs - recipe.first_eval_epoch) / recipe.eval_period)
    evaluation_s = (base.evaluation_s or 0.0) * base.num_units / layout.num_units
    start_s = base.outside_s
    if layout.num_nodes != base.num_nodes:
        evaluation_s += EVALUATION_S
        starts = sorted(costs.starts, key=lambda pair: abs(math.log(pair[0] / layout.num_nodes)))
        if nearest := [s for _, s in starts[:_NEAREST_STARTS]]:
            start_s = max(0.0, statistics.median(nearest))
    steps = epochs * base.train_samples / recipe.global_batch_size
    return steps * step_s + evaluations * evaluation_s + start_s


def _interval(epochs: Epochs, error: float, share: float) -> tuple[float, float]:
    """Return the factors of both ends of the 80 % interval, from independent errors of model,
    epochs and ports.

    The error of the model is a natural logarithm; share is exchange / step if the ports are
    unknown, otherwise 0.
    """
    slow = math.log1p((UNKNOWN_GBIT_S / _SLOW_GBIT_S - 1) * share)
    fast = math.log1p(-min(0.9, share))
    fewer = math.log(epochs.mean / epochs.low) if epochs.low else math.inf
    more = math.log(epochs.high / epochs.mean)
    return math.exp(-math.hypot(error, fast, fewer)), math.exp(math.hypot(error, slow, more))


def _second_factor(base: Base, second: Base, link: Link | None, costs: Costs) -> float:
    """Return the factor by which a second set's step corrects a predicted step. Large deviations
    are limited.

    link: of the machine. Published sets have their own described ports, if any.
    """
    assert second.run_set, 'a bench is never a second set'
    own = link_of(second.run_set)
    if link and second.run_set.is_published:
        own = replace(own, gbit_s=own.gbit_s or link.gbit_s)
    elif link:
        own = replace(link, gbit_s=link.gbit_s or own.gbit_s)
    predicted = step_parts(base, second.layout, own, costs)
    deviation = math.log(second.step_s / predicted.step_s)
    return math.exp(_SECOND_WEIGHT * max(-_MAX_DEVIATION, min(_MAX_DEVIATION, deviation)))


def predict_layout(
    base: Base,
    layout: Layout,
    link: Link,
    costs: Costs,
    knowledge: Knowledge = 'own',
    second: Base | None = None,
    machine_link: Link | None = None,
) -> Prediction:
    """Predict a layout from a base, and from a second set of its machine on several nodes if there
    is one, which was measured with machine_link."""
    batch, epochs = layout.recipe.global_batch_size, layout.epochs
    if batch > base.train_samples:
        return Prediction(
            layout, f'batch {batch:,} exceeds the {base.train_samples:,} training images'
        )

    # The step
    factor = _second_factor(base, second, machine_link, costs) if second else 1.0
    parts = StepParts(*(factor * s for s in step_parts(base, layout, link, costs)))
    step_s = parts.step_s
    if parts.compute_s <= 0:
        return Prediction(
            layout,
            'the assumed exchange and latency exceed the measured step; pass a source on one node, '
            'or a higher --link-gbit-s',
        )
    has_extra = link.extra_s is not None
    is_same = is_measured_layout(base, layout)
    is_measured = is_same or layout.num_nodes == base.num_nodes == 1 and not base.is_scaled
    if knowledge == 'own' and layout.num_nodes > 1:
        if second or has_extra:
            knowledge = 'two'
        elif base.num_nodes == 1 and base.generation not in costs.latency_s:
            knowledge = 'other'
    share = None if base.is_scaled else 1.0
    if share and not is_measured and not has_extra:
        share = parts.compute_s / step_s
    found = Prediction(
        layout,
        **parts._asdict(),
        step_s=step_s,
        images_per_s=batch / step_s,
        hardware_efficiency=layout.local_batch_size / step_s * base.step_s / base.local_batch_size,
        knowledge=None if is_measured else knowledge,
        measured_share=share,
    )
    if epochs is None or base.evaluation_s is None:
        return found

    # The run
    minutes = _total_s(base, layout, costs, epochs.mean, step_s) / 60
    spread = _run_spread(base) if is_same else 0.0
    if spread and epochs.kind == 'source':  # the times of the runs include their epochs
        epochs = replace(epochs, low=epochs.mean, high=epochs.mean)
    error = math.hypot(math.log1p(spread) or costs.errors.get(knowledge, 0.0), base.noise)
    low, high = _interval(
        epochs, error, 0.0 if link.gbit_s or is_same else parts.exchange_s / step_s
    )
    return replace(
        found,
        minutes=minutes,
        interval=(low * minutes, high * minutes),
        node_hours=minutes / 60 * layout.num_nodes,
    )


def is_measured_layout(base: Base, layout: Layout) -> bool:
    """Return whether a base was measured on the nodes and units of a layout, with its batch."""
    size = layout.num_nodes, layout.num_units, layout.local_batch_size
    return not base.is_scaled and size == (base.num_nodes, base.num_units, base.local_batch_size)
