"""Recipe of a run: its hyperparameters, from the optimizer keys of a log. Pure functions."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.mllog import events
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN
from mlperf_rn50.runfolder.jsonl import number

_MAX_EPOCHS = 200  # an ImageNet schedule logged as longer than this is counted in steps
_MAX_VALUE = 1e9  # larger numbers in a log are ignored
_MAX_SCHEDULE = 10_000  # maximum epochs of a plausible schedule that is logged in steps


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run, None for those that are not logged."""

    opt_name: str | None
    global_batch_size: int
    base_lr: float | None = None
    warmup_epochs: float | None = None
    decay: str | None = None  # 'poly', 'cosine', or 'step' for rates that fall at step_epochs
    decay_epochs: float | None = None  # of the whole schedule, including warm-up
    end_lr: float | None = None
    poly_power: float | None = None
    step_epochs: tuple[float, ...] | None = None  # epochs at which the rate falls to a tenth
    weight_decay: float | None = None
    momentum: float | None = None
    label_smoothing: float | None = None
    target_accuracy: float | None = None
    eval_period: int | None = None
    first_eval_epoch: int | None = None  # epochs trained before the first evaluation
    nesterov: bool | None = None

    @property
    def eval_offset(self) -> int | None:
        """train.eval_offset of a configuration with these evaluations, or None if unknown."""
        if self.first_eval_epoch is None or self.eval_period is None:
            return None
        return (self.first_eval_epoch - 1) % self.eval_period

    @property
    def last_eval_epoch(self) -> int | None:
        """Number of epochs before the last evaluation within the schedule, or None if unknown or if
        there is none."""
        if self.decay_epochs is None or not self.eval_period or self.first_eval_epoch is None:
            return None
        # 0.1, because the length may be inexact
        room = math.floor(self.decay_epochs + 0.1) - self.first_eval_epoch
        if room < 0:
            return None
        return self.first_eval_epoch + room // self.eval_period * self.eval_period


def _number(optimizer: Mapping[str, Any], *names: str) -> float | None:
    """Return the value of the first of these keys that has a valid number."""
    values = (number(optimizer.get(name), 0, _MAX_VALUE) for name in names)
    return next((v for v in values if v is not None), None)


def eval_grid(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[int | None, int | None]:
    """Return the most frequent number of epochs between evaluations, and the number before the
    first one."""
    epochs = [sorted({epoch for epoch, _ in curve}) for curve in curves]  # logs may be out of order
    gaps = Counter(b - a for each in epochs for a, b in zip(each, each[1:]))
    first = min((each[0] for each in epochs if each), default=None)
    return gaps.most_common(1)[0][0] if gaps else None, first


def make_recipe(
    optimizer: Mapping[str, Any],
    batch: int,
    samples: int | None,
    target: float | None,
    curves: Sequence[Sequence[tuple[int, float]]],
) -> Recipe:
    """Return the recipe from the optimizer keys, whose names depend on the round."""
    name = optimizer.get('opt_name')
    prefix, other = ('lars', 'sgd') if name == 'lars' else ('sgd', 'lars')
    warmup = _number(
        optimizer,
        f'{prefix}_opt_learning_rate_warmup_epochs',
        'opt_learning_rate_warmup_epochs',
        f'{other}_opt_learning_rate_warmup_epochs',
    )
    steps = _number(optimizer, f'{prefix}_opt_learning_rate_decay_steps')
    boundaries = optimizer.get('opt_learning_rate_decay_boundary_epochs')
    if not isinstance(boundaries, (list, tuple)):
        boundaries = ()
    falls = tuple(number(b, 0, _MAX_VALUE) for b in boundaries)
    has_falls = bool(falls) or optimizer.get(events.LR_DECAY) == 'step'  # a constant rate
    is_stepped = has_falls and None not in falls
    decay = None
    if is_stepped:
        decay = 'step'
    elif steps is not None:
        decay = 'cosine' if optimizer.get(events.LR_DECAY) == 'cosine' else 'poly'
    # Logs contain the epochs of the whole schedule or, always with data sets other than ImageNet,
    # the steps after the warm-up. An implausibly long schedule is unknown.
    epochs = steps
    if steps is not None and (samples not in (None, IMAGENET_TRAIN) or steps > _MAX_EPOCHS):
        epochs = steps / math.ceil((samples or IMAGENET_TRAIN) / batch) + (warmup or 0.0)
        if epochs > _MAX_SCHEDULE:
            epochs = None
    nesterov = optimizer.get('sgd_opt_nesterov')
    period, first = eval_grid(curves)
    return Recipe(
        opt_name=name if isinstance(name, str) else None,
        global_batch_size=batch,
        base_lr=_number(
            optimizer,
            f'{prefix}_opt_base_learning_rate',
            'opt_base_learning_rate',
            'opt_learning_rate',
        ),
        warmup_epochs=warmup,
        decay=decay,
        decay_epochs=epochs,
        end_lr=_number(
            optimizer, f'{prefix}_opt_end_learning_rate', f'{other}_opt_end_learning_rate'
        ),
        poly_power=_number(optimizer, f'{prefix}_opt_learning_rate_decay_poly_power'),
        step_epochs=tuple(float(b) for b in falls if b is not None) if is_stepped else None,
        weight_decay=_number(optimizer, f'{prefix}_opt_weight_decay', 'model_l2_regularization'),
        momentum=_number(optimizer, f'{prefix}_opt_momentum', 'opt_momentum'),
        label_smoothing=_number(optimizer, 'label_smoothing'),
        target_accuracy=target,
        eval_period=period,
        first_eval_epoch=first,
        nesterov=nesterov if isinstance(nesterov, bool) else None,
    )
