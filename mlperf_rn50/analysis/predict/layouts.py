"""Prediction of layouts with recipes and doubts, and the fastest, cheapest and knee layout. Pure
functions."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.anchors import lacks_schedule, most_local, second_base
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import (
    generation_with_costs,
    is_measured_layout,
    predict_layout,
)
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Prediction
from mlperf_rn50.analysis.predict.source import Source, WhatIf, change
from mlperf_rn50.analysis.recipe.choose import (
    choose_recipe,
    is_within,
    published_recipes,
    range_text,
)
from mlperf_rn50.analysis.recipe.reference import has_same_recipe
from mlperf_rn50.analysis.sets.published import load_table
from mlperf_rn50.analysis.sets.run_set import RunSet, cost_of
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.text import percent, plural

# between the predicted and the measured local batch; beyond it, the computing time is doubtful
_MAX_BATCH_RATIO = 2
_PROPORTIONAL = 1.0005  # largest relative efficiency that is shown as 100.0 %
_SAME_TIME = 1.01  # largest ratio of times between batches that count as equally fast
# of recipes, the most certain first
_KINDS = ('source', 'published', 'interpolated', 'given', None)
_NO_SCHEDULE = (
    'the source logs declare no schedule, as in v0.5; the costs of several nodes of such software '
    'are not known, so the interval is that of another machine'
)
_NO_LINK = (
    'interconnect unknown; pass --link-gbit-s or a bench allreduce file measured across nodes'
)


@dataclass(frozen=True)
class PredictionRequest:
    """Layouts to predict. Without a batch, each layout has the one with the least time."""

    splits: Sequence[tuple[int, int]]  # (nodes, accelerators or ranks per node)
    global_batch_size: int | None = None
    local_batch_size: float | None = None
    optimizer: str | None = None
    target: float | None = None  # Top-1 as a fraction; None for that of the source
    price: float | None = None  # per node-hour
    what_if: WhatIf | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions of all requested layouts."""

    request: PredictionRequest
    source: Source
    costs: Costs
    rows: Sequence[Prediction]

    @property
    def predicted(self) -> list[Prediction]:
        return [r for r in self.rows if not r.refusal]

    @property
    def timed(self) -> list[Prediction]:
        return [r for r in self.rows if r.known_minutes]

    @property
    def best(self) -> dict[str, Prediction]:
        """The fastest, the cheapest and, if it is between others, the knee layout: least time x
        node-hours.

        A measured time replaces the predicted one.
        """
        if not self.timed:
            return {}
        found = {
            'fastest': min(self.timed, key=lambda r: r.known_minutes or 0.0),
            'cheapest': min(self.timed, key=lambda r: r.known_node_hours),
        }
        knee = min(self.timed, key=lambda r: (r.known_minutes or 0.0) * r.known_node_hours)
        sizes = [r.layout.num_units for r in self.timed]
        if min(sizes) < knee.layout.num_units < max(sizes):
            found['knee'] = knee
        return found


def find_recipe(
    source: Source, batch: int, optimizer: str | None, target: float | None
) -> tuple[Recipe, Epochs | None]:
    """Return the recipe for a batch, from the source or, on ImageNet, from published sets, and its
    epochs.

    Raise ConfigError if no published set has such a recipe. On other data, a recipe that the source
    lacks has only optimizer and batch, and its epochs are None.
    """
    base = source.base
    for run_set in sorted(source.sets, key=lambda s: s is not base.run_set):
        recipe, epochs = run_set.recipe, [e for e in run_set.epochs if e]
        is_wanted = (
            recipe.global_batch_size == batch
            and optimizer in (None, recipe.opt_name)
            and target in (None, recipe.target_accuracy)
        )
        if is_wanted and epochs:
            runs = plural(len(epochs), 'run')
            return recipe, Epochs(
                mean=statistics.fmean(epochs),
                low=min(epochs),
                high=max(epochs),
                source=f'{range_text(epochs)}, measured in {runs} of {run_set.name}',
            )
    if base.dataset is not None:
        return Recipe(optimizer, batch), None
    choice = choose_recipe(batch, optimizer, target)
    low, most = choice.epochs_range
    return choice.recipe, Epochs(
        mean=choice.epochs,
        low=min(low, choice.epochs),
        high=max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most)),
        source=f'between {choice.source_text}' if choice.kind == 'between' else choice.source_text,
        kind='published' if choice.kind == 'known' else 'interpolated',
    )


