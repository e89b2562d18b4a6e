"""A launcher on this machine, asked to stop or hit in each phase of a run: what it ends with, and that it goes on.

And a run that stands still: it ends and says who waits for whom.
"""
import os
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from e2e.training import arguments, metrics, parent_pid, thin_ranks
from helpers import HANG_LIMIT_S, ROOT, run, wait_for

from mlperf_rn50.train.checkpoint.checkpoint import list_checkpoints, load


class Job:
    """launch/local.sh with one rank."""

    def __init__(self, folder, data, *options):
        self.run_dir = folder / 'run'
        config = folder / 'c.yaml'
        config.write_text('{}\n')
        words = [w for w in arguments(self.run_dir, data)[1:] if not w.startswith(('--run.dir', '--train.max_epochs'))]
        self.process = subprocess.Popen(
            [str(w) for w in (ROOT / 'launch/local.sh', '--no-doctor', '--config', config, '--run-dir', self.run_dir,
                              *words, '--checkpoint.period_steps=2', '--train.max_epochs=400',
                              '--schedule.decay_epochs=400', *options)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            # Tests that nohup started ignore it, and so would the launcher.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))

    def count(self, *keys):
        """How often the log has one of some keys."""
        path = self.run_dir / 'result_0.txt'
        text = path.read_text() if path.exists() else ''
        return sum(text.count(f'"{key}"') for key in keys)

    def ranks(self):
        """The processes that train; of each pair the one that does."""
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if is_training(p)]
        return [p for p in found if parent_pid(p) in {q.pid for q in found}]

    def is_in(self, phase, num_starts):
        """Whether the run is in a phase, after so many starts."""
        has_started = self.count('run_start', 'run_resumed') >= num_starts
        if phase == 'start-up':
            return bool(self.ranks()) and not has_started
        if not has_started:
            return False
        if phase == 'evaluation':
            return self.count('eval_start') > self.count('eval_stop')
        if phase == 'checkpoint':
            return bool(list(self.run_dir.glob('checkpoints/.step_*.tmp')))
        return bool(list_checkpoints(self.run_dir / 'checkpoints'))  # to go on from

    def wait_for(self, phase, num_starts):
        wait_for(lambda: self.is_in(phase, num_starts), lambda: self.process.poll() is None,
                 lambda: self.process.communicate()[0], pause_s=0.01)

    def end(self):
        out = self.process.communicate(timeout=HANG_LIMIT_S)[0]
        return self.process.returncode, out


def is_training(process):
    with suppress(psutil.Error):
        return 'train' in (words := process.cmdline()) and 'python' in words[0]
    return False


def assert_whole(run_dir):
    for path in list_checkpoints(run_dir / 'checkpoints'):
        load(path)


@pytest.mark.slow
def test_asked_to_stop_in_each_phase(tiny, tmp_path):
    """With one signal in each: the launcher hands on the same word for all of them, whatever the phase."""
    asked = {'training': signal.SIGHUP, 'evaluation': signal.SIGINT, 'checkpoint': signal.SIGTERM,
             'start-up': signal.SIGINT}
    for num_starts, (phase, number) in enumerate(asked.items(), 1):
        job = Job(tmp_path, tiny, *(['--resume'] if num_starts > 1 else []))
        job.wait_for(phase, num_starts)
        job.process.send_signal(number)
        code, out = job.end()
        assert code == 75, f'{phase}: {out}'
        assert_whole(job.run_dir)
        assert not list(job.run_dir.glob('checkpoints/.*'))
        assert [m['status'] for m in metrics(job.run_dir, 'end')] == ['interrupted'] * num_starts, out
    steps = [m['step'] for m in metrics(job.run_dir, 'resumed')]
    assert steps == sorted(set(steps)) and len(steps) == 3


@pytest.mark.slow
def test_killed_in_each_phase_and_started_again_while_another_launcher_tries(tiny, tmp_path):
    job = Job(tmp_path, tiny, '--restarts', 9)
    for num_starts, phase in enumerate(('start-up', 'training', 'evaluation', 'checkpoint'), 1):
        num_starts = max(1, num_starts - 1)  # the first attempt did not get so far
        job.wait_for(phase, num_starts)
        victim = job.ranks()[0]
        victim.suspend()  # it stays in its phase
        second = subprocess.run([ROOT / 'launch/local.sh', '--no-doctor', '--resume', '--run-dir', job.run_dir],
                                capture_output=True, text=True, timeout=HANG_LIMIT_S)
        assert second.returncode == 2, second.stderr
        assert f'{job.run_dir} is in use by process {job.process.pid} on ' in second.stderr
        if phase == 'evaluation':  # once the watcher, whose rank must be able to say so
            victim.resume()
            victim.parent().kill()
        else:
            victim.kill()
    job.wait_for('training', 4)
    ranks = job.ranks()
    for _ in range(2):  # and Ctrl-C twice ends it at once
        job.process.send_signal(signal.SIGINT)
        time.sleep(1.1)
    code, out = job.end()
    assert code == 130 or code == 75 and metrics(job.run_dir, 'end'), out  # it may have been quicker
    psutil.wait_procs(ranks, timeout=HANG_LIMIT_S)
    assert not [r for r in ranks if r.is_running()]
    assert out.count('killed by signal 9 (SIGKILL)') == 3 and out.count('the watcher was killed') == 1, out
    assert out.count('restart ') == 4
    assert_whole(job.run_dir)
    assert not [n for n in os.listdir('/dev/shm') if n.startswith(f'mlperf_rn50-{job.process.pid}-')]
    failures = (job.run_dir / 'failures.jsonl').read_text()
    assert failures.count('killed by signal 9 (SIGKILL)') == 3


def test_a_rank_whose_data_does_not_come_is_named_by_the_one_that_waits(tiny, tmp_path):
    options = ['--comm.stall_limit_s=8', '--checkpoint.period_epochs=0']
    done = run(thin_ranks(2, '--stuck=7', *arguments(tmp_path, tiny, *options)))
    assert done.returncode == 1
    [folder] = (tmp_path / 'stalled').iterdir()
    assert 'step 7, training: no progress for ' in done.stderr
    assert ' s (comm.stall_limit_s): waiting in the exchange of step 8 for rank 1 on ' in done.stderr
    assert '(busy: reading data); stacks: ' in done.stderr
    assert f'stacks: {folder}/rank_0.txt' in done.stderr
    assert 'asnumpy' in (folder / 'rank_0.txt').read_text() and 'stuck' in (folder / 'rank_1.txt').read_text()
