"""Prediction of layouts with recipes and doubts, and the fastest, cheapest and knee layout. Pure functions."""
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.anchors import lacks_schedule, most_local, second_base
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Prediction
from mlperf_rn50.analysis.predict.source import Source, WhatIf, change
from mlperf_rn50.analysis.recipe.choose import SAME_BATCH, choose_recipe, is_within, published_recipes, range_text
from mlperf_rn50.analysis.recipe.reference import has_same_recipe
from mlperf_rn50.analysis.sets.cost import cost_of
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import plural

_MAX_BATCH_RATIO = 2  # between the predicted and the measured local batch; beyond it, the computing time is doubtful
_SAME_TIME = 1.01  # largest ratio of times between batches that count as equally fast
_KINDS = ('source', 'published', 'interpolated')  # of recipes, the most certain first
_NO_SCHEDULE = ('the source logs declare no schedule, as in v0.5; the costs of several nodes of such software are not '
                'known, so the interval is that of another machine')
_NO_LINK = 'interconnect unknown; pass --link-gbit-s or a bench allreduce file measured across nodes'


@dataclass(frozen=True)
class PredictionRequest:
    """Layouts to predict. If no batch is given, the batch with the least time is chosen for each layout."""

    splits: tuple[tuple[int, int], ...]  # (nodes, accelerators or ranks per node)
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    is_weak: bool = False  # keep the local batch of the source
    is_strong: bool = False  # keep the global batch of the source
    optimizer: str | None = None
    target: float | None = None  # Top-1 as a fraction; None for that of the source
    price: float | None = None  # per node-hour
    what_if: WhatIf | None = None

    @property
    def is_given(self) -> bool:
        """Whether the batch of each layout is given, so that none is chosen."""
        return bool(self.global_batch_size or self.local_batch_size or self.is_weak or self.is_strong)

    def goal(self, base: Base) -> float | None:
        """Return the Top-1 target, which is that of the source unless it is given."""
        return self.target or (base.run_set.recipe.target_accuracy if base.run_set else None)

    def batch(self, base: Base, num_units: int) -> int:
        """Return the given batch of a layout. Raise UserError if it is not divisible by the accelerators or ranks."""
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
    baseline: Prediction  # the source's own layout, with its own batch if batches are given
    weak: tuple[Prediction, ...] = ()  # the layouts with the images per accelerator of the source, or none
    strong: tuple[Prediction, ...] = ()  # with its images per step

    @property
    def predicted(self) -> list[Prediction]:
        return [r for r in self.rows if not r.refusal]

    @property
    def timed(self) -> list[Prediction]:
        return [r for r in self.rows if r.minutes]

    @property
    def best(self) -> dict[str, Prediction]:
        """The fastest, the cheapest and the knee layout, if there are any.

        The knee has the smallest product of time and node-hours. It is neither the smallest nor the largest layout,
        beyond which the product may be smaller.
        """
        quantities = {'fastest': lambda r: r.minutes, 'cheapest': lambda r: r.node_hours,
                      'knee': lambda r: r.minutes * r.node_hours}
        found = {name: min(self.timed, key=value) for name, value in quantities.items() if self.timed}
        sizes = {r.layout.num_units for r in self.timed}
        return {name: r for name, r in found.items()
                if name != 'knee' or min(sizes) < r.layout.num_units < max(sizes)}


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
                f'{range_text(epochs)}, measured in {plural(len(epochs), "run")} of {run_set.name}'), 'source'), []
    if base.dataset is not None:
        return Recipe(optimizer, batch), None, [f'no recipe measured on {base.dataset} at batch {batch}; the step is '
                                                'predicted, but not epochs or minutes']
    choice = choose_recipe(batch, optimizer, target)
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    is_known = choice.kind == 'known'
    return choice.recipe, Epochs(choice.epochs, min(low, choice.epochs), high, choice.source_text,
                                 'published' if is_known else 'interpolated'), (
        [] if is_known else [f'no recipe is published at batch {batch:,}; it is interpolated between two batches'])


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


def _predict_batch(request: PredictionRequest, source: Source, split: tuple[int, int], costs: Costs,
                   batch: int) -> Prediction:
    base, link, (num_nodes, per_node) = source.base, source.link, split
    try:
        recipe, epochs, doubts = find_recipe(source, batch, request.optimizer, request.goal(base))
    except UserError as e:
        return Prediction(Layout(num_nodes, per_node, Recipe(None, batch)), str(e))
    layout = Layout(num_nodes, per_node, recipe, epochs)
    if link.gbit_s is None and not base.has_accelerators and num_nodes not in (1, base.num_nodes):
        return Prediction(layout, _NO_LINK)
    is_own = (base.has_accelerators and not lacks_schedule(base.run_set) and not base.is_scaled
              or link.extra_s is not None)
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


