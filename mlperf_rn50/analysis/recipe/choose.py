"""The recipe to train with at a batch: of published sets at it or, between two batches, of both. Pure."""
import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mlperf_rn50 import config as cfg
from mlperf_rn50.analysis.sets.run_set import KnownRun, KnownSet, Recipe, load_published
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.text import plural

# Batches so near are one: published sets have one learning rate, warm-up and schedule at 1,632 and 1,664 images, and
# at 3,264 and 3,328.
SAME_BATCH = 1.025
# Of a recipe that counts as reliable: nine of ten runs or more reach the target.
_RELIABLE = 0.9
_GENERATIONS = ('v0.7 and later', 'v0.6', 'v0.5')
# The submissions whose rates fall in steps declare so many epochs, and end long before.
STEP_SCHEDULE_EPOCHS = 100.0


def generation_of(known: KnownSet) -> str:
    """Return the rounds whose recipes were chosen alike: v0.5, v0.6, or all after them."""
    return known.round if known.round in _GENERATIONS else _GENERATIONS[0]


def reached_epoch(run: KnownRun, target: float) -> int | None:
    """Return the epochs trained at the first evaluation at or above a target; None where there is none."""
    return next((epoch for epoch, accuracy in run.curve if accuracy >= target), None)


def is_within(a: float | None, b: float | None, factor: float) -> bool:
    """Whether two values are known, and the larger one is at most so many times the other."""
    return bool(a and b) and max(a, b) <= factor * min(a, b)  # type: ignore[type-var, operator]


@dataclass(frozen=True)
class Published:
    """A recipe, and the one or more sets that were trained with it.

    Args:
        target: the recipe's own, or a lower one.
    """

    recipe: Recipe
    generation: str
    sets: tuple[KnownSet, ...]
    target: float

    @cached_property
    def runs(self) -> tuple[KnownRun, ...]:
        return tuple(r for s in self.sets for r in s.runs)

    def epochs_of(self, known: KnownSet) -> list[int | None]:
        """Return the epochs to the target of each run of a set."""
        return [reached_epoch(r, self.target) for r in known.runs]

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        """To the target, of every run that reached it, fewest first."""
        return tuple(sorted(e for s in self.sets for e in self.epochs_of(s) if e is not None))

    @property
    def mean_epochs(self) -> float:
        return statistics.fmean(self.epochs)

    @property
    def unlogged(self) -> frozenset[str]:
        """Fields of the recipe that only the submitted settings have."""
        return frozenset(name for s in self.sets for name in s.unlogged)

    @property
    def is_whole(self) -> bool:
        """Whether it has all that a run needs: a schedule with an end, or with steps."""
        r = self.recipe
        ends = r.step_epochs if r.decay == 'step' else r.decay_epochs
        return None not in (r.opt_name, r.base_lr, r.warmup_epochs, r.decay, ends, r.weight_decay, r.momentum,
                            r.eval_period, r.first_eval_epoch)

    @property
    def systems(self) -> str:
        """The first system, and the number of others, as text."""
        first, others = self.sets[0], len(self.sets) - 1
        name = printable(f'{first.org or "unnamed"} {first.name}')
        return f'{name} and {plural(others, "other")}' if others else name

    @property
    def rounds(self) -> str:
        return ', '.join(sorted({s.round for s in self.sets}))


def fold(sets: Sequence[KnownSet], opt_name: str | None = None, target: float | None = None) -> list[Published]:
    """Return the recipes of sets of ImageNet that converged, by batch, newest generation first; equal ones are one.

    Args:
        opt_name: sgd or lars; None for both.
        target: to reach; sets that were made for less do not count. None for the own one of each.
    """
    groups: dict[tuple[Recipe, str, float], list[KnownSet]] = {}
    for known in sets:
        recipe, own = known.recipe, known.recipe.target_accuracy
        if known.is_imagenet and own is not None and opt_name in (None, recipe.opt_name) and own >= (target or 0):
            if recipe.decay_epochs is not None:  # logs have it in steps, too
                recipe = replace(recipe, decay_epochs=round(recipe.decay_epochs, 2))
            groups.setdefault((recipe, generation_of(known), target or own), []).append(known)
    found = [Published(recipe, generation, tuple(members), to_reach)
             for (recipe, generation, to_reach), members in groups.items()]
    return sorted((p for p in found if p.epochs), key=lambda p: (p.recipe.global_batch_size, _age(p), -len(p.runs)))


def _age(published: Published) -> int:
    """Return 0 for the newest generation, more for older ones."""
    return _GENERATIONS.index(published.generation)


