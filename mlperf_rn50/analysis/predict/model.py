"""Model of the training time on other layouts, from a measured step and the epochs of a recipe. Pure functions.

A step takes a computing time, proportional to the images per accelerator, the time to exchange all gradients through
the ports of a node, and a latency. docs/prediction_model.md derives the terms and gives their sources.
"""
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from mlperf_rn50.analysis.predict.anchors import base_of, is_early, layout_of, link_of
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Knowledge, Layout, Link, Prediction
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.analysis.sets.run_set import RunSet

# The exchange can overlap with the backward pass, which takes two thirds of the computing time.
BACKWARD_SHARE = 2 / 3
UNKNOWN_GBIT_S, SLOW_GBIT_S = 400.0, 100.0  # assumed for unknown ports, and the slower end of their interval
# Of Horovod over TCP: per member of the ring, and for reductions within a node. Source: horovod/horovod#542
HOP_S, STAGES_S = 0.62e-3, 12e-3
EVALUATION_S = 0.015  # part of an evaluation that does not shrink with the number of nodes
SECOND_WEIGHT, MAX_SECOND = 0.5, 0.06  # share, and limit before it, of the deviation of a second set's step
_NEAREST_STARTS = 15
# Half of the 80 % interval in standard deviations (Student's t), for 1 to 10 degrees of freedom and for more.
_SIGMAS, _MANY_SIGMAS = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372), 1.2816


def ring_s(num_bytes: int, num_members: int, gbit_s: float) -> float:
    """Return the time of a ring all-reduce; each link carries 2 (n - 1) / n times the bytes (source: nccl-tests)."""
    return 2 * (num_members - 1) / num_members * num_bytes / (gbit_s * 1e9 / 8)


def _members(layout: Layout, link: Link) -> int:
    return layout.num_nodes if link.is_hierarchical else layout.num_units


def exchange_s(base: Base, layout: Layout, link: Link) -> float:
    """Return the measured or computed exchange time of a step. On one node, the computing time may include it."""
    if layout.num_nodes == 1:
        return base.exchange_s if base.num_nodes == 1 else 0.0
    if base.exchange_s and (base.num_nodes, base.num_units) == (layout.num_nodes, layout.num_units):
        return base.exchange_s
    return ring_s(link.exchange_bytes, _members(layout, link), link.gbit_s or UNKNOWN_GBIT_S)


def other_s(base: Base, layout: Layout, link: Link, costs: Costs) -> float:
    """Return the measured or modelled time of a step beside computing and exchange; 0 on one node."""
    if layout.num_nodes == 1 or base.num_nodes > 1 and base.exchange_s:  # such a base includes it in its computing time
        return 0.0
    tcp_s = (HOP_S * _members(layout, link) if link.is_tcp else 0.0) + (STAGES_S if link.is_hierarchical else 0.0)
    if link.extra_s is not None:
        return link.extra_s + tcp_s
    early_s = costs.early_s if base.run_set and is_early(base.run_set) else 0.0
    return costs.latency_s.get(base.generation, costs.other_latency_s) + early_s + tcp_s


