"""Predictions of several layouts: their recipes and doubts, the fastest, the cheapest, and the knee between. Pure."""
from dataclasses import dataclass, replace
from functools import cached_property

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.study.cost import cost, kwh, node_hours
from mlperf_rn50.study.known import KnownSet, Recipe
from mlperf_rn50.study.predict import Base, Costs, Epochs, Layout, Link, Prediction, costs_for, off_by, predict_layout
from mlperf_rn50.study.predict_sources import Source
from mlperf_rn50.study.recipes import choose_recipe, range_text
from mlperf_rn50.study.reference import has_same_recipe
from mlperf_rn50.study.text import plural

# The factor between the images of an accelerator and those measured above which there is a doubt.
_ALIKE = 2
_NO_SCHEDULE = ('the logs it would be predicted from declare no schedule: published sets of several nodes whose logs '
                'are such (v0.5) take other times than the model says')
_NO_LINK = 'what joins the nodes is not known: name a bench allreduce over them, or --link-gbit-s'


@dataclass(frozen=True)
class Asked:
    """The layouts to predict.

    Args:
        splits: (nodes, accelerators or ranks on each), one or more.
        global_batch_size: images per step; without it and local_batch_size, as many of each as were measured.
        local_batch_size: of each accelerator or rank.
        is_strong: with neither, as many of all as were measured.
        target: Top-1 as a fraction; None for that of the source.
        price: of a node-hour; None where it is not given.
    """

    splits: tuple[tuple[int, int], ...]
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    is_strong: bool = False
    optimizer: str | None = None
    target: float | None = None
    price: float | None = None

    def batch(self, base: Base, num_units: int) -> int:
        """Return the images per step of a layout.

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
class Chosen:
    """The recipe of a layout; epochs: where they were measured, else None."""

    recipe: Recipe
    source: str
    epochs: Epochs | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A layout and its prediction.

    Args:
        measured: a set of this layout and batch, perhaps of another recipe; None where none was measured.
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
        """Of the set that was measured, where it trained this recipe to this target."""
        measured, recipe = self.measured, self.layout.recipe
        is_same = measured and (has_same_recipe(measured.recipe, recipe)
                                and measured.recipe.target_accuracy == recipe.target_accuracy)
        return measured.time_s / 60 if measured and measured.time_s and is_same else None

    @property
    def measured_step_s(self) -> float | None:
        return self.measured.step_s if self.measured else None

    @property
    def error(self) -> float | None:
        """Of the minutes."""
        return off_by(self.minutes, self.measured_minutes)

    @property
    def step_error(self) -> float | None:
        return off_by(self.prediction.step_s, self.measured_step_s)


@dataclass(frozen=True)
class Answer:
    """The rows of what was asked; costs: that the predictions were made with."""

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
    def predicted(self) -> list[Row]:
        """The layouts that are not refused."""
        return [r for r in self.rows if not r.prediction.refusal]

    @property
    def timed(self) -> list[Row]:
        """The layouts that have a time."""
        return [r for r in self.rows if r.minutes]

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
        """Energy of all nodes at the power that was measured, where they have as many accelerators or ranks."""
        power, base = self.source.power, self.base
        if power is None or row.minutes is None or row.layout.units_per_node * base.num_nodes != base.num_units:
            return None
        return kwh(power.watts * row.layout.num_nodes * 60 * row.minutes)


def unit_name(base: Base) -> str:
    """Return the name of what shares the work."""
    return 'accelerators' if base.has_accelerators else 'ranks'


def measured_epochs(known: KnownSet) -> Epochs | None:
    """Return the epochs that the runs of a set took; None where none converged."""
    epochs = [r.epochs for r in known.converged if r.epochs]
    if not epochs:
        return None
    return Epochs(sum(epochs) / len(epochs), min(epochs), max(epochs),
                  f'measured: {plural(len(epochs), "run")} of {known.name} took {range_text(epochs)}')


def own_recipe(source: Source, batch: int, optimizer: str | None, target: float | None) -> Chosen | None:
    """Return the recipe of the source at a batch it was measured with; of other data than ImageNet, at any batch."""
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
    unknown = replace(sets[0].recipe, global_batch_size=batch, decay_epochs=None, step_epochs=None, base_lr=None,
                      warmup_epochs=None)
    return Chosen(unknown, f'none for this batch of {base.dataset}', doubts=(
        f'no recipe of {base.dataset} with a batch of {batch} was measured: the step is predicted, epochs and minutes '
        'are not',))


def published_recipe(batch: int, optimizer: str | None, target: float | None) -> Chosen:
    """Return the recipe of published sets of ImageNet for a batch.

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


def _doubts(base: Base, layout: Layout) -> list[str]:
    """Return what weakens a prediction, but for its recipe."""
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
    return doubts


def _timed_doubts(base: Base, layout: Layout) -> list[str]:
    """Return what weakens an interval of minutes."""
    doubts = []
    if not base.known or len(base.known.converged) < 2:
        doubts.append('fewer than two runs were measured: how much runs differ is not in the interval')
    if layout.num_nodes == 1 < base.num_nodes:
        doubts.append(f'worked back from {base.num_nodes} nodes: how well it is known what they cost beside computing '
                      'is not in the interval')
    return doubts


def _declares_schedule(known: KnownSet) -> bool:
    return not known.is_imagenet or known.recipe.decay is not None and 'decay' not in known.unlogged


def _predict(source: Source, layout: Layout, costs: Costs) -> Prediction:
    link, known = source.link, source.base.known
    if known and layout.num_nodes > 1 and not _declares_schedule(known):
        return Prediction(layout, _NO_SCHEDULE)
    if link is None and layout.num_nodes == source.base.num_nodes == 1:
        link = Link(1.0, 0, False, 'none is needed')
    return predict_layout(source.base, layout, link, costs) if link else Prediction(layout, _NO_LINK)


def _row(asked: Asked, source: Source, num_nodes: int, per_node: int, costs: Costs) -> Row:
    base, batch = source.base, 0
    target = asked.target or (base.known.recipe.target_accuracy if base.known else None)
    try:
        batch = asked.batch(base, num_nodes * per_node)
        chosen = (own_recipe(source, batch, asked.optimizer, target)
                  or published_recipe(batch, asked.optimizer, target))
    except UserError as e:
        return Row(base, Prediction(Layout(num_nodes, per_node, Recipe(None, batch)), str(e)))
    layout = Layout(num_nodes, per_node, chosen.recipe, chosen.epochs)
    found = _predict(source, layout, costs)
    if not found.refusal:
        timed = _timed_doubts(base, layout) if found.minutes else []
        found = replace(found, doubts=(*found.doubts, *chosen.doubts, *_doubts(base, layout), *timed))
    measured = next((k for k in source.sets if (k.num_nodes, k.num_units) == (num_nodes, layout.num_units)
                     and k.recipe.global_batch_size == batch), None)
    return Row(base, found, chosen.source, measured)


def make_answer(asked: Asked, source: Source) -> Answer:
    """Predict the layouts that are asked for."""
    costs = costs_for(source.base)
    return Answer(asked, source, costs, tuple(_row(asked, source, *split, costs) for split in asked.splits))
