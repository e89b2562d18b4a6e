"""Finished run sets with recipe, layout, times and curves, from logs or from published.json. Pure but for the latter.

docs/make_published.py writes published.json, the table of published systems.
"""
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.mllog.read.raw_log import number
from mlperf_rn50.mllog.run import IMAGENET_TRAIN

_MAX_EPOCHS = 200  # a larger end of a schedule is a number of steps
_MAX_VALUE = 1e9
_MAX_SCHEDULE = 10_000  # epochs of a plausible schedule in steps


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run, None for those that are not logged."""

    opt_name: str | None
    global_batch_size: int
    base_lr: float | None = None
    warmup_epochs: float | None = None
    decay: str | None = None  # 'poly', or 'step' for rates that fall at step_epochs
    decay_epochs: float | None = None  # of the whole schedule, including warm-up
    end_lr: float | None = None
    poly_power: float | None = None
    step_epochs: tuple[float, ...] | None = None  # at which the rate falls to a tenth
    weight_decay: float | None = None
    momentum: float | None = None
    label_smoothing: float | None = None
    target_accuracy: float | None = None
    eval_period: int | None = None
    first_eval_epoch: int | None = None  # epochs trained before the first evaluation
    nesterov: bool | None = None

    @property
    def last_eval_epoch(self) -> int | None:
        """Epochs trained at the last evaluation within the schedule, None if the end of the schedule is unknown."""
        if self.decay_epochs is None or not self.eval_period or self.first_eval_epoch is None:
            return None
        room = math.floor(self.decay_epochs + 0.1) - self.first_eval_epoch  # an end in steps is not a whole epoch
        return self.first_eval_epoch + room // self.eval_period * self.eval_period if room >= 0 else None


@dataclass(frozen=True)
class KnownRun:
    name: str
    status: str
    epochs: int | None  # to the target, None if it was not reached
    time_s: float | None
    curve: tuple[tuple[int, float], ...]  # (epochs trained, Top-1 as a fraction) of every evaluation


@dataclass(frozen=True)
class RunTimes:
    """Mean times of the runs of a set, in seconds."""

    epoch_s: float  # an epoch at full speed, without evaluation
    evaluation_s: float
    outside_s: float  # the rest of the time to train: extra time of the first epoch, and gaps


@dataclass(frozen=True)
class KnownSet:
    """Runs that differ only in the seed."""

    source: str
    round: str
    org: str | None
    name: str
    num_nodes: int | None
    num_accelerators: int | None  # of all nodes; 0 on CPUs
    num_units: int | None  # accelerators, or ranks on CPUs
    accelerator: str | None
    dataset: str | None  # None for ImageNet
    train_samples: int | None
    recipe: Recipe
    times: RunTimes | None  # None if the logs have no epochs, or no run ended
    time_s: float | None  # MLPerf score, or mean of the converged runs
    runs: tuple[KnownRun, ...]  # one or more
    unlogged: tuple[str, ...] = ()  # recipe fields from the submitted settings, which the logs do not contain

    @property
    def converged(self) -> tuple[KnownRun, ...]:
        return tuple(r for r in self.runs if r.status == 'converged')

    @property
    def is_imagenet(self) -> bool:
        return self.dataset is None

    @property
    def minutes(self) -> float | None:
        return self.time_s / 60 if self.time_s else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a training step."""
        batch = self.recipe.global_batch_size
        return self.times.epoch_s * batch / self.train_samples if self.times and self.train_samples else None


def _number(optimizer: Mapping[str, Any], *names: str) -> float | None:
    """Return the first number among some keys."""
    values = (number(optimizer.get(name), 0, _MAX_VALUE) for name in names)
    return next((v for v in values if v is not None), None)