def _doubts(base: Base, found: Prediction, costs: Costs) -> Iterator[str]:
    """Yield the weak points of a prediction."""
    layout, unit = found.layout, base.unit
    several, per_node = layout.num_nodes > 1, base.num_units / base.num_nodes
    if layout.epochs is None:
        yield (
            f'no recipe measured on {base.dataset} at batch {layout.recipe.global_batch_size}; the '
            'step is predicted, but not epochs or minutes'
        )
    local, measured = layout.local_batch_size, base.local_batch_size
    if not any(is_within(local, m, _MAX_BATCH_RATIO) for m in (measured, *base.steps)):
        yield (
            f'{local:g} images per {unit} and step, measured with {measured:g}; computing time is '
            'extrapolated'
        )
    if layout.units_per_node != per_node:
        yield (
            f'{layout.units_per_node} {unit}s per node, measured with {per_node:g}; equal speed of '
            'each is assumed, and node-hours are not comparable'
        )
    if not several and base.num_nodes > 1:
        yield (
            f'derived from {base.num_nodes} nodes; the interval excludes the uncertainty of their '
            'overheads'
        )
    is_unknown = found.knowledge == 'other' and base.generation not in costs.latency_s
    if several and base.has_accelerators and is_unknown:
        similar = generation_with_costs(base.generation, costs) or 'all accelerators together'
        yield (
            f'no published set of other rounds has {base.generation or "unnamed accelerators"} on '
            f'several nodes; the latency is that of {similar}, and the interval that of another '
            'machine'
        )
    if round(base.noise, 2) > 0:
        yield (
            'the first epoch of the source was the shortest, so its epochs vary by '
            f'{percent(base.noise, ".0f")} or more; the interval is wider'
        )
    if several and lacks_schedule(base.run_set):
        yield _NO_SCHEDULE


def _layout_of(
    request: PredictionRequest, source: Source, split: tuple[int, int], batch: float
) -> Layout:
    """Return a layout with the recipe for a batch. Raise UserError if there is none."""
    num_nodes, per_node = split
    if batch % (num_nodes * per_node):
        raise UserError(
            f'batch {batch:.10g} is not divisible by {num_nodes * per_node} {source.base.unit}s; '
            'choose another batch'
        )
    if request.what_if and (num := request.what_if.epochs):
        epochs = Epochs(num, num, num, 'given by --what-if', kind='given')
        return Layout(num_nodes, per_node, Recipe(None, int(batch)), epochs)
    found = find_recipe(source, int(batch), request.optimizer, request.target)
    return Layout(num_nodes, per_node, *found)


def _measured_sets(request: PredictionRequest, source: Source, layout: Layout) -> list[RunSet]:
    """Return the sets of the source with the nodes and units of a layout, on its machine."""
    if request.what_if:
        return []
    size = layout.num_nodes, layout.num_units
    return [s for s in source.sets if (s.num_nodes, s.num_units) == size]


def _predict_batch(
    request: PredictionRequest, source: Source, split: tuple[int, int], costs: Costs, batch: float
) -> Prediction:
    base, link = source.base, source.link
    try:
        layout = _layout_of(request, source, split, batch)
    except UserError as e:
        return Prediction(Layout(*split, Recipe(None, int(batch))), str(e))
    is_measured = layout.num_nodes == base.num_nodes == 1 or is_measured_layout(base, layout)
    if link.gbit_s is None and not base.has_accelerators and not is_measured:
        return Prediction(layout, _NO_LINK)
    is_own = base.has_accelerators and not lacks_schedule(base.run_set) and not base.is_scaled
    found = predict_layout(
        base,
        layout,
        link,
        costs,
        knowledge='own' if is_own or link.extra_s is not None else 'other',
        second=second_base(layout, base, source.sets),
        machine_link=source.machine_link or link,
    )
    if found.refusal:
        return found
    found = replace(
        found,
        cost=cost_of(found.node_hours, request.price),
        doubts=list(_doubts(base, found, costs)),
    )
    recipe = layout.recipe
    measured_sets = _measured_sets(request, source, layout)
    for measured in sorted(measured_sets, key=lambda s: s is not base.run_set):
        if measured.recipe.global_batch_size == batch:
            is_same = measured.recipe.target_accuracy == recipe.target_accuracy
            is_same = is_same and has_same_recipe(measured.recipe, recipe)
            return replace(
                found,
                measured_step_s=measured.step_s,
                measured_minutes=measured.minutes if is_same else None,
            )
    return found


def find_batches(
    source: Source, num_units: int, optimizer: str | None, target: float | None
) -> list[float]:
    """Return the batches to choose from: those of the source's sets, and that with the base's
    images per unit.

    On ImageNet, add those of published recipes, and powers of two images per unit. No unit
    (accelerator or rank) has more images than in the source's sets or in published ones with this
    accelerator.
    """
    base = source.base
    batches = {base.global_batch_size, *(s.recipe.global_batch_size for s in source.sets)}
    if base.dataset is None:
        batches |= {p.batch for p in published_recipes(optimizer, target) if p.is_whole}
        batches |= {num_units << k for k in range(max(batches).bit_length())}
    most = most_local(base, source.sets, load_table()) * num_units
    found = {b for b in batches if b % num_units == 0}
    return sorted(b for b in (*found, base.local_batch_size * num_units) if b <= most)


