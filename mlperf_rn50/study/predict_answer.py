"""What would each layout take, and which is the fastest, the cheapest, and the knee between them? Pure."""
from dataclasses import dataclass, replace
from functools import cached_property

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.study.cost import cost, kwh, node_hours
from mlperf_rn50.study.known import KnownSet, Recipe
from mlperf_rn50.study.predict import Base, Costs, Epochs, Layout, Link, Prediction, costs_for, predict_layout
from mlperf_rn50.study.predict_sources import Source
from mlperf_rn50.study.recipes import choose_recipe
from mlperf_rn50.study.reference import has_same_recipe
from mlperf_rn50.study.text import plural

# How many times more or fewer images a step of an accelerator may have than was measured, without a word of doubt.
_ALIKE = 2
_NO_SCHEDULE = ('the logs it would be predicted from declare no schedule: published sets of several nodes whose logs '
                'are such (v0.5) take other times than the model says')
_NO_LINK = 'what joins the nodes is not known: name a bench allreduce over them, or --link-gbit-s'


@dataclass(frozen=True)
class Batches:
    """Images per step: of all, or of each accelerator or rank; with neither, as many of each as were measured.

    Args:
        is_strong: with neither, as many of all as were measured.
    """

    global_batch_size: int | None = None
    local_batch_size: int | None = None
    is_strong: bool = False

    def of(self, base: Base, num_units: int) -> int:
        """Of a layout.

        Raises:
            UserError: they cannot be shared evenly.
        """
        if self.global_batch_size or self.is_strong:
            batch = self.global_batch_size or base.global_batch_size
            if batch % num_units:
                raise UserError(f'a batch of {batch} cannot be shared evenly by {num_units} {unit_name(base)}')
            return batch
        local, rest = divmod(base.global_batch_size, base.num_units)
        if rest and not self.local_batch_size:
            raise UserError(f'{base.num_units} {unit_name(base)} do not share {base.global_batch_size} images evenly, '
                            'so there is no batch of each to keep: give one with --local-batch-size')
        return (self.local_batch_size or local) * num_units


@dataclass(frozen=True)
class Asked:
    """What is to be predicted.

    Args:
        splits: (nodes, accelerators or ranks on each), one or more.
        target: Top-1 as a fraction; None for that of the source.
        price: of a node-hour; None where nobody says.
    """

    splits: tuple[tuple[int, int], ...]
    batches: Batches = Batches()
    optimizer: str | None = None
    target: float | None = None
    price: float | None = None


@dataclass(frozen=True)
class Chosen:
    """The recipe of a layout.

    Args:
        epochs: where they were measured; None where its schedule says them, or nobody.
    """

    recipe: Recipe
    source: str
    epochs: Epochs | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A layout.

    Args:
        measured: a set of this layout and batch; None where none was. Its recipe may be another one.
    """

    base: Base
    prediction: Prediction
    recipe_source: str = ''
    measured: KnownSet | None = None

    @property
    def layout(self) -> Layout:
        return self.prediction.layout

    @property
    def minutes(self) -> float | None:
        return self.prediction.minutes

    @property
    def efficiency(self) -> float | None:
        """Images per second of an accelerator or rank, as a share of the base's."""
        rate, base = self.prediction.images_per_s, self.base
        if rate is None:
            return None
        return rate / self.layout.num_units / (base.global_batch_size / base.step_s / base.num_units)

    @property
    def node_hours(self) -> float | None:
        return None if self.minutes is None else node_hours(60 * self.minutes, self.layout.num_nodes)

    @property
    def measured_minutes(self) -> float | None:
        """Of the set that was measured, where it trained this recipe to this target; else they are of other epochs."""
        measured = self.measured
        if not measured or not measured.time_s or not has_same_recipe(measured.recipe, self.layout.recipe):
            return None
        return measured.time_s / 60 if measured.recipe.target_accuracy == self.layout.recipe.target_accuracy else None

    @property
    def error(self) -> float | None:
        """Predicted minutes over the measured ones, minus 1."""
        return self.minutes / self.measured_minutes - 1 if self.minutes and self.measured_minutes else None

    @property
    def step_error(self) -> float | None:
        """The same of a step."""
        step_s, measured_s = self.prediction.step_s, self.measured.step_s if self.measured else None
        return step_s / measured_s - 1 if step_s and measured_s else None


