"""Resume after a kill, a stop request or a full disk, compared with an uninterrupted run."""

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from e2e.training import (
    arguments,
    assert_aborted,
    assert_one_line,
    metrics,
    start,
    thin_ranks,
    train,
    wait_for_checkpoint,
)
from helpers import call, run

from mlperf_rn50.analysis.run_data import load_run
from mlperf_rn50.analysis.watch.follower import Follower
from mlperf_rn50.files import LineFile
from mlperf_rn50.mllog.elapsed import SKEW_S
from mlperf_rn50.mllog.goodput import PARTS, read_goodput
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import list_checkpoints, run_at
from mlperf_rn50.runfolder.records import EndRecord, ResumedRecord
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
from mlperf_rn50.train.checkpoint.checkpoint import load


def assert_same_end(run_dir, whole_dir, step=20):
    """Assert that the last checkpoints and all evaluations are equal; learned parameters must match
    in every bit."""
    (progress, trainer), (whole_progress, whole_trainer) = (
        load(list_checkpoints(folder / 'checkpoints')[-1]) for folder in (run_dir, whole_dir)
    )
    assert progress.step == whole_progress.step == step
    assert progress.best_top1 == whole_progress.best_top1
    assert replace(trainer, arrays={}) == replace(whole_trainer, arrays={})
    assert trainer.arrays.keys() == whole_trainer.arrays.keys()
    for name, array in trainer.arrays.items():
        # Running statistics are averaged at every checkpoint, and the runs checkpoint at different
        # steps.
        tolerance = 1e-6 if 'running' in name else 0
        whole = whole_trainer.arrays[name]
        np.testing.assert_allclose(array, whole, tolerance, tolerance, err_msg=name)
    got, expected = ({m['epoch']: m for m in metrics(d, 'eval')} for d in (run_dir, whole_dir))
    assert got == expected


# none of these if a run is killed right after a checkpoint
NOT_OF_A_KILL = 'paused', 'stalled', 'evaluation_repeated', 'steps_repeated'


def assert_parts_add_up(run_dir):
    """Assert that the log and the metrics of a killed run have the time since run_start, and the
    same parts of it."""
    log = read_run(run_dir / 'result_0.txt')
    (*_, (_, end)) = read_lines(run_dir / 'metrics.jsonl', EndRecord)
    [(_, resumed)] = read_lines(run_dir / 'metrics.jsonl', ResumedRecord)
    assert sum(resumed.elapsed_parts.values()) == pytest.approx(resumed.time_s, abs=0.01)
    assert 0 < resumed.elapsed_parts['training_preserved_s'] < resumed.time_s
    assert log.time_to_train_s == pytest.approx(end.time_to_train_s, abs=SKEW_S)
    assert sum(end.elapsed_parts.values()) == pytest.approx(end.time_to_train_s, abs=0.01)
    assert log.elapsed == pytest.approx(list(end.elapsed_parts.values()), abs=SKEW_S)
    assert log.elapsed.fault_to_resume_s > 0 and log.elapsed.paused_s == 0
    goodput = read_goodput(log)
    begun_s = goodput.parts['start_up'] + goodput.parts['waiting'] - log.elapsed.fault_to_resume_s
    assert goodput.elapsed_s == pytest.approx(log.time_to_train_s + begun_s, abs=0.5)
    assert all(goodput.parts[name] > 0 for name in PARTS if name not in NOT_OF_A_KILL)


def test_run_killed_between_checkpoints_resumes_exactly(whole_run, tiny, tmp_path):
    options = ['--checkpoint.period_epochs=0', '--checkpoint.period_steps=4', '--checkpoint.keep=3']
    process = start(thin_ranks(2, '--stuck=10', *arguments(tmp_path, tiny, *options)))
    wait_for_checkpoint(tmp_path, 8, process)
    for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):  # a rank ends with its watcher
            victim.kill()
    process.communicate()
    assert_aborted(run(thin_ranks(2, 'train', '--resume', tmp_path)))
    assert metrics(tmp_path, 'resumed')[0]['step'] == 8
    assert_same_end(tmp_path, whole_run[0])
    assert_parts_add_up(tmp_path)
    output = call('check', tmp_path / 'result_0.txt', '--ruleset', 'v0.5').stdout
    assert output.startswith('valid for v0.5: no (the target was missed: best accuracy ')


@pytest.fixture(scope='module')
def ended(thin, tiny, tmp_path_factory):
    """Folder of a completed single-process run of two epochs; tests must not modify it."""
    run_dir = tmp_path_factory.mktemp('ended')
    assert_aborted(train(run_dir, tiny, '--train.max_epochs=2'))
    return run_dir