def choose_batch(rows: Sequence[Prediction], local_batch_size: float) -> Prediction:
    """Return the row with the least time, and so the least cost. A measured time replaces the
    predicted one.

    Of equally fast rows, prefer the source's recipe, then a published one, then images per unit
    near local_batch_size. If all are refused, return the one with the smallest batch, whose reason
    is the most useful one.
    """

    def minutes(row: Prediction) -> float:
        return row.measured_minutes or row.minutes or math.inf

    def rank(row: Prediction) -> tuple:
        layout = row.layout
        size: float = layout.recipe.global_batch_size
        if not row.refusal:
            size = abs(math.log(layout.local_batch_size / local_batch_size))
        kind = _KINDS.index(layout.epochs and layout.epochs.kind)
        return minutes(row) > _SAME_TIME * least, row.refusal is not None, kind, size

    least = min(map(minutes, rows))
    return min(rows, key=rank)


def _compared(row: Prediction, baseline: Prediction) -> Prediction:
    """Return a row with speed-up and efficiency.

    More units are not expected to be more than proportionally faster, apart from fewer epochs. If
    they are predicted to be, this is a doubt, and the interval includes the proportional time.
    """
    epochs, base_epochs = row.layout.epochs, baseline.layout.epochs
    if not (row.minutes and baseline.minutes and row.interval and epochs and base_epochs):
        return row
    speedup = baseline.minutes / row.minutes
    units = row.layout.num_units / baseline.layout.num_units
    excess = speedup / units / max(1.0, base_epochs.mean / epochs.mean)
    found = replace(row, speedup=speedup, efficiency=speedup / units)
    if units <= 1 or excess <= _PROPORTIONAL:
        return found
    low, high = row.interval
    doubt = (
        f'{percent(excess, ".1f")} of a proportional speed, expected at most 100 %, because start, '
        'evaluations or epochs of the source took longer than assumed here; the interval includes '
        '100 %'
    )
    interval = low, max(high, excess * row.minutes)
    return replace(found, interval=interval, doubts=(*row.doubts, doubt))


def _predict_split(
    request: PredictionRequest, source: Source, costs: Costs, split: tuple[int, int]
) -> Prediction:
    """Predict a number of nodes and of units per node at the given batch or, without one, at the
    best batch."""
    num_units = split[0] * split[1]
    batches: list[float] = find_batches(source, num_units, request.optimizer, request.target)
    if request.global_batch_size or request.local_batch_size:
        batches = [request.global_batch_size or (request.local_batch_size or 0) * num_units]
    rows = [_predict_batch(request, source, split, costs, b) for b in batches]
    row = choose_batch(rows, source.base.local_batch_size)
    measured = [
        s
        for s in _measured_sets(request, source, row.layout)
        if s.minutes
        and request.target in (None, s.target_accuracy)
        and request.optimizer in (None, s.recipe.opt_name)
    ]
    if not measured:
        return row
    best = min(measured, key=lambda s: s.minutes or 0.0)
    return replace(
        row,
        best_measured_minutes=best.minutes,
        best_measured_batch_size=best.global_batch_size,
        best_measured_system=best.name,
    )


def predict_layouts(request: PredictionRequest, source: Source) -> Predictions:
    """Predict all requested layouts.

    Without accelerators, the fitted times of several nodes are 0, and the interval is that for
    another machine's set. Speed-up and efficiency are relative to the source's layout, with its own
    batch if a batch is given.
    """
    what_if, base, original = request.what_if, source.base, source
    costs = costs_without(base.run_set.round if base.run_set else None)
    if not base.has_accelerators:
        costs = Costs(errors=costs.errors)
    if base.run_set and request.target is None:
        request = replace(request, target=base.run_set.recipe.target_accuracy)
    if what_if:
        if what_if.local and request.global_batch_size:
            raise ConfigError(
                '--what-if: got local with a fixed global batch, expected --weak or no batch option'
            )
        source = change(source, what_if)

    fixed = request
    if what_if and what_if.local:
        fixed = replace(request, local_batch_size=what_if.local)
    own = fixed
    if fixed.global_batch_size or fixed.local_batch_size:
        own = replace(fixed, global_batch_size=base.global_batch_size)
    split = base.num_nodes, base.layout.units_per_node
    baseline = _predict_split(own, source, costs, split)
    rows = [
        _compared(_predict_split(fixed, source, costs, split), baseline) for split in request.splits
    ]
    if what_if:
        unchanged = predict_layouts(replace(request, what_if=None), original)
        rows = [
            replace(row, unchanged_step_s=old.step_s, unchanged_minutes=old.minutes)
            for row, old in zip(rows, unchanged.rows)
        ]
    return Predictions(request, source, costs, rows)
