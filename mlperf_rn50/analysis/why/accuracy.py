"""Causes of a missed accuracy that configuration, log and metrics.jsonl show.

The strength of a cause is a figure relative to its limit, so causes above 1 are accused. The limits apply only to runs
that ended below their target or are behind their references, because every recipe that converges is right.
"""
import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mlperf_rn50.analysis.recipe.differences import find_deviations
from mlperf_rn50.analysis.why.answer import Answer
from mlperf_rn50.analysis.why.load import WhyRun, load_run
from mlperf_rn50.config import Config, render_value
from mlperf_rn50.runfolder.names import RunFolder, find_run_folders, run_numbers
from mlperf_rn50.runfolder.records import CourseRecord, LossScaleRecord, TrainRecord
from mlperf_rn50.text import percent

SIGMAS = 4.0  # by chance, a difference is larger in 1 of 16,000 comparisons
# Per 256 images at momentum 0.9: half the lowest (digits) and twice the highest (CIFAR-10) rate of the shipped recipes.
_LOWEST, _HIGHEST = 0.04, 1.6
_SHRINK = 0.01  # of the weights, removed by the decay in a step: five times the highest shipped one, for CIFAR-10
_FEW_STEPS, _FEW_EPOCHS = 100, 3  # digits, the easiest data set, needs 70 steps; no shipped recipe needs 2 epochs
SURE = 3.0  # strength of faults that also a run that reached its target must not have
# What a key may cause, and the key to change for a cause.
_KEYS = {'schedule.base_lr': 'learning_rate', 'optimizer.momentum': 'learning_rate', 'schedule.warmup_epochs': 'warmup',
         'schedule.decay_epochs': 'decay', 'schedule.decay': 'decay', 'schedule.step_epochs': 'decay',
         'optimizer.weight_decay': 'weight_decay', 'train.global_batch_size': 'batch', 'train.max_epochs': 'epochs',
         'data.crop': 'augmentation', 'data.min_area': 'augmentation', 'data.resize_shorter': 'crop',
         'data.mean': 'normalisation', 'data.std': 'normalisation', 'model.bn_momentum': 'batch_norm',
         'train.loss_scale': 'loss_scale', 'data.shuffle': 'shuffle'}


class Cause(NamedTuple):
    name: str
    strength: float
    text: str


def config_of(run: WhyRun) -> Config | None:
    """Return the configuration of a run, without keys of other versions; None if it is missing or damaged."""
    with suppress(msgspec.MsgspecError):
        return msgspec.convert(run.config, Config) if run.config else None
    return None


