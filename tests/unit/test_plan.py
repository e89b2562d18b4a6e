"""Plan of a configuration for a number of ranks, and learning rates at known steps."""

from dataclasses import replace

import pytest
from helpers import json_table

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_elastic_plan, make_plan, render_plan, resumed_step


def plan_for(world_size, data=None, run=None, schedule=None, **train):
    """Return the plan of a configuration, whose sections are given by keys, for some ranks."""
    sections = {
        'data': DataConfig(**(data or {})),
        'run': RunConfig(**(run or {})),
        'schedule': ScheduleConfig(**(schedule or {})),
        'train': TrainConfig(**train),
    }
    return make_plan(Config(**sections), world_size)


def test_plans_match_published_runs():
    # v0.6 DGX-1: lars, 72 epochs of 770 steps, 5 of warm-up: lars_opt_learning_rate_decay_steps
    # 51590; v0.5 DGX-1 has the same steps
    schedule = {'warmup_epochs': 5, 'decay_epochs': 72}
    plan = plan_for(8, schedule=schedule, local_batch_size=208)
    assert (plan.global_batch_size, plan.steps_per_epoch) == (1664, 770)
    assert plan.train_shard().num_padded == 770 * 1664 - 1_281_167
    assert plan.decay_steps == 51590


@pytest.mark.parametrize(
    'world_size, passes, local',
    [(2, 1, 32), (2, 4, 8), (3, 1, 'such as 63'), (128, 1, 'such as 128')],
)
def test_global_batch_is_shared_evenly_or_refused_with_a_fix(world_size, passes, local):
    keys = {'global_batch_size': 64, 'gradient_accumulation_steps': passes}
    if isinstance(local, int):
        assert plan_for(world_size, **keys).local_batch_size == local
    else:
        with pytest.raises(
            ConfigError, match=f'got 64, expected a multiple of {world_size} .*{local}'
        ):
            plan_for(world_size, **keys)


def test_started_ranks_must_match_the_configuration():
    keys = {'run': {'num_nodes': 2, 'ranks_per_node': 4}, 'local_batch_size': 8}
    assert plan_for(8, **keys).world_size == 8
    with pytest.raises(ConfigError, match='2 x 4 = 8 ranks, expected 4 as started'):
        plan_for(4, **keys)


def test_closed_division_trains_the_epochs_after_its_last_evaluation():
    closed, keys = {'submission_division': 'closed'}, {'local_batch_size': 208, 'max_epochs': 42}
    plan = plan_for(8, run=closed, **keys)
    text = render_plan(plan)
    assert 'evaluated epochs      1, 5, 9, 13, 17 and 6 more (' in text
    assert 'aborts after          42 epochs' in text
    assert (plan.block_epochs(37), plan.block_epochs(41)) == (4, 1)
    assert '17 and 7 more (counted' in render_plan(plan_for(8, **keys))
    with pytest.raises(ConfigError, match='train.max_epochs: got 3, expected at least 4'):
        plan_for(8, run=closed, **{**keys, 'max_epochs': 3, 'eval_offset': 3})


def test_shuffle_by_node_is_in_the_shards_and_the_text():
    plan = plan_for(4, {'shuffle': 'node', 'node_rotation_epochs': 3}, global_batch_size=60)
    plan = replace(plan, nodes=(0, 0, 1, 1))
    text = 'node: each node reads a part of the images, another one every 3 epochs'
    assert text in render_plan(plan)
    assert (plan.train_shard(3).nodes, plan.train_shard(3).rotation_epochs) == ((0, 0, 1, 1), 3)
    assert plan_for(4, global_batch_size=60).train_shard().rotation_epochs is None


STEP, WARM = {'decay': 'step', 'warmup_epochs': 2.0}, '1 to 2: 0.0025 .. 0.1; '


