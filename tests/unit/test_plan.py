"""Plan of a configuration for a number of ranks, and learning rates at known steps."""

from dataclasses import replace

import pytest

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_elastic_plan, make_plan, render_plan, resumed_step


def config(**train):
    return Config(train=TrainConfig(**train))


def test_plans_match_published_runs():
    plan = make_plan(config(local_batch_size=208), 8)  # v0.5 DGX-1
    assert (plan.global_batch_size, plan.steps_per_epoch) == (1664, 770)
    assert plan.train_shard().num_padded == 770 * 1664 - 1_281_167
    # v0.6 DGX-1: lars, 72 epochs of 770 steps, 5 of warm-up: lars_opt_learning_rate_decay_steps
    # 51590.
    schedule = ScheduleConfig(warmup_epochs=5, decay_epochs=72)
    assert make_plan(replace(plan.config, schedule=schedule), 8).decay_steps == 51590


def test_global_batch_is_shared_evenly_or_refused_with_a_fix():
    for passes, local in ((1, 32), (4, 8)):
        c = config(global_batch_size=64, gradient_accumulation_steps=passes)
        assert make_plan(c, 2).local_batch_size == local
    with pytest.raises(ConfigError, match=r'got 64, expected a multiple of 3 .* such as 63'):
        make_plan(config(global_batch_size=64), 3)
    with pytest.raises(ConfigError, match='such as 8'):
        make_plan(config(global_batch_size=4), 8)


def test_started_ranks_must_match_the_configuration():
    c = replace(config(local_batch_size=8), run=RunConfig(num_nodes=2, ranks_per_node=4))
    assert make_plan(c, 8).world_size == 8
    with pytest.raises(ConfigError, match='2 x 4 = 8 ranks, expected 4 as started'):
        make_plan(c, 4)


def test_closed_division_trains_the_epochs_after_its_last_evaluation():
    closed = RunConfig(submission_division='closed')
    c = replace(config(local_batch_size=208, max_epochs=42), run=closed)
    plan = make_plan(c, 8)
    text = render_plan(plan)
    assert 'evaluated epochs      1, 5, 9, 13, 17 and 6 more (' in text
    assert 'aborts after          42 epochs' in text
    assert (plan.block_epochs(37), plan.block_epochs(41)) == (4, 1)
    assert '17 and 7 more (counted' in render_plan(make_plan(replace(c, run=RunConfig()), 8))
    with pytest.raises(ConfigError, match='train.max_epochs: got 3, expected at least 4'):
        make_plan(replace(c, train=replace(c.train, max_epochs=3, eval_offset=3)), 8)


def test_evaluation_batch_is_at_most_the_images_of_a_rank():
    data = DataConfig(num_train=1000, num_val=50_000)
    for train, world_size, batch in [
        ({'local_batch_size': 64}, 1024, 49),
        ({'local_batch_size': 64}, 8, 64),
        ({'local_batch_size': 8, 'eval_batch_size': 500}, 128, 391),
        ({'local_batch_size': 8, 'eval_batch_size': 500}, 100, 500),
        ({'local_batch_size': 8}, 60_000, 1),
    ]:
        shard = make_plan(Config(data=data, train=TrainConfig(**train)), world_size).eval_shard()
        assert shard.local_batch_size == batch
        assert shard.steps_per_epoch > 1 or shard.num_padded < world_size


def test_shuffle_by_node_is_in_the_shards_and_the_text():
    data = DataConfig(shuffle='node', node_rotation_epochs=3)
    plan = make_plan(replace(config(global_batch_size=60), data=data), 4)
    plan = replace(plan, nodes=(0, 0, 1, 1))
    text = 'node: each node reads a part of the images, another one every 3 epochs'
    assert text in render_plan(plan)
    assert (plan.train_shard(3).nodes, plan.train_shard(3).rotation_epochs) == ((0, 0, 1, 1), 3)
    assert make_plan(config(global_batch_size=60), 4).train_shard().rotation_epochs is None


