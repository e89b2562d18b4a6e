"""Predict layouts, with recipes and reasons for doubt; find the fastest, cheapest and knee layout. Pure functions."""
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.anchors import logs_schedule, second_base
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Link, Prediction
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.predict.what_if import WhatIf, change
from mlperf_rn50.analysis.recipe.choose import choose_recipe, is_within, range_text
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

_MAX_BATCH_RATIO = 2  # between the predicted and the measured local batch; beyond it, the compute time is doubtful
_NO_SCHEDULE = ('the source logs declare no schedule, as in v0.5; the costs of several nodes of such software are not '
                'known, so the interval is that of another machine')
_NO_PORTS = Link(1.0, 0, 'not needed for the measured nodes')
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
        local = self.local_batch_size or base.local_batch_size
        batch = self.global_batch_size or (base.global_batch_size if self.is_strong else local * num_units)
        if batch % num_units:
            raise UserError(f'batch {batch:g} is not divisible by {num_units} {base.unit}s; choose another batch')
        return int(batch)


@dataclass(frozen=True)
class Answer:
    """Predictions of all requested layouts."""

    request: PredictionRequest
    source: Source
    costs: Costs
    rows: tuple[Prediction, ...]
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

    @property
    def best(self) -> dict[str, Prediction]:
        """The fastest, the cheapest and the knee layout, beyond which 1 % less time needs over 1 % more node-hours."""
        keys: dict[str, Callable[[float, float], tuple[float, float]]] = {
            'fastest': lambda m, h: (m, h), 'cheapest': lambda m, h: (h, m), 'knee': lambda m, h: (m * h, m)}
        return {name: min(self.timed, key=lambda r: key(r.minutes or 0.0, r.node_hours or 0.0))
                for name, key in keys.items() if self.timed}

    def cost(self, row: Prediction) -> float | None:
        return row.node_hours * self.request.price if row.node_hours and self.request.price else None


_Chosen = tuple[Recipe, Epochs | None, str, list[str]]  # recipe, epochs if measured, source, and doubts


def source_recipe(source: Source, batch: int, optimizer: str | None, target: float | None) -> _Chosen | None:
    """Return the source's recipe at a batch; None if it has none on ImageNet, where a published one is used."""
    base = source.base
    sets = sorted(source.sets, key=lambda s: s is not base.run_set)
    for run_set in sets:
        recipe, epochs = run_set.recipe, [e for e in run_set.epochs if e]
        if (recipe.global_batch_size == batch and optimizer in (None, recipe.opt_name)
                and target in (None, recipe.target_accuracy) and epochs):
            text = f'{range_text(epochs)}, measured in {plural(len(epochs), "run")} of {run_set.name}'
            return recipe, Epochs(sum(epochs) / len(epochs), min(epochs), max(epochs), text), run_set.name, []
    if base.dataset is None:
        return None
    if not sets:  # a bench measures no epochs, as its notes explain
        return Recipe(optimizer, batch), None, '', []
    unknown = replace(sets[0].recipe, global_batch_size=batch, decay_epochs=None, step_epochs=None, base_lr=None,
                      warmup_epochs=None)
    return unknown, None, f'none at this batch on {base.dataset}', [
        f'no recipe measured on {base.dataset} at batch {batch}; the step is predicted, but not epochs or minutes']


def published_recipe(batch: int, optimizer: str | None, target: float | None) -> _Chosen:
    """Return the recipe of published ImageNet sets for a batch; raise UserError if there is none."""
    try:
        choice = choose_recipe(batch, optimizer, target)
    except ConfigError as e:
        raise UserError(f'no recipe for batch {str(e).removeprefix("--global-batch-size: got ")}') from e
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    epochs = Epochs(choice.epochs, min(low, choice.epochs), high, choice.source_text)
    doubts = [] if choice.kind == 'known' else [
        f'no recipe is published at batch {batch:,}; it is interpolated between two batches']
    return choice.recipe, epochs, f'published sets {"near" if doubts else "at"} this batch', doubts


def _doubts(found: Prediction) -> list[str]:
    """Return the weak points of a prediction, except those of its recipe."""
    base, layout = found.base, found.layout
    local, measured, units = layout.local_batch_size, base.local_batch_size, base.num_units / base.num_nodes
    doubts = {
        f'{local:g} images per {base.unit} and step, measured with {measured:g}; compute time is assumed to be '
        'proportional': not any(is_within(local, m, _MAX_BATCH_RATIO) for m in (measured, *(b for b, _ in base.steps))),
        f'{layout.units_per_node} accelerators per node, measured with {units:g}; node-hours are not comparable':
            base.has_accelerators and layout.units_per_node != units,
        f'{layout.units_per_node} ranks per node, measured with {units:g}; enough processors are assumed':
            not base.has_accelerators and layout.units_per_node > units,
        f'derived from {base.num_nodes} nodes; the interval excludes the uncertainty of their overheads':
            found.minutes is not None and layout.num_nodes == 1 < base.num_nodes}
    return [text for text, is_true in doubts.items() if is_true]


def _predict_split(request: PredictionRequest, source: Source, num_nodes: int, per_node: int,
                   costs: Costs) -> Prediction:
    base, link, batch, run_set = source.base, source.link, 0, source.base.run_set
    target = request.target or (run_set.recipe.target_accuracy if run_set else None)
    try:
        batch = request.batch(base, num_nodes * per_node)
        recipe, epochs, recipe_source, doubts = (source_recipe(source, batch, request.optimizer, target)
                                                 or published_recipe(batch, request.optimizer, target))
    except UserError as e:
        return Prediction(base, Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, recipe, epochs)
    if link is None and num_nodes not in (1, base.num_nodes):
        return Prediction(base, layout, _NO_LINK)
    is_unknown = run_set and run_set.is_imagenet and not logs_schedule(run_set)
    is_own = (base.has_accelerators and not is_unknown and not base.is_scaled
              or link is not None and link.extra_s is not None)
    second = second_base(layout, base, source.sets, run_set) if (
        run_set and base.has_accelerators and base.num_nodes == 1 and not base.is_scaled) else None
    found = predict_layout(base, layout, link or _NO_PORTS, costs, 'own' if is_own else 'other', second)
    measured = next((s for s in source.sets if not source.is_changed and s.recipe.global_batch_size == batch
                     and (s.num_nodes, s.num_units) == (num_nodes, layout.num_units)), None)
    doubts = [] if found.refusal else [*doubts, *_doubts(found), *[_NO_SCHEDULE] * bool(is_unknown and num_nodes > 1)]
    return replace(found, doubts=tuple(doubts), recipe_source=recipe_source, measured=measured)


def make_answer(request: PredictionRequest, source: Source) -> Answer:
    """Predict all requested layouts; without accelerators, costs are 0, with the interval for another machine's set."""
    def predict(request: PredictionRequest, source: Source) -> tuple[Prediction, ...]:
        return tuple(_predict_split(request, source, *split, costs) for split in request.splits)
    costs, what_if = costs_without(source.base.run_set), request.what_if
    if not source.base.has_accelerators:
        costs = Costs(errors=costs.errors)
    rows = predict(request, source)
    if what_if is None:
        return Answer(request, source, costs, rows)
    if what_if.local and (request.global_batch_size or request.is_strong):
        raise ConfigError('--what-if: got local with a fixed global batch, expected --weak or no batch option')
    changed = change(source, what_if)
    return Answer(request, changed, costs, predict(
        replace(request, local_batch_size=what_if.local or request.local_batch_size), changed), rows)
