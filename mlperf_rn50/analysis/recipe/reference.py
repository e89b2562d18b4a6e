"""The evaluations of a run beside those of earlier runs, at the same point of the schedule. Pure.

A band at a point is the mean of the reference runs there, and three times the spread that one more run of them would
have. A run that is below its band twice in a row is behind: that is the alarm.
"""
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from mlperf_rn50.analysis.recipe.choose import SAME_BATCH, is_within
from mlperf_rn50.analysis.recipe.differences import LIKE_BATCH
from mlperf_rn50.analysis.sets.run_set import KnownRun, KnownSet, Recipe
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.text import plural, some

# Runs that a spread can be told from.
MIN_RUNS = 2
# A like recipe: factors of the learning rate for an image of the batch, and of the schedule's length.
_LIKE_RATE, _LIKE_LENGTH = 1.5, 1.2
_SAME_EPOCHS = 0.5  # a schedule given in steps is not a whole number of epochs
_SHOWN, _MAX_NAME = 3, 120  # names in a sentence, characters of one
How = Literal['same', 'like', 'named']


def _is_equal(a: float | None, b: float | None) -> bool:
    """Whether two values agree, as far as they are known."""
    return a is None or b is None or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-9)


def _has_same_decay(a: Recipe, b: Recipe) -> bool:
    """Whether the learning rates of two recipes fall in the same way and, but for step, over the same epochs."""
    if a.decay is None or b.decay is None:
        return True
    return a.decay == b.decay and a.step_epochs == b.step_epochs and (a.decay == 'step' or _has_same_length(a, b))


def _has_same_length(a: Recipe, b: Recipe) -> bool:
    return None in (a.decay_epochs, b.decay_epochs) or abs(
        a.decay_epochs - b.decay_epochs) <= _SAME_EPOCHS  # type: ignore[operator]


def has_same_recipe(a: Recipe, b: Recipe) -> bool:
    """Whether optimizer, batch and learning rate of two recipes are the same, and all else that both have."""
    names = ('warmup_epochs', 'poly_power', 'end_lr', 'weight_decay', 'momentum', 'nesterov', 'label_smoothing')
    return (a.opt_name is not None and a.opt_name == b.opt_name
            and is_within(a.global_batch_size, b.global_batch_size, SAME_BATCH)
            and a.base_lr is not None and b.base_lr is not None and _is_equal(a.base_lr, b.base_lr)
            and _has_same_decay(a, b) and all(_is_equal(getattr(a, name), getattr(b, name)) for name in names))