def judge_course(run: WhyRun, config: Config, batch: int, num_ranks: int) -> Iterator[Cause]:
    """Yield the causes that the course of a run shows, accused or not."""
    d, o, s, t, num = config.data, config.optimizer, config.schedule, config.train, config.data.num_classes
    curve, steps, halved = run.log.curve if run.log else (), run.all(TrainRecord), run.all(LossScaleRecord)
    rates, losses = ([(r.epoch, v) for r in steps if (v := getattr(r, key)) is not None]
                     for key in ('learning_rate', 'loss'))
    num_epochs, per_epoch = t.max_epochs or max(1, int(s.decay_epochs)), -(-d.num_train // batch)
    num_steps, peak, chance = num_epochs * per_epoch, max((r for _, r in rates), default=s.base_lr), math.log(num)
    rate = (peak or s.base_lr) * 256 / batch * 0.1 / (1 - o.momentum)
    is_usual = o.name == 'lars' or _LOWEST < rate < _HIGHEST
    yield Cause('learning_rate', 0.0 if is_usual else max(rate / _HIGHEST, _LOWEST / rate), f'the learning rate '
                f'{peak:.3g} is {rate:.2g} per 256 images at momentum 0.9, but {_LOWEST} to {_HIGHEST} are usual')
    early, late = (max((v for e, v in losses if (e < num_epochs / 10) == i), default=0.0) for i in (True, False))
    text = f'the training loss rises to {max(early, late):.3g}, while equal logits give {chance:.3g}'
    yield Cause('learning_rate', late / chance / 2, f'{text}, so the steps are too large')
    yield Cause('gradient_scale', is_usual * late / chance / 2.1, f'{text}, although the learning rate is usual')
    yield Cause('warmup', (s.warmup_epochs * per_epoch < 10) * early / chance / 2, f'{text}, without a warm-up')
    yield Cause('warmup', 2 * s.warmup_epochs / num_epochs, f'the warm-up takes {s.warmup_epochs:g} of {num_epochs} '
                'epochs')
    is_done = bool(rates) and rates[-1][0] > num_epochs - 1
    after = [r / peak for e, r in rates if e > s.warmup_epochs] if is_done and peak else []
    low, end = sum(r < 0.05 for r in after) / max(1, len(after)), after[-1] if after else 0.0
    # In the shipped schedules, up to a third of the steps are below 5 %, as with step decay at 30, 60 and 80 of 90.
    text = f'because it decays over {s.decay_epochs:g} epochs in a run of {num_epochs}'
    yield Cause('decay', 2 * low, f'the learning rate is below 5 % of its peak for {percent(low, ".0f")} of the run, '
                + text)
    yield Cause('decay', 4 * end, f'the learning rate ends at {percent(end, ".0f")} of its peak, {text}')
    yield Cause('epochs', 4.1 * end * (s.decay_epochs > num_epochs), f'the run ends after {num_epochs} of the '
                f'{s.decay_epochs:g} epochs of its schedule, at {percent(end, ".0f")} of its peak learning rate')
    is_large, local = per_epoch < num_epochs, batch // num_ranks // t.gradient_accumulation_steps
    few = max(_FEW_STEPS / num_steps, (not is_large) * _FEW_EPOCHS / num_epochs)
    yield Cause('batch' if is_large else 'epochs', few, f'the run has only {num_steps} steps, {num_epochs} epochs of '
                f'{per_epoch} with batch {batch}')
    yield Cause('batch', 8 / max(1, local), f'BatchNorm computes its statistics from {local} images per rank')
    shrink, memory = peak * o.weight_decay / (1 - o.momentum), 1 / (1 - config.model.bn_momentum)
    yield Cause('weight_decay', (o.name == 'sgd') * shrink / _SHRINK, f'the weight decay {o.weight_decay:g} removes '
                f'{100 * shrink:.2g} % of the weights in each step{", of BatchNorm too" * o.decay_bn_and_bias}')
    yield Cause('batch_norm', 4 * memory / num_steps, f'BatchNorm averages over {memory:,.0f} of {num_steps} steps')
    yield Cause('batch_norm', config.model.bn_epsilon / 0.1, f'model.bn_epsilon is {config.model.bn_epsilon:g}')
    crops = {'random_resized': 0.5 / d.max_area, 'padded': 4 * d.crop_padding / d.image_size, 'none': 0.0}[d.crop]
    yield Cause('augmentation', crops, f'data.crop {d.crop} leaves little of an image: data.max_area {d.max_area:g}, '
                f'data.crop_padding {d.crop_padding} of {d.image_size} pixels')
    side = d.eval_size or d.image_size
    zoom = d.resize_shorter / side  # 1.14 in all recipes for ImageNet, 1 in those for small images
    yield Cause('crop', zoom / 1.3, f'evaluations see {percent(1 / zoom, ".0f")} of the side of an image: '
                f'data.resize_shorter {d.resize_shorter}, size {side}')
    num_halved = sum(r.now < r.before for r in halved)
    yield Cause('loss_scale', num_halved / (10 + num_steps / 100), f'{num_halved} steps overflowed and were skipped')
    if losses and curve:
        floor = -sum(n * p * math.log(p) for n, p in ((1, 1 - t.label_smoothing * (1 - 1 / num)),
                                                      (num - 1, t.label_smoothing / num)) if p)
        last = statistics.median(v for _, v in losses[-max(1, len(losses) // 4):])
        learned = (chance - last) / (chance - floor)
        text = f'the training loss ends at {last:.3g}, equal logits give {chance:.3g}'
        yield Cause('frozen', 1.2 * (learned < 0.05), f'nothing is learned: {text}')
        yield Cause('gradient_scale', 1.05 * (learned < 0.5), f'little is learned: {text}')  # the weakest accusation
        yield Cause('overfitting', 1.1 * (learned > max(0.7, 0.3 + curve[-1][1])), 'the training images are '
                    f'learned, but not the validation images: {text}')


def judge_recipe(config: Config, num_ranks: int) -> Iterator[Cause]:
    """Compare a configuration with the published recipes on ImageNet, and with those of the runs in run.reference."""
    for line in find_deviations(config, num_ranks):
        yield Cause(_KEYS.get(line.partition(':')[0], 'batch'), 3.0, line)
    folders = [f for path in config.run.reference for f in find_run_folders(Path(path))[:20]]
    others = [other for f in folders for k in run_numbers(f)[:1] if (other := config_of(load_run(RunFolder(f, k))))]
    for key, name in _KEYS.items() if others else ():
        got, values = attrgetter(key)(config), [attrgetter(key)(other) for other in others]
        yield Cause(name, min(_ratio(got, v) for v in values) / 1.25,
                    f'{key} is {render_value(got)}, in the reference runs {render_value(values[0])}')


def _ratio(a: Any, b: Any) -> float:
    """Return the ratio of positive numbers, at least 1; of other values 1 if they are equal, otherwise 2."""
    is_number = all(isinstance(v, (int, float)) and v > 0 for v in (a, b))
    return max(a / b, b / a) if is_number else 1.0 + (a != b)


def explain_accuracy(run: WhyRun, probed: list[Cause] | None = None) -> Answer | None:
    """Explain a run that ended below its target or is behind its references, or any run with the causes of a probe.

    At most two causes are named. Return None for a run that needs no explanation, or lacks its log or configuration.
    """
    config, log, standing = config_of(run), run.log, run.last(CourseRecord)
    if not config or not log or not log.global_batch_size:
        return None
    has_missed = log.status in ('aborted', 'failed') or bool(standing and standing.behind and log.status != 'converged')
    if not has_missed and probed is None:
        return None
    num_ranks, found = log.num_ranks or 1, [c for c in probed or () if has_missed or c.strength >= SURE]
    if has_missed:
        found += judge_recipe(config, num_ranks)
        found += [c for c in judge_course(run, config, log.global_batch_size, num_ranks)
                  if probed is None or c.name != 'frozen']  # a probe measures it
    ordered = sorted((c for c in found if c.strength > 1), key=lambda c: -c.strength)
    named = [c for i, c in enumerate(ordered) if c.name not in [other.name for other in ordered[:i]]][:2]
    options = [next((key for key, name in _KEYS.items() if name == c.name), 'the data or the code') for c in named]
    where = 'log and configuration' if probed is None else 'weights and images'
    others = [c.text for c in ordered if c.name not in [cause.name for cause in named]]
    return Answer(
        f'Top-1 {percent(log.best_accuracy or 0.0)}, target {percent(log.target_accuracy or 0.0)}: '
        f'{" or ".join(c.text for c in named) or f"{where} show no cause"}.',
        next_step=f'change {" or ".join(options)}' if named else
        f'mlperf-rn50 why {run.folder.dir} --probe' * (probed is None),
        notes=(*([standing.text] if standing else []), *(f'Less likely: {text}.' for text in others)),
        values={'causes': [{'cause': c.name, 'text': c.text} for c in named]})
