"""Start of the ranks: stages of a stop, limits, guards and leftovers."""

import errno
import os
import pty
import resource
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import (
    HANG_LIMIT_S,
    ROOT,
    launch_options,
    own_signals,
    prepend_path,
    untimed,
    wait_for,
    write_files,
    write_programs,
)

from mlperf_rn50.config import Config
from mlperf_rn50.launch import launcher
from mlperf_rn50.launch.engines import ENGINES
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.launcher import (
    Launcher,
    Stage,
    next_stage,
    processes_of,
    remove_leftovers,
    run_engine,
)
from mlperf_rn50.launch.placement import Placement
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import Failure, read_failures
from mlperf_rn50.system.launcher_env import COMMAND
from mlperf_rn50.system.signals import SignalQueue
from mlperf_rn50.train.options import CommConfig

STOP, AT_ONCE, LOST = 'stop request', 'second Ctrl-C', 'host lost'


class ScriptedSignals:
    """Signals of events in the given order once the engine is up; the clock advances only if
    `is_late`."""

    def __init__(self, folder, events, is_late):
        self.folder, self.events, self.is_late = folder, list(events), is_late
        self.now, self.is_forced = 0.0, False

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now

    def next(self, timeout_s):
        time.sleep(0.005)
        if not (self.folder / 'up').exists():
            return None
        if self.events:
            self.is_forced |= self.events[0] == AT_ONCE
            return signal.SIGUSR2 if self.events.pop(0) == LOST else signal.SIGINT
        self.now += max(timeout_s, 0) * self.is_late
        return None


@pytest.fixture
def run_shell(tmp_path, monkeypatch):
    """Function that runs a shell script as an engine; returns its exit code and remaining processes
    of the job."""

    def run_shell(script, *events, is_late=False, **keys):
        (tmp_path / 'up').unlink(missing_ok=True)
        signals = ScriptedSignals(tmp_path, events, is_late)
        for name, value in (('time', signals), ('STOP_LIMIT_S', 5.0), ('LOOK_S', 1.0)):
            monkeypatch.setattr(launcher, name, value)
        keys.setdefault('status', lambda: None)
        job = f'{os.getpid()}-{time.monotonic_ns():x}'
        code = run_engine(
            ['bash', '-c', script.replace('UP', f'touch "{tmp_path}/up"')],
            dict(os.environ, MLPERF_RN50_JOB=job),
            signals,
            job,
            **keys,
        )
        tries = iter(range(100))
        while (left := processes_of(job)) and next(tries, None) is not None:
            time.sleep(0.05)  # killed processes disappear with a delay
        return code, left

    return run_shell


WAITS = 'trap "exit 75" USR1; trap "exit 15" TERM; UP; while :; do sleep 0.02; done'


# with a process in a separate group
IGNORES = 'trap "" USR1 TERM; setsid sleep 600 & UP; while :; do wait; done'


def test_process_that_begins_a_program_during_the_first_look_is_killed(monkeypatch):
    """Between two programs, a process has no environment by which it is found."""
    process = subprocess.Popen(['sleep', '600'])
    found = iter([[], [process.pid]])
    monkeypatch.setattr(launcher, 'processes_of', lambda job, with_ranks: next(found))
    launcher.kill_rest('job')
    assert process.wait() == -signal.SIGKILL


def test_stop_request_is_forwarded(run_shell):
    assert run_shell(WAITS, STOP) == (75, [])
    assert run_shell(WAITS, STOP, status=None) == (15, [])  # no state to save
    sent = []
    messenger = SimpleNamespace(send_signal=sent.append)
    assert run_shell(WAITS, STOP, AT_ONCE, messengers=[messenger]) == (15, [])
    assert sent == [signal.SIGUSR1]


def test_run_is_stopped_for_a_returned_host_once_it_has_begun(run_shell):
    asked = []
    code, _ = run_shell(
        WAITS,
        is_late=True,  # without effect on a stop that was not requested
        status=lambda: '',
        should_stop=lambda: not asked.append(1),
    )
    assert code == 75 and asked == [1]
    asked.clear()  # no run has begun
    code, _ = run_shell(WAITS, is_late=True, limit_s=20.0, should_stop=lambda: not asked.append(1))
    assert code == 1 and not asked


