"""Learning rates at known steps, and the loss scale after overflows."""

import pytest
from helpers import json_table

from mlperf_rn50.train.options import ScheduleConfig
from mlperf_rn50.train.schedule import GROWTH_STEPS, LossScale, learning_rate


@pytest.mark.parametrize(
    'keys, steps_per_epoch, steps, expected',
    json_table("""
{"warmup_epochs": 2, "decay": "step"} | 5 | [0, 1, 8, 9, 10] | [0.1, 0.2, 0.9, 1.0, 1.0]
# drops at the first step of its epochs
{"decay": "step", "step_epochs": [10.0, 60.0]} | 7 | [69, 70, 419, 420] | [1.0, 0.1, 0.1, 0.01]
{"warmup_epochs": 1, "decay_epochs": 5} | 4 | [3, 11, 19, 100] | [1.0, 0.25, 0.0, 0.0]
{"decay": "cosine", "decay_epochs": 2}  | 2 | [1, 3]           | [0.5, 0.0]
{"decay_epochs": 2, "end_lr": 1e-4}     | 4 | [1000]           | [1e-4]
"""),
    ids=str,
)
def test_learning_rates(keys, steps_per_epoch, steps, expected):
    config = ScheduleConfig(**{'base_lr': 1.0, 'warmup_epochs': 0, 'end_lr': 0.0, **keys})
    rates = [learning_rate(config, step, steps_per_epoch) for step in steps]
    assert rates == pytest.approx(expected)


def test_loss_scale_is_halved_once_for_all_steps_in_flight():
    scale = LossScale(1024.0)
    for used, is_finite in zip((1024, 1024, 1024, 1024, 512, 256), (1, 0, 0, 1, 0, 1)):
        scale.read(used, is_finite)
    assert scale == LossScale(256.0, 1)
    scale.read(1024, False)  # from a step before the most recent changes
    assert scale == LossScale(256.0, 1)


def test_loss_scale_is_doubled_after_enough_steps_and_bounded():
    scale, low, high = LossScale(1024.0), LossScale(1.0), LossScale(2.0**24, GROWTH_STEPS - 1)
    for _ in range(GROWTH_STEPS):
        scale.read(scale.value, True)
    low.read(1.0, False)
    high.read(high.value, True)
    assert (scale, low.value, high.value) == (LossScale(2048.0, 0), 1.0, 2.0**24)
