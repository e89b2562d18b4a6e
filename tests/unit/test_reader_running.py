"""A log without an end is that of a run that goes on, or of one that died."""
import fcntl
import os
import platform

import pytest
from lines import START_S, run_lines, write_lines

from mlperf_rn50.mlperf.reader import read_run


@pytest.fixture
def unended(tmp_path):
    """A log whose last event was at 22 s of the run, and whose file was written so many seconds after it."""
    def unended(written_s=0.0, **keys):
        path = write_lines(tmp_path / 'result_0.txt', run_lines(status=None, **keys))
        os.utime(path, (START_S + 22 + written_s,) * 2)
        return path
    return unended


SLOW = {'accuracies': (0.5,), 'epoch_s': 1000, 'eval_s': 12}


@pytest.mark.parametrize('written_s, keys, now_s, status', [
    (0, {}, 82, 'running'), (0, {}, 22 + 601, 'failed'),
    (990, SLOW, 1012 + 2900, 'running'), (990, SLOW, 1012 + 3100, 'failed'),
    (2 * 86400, {}, 22 + 2 * 86400, 'failed')],  # a checkout gives a file the time at which it was made
    ids=['just written', 'quiet', 'slow', 'slow and quiet', 'a copy of an old log'])
def test_a_log_that_nobody_writes_is_that_of_a_failed_run(unended, written_s, keys, now_s, status):
    assert read_run(unended(written_s, **keys), now_s=START_S + now_s).status == status


def test_only_a_running_run_has_an_age(unended, tmp_path):
    run = read_run(unended(accuracies=(0.5, 0.4)), now_s=START_S + 82)
    assert (run.age_s, run.last_epoch, run.best_accuracy) == (60.0, 2, 0.5)
    assert (run.epochs_to_converge, run.time_to_train_s, run.warnings) == (None, None, ())
    run = read_run(unended(), now_s=START_S + 22 + 601)
    assert run.age_s is None and [w.text for w in run.warnings] == ['no run_stop: the log ends here']
    run = read_run(write_lines(tmp_path / 'result_0.txt', run_lines()), now_s=START_S + 22)
    assert (run.status, run.age_s) == ('converged', None)


@pytest.mark.parametrize('k, lock', [(0, '.run_0.lock'), (3, '.run_3.lock')])
def test_the_lock_of_a_run_tells(unended, k, lock):
    log = unended()
    log = log.rename(log.with_name(f'result_{k}.txt'))
    path = log.with_name(lock)
    path.write_text(f'process 7 on {platform.node()}\n')
    with open(path, 'rb') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = read_run(log, now_s=START_S + 10**7)
        assert run.status == 'running' and run.age_s > 10**6
    assert read_run(log, now_s=START_S + 23).status == 'failed'  # given back on this machine
    path.write_text('process 7 on another-machine\n')
    assert read_run(log, now_s=START_S + 23).status == 'running'
    assert read_run(log, now_s=START_S + 10**7).status == 'failed'


def test_a_lock_that_is_no_file_is_not_waited_for_and_another_one_can_still_be_taken(unended):
    path = unended().with_name('.run_0.lock')
    os.mkfifo(path)
    assert read_run(path.with_name('result_0.txt'), now_s=START_S + 30).status == 'running'
    path.unlink()
    path.touch()
    read_run(path.with_name('result_0.txt'))
    with open(path, 'a+b') as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16-be'])
def test_utf16_is_named(tmp_path, encoding):
    path = tmp_path / 'result_0.txt'
    path.write_bytes((b'\xfe\xff' if encoding.endswith('be') else b'') + '\n'.join(run_lines()).encode(encoding))
    with pytest.raises(Exception, match='not UTF-16: write it as UTF-8'):
        read_run(path)
