"""Resumption of a run: checkpoint, plan, changes of the configuration, clock, and trainer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import begin_run, json_table, keep_checkpoint, table, write_metrics
from lines import START_S, mllog, run_lines, write_lines
from tiny import tiny_config, tiny_training

from mlperf_rn50.config import Config, to_tree
from mlperf_rn50.errors import CheckpointError, UserError
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.runfolder.jsonl import append
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.runfolder.records import Failure, NetworkRecord, TrainRecord
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.changes import (
    Change,
    find_changes,
    free_keys,
    parse_allowed,
    with_taken_back,
)
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState
from mlperf_rn50.train.checkpoint.resumable import find_run
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import OptimizerConfig, ScheduleConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.resume import find_resumes, load_resumption, plan_resumed, restore
from mlperf_rn50.train.schedule import LossScale

SCHEDULE = ScheduleConfig(base_lr=0.4, warmup_epochs=0, decay_epochs=100)
CONFIG = replace(tiny_config(640), schedule=SCHEDULE)


def progress_of(num_ranks, step, **keys):
    """Return the progress of a run after a step."""
    batch, nodes = make_plan(CONFIG, num_ranks).global_batch_size, [0] * num_ranks
    keys = {'config': to_tree(CONFIG), **keys}
    return Progress(step, 5, num_ranks, 0.5, 9.0, batch, batch, 640, 0, **{'nodes': nodes, **keys})


def loaded_from(before, **trainer):
    state = TrainerState(trainer.pop('arrays', {}), **trainer)
    return checkpoint.LoadedCheckpoint(Path('none/step_00000010'), before, state)


def resume(before, num_ranks, now=CONFIG, nodes=None, is_elastic=False, **keys):
    """Return plan and progress of a run resumed with a configuration."""
    nodes = nodes or [0] * num_ranks
    return plan_resumed(now, num_ranks, nodes, loaded_from(before), is_elastic, **keys)


def changed(section, **keys):
    return replace(CONFIG, **{section: replace(getattr(CONFIG, section), **keys)})


@pytest.mark.parametrize('is_elastic', [False, True])
def test_resume_accepts_the_same_images_in_any_folder_and_no_others(is_elastic):
    before, other = progress_of(2, 10, data_sha256='a' * 64), changed('data', dir='elsewhere')
    assert resume(before, 2, other, digest='a' * 64)[1].data_sha256 == 'a' * 64
    older = replace(before, data_sha256='')
    assert resume(older, 2, other, digest='b' * 64)[1].data_sha256 == 'b' * 64
    text = 'elsewhere: got SHA-256 bbbbbbbbbbbb…, the checkpoint has SHA-256 aaaaaaaaaaaa…'
    with pytest.raises(UserError, match=text):
        resume(before, 2, other, is_elastic=is_elastic, digest='b' * 64, allowed=['data.dir'])


def restored(progress, loaded, name='sgd', **train):
    """Return a trainer with a fresh state after it was restored from a checkpoint."""
    config = replace(CONFIG, optimizer=OptimizerConfig(name))
    trainer, _ = tiny_training(replace(config, train=replace(config.train, **train)))
    for tensor in trainer.optimizer.tensors:
        tensor.velocity[:] = 8.0
    loaded.trainer.arrays.update(trainer.snapshot())
    trainer.optimizer.tensors[0].velocity[:] = 0.0
    plan, folder = make_plan(config, 1), loaded.path.parent
    folder = SimpleNamespace(weights=folder / 'weights', checkpoints=folder)
    restore(
        SimpleNamespace(comm=Comm(), progress=progress, plan=plan, folder=folder), trainer, loaded
    )
    assert not loaded.trainer.arrays
    return trainer


def test_plain_resume_after_an_elastic_one_keeps_its_learning_rate():
    elastic, progress = resume(progress_of(4, 10), 2, is_elastic=True)
    plain, _ = resume(progress, 2)
    assert plain.lr_scale == elastic.lr_scale == 0.5
    assert resume(progress_of(4, 10), 4)[0].lr_scale == 1


@pytest.mark.parametrize('name', ['sgd', 'lars'])
def test_momentum_with_half_the_ranks_follows_the_last_applied_rate(thin_resnets, name):
    before = progress_of(4, 10)  # half an epoch
    plan, progress = resume(before, 2, is_elastic=True)
    assert (progress.step, progress.global_batch_size, progress.lr_batch_size) == (20, 16, 32)
    assert (progress.num_resumes, plan.lr_scale) == (1, 0.5)
    last_lr = make_plan(CONFIG, 4).learning_rate(9)
    trainer = restored(progress, loaded_from(before, last_lr=last_lr), name)
    factor = trainer.optimizer.correction(plan.learning_rate(progress.step))
    kept = {t.velocity.asnumpy().max() for t in trainer.optimizer.tensors}
    if name == 'sgd':  # the velocities of 8 are corrected once, before a checkpoint can have them
        assert kept == {4.0} and factor == 1
    else:  # in the next step; the schedule is also one step further
        assert kept == {8.0} and factor == pytest.approx(0.5, abs=2e-3) and factor != 0.5


@pytest.mark.parametrize(
    'policy, scale', [('dynamic', LossScale(512.0, 7)), ('static', LossScale(1.0))]
)
def test_sgd_with_the_same_ranks_resumes_unchanged(thin_resnets, policy, scale):
    """A static scale is that of the configuration, which --allow-changed may have changed."""
    loaded = loaded_from(progress_of(4, 10), last_lr=0.2, loss_scale=512.0, num_finite_steps=7)
    trainer = restored(resume(loaded.progress, 4)[1], loaded, loss_scale_policy=policy)
    assert trainer.optimizer.correction(0.1) == 1 and trainer.optimizer.last_lr == 0.2
    assert trainer.loss_scale == scale


def test_epoch_restarts_if_the_nodes_of_a_shuffle_by_node_change():
    config = changed('data', shuffle='node')
    before = progress_of(4, 30, nodes=[0, 0, 1, 1], config=to_tree(config))
    steps = [resume(before, 4, config, nodes=n)[1].step for n in ([0, 0, 1, 1], [0, 1, 0, 1])]
    assert steps == [30, 20]


@pytest.fixture
def run(tmp_path):
    """Run folder with a log and two checkpoints, at steps 3 and 6."""
    folder = new_run(tmp_path)
    folder.result.touch()
    for step in (3, 6):
        state = TrainerState({'a': np.ones(2)}, 0.4)
        checkpoint.save(folder.checkpoints, progress_of(1, step), state, 2)
    return folder


def test_converged_run_is_not_resumed_and_its_log_is_unchanged(run):
    RunLog(run.result, None, is_resumed=True).run_stop('converged')
    log = run.result.read_bytes()
    with pytest.raises(UserError, match='reached its target; there is nothing to resume$'):
        load_resumption(Comm(), run, run.checkpoints)
    assert run.result.read_bytes() == log
    older = run.checkpoints.rename(run.dir / 'checkpoints_1')
    RunFolder(run.dir, 1).result.touch()
    with pytest.raises(UserError, match=f'run 1 has not: mlperf-rn50 train --resume {older}$'):
        load_resumption(Comm(), run, run.checkpoints)


def test_copy_of_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    begin_run(tmp_path, 1)
    copy = run.checkpoints.rename(tmp_path / 'saved')  # the folder of run 0, and a copy by name
    for given in (copy, checkpoint.list_checkpoints(copy)[0]):
        with pytest.raises(
            UserError, match=f'of run 0, expected .* 1; copy it to {run.checkpoints} '
        ):
            load_resumption(Comm(), RunFolder(tmp_path, 1), given)


def test_damaged_checkpoint_is_put_aside_only_when_an_older_one_is_restored(run, thin_resnets):
    older, newer = checkpoint.list_checkpoints(run.checkpoints)
    (newer / 'arrays.npz').write_bytes(b'x')
    loaded = load_resumption(Comm(), run, run.checkpoints)
    assert checkpoint.list_checkpoints(run.checkpoints) == [older, newer]
    with pytest.raises(UserError, match=f'the previous one is {older}: --resume {older}'):
        load_resumption(Comm(), run, newer)
    del loaded.trainer.arrays['a']
    restored(loaded.progress, loaded)
    assert checkpoint.list_checkpoints(run.checkpoints) == [older]
    assert (run.checkpoints / f'damaged_{newer.name}' / 'state.json').exists()


def test_changed_configuration_is_refused_unless_allowed():
    other = changed('train', target_accuracy=0.5, max_epochs=9)
    other = replace(other, schedule=changed('schedule', base_lr=0.5).schedule)
    other = replace(other, data=changed('data', crop='none').data)
    before = progress_of(4, 10)
    with pytest.raises(UserError) as e:
        resume(before, 4, other, allowed=['data.crop'])
    assert 'schedule.base_lr 0.4 -> 0.5; restore it' in str(e.value)
    assert str(e.value).endswith('--allow-changed data.crop,schedule.base_lr')
    plan, progress = resume(before, 4, other, allowed=['schedule.base_lr', 'data.crop'])
    assert progress.config == to_tree(plan.config) and progress.config['schedule']['base_lr'] == 0.5
    assert [[str(c)] for c in find_changes(before.config, plan.config)] == table("""
