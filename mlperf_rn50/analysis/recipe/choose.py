"""Choose a recipe for a batch from the published sets, or interpolate it between two batches. Pure
functions."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from mlperf_rn50 import config as cfg
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.text import grouped, plural, printable

# Largest ratio of batches that count as equal. Published sets have the same learning rate, warm-up
# and schedule at 1,632 and 1,664 images, and at 3,264 and 3,328.
SAME_BATCH = 1.025
# Fields without which a recipe cannot be trained.
_NEEDED = """opt_name base_lr warmup_epochs decay weight_decay momentum eval_period
    first_eval_epoch""".split()
_RELIABLE = 0.9  # minimum fraction of a reliable recipe's runs that reach the target
# Rounds with comparable recipes.
_GENERATIONS = ('v0.7 and later', 'v0.6', 'v0.5')
# Schedule length in epochs that the submissions with step decay declare; their runs converge long
# before its end.
STEP_SCHEDULE_EPOCHS = 100.0


def reached_epoch(run: Run, target: float) -> int | None:
    """Return the number of epochs before the first evaluation that reached a target, or None if
    none did."""
    return next((epoch for epoch, accuracy in run.curve if accuracy >= target), None)


def is_within(a: float | None, b: float | None, factor: float) -> bool:
    """Return whether two values are known and differ by at most this factor."""
    return bool(a and b) and max(a, b) <= factor * min(a, b)  # type: ignore[type-var, operator]


@dataclass(frozen=True)
class RecipeGroup:
    """A recipe and one or more sets trained with it. target is the recipe's target or a lower
    one."""

    recipe: Recipe
    generation: str
    sets: Sequence[RunSet]
    target: float

    @property
    def batch(self) -> int:
        return self.recipe.global_batch_size

    @cached_property
    def runs(self) -> list[Run]:
        return [r for s in self.sets for r in s.readable]

    def epochs_of(self, run_set: RunSet) -> list[int | None]:
        return [reached_epoch(r, self.target) for r in run_set.readable]

    @cached_property
    def epochs(self) -> list[int]:
        """Epochs to the target, for each run that reached it, in ascending order."""
        return sorted(e for s in self.sets for e in self.epochs_of(s) if e is not None)

    @property
    def mean_epochs(self) -> float:
        return statistics.fmean(self.epochs)

    @property
    def unlogged(self) -> frozenset[str]:
        """Fields that are not logged and were taken from the submitted settings."""
        return frozenset(name for s in self.sets for name in s.unlogged)

    @property
    def is_whole(self) -> bool:
        """True if the recipe has all values that a run needs."""
        ends = 'step_epochs' if self.recipe.decay == 'step' else 'decay_epochs'
        return None not in (getattr(self.recipe, name) for name in (*_NEEDED, ends))

    @property
    def rounds(self) -> str:
        return ', '.join(sorted({s.round for s in self.sets}))

    @property
    def text(self) -> str:
        """Description with systems, rounds, batch and convergence."""
        first, others = self.sets[0], len(self.sets) - 1
        name = printable(f'{first.org or "unnamed"} {first.name}')
        if others:
            name += f' and {plural(others, "other")}'
        return (
            f'{name} ({self.rounds}, batch {self.batch:,}, {len(self.epochs)} of {len(self.runs)} '
            f'runs converged after {range_text(self.epochs)} epochs)'
        )


def group(
    sets: Sequence[RunSet], opt_name: str | None = None, target: float | None = None
) -> list[RecipeGroup]:
    """Return recipes with which ImageNet runs reached a target (None: that of their set), by batch,
    newest first."""
    groups = defaultdict(list)
    for run_set in sets:
        recipe, declared = run_set.recipe, run_set.recipe.target_accuracy
        if not run_set.is_imagenet or declared is None or declared < (target or 0):
            continue
        if opt_name not in (None, recipe.opt_name):
            continue
        if recipe.decay_epochs is not None:  # lengths logged in steps are inexact
            recipe = replace(recipe, decay_epochs=round(recipe.decay_epochs, 2))
        generation = run_set.round if run_set.round in _GENERATIONS else _GENERATIONS[0]
        groups[recipe, generation, target or declared].append(run_set)
    found = [
        RecipeGroup(recipe, generation, members, goal)
        for (recipe, generation, goal), members in groups.items()
    ]
    return sorted((p for p in found if p.epochs), key=lambda p: (p.batch, _age(p), -len(p.runs)))


@cache
def published_recipes(opt_name: str | None, target: float | None) -> tuple[RecipeGroup, ...]:
    """Return the result of group for the published MXNet sets of the closed division."""
    return tuple(group(load_published(), opt_name, target))


def _age(published: RecipeGroup) -> int:
    return _GENERATIONS.index(published.generation)


def _recipes_at(recipes: Sequence[RecipeGroup], batch: int) -> list[RecipeGroup]:
    """Return the recipes at a batch or an equivalent one."""
    return [p for p in recipes if is_within(p.batch, batch, SAME_BATCH)]


def families(recipes: Sequence[RecipeGroup]) -> list[list[RecipeGroup]]:
    """Group recipes by optimizer and generation. Sort groups by generation, newest first, then
    size, largest first."""
    groups = grouped(recipes, lambda p: (_age(p), p.recipe.opt_name))
    return sorted(groups.values(), key=lambda family: (_age(family[0]), -len(family)))


def _best_of_sizes(family: Sequence[RecipeGroup]) -> list[RecipeGroup]:
    """Return the best complete recipe of each batch, the smallest batch first."""
    sizes = sorted({p.batch for p in family})
    best = (_best([p for p in family if p.batch == size], size) for size in sizes)
    return [p for p in best if p]


def frontier(family: Sequence[RecipeGroup]) -> list[RecipeGroup]:
    """Return the best complete recipe of each batch. Omit a batch if a larger one takes fewer
    epochs."""
    found: list[RecipeGroup] = []
    for best in reversed(_best_of_sizes(family)):
        if not found or best.mean_epochs <= found[-1].mean_epochs:
            found.append(best)
    return found[::-1]


def adjacent(
    family: Sequence[RecipeGroup], batch: int
) -> tuple[RecipeGroup | None, RecipeGroup | None]:
    """Return the recipes of the frontier at the next smaller and at the next larger batch.

    On a side without one, return the next other recipe, or None.
    """
    found = frontier(family), _best_of_sizes(family)
    return (
        next((p for recipes in found for p in reversed(recipes) if p.batch < batch), None),
        next((p for recipes in found for p in recipes if p.batch > batch), None),
    )


def recipes_near(recipes: Sequence[RecipeGroup], batch: int) -> tuple[list[RecipeGroup], bool]:
    """Return (recipes at a batch, True), or (adjacent recipes of each optimizer and generation,
    False)."""
    if found := _recipes_at(recipes, batch):
        return found, True
    return [p for family in families(recipes) for p in adjacent(family, batch) if p], False


@dataclass(frozen=True)
class Choice:
    """The recipe to train with at the requested batch, its sources and the expected epochs."""

    recipe: Recipe
    kind: Literal['known', 'between']
    sources: Sequence[RecipeGroup]  # one, or one at a smaller and one at a larger batch
    epochs: float

    @property
    def target(self) -> float:
        return self.sources[0].target

    @property
    def num_converged(self) -> int:
        return sum(len(p.epochs) for p in self.sources)

    @property
    def num_runs(self) -> int:
        return sum(len(p.runs) for p in self.sources)

    @property
    def num_sets(self) -> int:
        """Number of the sources' sets in which at least one run reached the target."""
        return sum(any(p.epochs_of(s)) for p in self.sources for s in p.sets)

    @property
    def epochs_range(self) -> tuple[int, int]:
        """Fewest and most epochs to the target among the sources."""
        return min(p.epochs[0] for p in self.sources), max(p.epochs[-1] for p in self.sources)

    @property
    def source_text(self) -> str:
        return ' and '.join(p.text for p in self.sources)


