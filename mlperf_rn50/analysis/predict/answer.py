"""Prediction of layouts with recipes and doubts, and the fastest, cheapest and knee layout. Pure functions."""
import statistics
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.anchors import lacks_schedule, second_base
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Prediction
from mlperf_rn50.analysis.predict.source import Source, WhatIf, change
from mlperf_rn50.analysis.recipe.choose import choose_recipe, is_within, range_text
from mlperf_rn50.analysis.recipe.reference import has_same_recipe
from mlperf_rn50.analysis.sets.cost import cost_of
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

_MAX_BATCH_RATIO = 2  # between the predicted and the measured local batch; beyond it, the computing time is doubtful
_NO_SCHEDULE = ('the source logs declare no schedule, as in v0.5; the costs of several nodes of such software are not '
                'known, so the interval is that of another machine')
_NO_LINK = 'interconnect unknown; pass --link-gbit-s or a bench allreduce file measured across nodes'


@dataclass(frozen=True)
class PredictionRequest:
    """Layouts to predict. If no batch size is given, the local batch of the source is kept."""

    splits: tuple[tuple[int, int], ...]  # (nodes, accelerators or ranks per node)
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    is_strong: bool = False  # if no batch size is given, keep the global batch of the source
    optimizer: str | None = None
    target: float | None = None  # Top-1 as a fraction; None for that of the source
    price: float | None = None  # per node-hour
    what_if: WhatIf | None = None

    def batch(self, base: Base, num_units: int) -> int:
        """Return the global batch of a layout. Raise UserError if it is not divisible by the accelerators or ranks."""
        local = self.local_batch_size or base.local_batch_size
        batch = self.global_batch_size or (base.global_batch_size if self.is_strong else local * num_units)
        if batch % num_units:
            raise UserError(f'batch {batch:.10g} is not divisible by {num_units} {base.unit}s; choose another batch')
        return int(batch)


@dataclass(frozen=True)
class Answer:
    """Predictions of all requested layouts."""

    request: PredictionRequest
    source: Source
    costs: Costs
    rows: tuple[Prediction, ...]

    @property
    def predicted(self) -> list[Prediction]:
        return [r for r in self.rows if not r.refusal]

    @property
    def timed(self) -> list[Prediction]:
        return [r for r in self.rows if r.minutes]

    @property
    def best(self) -> dict[str, Prediction]:
        """The fastest, the cheapest and the knee layout. The knee has the smallest product of time and node-hours."""
        quantities = {'fastest': lambda r: r.minutes, 'cheapest': lambda r: r.node_hours,
                      'knee': lambda r: r.minutes * r.node_hours}
        return {name: min(self.timed, key=value) for name, value in quantities.items() if self.timed}


def find_recipe(source: Source, batch: int, optimizer: str | None,
              target: float | None) -> tuple[Recipe, Epochs | None, list[str]]:
    """Return the recipe for a batch, from the source or, on ImageNet, from published sets, its epochs and doubts.

    Raise ConfigError if no published set has such a recipe. Other data have only the batch then, and no epochs.
    """
    base = source.base
    for run_set in sorted(source.sets, key=lambda s: s is not base.run_set):
        recipe, epochs = run_set.recipe, [e for e in run_set.epochs if e]
        if (recipe.global_batch_size == batch and optimizer in (None, recipe.opt_name)
                and target in (None, recipe.target_accuracy) and epochs):
            return recipe, Epochs(statistics.fmean(epochs), min(epochs), max(epochs), (
                f'{range_text(epochs)}, measured in {plural(len(epochs), "run")} of {run_set.name}')), []
    if base.dataset is not None:
        return Recipe(optimizer, batch), None, [f'no recipe measured on {base.dataset} at batch {batch}; the step is '
                                                'predicted, but not epochs or minutes']
    choice = choose_recipe(batch, optimizer, target)
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    return choice.recipe, Epochs(choice.epochs, min(low, choice.epochs), high, choice.source_text), (
        [] if choice.kind == 'known' else
        [f'no recipe is published at batch {batch:,}; it is interpolated between two batches'])


def _doubts(base: Base, layout: Layout) -> list[str]:
    """Return the weak points of a prediction, except those of its recipe."""
    local, measured, units = layout.local_batch_size, base.local_batch_size, base.num_units / base.num_nodes
    doubts = {
        f'{local:g} images per {base.unit} and step, measured with {measured:g}; computing time is '
        'extrapolated': not any(is_within(local, m, _MAX_BATCH_RATIO) for m in (measured, *(b for b, _ in base.steps))),
        f'{layout.units_per_node} {base.unit}s per node, measured with {units:g}; equal speed of each is assumed, and '
        'node-hours are not comparable': layout.units_per_node != units,
        f'derived from {base.num_nodes} nodes; the interval excludes the uncertainty of their overheads':
            layout.num_nodes == 1 < base.num_nodes,
        _NO_SCHEDULE: layout.num_nodes > 1 and lacks_schedule(base.run_set)}
    return [text for text, is_true in doubts.items() if is_true]


def _predict_split(request: PredictionRequest, source: Source, num_nodes: int, per_node: int,
                   costs: Costs) -> Prediction:
    base, link, batch, run_set = source.base, source.link, 0, source.base.run_set
    target = request.target or (run_set.recipe.target_accuracy if run_set else None)
    try:
        batch = request.batch(base, num_nodes * per_node)
        recipe, epochs, doubts = find_recipe(source, batch, request.optimizer, target)
    except UserError as e:
        return Prediction(Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, recipe, epochs)
    if link.gbit_s is None and not base.has_accelerators and num_nodes not in (1, base.num_nodes):
        return Prediction(layout, _NO_LINK)
    is_own = base.has_accelerators and not lacks_schedule(run_set) and not base.is_scaled or link.extra_s is not None
    found = predict_layout(base, layout, link, costs, 'own' if is_own else 'other',
                           second_base(layout, base, source.sets))
    if found.refusal:
        return found
    measured = next((s for s in source.sets if not request.what_if and s.recipe.global_batch_size == batch
                     and (s.num_nodes, s.num_units) == (num_nodes, layout.num_units)), None)
    is_same = measured and has_same_recipe(measured.recipe, recipe) and (
        measured.recipe.target_accuracy == recipe.target_accuracy)
    return replace(found, cost=cost_of(found.node_hours, request.price),
                   measured_step_s=measured.step_s if measured else None,
                   measured_minutes=measured.minutes if measured and is_same else None,
                   doubts=(*doubts, *_doubts(base, layout)))


def make_answer(request: PredictionRequest, source: Source) -> Answer:
    """Predict all requested layouts. Without accelerators, costs are 0, with the interval for another machine's set."""
    costs, what_if = costs_without(source.base.run_set), request.what_if
    if not source.base.has_accelerators:
        costs = Costs(errors=costs.errors)
    rows = tuple(_predict_split(request, source, *split, costs) for split in request.splits)
    if what_if is None:
        return Answer(request, source, costs, rows)
    if what_if.local and (request.global_batch_size or request.is_strong):
        raise ConfigError('--what-if: got local with a fixed global batch, expected --weak or no batch option')
    changed = change(source, what_if)
    new = replace(request, local_batch_size=what_if.local or request.local_batch_size)
    return Answer(request, changed, costs, tuple(
        replace(_predict_split(new, changed, *split, costs), unchanged_step_s=old.step_s,
                unchanged_minutes=old.minutes) for split, old in zip(request.splits, rows)))