@dataclass(frozen=True)
class Answer:
    """What was asked, and what is known of it; costs: that the predictions were made with."""

    asked: Asked
    source: Source
    costs: Costs
    rows: tuple[Row, ...]

    @property
    def base(self) -> Base:
        return self.source.base

    @property
    def price(self) -> float | None:
        return self.asked.price

    @property
    def timed(self) -> list[Row]:
        """The layouts that have a time."""
        return [r for r in self.rows if r.minutes]

    @property
    def is_refused(self) -> bool:
        """Whether there is an answer to nothing."""
        return all(r.prediction.refusal for r in self.rows)

    @cached_property
    def fastest(self) -> Row | None:
        return min(self.timed, key=lambda r: (r.minutes or 0.0, r.node_hours or 0.0), default=None)

    @cached_property
    def cheapest(self) -> Row | None:
        return min(self.timed, key=lambda r: (r.node_hours or 0.0, r.minutes or 0.0), default=None)

    @cached_property
    def knee(self) -> Row | None:
        """The layout from which on one per cent less time costs more than one per cent more node-hours."""
        return min(self.timed, key=lambda r: (r.minutes or 0.0) * (r.node_hours or 0.0), default=None)

    def cost(self, row: Row) -> float | None:
        """In the currency of the price."""
        if row.minutes is None or self.price is None:
            return None
        return cost(60 * row.minutes, row.layout.num_nodes, self.price)

    def kwh(self, row: Row) -> float | None:
        """Energy of all nodes, of which each takes the power that was measured: only where they are such nodes."""
        power, base = self.source.power, self.base
        if power is None or row.minutes is None or row.layout.units_per_node * base.num_nodes != base.num_units:
            return None
        return kwh(power.watts * row.layout.num_nodes * 60 * row.minutes)


def unit_name(base: Base) -> str:
    """What the layouts are counted in."""
    return 'accelerators' if base.has_accelerators else 'ranks'


def measured_epochs(known: KnownSet) -> Epochs | None:
    """The epochs that the runs of a set took; None where none converged."""
    epochs = [r.epochs for r in known.converged if r.epochs]
    if not epochs:
        return None
    said = f'{min(epochs)}' if min(epochs) == max(epochs) else f'{min(epochs)} to {max(epochs)}'
    return Epochs(sum(epochs) / len(epochs), min(epochs), max(epochs),
                  f'measured: {plural(len(epochs), "run")} of {known.name} took {said}')


def _without_schedule(recipe: Recipe) -> Recipe:
    """A recipe of which nobody may say that it converges where its schedule ends."""
    return replace(recipe, decay_epochs=None, step_epochs=None, base_lr=None, warmup_epochs=None)


def own_recipe(source: Source, batch: int, optimizer: str | None, target: float | None) -> Chosen | None:
    """The recipe of the source for a batch that it was measured with; of other data than ImageNet, for any batch."""
    base = source.base
    sets = sorted(source.sets, key=lambda k: k is not base.known)
    for known in sets:
        recipe, epochs = known.recipe, measured_epochs(known)
        if (recipe.global_batch_size == batch and optimizer in (None, recipe.opt_name)
                and target in (None, recipe.target_accuracy) and epochs):
            return Chosen(recipe, f'{known.name}, as it was trained', epochs)
    if base.dataset is None:
        return None
    if not sets:  # a bench trains nothing to its end, as its notes say
        return Chosen(Recipe(optimizer, batch), '')
    of = sets[0].recipe
    return Chosen(_without_schedule(replace(of, global_batch_size=batch)), f'none for this batch of {base.dataset}',
                  doubts=(f'no recipe of {base.dataset} with a batch of {batch} was measured: the step is predicted, '
                          'epochs and minutes are not',))


