"""Predictions of several layouts: their recipes and doubts, the fastest, the cheapest, and the knee between. Pure."""
from dataclasses import dataclass, replace
from functools import cached_property

from mlperf_rn50.analysis.predict.model import costs_for, predict_layout
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Link, Prediction
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.predict.validation import Validation, validate_published
from mlperf_rn50.analysis.recipe.choose import choose_recipe, range_text
from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.sets.run_set import KnownSet, Recipe
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

# The factor between the images of an accelerator and those measured above which there is a doubt.
_ALIKE = 2
_NO_SCHEDULE = ('the logs it would be predicted from declare no schedule: published sets of several nodes whose logs '
                'are such (v0.5) take other times than the model says')
_NO_LINK = 'what joins the nodes is not known: name a bench allreduce over them, or --link-gbit-s'


@dataclass(frozen=True)
class PredictionRequest:
    """The layouts to predict.

    Args:
        splits: (nodes, accelerators or ranks on each), one or more.
        global_batch_size: images per step; without it and local_batch_size, as many of each as were measured.
        is_strong: with neither, as many of all as were measured.
        target: Top-1 as a fraction; None for that of the source.
        price: of a node-hour.
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
                raise UserError(f'a batch of {batch} cannot be shared evenly by {num_units} {base.unit}s')
            return batch
        local, rest = divmod(base.global_batch_size, base.num_units)
        if rest and not self.local_batch_size:
            raise UserError(f'{base.num_units} {base.unit}s do not share {base.global_batch_size} images evenly, '
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
class Answer:
    """The predictions that were asked for.

    Args:
        price: of a node-hour.
        costs: that they were made with.
        validation: errors of such predictions; None where no published system is like the base.
    """

    price: float | None
    source: Source
    costs: Costs
    rows: tuple[Prediction, ...]
    validation: Validation | None = None

    @property
    def base(self) -> Base:
        return self.source.base

    @property
    def predicted(self) -> list[Prediction]:
        """The layouts that are not refused."""
        return [r for r in self.rows if not r.refusal]

    @property
    def timed(self) -> list[Prediction]:
        """The layouts that have a time."""
        return [r for r in self.rows if r.minutes]

    @cached_property
    def fastest(self) -> Prediction | None:
        return min(self.timed, key=lambda r: (r.minutes or 0.0, r.node_hours or 0.0), default=None)

    @cached_property
    def cheapest(self) -> Prediction | None:
        return min(self.timed, key=lambda r: (r.node_hours or 0.0, r.minutes or 0.0), default=None)

    @cached_property
    def knee(self) -> Prediction | None:
        """The layout from which on one per cent less time costs more than one per cent more node-hours."""
        return min(self.timed, key=lambda r: (r.minutes or 0.0) * (r.node_hours or 0.0), default=None)

    def cost(self, row: Prediction) -> float | None:
        """In the currency of the price."""
        return None if row.node_hours is None or self.price is None else row.node_hours * self.price

    def kwh(self, row: Prediction) -> float | None:
        """Energy of all nodes at the power that was measured, where they have as many accelerators or ranks."""
        power, base = self.source.power, self.base
        if power is None or row.minutes is None or row.layout.units_per_node * base.num_nodes != base.num_units:
            return None
        return kwh(power.watts * row.layout.num_nodes * 60 * row.minutes)


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


def _doubts(found: Prediction) -> list[str]:
    """Return what weakens a prediction, but for its recipe; the last two weaken its interval."""
    base, layout, doubts = found.base, found.layout, []
    local, measured = layout.local_batch_size, base.local_batch_size
    if not measured / _ALIKE <= local <= measured * _ALIKE:
        doubts.append(f'{local:g} images per {base.unit} and step, where {measured:g} were measured: that computing is '
                      'in proportion to them is supposed')
    units, measured = layout.units_per_node, base.num_units / base.num_nodes
    if units != measured and base.has_accelerators:
        doubts.append(f'nodes with {units} accelerators, where such with {measured:g} were measured: their node-hours '
                      'are others, and so is a price')
    elif units > measured:
        doubts.append(f'{units} ranks on a node, where {measured:g} were measured: that it has processors for all of '
                      'them is supposed')
    if found.minutes and (not base.known or len(base.known.converged) < 2):
        doubts.append('fewer than two runs were measured: how much runs differ is not in the interval')
    if found.minutes and layout.num_nodes == 1 < base.num_nodes:
        doubts.append(f'worked back from {base.num_nodes} nodes: how well it is known what they cost beside computing '
                      'is not in the interval')
    return doubts


def _predict(source: Source, layout: Layout, costs: Costs) -> Prediction:
    base, link = source.base, source.link
    known = base.known
    if known and layout.num_nodes > 1 and known.is_imagenet and (
            known.recipe.decay is None or 'decay' in known.unlogged):
        return Prediction(base, layout, _NO_SCHEDULE)
    if link is None and layout.num_nodes == base.num_nodes == 1:
        link = Link(1.0, 0, False, 'none is needed')
    return predict_layout(base, layout, link, costs) if link else Prediction(base, layout, _NO_LINK)


def _predict_split(asked: PredictionRequest, source: Source, num_nodes: int, per_node: int, costs: Costs) -> Prediction:
    base, batch = source.base, 0
    target = asked.target or (base.known.recipe.target_accuracy if base.known else None)
    try:
        batch = asked.batch(base, num_nodes * per_node)
        chosen = (own_recipe(source, batch, asked.optimizer, target)
                  or published_recipe(batch, asked.optimizer, target))
    except UserError as e:
        return Prediction(base, Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, chosen.recipe, chosen.epochs)
    found = _predict(source, layout, costs)
    measured = next((k for k in source.sets if (k.num_nodes, k.num_units) == (num_nodes, layout.num_units)
                     and k.recipe.global_batch_size == batch), None)
    doubts = () if found.refusal else (*chosen.doubts, *_doubts(found))
    return replace(found, doubts=doubts, recipe_source=chosen.source, measured=measured)


def make_answer(asked: PredictionRequest, source: Source) -> Answer:
    """Predict the layouts that are asked for."""
    costs = costs_for(source.base)
    rows = tuple(_predict_split(asked, source, *split, costs) for split in asked.splits)
    return Answer(asked.price, source, costs, rows, validate_published() if source.base.has_accelerators else None)