@pytest.mark.parametrize(
    'stage, required, is_late, expected',
    [
        ('RUNNING', None, False, 'RUNNING'),
        ('RUNNING', 'STOPPING', False, 'STOPPING'),
        ('RUNNING', None, True, 'TERMINATING'),
        ('STOPPING', None, True, 'TERMINATING'),
        ('TERMINATING', 'STOPPING', False, 'TERMINATING'),
        ('TERMINATING', None, True, 'KILLING'),
        ('KILLING', None, True, 'KILLING'),
    ],
)
def test_next_stage(stage, required, is_late, expected):
    got = next_stage(Stage[stage], Stage[required] if required else None, is_late)
    assert got is Stage[expected]


OUTLIVED = 'the run has ended, but not its processes after'


@pytest.mark.parametrize(
    'script, events, keys, code, texts',
    [
        # An engine that does not stop is killed with all processes.
        (IGNORES, [STOP], {}, 137, ['the stop request has had no effect after 5 s']),
        (IGNORES, [STOP, AT_ONCE], {}, 137, []),
        (IGNORES, [LOST, STOP], {}, 1, []),  # never back to an earlier stage
        # The limit of the start applies until the ranks have begun.
        (WAITS, [], {'limit_s': 20.0}, 1, ['still starting after 20 s']),
        ('UP; sleep 0.3; exit 7', [], {'limit_s': 2.0, 'status': lambda: ''}, 7, []),
        # So are processes that outlive their run.
        (IGNORES, [], {'status': lambda: 'converged'}, 1, [f'{OUTLIVED} 120 s']),
        (IGNORES, [STOP], {'status': lambda: 'converged'}, 137, [f'{OUTLIVED} 30 s']),
    ],
)
def test_limits_of_an_engine(run_shell, script, events, keys, code, texts):
    late = []
    assert run_shell(script, *events, is_late=True, report=late.append, **keys) == (code, [])
    assert late == texts


@pytest.mark.parametrize('later', ['', OSError(errno.ESTALE, 'x')], ids=['continues', 'storage'])
def test_run_that_continues_or_is_not_seen_is_not_killed(run_shell, later):
    """The end that was seen is that of an earlier attempt; an error of storage tells nothing."""
    found = [later, 'interrupted', ''] if later else ['interrupted', '']
    status = Mock(side_effect=chain(found, repeat('')))
    assert run_shell('UP; sleep 1; exit 7', is_late=True, status=status) == (7, [])


# Stand-in for ssh up to the first line of the far side; the job is the last word of the remote
# command.
CONNECTED = 'for job in $*; do :; done; echo "connected $job"\n'


@pytest.fixture
def guards(tmp_path, monkeypatch):
    """Function that starts guards for hosts, with a stand-in for ssh in tmp_path."""
    prepend_path(monkeypatch, tmp_path)
    with own_signals():
        signals = SignalQueue(LAUNCHER_SIGNALS)

        def guards(ssh, hosts, job='1-a'):
            write_programs(tmp_path, ssh=ssh)
            options = launch_options('--hosts', ','.join(hosts))
            place = Placement(tmp_path, tuple(hosts), 1)
            return Launcher('mpirun', ENGINES['mpirun'], options, signals).guards(place, job)

        yield guards


def assert_lost(folder, cause):
    """Assert that the only failure is the loss of h2."""
    assert untimed(read_failures(folder)) == [Failure('1-a', 'h2', cause, is_outside=True)]


@pytest.mark.parametrize(
    'ssh, reason',
    [
        ('echo "ssh: Could not resolve hostname" >&2; exit 255', 'ssh: Could not resolve hostname'),
        ('echo Welcome; printf "\\033[31mbash: no guard.sh"; exit 127', '?[31mbash: no guard.sh'),
        ('exit 255', 'ssh gave no reason'),
        ('echo Welcome; exec sleep 600', 'no login within 1 s'),
    ],
)
def test_host_that_was_never_reached_is_recorded_with_the_reason_of_ssh(
    guards, tmp_path, monkeypatch, ssh, reason
):
    text = (ROOT / 'launch/guard.sh').read_text()
    if ' 1 s' in reason:  # a slow machine must not fail the others
        text = text.replace('login_s=60', 'login_s=1')
    write_files(tmp_path, {'guard.sh': text}, mode=0o755)
    monkeypatch.setattr(launcher, 'GUARD', str(tmp_path / 'guard.sh'))
    with guards(ssh, ['h2']) as [guard]:
        guard.wait(HANG_LIMIT_S)
    assert_lost(tmp_path, f'was not reached: {reason}')


def test_host_whose_guard_ended_by_itself_is_recorded(guards, tmp_path):
    ssh = f'{CONNECTED}[ "$9" != h2 ] || exit 255\nexec cat >/dev/null'
    with guards(ssh, ['h1', 'h2']) as [first, second]:
        os.kill(first.pid, signal.SIGSTOP)  # does not keep the launcher
        second.wait(HANG_LIMIT_S)
    assert_lost(tmp_path, 'lost its connection to the launcher')