def at_batch(recipes: Sequence[Published], batch: int) -> list[Published]:
    """Return the recipes of a batch, or of one so near that it is the same recipe."""
    return [p for p in recipes if is_within(p.recipe.global_batch_size, batch, SAME_BATCH)]


def families(recipes: Sequence[Published]) -> list[list[Published]]:
    """Return the recipes by optimizer and generation; newest generation first, then most recipes first."""
    groups: dict[tuple[int, str | None], list[Published]] = {}
    for p in recipes:
        groups.setdefault((_age(p), p.recipe.opt_name), []).append(p)
    return [groups[key] for key in sorted(groups, key=lambda k: (k[0], -len(groups[k])))]


def _next_to(family: Sequence[Published], batch: int) -> tuple[list[Published], list[Published]]:
    """Return the recipes of the largest batch below, and of the smallest above."""
    sizes = [p.recipe.global_batch_size for p in family]
    below, above = max((s for s in sizes if s < batch), default=0), min((s for s in sizes if s > batch), default=0)
    return ([p for p in family if p.recipe.global_batch_size == below],
            [p for p in family if p.recipe.global_batch_size == above])


def around(recipes: Sequence[Published], batch: int) -> list[Published]:
    """Return the recipes of a batch, else the next below and above of each optimizer and generation."""
    return at_batch(recipes, batch) or [p for family in families(recipes) for side in _next_to(family, batch)
                                        for p in side]


@dataclass(frozen=True)
class Choice:
    """The recipe to train with at a batch.

    Args:
        recipe: with the batch that was asked for, and the target.
        kind: known, of sets at this batch; or between, of sets below and above.
        sources: one, or the one below and the one above.
    """

    recipe: Recipe
    kind: Literal['known', 'between']
    sources: tuple[Published, ...]
    epochs: float
    target: float

    @property
    def num_converged(self) -> int:
        """Runs of the sources that reached the target."""
        return sum(len(p.epochs) for p in self.sources)

    @property
    def num_runs(self) -> int:
        return sum(len(p.runs) for p in self.sources)

    @property
    def epochs_range(self) -> tuple[int, int]:
        """Fewest and most epochs of a run of the sources."""
        return min(p.epochs[0] for p in self.sources), max(p.epochs[-1] for p in self.sources)

    @property
    def said_by(self) -> str:
        """The sources, in a sentence."""
        parts = [f'{p.systems} ({p.rounds}, batch {p.recipe.global_batch_size:,}, {len(p.epochs)} of {len(p.runs)} '
                 f'runs after {range_text(p.epochs)} epochs)' for p in self.sources]
        return parts[0] if self.kind == 'known' else f'between {parts[0]} and {parts[1]}'


def range_text(numbers: Sequence[int]) -> str:
    """Return the range as text, such as 35, or 35 to 39."""
    low, high = min(numbers), max(numbers)
    return f'{low:,}' if low == high else f'{low:,} to {high:,}'


def _rank(published: Published, batch: int) -> tuple:
    """Smaller is better: newest generation, reliable, at the very batch, converged most often, fewest epochs.

    One success and one failure are added to the runs that there were: 59 of 60 says more than 5 of 5.
    """
    good, runs = len(published.epochs), len(published.runs)
    return (_age(published), good / runs < _RELIABLE, published.recipe.global_batch_size != batch,
            -(good + 1) / (runs + 2), published.mean_epochs, [-ord(c) for c in published.rounds])


def _best(recipes: Sequence[Published], batch: int) -> Published | None:
    return min((p for p in recipes if p.is_whole), key=lambda p: _rank(p, batch), default=None)


def choose_recipe(batch: int, opt_name: str | None = None, target: float | None = None,
                  sets: Sequence[KnownSet] | None = None) -> Choice:
    """Return the recipe to train with at a batch: see _rank; without sets at it, between two batches: see interpolate.

    Args:
        opt_name: sgd or lars; None for either.
        target: None for the one that the recipe was made for.
        sets: to choose from; None for the published ones.

    Raises:
        ConfigError: no set is known at the batch, nor on both sides of it.
    """
    recipes = fold(load_published() if sets is None else sets, opt_name, target)
    if best := _best(at_batch(recipes, batch), batch):
        recipe = replace(best.recipe, global_batch_size=batch, target_accuracy=best.target)
        return Choice(recipe, 'known', (best,), best.mean_epochs, best.target)
    for family in families([p for p in recipes if p.is_whole]):
        below, above = (_best(side, batch) for side in _next_to(family, batch))
        if below and above and below.recipe.decay == above.recipe.decay and below.target == above.target:
            return interpolate(below, above, batch)
    raise ConfigError(_refusal(recipes, batch, opt_name, target))


