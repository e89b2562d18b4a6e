"""Deviations of a configuration from published recipes, and its expected time. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from mlperf_rn50.analysis.recipe.choose import (
    STEP_SCHEDULE_EPOCHS,
    RecipeGroup,
    group,
    is_within,
    range_text,
)
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.run_set import generation_of, ratio
from mlperf_rn50.config import Config, render_value
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN
from mlperf_rn50.text import grouped, plural, span

# Largest ratio of similar batches, from the published recipe with the widest range (batches 1,632
# to 2,064).
SIMILAR_BATCH = 1.3
# largest ratio of a batch to that of a published recipe whose learning rate is scaled with it
_SCALED_BATCH = 2.5
_SLACK = 0.01  # largest relative difference between values that count as equal
# Keys whose values are logged or follow from optimizer and decay.
_LOGGED = tuple(
    """optimizer.name schedule.base_lr schedule.warmup_epochs schedule.decay schedule.decay_epochs
    schedule.end_lr schedule.poly_power schedule.step_epochs schedule.step_factor
    optimizer.weight_decay optimizer.decay_bn_and_bias optimizer.momentum optimizer.lars_eta
    optimizer.lars_epsilon train.label_smoothing train.target_accuracy train.eval_period
    train.eval_offset""".split()
)
# Values that the submissions do not log.
_SUBMITTED: dict[str, Any] = load_tree(Path(__file__).with_name('submitted.yaml'))
# Keys whose deviations cause a warning; only the learning rate may scale with the batch.
_WARNED = (
    'schedule.base_lr',
    'schedule.warmup_epochs',
    'schedule.decay_epochs',
    'schedule.poly_power',
    'optimizer.weight_decay',
)
# of these, those that are compared with schedules of the same kind
_OF_KIND = 'schedule.decay_epochs', 'schedule.poly_power'


@dataclass(frozen=True)
class RecipeValue:
    """A value of a key, or None if it is unknown or, with is_used false, if the key has no
    effect."""

    value: Any
    is_logged: bool = True
    is_used: bool = True

    @property
    def text(self) -> str:
        if self.value is None:
            return '?' if self.is_used else '-'
        return render_value(self.value) + ('' if self.is_logged else '†')


@dataclass(frozen=True)
class Row:
    """Values of a key in the compared configuration, if any, and in each recipe."""

    key: str
    config: RecipeValue | None
    published: Sequence[RecipeValue]
    # whether no recipe with the same optimizer has the configuration's value
    is_alone: bool = False


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=_SLACK)
    return a == b


def _name_of(key: str) -> str:
    """Return the name of a key in a recipe, which has no sections."""
    return key.partition('.')[2]


def _unused(opt_name: str | None, decay: str | None) -> set[str]:
    """Return the keys that have no effect with this optimizer and decay; None means unknown."""
    unused = set()
    if decay != 'step':
        unused |= {'schedule.step_epochs', 'schedule.step_factor'}
    if decay == 'step':
        unused.add('schedule.end_lr')
    if decay not in ('poly', None):
        unused.add('schedule.poly_power')
    if opt_name != 'lars':
        unused |= {'optimizer.lars_eta', 'optimizer.lars_epsilon'}
    return unused


def _published_cells(published: RecipeGroup) -> dict[str, RecipeValue]:
    """Return the values of a recipe by configuration key."""
    recipe = published.recipe
    unused = _unused(recipe.opt_name, recipe.decay)
    values = {key: getattr(recipe, _name_of(key), None) for key in _LOGGED}
    values['optimizer.name'] = recipe.opt_name
    values['train.eval_offset'] = recipe.eval_offset
    submitted = {
        **_SUBMITTED,
        'optimizer.decay_bn_and_bias': False if recipe.opt_name == 'lars' else None,
        'train.precision': 'float16' if any(s.num_accelerators for s in published.sets) else None,
    }
    if recipe.decay == 'step' and not recipe.decay_epochs:
        submitted['schedule.decay_epochs'] = STEP_SCHEDULE_EPOCHS
    return {
        key: RecipeValue(
            None if key in unused else value,
            key not in submitted and _name_of(key) not in published.unlogged,
            key not in unused,
        )
        for key, value in (values | submitted).items()
    }


def _config_cells(config: Config) -> dict[str, RecipeValue]:
    """Return the values of a configuration, with unused ones marked."""
    unused = _unused(config.optimizer.name, config.schedule.decay)
    if config.optimizer.name == 'lars':
        unused.add('optimizer.nesterov')
    return {
        key: RecipeValue(
            None if key in unused else attrgetter(key)(config), is_used=key not in unused
        )
        for key in (*_LOGGED, 'train.precision', *_SUBMITTED)
    }


def rows_of(recipes: Sequence[RecipeGroup], config: Config | None = None) -> list[Row]:
    """Compare the logged keys of recipes or, with a configuration, all of its keys."""
    cells = [_published_cells(p) for p in recipes]
    if config is None:
        return [
            Row(key, None, [c[key] for c in cells])
            for key in _LOGGED
            if any(c[key].is_used for c in cells)
        ]
    values = _config_cells(config)
    alike = [c for c in cells if c['optimizer.name'].value == config.optimizer.name]
    return [
        Row(key, own, [c[key] for c in cells], _is_alone(key, values, alike or cells))
        for key, own in values.items()
        if own.is_used or any(c[key].is_used for c in cells)
    ]


def _is_alone(
    key: str, values: dict[str, RecipeValue], published: Sequence[dict[str, RecipeValue]]
) -> bool:
    """Return whether no recipe has this value. Schedules are compared only with those of the same
    kind."""
    own = values[key]
    is_of_kind = key in (*_OF_KIND, 'schedule.end_lr')
    if is_of_kind:
        decay = values['schedule.decay'].value
        published = [c for c in published if c['schedule.decay'].value == decay]
    known = [c[key].value for c in published if c[key].value is not None]
    if not own.is_used or not (known or is_of_kind):
        return False
    return not any(_is_same(value, own.value) for value in known)


def is_imagenet(config: Config) -> bool:
    """Return whether a configuration trains ResNet-50 on all of ImageNet, like the published
    sets."""
    data = config.data
    trained = (data.dataset, data.synthetic, data.num_train, config.model.name)
    return trained == (IMAGENET, False, IMAGENET_TRAIN, 'resnet50')


def _is_in_range(key: str, value: float, recipes: Sequence[RecipeGroup], batch: int) -> bool:
    """Return whether the value of a key is between those of recipes, if these have any. A learning
    rate may also scale with the batch."""
    values = []
    for p in recipes:
        if (published := getattr(p.recipe, _name_of(key))) is not None:
            values.append(published)
            if key == 'schedule.base_lr':
                values.append(published * batch / p.batch)
    return not values or min(values) * (1 - _SLACK) <= value <= max(values) * (1 + _SLACK)


def _differing(config: Config, recipes: Sequence[RecipeGroup], batch: int) -> Iterator[str]:
    """Yield the keys whose values are outside the range of the recipes of one generation."""
    schedule = config.schedule
    of_kind = [p for p in recipes if p.recipe.decay == schedule.decay]
    unused = _unused(config.optimizer.name, schedule.decay)
    if schedule.decay == 'step':
        unused.add('schedule.decay_epochs')
    for key in _WARNED:
        near = of_kind if key in _OF_KIND else recipes
        if key not in unused and not _is_in_range(key, attrgetter(key)(config), near, batch):
            yield key
    if not of_kind:
        yield 'schedule.decay'
    elif schedule.decay == 'step' and not any(
        _is_same(p.recipe.step_epochs, schedule.step_epochs) for p in of_kind
    ):
        yield 'schedule.step_epochs'
    submitted_factor = _SUBMITTED['schedule.step_factor']
    if (
        of_kind
        and schedule.decay == 'step'
        and not _is_same(schedule.step_factor, submitted_factor)
    ):
        yield 'schedule.step_factor'


def _comparable(config: Config, num_ranks: int | None) -> tuple[int, list[RecipeGroup]]:
    """Return the batch of an ImageNet configuration, otherwise 0, and the recipes with its
    optimizer and target."""
    batch = config.global_batch_size(num_ranks)
    if not is_imagenet(config) or batch is None:
        return 0, []
    return batch, group(load_published(), config.optimizer.name, config.train.target_accuracy)


def _near(recipes: Sequence[RecipeGroup], batch: int, factor: float) -> list[list[RecipeGroup]]:
    """Return the recipes of each generation whose batches are within a factor of this batch."""
    near = (p for p in recipes if is_within(p.batch, batch, factor))
    return list(grouped(near, lambda p: p.generation).values())


def _scaled(published: RecipeGroup, batch: int) -> RecipeGroup:
    """Return a recipe for another batch, with the learning rate in proportion."""
    r = published.recipe
    lr = r.base_lr and r.base_lr * batch / published.batch
    return replace(published, recipe=replace(r, base_lr=lr, global_batch_size=batch))


def find_followed(config: Config, num_ranks: int | None) -> list[RecipeGroup]:
    """Return the published recipes of a generation from which an ImageNet configuration does not
    deviate, or [].

    Their batches are similar or, with learning rates in proportion to the batch, within a factor of
    _SCALED_BATCH.
    """
    batch, known = _comparable(config, num_ranks)
    for near in _near(known, batch, SIMILAR_BATCH):
        if not any(_differing(config, near, batch)):
            return near
    for near in _near(known, batch, _SCALED_BATCH):
        if not any(_differing(config, [_scaled(p, batch) for p in near], batch)):
            return near
    return []


def find_deviations(config: Config, num_ranks: int | None) -> list[str]:
    """Return a line for each key of an ImageNet configuration that deviates from the nearest
    published sets.

    These converged to the same or a higher target with the same optimizer, the ratio of the batches
    is at most SIMILAR_BATCH, and they are of the generation with the fewest deviations. Values
    between two sets of one generation do not deviate, nor do learning rates scaled with the batch.
    If find_followed finds recipes, nothing deviates.
    """
    batch, known = _comparable(config, num_ranks)
    if not batch or find_followed(config, num_ranks):
        return []
    similar = _near(known, batch, SIMILAR_BATCH)
    if not similar:
        return [
            f'train.global_batch_size: got {batch:,}; no published {config.optimizer.name} set '
            f'that reached {100 * config.train.target_accuracy:.4g} % has a batch within a factor '
            f'of {SIMILAR_BATCH}, so the recipe is not compared'
        ]
    differing = [(p, [*_differing(config, p, batch)]) for p in similar]
    nearest, keys = min(differing, key=lambda pair: len(pair[1]))
    return [
        f'{key}: got {_text(_config_cells(config), key)} at batch {batch:,}; the nearest published '
        f'{config.optimizer.name} sets ({nearest[0].generation}) at similar batches that reached '
        f'{100 * config.train.target_accuracy:.4g} % have {_values_text(nearest, key)}'
        for key in keys
    ]


def _text(cells: dict[str, RecipeValue], key: str) -> str:
    """Format the value of a key. The text of schedule.decay includes the epochs."""
    text = render_value(cells[key].value)
    if key != 'schedule.decay':
        return text
    epochs = cells['schedule.step_epochs' if text == 'step' else 'schedule.decay_epochs'].value
    return f'{text} ({render_value(epochs)} epochs)'


def _values_text(recipes: Sequence[RecipeGroup], key: str) -> str:
    """List the published values of a key, each with the range of batches of the recipes that use
    it."""
    batches = defaultdict(set)
    for p in recipes:
        cells = _published_cells(p)
        if cells[key].value is not None:
            batches[_text(cells, key)].add(p.batch)
    return '; '.join(f'{text} at {range_text(list(sizes))}' for text, sizes in batches.items())


def expected_time(
    config: Config, num_ranks: int, last_epochs: Sequence[int], gpu: str | None
) -> str:
    """Return the expected time of a run, from published systems with the same accelerator, or ''
    without such systems.

    Their times are scaled to the pixels of the training images, because convolutions take time in
    proportion to them.

    Args:
        last_epochs: epochs after which the run may end, in ascending order.
        gpu: name of this machine's GPU; None selects the one that run.submission_platform names.
    """
    batch, train = config.global_batch_size(num_ranks), config.train
    is_like_published = (train.device, train.precision) == ('gpu', 'float16')
    if not batch or not is_imagenet(config) or not is_like_published:
        return ''

    # Throughput of an accelerator in published systems, at the pixels of this run.
    num_accelerators = -(-num_ranks // config.run.ranks_per_device)
    generation = generation_of(gpu or config.run.submission_platform)
    pixels = fmean(config.data.size_of(e) ** 2 for e in range(last_epochs[-1]))
    share = pixels / _SUBMITTED['data.image_size'] ** 2
    speeds = []
    for s in load_published():
        local = ratio(s.global_batch_size, s.num_accelerators)
        rate = ratio(ratio(s.scored_epochs_mean, s.time_s), s.num_accelerators)
        is_alike = is_within(local, batch / num_accelerators, SIMILAR_BATCH)
        if generation_of(s.accelerator) == generation and is_alike and rate:
            speeds.append(IMAGENET_TRAIN * rate / share)
    if not speeds:
        return ''

    # Epochs of the followed recipe, at which this run evaluates.
    followed, source = find_followed(config, num_ranks), ''
    epochs = list(last_epochs[-1:])
    if followed:
        published = sorted(e for p in followed for e in p.epochs)
        epochs = [next((end for end in last_epochs if end >= e), epochs[0]) for e in published]
        source = (
            f'; published {followed[0].generation} sets at batch '
            f'{range_text([p.batch for p in followed])} took {range_text(published)} epochs'
        )
    images = IMAGENET_TRAIN / num_accelerators
    time = span(epochs[0] * images / max(speeds), epochs[-1] * images / min(speeds))
    scaled = '' if share == 1 else f', scaled to {100 * share:.1f} % of their pixels'
    return (
        f'about {time} for {range_text(epochs)} epoch{"" if epochs[-1] == 1 else "s"} on '
        f'{num_accelerators} {generation} at {range_text([round(v) for v in speeds])} images/s '
        f'each ({plural(len(speeds), "published system")}{scaled}){source}'
    )
