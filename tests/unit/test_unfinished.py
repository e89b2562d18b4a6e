"""First sentence about runs that have not trained to the end of their schedules."""

import pytest
from helpers import call, table, values

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why.unfinished import unfinished_sentence
from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.mllog.elapsed import Resume
from mlperf_rn50.mllog.logged_run import Evaluation, Run
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import CourseRecord, EndRecord, TrainRecord
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig


@pytest.fixture
def sentence(tmp_path):
    """Function that describes a run whose schedule has 80 epochs."""

    def make(
        status, epoch=5.25, records=(), curve=(), max_epochs=None, stops=False, index=0, **size
    ):
        folder = RunFolder(tmp_path, index)
        evaluations = [Evaluation(e, 0.5, 1, 1.0, 1.0, 1.0) for e in curve]
        log = Run(folder.result, 'v4.0', status, evaluations=evaluations, **size)
        config = Config(
            schedule=ScheduleConfig(decay_epochs=80),
            run=RunConfig(stop_when_behind=stops),
            train=TrainConfig(max_epochs=max_epochs, eval_offset=1, eval_period=2),
        )
        records = [TrainRecord(100, epoch, 60.0), *records]
        return unfinished_sentence(RunData(folder, log, records, config))

    return make


def test_epochs_of_a_long_run_have_all_digits(sentence):
    assert sentence('running', 1234.5, max_epochs=2000).startswith('Running: 1,234 of at most 2000')


@pytest.mark.parametrize(
    'status, records, size, words',
    [
        ('interrupted', [EndRecord('interrupted')], (1, 2), 'launch/ranks.sh 2'),
        ('interrupted', [], (2, 8), 'launch/ranks.sh --hosts HOSTS 4'),
        # killed after a resume
        ('failed', [EndRecord('interrupted'), TrainRecord(120, 5.25, 70.0)], (1, 2), 'ranks.sh 2'),
    ],
)
def test_run_that_ended_early_is_resumed(tmp_path, sentence, status, records, size, words):
    (tmp_path / 'checkpoints' / 'step_100').mkdir(parents=True)
    text = sentence(status, records=records, num_nodes=size[0], num_ranks=size[1])
    assert text.startswith(f'{"Failed" if status == "failed" else "Stopped"} after 5.25 of 80 epo')
    assert text.endswith(f'{words} mlperf-rn50 train --resume {tmp_path}/checkpoints.')


@pytest.mark.parametrize('num_ranks, is_elastic', [(8, False), (6, True)])
def test_run_that_lost_hosts_is_resumed_without_them(tmp_path, sentence, num_ranks, is_elastic):
    (tmp_path / 'checkpoints' / 'step_100').mkdir(parents=True)
    (tmp_path / 'config.yaml').write_text(
        'run: {num_nodes: 4, ranks_per_node: 2}\ntrain: {global_batch_size: 64}\n'
    )
    text = sentence('interrupted', num_nodes=num_ranks // 2, num_ranks=num_ranks)
    assert text.endswith(' --elastic.') == is_elastic


def test_run_without_a_launcher_that_lost_ranks_is_resumed_without_them(tmp_path, sentence):
    (tmp_path / 'checkpoints' / 'step_100').mkdir(parents=True)
    (tmp_path / 'config.yaml').write_text('train: {global_batch_size: 64}\n')
    text = sentence('interrupted', num_nodes=1, num_ranks=3, global_batch_size=63)
    assert text.endswith(' --elastic.')


def test_pause_does_not_delay_the_first_evaluation(sentence):
    resume = Resume(resumed_s=40.0, checkpoint_s=10.0, stopped_s=10.0, clock_s=10.0, is_pause=True)
    assert sentence('running', 0.5, resumes=(resume,)).endswith('is due in about 90 s.')


@pytest.mark.parametrize(
    'status, end, changes, text',
    table("""
failed | | | Failed after 5.25 of 80 epochs; it has no checkpoint to resume.
failed | converged | |
failed | failed | | Failed after 5.25 of 80 epochs; train.log has the reason.
failed | failed | curve=[6] | Failed after 6 of 80 epochs; train.log has the reason.
failed | failed | index=3 | Failed after 5.25 of 80 epochs; train_3.log has the reason.
running | | epoch=0.5 | Running: 0.5 of at most 80 epochs; the first evaluation, with the times of \
its ranks, is due in about 3 min.
running | | epoch=0.5 max_epochs=1 | Running: 0.5 of at most 1 epochs; the first evaluation, with \
the times of its ranks, is due in about 60 s.
running | | curve=[2,4] | Running: 5.25 of at most 80 epochs.
running | | epoch=0.0 | Running: 0 of at most 80 epochs.
aborted | | epoch=8.0 max_epochs=8 | Trained 8 of the 80 epochs of its schedule.
aborted | | epoch=77.0 curve=[77] stops=true |
aborted | behind | curve=[18,20] stops=true | Ended after 20 of 80 epochs, because it was \
behind its reference runs.
converged | | epoch=3.0 |
aborted | | epoch=70.0 |
"""),
)
def test_unfinished_run_says_how_far_it_is(sentence, status, end, changes, text):
    """Without a sentence if the log contradicts the end, or only the last evaluation is missing."""
    last = CourseRecord(20, behind=True) if end == 'behind' else EndRecord(end)
    assert sentence(status, records=[last] if end else [], **values(changes)) == text


def test_run_before_its_first_evaluation_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(
        'mlperf_rn50.analysis.why.unfinished.unfinished_sentence', lambda run: 'Running: 0.5 of 80.'
    )
    (tmp_path / 'result_0.txt').touch()
    done = call('why', tmp_path)
    assert (done.returncode, done.stdout) == (0, 'Running: 0.5 of 80.\n')
    done = call('why', tmp_path, '--out', tmp_path / 'page')
    assert done.returncode == 0 and 'Running: 0.5' in (tmp_path / 'page/why.html').read_text()
