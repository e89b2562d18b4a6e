"""Learning rate and evaluation epochs of any schedule."""

from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.schedule import learning_rate


@st.composite
def schedules(draw):
    warmup = draw(st.floats(0, 10))
    return ScheduleConfig(
        base_lr=draw(st.floats(0.01, 10)),
        warmup_epochs=warmup,
        decay=draw(st.sampled_from(['poly', 'cosine', 'step'])),
        decay_epochs=warmup + draw(st.floats(1, 50)),
        end_lr=draw(st.floats(0, 0.01)),
    )


@given(schedules(), st.integers(1, 100))
def test_learning_rate_rises_to_its_base_in_warmup_and_never_later(schedule, steps_per_epoch):
    warmup = int(schedule.warmup_epochs * steps_per_epoch)
    rates = [learning_rate(schedule, s, steps_per_epoch) for s in range(warmup + 100)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-12 for a, b in zip(falling, falling[1:]))
    rates.append(learning_rate(schedule, 5000, steps_per_epoch))
    assert 0 < min(rates) + 1e-12 and max(rates) <= schedule.base_lr * (1 + 1e-9)


@given(period=st.integers(1, 8), data=st.data(), max_epochs=st.integers(1, 60))
def test_evaluations_are_a_period_apart_and_only_the_open_division_adds_the_last_epoch(
    period, data, max_epochs
):
    offset = data.draw(st.integers(0, min(period, max_epochs) - 1))
    train = TrainConfig(
        local_batch_size=8, eval_period=period, eval_offset=offset, max_epochs=max_epochs
    )
    grid = list(range(offset, max_epochs, period))
    for division, expected in (('closed', grid), ('open', sorted({*grid, max_epochs - 1}))):
        plan = make_plan(Config(train=train, run=RunConfig(submission_division=division)), 1)
        assert [e for e in range(max_epochs) if plan.is_eval_epoch(e)] == expected
        for epoch in range(max_epochs):
            end = min([x for x in expected if x >= epoch], default=max_epochs - 1)
            assert epoch + plan.block_epochs(epoch) - 1 == end