def has_like_recipe(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes are alike: optimizer and kind of decay, batch, rate for an image and length nearly so."""
    if (a.opt_name, a.decay, a.step_epochs) != (b.opt_name, b.decay, b.step_epochs) or not a.base_lr or not b.base_lr:
        return False
    rates = a.base_lr / a.global_batch_size, b.base_lr / b.global_batch_size
    return (is_within(a.global_batch_size, b.global_batch_size, LIKE_BATCH) and is_within(*rates, _LIKE_RATE)
            and (a.decay == 'step' or is_within(a.decay_epochs, b.decay_epochs, _LIKE_LENGTH)))


def _scale(own: Recipe, other: Recipe) -> float:
    """Return the epochs of another schedule that correspond to one of the own."""
    if 'step' in (own.decay, other.decay) or not own.decay_epochs or not other.decay_epochs:
        return 1.0
    return 1.0 if _has_same_length(own, other) else other.decay_epochs / own.decay_epochs


def schedule_phase(recipe: Recipe, epoch: float) -> int | None:
    """Return the part of a schedule in which runs differ about as much: a tenth of it, or between two drops."""
    if recipe.decay == 'step' and recipe.step_epochs:
        return -1 - sum(epoch > e for e in recipe.step_epochs)
    return round(10 * min(1.0, epoch / recipe.decay_epochs)) if recipe.decay_epochs else None


@cache
def _variances(known: KnownSet) -> list[tuple[int, int, float]]:
    """Return the part of the schedule, degrees of freedom and variance of each evaluation of two or more runs."""
    at: dict[int, list[float]] = defaultdict(list)
    for run in known.converged:
        for epoch, accuracy in run.curve:
            at[epoch].append(accuracy)
    return [(phase, len(values) - 1, statistics.variance(values)) for epoch, values in at.items()
            if len(values) >= MIN_RUNS and (phase := schedule_phase(known.recipe, epoch)) is not None]


def typical_spreads(sets: Sequence[KnownSet]) -> dict[int, float]:
    """Return the spread of the runs of a set as a fraction, pooled over sets, by the part of the schedule."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for known in sets:
        for phase, freedom, variance in _variances(known):
            found[phase].append((freedom, variance))
    return {phase: math.sqrt(sum(n * v for n, v in pairs) / sum(n for n, _ in pairs))
            for phase, pairs in found.items()}


@dataclass(frozen=True)
class Reference:
    """Earlier runs that a run is compared with: those of one or more sets that reached their target.

    Args:
        how: same or like, of their recipes; named, where a user named runs of another one.
        spreads: of typical_spreads: the least that runs differ.
        eval_samples: images of an evaluation, whose chance is a spread too; None where spreads are known.
    """

    how: How
    recipe: Recipe
    sets: tuple[KnownSet, ...]
    spreads: Mapping[int, float] = field(default_factory=dict)
    eval_samples: int | None = None

    @property
    def runs(self) -> Iterator[tuple[KnownRun, float]]:
        """Each run, and the epochs of it that correspond to one of the run that is compared."""
        return ((run, _scale(self.recipe, known.recipe)) for known in self.sets for run in known.converged)

    @property
    def num_runs(self) -> int:
        return sum(len(known.converged) for known in self.sets)


def dataset_of(config: Config) -> str | None:
    """Return the data set of a configuration as known sets have it: None for ImageNet."""
    return None if config.data.dataset == IMAGENET and not config.data.synthetic else config.data.dataset


def recipe_of(config: Config, global_batch_size: int) -> Recipe:
    """Return the recipe of a configuration, for a number of images per step."""
    o, s, t = config.optimizer, config.schedule, config.train
    return Recipe(o.name, global_batch_size, s.base_lr, s.warmup_epochs, s.decay, s.decay_epochs,
                  s.end_lr if s.decay != 'step' else None, s.poly_power if s.decay == 'poly' else None,
                  s.step_epochs if s.decay == 'step' else None, o.weight_decay, o.momentum, t.label_smoothing,
                  t.target_accuracy, t.eval_period, t.eval_offset + 1, o.nesterov if o.name == 'sgd' else None)


def find_published(recipe: Recipe, published: Sequence[KnownSet]) -> Reference | None:
    """Return the published sets that an ImageNet recipe is compared with: of the same recipe, else of like ones."""
    return _find(recipe, published, typical_spreads(published), None)


def find_named(recipe: Recipe, dataset: str | None, eval_samples: int, named: Sequence[KnownSet],
               published: Sequence[KnownSet]) -> Reference:
    """Return the sets that a recipe is compared with, of those that a user named, if need be of one other recipe.

    Args:
        dataset: of the run; None for ImageNet.
        published: the sets whose spreads count on ImageNet.

    Raises:
        UserError: none of them can be a reference.
    """
    own = [s for s in named if s.dataset == dataset and s.converged]
    if not own:
        what = sorted({s.dataset or IMAGENET for s in named if s.converged})
        got = f'runs on {some(what, _SHOWN)}' if what else 'no run that reached its target'
        raise UserError(f'run.reference: got {got}, expected runs on {dataset or IMAGENET} that did')
    spreads, samples = (typical_spreads(published), None) if dataset is None else ({}, eval_samples)
    if found := _find(recipe, own, spreads, samples):
        return found
    if not all(has_same_recipe(own[0].recipe, s.recipe) for s in own):
        raise UserError(f'run.reference: got {len(own)} sets of several recipes, none like that of this run '
                        f'({describe(recipe)}); name the runs of one recipe')
    return Reference('named', recipe, tuple(own), spreads, samples)


def _find(recipe: Recipe, sets: Sequence[KnownSet], spreads: Mapping[int, float],
          eval_samples: int | None) -> Reference | None:
    same, like = (tuple(s for s in sets if s.converged and fits(recipe, s.recipe))
                  for fits in (has_same_recipe, has_like_recipe))
    if not same and not like:
        return None
    return Reference('same' if same else 'like', recipe, same or like, spreads, eval_samples)


def describe(recipe: Recipe) -> str:
    """Return a recipe in a few words."""
    length = '' if recipe.decay == 'step' or recipe.decay_epochs is None else f' over {recipe.decay_epochs:g} epochs'
    rate = '' if recipe.base_lr is None else f', learning rate {recipe.base_lr:g}'
    return f'{recipe.opt_name or "?"}, batch {recipe.global_batch_size}{rate}, {recipe.decay or "decay ?"}{length}'


def name_of(known: KnownSet) -> str:
    """Return the name of a set in a list of sources."""
    is_folder = not known.source.startswith('published')
    return printable((known.source if is_folder else f'{known.source} {known.org or ""} {known.name}')[-_MAX_NAME:])


def introduce(reference: Reference) -> str:
    """Return the reference of a run in a line."""
    sets = f'{plural(len(reference.sets), "set")} ({some([name_of(s) for s in reference.sets], _SHOWN)})'
    text = f'reference: {plural(reference.num_runs, "run")} of {sets}'
    other = describe(reference.sets[0].recipe)
    return text + {'same': ', of the same recipe',
                   'like': f', of like recipes ({other}), at the same part of the schedule',
                   'named': f', of another recipe ({other}), as named'}[reference.how]
