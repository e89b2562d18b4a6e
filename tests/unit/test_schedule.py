"""The learning rate at known points, step for step."""
import pytest

from mlperf_rn50.config import ScheduleConfig
from mlperf_rn50.train.schedule import learning_rate


def test_warmup_reaches_base_lr_at_its_last_step():
    s = ScheduleConfig(base_lr=1.0, warmup_epochs=2, decay='step', decay_epochs=90, step_epochs=(30.0,))
    assert [learning_rate(s, step, 5) for step in range(11)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


def test_step_decay_drops_at_the_first_step_of_its_epochs():
    s = ScheduleConfig(base_lr=0.4, warmup_epochs=0, decay='step', decay_epochs=90, step_epochs=(10.0, 60.0))
    per_epoch = 7
    rates = [learning_rate(s, e * per_epoch + d, per_epoch) for e in (10, 60) for d in (-1, 0)]
    assert rates == pytest.approx([0.4, 0.04, 0.04, 0.004])


def test_decays_by_hand_down_to_end_lr():
    poly = ScheduleConfig(base_lr=2.0, warmup_epochs=1, decay='poly', decay_epochs=5, end_lr=0.0, poly_power=2)
    assert [learning_rate(poly, step, 4) for step in (3, 11, 19, 100)] == pytest.approx([2.0, 0.5, 0.0, 0.0])
    cosine = ScheduleConfig(base_lr=1.0, warmup_epochs=0, decay='cosine', decay_epochs=2, end_lr=0.0)
    assert [learning_rate(cosine, step, 2) for step in (1, 3)] == pytest.approx([0.5, 0.0])
    kept = ScheduleConfig(base_lr=1.0, warmup_epochs=0, decay='poly', decay_epochs=2, end_lr=1e-4)
    assert learning_rate(kept, 1000, 2) == pytest.approx(1e-4)
