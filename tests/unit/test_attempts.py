"""Results of attempts from the files in a run folder, and what follows from them."""

import errno
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
from helpers import (
    assert_one_line,
    begin_run,
    call,
    keep_checkpoint,
    launch_options,
    write_files,
    write_metrics,
)

from mlperf_rn50.cli.launch import choose_run, supervise
from mlperf_rn50.config import Config
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, StorageError
from mlperf_rn50.launch import attempts
from mlperf_rn50.launch.attempts import (
    bad_hosts,
    describe_unfinished,
    is_free_restart,
    read_attempt,
    read_progress,
)
from mlperf_rn50.launch.placement import Placement
from mlperf_rn50.runfolder import jsonl
from mlperf_rn50.runfolder.locks import FileLock
from mlperf_rn50.runfolder.records import (
    Attempt,
    Failure,
    note_attempt,
    note_failure,
    read_attempts,
    read_failures,
)
from mlperf_rn50.system.launcher_env import COMMAND


def test_newest_run_that_can_be_resumed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(COMMAND, 'launch/ranks.sh 2 mlperf-rn50 train')
    expected = (
        'run 1 here was interrupted at step 24; this command starts another run; to resume run 1 '
        f'instead: launch/ranks.sh 2 mlperf-rn50 train --resume {tmp_path}/checkpoints_1'
    )
    assert describe_unfinished(tmp_path / 'none') == ''
    begin_run(tmp_path)
    run = begin_run(tmp_path, 1)
    assert describe_unfinished(tmp_path) == ''  # no checkpoint
    keep_checkpoint(run, 24)
    with closing(FileLock(run.lock)) as lock:
        lock.take()
        assert describe_unfinished(tmp_path) == ''  # it runs
    assert describe_unfinished(tmp_path) == expected  # killed
    write_metrics(run, {'event': 'end', 'status': 'interrupted'})
    begin_run(tmp_path, 2)  # without a checkpoint
    assert describe_unfinished(tmp_path) == expected
    write_metrics(run, {'event': 'end', 'status': 'converged'})
    assert describe_unfinished(tmp_path) == ''


def test_attempt_without_a_run_is_recorded(tmp_path):
    write_metrics(begin_run(tmp_path), {'event': 'end', 'status': 'converged'})
    before = read_progress(tmp_path)
    assert read_attempt(tmp_path, before, 1, is_resumed=False).run is None
    begin_run(tmp_path, 1)
    assert read_attempt(tmp_path, before, 1, is_resumed=False) == Attempt(
        1, 1, None, gained=False, can_resume=False, place='step 0, start-up'
    )


def test_end_of_a_run_is_read_again_after_a_fault_of_storage(tmp_path, monkeypatch):
    before = read_progress(tmp_path)
    write_metrics(begin_run(tmp_path), {'event': 'end', 'status': 'converged'})
    read = Mock(side_effect=[OSError(errno.EIO, 'x'), *[DEFAULT] * 9], wraps=jsonl.numbered_lines)
    monkeypatch.setattr(jsonl, 'numbered_lines', read)
    monkeypatch.setattr(attempts, '_STORAGE_PAUSE_S', 0.0)
    assert attempts.attempt_after(tmp_path, before, 1, is_resumed=False).end == 'converged'
    read.side_effect = [OSError(errno.EIO, 'x'), DEFAULT]
    assert attempts.patient(attempts.ends_of)(tmp_path, 0) == ['converged']
    monkeypatch.setattr(attempts, '_STORAGE_LIMIT_S', 0.0)
    read.side_effect = OSError(errno.EIO, 'Input/output error')
    with pytest.raises(StorageError, match='Input/output error; resume when storage works'):
        attempts.patient(attempts.ends_of)(tmp_path, 0)


def test_run_that_could_not_be_written_at_a_stop_is_not_resumed(tmp_path):
    """A full disk ends a job; another start would fill it again."""
    attempt = Attempt(0, EXIT_USAGE, 'interrupted', gained=True, can_resume=True)
    assert attempts.judge(attempt, True, 0, [])[0] == EXIT_USAGE


