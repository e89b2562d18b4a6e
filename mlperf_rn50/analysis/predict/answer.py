"""Predict several layouts with their recipes and doubts; find the fastest, cheapest and knee layout. Pure functions."""
from dataclasses import dataclass, replace
from functools import cached_property

from mlperf_rn50.analysis.predict.model import overheads_without, predict_layout
from mlperf_rn50.analysis.predict.prediction import NO_OVERHEADS, Base, Epochs, Layout, Link, Overheads, Prediction
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.predict.validation import Validation, validate_published
from mlperf_rn50.analysis.recipe.choose import choose_recipe, range_text
from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

# Ratio between the predicted and the measured local batch beyond which the compute time is doubtful.
_MAX_BATCH_RATIO = 2
_NO_SCHEDULE = ('the source logs declare no schedule; the model does not fit the multi-node times of such published '
                'sets (v0.5)')
_NO_LINK = 'interconnect unknown; pass --link-gbit-s or a bench allreduce file measured across nodes'


@dataclass(frozen=True)
class PredictionRequest:
    """Layouts to predict; if no batch size is given, the local batch of the source is kept."""

    splits: tuple[tuple[int, int], ...]  # (nodes, accelerators or ranks per node)
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    is_strong: bool = False  # if no batch size is given, keep the global batch of the source
    optimizer: str | None = None
    target: float | None = None  # Top-1 as a fraction; None for that of the source
    price: float | None = None  # per node-hour

    def batch(self, base: Base, num_units: int) -> int:
        """Return the global batch of a layout; raise UserError if it is not divisible by the accelerators or ranks."""
        if self.global_batch_size or self.is_strong:
            batch = self.global_batch_size or base.global_batch_size
            if batch % num_units:
                raise UserError(f'batch {batch} is not divisible by {num_units} {base.unit}s')
            return batch
        local, rest = divmod(base.global_batch_size, base.num_units)
        if rest and not self.local_batch_size:
            raise UserError(f'source batch {base.global_batch_size} is not divisible by {base.num_units} {base.unit}s; '
                            'pass --local-batch-size')
        return (self.local_batch_size or local) * num_units


@dataclass(frozen=True)
class LayoutRecipe:
    """Recipe of a layout and its source; epochs: None if not measured."""

    recipe: Recipe
    source: str
    epochs: Epochs | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Predictions of all requested layouts."""

    price: float | None  # per node-hour
    source: Source
    overheads: Overheads
    rows: tuple[Prediction, ...]
    validation: Validation | None = None  # None for a base without accelerators

    @property
    def base(self) -> Base:
        return self.source.base

    @property
    def predicted(self) -> list[Prediction]:
        return [r for r in self.rows if not r.refusal]

    @property
    def timed(self) -> list[Prediction]:
        return [r for r in self.rows if r.minutes]

    @cached_property
    def fastest(self) -> Prediction | None:
        return min(self.timed, key=lambda r: (r.minutes or 0.0, r.node_hours or 0.0), default=None)

    @cached_property
    def cheapest(self) -> Prediction | None:
        return min(self.timed, key=lambda r: (r.node_hours or 0.0, r.minutes or 0.0), default=None)

    @cached_property
    def knee(self) -> Prediction | None:
        """Layout beyond which 1 % less time needs more than 1 % more node-hours."""
        return min(self.timed, key=lambda r: (r.minutes or 0.0) * (r.node_hours or 0.0), default=None)

    def cost(self, row: Prediction) -> float | None:
        return None if row.node_hours is None or self.price is None else row.node_hours * self.price

    def kwh(self, row: Prediction) -> float | None:
        """Return the energy of all nodes at the measured power; None if unknown or if nodes differ from the base's."""
        power, base = self.source.power, self.base
        if power is None or row.minutes is None or row.layout.units_per_node * base.num_nodes != base.num_units:
            return None
        return kwh(power.watts * row.layout.num_nodes * 60 * row.minutes)


def measured_epochs(run_set: RunSet) -> Epochs | None:
    """Return the epochs that a set's runs needed to converge; None if no run converged."""
    epochs = [e for e in run_set.epochs if e]
    if not epochs:
        return None
    return Epochs(sum(epochs) / len(epochs), min(epochs), max(epochs),
                  f'{range_text(epochs)}, measured in {plural(len(epochs), "run")} of {run_set.name}')


