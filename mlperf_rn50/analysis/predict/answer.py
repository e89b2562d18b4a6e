"""Predict several layouts with their recipes and doubts; find the fastest, cheapest and knee layout. Pure functions."""
from dataclasses import dataclass, replace
from functools import cached_property

from mlperf_rn50.analysis.predict.anchors import logs_schedule, second_set
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import NO_COSTS, Base, Costs, Epochs, Layout, Link, Prediction
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.predict.validation import Validation, validate_published
from mlperf_rn50.analysis.predict.what_if import WhatIf, change
from mlperf_rn50.analysis.recipe.choose import choose_recipe, range_text
from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

# Ratio between the predicted and the measured local batch beyond which the compute time is doubtful.
_MAX_BATCH_RATIO = 2
_NO_SCHEDULE = ('the source logs declare no schedule, as in v0.5; the costs of several nodes of such software are not '
                'known, so the interval is that of another machine')
_NO_PORTS = Link(1.0, 0, 'not needed on one node')
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
    what_if: WhatIf | None = None

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
    costs: Costs
    rows: tuple[Prediction, ...]
    validation: Validation | None = None  # None for a base without accelerators
    what_if: WhatIf | None = None
    unchanged: tuple[Prediction, ...] = ()  # the same layouts without the changes of what_if

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
    """Return the weak points of a prediction, except those of its recipe."""
    base, layout, doubts = found.base, found.layout, []
    local, measured = layout.local_batch_size, base.local_batch_size
    if not base.steps and not measured / _MAX_BATCH_RATIO <= local <= measured * _MAX_BATCH_RATIO:
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


def _predict_split(request: PredictionRequest, source: Source, num_nodes: int, per_node: int,
                   costs: Costs) -> Prediction:
    base, link, batch, run_set = source.base, source.link, 0, source.base.run_set
    target = request.target or (run_set.recipe.target_accuracy if run_set else None)
    try:
        batch = request.batch(base, num_nodes * per_node)
        chosen = (source_recipe(source, batch, request.optimizer, target)
                  or published_recipe(batch, request.optimizer, target))
    except UserError as e:
        return Prediction(base, Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, chosen.recipe, chosen.epochs)
    if link is None and num_nodes > 1:
        return Prediction(base, layout, _NO_LINK)
    is_unknown = run_set and run_set.is_imagenet and not logs_schedule(run_set)
    is_own = base.has_accelerators and not is_unknown or link is not None and link.extra_s is not None
    second = run_set and base.has_accelerators and second_set(layout, base, source.sets, run_set) or None
    found = predict_layout(base, layout, link or _NO_PORTS, costs, 'own' if is_own else 'other', second)
    measured = next((k for k in source.sets if (k.num_nodes, k.num_units) == (num_nodes, layout.num_units)
                     and k.recipe.global_batch_size == batch), None)
    doubts = () if found.refusal else (*chosen.doubts, *_doubts(found),
                                       *([_NO_SCHEDULE] if is_unknown and num_nodes > 1 else []))
    return replace(found, doubts=doubts, recipe_source=chosen.source, measured=measured)


def costs_for(base: Base) -> Costs:
    """Return the costs of published sets; without accelerators, only the interval of another machine."""
    costs = costs_without(base.run_set)
    return costs if base.has_accelerators else replace(NO_COSTS, errors=costs.errors)


def make_answer(request: PredictionRequest, source: Source) -> Answer:
    """Predict all requested layouts."""
    costs, what_if = costs_for(source.base), request.what_if
    unchanged = tuple(_predict_split(request, source, *split, costs) for split in request.splits)
    validation = validate_published() if source.base.has_accelerators else None
    if what_if is None:
        return Answer(request.price, source, costs, unchanged, validation)
    changed = replace(request, local_batch_size=what_if.local or request.local_batch_size)
    source = change(source, what_if)
    rows = tuple(_predict_split(changed, source, *split, costs) for split in request.splits)
    return Answer(request.price, source, costs, rows, validation, what_if, unchanged)