@pytest.mark.parametrize('end, code', [('converged', EXIT_OK), ('aborted', EXIT_FAILED)])
def test_requeued_job_whose_run_has_ended_starts_nothing(tmp_path, monkeypatch, end, code):
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    attempts.first_run_of(tmp_path, '7', is_resume=False, is_requeued=False)
    run = begin_run(tmp_path)
    keep_checkpoint(run, 24)
    write_metrics(run, {'event': 'end', 'status': end})
    options = replace(launch_options('--config', 'c.yaml', '--no-doctor'), is_requeued=True)
    messages = []
    launcher = SimpleNamespace(
        options=options,
        signals=None,
        engine=SimpleNamespace(in_slurm=True),
        say=messages.append,
    )
    assert supervise(launcher, Placement(tmp_path, ('h1',), 1), Config()) == code
    assert messages == [f'the run of this job has {end}']


@pytest.mark.parametrize(
    'gained, expected', [(False, (1, 'stopped; this start wrote no checkpoint')), (True, (75, ''))]
)
def test_stop_without_a_checkpoint_is_reported(gained, expected):
    for end in (None, 'interrupted'):  # the checkpoint of an interrupted run may have failed
        assert attempts.judge(Attempt(None, 1, end, gained, gained), True, 0, []) == expected


def test_progress_counts_images_if_the_batch_size_changes(tmp_path):
    run = begin_run(tmp_path)
    keep_checkpoint(run, 100)
    before = read_progress(tmp_path)
    (run.checkpoints / 'step_00000100').rmdir()
    keep_checkpoint(run, 50)  # the same images in a larger batch
    write_metrics(run, {'event': 'resumed', 'step': 50})
    assert not read_attempt(tmp_path, before, 1, is_resumed=True).gained
    keep_checkpoint(run, 60)
    assert read_attempt(tmp_path, before, 1, is_resumed=True).gained


def test_stuck_attempts_are_counted_across_starts_of_a_job(tmp_path):
    stuck = Attempt(0, 1, None, gained=False, can_resume=True)

    def count(job, *notes):
        for attempt in notes:
            note_attempt(tmp_path, job, attempt)
        return attempts.count_stuck(read_attempts(tmp_path, job))

    assert count('7', replace(stuck, gained=True), stuck) == 1
    assert (count('8', stuck), count('7', stuck), count('9')) == (1, 2, 0)
    assert count('7', replace(stuck, origin='outside')) == 2  # before its first step
    # a run without a checkpoint
    assert count('7', Attempt(1, 0, 'converged', False, False)) == 0
    # another start in the same allocation, by the user
    attempts.first_run_of(tmp_path, '7', is_resume=True, is_requeued=False)
    assert (count('7'), count('8')) == (0, 1)
    assert count('7', stuck) == 1
    note_attempt(tmp_path / 'none', '7', stuck)
    assert not (tmp_path / 'none').exists()
    assert [attempts.pause_s(n) for n in (0, 1, 2)] == [0, 5, 10]


def test_requeued_job_begins_with_its_own_runs(tmp_path):
    def first_run(job, is_resume=False, is_requeued=False):
        return attempts.first_run_of(tmp_path, job, is_resume, is_requeued)

    assert first_run('6') == 0  # the folder is empty
    for number in range(3):
        begin_run(tmp_path, number)
    assert [first_run('7', is_resume=True), first_run('7', is_requeued=True)] == [0, 0]
    assert [first_run('8'), first_run('8', is_requeued=True)] == [3, 3]
    begin_run(tmp_path, 3)
    assert [first_run('9'), first_run('8', is_requeued=True)] == [4, 3]
    assert first_run('8', is_resume=True) == 0  # a second launcher in a job
    assert first_run('10', is_requeued=True) == 4  # its node failed before this record
    note_attempt(tmp_path, '11', Attempt(3, 75, 'interrupted', True, True))
    assert first_run('11', is_requeued=True) == 0  # begun by a version without it
    assert len(read_attempts(tmp_path)) == 1


@pytest.mark.parametrize(
    'words, message',
    [
        *(
            (f'checkpoints_1 {words}', 'with --config, --seeds or another --run-dir')
            for words in ('--config c', '--seeds 2', '--run-dir /x')
        ),
        ('checkpoints_2', 'checkpoints_2: no such file or folder; expected a run folder'),
    ],
)
def test_older_run_to_resume_is_given_without_contradiction(tmp_path, words, message):
    run = begin_run(tmp_path, 1)
    keep_checkpoint(run, 24)
    run.config.touch()
    done = call('launch', 'local', '--resume', *f'{tmp_path}/{words}'.split())
    assert_one_line(done, message)


