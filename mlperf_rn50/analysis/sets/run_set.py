"""What is known of sets of runs that are over: their recipe, layout, times and curves. Pure but for load_published.

A set comes from logs (known_of) or from the table of published systems in this package (load_published), which
docs/make_published.py makes. What is worked out from known sets reads them here and does not ask where they come from.
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
from mlperf_rn50.mllog.run import IMAGENET_TRAIN, Run

# Logs give the end of a schedule in epochs or in steps; none has so many epochs, or so few steps.
_MAX_EPOCHS = 200
_MAX_VALUE = 1e9
_MAX_SCHEDULE = 10_000  # epochs that a schedule in steps is believed to have


@dataclass(frozen=True)
class Recipe:
    """What makes a run converge; None for what its log does not say.

    Args:
        decay: poly, or step for rates that fall at step_epochs.
        decay_epochs: epochs of the whole schedule, warm-up included.
        step_epochs: where the rate falls to a tenth.
        first_eval_epoch: epochs trained before the first one.
    """

    opt_name: str | None
    global_batch_size: int
    base_lr: float | None = None
    warmup_epochs: float | None = None
    decay: str | None = None
    decay_epochs: float | None = None
    end_lr: float | None = None
    poly_power: float | None = None
    step_epochs: tuple[float, ...] | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    label_smoothing: float | None = None
    target_accuracy: float | None = None
    eval_period: int | None = None
    first_eval_epoch: int | None = None
    nesterov: bool | None = None

    @property
    def last_eval_epoch(self) -> int | None:
        """Epochs trained at the last evaluation that the schedule leaves room for; None where it declares no end."""
        if self.decay_epochs is None or not self.eval_period or self.first_eval_epoch is None:
            return None
        room = math.floor(self.decay_epochs + 0.1) - self.first_eval_epoch  # an end in steps is not a whole epoch
        return self.first_eval_epoch + room // self.eval_period * self.eval_period if room >= 0 else None


@dataclass(frozen=True)
class KnownRun:
    """One run.

    Args:
        epochs: trained when the target was reached; None where it was not.
        curve: (epochs trained, Top-1 as a fraction) of every evaluation.
    """

    name: str
    status: str
    epochs: int | None
    time_s: float | None
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RunTimes:
    """Where the time of a set goes, in seconds: the mean of its runs.

    Args:
        epoch_s: an epoch at full speed, without evaluation.
        outside_s: the rest of the clock: what the first epoch takes more, and gaps.
    """

    epoch_s: float
    evaluation_s: float
    outside_s: float


@dataclass(frozen=True)
class KnownSet:
    """Runs that differ in their seeds only.

    Args:
        num_accelerators: of all nodes; 0 for CPUs.
        num_units: what shares the work: accelerators, or ranks where there are none.
        dataset: None for ImageNet.
        times: None where the logs have no epochs, or no run ended.
        time_s: the MLPerf score, or the mean of the runs that converged, in seconds; None without one.
        runs: one or more.
        unlogged: the fields of the recipe that no log says, which come from the settings submitted with it.
    """

    source: str
    round: str
    org: str | None
    name: str
    num_nodes: int | None
    num_accelerators: int | None
    num_units: int | None
    accelerator: str | None
    dataset: str | None
    train_samples: int | None
    recipe: Recipe
    times: RunTimes | None
    time_s: float | None
    runs: tuple[KnownRun, ...]
    unlogged: tuple[str, ...] = ()

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
        if not self.times or not self.train_samples:
            return None
        return self.times.epoch_s * self.recipe.global_batch_size / self.train_samples


def _number(optimizer: Mapping[str, Any], *names: str) -> float | None:
    """The first of some keys that has a number."""
    values = (number(optimizer.get(name), 0, _MAX_VALUE) for name in names)
    return next((v for v in values if v is not None), None)


def eval_grid(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[int | None, int | None]:
    """The most frequent epochs between two evaluations, and those before the first one."""
    epochs = [sorted({epoch for epoch, _ in curve}) for curve in curves]  # whatever the order of a log
    gaps = Counter(b - a for each in epochs for a, b in zip(each, each[1:]))
    return gaps.most_common(1)[0][0] if gaps else None, min((each[0] for each in epochs if each), default=None)


def _decay_epochs(steps: float | None, batch: int, samples: int | None, warmup: float | None) -> float | None:
    """Epochs of the whole schedule, from the number that a log gives: of epochs, or of steps after the warm-up.

    Logs of other data than ImageNet are this program's, which writes steps. None where nobody would train so long.
    """
    if steps is None or samples in (None, IMAGENET_TRAIN) and steps <= _MAX_EPOCHS:
        return steps
    epochs = steps / math.ceil((samples or IMAGENET_TRAIN) / batch) + (warmup or 0.0)
    return epochs if epochs <= _MAX_SCHEDULE else None


def make_recipe(optimizer: Mapping[str, Any], batch: int, samples: int | None, target: float | None,
                curves: Sequence[Sequence[tuple[int, float]]]) -> Recipe:
    """A recipe from the keys that logs of any round have for it."""
    name = optimizer.get('opt_name')
    own, other = ('lars', 'sgd') if name == 'lars' else ('sgd', 'lars')
    warmup = _number(optimizer, f'{own}_opt_learning_rate_warmup_epochs', 'opt_learning_rate_warmup_epochs',
                     f'{other}_opt_learning_rate_warmup_epochs')
    steps = _number(optimizer, f'{own}_opt_learning_rate_decay_steps')
    boundaries = optimizer.get('opt_learning_rate_decay_boundary_epochs')
    falls = tuple(number(b, 0, _MAX_VALUE) for b in boundaries) if isinstance(boundaries, (list, tuple)) else ()
    is_stepped = bool(falls) and None not in falls
    period, first = eval_grid(curves)
    return Recipe(
        name if isinstance(name, str) else None, batch,
        _number(optimizer, f'{own}_opt_base_learning_rate', 'opt_base_learning_rate', 'opt_learning_rate'), warmup,
        'step' if is_stepped else 'poly' if steps is not None else None,
        _decay_epochs(steps, batch, samples, warmup),
        _number(optimizer, f'{own}_opt_end_learning_rate', f'{other}_opt_end_learning_rate'),
        _number(optimizer, f'{own}_opt_learning_rate_decay_poly_power'),
        tuple(float(b) for b in falls if b is not None) if is_stepped else None,
        _number(optimizer, f'{own}_opt_weight_decay', 'model_l2_regularization'),
        _number(optimizer, f'{own}_opt_momentum', 'opt_momentum'), _number(optimizer, 'label_smoothing'), target,
        period, first, nesterov if isinstance(nesterov := optimizer.get('sgd_opt_nesterov'), bool) else None)


def make_times(epoch_s: float | None, runs: Sequence[tuple[float | None, int | None, int, float]]) -> RunTimes | None:
    """The mean times of some runs; None where the logs do not tell them.

    Args:
        runs: of each its seconds, epochs, evaluations, and the seconds of all of these.
    """
    known = [(t, e, n, s) for t, e, n, s in runs if t is not None and e and n]
    if not epoch_s or not known:
        return None
    evaluation_s = sum(s for *_, s in known) / sum(n for _, _, n, _ in known)
    outside_s = statistics.fmean(t - e * epoch_s - s for t, e, _, s in known)
    return RunTimes(epoch_s, evaluation_s, outside_s)


def _evaluation_s(run: Run) -> float:
    return sum(e.stop_s - e.start_s for e in run.evaluations if e.start_s is not None and e.stop_s is not None)


def known_of(system: System) -> KnownSet | None:
    """What the logs of a system tell; None for a refused set, or where they do not tell the batch."""
    batch = system.global_batch_size
    if system.refusal or not batch:
        return None
    counted = [r for r in system.counted if r.status != 'unreadable']
    runs = tuple(KnownRun(r.path.name, r.status, r.epochs_to_converge, r.time_to_train_s,
                          tuple((e.epoch, e.accuracy) for e in r.evaluations)) for r in counted)
    optimizer = {k: v for r in reversed(counted) for k, v in r.optimizer.items()}
    recipe = make_recipe(optimizer, batch, system.train_samples, system.target_accuracy, [r.curve for r in runs])
    times = make_times(system.epoch_s, [(r.time_to_train_s, r.last_epoch, len(r.evaluations), _evaluation_s(r))
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
    recipe = replace(recipe, **unlogged, nesterov=False if recipe.opt_name == 'sgd' else None)  # the closed division's
    return KnownSet(f'published {facts["round"]}', facts['round'], facts['org'], facts['name'], facts['num_nodes'],
                    facts['num_accelerators'], facts['num_accelerators'] or facts['num_ranks'], facts['accelerator'],
                    None, IMAGENET_TRAIN, recipe, RunTimes(*facts['times']), facts['time_s'], runs, tuple(unlogged))


@cache
def load_published() -> tuple[KnownSet, ...]:
    """The published systems of MLPerf Training that ran ResNet-50 on MXNet, v0.5 to v1.0.

    Source: github.com/mlcommons/training_results_v0.5, v0.6, v0.7 and v1.0.
    """
    text = resources.files(__package__).joinpath('published.json').read_text(encoding='utf-8')
    return tuple(map(_published_set, json.loads(text)['sets']))