def _refusal(recipes: Sequence[Published], batch: int, opt_name: str | None, target: float | None) -> str:
    what = f'{opt_name or "any optimizer"}{"" if target is None else f", {100 * target:.4g} %"}'
    texts = [f'{f[0].recipe.opt_name} of {f[0].generation} {range_text([p.recipe.global_batch_size for p in f])}'
             for f in families([p for p in recipes if p.is_whole])]
    return (f'--global-batch-size: got {batch:,} ({what}), expected a batch that published sets converged at, or one '
            f'between two of them: {"; ".join(texts) or "there are none"}')


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def interpolate(below: Published, above: Published, batch: int) -> Choice:
    """Return the recipe between two: the learning rate is linear in the logarithm of the batch, warm-up, length of the
    schedule and epochs are linear in the batch, and all else is that of the nearer one.

    docs/recipes.md holds the errors of this, each published batch left out and worked out from its neighbours.
    """
    low, high = below.recipe, above.recipe
    size = low.global_batch_size, high.global_batch_size
    power = math.log(batch / size[0]) / math.log(size[1] / size[0])
    share = (batch - size[0]) / (size[1] - size[0])
    nearer = low if power < 0.5 else high
    assert low.base_lr and high.base_lr and low.warmup_epochs is not None and high.warmup_epochs is not None
    lr = math.exp(_between(math.log(low.base_lr), math.log(high.base_lr), power))
    recipe = replace(
        nearer, global_batch_size=batch, base_lr=float(f'{lr:.3g}'),
        warmup_epochs=round(_between(low.warmup_epochs, high.warmup_epochs, share), 1),
        decay_epochs=None if low.decay_epochs is None or high.decay_epochs is None else
        float(round(_between(low.decay_epochs, high.decay_epochs, share))),
        target_accuracy=below.target)
    epochs = _on_grid(_between(below.mean_epochs, above.mean_epochs, share), recipe)
    return Choice(recipe, 'between', (below, above), epochs, below.target)


def _on_grid(epochs: float, recipe: Recipe) -> float:
    """Return the evaluation of a recipe that is nearest to some epochs, within its schedule."""
    assert recipe.eval_period and recipe.first_eval_epoch is not None
    num = max(0, round((epochs - recipe.first_eval_epoch) / recipe.eval_period))
    return float(min(recipe.first_eval_epoch + num * recipe.eval_period, recipe.last_eval_epoch or math.inf))


def make_config(choice: Choice, num_nodes: int | None = None, ranks_per_node: int | None = None) -> cfg.Config:
    """Return the configuration of a recipe on GPUs, as the files of launch/configs have it."""
    recipe, layout = choice.recipe, f'_{num_nodes}x{ranks_per_node}' if num_nodes and ranks_per_node else ''
    batch = recipe.global_batch_size
    assert recipe.eval_period and recipe.first_eval_epoch is not None
    assert recipe.momentum is not None and recipe.weight_decay is not None
    filled = {f.name: v for f in dataclasses.fields(cfg.ScheduleConfig)
              if (v := getattr(recipe, f.name, None)) is not None}
    result = cfg.Config(
        run=cfg.RunConfig(dir=f'logs/recipe_{batch}{layout}', num_nodes=num_nodes, ranks_per_node=ranks_per_node,
                          clear_caches=True),
        data=cfg.DataConfig(decoder='mixed', num_threads=4, pad_to_4_channels=True),
        model=cfg.ModelConfig(layout='NHWC'),
        optimizer=cfg.OptimizerConfig(name=recipe.opt_name,  # type: ignore[arg-type]
                                      momentum=recipe.momentum, weight_decay=recipe.weight_decay),
        schedule=cfg.ScheduleConfig(**{'decay_epochs': STEP_SCHEDULE_EPOCHS, **filled}),
        train=cfg.TrainConfig(device='gpu', precision='float16', global_batch_size=batch,
                              label_smoothing=recipe.label_smoothing or 0.0, target_accuracy=choice.target,
                              eval_period=recipe.eval_period,
                              eval_offset=(recipe.first_eval_epoch - 1) % recipe.eval_period))
    cfg.check_values(result)
    return result


def check_shares(batch: int, num_ranks: int) -> None:
    """Raise ConfigError where ranks cannot share a batch evenly."""
    if batch % num_ranks:
        fit = max(1, round(batch / num_ranks)) * num_ranks
        raise ConfigError(f'--global-batch-size: got {batch} for {num_ranks} ranks (--nodes x --ranks-per-node), '
                          f'expected a multiple of {num_ranks}, such as {fit}')
