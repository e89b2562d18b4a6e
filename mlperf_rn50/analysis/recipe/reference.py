"""Find reference runs for a run: runs with the same or a similar recipe, or runs named by the user.
Pure functions."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from mlperf_rn50.analysis.recipe.choose import SAME_BATCH, is_within
from mlperf_rn50.analysis.recipe.differences import SIMILAR_BATCH
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN, Run
from mlperf_rn50.text import plural, printable, some

MIN_RUNS = 2  # minimum number of runs to compute a spread
# Largest ratios of learning rate per image and of schedule length between similar recipes.
_SIMILAR_RATE, _SIMILAR_LENGTH = 1.5, 1.2
# difference up to which schedule lengths count as equal, because those logged in steps are inexact
_SAME_EPOCHS = 0.5
_WHOLE = 'all of ImageNet'
_SHOWN, _MAX_NAME = 3, 120  # maximum numbers of names per message and of characters per name


def _is_equal(a: float | None, b: float | None) -> bool:
    """Return whether two values are equal or one is unknown."""
    return a is None or b is None or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-9)


def _has_same_decay(a: Recipe, b: Recipe) -> bool:
    """Return whether kind and length of the decay (for step decay: the drops) are equal, or unknown
    in one recipe."""
    return (
        None in (a.decay, b.decay)
        or a.decay == b.decay
        and a.step_epochs == b.step_epochs
        and (a.decay == 'step' or _has_same_length(a, b))
    )


def _has_same_length(a: Recipe, b: Recipe) -> bool:
    if a.decay_epochs is None or b.decay_epochs is None:
        return True
    return abs(a.decay_epochs - b.decay_epochs) <= _SAME_EPOCHS


def has_same_recipe(a: Recipe, b: Recipe) -> bool:
    """Return whether optimizer, batch and learning rate are known and equal, and all other known
    values are equal."""
    if a.opt_name is None or a.opt_name != b.opt_name or None in (a.base_lr, b.base_lr):
        return False
    names = """base_lr warmup_epochs poly_power end_lr weight_decay momentum nesterov
        label_smoothing""".split()
    return (
        is_within(a.global_batch_size, b.global_batch_size, SAME_BATCH)
        and _has_same_decay(a, b)
        and all(_is_equal(getattr(a, name), getattr(b, name)) for name in names)
    )


def has_similar_recipe(a: Recipe, b: Recipe) -> bool:
    """Return whether optimizer and decay match, and batch, learning rate per image and schedule
    length are similar."""
    if (a.opt_name, a.decay, a.step_epochs) != (b.opt_name, b.decay, b.step_epochs):
        return False
    if not a.base_lr or not b.base_lr:
        return False
    rates = a.base_lr / a.global_batch_size, b.base_lr / b.global_batch_size
    return (
        is_within(a.global_batch_size, b.global_batch_size, SIMILAR_BATCH)
        and is_within(*rates, _SIMILAR_RATE)
        and (a.decay == 'step' or is_within(a.decay_epochs, b.decay_epochs, _SIMILAR_LENGTH))
    )


def _scale(recipe: Recipe, other: Recipe) -> float:
    """Return the number of epochs of the other schedule that correspond to one epoch of the
    first."""
    if 'step' in (recipe.decay, other.decay) or not recipe.decay_epochs or not other.decay_epochs:
        return 1.0
    return 1.0 if _has_same_length(recipe, other) else other.decay_epochs / recipe.decay_epochs


def schedule_phase(recipe: Recipe, epoch: float) -> int | None:
    """Return an epoch's part of the schedule: the nearest tenth or, for step decay, -1 minus the
    number of drops."""
    if recipe.decay == 'step' and recipe.step_epochs:
        return -1 - sum(epoch > e for e in recipe.step_epochs)
    return round(10 * min(1.0, epoch / recipe.decay_epochs)) if recipe.decay_epochs else None


@cache
def _variances(run_set: RunSet) -> list[tuple[int, int, float]]:
    """Return (part of the schedule, degrees of freedom, variance) for each epoch that two or more
    runs evaluated."""
    at = defaultdict(list)
    for run in run_set.converged:
        for epoch, accuracy in run.curve:
            at[epoch].append(accuracy)
    return [
        (phase, len(values) - 1, statistics.variance(values))
        for epoch, values in at.items()
        if len(values) >= MIN_RUNS and (phase := schedule_phase(run_set.recipe, epoch)) is not None
    ]


def typical_spreads(sets: Sequence[RunSet]) -> dict[int, float]:
    """Return the standard deviation of Top-1 among the runs of a set, pooled over sets, by part of
    the schedule."""
    found = defaultdict(list)
    for run_set in sets:
        for phase, freedom, variance in _variances(run_set):
            found[phase].append((freedom, variance))
    return {
        phase: math.sqrt(sum(n * v for n, v in pairs) / sum(n for n, _ in pairs))
        for phase, pairs in found.items()
    }


@dataclass(frozen=True)
class Reference:
    """Converged runs of one or more sets that a run is compared with."""

    # same recipe, similar recipes, or a different recipe named by the user
    how: Literal['same', 'like', 'named']
    recipe: Recipe  # of the compared run
    sets: tuple[RunSet, ...]
    # lower bounds by part of the schedule (typical_spreads)
    spreads: Mapping[int, float] = field(default_factory=dict)
    # images per evaluation, for the sampling error; None if spreads are known
    eval_samples: int | None = None

    @property
    def runs(self) -> Iterator[tuple[Run, float]]:
        """Pairs of a reference run and the number of its epochs that correspond to one epoch of the
        compared run."""
        return (
            (run, _scale(self.recipe, run_set.recipe))
            for run_set in self.sets
            for run in run_set.converged
        )

    @property
    def num_runs(self) -> int:
        return sum(len(run_set.converged) for run_set in self.sets)


def dataset_of(config: Config) -> str | None:
    """Return the data set of a configuration, or None for all of ImageNet, like other_dataset of a
    run set."""
    data = config.data
    is_whole = data.num_train == IMAGENET_TRAIN
    return None if data.dataset == IMAGENET and is_whole and not data.synthetic else data.dataset


def recipe_of(config: Config, global_batch_size: int) -> Recipe:
    """Return the recipe of a configuration, without values that have no effect."""
    o, s, t = config.optimizer, config.schedule, config.train
    return Recipe(
        opt_name=o.name,
        global_batch_size=global_batch_size,
        base_lr=s.base_lr,
        warmup_epochs=s.warmup_epochs,
        decay=s.decay,
        decay_epochs=s.decay_epochs,
        end_lr=s.end_lr if s.decay != 'step' else None,
        poly_power=s.poly_power if s.decay == 'poly' else None,
        step_epochs=s.step_epochs if s.decay == 'step' else None,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        label_smoothing=t.label_smoothing,
        target_accuracy=t.target_accuracy,
        eval_period=t.eval_period,
        first_eval_epoch=t.eval_offset + 1,
        nesterov=o.nesterov if o.name == 'sgd' else None,
    )


def find_published(recipe: Recipe, published: Sequence[RunSet]) -> Reference | None:
    """Return the published sets with the same recipe or, if there are none, those with similar
    recipes."""
    return _find(recipe, published, typical_spreads(published), None)


def find_named(
    recipe: Recipe,
    dataset: str | None,
    eval_samples: int,
    named: Sequence[RunSet],
    published: Sequence[RunSet],
) -> Reference:
    """Return the reference among sets named by the user: same recipe, similar recipes, or a single
    different recipe.

    On ImageNet (dataset None), the spreads of the published sets apply. Raise UserError if no set
    can be a reference.
    """
    usable = [s for s in named if s.other_dataset == dataset and s.converged]
    if not usable:
        others = sorted({s.other_dataset or _WHOLE for s in named if s.converged})
        got = f'runs on {some(others, _SHOWN)}' if others else 'no converged run'
        raise UserError(f'run.reference: got {got}, expected converged runs on {dataset or _WHOLE}')
    spreads, samples = (typical_spreads(published), None) if dataset is None else ({}, eval_samples)
    if found := _find(recipe, usable, spreads, samples):
        return found
    if not all(has_same_recipe(usable[0].recipe, s.recipe) for s in usable[1:]):
        raise UserError(
            f'run.reference: got {len(usable)} sets with different recipes, expected one recipe or '
            f'recipes similar to that of this run ({describe_recipe(recipe)})'
        )
    return Reference('named', recipe, tuple(usable), spreads=spreads, eval_samples=samples)


def _find(
    recipe: Recipe, sets: Sequence[RunSet], spreads: Mapping[int, float], eval_samples: int | None
) -> Reference | None:
    same, similar = (
        tuple(s for s in sets if s.converged and fits(recipe, s.recipe))
        for fits in (has_same_recipe, has_similar_recipe)
    )
    if not same and not similar:
        return None
    how: Literal['same', 'like'] = 'same' if same else 'like'
    return Reference(how, recipe, same or similar, spreads=spreads, eval_samples=eval_samples)


def describe_recipe(recipe: Recipe) -> str:
    """Format optimizer, batch, learning rate, warm-up epochs and decay of a recipe, as far as they
    are known."""
    parts = [recipe.opt_name, f'batch {recipe.global_batch_size}']
    if recipe.base_lr is not None:
        parts.append(f'learning rate {recipe.base_lr:g}')
    if recipe.warmup_epochs is not None:
        parts.append(f'warm-up {recipe.warmup_epochs:g}')
    if recipe.decay and recipe.decay != 'step' and recipe.decay_epochs is not None:
        parts.append(f'{recipe.decay} over {recipe.decay_epochs:g} epochs')
    else:
        parts.append(recipe.decay)
    return ', '.join(filter(None, parts))


def set_name(run_set: RunSet) -> str:
    """Return the path of a set, or the name of a published one."""
    name = run_set.source
    if run_set.is_published:
        name += f' {run_set.org or ""} {run_set.name}'
    return printable(name[-_MAX_NAME:])


def introduce(reference: Reference) -> str:
    names = some([set_name(s) for s in reference.sets], _SHOWN)
    other = describe_recipe(reference.sets[0].recipe)
    how = {
        'same': 'same recipe',
        'like': f'similar recipes ({other}), compared at the same fraction of the schedule',
        'named': f'a different recipe ({other}), named by run.reference',
    }[reference.how]
    runs, sets = plural(reference.num_runs, 'run'), plural(len(reference.sets), 'set')
    return f'reference: {runs} of {sets} ({names}), {how}'
