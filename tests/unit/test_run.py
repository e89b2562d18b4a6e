"""Start and resumption of a run: plan, checkpoint, configuration changes and lock."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mlperf_rn50.config import Config, RunConfig, to_tree
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import temporary_of
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.train import run as runs
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.changes import find_changes, free_keys, parse_allowed
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState, dump_state
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.loop import RankPlace
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.options import OptimizerConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.resume import load_resumption, plan_resumed, restore
from mlperf_rn50.train.run import hold_run, nodes_of, plan_new
from mlperf_rn50.train.schedule import LossScale
from mlperf_rn50.train.trainer import Trainer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat


def make_config(folder, **train) -> Config:
    return Config(
        run=RunConfig(dir=str(folder)),
        data=DataConfig(num_train=640, synthetic=True),
        schedule=ScheduleConfig(base_lr=0.4, warmup_epochs=0, decay_epochs=100),
        train=TrainConfig(**{'local_batch_size': 8, **train}),
    )


def progress_of(config, num_ranks, step):
    """Return the progress of a run after a step."""
    plan = make_plan(config, num_ranks)
    batch = plan.global_batch_size
    return Progress(step, 5, num_ranks, 0.5, 9.0, batch, batch, 640, 0, [0] * num_ranks)


def test_nodes_are_counted_in_the_order_of_their_first_rank():
    hosts = [RankPlace(name, 0, 1, '0') for name in ('b', 'a', 'b', 'c')]
    assert nodes_of(hosts) == [0, 1, 0, 2]


def test_new_run_draws_a_seed_and_has_its_nodes(tmp_path):
    comm = Comm()
    comm.world_size = 4
    plan, progress = plan_new(make_config(tmp_path), comm, [0, 0, 1, 1], '')
    assert plan_new(make_config(tmp_path), comm, [0, 0, 1, 1], '')[1].seed != progress.seed
    assert plan.nodes == (0, 0, 1, 1) and plan.config.run.seed == progress.seed
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size) == (0, 32, 32)


def test_refused_data_leaves_no_file(tmp_path):
    config = make_config(tmp_path / 'run')
    config = replace(config, data=replace(config.data, synthetic=False, dir=str(tmp_path)))
    job = runs.Job(config, Comm(), Heartbeat())
    with pytest.raises(UserError, match='manifest.json: no such file'), runs.open_run(job):
        pass
    assert list(tmp_path.iterdir()) == []


def test_all_ranks_of_a_new_run_have_the_layout_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(Comm, 'from_rank_0', lambda self, make: [5, 'NHWC', make()[-1]])
    plan, progress = plan_new(make_config(tmp_path), Comm(), [0], '')
    assert plan.config.model.layout == progress.config['model']['layout'] == 'NHWC'


def loaded_from(before, **trainer):
    return checkpoint.LoadedCheckpoint(
        Path('none/step_00000010'), before, TrainerState({}, **trainer)
    )


def resume(before, now, num_ranks, *, is_elastic=False, allowed=(), nodes=None):
    """Return plan and progress of a run resumed with a configuration."""
    return plan_resumed(
        now, num_ranks, nodes or [0] * num_ranks, loaded_from(before), is_elastic, allowed
    )


def test_resume_accepts_the_same_images_in_any_folder_and_no_others(tmp_path):
    config = make_config(tmp_path)
    before = replace(progress_of(config, 2, 10), data_sha256='a' * 64)

    def resumed(before, digest, folder='elsewhere', **keys):
        now = replace(config, data=replace(config.data, dir=folder))
        return plan_resumed(now, 2, [0, 0], loaded_from(before), digest=digest, **keys)[
            1
        ].data_sha256

    assert resumed(before, 'a' * 64, is_elastic=False) == 'a' * 64
    # an older checkpoint
    assert resumed(replace(before, data_sha256=''), 'b' * 64, is_elastic=False) == 'b' * 64
    for is_elastic in (False, True):
        with pytest.raises(
            UserError,
            match='^[^\n]*images and classes in elsewhere: got SHA-256 bbbbbbbbbbbb…, the '
            'checkpoint has SHA-256 aaaaaaaaaaaa…; use the same data$',
        ):
            resumed(before, 'b' * 64, is_elastic=is_elastic, allowed=['data.dir'])


def restored(loaded, progress, optimizer='sgd', policy='dynamic'):
    """Return the trainer of a run restored from a checkpoint."""
    shapes = {n: a.shape for n, a in loaded.trainer.arrays.items()}
    plan = SimpleNamespace(config=Config(train=TrainConfig(loss_scale_policy=policy)))
    trainer = SimpleNamespace(
        _plan=plan,
        _comm=Comm(),
        settle=Mock(),
        broadcast=Mock(),
        _set=Mock(),
        array_shapes=lambda: shapes,
        loss_scale=LossScale(1.0),
        optimizer=SimpleNamespace(_config=OptimizerConfig(optimizer)),
    )
    trainer.load_state = partial(Trainer.load_state, trainer)
    restore(SimpleNamespace(comm=Comm(), progress=progress, trainer=trainer), loaded)
    return trainer


@pytest.mark.parametrize('name', ['sgd', 'lars'])
def test_momentum_with_half_the_ranks_follows_the_last_applied_rate(tmp_path, name):
    config = make_config(tmp_path)
    before = progress_of(config, 4, 10)  # half an epoch
    plan, progress = resume(before, config, 2, is_elastic=True)
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size) == (20, 16, 32)
    assert (progress.num_resumes, plan.lr_scale) == (1, 0.5)
    last_lr = make_plan(config, 4).learning_rate(9)
    optimizer = restored(loaded_from(before, last_lr=last_lr), progress, name).optimizer
    factor = Optimizer._correction(optimizer, plan.learning_rate(progress.step))
    # the schedule is also one step further
    assert factor == pytest.approx(0.5, abs=2e-3) and factor != 0.5


def test_sgd_with_the_same_ranks_resumes_unchanged(tmp_path):
    config = make_config(tmp_path)
    loaded = loaded_from(
        progress_of(config, 4, 10), last_lr=0.2, loss_scale=512.0, num_finite_steps=7
    )
    progress = resume(loaded.progress, config, 4)[1]
    trainer = restored(loaded, progress)
    assert Optimizer._correction(trainer.optimizer, 0.1) == 1
    assert trainer.loss_scale == LossScale(512.0, 7)
    # A static scale is that of the configuration, which --allow-changed may have changed.
    assert restored(loaded, progress, policy='static').loss_scale == LossScale(1.0)


def test_epoch_restarts_if_the_nodes_of_a_shuffle_by_node_change(tmp_path):
    config = make_config(tmp_path)
    config = replace(config, data=replace(config.data, shuffle='node'))
    before = replace(progress_of(config, 4, 30), nodes=[0, 0, 1, 1])
    assert [resume(before, config, 4, nodes=n)[1].step for n in ([0, 0, 1, 1], [0, 1, 0, 1])] == [
        30,
        20,
    ]


class OtherRank(Comm):
    """Rank 1 of two; `shared` has the values from rank 0 in order."""

    rank = 1

    def __init__(self, *shared):
        self.shared = list(shared)

    def gather_object(self, value, only_on_rank_0=False):
        return [self.shared.pop(0), value]


@pytest.fixture
def run(tmp_path):
    """Run folder with a log and two checkpoints, at steps 3 and 6."""
    folder = new_run(tmp_path)
    folder.result.touch()
    for step in (3, 6):
        checkpoint.save(
            folder.checkpoints,
            progress_of(make_config(tmp_path), 1, step),
            TrainerState({'a': np.ones(2)}, 0.4),
            2,
        )
    return folder


def test_only_rank_0_reads_a_checkpoint_and_shares_it(run, monkeypatch):
    older, newer = checkpoint.list_checkpoints(run.checkpoints)
    read = load_resumption(Comm(), run, run.checkpoints)
    assert (read.path, read.progress.step, set(read.trainer.arrays)) == (newer, 6, {'a'})
    monkeypatch.setattr(checkpoint, '_load', None)  # a rank that reads fails
    shared = [str(older), dump_state(read.progress, read.trainer)]
    other = load_resumption(OtherRank(None, shared), run, run.checkpoints)
    assert (other.path, other.progress, other.trainer) == (
        older,
        read.progress,
        replace(read.trainer, arrays={}),
    )
    with pytest.raises(UserError, match='it is damaged'):
        load_resumption(OtherRank('it is damaged'), run, run.checkpoints)


def test_converged_run_is_not_resumed_and_its_log_is_unchanged(run):
    RunLog(run.result, None, is_resumed=True).run_stop('converged')
    log = run.result.read_bytes()
    with pytest.raises(
        UserError, match='a run that reached its target; there is nothing to resume$'
    ):
        load_resumption(Comm(), run, run.checkpoints)
    assert run.result.read_bytes() == log
    older = run.checkpoints.rename(run.dir / 'checkpoints_1')
    RunFolder(run.dir, 1).result.touch()
    with pytest.raises(
        UserError, match=f'nothing to resume; run 1 has not: mlperf-rn50 train --resume {older}$'
    ):
        load_resumption(Comm(), run, run.checkpoints)


def test_damaged_checkpoint_is_put_aside_only_when_an_older_one_is_restored(run):
    older, newer = checkpoint.list_checkpoints(run.checkpoints)
    (newer / 'arrays.npz').write_bytes(b'x')
    loaded = load_resumption(Comm(), run, run.checkpoints)
    assert checkpoint.list_checkpoints(run.checkpoints) == [older, newer]
    with pytest.raises(UserError, match=f'the previous one is {older}: --resume {older}'):
        load_resumption(Comm(), run, newer)
    restored(loaded, loaded.progress)
    assert checkpoint.list_checkpoints(run.checkpoints) == [older] and not loaded.trainer.arrays
    assert (run.checkpoints / f'damaged_{newer.name}' / 'state.json').exists()


def test_changed_configuration_is_refused_unless_allowed(tmp_path):
    config = make_config(tmp_path)
    before = replace(progress_of(config, 4, 10), config=to_tree(config))
    other = replace(
        config,
        schedule=replace(config.schedule, base_lr=0.5),
        data=replace(config.data, crop='none'),
        train=replace(config.train, target_accuracy=0.5, max_epochs=9),
    )
    with pytest.raises(UserError) as e:
        resume(before, other, 4, allowed=['data.crop'])
    assert str(e.value).endswith(
        'the configuration differs from the earlier one: schedule.base_lr 0.4 -> 0.5; restore it, '
        'or accept these changes with --allow-changed data.crop,schedule.base_lr'
    )
    plan, progress = resume(before, other, 4, allowed=['schedule.base_lr', 'data.crop'])
    assert progress.config == to_tree(plan.config) and progress.config['schedule']['base_lr'] == 0.5
    assert [str(c) for c in find_changes(before.config, plan.config)] == [
        'data.crop random_resized -> none',
        'schedule.base_lr 0.4 -> 0.5',
        'train.target_accuracy 0.749 -> 0.5',
        'train.max_epochs null -> 9',
    ]


def test_resumed_run_keeps_seed_data_ranks_and_batch(tmp_path):
    config = make_config(tmp_path)
    before = replace(progress_of(config, 4, 10), config=to_tree(config))  # seed 5 was drawn
    assert resume(before, config, 4)[0].config.run.seed == 5
    for section, key, value, num_ranks, message in (
        ('run', 'seed', 6, 4, 'run.seed: got 6, the checkpoint has 5'),
        ('data', 'num_train', 320, 4, 'data.num_train: got 320, the checkpoint has 640'),
        ('run', 'seed', 5, 2, 'ranks: got 2, the checkpoint has 4; start 4 ranks'),
        (
            'train',
            'local_batch_size',
            4,
            4,
            'train.global_batch_size: got 16, the checkpoint has 32',
        ),
    ):
        other = replace(config, **{section: replace(getattr(config, section), **{key: value})})
        with pytest.raises(UserError, match=message):
            resume(before, other, num_ranks, allowed=[f'{section}.{key}'])


def test_keys_that_may_change_must_exist():
    known = {f'{name}.{key}' for name, keys in to_tree(Config()).items() for key in keys}
    assert (
        {'run.seed', 'checkpoint.keep', 'data.dir', 'comm.num_buckets', 'train.max_epochs'}
        < free_keys()
        < known
    )
    assert not free_keys() & {
        'data.crop',
        'optimizer.momentum',
        'schedule.base_lr',
        'train.precision',
    }
    assert parse_allowed('') == () and parse_allowed('data.crop,run.dir') == (
        'data.crop',
        'run.dir',
    )
    with pytest.raises(UserError, match='got schedule.base_lrr, .* did you mean schedule.base_lr?'):
        parse_allowed('data.crop,schedule.base_lrr')


def hold(run):
    return hold_run(Comm(), run, SimpleNamespace(beat=lambda: None))


def test_writer_locks_a_run_and_removes_leftovers_of_a_killed_one(run, capsys, monkeypatch):
    leftovers = [
        run.checkpoints / '.step_00000009.1.tmp',
        run.checkpoints / '.step_00000003.1.old.tmp',
    ]
    for path in leftovers:
        path.mkdir()
        (path / 'arrays.npz').write_bytes(b'half')
    run.weights.mkdir()
    files = run.weights / 'best.npz', run.weights / 'last.json', run.config, run.env, run.trace(3)
    leftovers += map(temporary_of, files)
    others = [
        temporary_of(RunFolder(run.dir, 1).config),
        run.dir / '.config.yaml',
        run.checkpoints / 'step_x',
    ]
    for path in (*leftovers[2:], *others):
        path.write_text('half')
    monkeypatch.setattr(runs, '_LOCK_LIMIT_S', 0.0)
    monkeypatch.setattr(runs, '_LOCK_PERIOD_S', 0.01)
    with open(run.lock, 'a') as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write('process 7 on h9')
        other.flush()
        with (
            pytest.raises(UserError, match=r'\.run_0\.lock: process 7 on h9 writes this run'),
            hold(run),
        ):
            pass
        assert capsys.readouterr().err.count('waiting for it') == 1
        assert all(path.exists() for path in leftovers)  # the writer is alive
    with hold(run):
        assert not any(path.exists() for path in leftovers) and all(
            path.exists() for path in others
        )
        with pytest.raises(UserError, match=f'process {os.getpid()} on'), hold(run):
            pass
    with hold(run):  # the lock was released
        pass


def test_new_run_removes_leftovers_of_a_killed_one(run, tmp_path):
    leftovers, written = (
        folder.checkpoints / '.step_00000009.1.tmp' for folder in (run, new_run(tmp_path))
    )
    for path in (leftovers, written):
        path.mkdir(parents=True)
    with open(RunFolder(tmp_path, 1).lock, 'a') as other, hold(new_run(tmp_path)):
        assert not leftovers.exists() and not written.exists()
        written.mkdir()
        fcntl.flock(other, fcntl.LOCK_EX)
        with hold(new_run(tmp_path)):
            assert written.exists()  # the writer is alive


def test_lock_is_awaited_until_the_other_writer_ends(run, monkeypatch):
    monkeypatch.setattr(runs, '_LOCK_PERIOD_S', 0.0)
    other = open(run.lock, 'a')
    fcntl.flock(other, fcntl.LOCK_EX)
    beats = []

    def now():
        beats.append(1)
        if len(beats) == 3:
            other.close()

    with hold_run(Comm(), run, SimpleNamespace(beat=now)):
        assert len(beats) == 3


def test_file_system_without_locks_is_a_warning(run, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, 'flock', Mock(side_effect=OSError(95, 'Operation not supported')))
    leftovers = run.checkpoints / '.step_00000009.1.tmp'
    leftovers.mkdir()
    with hold(run):
        assert 'this file system has no locks (Operation not supported)' in capsys.readouterr().err
        assert leftovers.exists()  # the owner is unknown


def test_run_numbers_are_unique(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: new_run(tmp_path), range(64)))
    assert sorted(run.index for run in runs) == list(range(64))
    assert not list(tmp_path.glob('result*'))  # no empty log for readers
    (tmp_path / 'result_70.txt').touch()
    assert new_run(tmp_path).index == 71


@pytest.mark.parametrize(
    'step, kept', [(100, [40, 100]), (400, [40, 200, 300]), (200, [40, 200]), (40, [40])]
)
def test_checkpoints_of_a_resumed_run_are_the_newest(tmp_path, step, kept):
    before = progress_of(make_config(tmp_path), 1, 200)
    for number in (40, 200, 300):
        checkpoint.save(tmp_path, replace(before, step=number), TrainerState({}), 9)
    origin = tmp_path / ('step_00000040' if step == 40 else 'step_00000200')
    checkpoint.rewind(tmp_path, origin, replace(before, step=step), TrainerState({}))
    paths = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.load(p)[0].step for p in paths] == kept


def test_new_keys_and_defaults_changed_to_null_are_not_changes():
    before = to_tree(Config())
    del before['optimizer']['nesterov']
    before['data']['pad_to_4_channels'] = False  # gives the same results as null
    assert not find_changes(before, Config())
    now = Config(optimizer=OptimizerConfig(nesterov=True))
    assert [str(c) for c in find_changes(before, now)] == ['optimizer.nesterov false -> true']
    before['model']['fused_bn_relu'] = False
    # chosen
    assert [str(c) for c in find_changes(before, Config())] == ['model.fused_bn_relu false -> null']
    del before['model']['fused_bn_add_relu']  # added when the default became null
    assert not find_changes(before, Config())


@pytest.mark.parametrize(
    'name, number',
    [
        ('weights/best.npz', 1),
        ('checkpoints/step_00000003/state.json', 1),
        ('env.json', 1),
        ('tensorboard/events', 1),
        ('notes.txt', 0),
        ('telemetry_4_host.jsonl', 5),
    ],
)
def test_number_of_a_new_run_depends_on_files_that_it_would_replace(tmp_path, name, number):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'run').mkdir()
    for folder in ('checkpoints', 'weights'):  # on another disk, and empty
        (tmp_path / 'run' / folder).symlink_to(tmp_path / 'disk')
    if '/' in name:
        (tmp_path / 'run/checkpoints').unlink()
        (tmp_path / 'run/weights').unlink()
    path = tmp_path / 'run' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert new_run(tmp_path / 'run').index == number
