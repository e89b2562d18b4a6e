"""Model of the training time on other layouts, from a measured step and the epochs of a recipe. Pure functions.

A step takes a computing time, proportional to its images, plus a fixed time. The fixed time has two parts: a ring
all-reduce of all gradients over the slowest link, unless hidden by the backward pass, and an overhead on several nodes.
This overhead and the time outside of steps come from published systems, except those of the predicted round.
"""
import math
import statistics
from collections.abc import Sequence

from mlperf_rn50.analysis.predict.prediction import PUBLISHED_LINK, Base, Epochs, Layout, Link, Overheads, Prediction
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.analysis.sets.run_set import RunSet

# The exchange can overlap with the backward pass, which takes two thirds of the computing time.
BACKWARD_SHARE = 2 / 3
# Largest fixed share of a step for which the model holds.
MAX_FIXED_SHARE = 0.5
# Half of the 80 % interval in standard deviations (Student's t), for 1 to 10 degrees of freedom and for more.
_SIGMAS, _MANY_SIGMAS = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372), 1.2816


def base_of(run_set: RunSet) -> Base | None:
    """Return a run set as a base; None if the logs lack nodes, accelerators or ranks, times or the size of the data."""
    step_s, times = run_set.step_s, run_set.times
    if not run_set.num_nodes or not run_set.num_units or not step_s or times is None or not run_set.train_samples:
        return None
    return Base(run_set.name, run_set.source, run_set.num_nodes, run_set.num_units, bool(run_set.num_accelerators),
                run_set.recipe.global_batch_size, step_s, 0.0, times.evaluation_s, times.outside_s,
                run_set.train_samples, run_set.other_dataset, run_set)


def ring_s(num_bytes: int, num_members: int, gbit_s: float) -> float:
    """Return the time of a ring all-reduce; each link carries 2 (n - 1) / n times the bytes (source: nccl-tests)."""
    return 2 * (num_members - 1) / num_members * num_bytes / (gbit_s * 1e9 / 8)


