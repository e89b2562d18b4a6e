"""Prediction of layouts with recipes and doubts, and the fastest, cheapest and knee layout. Pure
functions."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlperf_rn50.analysis.predict.anchors import lacks_schedule, most_local, second_base
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import generation_with_costs, predict_layout
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
from mlperf_rn50.analysis.sets.run_set import cost_of
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
    'are not '
    'known, so the interval is that of another machine'
)
_NO_LINK = (
    'interconnect unknown; pass --link-gbit-s or a bench allreduce file measured across nodes'
)


@dataclass(frozen=True)
class PredictionRequest:
    """Layouts to predict. Without a batch, each layout has the one with the least time."""

    splits: tuple[tuple[int, int], ...]  # (nodes, accelerators or ranks per node)
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
    rows: tuple[Prediction, ...]

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
        quantities = {
            'fastest': lambda r: r.known_minutes,
            'cheapest': lambda r: r.known_node_hours,
            'knee': lambda r: r.known_minutes * r.known_node_hours,
        }
        found = {
            name: min(self.timed, key=value) for name, value in quantities.items() if self.timed
        }
        sizes = [r.layout.num_units for r in self.timed]
        return {
            name: r
            for name, r in found.items()
            if name != 'knee' or min(sizes) < r.layout.num_units < max(sizes)
        }


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
        if (
            recipe.global_batch_size == batch
            and optimizer in (None, recipe.opt_name)
            and target in (None, recipe.target_accuracy)
            and epochs
        ):
            return recipe, Epochs(
                statistics.fmean(epochs),
                min(epochs),
                max(epochs),
                (
                    f'{range_text(epochs)}, measured in {plural(len(epochs), "run")} of '
                    f'{run_set.name}'
                ),
                'source',
            )
    if base.dataset is not None:
        return Recipe(optimizer, batch), None
    choice = choose_recipe(batch, optimizer, target)
    low, most = choice.epochs_range
    high = max(choice.epochs, min(most, choice.recipe.last_eval_epoch or most))
    return choice.recipe, Epochs(
        choice.epochs,
        min(low, choice.epochs),
        high,
        choice.source_text,
        'published' if choice.kind == 'known' else 'interpolated',
    )


def _doubts(base: Base, found: Prediction, costs: Costs) -> tuple[str, ...]:
    """Return the weak points of a prediction."""
    layout, similar = (
        found.layout,
        generation_with_costs(base.generation, costs) or 'all accelerators together',
    )
    local, measured, units = (
        layout.local_batch_size,
        base.local_batch_size,
        base.num_units / base.num_nodes,
    )
    doubts = {
        f'no recipe measured on {base.dataset} at batch {layout.recipe.global_batch_size}; the '
        'step is '
        'predicted, but not epochs or minutes': layout.epochs is None,
        f'{local:g} images per {base.unit} and step, measured with {measured:g}; computing time is '
        'extrapolated': not any(
            is_within(local, m, _MAX_BATCH_RATIO) for m in (measured, *(b for b, _ in base.steps))
        ),
        f'{layout.units_per_node} {base.unit}s per node, measured with {units:g}; equal speed of '
        'each is assumed, and '
        'node-hours are not comparable': layout.units_per_node != units,
        f'derived from {base.num_nodes} nodes; the interval excludes the uncertainty of their '
        'overheads': layout.num_nodes == 1 < base.num_nodes,
        f'no published set of other rounds has {base.generation or "unnamed accelerators"} on '
        'several nodes; the '
        f'latency is that of {similar}, and the interval that of another machine': layout.num_nodes
        > 1
        and base.has_accelerators
        and found.knowledge == 'other'
        and base.generation not in costs.latency_s,
        'the first epoch of the source was the shortest, so its epochs vary by '
        f'{percent(base.noise, ".0f")} or more; '
        'the interval is wider': round(base.noise, 2) > 0,
        _NO_SCHEDULE: layout.num_nodes > 1 and lacks_schedule(base.run_set),
    }
    return tuple(text for text, is_true in doubts.items() if is_true)


def _predict_batch(
    request: PredictionRequest, source: Source, split: tuple[int, int], costs: Costs, batch: float
) -> Prediction:
    base, link, (num_nodes, per_node) = source.base, source.link, split
    try:
        if batch % (num_nodes * per_node):
            raise UserError(
                f'batch {batch:.10g} is not divisible by {num_nodes * per_node} {base.unit}s; '
                'choose '
                'another batch'
            )
        num = request.what_if and request.what_if.epochs
        recipe, epochs = (
            find_recipe(source, int(batch), request.optimizer, request.target)
            if not num
            else (Recipe(None, int(batch)), Epochs(num, num, num, 'given by --what-if', 'given'))
        )
    except UserError as e:
        return Prediction(Layout(num_nodes, per_node, Recipe(None, int(batch))), str(e))
    layout = Layout(num_nodes, per_node, recipe, epochs)
    if link.gbit_s is None and not base.has_accelerators and num_nodes not in (1, base.num_nodes):
        return Prediction(layout, _NO_LINK)
    is_own = (
        base.has_accelerators
        and not lacks_schedule(base.run_set)
        and not base.is_scaled
        or link.extra_s is not None
    )
    found = predict_layout(
        base,
        layout,
        link,
        costs,
        'own' if is_own else 'other',
        second_base(layout, base, source.sets),
    )
    if found.refusal:
        return found
    measured = next(
        (
            s
            for s in source.sets
            if not request.what_if
            and s.recipe.global_batch_size == batch
            and (s.num_nodes, s.num_units) == (num_nodes, layout.num_units)
        ),
        None,
    )
    is_same = (
        measured
        and has_same_recipe(measured.recipe, recipe)
        and (measured.recipe.target_accuracy == recipe.target_accuracy)
    )
    return replace(
        found,
        cost=cost_of(found.node_hours, request.price),
        measured_step_s=measured.step_s if measured else None,
        measured_minutes=measured.minutes if measured and is_same else None,
        doubts=_doubts(base, found, costs),
    )


def find_batches(
    source: Source, num_units: int, optimizer: str | None, target: float | None
) -> list[float]:
    """Return the batches to choose from: those of the source's sets, and that with the base's
    images per unit.

    On ImageNet, add those of published recipes, and powers of two images per unit. No unit
    (accelerator or rank) has more images than in the source's sets or in published ones with this
    accelerator.
    """
    base, batches = (
        source.base,
        {source.base.global_batch_size, *(s.recipe.global_batch_size for s in source.sets)},
    )
    if base.dataset is None:
        batches |= {
            p.recipe.global_batch_size for p in published_recipes(optimizer, target) if p.is_whole
        }
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
    least = min(r.measured_minutes or r.minutes or math.inf for r in rows)
    return min(
        rows,
        key=lambda r: (
            (r.measured_minutes or r.minutes or math.inf) > _SAME_TIME * least,
            r.refusal is not None,
            _KINDS.index(r.layout.epochs and r.layout.epochs.kind),
            r.layout.recipe.global_batch_size
            if r.refusal
            else abs(math.log(r.layout.local_batch_size / local_batch_size)),
        ),
    )


def _compared(row: Prediction, baseline: Prediction) -> Prediction:
    """Return a row with speed-up and efficiency.

    More units are not expected to be more than proportionally faster, apart from fewer epochs. If
    they are predicted to be, this is a doubt, and the interval includes the proportional time.
    """
    epochs, base_epochs = row.layout.epochs, baseline.layout.epochs
    if not (row.minutes and baseline.minutes and row.interval and epochs and base_epochs):
        return row
    speedup, units = (
        baseline.minutes / row.minutes,
        row.layout.num_units / baseline.layout.num_units,
    )
    excess = speedup / units / max(1.0, base_epochs.mean / epochs.mean)
    found = replace(row, speedup=speedup, efficiency=speedup / units)
    if units <= 1 or excess <= _PROPORTIONAL:
        return found
    low, high = row.interval
    text = (
        f'{percent(excess, ".1f")} of a proportional speed, expected at most 100 %, because '
        'start, evaluations or '
        f'epochs of the source took longer than assumed here; the interval includes 100 %'
    )
    return replace(
        found, interval=(low, max(high, excess * row.minutes)), doubts=(*row.doubts, text)
    )


def make_answer(request: PredictionRequest, source: Source) -> Predictions:
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

    def choose(nodes: int, per_node: int, given: float | None) -> Prediction:
        batches = (
            [given]
            if given
            else find_batches(source, nodes * per_node, request.optimizer, request.target)
        )
        rows = [_predict_batch(request, source, (nodes, per_node), costs, b) for b in batches]
        measured = (
            ()
            if what_if
            else [
                s
                for s in source.sets
                if s.minutes
                and (s.num_nodes, s.num_units) == (nodes, nodes * per_node)
                and request.target in (None, s.target_accuracy)
                and request.optimizer in (None, s.recipe.opt_name)
            ]
        )
        row = choose_batch(rows, base.local_batch_size)
        best = min(measured, key=lambda s: s.minutes or 0.0, default=None)
        return (
            row
            if best is None
            else replace(
                row,
                best_measured_minutes=best.minutes,
                best_measured_batch_size=best.global_batch_size,
                best_measured_system=best.name,
            )
        )

    batch, local = (
        request.global_batch_size,
        what_if and what_if.local or request.local_batch_size or 0,
    )
    rows = [
        choose(nodes, per_node, batch or local * nodes * per_node)
        for nodes, per_node in request.splits
    ]
    baseline = choose(
        base.num_nodes,
        base.layout.units_per_node,
        base.global_batch_size if batch or local else None,
    )
    rows = [_compared(r, baseline) for r in rows]
    if what_if:
        rows = [
            replace(r, unchanged_step_s=old.step_s, unchanged_minutes=old.minutes)
            for r, old in zip(rows, make_answer(replace(request, what_if=None), original).rows)
        ]
    return Predictions(request, source, costs, tuple(rows))
