"""The plan of a run that begins or goes on, and what the optimizer is told when it goes on."""
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlperf_rn50.config import Config, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.train import checkpoint
from mlperf_rn50.train.comm import LocalComm
from mlperf_rn50.train.loss_scale import LossScale
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.progress import Progress
from mlperf_rn50.train.start import Host, Resumption, _restore, load_resumption, nodes_of, plan_run


def make_config(folder, **train) -> Config:
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(num_train=640),
                  schedule=ScheduleConfig(base_lr=0.4, warmup_epochs=0, decay_epochs=100),
                  train=TrainConfig(**{'local_batch_size': 8, **train}))


def ranks(number):
    comm = LocalComm()
    comm.world_size = number
    return comm


def progress_of(config, num_ranks, step):
    """How far a run of some ranks is after a step."""
    plan = make_plan(config, num_ranks)
    batch = plan.global_batch_size
    return Progress(step, 5, num_ranks, 0.5, 9.0, batch, batch, 640, 0, [0] * num_ranks,
                    last_lr=plan.learning_rate(step - 1))


def trainer_with(optimizer):
    return SimpleNamespace(restore=lambda arrays: None, array_shapes=dict, optimizer=optimizer,
                           loss_scale=LossScale(1.0))


def test_nodes_are_counted_in_the_order_of_their_first_rank():
    hosts = [Host(name, 0, 1, '0') for name in ('b', 'a', 'b', 'c')]
    assert nodes_of(hosts) == [0, 1, 0, 2]


def test_a_new_run_draws_a_seed_and_knows_its_nodes(tmp_path):
    plan, progress = plan_run(make_config(tmp_path), ranks(4), [0, 0, 1, 1], None, False)
    assert plan.nodes == (0, 0, 1, 1) and plan.config.run.seed == progress.seed
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size, progress.last_lr) == (0, 32, 32, 0.0)


@pytest.mark.parametrize('name', ['sgd', 'lars'])
def test_after_half_of_the_ranks_are_gone_the_momentum_follows_the_rate_that_was_applied_last(tmp_path, name):
    config = make_config(tmp_path)
    before = progress_of(config, 4, 10)  # half an epoch
    resumption = Resumption(tmp_path / 'step_00000010', before, {})
    plan, progress = plan_run(config, ranks(2), [0, 0], resumption, True)
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size) == (20, 16, 32)
    assert (progress.last_lr, progress.num_resumes, plan.lr_scale) == (before.last_lr, 1, 0.5)
    optimizer = SimpleNamespace(_config=OptimizerConfig(name), last_lr=None, is_batch_new=False)
    trainer = trainer_with(optimizer)
    _restore(trainer, LocalComm(), resumption, progress)
    factor = Optimizer._momentum(optimizer, plan.learning_rate(progress.step)) / 0.9
    assert factor == pytest.approx(0.5, abs=2e-3) and factor != 0.5  # a step further in the schedule, too


def test_with_as_many_ranks_sgd_goes_on_as_if_it_had_not_stopped(tmp_path):
    config = make_config(tmp_path)
    before = replace(progress_of(config, 4, 10), loss_scale=512.0, num_finite_steps=7)
    _, progress = plan_run(config, ranks(4), [0] * 4, Resumption(tmp_path, before, None), False)
    optimizer = SimpleNamespace(_config=OptimizerConfig('sgd'), last_lr=None, is_batch_new=False)
    trainer = trainer_with(optimizer)
    _restore(trainer, LocalComm(), Resumption(tmp_path / 'step_00000010', before, {}), progress)
    assert Optimizer._momentum(optimizer, 0.1) == 0.9
    assert trainer.loss_scale == LossScale(512.0, 7)


class OtherRank(LocalComm):
    """Rank 1 of two, of which rank 0 says something."""

    rank = 1

    def __init__(self, said):
        self.said = said

    def gather_object(self, value):
        return [self.said, value]


def test_rank_0_alone_reads_a_checkpoint_and_the_others_hear_of_its_damage(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, progress_of(make_config(tmp_path), 1, 3), {}, 1)
    read = load_resumption(LocalComm(), path)
    assert read.before.step == 3 and read.arrays == {}
    monkeypatch.setattr(checkpoint, 'load', None)  # whoever reads, fails
    heard = load_resumption(OtherRank({'made': vars(read.before)}), path)
    assert heard.before == read.before and heard.arrays is None
    with pytest.raises(UserError, match='it is damaged'):
        load_resumption(OtherRank({'error': 'it is damaged'}), path)


@pytest.mark.parametrize('step, kept', [(100, [40, 100]), (400, [40, 200, 300]), (200, [40, 200]), (40, [40])])
def test_a_run_that_goes_on_finds_its_own_checkpoints_to_be_the_newest(tmp_path, step, kept):
    before = progress_of(make_config(tmp_path), 1, 200)
    for number in (40, 200, 300):
        checkpoint.save(tmp_path, replace(before, step=number), {}, 9)
    origin = tmp_path / ('step_00000040' if step == 40 else 'step_00000200')
    checkpoint.begin_again(tmp_path, origin, replace(before, step=step), {})
    found = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.load(p)[0].step for p in found] == kept