@pytest.mark.parametrize(
    'schedule, max_epochs, text',
    [
        (
            {'decay': 'step', 'step_epochs': (3.0, 5.0)},
            6,
            '1 to 2: 0.0025 .. 0.1; 3: 0.1; 4 to 5: 0.01; 6: 0.001',
        ),
        (
            {'decay': 'poly', 'poly_power': 1.0, 'end_lr': 0.0, 'decay_epochs': 4.0},
            4,
            '1 to 2: 0.0025 .. 0.1; 3 to 4: 0.0975 .. 0',
        ),
        (
            {'decay': 'step', 'step_epochs': (2.5,), 'warmup_epochs': 0.0},
            3,
            '1 to 2: 0.1; 3: 0.1 .. 0.01',
        ),
    ],
)
def test_learning_rate_is_given_for_runs_of_epochs(schedule, max_epochs, text):
    schedule = ScheduleConfig(**{'warmup_epochs': 2.0, **schedule})
    c = Config(
        data=DataConfig(num_train=200),
        schedule=schedule,
        train=TrainConfig(local_batch_size=10, max_epochs=max_epochs),
    )
    assert f'learning rate         {text} (epochs' in render_plan(make_plan(c, 1))


# --- resume with a different number of ranks
# ----------------------------------------------------------


@pytest.mark.parametrize(
    'train, world_size, batch, scale',
    [
        ({'global_batch_size': 64}, 2, 64, 1.0),
        ({'global_batch_size': 64}, 3, 63, 63 / 64),
        ({'global_batch_size': 64, 'gradient_accumulation_steps': 2}, 3, 60, 60 / 64),
        ({'local_batch_size': 16}, 3, 48, 48 / 64),  # 4 ranks of 16 before
    ],
)
def test_elastic_plan_keeps_the_batch_if_possible_and_scales_the_rate(
    train, world_size, batch, scale
):
    c = replace(config(**train), run=RunConfig(num_nodes=4, ranks_per_node=1))
    plan = make_elastic_plan(c, world_size, 64)
    assert (plan.global_batch_size, plan.lr_scale, plan.config) == (batch, pytest.approx(scale), c)
    steady = plan.steps_per_epoch * 20
    unscaled = replace(plan, lr_scale=1.0)
    assert plan.learning_rate(steady) == pytest.approx(scale * unscaled.learning_rate(steady))


def test_elastic_plan_without_an_image_per_rank_is_refused():
    with pytest.raises(ConfigError, match='got 2, expected a multiple of 3'):
        make_elastic_plan(config(global_batch_size=2), 3, 2)


@pytest.mark.parametrize('before, now', [(64, 64), (64, 48), (48, 64)])
def test_resumed_step_skips_no_image_and_repeats_less_than_a_batch(before, now):
    data = DataConfig(num_train=1000, num_val=10, num_classes=10)
    plan = make_plan(Config(data=data, train=TrainConfig(global_batch_size=now)), 1)
    steps_before = -(-1000 // before)
    for step in range(3 * steps_before + 1):
        epoch, seen = step // steps_before, step % steps_before * before
        got = resumed_step(plan, step, before)
        assert got // plan.steps_per_epoch == epoch
        assert 0 <= seen - got % plan.steps_per_epoch * now < now


@pytest.mark.parametrize(
    'num_train, ranks, local, passes', [(100, 3, 4, 2), (96, 2, 4, 1), (5, 4, 2, 1)]
)
@pytest.mark.parametrize('last_batch', ['weight', 'wrap'])
def test_every_image_of_an_epoch_has_the_same_weight(num_train, ranks, local, passes, last_batch):
    train = TrainConfig(local_batch_size=local, gradient_accumulation_steps=passes)
    data = DataConfig(num_train=num_train, last_batch=last_batch)
    plan = make_plan(Config(data=data, train=train), ranks)
    # also the factor on the learning rate
    filled = sum(plan.fraction(s) for s in range(plan.steps_per_epoch))
    counted = num_train if last_batch == 'weight' else plan.global_batch_size * plan.steps_per_epoch
    assert filled * plan.global_batch_size == pytest.approx(counted)
    assert plan.train_shard().num_counted == counted
    assert plan.loss_weight == 1 / (local * passes)  # for any number of ranks


@pytest.mark.parametrize(
    'last_batch, factor, text', [('weight', 1551 / 1664, '0.9321'), ('wrap', 1, '1')]
)
def test_plan_gives_the_filled_part_of_the_last_step(last_batch, factor, text):
    c = replace(config(local_batch_size=208), data=DataConfig(last_batch=last_batch))
    plan = make_plan(c, 8)
    assert [plan.fraction(step) for step in (768, 769)] == pytest.approx([1, factor])
    assert f'last step             learning rate x {text}, its filled part\n' in render_plan(plan)