def test_plan_of_a_resume_is_that_of_its_run(tmp_path):
    for number, batch in enumerate((32, 64)):
        run = begin_run(tmp_path, number)
        keep_checkpoint(run, 24)
        run.config.write_text(f'train: {{local_batch_size: {batch}}}\ndata: {{synthetic: true}}\n')
    for words, batch in (
        (['--resume', '--run-dir', tmp_path], 64),
        (['--resume', tmp_path / 'checkpoints'], 32),
    ):
        done = call('launch', 'local', *words, '--ranks-per-node', 2, '--dry-run')
        assert f'global batch          {2 * batch}' in done.stdout, done.stderr


def test_requeued_job_resumes_though_its_first_checkpoint_was_replaced(tmp_path, monkeypatch):
    run = begin_run(tmp_path)
    keep_checkpoint(run, 24)
    run.config.write_text('train: {local_batch_size: 32}\ndata: {synthetic: true}\n')
    for num_requeues, code in ((0, 2), (1, 0)):
        removed = run.checkpoints / 'step_00000012'
        words = ['--resume', removed, '--ranks-per-node', 2, '--dry-run']
        monkeypatch.setenv('SLURM_RESTART_COUNT', str(num_requeues))
        done = call('launch', 'slurm', *words)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize('folder', ['checkpoints/step_00000012', 'saved/best'])
@pytest.mark.parametrize('steps', [[], [12], [24], [12, 24]])
def test_requeued_job_does_not_go_back_again_to_its_first_checkpoint(
    tmp_path, monkeypatch, folder, steps
):
    """Steps are those of the resumes since the submission; a resume before it was from step 12."""
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    run, given = begin_run(tmp_path), tmp_path / folder
    for path in (given, run.checkpoints / 'step_00000036'):
        write_files(path, {'state.json': ''})
    run.config.write_text('train: {local_batch_size: 32}\n')
    write_metrics(run, {'event': 'resumed', 'step': 12})
    attempts.first_run_of(tmp_path, '7', is_resume=True, is_requeued=False, chosen=run)
    write_metrics(run, *({'event': 'resumed', 'step': step} for step in steps))
    options = launch_options('--resume', given, script='slurm')
    chosen = choose_run(replace(options, is_requeued=True)).resume
    assert chosen == str(run.checkpoints if steps else given)


@pytest.mark.parametrize(
    'end, has_stepped, returned, on_trial, expected',
    [
        ('interrupted', True, ['h2'], [], True),  # stopped to take h2 back
        ('converged', True, ['h2'], [], False),  # ended before the stop
        (None, True, ['h2'], [], False),  # failed during the stop
        (None, False, [], ['h2'], True),  # the start with h2 failed
        ('failed', False, [], ['h2'], True),
        (None, True, [], ['h2'], False),  # a step was taken with h2
        (None, False, [], [], False),
        ('interrupted', True, [], [], False),
    ],
)
def test_restart_because_of_returned_hosts_is_free(end, has_stepped, returned, on_trial, expected):
    attempt = Attempt(0, 1, end, gained=False, can_resume=True, has_stepped=has_stepped)
    assert is_free_restart(attempt, returned, on_trial) == expected


def test_host_that_failed_twice_without_progress_is_bad(tmp_path):
    for job, host, cause in [
        ('a', 'h1', 'does not answer'),
        ('b', 'h2', 'killed'),
        ('c', 'h2', 'does not answer'),
        ('c', 'h2', 'killed'),
        ('c', 'h3', 'killed'),
    ]:
        note_failure(tmp_path, Failure(job, host, cause, 0 if cause == 'killed' else None))
    failures = read_failures(tmp_path)
    assert bad_hosts(failures, ['h1', 'h2', 'h3']) == {'h2': 'killed'}
    # two failures in one attempt count once
    assert bad_hosts(failures[2:], ['h1', 'h2', 'h3']) == {}
    assert bad_hosts(failures, ['h2']) == {}  # the last host is kept
    cut = [Failure(job, host, 'had no contact') for job in ('1', '2') for host in ('h2', 'h3')]
    assert bad_hosts(cut, ['h1', 'h2', 'h3']) == {}  # the launcher's own link was cut
    assert bad_hosts(cut, 'h1 h2 h3 h4'.split()) == {
        'h2': 'had no contact',
        'h3': 'had no contact',
    }
    assert bad_hosts([f for f in cut if f.host == 'h2'], ['h1', 'h2']) == {'h2': 'had no contact'}
