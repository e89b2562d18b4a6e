"""The learning rate at a step, and the loss scale of float16. Pure.

Source: MLPerf training rules (linear warm-up, polynomial decay); step and cosine as in common use.
Steps count from 0, and step s uses the point s + 1 of the curve, so that the first step of a warm-up
already learns and the last reaches base_lr. Loss scale: Micikevicius et al. 2017
(https://arxiv.org/abs/1710.03740), section 3.2.
"""
import math
from dataclasses import dataclass

from mlperf_rn50.train.options import ScheduleConfig

GROWTH_STEPS = 2000
_LEAST, _MOST = 1.0, 2.0**24


def learning_rate(config: ScheduleConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a global step, from 0."""
    epochs = (step + 1) / steps_per_epoch
    if epochs < config.warmup_epochs:
        return config.base_lr * epochs / config.warmup_epochs
    if config.decay == 'step':
        # A step belongs to the epoch it is in, hence `step` and not `step + 1`.
        num_drops = sum(step / steps_per_epoch >= e for e in config.step_epochs)
        return config.base_lr * config.step_factor ** num_drops
    progress = min(1.0, (epochs - config.warmup_epochs) / (config.decay_epochs - config.warmup_epochs))
    if config.decay == 'poly':
        shape = (1.0 - progress) ** config.poly_power
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.end_lr + (config.base_lr - config.end_lr) * shape


def is_eval_epoch(epoch: int, eval_period: int, eval_offset: int, max_epochs: int) -> bool:
    """Whether an evaluation follows an epoch (from 0): on the grid of the rules, and after the last one."""
    return epoch % eval_period == eval_offset or epoch == max_epochs - 1


@dataclass
class LossScale:
    """Halved after a step that overflowed, doubled after GROWTH_STEPS in a row that did not.

    A step's outcome is read some steps later, by every rank at the same step, so all ranks decide alike and
    none waits. Overflows of steps that were under way with an older, larger scale change nothing.

    Args:
        value: what the loss of the next step is multiplied with.
        num_finite_steps: steps since the last change.
    """

    value: float
    num_finite_steps: int = 0

    def read(self, used: float, is_finite: bool) -> None:
        """The outcome of a step that used a scale."""
        if is_finite:
            self.num_finite_steps += 1
            if self.num_finite_steps == GROWTH_STEPS:
                self._change(self.value * 2)
        elif used <= self.value:
            self._change(used / 2)

    def _change(self, value: float) -> None:
        self.value, self.num_finite_steps = min(max(value, _LEAST), _MOST), 0