@pytest.mark.parametrize(
    'schedule, max_epochs, text',
    [
        ({**STEP, 'step_epochs': (3.0, 5.0)}, 6, f'{WARM}3: 0.1; 4 to 5: 0.01; 6: 0.001'),
        (
            {'warmup_epochs': 2.0, 'poly_power': 1.0, 'end_lr': 0.0, 'decay_epochs': 4.0},
            4,
            f'{WARM}3 to 4: 0.0975 .. 0',
        ),
        (
            {**STEP, 'step_epochs': (2.5,), 'warmup_epochs': 0.0},
            3,
            '1 to 2: 0.1; 3: 0.1 .. 0.01',
        ),
    ],
)
def test_learning_rate_is_given_for_runs_of_epochs(schedule, max_epochs, text):
    keys = {'schedule': schedule, 'local_batch_size': 10, 'max_epochs': max_epochs}
    plan = plan_for(1, {'num_train': 200}, **keys)
    assert f'learning rate         {text} (epochs' in render_plan(plan)


# --- resume with a different number of ranks
# ----------------------------------------------------------


@pytest.mark.parametrize(
    'train, world_size, batch',
    json_table("""
{"global_batch_size": 64}                                   | 2 | 64
{"global_batch_size": 64}                                   | 3 | 63
{"global_batch_size": 64, "gradient_accumulation_steps": 2} | 3 | 60
{"local_batch_size": 16}                                    | 3 | 48  # 4 ranks of 16 before
{"global_batch_size": 64}                                   | 4 | 64
{"local_batch_size": 16}                                    | 4 | 64
"""),
)
def test_elastic_plan_keeps_the_batch_if_possible_and_scales_the_rate(train, world_size, batch):
    c = Config(train=TrainConfig(**train), run=RunConfig(num_nodes=4, ranks_per_node=1))
    plan = make_elastic_plan(c, world_size, 64)
    scale = pytest.approx(batch / 64)
    assert (plan.global_batch_size, plan.lr_scale, plan.config) == (batch, scale, c)
    rates = [
        p.learning_rate(plan.steps_per_epoch * 20) for p in (plan, replace(plan, lr_scale=1.0))
    ]
    assert rates[0] / rates[1] == scale


@pytest.mark.parametrize('step', [0, 1, 7, 10, 15, 16, 29])
@pytest.mark.parametrize('ranks', [(4, 3), (3, 4)])
def test_resume_on_other_ranks_skips_no_image_and_repeats_less_than_a_batch(ranks, step):
    data = DataConfig(num_train=1000)
    c = Config(data=data, train=TrainConfig(global_batch_size=64))
    before, now = (make_elastic_plan(c, n, 64) for n in ranks)

    def trained(plan, step):
        epoch, step_in_epoch = divmod(step, plan.steps_per_epoch)
        return epoch, step_in_epoch * plan.global_batch_size

    epoch, num_images = trained(before, step)
    resumed = trained(now, resumed_step(now, step, before.global_batch_size))
    assert resumed[0] == epoch and 0 <= num_images - resumed[1] < now.global_batch_size


def test_elastic_plan_without_an_image_per_rank_is_refused():
    with pytest.raises(ConfigError, match='got 2, expected a multiple of 3'):
        make_elastic_plan(Config(train=TrainConfig(global_batch_size=2)), 3, 2)


@pytest.mark.parametrize(
    'num_train, ranks, local, passes', [(100, 3, 4, 2), (96, 2, 4, 1), (5, 4, 2, 1)]
)
@pytest.mark.parametrize('last_batch', ['weight', 'wrap'])
def test_every_image_of_an_epoch_has_the_same_weight(num_train, ranks, local, passes, last_batch):
    data = {'num_train': num_train, 'last_batch': last_batch}
    keys = {'local_batch_size': local, 'gradient_accumulation_steps': passes}
    plan = plan_for(ranks, data, **keys)
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
    plan = plan_for(8, {'last_batch': last_batch}, local_batch_size=208)
    assert [plan.fraction(step) for step in (768, 769)] == pytest.approx([1, factor])
    assert f'last step             learning rate x {text}, its filled part\n' in render_plan(plan)
