"""Stop requests and kills in each phase of a local run, restarts and resumes, and the report of a
stalled run."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from e2e.training import THIN, arguments, metrics, parent_pid, thin_ranks
from helpers import HANG_LIMIT_S, ROOT, argv, run, start_program, wait_for
from PIL import Image

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.system.signals import STOPPING
from mlperf_rn50.train.checkpoint.checkpoint import load


class Job:
    """launch/local.sh with one rank."""

    def __init__(self, folder, data, *options):
        self.run_dir = folder / 'run'
        config = folder / 'c.yaml'
        config.write_text('{}\n')
        command = '{} --no-doctor --config {} --run-dir {}'
        words = arguments(self.run_dir, data, '--checkpoint.period_steps=2')
        self.start(
            *argv(command, ROOT / 'launch/local.sh', config, self.run_dir),
            *(word for word in words[1:] if not word.startswith('--run.dir')),
            *'--train.max_epochs=400 --schedule.decay_epochs=400'.split(),
            *options,
        )

    def start(self, *words):
        self.process = start_program(
            words,
            stderr=subprocess.STDOUT,
            # Under nohup the tests ignore SIGHUP, and the launcher would inherit this setting.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def count(self, *keys):
        """Return how many times the given keys appear in the log."""
        path = self.run_dir / 'result_0.txt'
        text = path.read_text() if path.exists() else ''
        return sum(text.count(f'"{key}"') for key in keys)

    def ranks(self):
        """Return the rank of each pair of watcher and rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        processes = [p for p in children if is_training(p)]
        return [p for p in processes if parent_pid(p) in {q.pid for q in processes}]

    def is_in(self, phase, num_starts):
        """Return whether the run is in a phase after a number of starts."""
        has_started = self.count('run_start', 'run_resumed') >= num_starts
        if phase == 'start-up':
            return bool(self.ranks()) and not has_started
        if not has_started:
            return False
        if phase == 'evaluation':
            return self.count('eval_start') > self.count('eval_stop')
        if phase == 'checkpoint':
            return bool(list(self.run_dir.glob('checkpoints/.step_*.tmp')))
        # with a checkpoint to resume from
        return bool(list_checkpoints(self.run_dir / 'checkpoints'))

    def wait_for(self, phase, num_starts):
        wait_for(
            lambda: self.is_in(phase, num_starts),
            lambda: self.process.poll() is None,
            lambda: self.process.communicate()[0],
            pause_s=0.01,
        )

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
def test_stop_request_in_each_phase_leaves_a_checkpoint_and_resumes(tiny, tmp_path):
    """One signal per phase suffices, because the launcher forwards all signals in the same way."""
    requests = {
        'training': signal.SIGHUP,
        'evaluation': signal.SIGINT,
        'checkpoint': signal.SIGTERM,
        'start-up': signal.SIGINT,
    }
    for num_starts, (phase, number) in enumerate(requests.items(), 1):
        job = Job(tmp_path, tiny, *(['--resume'] if num_starts > 1 else []))
        job.wait_for(phase, num_starts)
        job.process.send_signal(number)
        code, out = job.end()
        assert code == 75, f'{phase}: {out}'
        assert_whole(job.run_dir)
        assert not list(job.run_dir.glob('checkpoints/.*'))
        assert [m['status'] for m in metrics(job.run_dir, 'end')] == ['interrupted'] * num_starts, (
            out
        )
    steps = [m['step'] for m in metrics(job.run_dir, 'resumed')]
    assert steps == sorted(set(steps)) and len(steps) == 3


def test_printed_command_resumes_and_the_first_one_names_the_interrupted_run(tiny, tmp_path):
    job = Job(tmp_path, tiny)
    first, printed = job.process.args, ''
    for number, command in enumerate((first, None, first)):
        if number:
            job.start(*(command or ['bash', '-c', printed]))
        job.wait_for('training', 1 + (command is None))
        if number == 2:  # begins run 1
            wait_for((job.run_dir / 'result_1.txt').exists)
        job.process.send_signal(signal.SIGINT)
        code, out = job.end()
        assert code == 75 and STOPPING in out, out
        printed = re.search('resume with: (.*)', out)[1]
        named = re.search('resume run 0 instead: .* 1 mlperf-rn50 train --resume (.*)\n', out)
        assert bool(named) == (number == 2), out
    assert [m['status'] for m in metrics(job.run_dir, 'end')] == ['interrupted'] * 2
    assert named[1] == f'{job.run_dir}/checkpoints'


