"""The time to train on other nodes, from the time of a step that was measured and the epochs that a recipe declares.

A step on another layout takes the time that its images take to compute, and what does not shrink with them: a ring
all-reduce of all gradients over the slowest link, less what is hidden behind the backward pass, and what every step
costs beside on several nodes. That cost, and the time outside of steps, are those of published systems of other rounds
than the one that is predicted. Pure.
"""
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.study.cost import node_hours
from mlperf_rn50.study.known import KnownSet, Recipe, load_published
from mlperf_rn50.study.reference import has_same_recipe

# A backward pass computes twice what the forward pass does, and gradients are exchanged behind it.
BACKWARD_SHARE = 2 / 3
# The share of a step that does not shrink with its images, above which the model does not hold.
MAX_FIXED_SHARE = 0.5
# The interval of four out of five, in standard deviations: Student's t, by degrees of freedom from 1 on, and beyond.
_SIGMAS, _MANY_SIGMAS = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372), 1.2816


@dataclass(frozen=True)
class Base:
    """A step that was measured.

    Args:
        num_units: accelerators of all its nodes, or ranks where there are none.
        exchange_s: exchange that is not hidden, where it was measured; else 0.
        evaluation_s: one evaluation; None where it was not measured (a bench).
        outside_s: first epoch and gaps, on the clock; None where it was not measured.
        dataset: None for ImageNet.
        known: the runs it comes from; None for a bench.
    """

    name: str
    source: str
    num_nodes: int
    num_units: int
    has_accelerators: bool
    global_batch_size: int
    step_s: float
    exchange_s: float
    evaluation_s: float | None
    outside_s: float | None
    train_samples: int
    dataset: str | None
    known: KnownSet | None = None

    @property
    def unit(self) -> str:
        """What shares the work."""
        return 'accelerator' if self.has_accelerators else 'rank'

    @property
    def local_batch_size(self) -> float:
        return self.global_batch_size / self.num_units


@dataclass(frozen=True)
class Link:
    """The slowest link between nodes; gbit_s: per direction, is_hidden: whether it runs behind the backward pass."""

    gbit_s: float
    exchange_bytes: int
    is_hidden: bool
    source: str


# What is supposed between the nodes of published systems: one port of InfiniBand EDR or 100 Gbit/s Ethernet stands for
# all of a node's. Gradients of ResNet-50: 25.56 million, of 2 bytes as these systems exchange them.
PUBLISHED_LINK = Link(100.0, 51_000_000, False, 'one port of 100 Gbit/s, float16 gradients, nothing hidden')


@dataclass(frozen=True)
class Epochs:
    """Epochs to the target, with the interval of four out of five, and their source."""

    mean: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Costs:
    """Costs of other systems beside computing and exchange; low and high hold four out of five.

    Args:
        outside_s: what the first epoch takes more, and gaps, on several nodes; None: as the base.
        epochs_low: epochs of those that converged early, as a share of what their schedule leaves room for.
    """

    step_s: float
    step_spread_s: float
    outside_s: float | None
    outside_low_s: float
    outside_high_s: float
    epochs_low: float
    source: str


NO_COSTS = Costs(0.0, 0.0, None, 0.0, 0.0, 1.0, 'none: the exchange is what was measured')


@dataclass(frozen=True)
class Layout:
    """Nodes, units on each, and a recipe; epochs: where they are known better than by its schedule."""

    num_nodes: int
    units_per_node: int
    recipe: Recipe
    epochs: Epochs | None = None

    @property
    def name(self) -> str:
        return f'{self.num_nodes}x{self.units_per_node}'

    @property
    def num_units(self) -> int:
        return self.num_nodes * self.units_per_node

    @property
    def local_batch_size(self) -> float:
        return self.recipe.global_batch_size / self.num_units


