"""What a configuration means for a number of ranks."""
from dataclasses import replace

import pytest

from mlperf_rn50.config import Config, DataConfig, RunConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.plan import make_plan, render_plan


def config(**train):
    return Config(train=TrainConfig(**train))


def test_dgx1_of_v05():
    plan = make_plan(config(local_batch_size=208), 8)
    assert (plan.global_batch_size, plan.steps_per_epoch) == (1664, 770)
    assert plan.train_shard().num_padded == 770 * 1664 - 1_281_167


def test_decay_steps_as_published_logs_count_them():
    # v0.6 DGX-1: lars, 72 epochs of 770 steps, 5 of warm-up: lars_opt_learning_rate_decay_steps 51590.
    c = replace(config(local_batch_size=208), schedule=ScheduleConfig(warmup_epochs=5, decay_epochs=72))
    assert make_plan(c, 8).decay_steps == 51590


def test_global_batch_is_shared_evenly_or_refused_with_a_fix():
    assert make_plan(config(global_batch_size=64), 2).local_batch_size == 32
    assert make_plan(config(global_batch_size=64, gradient_accumulation_steps=4), 2).local_batch_size == 8
    with pytest.raises(ConfigError, match=r'got 64, expected a multiple of 3 .* such as 63'):
        make_plan(config(global_batch_size=64), 3)
    with pytest.raises(ConfigError, match='such as 8'):
        make_plan(config(global_batch_size=4), 8)


def test_started_ranks_must_be_the_configured_ones():
    c = replace(config(local_batch_size=8), run=RunConfig(num_nodes=2, ranks_per_node=4))
    assert make_plan(c, 8).world_size == 8
    with pytest.raises(ConfigError, match='2 x 4 = 8 ranks, but 4 were started'):
        make_plan(c, 4)


@pytest.mark.parametrize('offset, first', [(0, [0, 4, 8]), (3, [3, 7, 11])])
def test_evaluations_and_blocks(offset, first):
    plan = make_plan(config(local_batch_size=8, eval_offset=offset, max_epochs=20), 1)
    assert [e for e in range(20) if plan.is_eval_epoch(e)][:3] == first
    assert plan.block_epochs(0) == first[0] + 1
    assert plan.block_epochs(first[0] + 1) == 4


def test_rendered_plan_says_what_is_padded():
    data = DataConfig(dataset='digits', num_train=1437, num_val=360, num_classes=10)
    text = render_plan(make_plan(replace(config(global_batch_size=64, max_epochs=2), data=data), 2))
    assert 'global batch          64' in text
    assert 'steps per epoch       23' in text
    assert '35 training positions (weight 0), 24 validation positions' in text
    assert 'after epochs 1 2 ' in text
    assert text.count(' .. ') == 2