@pytest.mark.slow
def test_kill_in_each_phase_restarts_and_excludes_a_second_launcher(tiny, tmp_path):
    job = Job(tmp_path, tiny, '--restarts', 9)
    for num_starts, phase in enumerate(('start-up', 'training', 'evaluation', 'checkpoint'), 1):
        num_starts = max(1, num_starts - 1)  # the first attempt was killed before run_start
        job.wait_for(phase, num_starts)
        victim = job.ranks()[0]
        victim.suspend()  # keeps the rank in this phase
        command = '{} --no-doctor --resume --run-dir {}'
        second = run(argv(command, ROOT / 'launch/local.sh', job.run_dir))
        assert second.returncode == 2, second.stderr
        assert f'{job.run_dir} is in use by process {job.process.pid} on ' in second.stderr
        if phase == 'evaluation':  # kill the watcher here; its rank must be able to report it
            victim.resume()
            victim.parent().kill()
        else:
            victim.kill()
    job.wait_for('training', 4)
    ranks = job.ranks()
    for _ in range(2):  # Ctrl-C twice ends the launcher at once
        job.process.send_signal(signal.SIGINT)
        time.sleep(1.1)
    code, out = job.end()
    # the run may stop before the second signal
    assert code == 130 or code == 75 and metrics(job.run_dir, 'end'), out
    psutil.wait_procs(ranks, timeout=HANG_LIMIT_S)
    assert not [r for r in ranks if r.is_running()]
    # the rank without a watcher reports it, unless the engine ends it before
    assert 'the watcher was killed' in out, out
    texts = {'killed by signal 9 (SIGKILL)': 3, 'restart ': 4}
    assert {text: out.count(text) for text in texts} == texts, out
    assert_whole(job.run_dir)
    assert not list(Path('/dev/shm').glob(f'mlperf_rn50-{job.process.pid}-*'))
    failures = (job.run_dir / 'failures.jsonl').read_text()
    assert failures.count('killed by signal 9 (SIGKILL)') == 3


def test_rank_stalled_on_data_is_named_by_the_waiting_rank(tiny, tmp_path):
    options = ['--comm.stall_limit_s=8', '--checkpoint.period_epochs=0']
    done = run(thin_ranks(2, '--stuck=7', *arguments(tmp_path, tiny, *options)))
    assert done.returncode == 1
    [folder] = (tmp_path / 'stalled').iterdir()
    message = (
        r'step 7, training: no progress for .* s \(comm\.stall_limit_s\): waiting in the exchange '
        rf'of step 8 for rank 1 on .*\(busy: reading data\); stacks: {folder}/rank_0\.txt'
    )
    assert re.search(message, done.stderr), done.stderr
    for rank, function in enumerate(('asnumpy', 'stuck')):
        assert function in (folder / f'rank_{rank}.txt').read_text()


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def has_loaded(process, library) -> bool:
    """Return whether a process has loaded a library; also True after its end."""
    maps = Path(f'/proc/{process.pid}/maps')
    return process.poll() is not None or library in maps.read_text()


@pytest.mark.parametrize('library', ['libmxnet', 'libdali'])
@pytest.mark.parametrize(
    'command',
    [
        'evaluate run',
        'classify run picture.png',
        'why run --probe',
        'export run --format gluon --out out',
    ],
)
def test_command_with_saved_weights_can_be_interrupted(whole_run, tmp_path, command, library):
    (tmp_path / 'run').symlink_to(whole_run[0])
    Image.new('RGB', (8, 8)).save(tmp_path / 'picture.png')
    before = contents(whole_run[0])
    process = start_program([*THIN, *command.split()], cwd=tmp_path)
    wait_for(lambda: has_loaded(process, library), pause_s=0.005)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode in (0, 130) and 'Traceback' not in errors, errors
    assert process.returncode == 0 or not (tmp_path / 'out').exists()
    assert contents(whole_run[0]) == before