@dataclass(frozen=True)
class Prediction:
    """The step and the minutes of a layout; with the reason of a refusal, or without known epochs, some are None.

    Args:
        other_s: costs of a step on several nodes beside computing and exchange.
        low_minutes: lower end of the interval that holds four times out of five.
        measured: a set of this layout and batch, perhaps of another recipe; None where none was measured.
    """

    base: Base
    layout: Layout
    refusal: str | None = None
    epochs: Epochs | None = None
    compute_s: float | None = None
    exchange_s: float | None = None
    hidden_s: float | None = None
    other_s: float | None = None
    minutes: float | None = None
    low_minutes: float | None = None
    high_minutes: float | None = None
    doubts: tuple[str, ...] = ()
    recipe_source: str = ''
    measured: KnownSet | None = None

    @property
    def step_s(self) -> float | None:
        parts = (self.compute_s, self.exchange_s, self.other_s)
        return None if None in parts else sum(parts) - (self.hidden_s or 0.0)  # type: ignore[arg-type]

    @property
    def images_per_s(self) -> float | None:
        return self.layout.recipe.global_batch_size / self.step_s if self.step_s else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The minutes that hold four times out of five."""
        return None if self.low_minutes is None or self.high_minutes is None else (self.low_minutes, self.high_minutes)

    @property
    def efficiency(self) -> float | None:
        """Images per second of an accelerator or rank, as a share of the base's."""
        rate, base = self.images_per_s, self.base
        if rate is None:
            return None
        return rate / self.layout.num_units / (base.global_batch_size / base.step_s / base.num_units)

    @property
    def node_hours(self) -> float | None:
        return None if self.minutes is None else node_hours(60 * self.minutes, self.layout.num_nodes)

    @property
    def measured_minutes(self) -> float | None:
        """Of the set that was measured, where it trained this recipe to this target."""
        measured, recipe = self.measured, self.layout.recipe
        is_same = measured and (has_same_recipe(measured.recipe, recipe)
                                and measured.recipe.target_accuracy == recipe.target_accuracy)
        return measured.minutes if measured and is_same else None

    @property
    def measured_step_s(self) -> float | None:
        return self.measured.step_s if self.measured else None

    @property
    def error(self) -> float | None:
        """Of the minutes."""
        return off_by(self.minutes, self.measured_minutes)

    @property
    def step_error(self) -> float | None:
        return off_by(self.step_s, self.measured_step_s)


def off_by(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted over measured, minus 1; None without one of them."""
    return predicted / measured - 1 if predicted and measured else None


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
    local = target.local_batch_size or 0.0
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


def _step_cost_s(base: Base, target: KnownSet) -> float | None:
    """Return what a step of a measured set costs beside computing and the ring; None where its logs lack it."""
    layout, step_s, link = layout_of(target), target.step_s, PUBLISHED_LINK
    if layout is None or step_s is None:
        return None
    return (step_s - _compute_s(base, layout, link, NO_COSTS)
            - ring_s(link.exchange_bytes, layout.num_units, link.gbit_s))


def find_costs(sets: Sequence[KnownSet]) -> Costs:
    """Return the costs of several nodes, from all pairs of sets."""
    pairs = [(base, s) for s in sets if (s.num_nodes or 0) > 1 and s.recipe.last_eval_epoch and s.times
             and (base := base_for(s, sets))]
    steps = [cost for base, s in pairs if (cost := _step_cost_s(base, s)) is not None]
    low, middle, high = _quantiles([s.times.outside_s for _, s in pairs if s.times])
    rounds = ', '.join(dict.fromkeys(s.round for _, s in pairs))
    # Epochs of each run that converged, as a share of those that its schedule leaves room for.
    shares = [r.epochs / last for s in sets if (last := s.recipe.last_eval_epoch) for r in s.converged if r.epochs]
    spread_s = _half_interval(steps) * math.sqrt(1 + 1 / len(steps))  # the mean is not known exactly, either
    return Costs(statistics.fmean(steps), spread_s, middle, low, high, _quantiles(shares)[0],
                 f'{len(pairs)} pairs of published systems of {rounds}')


def _is_same(a: KnownSet, b: KnownSet) -> bool:
    """Whether two sets hold one run: logs keep their times wherever they lie."""
    times = {(r.epochs, round(r.time_s, 2)) for r in a.runs if r.time_s}
    return any((r.epochs, round(r.time_s, 2)) in times for r in b.runs if r.time_s)


def costs_without(*judged: KnownSet) -> Costs:
    """Return the costs of published systems, without the rounds that some sets name or were published in."""
    published = load_published()
    rounds = {s.round for s in judged} | {p.round for p in published for s in judged if _is_same(p, s)}
    return find_costs([s for s in published if s.round not in rounds])


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
