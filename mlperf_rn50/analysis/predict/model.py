"""The time to train on other nodes, from the time of a step that was measured and the epochs that a recipe declares.

A step on another layout takes the time that its images take to compute, and what does not shrink with them: a ring
all-reduce of all gradients over the slowest link, less what is hidden behind the backward pass, and what every step
costs beside on several nodes. That cost, and the time outside of steps, are those of published systems of other rounds
than the one that is predicted. Pure.
"""
import math
import statistics
from collections.abc import Sequence

from mlperf_rn50.analysis.predict.prediction import (
    NO_COSTS,
    PUBLISHED_LINK,
    Base,
    Costs,
    Epochs,
    Layout,
    Link,
    Prediction,
)
from mlperf_rn50.analysis.sets.run_set import KnownSet, Recipe, load_published

# A backward pass computes twice what the forward pass does, and gradients are exchanged behind it.
BACKWARD_SHARE = 2 / 3
# The share of a step that does not shrink with its images, above which the model does not hold.
MAX_FIXED_SHARE = 0.5
# The interval of four out of five, in standard deviations: Student's t, by degrees of freedom from 1 on, and beyond.
_SIGMAS, _MANY_SIGMAS = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372), 1.2816


def base_of(known: KnownSet) -> Base | None:
    """Return a known set as a base; None where its logs lack the nodes, the units, or the times."""
    step_s, times = known.step_s, known.times
    if not known.num_nodes or not known.num_units or not step_s or times is None or not known.train_samples:
        return None
    return Base(known.name, known.source, known.num_nodes, known.num_units, bool(known.num_accelerators),
                known.recipe.global_batch_size, step_s, 0.0, times.evaluation_s, times.outside_s, known.train_samples,
                known.dataset, known)


def ring_s(num_bytes: int, num_members: int, gbit_s: float) -> float:
    """Seconds of a ring all-reduce: each link carries the message 2 (n - 1) / n times. Source: nccl-tests."""
    return 2 * (num_members - 1) / num_members * num_bytes / (gbit_s * 1e9 / 8)


def _is_alike(a: KnownSet, b: KnownSet) -> bool:
    """Whether two sets have the same kind of accelerator, or as many on a node where it is not named."""
    kinds = [(s.accelerator or '').casefold().removeprefix('nvidia').strip() for s in (a, b)]
    per_node = [s.num_accelerators / s.num_nodes for s in (a, b) if s.num_accelerators and s.num_nodes]
    return kinds[0] == kinds[1] and (bool(kinds[0]) or len(per_node) == 2 and per_node[0] == per_node[1])


def is_pair(one: KnownSet, target: KnownSet) -> bool:
    """Whether a set has one node, and is of the same round, organisation, kind of accelerator and data as another."""
    return (one.num_nodes == 1 and one.round == target.round and one.dataset == target.dataset
            and (one.org or '').casefold() == (target.org or '').casefold() and _is_alike(one, target))


def base_for(target: KnownSet, sets: Sequence[KnownSet]) -> Base | None:
    """Return the one-node set of the same kind that a set is predicted from."""
    found = [(s, base) for s in sets if is_pair(s, target) and (base := base_of(s))]
    local = target.recipe.global_batch_size / (target.num_units or 1)
    nearest = min(found, key=lambda pair: (pair[0].recipe.opt_name != target.recipe.opt_name,
                                           abs(pair[1].local_batch_size - local), pair[0].name), default=None)
    return nearest and nearest[1]