def _is_alike(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets have the same kind of accelerator or, if unnamed, equally many per node."""
    kinds = [(s.accelerator or '').casefold().removeprefix('nvidia').strip() for s in (a, b)]
    per_node = [s.num_accelerators / s.num_nodes for s in (a, b) if s.num_accelerators and s.num_nodes]
    return kinds[0] == kinds[1] and (bool(kinds[0]) or len(per_node) == 2 and per_node[0] == per_node[1])


def is_pair(one: RunSet, target: RunSet) -> bool:
    """Return whether a set has one node and the target's round, organisation, kind of accelerator and data."""
    return (one.num_nodes == 1 and one.round == target.round and one.other_dataset == target.other_dataset
            and (one.org or '').casefold() == (target.org or '').casefold() and _is_alike(one, target))


def base_for(target: RunSet, sets: Sequence[RunSet]) -> Base | None:
    """Return, as a base, a target's one-node pair with the same optimizer, if possible, and the nearest local batch."""
    found = [(s, base) for s in sets if is_pair(s, target) and (base := base_of(s))]
    local = target.recipe.global_batch_size / (target.num_units or 1)
    nearest = min(found, key=lambda pair: (pair[0].recipe.opt_name != target.recipe.opt_name,
                                           abs(pair[1].local_batch_size - local), pair[0].name), default=None)
    return nearest and nearest[1]


def layout_of(run_set: RunSet) -> Layout | None:
    """Return the layout of a run set; None if the logs lack it or the nodes differ in size."""
    if not run_set.num_nodes or not run_set.num_units or run_set.num_units % run_set.num_nodes:
        return None
    return Layout(run_set.num_nodes, run_set.num_units // run_set.num_nodes, run_set.recipe)


def _compute_s(base: Base, layout: Layout, link: Link, step_overhead_s: float = 0.0) -> float:
    """Return the computing time of the base's step, scaled with the local batch."""
    compute_s = base.step_s - base.exchange_s
    if base.num_nodes > 1 and not base.exchange_s:
        compute_s -= ring_s(link.exchange_bytes, base.num_units, link.gbit_s) + step_overhead_s
    return compute_s * layout.local_batch_size / base.local_batch_size


def _exchange_s(base: Base, layout: Layout, link: Link) -> float:
    """Return the measured or computed exchange time of a step. On one node, the computing time may include it."""
    if layout.num_nodes == 1:
        return base.exchange_s if base.num_nodes == 1 else 0.0
    if base.exchange_s and (base.num_nodes, base.num_units) == (layout.num_nodes, layout.num_units):
        return base.exchange_s
    return ring_s(link.exchange_bytes, layout.num_units, link.gbit_s)


def _half_interval(values: Sequence[float]) -> float:
    """Return half of the 80 % prediction interval of two or more values."""
    freedom = len(values) - 1
    sigmas = _SIGMAS[freedom - 1] if freedom <= len(_SIGMAS) else _MANY_SIGMAS
    return sigmas * statistics.stdev(values)


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentiles."""
    tenths = statistics.quantiles(values, n=10, method='inclusive')
    return tenths[0], statistics.median(values), tenths[-1]


def _step_overhead_s(base: Base, target: RunSet) -> float:
    """Return the part of a published set's step that is neither computing nor the ring all-reduce."""
    layout, step_s, link = layout_of(target), target.step_s, PUBLISHED_LINK
    assert layout and step_s  # the published table has both
    return step_s - _compute_s(base, layout, link) - ring_s(link.exchange_bytes, layout.num_units, link.gbit_s)


def _has_common_run(a: RunSet, b: RunSet) -> bool:
    """Return whether two sets share a run; epochs and time identify a run, because copied logs have other paths."""
    times = {(r.epochs_to_converge, round(r.time_to_train_s, 2)) for r in a.readable if r.time_to_train_s}
    return any((r.epochs_to_converge, round(r.time_to_train_s, 2)) in times for r in b.readable if r.time_to_train_s)


def overheads_without(*judged: RunSet) -> Overheads:
    """Return the overheads of published systems, without the rounds of the judged sets and of copies of these sets."""
    published = load_published()
    rounds = {s.round for s in judged} | {p.round for p in published for s in judged if _has_common_run(p, s)}
    sets = [s for s in published if s.round not in rounds]
    pairs = [(base, s) for s in sets if (s.num_nodes or 0) > 1 and s.recipe.last_eval_epoch and s.times
             and (base := base_for(s, sets))]
    steps = [_step_overhead_s(base, s) for base, s in pairs]
    low, middle, high = _quantiles([s.times.outside_s for _, s in pairs if s.times])
    # Epochs to converge, as fractions of the last evaluation epoch within the schedule.
    shares = [epochs / last for s in sets if (last := s.recipe.last_eval_epoch) for epochs in s.epochs if epochs]
    spread_s = _half_interval(steps) * math.sqrt(1 + 1 / len(steps))  # includes the uncertainty of the mean
    source = f'{len(pairs)} pairs of published systems of {", ".join(dict.fromkeys(s.round for _, s in pairs))}'
    return Overheads(statistics.fmean(steps), spread_s, middle, low, high, _quantiles(shares)[0], source)


def epochs_of(recipe: Recipe, overheads: Overheads) -> Epochs | None:
    """Return the epoch of the last evaluation within the schedule; None if the recipe declares no schedule."""
    last = recipe.last_eval_epoch
    return None if last is None else Epochs(
        last, last * overheads.epochs_low, last, f'last evaluation within the {recipe.decay_epochs:g}-epoch schedule')


def _num_evaluations(recipe: Recipe, epochs: float) -> float:
    if not recipe.eval_period or recipe.first_eval_epoch is None:
        return epochs
    return max(0.0, 1 + (epochs - recipe.first_eval_epoch) / recipe.eval_period)


def _minutes(base: Base, layout: Layout, overheads: Overheads, epochs: Epochs,
             step_s: float) -> tuple[float, float, float]:
    """Return the minutes to the target and both ends of their 80 % interval, with errors assumed independent."""
    steps_per_epoch = base.train_samples / layout.recipe.global_batch_size
    evaluation_s = (base.evaluation_s or 0.0) * base.num_units / layout.num_units
    is_measured = layout.num_nodes == base.num_nodes or overheads.outside_s is None
    outside_s = (base.outside_s or 0.0) if is_measured else overheads.outside_s or 0.0
    total = (epochs.mean * steps_per_epoch * step_s + _num_evaluations(layout.recipe, epochs.mean) * evaluation_s
             + outside_s)
    slope = steps_per_epoch * step_s
    steps = 0.0 if layout.num_nodes == base.num_nodes == 1 else epochs.mean * steps_per_epoch * overheads.step_spread_s
    runs = _run_spread(base) * total
    down = math.hypot(steps, runs, (epochs.mean - epochs.low) * slope,
                      0.0 if is_measured else outside_s - overheads.outside_low_s)
    up = math.hypot(steps, runs, (epochs.high - epochs.mean) * slope,
                    0.0 if is_measured else overheads.outside_high_s - outside_s)
    return total / 60, max(0.0, total - down) / 60, (total + up) / 60


def _run_spread(base: Base) -> float:
    """Return half of the 80 % interval of the base runs' seconds per epoch, as a fraction of their mean."""
    rates = [r.time_to_train_s / r.epochs_to_converge for r in base.run_set.converged
             if r.time_to_train_s and r.epochs_to_converge] if base.run_set else []
    return _half_interval(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0


def predict_layout(base: Base, layout: Layout, link: Link, overheads: Overheads) -> Prediction:
    """Predict a layout, with the overheads that answer.overheads_for(base) returns."""
    if layout.recipe.global_batch_size > base.train_samples:
        return Prediction(base, layout, f'batch {layout.recipe.global_batch_size:,} exceeds the {base.train_samples:,} '
                                        'training images')
    is_one_node = layout.num_nodes == 1
    # A base that measured its exchange on several nodes includes the overheads in its computing time.
    has_overheads = not is_one_node and not (base.num_nodes > 1 and base.exchange_s)
    compute_s = _compute_s(base, layout, link, overheads.step_s)
    exchange_s, other_s = _exchange_s(base, layout, link), overheads.step_s if has_overheads else 0.0
    hidden_s = min(exchange_s, BACKWARD_SHARE * compute_s) if link.is_hidden else 0.0
    fixed_s = exchange_s - hidden_s + other_s
    if compute_s <= 0:
        return Prediction(base, layout, 'the assumed exchange and overhead exceed the measured step')
    share = fixed_s / (compute_s + fixed_s)
    if share > MAX_FIXED_SHARE and base.has_accelerators and not is_one_node:
        return Prediction(base, layout, f'exchange and overhead are {100 * share:.0f} % of a step; the model holds '
                                        f'up to {100 * MAX_FIXED_SHARE:.0f} %')
    if layout.epochs is None and layout.recipe.last_eval_epoch is None and base.dataset is None:
        return Prediction(base, layout, 'the recipe declares no schedule, so the epochs are unknown')
    epochs = layout.epochs or epochs_of(layout.recipe, overheads)
    times = _minutes(base, layout, overheads, epochs, compute_s + fixed_s) if epochs and base.evaluation_s is not None \
        else (None, None, None)
    if times[0] is not None and times[0] <= 0:
        return Prediction(base, layout, 'the predicted time is not positive, because the source runs took less time '
                                        'than the sum of their epochs')
    return Prediction(base, layout, None, epochs, compute_s, exchange_s, hidden_s, other_s, *times)
