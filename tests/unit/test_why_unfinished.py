"""First sentence about runs that have not trained to the end of their schedules."""

from pathlib import Path

import pytest

from mlperf_rn50.analysis.why.load import WhyRun
from mlperf_rn50.analysis.why.unfinished import unfinished_sentence
from mlperf_rn50.cli import why
from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.mllog.logged_run import Evaluation, Run
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import CourseRecord, EndRecord, TrainRecord
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig


def sentence(
    status,
    folder,
    epoch=5.25,
    records=(),
    curve=(),
    max_epochs=None,
    num_ranks=2,
    num_nodes=1,
    behind=False,
):
    log = Run(
        Path('result_0.txt'),
        'v4.0',
        status,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        evaluations=[Evaluation(e, 0.5, 1, 1.0, 1.0, 1.0) for e in curve],
    )
    config = Config(
        schedule=ScheduleConfig(decay_epochs=80),
        run=RunConfig(stop_when_behind=behind),
        train=TrainConfig(max_epochs=max_epochs, eval_offset=1, eval_period=2),
    )
    return unfinished_sentence(
        WhyRun(RunFolder(folder, 0), log, [TrainRecord(100, epoch, 60.0), *records], config)
    )


def test_interrupted_run_says_how_far_it_is_and_how_to_resume_it(tmp_path):
    (tmp_path / 'checkpoints' / 'step_100').mkdir(parents=True)
    end, path = EndRecord('interrupted'), f'{tmp_path}/checkpoints'
    assert sentence('interrupted', tmp_path, records=[end]) == (
        'Stopped after 5.25 of 80 epochs; resume with launch/ranks.sh 2 mlperf-rn50 train '
        f'--resume {path}.'
    )
    assert f'ranks.sh --hosts HOSTS 4 mlperf-rn50 train --resume {path}' in sentence(
        'interrupted', tmp_path, num_ranks=8, num_nodes=2
    )


def test_killed_and_failed_runs_differ(tmp_path):
    assert (
        sentence('failed', tmp_path)
        == 'Failed after 5.25 of 80 epochs; it has no checkpoint to resume.'
    )
    assert (
        sentence('failed', tmp_path, records=[EndRecord('converged')]) == ''
    )  # its log contradicts itself
    assert 'train.log has the reason' in sentence('failed', tmp_path, records=[EndRecord('failed')])
    (tmp_path / 'checkpoints' / 'step_100').mkdir(parents=True)
    assert '--resume' in sentence(
        'failed', tmp_path, records=[EndRecord('interrupted'), TrainRecord(120, 5.25, 70.0)]
    )


@pytest.mark.parametrize(
    ('epoch', 'curve', 'text'),
    [
        (0.5, (), '; the first evaluation, with the times of its ranks, is due in about 3 min.'),
        (5.25, (2, 4), 'Running: 5.25 of at most 80 epochs.'),
        (0.0, (), 'Running: 0 of at most 80 epochs.'),
    ],
)
def test_running_run_says_when_its_first_evaluation_is_due(tmp_path, epoch, curve, text):
    assert sentence('running', tmp_path, epoch, curve=curve).endswith(text)


def test_run_that_ended_before_its_schedule_says_so(tmp_path):
    assert (
        sentence('aborted', tmp_path, 8.0, max_epochs=8)
        == 'Trained 8 of the 80 epochs of its schedule.'
    )
    behind = CourseRecord(20, behind=True)
    assert (
        sentence('aborted', tmp_path, 77.0, curve=(77,), behind=True) == ''
    )  # its last epoch has no evaluation
    assert sentence('aborted', tmp_path, 19.5, [behind], curve=(18, 20), behind=True) == (
        'Ended after 20 of 80 epochs, because it was behind its reference runs.'
    )


@pytest.mark.parametrize(
    'keys', [{'status': 'converged', 'epoch': 3.0}, {'status': 'aborted', 'epoch': 70.0}]
)
def test_run_that_ended_its_schedule_or_converged_needs_no_sentence(tmp_path, keys):
    assert sentence(folder=tmp_path, **keys) == ''


def test_run_before_its_first_evaluation_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        'mlperf_rn50.analysis.why.unfinished.unfinished_sentence', lambda run: 'Running: 0.5 of 80.'
    )
    (tmp_path / 'result_0.txt').touch()
    assert why.run([str(tmp_path)]) == 0
    assert capsys.readouterr().out == 'Running: 0.5 of 80.\n'