def compute_s(base: Base, layout: Layout, link: Link, costs: Costs) -> float:
    """Return the computing time of a step: on the line through two measured local batches, or in proportion to one."""
    step_s, local = base.step_s - base.exchange_s, base.local_batch_size
    if base.num_nodes > 1 and not base.exchange_s:
        own = Layout(base.num_nodes, base.num_units // base.num_nodes, Recipe(None, base.global_batch_size))
        step_s -= exchange_s(base, own, link) + other_s(base, own, link, costs)
    proportional_s = step_s * layout.local_batch_size / local
    if not base.steps:
        return proportional_s
    other_local, other_step_s = min(base.steps, key=lambda p: abs(math.log(p[0] / layout.local_batch_size)))
    slope = (step_s - other_step_s) / (local - other_local)
    on_line = step_s + slope * (layout.local_batch_size - local)
    return on_line if slope > 0 and on_line > 0 else proportional_s


def _half_interval(values: Sequence[float]) -> float:
    """Return half of the 80 % prediction interval of two or more values."""
    freedom = len(values) - 1
    sigmas = _SIGMAS[freedom - 1] if freedom <= len(_SIGMAS) else _MANY_SIGMAS
    return sigmas * statistics.stdev(values)


def _run_spread(base: Base) -> float:
    """Return half of the 80 % interval of the base runs' seconds per epoch, as a fraction of their mean."""
    rates = [r.time_to_train_s / r.epochs_to_converge for r in base.run_set.converged
             if r.time_to_train_s and r.epochs_to_converge] if base.run_set else []
    return _half_interval(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0


def epochs_of(recipe: Recipe) -> Epochs | None:
    """Return the epoch of the last evaluation within the schedule; None if the recipe declares no schedule."""
    last = recipe.last_eval_epoch
    return None if last is None else Epochs(
        last, last, last, f'last evaluation within the {recipe.decay_epochs:g}-epoch schedule')


def _num_evaluations(recipe: Recipe, epochs: float) -> float:
    if not recipe.eval_period or recipe.first_eval_epoch is None:
        return epochs
    return max(0.0, 1 + (epochs - recipe.first_eval_epoch) / recipe.eval_period)


def start_s(costs: Costs, num_nodes: int) -> float | None:
    """Return the median extra time of the first epoch and gaps on the published sets with the most similar nodes."""
    nearest = sorted(costs.starts, key=lambda pair: abs(math.log(pair[0] / num_nodes)))[:_NEAREST_STARTS]
    return statistics.median(s for _, s in nearest) if nearest else None


def _total_s(base: Base, layout: Layout, costs: Costs, epochs: Epochs, step_s: float) -> float:
    steps_per_epoch = base.train_samples / layout.recipe.global_batch_size
    is_measured = layout.num_nodes == base.num_nodes
    evaluation_s = (base.evaluation_s or 0.0) * base.num_units / layout.num_units + (0 if is_measured else EVALUATION_S)
    first_s = None if is_measured else start_s(costs, layout.num_nodes)
    return (epochs.mean * steps_per_epoch * step_s + _num_evaluations(layout.recipe, epochs.mean) * evaluation_s
            + ((base.outside_s or 0.0) if first_s is None else first_s))


def _interval(base: Base, layout: Layout, link: Link, costs: Costs, epochs: Epochs, step_s: float,
              knowledge: Knowledge) -> tuple[float, float]:
    """Return the distances to both ends of the 80 % interval, as natural logarithms, with errors independent."""
    is_measured = (layout.num_nodes, layout.num_units, layout.local_batch_size) == (
        base.num_nodes, base.num_units, base.local_batch_size)
    model = math.log1p(_run_spread(base)) if is_measured or not costs.errors else costs.errors[knowledge]
    slow = fast = 0.0
    if link.gbit_s is None and layout.num_nodes > 1:
        assumed_s = exchange_s(base, layout, link)
        slow = math.log1p((UNKNOWN_GBIT_S / SLOW_GBIT_S - 1) * assumed_s / step_s)
        fast = -math.log1p(-min(0.9, assumed_s / step_s))
    return (math.hypot(model, fast, math.log(epochs.mean / epochs.low) if epochs.low else math.inf),
            math.hypot(model, slow, math.log(epochs.high / epochs.mean)))


def _second_factor(base: Base, second: RunSet | None, costs: Costs) -> float:
    """Return the factor by which a second set's step corrects a predicted step; large deviations are limited."""
    measured, layout = second and base_of(second), second and layout_of(second)
    if not second or not measured or not layout or base.num_nodes > 1:
        return 1.0
    link = link_of(second)
    predicted_s = (compute_s(base, layout, link, costs) + exchange_s(base, layout, link)
                   + other_s(base, layout, link, costs))
    deviation = math.log(measured.step_s / predicted_s)
    return math.exp(SECOND_WEIGHT * max(-MAX_SECOND, min(MAX_SECOND, deviation)))


def predict_layout(base: Base, layout: Layout, link: Link, costs: Costs, knowledge: Knowledge = 'own',
                   second: RunSet | None = None) -> Prediction:
    """Predict a layout from a base, and from a second set of its machine on several nodes if there is one."""
    if layout.recipe.global_batch_size > base.train_samples:
        return Prediction(base, layout, f'batch {layout.recipe.global_batch_size:,} exceeds the {base.train_samples:,} '
                                        'training images')
    is_one_node = layout.num_nodes == 1
    factor = 1.0 if is_one_node else _second_factor(base, second, costs)
    computed_s = factor * compute_s(base, layout, link, costs)
    if computed_s <= 0:
        return Prediction(base, layout, 'the assumed exchange and latency exceed the measured step')
    exchanged_s, rest_s = factor * exchange_s(base, layout, link), factor * other_s(base, layout, link, costs)
    hidden_s = min(link.overlap * exchanged_s, BACKWARD_SHARE * computed_s)
    step_s = computed_s + exchanged_s - hidden_s + rest_s
    is_bench = link.extra_s is not None
    known: Knowledge = 'two' if knowledge == 'own' and not is_one_node and (second or is_bench) else knowledge
    found = Prediction(
        base, layout, None, layout.epochs or epochs_of(layout.recipe), computed_s, exchanged_s, hidden_s, rest_s,
        knowledge=None if is_one_node else known,
        measured_share=1.0 if is_one_node or is_bench else computed_s / step_s)
    if found.epochs is None or base.evaluation_s is None:
        return found
    total_s = _total_s(base, layout, costs, found.epochs, step_s)
    if total_s <= 0:
        return Prediction(base, layout, 'the predicted time is not positive, because the source runs took less time '
                                        'than the sum of their epochs')
    down, up = _interval(base, layout, link, costs, found.epochs, step_s, known)
    return replace(found, minutes=total_s / 60, low_minutes=total_s / 60 * math.exp(-down),
                   high_minutes=total_s / 60 * math.exp(up))