data.crop random_resized -> none
schedule.base_lr 0.4 -> 0.5
train.target_accuracy 0.749 -> 0.5
train.max_epochs null -> 9
""")


@pytest.mark.parametrize(
    'key, value, num_ranks, message',
    table("""
run.seed | 6 | 4 | run.seed: got 6, the checkpoint has 5
data.num_train | 320 | 4 | data.num_train: got 320, the checkpoint has 640
run.seed | 5 | 2 | ranks: got 2, the checkpoint has 4; start 4 ranks
train.local_batch_size | 4 | 4 | global_batch_size: got 16, the checkpoint has 32
"""),
)
def test_resumed_run_keeps_seed_data_ranks_and_batch(key, value, num_ranks, message):
    before = progress_of(4, 10)  # seed 5 was drawn
    assert resume(before, 4)[0].config.run.seed == 5
    section, name = key.split('.')
    with pytest.raises(UserError, match=message):
        resume(before, int(num_ranks), changed(section, **{name: int(value)}), allowed=[key])


@pytest.mark.parametrize(
    'section, keys',
    [
        ('train', {'local_batch_size': None, 'global_batch_size': 32}),
        ('run', {'num_nodes': 4, 'ranks_per_node': 1}),
    ],
)
def test_other_ranks_are_named_before_what_follows_from_them(section, keys):
    with pytest.raises(UserError, match='ranks: got 3, the checkpoint has 4; start 4 ranks, or'):
        resume(progress_of(4, 10), 3, changed(section, **keys))


def test_keys_that_may_change_must_exist():
    known = {f'{name}.{key}' for name, keys in to_tree(Config()).items() for key in keys}
    free = 'run.seed checkpoint.keep data.dir comm.num_buckets train.max_epochs'
    bound = 'data.crop optimizer.momentum schedule.base_lr train.precision'
    assert set(free.split()) < free_keys() < known and not free_keys() & set(bound.split())
    assert parse_allowed('') == ()
    assert parse_allowed('data.crop,run.dir') == ('data.crop', 'run.dir')
    with pytest.raises(UserError, match='got schedule.base_lrr, .* did you mean schedule.base_lr?'):
        parse_allowed('data.crop,schedule.base_lrr')


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


def test_change_that_is_taken_back_is_recorded_as_the_last_one(tmp_path):
    run = RunFolder(tmp_path, 0)
    taken = {'schedule.base_lr': [0.4, 0.9], 'train.target_accuracy': [0.8, 0.7], 'x.y': [1, 2]}
    write_metrics(run, {'event': 'resumed', 'step': 5, 'changed': taken})
    now = changed('train', target_accuracy=0.7)
    given = [Change('run.telemetry', False, True)]
    found = with_taken_back(given, run, now)
    assert [str(c) for c in found] == [
        'run.telemetry false -> true',
        'schedule.base_lr 0.9 -> 0.4',
    ]


@pytest.mark.parametrize('name', ['checkpoints_old', 'checkpoints.bak', 'checkpoints_20240101'])
def test_copies_of_checkpoints_do_not_count_as_those_of_a_run(tmp_path, name):
    run = begin_run(tmp_path)
    keep_checkpoint(run, 24)
    run.config.touch()
    (tmp_path / name / 'step_00000099').mkdir(parents=True)
    assert find_run(tmp_path) == (run, run.checkpoints)


def test_clock_of_a_checkpoint_is_at_most_the_time_since_run_start(tmp_path):
    write_lines(tmp_path / 'result_0.txt', run_lines())
    run = RunFolder(tmp_path, 0)
    state = replace(progress_of(2, 4), boot='b', start_s=100.0, clock_s=30.0)
    assert find_resumes(run, state, ('b', 130.0), 0.0)[0].resumed_s == 30.0
    for start_s, clock_s in ((1e9, 30.0), (100.0, 40.0)):
        with pytest.raises(CheckpointError, match='s of training, expected at most'):
            find_resumes(run, replace(state, start_s=start_s, clock_s=clock_s), ('b', 130.0), 0.0)


def test_run_of_another_network_is_resumed(tmp_path):
    benchmark = mllog('submission_benchmark', 0, 'googlenet')
    write_lines(tmp_path / 'result_0.txt', [benchmark, *run_lines()])
    state = replace(progress_of(2, 4), boot='b', start_s=100.0, clock_s=5.0)
    assert find_resumes(RunFolder(tmp_path, 0), state, ('b', 130.0), 0.0)[0].resumed_s == 30.0


# reason of run_stop | failures (job, rank, seconds since run_start) | end and kind of the attempt
LAST_ATTEMPTS = json_table("""
null      | []                              | 21 | "fault"
null      | [["1", 3, 25]]                  | 25 | "fault"
null      | [["1", 3, 25], ["2", null, 60]] | 25 | "fault"
null      | [["2", null, 60]]               | 21 | "fault"  # the last start did not reach the clock
null      | [["1", null, 40]]               | 40 | "fault"
"aborted" | []                              | 21 | "pause"
"aborted" | [["2", null, 60]]               | 21 | "pause"  # the user's request was before this
"aborted" | [["1", 3, 25]]                  | 21 | "pause"  # a rank that died while it ended
"aborted" | [["1", null, 50]]               | 21 | "pause"  # the launcher waited for its processes
"aborted" | [["1", null, 15]]               | 21 | "fault"  # guards asked the ranks to stop
"aborted" | [["1", 3, 15]]                  | 21 | "fault"  # a rank had lost mpirun
"aborted" | [["1", 3, 5]]                   | 21 | "pause"  # before a resume at 10 s
"failed"  | [["1", 3, 25]]                  | 25 | "fault"
null      | [["", 3, 25]]                   | 25 | "fault"  # without a launcher
"aborted" | [["", 3, 5]]                    | 21 | "pause"
""")


@pytest.mark.parametrize(['reason', 'failures', 'stopped_s', 'kind'], LAST_ATTEMPTS)
def test_end_of_the_attempt_before_a_resume(tmp_path, reason, failures, stopped_s, kind):
    stop = [mllog('run_stop', 21, status='aborted', reason=reason)] if reason else []
    resume = mllog('run_resumed', 10, 1, epoch_num=1, clock_s=0.0)
    *before, evaluated, eval_stop = run_lines((0.5,), epoch_s=20.0, status=None)
    lines = [*before[:-2], resume, *before[-2:], evaluated, eval_stop, *stop]
    write_lines(tmp_path / 'result_0.txt', lines)
    run = RunFolder(tmp_path, 0)
    jobs = ['1', '2', '3']  # 1 trained, 2 failed before its clock, and 3 is this one
    if any(not job for job, *_ in failures):
        jobs = [''] * 3
    for number, job in enumerate(jobs):
        append(run.metrics, NetworkRecord(8, 1.0, 8, 1, job=job))
        if not number:
            append(run.metrics, TrainRecord(9, time_s=18.0))
    for job, rank, seconds in failures:
        failure = Failure(job, 'h', 'c', rank, time_s=START_S + seconds)
        append(tmp_path / 'failures.jsonl', failure)
    state = replace(progress_of(2, 4), boot='b', start_s=100.0, clock_s=5.0)
    resume = find_resumes(run, state, ('b', 170.0), 0.0)[-1]
    assert resume.stopped_s == pytest.approx(stopped_s)
    assert resume.is_pause == (kind == 'pause')