def range_text(numbers: Sequence[int]) -> str:
    """Return a range such as '35' or '35 to 39'."""
    low, high = min(numbers), max(numbers)
    return f'{low:,}' if low == high else f'{low:,} to {high:,}'


def rank(published: RecipeGroup, batch: int) -> tuple:
    """Return a sort key: reliable, fewest epochs, exact batch, highest success rate, newest round.

    The success rate includes one added success and one added failure, so that 59 of 60 ranks above
    5 of 5.
    """
    good, runs = len(published.epochs), len(published.runs)
    return (
        good / runs < _RELIABLE,
        round(published.mean_epochs, 1),
        published.batch != batch,
        -(good + 1) / (runs + 2),
        [-ord(c) for c in published.rounds.rpartition(', ')[2]],
    )


def _best(recipes: Sequence[RecipeGroup], batch: int) -> RecipeGroup | None:
    return min((p for p in recipes if p.is_whole), key=lambda p: rank(p, batch), default=None)


def choose_recipe(
    batch: int,
    opt_name: str | None = None,
    target: float | None = None,
    sets: Sequence[RunSet] | None = None,
) -> Choice:
    """Return the best recipe at a batch, or one interpolated between two batches, from the
    published sets by default.

    Raise ConfigError if no published set has this batch and none can be interpolated.
    """
    recipes = published_recipes(opt_name, target) if sets is None else group(sets, opt_name, target)
    if best := _best(_recipes_at(recipes, batch), batch):
        recipe = replace(best.recipe, global_batch_size=batch, target_accuracy=best.target)
        return Choice(recipe, 'known', (best,), epochs=best.mean_epochs)
    whole = families([p for p in recipes if p.is_whole])
    for family in whole:
        below, above = adjacent(family, batch)
        if not below or not above or below.target != above.target:
            continue
        if below.recipe.decay == above.recipe.decay:
            return interpolate(below, above, batch)
    wanted = f'{opt_name or "any optimizer"}{"" if target is None else f", {100 * target:.4g} %"}'
    texts = [
        f'{f[0].recipe.opt_name} of {f[0].generation} {range_text([p.batch for p in f])}'
        for f in whole
    ]
    raise ConfigError(
        f'global batch: got {batch:,} ({wanted}), expected a batch in the range of converged '
        'published sets: '
        f'{"; ".join(texts) or "there are none; choose another optimizer or target"}'
    )