def eval_grid(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[int | None, int | None]:
    """Return the most frequent number of epochs between evaluations, and the number before the first one."""
    epochs = [sorted({epoch for epoch, _ in curve}) for curve in curves]  # logs may be out of order
    gaps = Counter(b - a for each in epochs for a, b in zip(each, each[1:]))
    return gaps.most_common(1)[0][0] if gaps else None, min((each[0] for each in epochs if each), default=None)


def _decay_epochs(steps: float | None, batch: int, samples: int | None, warmup: float | None) -> float | None:
    """Return the epochs of the whole schedule from the logged number of epochs, or of steps after the warm-up.

    Logs of other data sets come from this program and contain steps. None for an implausibly long schedule.
    """
    if steps is None or samples in (None, IMAGENET_TRAIN) and steps <= _MAX_EPOCHS:
        return steps
    epochs = steps / math.ceil((samples or IMAGENET_TRAIN) / batch) + (warmup or 0.0)
    return epochs if epochs <= _MAX_SCHEDULE else None


def make_recipe(optimizer: Mapping[str, Any], batch: int, samples: int | None, target: float | None,
                curves: Sequence[Sequence[tuple[int, float]]]) -> Recipe:
    """Return the recipe from the optimizer keys, whose names depend on the round."""
    name = optimizer.get('opt_name')
    prefix, other = ('lars', 'sgd') if name == 'lars' else ('sgd', 'lars')
    warmup = _number(optimizer, f'{prefix}_opt_learning_rate_warmup_epochs', 'opt_learning_rate_warmup_epochs',
                     f'{other}_opt_learning_rate_warmup_epochs')
    steps = _number(optimizer, f'{prefix}_opt_learning_rate_decay_steps')
    boundaries = optimizer.get('opt_learning_rate_decay_boundary_epochs')
    falls = tuple(number(b, 0, _MAX_VALUE) for b in boundaries) if isinstance(boundaries, (list, tuple)) else ()
    is_stepped = bool(falls) and None not in falls
    period, first = eval_grid(curves)
    return Recipe(
        name if isinstance(name, str) else None, batch,
        _number(optimizer, f'{prefix}_opt_base_learning_rate', 'opt_base_learning_rate', 'opt_learning_rate'), warmup,
        'step' if is_stepped else 'poly' if steps is not None else None,
        _decay_epochs(steps, batch, samples, warmup),
        _number(optimizer, f'{prefix}_opt_end_learning_rate', f'{other}_opt_end_learning_rate'),
        _number(optimizer, f'{prefix}_opt_learning_rate_decay_poly_power'),
        tuple(float(b) for b in falls if b is not None) if is_stepped else None,
        _number(optimizer, f'{prefix}_opt_weight_decay', 'model_l2_regularization'),
        _number(optimizer, f'{prefix}_opt_momentum', 'opt_momentum'), _number(optimizer, 'label_smoothing'), target,
        period, first, nesterov if isinstance(nesterov := optimizer.get('sgd_opt_nesterov'), bool) else None)


def make_times(epoch_s: float | None, runs: Sequence[tuple[float | None, int | None, int, float]]) -> RunTimes | None:
    """Return the mean of (time to train, epochs, number of evaluations, time of all evaluations), None if unknown."""
    known = [(t, e, n, s) for t, e, n, s in runs if t is not None and e and n]
    if not epoch_s or not known:
        return None
    evaluation_s = sum(s for *_, s in known) / sum(n for _, _, n, _ in known)
    return RunTimes(epoch_s, evaluation_s, statistics.fmean(t - e * epoch_s - s for t, e, _, s in known))


def known_of(system: System) -> KnownSet | None:
    """Return the set of a system, or None if it is refused or the batch size is unknown."""
    batch = system.global_batch_size
    if system.refusal or not batch:
        return None
    counted = [r for r in system.counted if r.status != 'unreadable']
    runs = tuple(KnownRun(r.path.name, r.status, r.epochs_to_converge, r.time_to_train_s,
                          tuple((e.epoch, e.accuracy) for e in r.evaluations)) for r in counted)
    optimizer = {k: v for r in reversed(counted) for k, v in r.optimizer.items()}
    recipe = make_recipe(optimizer, batch, system.train_samples, system.target_accuracy, [r.curve for r in runs])
    times = make_times(system.epoch_s, [(r.time_to_train_s, r.last_epoch, len(r.evaluations), sum(
        e.stop_s - e.start_s for e in r.evaluations if e.start_s is not None and e.stop_s is not None))
        for r in system.scored])
    return KnownSet(str(system.folder), system.round, system.org, system.name, system.num_nodes,
                    system.num_accelerators, system.num_units, system.accelerator, system.other_dataset,
                    system.train_samples, recipe, times, system.time_s, runs)


def _published_set(facts: Mapping[str, Any]) -> KnownSet:
    runs = tuple(KnownRun(name, status, epochs if status == 'converged' else None, time_s, tuple(map(tuple, curve)))
                 for name, status, epochs, time_s, curve in facts['runs'])
    recipe = make_recipe(facts['optimizer'], facts['global_batch_size'], IMAGENET_TRAIN, facts['target_accuracy'],
                         [r.curve for r in runs])
    unlogged: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                for name, value in facts['unlogged'].items() if getattr(recipe, name) is None}
    recipe = replace(recipe, **unlogged, nesterov=False if recipe.opt_name == 'sgd' else None)  # by the rules
    return KnownSet(f'published {facts["round"]}', facts['round'], facts['org'], facts['name'], facts['num_nodes'],
                    facts['num_accelerators'], facts['num_accelerators'] or facts['num_ranks'], facts['accelerator'],
                    None, IMAGENET_TRAIN, recipe, RunTimes(*facts['times']), facts['time_s'], runs, tuple(unlogged))


@cache
def load_published() -> tuple[KnownSet, ...]:
    """Return the published ResNet-50 systems with MXNet, from github.com/mlcommons/training_results_v0.5 to v1.0."""
    text = resources.files(__package__).joinpath('published.json').read_text(encoding='utf-8')
    return tuple(map(_published_set, json.loads(text)['sets']))