def published_recipe(batch: int, optimizer: str | None, target: float | None) -> Chosen:
    """The recipe of published sets of ImageNet for a batch.

    Raises:
        UserError: they have none for it.
    """
    try:
        choice = choose_recipe(batch, optimizer, target)
    except ConfigError as e:
        raise UserError(f'no recipe for a batch of {str(e).removeprefix("--global-batch-size: got ")}') from e
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    epochs = Epochs(choice.epochs, min(low, choice.epochs), high, choice.said_by)
    if choice.kind == 'known':
        return Chosen(choice.recipe, 'published sets at this batch', epochs)
    return Chosen(choice.recipe, 'published sets about this batch', epochs,
                  (f'nobody published a recipe for a batch of {batch:,}: it is between two',))


def _doubts(base: Base, layout: Layout) -> tuple[str, ...]:
    """What weakens a prediction, but for its recipe."""
    doubts = []
    local, measured = layout.local_batch_size, base.global_batch_size / base.num_units
    if not measured / _ALIKE <= local <= measured * _ALIKE:
        doubts.append(f'{local:g} images per {unit_name(base)[:-1]} and step, where {measured:g} were measured: that '
                      'computing is in proportion to them is supposed')
    units, measured = layout.units_per_node, base.num_units / base.num_nodes
    if units != measured and base.has_accelerators:
        doubts.append(f'nodes with {units} accelerators, where such with {measured:g} were measured: their node-hours '
                      'are others, and so is a price')
    elif units > measured:
        doubts.append(f'{units} ranks on a node, where {measured:g} were measured: that it has processors for all of '
                      'them is supposed')
    return tuple(doubts)


def _timed_doubts(base: Base, layout: Layout) -> tuple[str, ...]:
    """What weakens an interval of minutes."""
    doubts = []
    if not base.known or len(base.known.converged) < 2:
        doubts.append('fewer than two runs were measured: how much runs differ is not in the interval')
    if layout.num_nodes == 1 < base.num_nodes:
        doubts.append(f'worked back from {base.num_nodes} nodes: how well it is known what they cost beside computing '
                      'is not in the interval')
    return tuple(doubts)


def _find_measured(source: Source, layout: Layout) -> KnownSet | None:
    return next((k for k in source.sets if k.num_nodes == layout.num_nodes and k.num_units == layout.num_units
                 and k.recipe.global_batch_size == layout.recipe.global_batch_size), None)


def _declares_schedule(known: KnownSet) -> bool:
    return not known.is_imagenet or known.recipe.decay is not None and 'decay' not in known.unlogged


def _predict(source: Source, layout: Layout, costs: Costs) -> Prediction:
    link, known = source.link, source.base.known
    if known and layout.num_nodes > 1 and not _declares_schedule(known):
        return Prediction(layout, _NO_SCHEDULE)
    if link is None and layout.num_nodes == source.base.num_nodes == 1:
        link = Link(1.0, 0, False, 'none is needed')
    return predict_layout(source.base, layout, link, costs) if link else Prediction(layout, _NO_LINK)


def _row(asked: Asked, source: Source, split: tuple[int, int], costs: Costs) -> Row:
    nodes, per_node = split
    batch = 0
    try:
        batch = asked.batches.of(source.base, nodes * per_node)
        chosen = _choose(asked, source, batch)
    except UserError as e:
        return Row(source.base, Prediction(Layout(nodes, per_node, Recipe(None, batch)), str(e)))
    layout = Layout(nodes, per_node, chosen.recipe, chosen.epochs)
    found = _predict(source, layout, costs)
    doubts = () if found.refusal else (*found.doubts, *chosen.doubts, *_doubts(source.base, layout),
                                       *(_timed_doubts(source.base, layout) if found.minutes else ()))
    return Row(source.base, replace(found, doubts=doubts), chosen.source, _find_measured(source, layout))


def _choose(asked: Asked, source: Source, batch: int) -> Chosen:
    known = source.base.known
    target = asked.target or (known.recipe.target_accuracy if known else None)
    return own_recipe(source, batch, asked.optimizer, target) or published_recipe(batch, asked.optimizer, target)


def make_answer(asked: Asked, source: Source) -> Answer:
    """Predicts the layouts that are asked for."""
    costs = costs_for(source.base)
    return Answer(asked, source, costs, tuple(_row(asked, source, split, costs) for split in asked.splits))
