"""Deviations of a configuration from published recipes, and its expected time. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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
from mlperf_rn50.data.options import IMAGENET
from mlperf_rn50.mllog.run import IMAGENET_TRAIN, IMAGENET_VAL
from mlperf_rn50.text import grouped, plural, span

# Largest ratio of similar batches, from the published recipe with the widest range (batches 1,632
# to 2,064).
SIMILAR_BATCH = 1.3
# largest ratio of a batch to that of a published recipe whose learning rate is scaled with it
_SCALED_BATCH = 2.5
_SLACK = 0.01  # largest relative difference between values that count as equal
# Keys whose values are logged or follow from optimizer and decay.
_LOGGED = (
    'optimizer.name',
    'schedule.base_lr',
    'schedule.warmup_epochs',
    'schedule.decay',
    'schedule.decay_epochs',
    'schedule.end_lr',
    'schedule.poly_power',
    'schedule.step_epochs',
    'schedule.step_factor',
    'optimizer.weight_decay',
    'optimizer.decay_bn_and_bias',
    'optimizer.momentum',
    'optimizer.lars_eta',
    'optimizer.lars_epsilon',
    'train.label_smoothing',
    'train.target_accuracy',
    'train.eval_period',
    'train.eval_offset',
)
# Values that the submissions do not log, from the code submitted with the logs, which
# docs/recipes.md cites.
_SUBMITTED: dict[str, Any] = {
    'data.num_train': IMAGENET_TRAIN,
    'data.num_val': IMAGENET_VAL,
    'data.num_classes': 1000,
    'data.image_size': 224,
    'data.resize_shorter': 256,
    'data.crop': 'random_resized',
    'data.min_area': 0.05,
    'data.max_area': 1.0,
    'data.min_aspect': 0.75,
    'data.max_aspect': 4 / 3,
    'data.mirror': 'random',
    'data.mirror_probability': 0.5,
    'data.mean': (123.675, 116.28, 103.53),
    'data.std': (58.395, 57.12, 57.375),
    'data.interpolation': None,
    'data.last_batch': 'wrap',
    'optimizer.nesterov': False,
    'optimizer.lars_eta': 0.001,
    'optimizer.lars_epsilon': 0.0,
    'schedule.step_factor': 0.1,
    'model.name': 'resnet50',
    'model.bn_momentum': 0.9,
    'model.bn_epsilon': 1e-5,
    'model.zero_gamma': None,
}
# Keys whose deviations cause a warning; only the learning rate may scale with the batch.
_WARNED = (
    'schedule.base_lr',
    'schedule.warmup_epochs',
    'schedule.decay_epochs',
    'optimizer.weight_decay',
)


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
    published: tuple[RecipeValue, ...]
    # whether no recipe with the same optimizer has the configuration's value
    is_alone: bool = False


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=_SLACK)
    return a == b


def _unused(opt_name: str | None, decay: str | None) -> set[str]:
    """Return the keys that have no effect with this optimizer and decay; None means unknown."""
    unused = {
        'schedule.step_epochs': decay != 'step',
        'schedule.step_factor': decay != 'step',
        'schedule.end_lr': decay == 'step',
        'schedule.poly_power': decay not in ('poly', None),
        'optimizer.lars_eta': opt_name != 'lars',
        'optimizer.lars_epsilon': opt_name != 'lars',
    }
    return {key for key, is_unused in unused.items() if is_unused}


def _published_cells(published: RecipeGroup) -> dict[str, RecipeValue]:
    """Return the values of a recipe by configuration key."""
    recipe, unused = published.recipe, _unused(published.recipe.opt_name, published.recipe.decay)
    submitted = {
        **_SUBMITTED,
        'optimizer.decay_bn_and_bias': False if recipe.opt_name == 'lars' else None,
        'train.precision': 'float16' if any(s.num_accelerators for s in published.sets) else None,
    }
    if recipe.decay == 'step' and not recipe.decay_epochs:
        submitted['schedule.decay_epochs'] = STEP_SCHEDULE_EPOCHS
    values = {key: getattr(recipe, key.partition('.')[2], None) for key in _LOGGED}
    values['optimizer.name'] = recipe.opt_name
    if recipe.first_eval_epoch is not None and recipe.eval_period is not None:
        values['train.eval_offset'] = (recipe.first_eval_epoch - 1) % recipe.eval_period
    return {
        key: RecipeValue(
            None if key in unused else value,
            key not in submitted and key.partition('.')[2] not in published.unlogged,
            key not in unused,
        )
        for key, value in (values | submitted).items()
    }


def _config_cells(config: Config) -> dict[str, RecipeValue]:
    """Return the values of a configuration, with unused ones marked."""
    unused = _unused(config.optimizer.name, config.schedule.decay)
    unused |= {'optimizer.nesterov'} if config.optimizer.name == 'lars' else set()
    return {
        key: RecipeValue(None, is_used=False)
        if key in unused
        else RecipeValue(attrgetter(key)(config))
        for key in (*_LOGGED, 'train.precision', *_SUBMITTED)
    }


def rows_of(recipes: Sequence[RecipeGroup], config: Config | None = None) -> list[Row]:
    """Compare the logged keys of recipes or, with a configuration, all of its keys."""
    cells = [_published_cells(p) for p in recipes]
    values = _config_cells(config) if config else {}
    comparable = [c for c in cells if config and c['optimizer.name'].value == config.optimizer.name]
    return [
        Row(
            key,
            values.get(key),
            tuple(c[key] for c in cells),
            bool(values) and _is_alone(key, values, comparable or cells),
        )
        for key in values or _LOGGED
        if values and values[key].is_used or any(c[key].is_used for c in cells)
    ]


def _is_alone(
    key: str, values: dict[str, RecipeValue], published: Sequence[dict[str, RecipeValue]]
) -> bool:
    """Return whether no recipe has this value. Schedules are compared only with those of the same
    kind."""
    value, decay = values[key], values['schedule.decay'].value
    is_of_kind = key in ('schedule.decay_epochs', 'schedule.end_lr', 'schedule.poly_power')
    known = [
        c[key].value
        for c in published
        if c[key].value is not None and (not is_of_kind or c['schedule.decay'].value == decay)
    ]
    return (
        value.is_used
        and (is_of_kind or bool(known))
        and not any(_is_same(v, value.value) for v in known)
    )


def is_imagenet(config: Config) -> bool:
    """Return whether a configuration trains ResNet-50 on all of ImageNet, like the published
    sets."""
    d = config.data
    return (
        d.dataset == IMAGENET
        and not d.synthetic
        and d.num_train == IMAGENET_TRAIN
        and config.model.name == 'resnet50'
    )


def _range(recipes: Sequence[RecipeGroup], key: str, batch: int) -> tuple[float, float] | None:
    """Return the lowest and highest value of a key in recipes. A learning rate may also scale with
    the batch."""
    known = [
        (v, p.batch) for p in recipes if (v := getattr(p.recipe, key.partition('.')[2])) is not None
    ]
    values = [v for v, _ in known] + [
        v * batch / size for v, size in known if key == 'schedule.base_lr'
    ]
    return (min(values), max(values)) if values else None


def _differing(config: Config, recipes: Sequence[RecipeGroup], batch: int) -> Iterator[str]:
    """Yield the keys whose values are outside the range of the recipes of one generation."""
    s = config.schedule
    comparable = [p for p in recipes if p.recipe.decay == s.decay]
    for key in _WARNED:
        is_length = key == 'schedule.decay_epochs'
        ends = _range(comparable if is_length else recipes, key, batch)
        if (
            ends
            and not (is_length and s.decay == 'step')
            and not (ends[0] * (1 - _SLACK) <= attrgetter(key)(config) <= ends[1] * (1 + _SLACK))
        ):
            yield key
    if not comparable:
        yield 'schedule.decay'
    elif s.decay == 'step' and not any(
        _is_same(p.recipe.step_epochs, s.step_epochs) for p in comparable
    ):
        yield 'schedule.step_epochs'


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
    lr = r.base_lr and r.base_lr * batch / r.global_batch_size
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
    if not (similar := _near(known, batch, SIMILAR_BATCH)):
        return [
            f'train.global_batch_size: got {batch:,}; no published {config.optimizer.name} set '
            'that reached '
            f'{100 * config.train.target_accuracy:.4g} % has a batch within a factor of '
            f'{SIMILAR_BATCH}, so the '
            'recipe is not compared'
        ]
    nearest = min(similar, key=lambda alike: len([*_differing(config, alike, batch)]))
    return [_deviation(config, key, nearest, batch) for key in _differing(config, nearest, batch)]


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


def _deviation(config: Config, key: str, recipes: Sequence[RecipeGroup], batch: int) -> str:
    return (
        f'{key}: got {_text(_config_cells(config), key)} at batch {batch:,}; the nearest published '
        f'{config.optimizer.name} sets ({recipes[0].generation}) at similar batches that reached '
        f'{100 * config.train.target_accuracy:.4g} % have {_values_text(recipes, key)}'
    )


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
    batch, num_units = (
        config.global_batch_size(num_ranks),
        -(-num_ranks // config.run.ranks_per_device),
    )
    if (
        not batch
        or not is_imagenet(config)
        or (config.train.device, config.train.precision) != ('gpu', 'float16')
    ):
        return ''
    name, images = generation_of(gpu or config.run.submission_platform), IMAGENET_TRAIN / num_units
    share = (
        fmean(config.data.size_of(e) ** 2 for e in range(last_epochs[-1]))
        / _SUBMITTED['data.image_size'] ** 2
    )
    speeds = [
        IMAGENET_TRAIN * rate / share
        for s in load_published()
        if generation_of(s.accelerator) == name
        and is_within(
            ratio(s.global_batch_size, s.num_accelerators), batch / num_units, SIMILAR_BATCH
        )
        and (rate := ratio(ratio(s.scored_epochs_mean, s.time_s), s.num_accelerators))
    ]
    if not speeds:
        return ''
    followed = find_followed(config, num_ranks)
    published = sorted(e for p in followed for e in p.epochs)
    epochs = [
        next((end for end in last_epochs if end >= e), last_epochs[-1]) for e in published
    ] or last_epochs[-1:]
    source = followed and (
        f'; published {followed[0].generation} sets at batch '
        f'{range_text([p.batch for p in followed])} took {range_text(published)} epochs'
    )
    scaled = '' if share == 1 else f', scaled to {100 * share:.1f} % of their pixels'
    return (
        f'about {span(epochs[0] * images / max(speeds), epochs[-1] * images / min(speeds))} for '
        f'{range_text(epochs)} epoch{"" if epochs[-1] == 1 else "s"} on {num_units} {name} at '
        f'{range_text([round(v) for v in speeds])} images/s each '
        f'({plural(len(speeds), "published system")}{scaled}){source or ""}'
    )