def _predict_given(request: PredictionRequest, source: Source, split: tuple[int, int], costs: Costs) -> Prediction:
    try:
        batch = request.batch(source.base, split[0] * split[1])
    except UserError as e:
        return Prediction(Layout(*split, Recipe(None, 0)), str(e))
    return _predict_batch(request, source, split, costs, batch)


def find_batches(source: Source, num_units: int, optimizer: str | None, target: float | None) -> list[int]:
    """Return the batches to choose from, which are multiples of the number of accelerators or ranks.

    They are those of the source's sets and, on ImageNet, of published recipes, and between these the batches with a
    power of two as images per accelerator. No accelerator has more images than in a set of the same accelerator.
    """
    base, batches = source.base, {source.base.global_batch_size, *(s.recipe.global_batch_size for s in source.sets)}
    if base.dataset is None:
        batches |= {p.recipe.global_batch_size for p in published_recipes(optimizer, target) if p.is_whole}
        batches |= {b for k in range(24) if min(batches) <= (b := num_units << k) <= max(batches)}
    fitting = {b for k in batches if is_within(b := num_units * round(k / num_units), k, SAME_BATCH)}
    most = most_local(base, source.sets, load_table())
    return sorted(b for b in fitting if b <= most * num_units)


def choose_batch(rows: Sequence[Prediction], local_batch_size: float) -> Prediction:
    """Return the row with the least time, which also has the least cost. Measured times replace predicted ones.

    Among equally fast rows, prefer the source's recipe, then a published one, then the number of images per accelerator
    nearest to the measured one.
    """
    minutes = [row.measured_minutes or row.minutes or math.inf for row in rows]
    return min((row for row, m in zip(rows, minutes) if m <= _SAME_TIME * min(minutes)), key=lambda r: (
        _KINDS.index(r.layout.epochs.kind) if r.layout.epochs else len(_KINDS),
        abs(math.log(r.layout.local_batch_size / local_batch_size))))


def _predict_split(request: PredictionRequest, source: Source, split: tuple[int, int], costs: Costs) -> Prediction:
    """Predict a layout with the given batch or the best one. If none has a time, keep the images per accelerator."""
    given, num_units = _predict_given(request, source, split, costs), split[0] * split[1]
    if request.is_given:
        return given
    rows = [_predict_batch(request, source, split, costs, batch) for batch in find_batches(
        source, num_units, request.optimizer, request.goal(source.base))]
    if timed := [r for r in rows if r.minutes]:
        return choose_batch(timed, source.base.local_batch_size)
    if given.refusal and source.base.dataset is None:  # the reason for the smallest batch is the most useful one
        return _predict_batch(request, source, split, costs, num_units)
    return given


def _compared(row: Prediction, baseline: Prediction) -> Prediction:
    """Add speed-up and efficiency as in report: relative to the time of the baseline, measured or else predicted."""
    minutes = baseline.measured_minutes or baseline.minutes
    if not minutes or not row.minutes:
        return row
    speedup = minutes / row.minutes
    return replace(row, speedup=speedup, efficiency=speedup * baseline.layout.num_units / row.layout.num_units)


def make_answer(request: PredictionRequest, source: Source) -> Answer:
    """Predict all requested layouts. Without accelerators, costs are 0, with the interval for another machine's set."""
    costs, what_if, base, original = costs_without(source.base.run_set), request.what_if, source.base, source
    if not base.has_accelerators:
        costs = Costs(errors=costs.errors)
    if what_if:
        if what_if.local and (request.global_batch_size or request.is_strong):
            raise ConfigError('--what-if: got local with a fixed global batch, expected --weak or no batch option')
        source = change(source, what_if)
    new = replace(request, local_batch_size=what_if.local) if what_if and what_if.local else request
    rows = [_predict_split(new, source, split, costs) for split in request.splits]
    if what_if:  # the unchanged machine has the same batch, unless the change is one of the batch
        old = [_predict_given(request, original, split, costs) if what_if.local else
               _predict_batch(request, original, split, costs, row.layout.recipe.global_batch_size)
               for split, row in zip(request.splits, rows)]
        rows = [replace(r, unchanged_step_s=o.step_s, unchanged_minutes=o.minutes) for r, o in zip(rows, old)]
    own = base.num_nodes, base.layout.units_per_node
    baseline = (_predict_batch(new, source, own, costs, base.global_batch_size) if new.is_given else
                _predict_split(new, source, own, costs))
    weak, strong = (tuple(_predict_given(replace(new, **rule), source, split, costs) for split in request.splits)
                    for rule in ({'is_weak': True}, {'is_strong': True}))
    return Answer(request, source, costs, tuple(_compared(row, baseline) for row in rows), baseline,
                  *(((), ()) if new.is_given else (weak, strong)))
