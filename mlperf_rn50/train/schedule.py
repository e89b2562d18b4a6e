"""Learning rate schedule and float16 loss scale. Pure.

Sources: MLPerf training rules for linear warm-up and polynomial decay; Micikevicius et al. 2017
(https://arxiv.org/abs/1710.03740), section 3.2, for the loss scale. Steps count from 0, and step s
uses point s + 1 of the curve, so that the first warm-up step already learns and the last one
reaches base_lr.
"""

import math
from dataclasses import dataclass

from mlperf_rn50.train.options import ScheduleConfig

GROWTH_STEPS = 2000  # number of consecutive finite steps after which the loss scale is doubled
_LEAST, _MOST = 1.0, 2.0**24  # limits of the loss scale


def learning_rate(config: ScheduleConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step of the whole run; steps count from 0."""
    epochs = (step + 1) / steps_per_epoch
    if epochs < config.warmup_epochs:
        return config.base_lr * epochs / config.warmup_epochs
    if config.decay == 'step':
        # step + 1 would lower the learning rate one step too early, in the last step of the
        # previous epoch.
        num_drops = sum(step / steps_per_epoch >= e for e in config.step_epochs)
        return config.base_lr * config.step_factor**num_drops
    progress = min(
        1.0, (epochs - config.warmup_epochs) / (config.decay_epochs - config.warmup_epochs)
    )
    if config.decay == 'poly':
        shape = (1.0 - progress) ** config.poly_power
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.end_lr + (config.base_lr - config.end_lr) * shape


@dataclass
class LossScale:
    """Factor on the float16 loss: halved after an overflow, doubled after GROWTH_STEPS consecutive
    finite steps.

    All ranks read the outcome of a step at the same later step, so that they decide alike without
    waiting. Overflows in steps that were queued with an earlier, larger scale have no effect.
    """

    value: float
    num_finite_steps: int = 0

    def read(self, used: float, is_finite: bool) -> None:
        """Update the scale after a step; used: the scale of that step."""
        if is_finite:
            self.num_finite_steps += 1
            if self.num_finite_steps == GROWTH_STEPS:
                self._change(self.value * 2)
        elif used <= self.value:
            self._change(used / 2)

    def _change(self, value: float) -> None:
        self.value, self.num_finite_steps = min(max(value, _LEAST), _MOST), 0