def test_stop_request_during_start_up_stops_after_first_steps_and_resumes(
    ended, tiny, tmp_path, monkeypatch
):
    with monkeypatch.context() as m:
        early = 'mlperf_rn50.train.build.leave_openmp_to_engine'
        m.setattr(early, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        done = train(tmp_path, tiny, '--train.max_epochs=2')
    assert done.returncode == 75, done.stderr
    assert f'mlperf-rn50 train --resume {tmp_path}' in done.stdout
    [path] = list_checkpoints(tmp_path / 'checkpoints')
    assert load(path)[0].step <= 3  # the first step, and steps already in progress
    log = (tmp_path / 'result_0.txt').read_text()
    assert '"run_stop"' in log and '"aborted"' in log
    assert_aborted(call('train', '--resume', tmp_path))
    assert_same_end(tmp_path, ended, 10)
    parts = read_goodput(read_run(tmp_path / 'result_0.txt')).parts
    assert parts['paused'] > 0 and parts['start_up'] > 0
    assert parts['waiting'] == parts['stalled'] == parts['steps_repeated'] == 0


@pytest.mark.parametrize(
    'options, message',
    [
        ('', 'train.max_epochs: got 2, and the run has already completed all of them'),
        (
            '--train.max_epochs=5 --model.name=resnet34 --allow-changed=model.name',
            'is missing; this checkpoint is for a different model or optimizer',
        ),
        ('--config x.yaml', 'got both, expected one'),
        # the average of weights begins with the run
        (
            '--train.max_epochs=5 --train.ema=0.9 --allow-changed=train.ema',
            'train.ema: got 0.9, the checkpoint has null',
        ),
    ],
)
def test_impossible_resumes_are_refused(ended, options, message):
    assert_one_line(call('train', '--resume', ended, *options.split()), 2, message)


def test_full_disk_is_one_line_and_the_run_resumes(thin, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        whole = LineFile.write

        def fill(self, line):
            if self._path.name == 'metrics.jsonl' and '"step": 7' in line:
                self._file = open('/dev/full', 'ab', buffering=0)
            whole(self, line)

        m.setattr(LineFile, 'write', fill)
        # the message names the phase of the error, also while a checkpoint is being written
        m.setattr(BackgroundWriter, 'is_busy', True)
        options = '--train.max_epochs=2 --checkpoint.period_steps=3 --run.tensorboard=true'
        done = train(tmp_path, tiny, options)
    text = f'{tmp_path}/metrics.jsonl: cannot write: No space left'
    assert_one_line(done, 2, 'step 7, training: ', text)
    assert [load(p)[0].step for p in list_checkpoints(tmp_path / 'checkpoints')] == [5, 6]
    # a partial line, as after a crash of the machine
    for name in ('metrics.jsonl', 'result_0.txt'):
        with open(tmp_path / name, 'a') as f:
            f.write('{"event": "tra')
    done = call('train', '--resume', tmp_path)
    assert_aborted(done)
    assert 'resumed from' in done.stderr
    assert [m['step'] for m in metrics(tmp_path, 'train')] == [*range(1, 7), *range(7, 11)]
    assert read_run(tmp_path / 'result_0.txt').num_resumes == 1


def test_change_that_a_resume_was_allowed_is_kept_by_later_resumes(thin, ended, tmp_path):
    run_dir = Path(shutil.copytree(ended, tmp_path / 'run'))
    resume = 'train', '--checkpoint.keep=9', '--resume', run_dir
    options = '--train.max_epochs=3 --schedule.base_lr=0.5 --allow-changed=schedule.base_lr'
    assert_aborted(call(*resume, *options.split()))
    older = list_checkpoints(run_dir / 'checkpoints')[0]  # before the change
    done = call(*resume, '--train.max_epochs=4', '--schedule.base_lr=0.25')
    assert_one_line(done, 2, 'schedule.base_lr 0.5 -> 0.25', '--allow-changed schedule.base_lr')
    for place, epochs in ((run_dir, 4), (older, 5)):
        assert_aborted(call(*resume[:3], place, f'--train.max_epochs={epochs}'))
        newest = list_checkpoints(run_dir / 'checkpoints')[-1]
        assert load(newest)[0].config['schedule']['base_lr'] == 0.5
        config = load_run(run_at(run_dir)).config
        assert Follower(run_dir).look().max_epochs == config.train.max_epochs == epochs