def _mix(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def interpolate(below: RecipeGroup, above: RecipeGroup, batch: int) -> Choice:
    """Interpolate the learning rate as a power of the batch, and warm-up, schedule length and
    expected epochs linearly.

    All other values are from the nearer recipe. docs/recipes.md lists the errors at published
    batches.
    """
    low, high = below.recipe, above.recipe
    power = math.log(batch / below.batch) / math.log(above.batch / below.batch)
    share = (batch - below.batch) / (above.batch - below.batch)
    assert low.base_lr and high.base_lr
    assert low.warmup_epochs is not None and high.warmup_epochs is not None
    lr = math.exp(_mix(math.log(low.base_lr), math.log(high.base_lr), power))
    length = None
    if low.decay_epochs is not None and high.decay_epochs is not None:
        length = float(round(_mix(low.decay_epochs, high.decay_epochs, share)))
    recipe = replace(
        low if power < 0.5 else high,
        global_batch_size=batch,
        base_lr=float(f'{lr:.3g}'),
        warmup_epochs=round(_mix(low.warmup_epochs, high.warmup_epochs, share), 1),
        decay_epochs=length,
        target_accuracy=below.target,
    )
    epochs = _nearest_evaluation(_mix(below.mean_epochs, above.mean_epochs, share), recipe)
    return Choice(recipe, 'between', (below, above), epochs=epochs)


def _nearest_evaluation(epochs: float, recipe: Recipe) -> float:
    """Return the evaluation epoch within the schedule that is nearest to a number of epochs."""
    assert recipe.eval_period and recipe.first_eval_epoch is not None
    num = max(0, round((epochs - recipe.first_eval_epoch) / recipe.eval_period))
    return float(
        min(recipe.first_eval_epoch + num * recipe.eval_period, recipe.last_eval_epoch or math.inf)
    )


# NVIDIA's submissions add the gradients of all images of a step, so their scale is the global
# batch, 1,664 or more (rescale_grad in fit.py, SoftmaxOutput without normalization; MLPerf v0.7).
LOSS_SCALE = 2048.0


def make_config(
    choice: Choice, num_nodes: int | None = None, ranks_per_node: int | None = None
) -> cfg.Config:
    """Return the configuration of a recipe for GPUs, like the files in launch/configs."""
    recipe, batch, layout = choice.recipe, choice.recipe.global_batch_size, ''
    if num_nodes and ranks_per_node:
        layout = f'_{num_nodes}x{ranks_per_node}'
    assert recipe.eval_period and recipe.eval_offset is not None
    assert recipe.momentum is not None and recipe.weight_decay is not None
    names = {f.name for f in dataclasses.fields(cfg.ScheduleConfig)} & vars(recipe).keys()
    schedule = {name: v for name in names if (v := getattr(recipe, name)) is not None}
    result = cfg.Config(
        run=cfg.RunConfig(
            dir=f'logs/recipe_{batch}{layout}',
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            clear_caches=True,
        ),
        data=cfg.DataConfig(
            decoder='mixed', num_threads=6, pad_to_4_channels=True, last_batch='wrap'
        ),
        optimizer=cfg.OptimizerConfig(
            name=recipe.opt_name,  # type: ignore[arg-type]
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        ),
        schedule=cfg.ScheduleConfig(**{'decay_epochs': STEP_SCHEDULE_EPOCHS, **schedule}),
        train=cfg.TrainConfig(
            device='gpu',
            precision='float16',
            global_batch_size=batch,
            loss_scale=LOSS_SCALE,
            loss_scale_policy='static',
            label_smoothing=recipe.label_smoothing or 0.0,
            target_accuracy=choice.target,
            eval_period=recipe.eval_period,
            eval_offset=recipe.eval_offset,
        ),
    )
    cfg.check_values(result)
    return result


def check_shares(batch: int, num_ranks: int) -> None:
    """Raise ConfigError for a batch that is not divisible by the number of ranks."""
    if batch % num_ranks:
        fit = max(1, round(batch / num_ranks)) * num_ranks
        raise ConfigError(
            f'--global-batch-size: got {batch} for {num_ranks} ranks (--nodes x --ranks-per-node), '
            f'expected a multiple of {num_ranks}, such as {fit}'
        )
