"""The learning rate at a step. Pure.

Source: MLPerf training rules (linear warm-up, polynomial decay); step and cosine as in common use.
Steps count from 0, and step s uses the point s + 1 of the curve, so that the first step of a warm-up
already learns and the last reaches base_lr.
"""
import math

from mlperf_rn50.config import ScheduleConfig


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