def layout_of(known: KnownSet) -> Layout | None:
    """Return the layout of a known set; None where its logs lack it."""
    if not known.num_nodes or not known.num_units or known.num_units % known.num_nodes:
        return None
    return Layout(known.num_nodes, known.num_units // known.num_nodes, known.recipe)


def _compute_s(base: Base, layout: Layout, link: Link, costs: Costs) -> float:
    """Return the computing time of a step: that of the base without its exchange, in proportion to the images."""
    own_s = base.step_s - base.exchange_s
    if base.num_nodes > 1 and not base.exchange_s:
        own_s -= ring_s(link.exchange_bytes, base.num_units, link.gbit_s) + costs.step_s
    return own_s * layout.local_batch_size / base.local_batch_size


def _exchange_s(base: Base, layout: Layout, link: Link) -> float:
    """Return the exchange of a step: over the link, or as measured; on one node, else, it is part of computing."""
    if layout.num_nodes == 1:
        return base.exchange_s if base.num_nodes == 1 else 0.0
    if base.exchange_s and (base.num_nodes, base.num_units) == (layout.num_nodes, layout.num_units):
        return base.exchange_s
    return ring_s(link.exchange_bytes, layout.num_units, link.gbit_s)


def _half_interval(values: Sequence[float]) -> float:
    """Return half of the interval that holds four out of five more values, from two or more of them."""
    freedom = len(values) - 1
    sigmas = _SIGMAS[freedom - 1] if freedom <= len(_SIGMAS) else _MANY_SIGMAS
    return sigmas * statistics.stdev(values)


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The ends of the interval of four out of five, and the median between them."""
    tenths = statistics.quantiles(values, n=10, method='inclusive')
    return tenths[0], statistics.median(values), tenths[-1]


def _step_cost_s(base: Base, target: KnownSet) -> float:
    """Return what a step of a published set costs beside computing and the ring."""
    layout, step_s, link = layout_of(target), target.step_s, PUBLISHED_LINK
    assert layout and step_s  # the table has both of every set
    return (step_s - _compute_s(base, layout, link, NO_COSTS)
            - ring_s(link.exchange_bytes, layout.num_units, link.gbit_s))


def _is_same(a: KnownSet, b: KnownSet) -> bool:
    """Whether two sets hold one run: logs keep their times wherever they lie."""
    times = {(r.epochs, round(r.time_s, 2)) for r in a.runs if r.time_s}
    return any((r.epochs, round(r.time_s, 2)) in times for r in b.runs if r.time_s)


def costs_without(*judged: KnownSet) -> Costs:
    """Return the costs of published systems, without the rounds that some sets name or were published in."""
    published = load_published()
    rounds = {s.round for s in judged} | {p.round for p in published for s in judged if _is_same(p, s)}
    sets = [s for s in published if s.round not in rounds]
    pairs = [(base, s) for s in sets if (s.num_nodes or 0) > 1 and s.recipe.last_eval_epoch and s.times
             and (base := base_for(s, sets))]
    steps = [_step_cost_s(base, s) for base, s in pairs]
    low, middle, high = _quantiles([s.times.outside_s for _, s in pairs if s.times])
    # Epochs of each run that converged, as a share of those that its schedule leaves room for.
    shares = [r.epochs / last for s in sets if (last := s.recipe.last_eval_epoch) for r in s.converged if r.epochs]
    spread_s = _half_interval(steps) * math.sqrt(1 + 1 / len(steps))  # the mean is not known exactly, either
    source = f'{len(pairs)} pairs of published systems of {", ".join(dict.fromkeys(s.round for _, s in pairs))}'
    return Costs(statistics.fmean(steps), spread_s, middle, low, high, _quantiles(shares)[0], source)


def epochs_of(recipe: Recipe, costs: Costs) -> Epochs | None:
    """Return the last evaluation that the schedule leaves room for; None where the recipe declares no schedule."""
    last = recipe.last_eval_epoch
    return None if last is None else Epochs(
        last, last * costs.epochs_low, last,
        f'last evaluation before the end of its schedule of {recipe.decay_epochs:g} epochs')


def _num_evaluations(recipe: Recipe, epochs: float) -> float:
    """Evaluations until so many epochs."""
    if not recipe.eval_period or recipe.first_eval_epoch is None:
        return epochs
    return max(0.0, 1 + (epochs - recipe.first_eval_epoch) / recipe.eval_period)


def _minutes(base: Base, layout: Layout, costs: Costs, epochs: Epochs, step_s: float) -> tuple[float, float, float]:
    """Return the minutes to the target, and the interval of four out of five: independent errors together."""
    steps_per_epoch = base.train_samples / layout.recipe.global_batch_size
    evaluation_s = (base.evaluation_s or 0.0) * base.num_units / layout.num_units
    is_measured = layout.num_nodes == base.num_nodes or costs.outside_s is None
    outside_s = (base.outside_s or 0.0) if is_measured else costs.outside_s or 0.0
    total = (epochs.mean * steps_per_epoch * step_s + _num_evaluations(layout.recipe, epochs.mean) * evaluation_s
             + outside_s)
    slope = steps_per_epoch * step_s
    steps = 0.0 if layout.num_nodes == base.num_nodes == 1 else epochs.mean * steps_per_epoch * costs.step_spread_s
    runs = _run_spread(base) * total
    down = math.hypot(steps, runs, (epochs.mean - epochs.low) * slope,
                      0.0 if is_measured else outside_s - costs.outside_low_s)
    up = math.hypot(steps, runs, (epochs.high - epochs.mean) * slope,
                    0.0 if is_measured else costs.outside_high_s - outside_s)
    return total / 60, max(0.0, total - down) / 60, (total + up) / 60


def _run_spread(base: Base) -> float:
    """Return half of the interval of the seconds per epoch of the base's runs, as a share."""
    rates = [r.time_s / r.epochs for r in base.known.converged if r.time_s and r.epochs] if base.known else []
    return _half_interval(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0


def _refusal(compute_s: float, fixed_s: float, is_known: bool) -> str | None:
    if compute_s <= 0:
        return 'what a step costs beside computing is more than the step that was measured'
    share = fixed_s / (compute_s + fixed_s)
    if share > MAX_FIXED_SHARE and not is_known:
        return (f'{100 * share:.0f} % of a step does not shrink with its images: fixed costs rule, which the model '
                'does not know of this system')
    return None


def predict_layout(base: Base, layout: Layout, link: Link, costs: Costs) -> Prediction:
    """Return the prediction of a layout; costs: of several nodes, such as costs_for(base)."""
    if layout.recipe.global_batch_size > base.train_samples:
        return Prediction(base, layout, f'a batch of {layout.recipe.global_batch_size:,} is more than the data has '
                                        f'images, {base.train_samples:,}')
    is_inside = layout.num_nodes == 1
    has_costs = not is_inside and not (base.num_nodes > 1 and base.exchange_s)  # else they are in what was measured
    compute_s = _compute_s(base, layout, link, costs)
    exchange_s, other_s = _exchange_s(base, layout, link), costs.step_s if has_costs else 0.0
    hidden_s = min(exchange_s, BACKWARD_SHARE * compute_s) if link.is_hidden else 0.0
    fixed_s = exchange_s - hidden_s + other_s
    if refusal := _refusal(compute_s, fixed_s, is_inside or not base.has_accelerators):
        return Prediction(base, layout, refusal)
    if layout.epochs is None and layout.recipe.last_eval_epoch is None and base.dataset is None:
        return Prediction(base, layout, 'its recipe declares no schedule, so nothing says how many epochs it takes')
    epochs = layout.epochs or epochs_of(layout.recipe, costs)
    times = _minutes(base, layout, costs, epochs, compute_s + fixed_s) if epochs and base.evaluation_s is not None \
        else (None, None, None)
    if times[0] is not None and times[0] <= 0:
        return Prediction(base, layout, 'its minutes would be none or fewer: the runs of the source are shorter than '
                                        'their epochs together, so that their times say nothing of so short a run')
    return Prediction(base, layout, None, epochs, compute_s, exchange_s, hidden_s, other_s, *times)


def costs_for(base: Base) -> Costs:
    """Return the costs that a base's predictions take: of published systems, or none where it has no accelerators."""
    return costs_without(*([base.known] if base.known else [])) if base.has_accelerators else NO_COSTS