def source_recipe(source: Source, batch: int, optimizer: str | None, target: float | None) -> LayoutRecipe | None:
    """Return the recipe that the source used at a batch; None is possible only on ImageNet."""
    base = source.base
    sets = sorted(source.sets, key=lambda k: k is not base.run_set)
    for run_set in sets:
        recipe, epochs = run_set.recipe, measured_epochs(run_set)
        if (recipe.global_batch_size == batch and optimizer in (None, recipe.opt_name)
                and target in (None, recipe.target_accuracy) and epochs):
            return LayoutRecipe(recipe, run_set.name, epochs)
    if base.dataset is None:
        return None
    if not sets:  # a bench measures no epochs, as its notes explain
        return LayoutRecipe(Recipe(optimizer, batch), '')
    unknown = replace(sets[0].recipe, global_batch_size=batch, decay_epochs=None, step_epochs=None, base_lr=None,
                      warmup_epochs=None)
    return LayoutRecipe(unknown, f'none at this batch on {base.dataset}', doubts=(
        f'no recipe measured on {base.dataset} at batch {batch}; the step is predicted, but not epochs or minutes',))


def published_recipe(batch: int, optimizer: str | None, target: float | None) -> LayoutRecipe:
    """Return the recipe of published ImageNet sets for a batch; raise UserError if there is none."""
    try:
        choice = choose_recipe(batch, optimizer, target)
    except ConfigError as e:
        raise UserError(f'no recipe for batch {str(e).removeprefix("--global-batch-size: got ")}') from e
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    epochs = Epochs(choice.epochs, min(low, choice.epochs), high, choice.source_text)
    if choice.kind == 'known':
        return LayoutRecipe(choice.recipe, 'published sets at this batch', epochs)
    return LayoutRecipe(choice.recipe, 'published sets near this batch', epochs,
                        (f'no recipe is published at batch {batch:,}; it is interpolated between two batches',))


def _doubts(found: Prediction) -> list[str]:
    """Return the weak points of a prediction, except those of its recipe; the last two concern the interval."""
    base, layout, doubts = found.base, found.layout, []
    local, measured = layout.local_batch_size, base.local_batch_size
    if not measured / _MAX_BATCH_RATIO <= local <= measured * _MAX_BATCH_RATIO:
        doubts.append(f'{local:g} images per {base.unit} and step, measured with {measured:g}; compute time is assumed '
                      'to be proportional')
    units, measured = layout.units_per_node, base.num_units / base.num_nodes
    if units != measured and base.has_accelerators:
        doubts.append(f'{units} accelerators per node, measured with {measured:g}; node-hours are not comparable')
    elif units > measured:
        doubts.append(f'{units} ranks per node, measured with {measured:g}; enough processors are assumed')
    if found.minutes and (not base.run_set or len(base.run_set.converged) < 2):
        doubts.append('fewer than two measured runs; the interval excludes run-to-run variation')
    if found.minutes and layout.num_nodes == 1 < base.num_nodes:
        doubts.append(f'derived from {base.num_nodes} nodes; the interval excludes the uncertainty of their overheads')
    return doubts


def _predict(source: Source, layout: Layout, overheads: Overheads) -> Prediction:
    base, link = source.base, source.link
    run_set = base.run_set
    if run_set and layout.num_nodes > 1 and run_set.is_imagenet and (
            run_set.recipe.decay is None or 'decay' in run_set.unlogged):
        return Prediction(base, layout, _NO_SCHEDULE)
    if link is None and layout.num_nodes == base.num_nodes == 1:
        link = Link(1.0, 0, False, 'not needed on one node')
    return predict_layout(base, layout, link, overheads) if link else Prediction(base, layout, _NO_LINK)


def _predict_split(request: PredictionRequest, source: Source, num_nodes: int, per_node: int,
                   overheads: Overheads) -> Prediction:
    base, batch = source.base, 0
    target = request.target or (base.run_set.recipe.target_accuracy if base.run_set else None)
    try:
        batch = request.batch(base, num_nodes * per_node)
        chosen = (source_recipe(source, batch, request.optimizer, target)
                  or published_recipe(batch, request.optimizer, target))
    except UserError as e:
        return Prediction(base, Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, chosen.recipe, chosen.epochs)
    found = _predict(source, layout, overheads)
    measured = next((k for k in source.sets if (k.num_nodes, k.num_units) == (num_nodes, layout.num_units)
                     and k.recipe.global_batch_size == batch), None)
    doubts = () if found.refusal else (*chosen.doubts, *_doubts(found))
    return replace(found, doubts=doubts, recipe_source=chosen.source, measured=measured)


def overheads_for(base: Base) -> Overheads:
    """Return the overheads of published systems for a base with accelerators, otherwise NO_OVERHEADS."""
    return overheads_without(*([base.run_set] if base.run_set else [])) if base.has_accelerators else NO_OVERHEADS


def make_answer(request: PredictionRequest, source: Source) -> Answer:
    """Predict all requested layouts."""
    overheads = overheads_for(source.base)
    rows = tuple(_predict_split(request, source, *split, overheads) for split in request.splits)
    validation = validate_published() if source.base.has_accelerators else None
    return Answer(request.price, source, overheads, rows, validation)