@pytest.mark.parametrize(
    'num_hosts, num_files', [(40, 20), pytest.param(1250, 1000, marks=pytest.mark.slow)]
)
def test_guards_of_many_hosts_need_few_open_files(guards, tmp_path, num_hosts, num_files):
    connected = tmp_path / 'connected'
    connected.mkdir()
    hosts = [f'h{i}' for i in range(num_hosts)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir('/proc/self/fd'))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files + num_open, hard))
    try:
        ssh = f'>"{connected}/$$"\nexec cat >/dev/null'
        with guards(ssh, hosts, f'{os.getpid()}-a') as processes:
            wait_for(lambda: len(os.listdir(connected)) == num_hosts)
            assert not any(p.poll() for p in processes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slow_start_is_reported(capfd, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(Launcher, 'start_ranks', lambda self, *a, **k: calls.append(k) or 143)
    place = Placement(tmp_path, ('localhost',), 1)
    with own_signals():
        signals = SignalQueue(LAUNCHER_SIGNALS)
    started = Launcher('mpirun', ENGINES['mpirun'], launch_options('--config', 'c.yaml'), signals)
    for limit_s in (900.0, 0.0):
        config = Config(comm=CommConfig(start_limit_s=limit_s))
        started.start(config, place, '1-2', ['doctor'], lambda: None, lambda: False)
    assert [c['limit_s'] for c in calls] == [1020.0, 0.0]
    calls[0]['report']('still starting after 1020 s')
    cause = 'doctor: still starting after 1020 s'
    shown = f'mlperf-rn50 launch mpirun: {cause}; waiting for nothing; stopped\n'
    assert capfd.readouterr().err == shown
    assert untimed(read_failures(tmp_path)) == [Failure('1-2', '', cause)]


def test_empty_folders_of_a_killed_launcher_are_removed(tmp_path):
    job = f'{os.getpid()}-{os.urandom(4).hex()}-1'
    names = ('9-01234567-1', '9-0123456am', '9-01234568-1d', '9-01234569-1', 'mps-0', job)
    gone, of_ranks, full, new, mps, running = (tmp_path / f'mlperf_rn50-{n}' for n in names)
    for folder in (gone, of_ranks, full / 'files', new, mps, running):
        folder.mkdir(parents=True)
    for folder in (gone, of_ranks, full, mps, running):
        os.utime(folder, (0, 0))
    with subprocess.Popen(
        ['sh', '-c', 'echo up; cat'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, 'MLPERF_RN50_JOB': job},
    ) as process:
        # before exec, a process lacks the new environment
        assert process.stdout.readline() == b'up\n'
        remove_leftovers([tmp_path, tmp_path / 'nothing'])
    assert sorted(tmp_path.iterdir()) == sorted([full, new, mps, running])


def slurm_launcher(**changes):
    options = replace(launch_options('--config', 'c.yaml', script='slurm'), **changes)
    return Launcher('slurm', ENGINES['slurm'], options, None)


@pytest.mark.parametrize(
    'code, job, has_begun, word',
    [
        (75, 'JobState=RUNNING', True, 'is requeued'),
        (75, 'JobState=COMPLETING Reason=TimeLimit', True, 'is requeued'),
        (75, 'JobState=RUNNING', False, 'stopped before the training began; not requeued'),
        (75, 'JobState=COMPLETING Reason=None', True, 'cancelled'),
        (75, '', True, 'not requeued, because Slurm does not answer (down)'),
        (1, 'JobState=RUNNING', True, ''),
    ],
)
def test_slurm_job_is_requeued_if_its_next_start_can_go_on(
    tmp_path, monkeypatch, capfd, code, job, has_begun, word
):
    show = f'echo "{job}"' if job else 'echo down >&2; exit 1'
    requeue = f'echo >{tmp_path}/calls'
    write_programs(tmp_path, scontrol=f'[ $1 = requeue ] && {requeue} || {{ {show}; }}')
    monkeypatch.setattr(launcher, 'SCONTROL_PAUSE_S', 0.0)
    prepend_path(monkeypatch, tmp_path)
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    slurm = slurm_launcher()
    assert slurm.requeue(code, tmp_path, has_begun=has_begun) == code
    assert word in capfd.readouterr().err
    assert (tmp_path / 'calls').exists() == (word == 'is requeued')


def test_task_of_an_array_is_requeued_without_the_other_ones(tmp_path, monkeypatch):
    write_programs(tmp_path, scontrol=f'echo JobState=RUNNING; echo "$@" >>{tmp_path}/calls')
    prepend_path(monkeypatch, tmp_path)
    for name, value in (('JOB_ID', '9'), ('ARRAY_JOB_ID', '9'), ('ARRAY_TASK_ID', '3')):
        monkeypatch.setenv(f'SLURM_{name}', value)
    slurm_launcher().requeue(75, tmp_path, has_begun=True)
    assert (tmp_path / 'calls').read_text() == 'show job 9_3\nrequeue 9_3\n'


def test_cancelled_job_names_the_run_that_it_resumed(tmp_path, monkeypatch, capfd):
    write_programs(tmp_path, scontrol='echo JobState=COMPLETING')
    prepend_path(monkeypatch, tmp_path)
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    monkeypatch.setenv(COMMAND, 'sbatch launch/slurm.sbatch --resume old')
    older = slurm_launcher(run=RunFolder(tmp_path, 0))
    older.requeue(75, tmp_path, has_begun=True)
    assert f'--resume {tmp_path}/checkpoints\n' in capfd.readouterr().err


def test_slurm_is_asked_again_if_it_does_not_answer(tmp_path, monkeypatch, capfd):
    first = f'{{ touch {tmp_path}/asked; exit 1; }}'
    write_programs(
        tmp_path, scontrol=f'[ -e {tmp_path}/asked ] && echo JobState=RUNNING || {first}'
    )
    prepend_path(monkeypatch, tmp_path)
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    monkeypatch.setattr(launcher, 'SCONTROL_PAUSE_S', 0.0)
    slurm_launcher().requeue(75, tmp_path, has_begun=True)
    assert 'is requeued' in capfd.readouterr().err


IGNORES_TERM = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(20)
print('survived')
"""
KILLED = """
import os, signal, sys
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.launcher import run_engine
from mlperf_rn50.system.launcher_env import COMMAND
from mlperf_rn50.system.signals import SignalQueue
run_engine(sys.argv[1:], os.environ, SignalQueue(LAUNCHER_SIGNALS), f'killed-{os.getpid()}',
           end_signal=signal.SIGINT)
"""


def test_engine_of_slurm_ends_with_a_killed_launcher():
    """There, engines/block_term.py blocks SIGTERM."""
    command = [sys.executable, '-c', KILLED, sys.executable, '-c', IGNORES_TERM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'up\n'
        process.kill()
        assert process.stdout.read() == ''  # all writers have ended


ON_A_TERMINAL = """import os
from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.launcher import run_engine
from mlperf_rn50.system.launcher_env import COMMAND
from mlperf_rn50.system.signals import SignalQueue

class Quick(SignalQueue):
    def next(self, timeout_s):
        print('waits', flush=True)
        return super().next(min(timeout_s, 0.2))

job = f'terminal-{os.getpid()}'
engine = 'trap "echo stopping; exit 75" USR1; while :; do sleep 0.05; done'
env = {**os.environ, 'MLPERF_RN50_JOB': job}
signals = Quick(LAUNCHER_SIGNALS)
code = run_engine(['bash', '-c', engine], env, signals, job, status=lambda: None)
print('ended', code, flush=True)
"""


def test_ctrl_z_and_fg_on_a_terminal(tmp_path):
    """A pause sends no stop request to the engine, even beyond the deadline of a wait; a later
    Ctrl-C does."""
    (tmp_path / 'launcher.py').write_text(ON_A_TERMINAL)
    pid, terminal = pty.fork()
    if not pid:
        os.environ['LC_ALL'] = 'C'  # in English
        os.execvp('bash', 'bash --norc --noprofile -i'.split())

    def read_to(text):
        read = ''
        while not read.endswith(text):
            assert select.select([terminal], [], [], HANG_LIMIT_S)[0], f'{text} not in {read}'
            read += os.read(terminal, 1).decode(errors='replace')
        return read

    start = shlex.join([sys.executable, str(tmp_path / 'launcher.py')])
    try:
        os.write(terminal, f'stty -echo; {start}\n'.encode())
        read_to('waits')
        os.write(terminal, b'\x1a')
        read_to('Stopped')
        time.sleep(0.3)  # longer than one wait
        os.write(terminal, b'fg; exit\n')  # exit ends the output with the launcher
        read_to('launcher.py')
        read = ''.join(read_to('waits') for _ in range(3))
        assert 'stopping' not in read
        os.write(terminal, b'\x03')
        assert 'stopping' in read_to('ended ')
        read_to('75')
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
