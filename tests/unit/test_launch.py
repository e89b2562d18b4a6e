"""Launchers: hosts, options, attempts, failures, lock, and the end of an engine."""

import functools
import io
import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import HANG_LIMIT_S, ROOT, call, own_signals, run, untimed, wait_for, write_files

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch import attempts, checks, engines, launcher, process, supervisor
from mlperf_rn50.launch.arguments import parse_arguments
from mlperf_rn50.launch.attempts import read_attempt, read_progress
from mlperf_rn50.launch.checks import check_machine, check_room, place_ranks
from mlperf_rn50.launch.engines import ENGINES, environment, plain_output
from mlperf_rn50.launch.hosts import (
    Host,
    check_ranks,
    common_slots,
    parse_hostfile,
    parse_hosts,
    silent_hosts,
)
from mlperf_rn50.launch.launcher import Launcher, remove_leftovers
from mlperf_rn50.launch.process import (
    LAUNCHER_SIGNALS,
    Stage,
    next_stage,
    processes_of,
    run_engine,
    stage_of,
)
from mlperf_rn50.runfolder.locks import FileLock, folder_lock
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import (
    Attempt,
    Failure,
    note_attempt,
    note_failure,
    read_attempts,
    read_failures,
)
from mlperf_rn50.system import signals as stop_signals
from mlperf_rn50.system.launcher_env import COMMAND
from mlperf_rn50.train.options import CommConfig, TrainConfig


def options(*words, script='mpirun'):
    return parse_arguments(ENGINES[script].make_parser(script), [str(w) for w in words])


def launcher_of(*words, script='mpirun', signals=None):
    return Launcher(script, ENGINES[script], options(*words, script=script), signals)


# --- hosts
# ------------------------------------------------------------------------------------------------


def test_hosts_of_an_option_and_of_a_file_and_their_common_slots():
    assert parse_hosts('h1, h2') == [Host('h1'), Host('h2')]
    assert parse_hostfile('# all\nh1 slots=4 # big\n\nh2 slots=4\n', 'f') == [
        Host('h1', 4),
        Host('h2', 4),
    ]
    # a line per rank, as in PBS
    assert parse_hostfile('h1\nh1\nh2\nh2\n', 'f') == [Host('h1', 2), Host('h2', 2)]
    assert common_slots([Host('h1', 4), Host('h2', 4)]) == 4
    assert common_slots([Host('h1'), Host('h2')]) is None
    for other, text in ((2, '2'), (None, r'\(none\)')):
        with pytest.raises(
            ConfigError, match=rf'slots={text} for h2 and slots=4 for h1, .* set --ranks-per-node'
        ):
            common_slots([Host('h1', 4), Host('h2', other)])


@pytest.mark.parametrize(
    'line, host',
    [
        ('h1:2', Host('h1', 2, range(2, 3))),
        ('h1 slots = 2', Host('h1', 2)),
        ('h1 slots =2 # x', Host('h1', 2)),
        ('h1 cpu=2', Host('h1', 2)),
        ('h1 count=2', Host('h1', 2)),
        ('h1 max_slots=4', Host('h1', None, range(1, 5))),
        ('h1 slots=2 max_slots=4', Host('h1', 2, range(1, 5))),
        ('h1 max-slots=4 slots=2', Host('h1', 2, range(1, 5))),
        ('10.0.0.1\tslots=2\r', Host('10.0.0.1', 2)),
    ],
)
def test_line_of_a_hostfile_as_other_tools_read_it(line, host):
    assert parse_hostfile(f'{line}\n', 'f') == [host]


@pytest.mark.parametrize(
    'line, word',
    [
        ('h1 slots=2 port=2222', 'port=2222'),
        ('h1 port = 2222', 'port=2222'),
        ('h1 user=me', 'user=me'),
        ('h1 h2', 'h2'),
        ('h1 4', '4'),
        ('h1 sockets=2', 'sockets=2'),
        ('h1 slots=2 slots=3', 'slots=3'),
        ('h1:2 slots=3', 'slots=3'),
        ('h1 slots=', 'slots='),
        ('h1 slots=04', 'slots=04'),
        ('h1 slots=٤', r'slots=\\u0664'),
        ('h1 SLOTS=2', 'SLOTS=2'),
        ('h1 slots', 'slots'),
        ('rank 0=h1 slot=0-3', '0=h1'),
    ],
)
def test_word_of_a_hostfile_that_is_not_used_is_refused_by_name(line, word):
    with pytest.raises(
        ConfigError,
        match=rf"f: got '{word}' in .* expected a host with slots=N.* remove other words",
    ):
        parse_hostfile(f'h0\n{line}\n', 'f')


def test_ranks_of_a_host_list_agree_with_the_layout():
    exact = Host('h1', 4, range(4, 5))
    assert parse_hosts('h1:4, 10.0.0.1:4') == [exact, Host('10.0.0.1', 4, range(4, 5))]
    check_ranks(
        [
            exact,
            Host('h2'),
            *parse_hostfile('h3 max_slots=4', 'f'),
            *parse_hostfile('h4 slots=8', 'f'),
        ],
        4,
    )
    for ranks in (2, 8):
        with pytest.raises(
            ConfigError, match=f'h1: got {ranks} ranks, expected 4 as given with the host; change'
        ):
            check_ranks([exact], ranks)
    with pytest.raises(
        ConfigError, match='h3: got 5 ranks, expected at most 4 as given with the host'
    ):
        check_ranks(parse_hostfile('h3 max_slots=4', 'f'), 5)


@pytest.mark.parametrize(
    'text, message',
    [
        ('', 'got nothing, expected host names'),
        ('h1,,h2', "got '', expected"),
        ('h1,h1', 'got h1 twice'),
        ('-oProxyCommand=x', 'expected a host name or an address'),
        ('me@h1', 'set the user in ~/.ssh/config'),
        ('fe80::1', 'give an IPv6 address a name in /etc/hosts'),
        ('h1:', 'or NAME:RANKS; .* ports in ~/.ssh/config'),
        ('h1:0', 'or NAME:RANKS'),
        ('h1:x', 'or NAME:RANKS'),
        ('h1:4,h1:2', 'got h1 twice'),
        (
            'h0,n[01-03,7],h2',
            r"got n\[01-03,7\], .* list .* scontrol show hostnames 'n\[01-03,7\]'",
        ),
        ('h1\nh2', r"got 'h1\\nh2'"),
    ],
)
def test_invalid_hosts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_hosts(text)


def test_hostfile_is_a_file_with_hosts(tmp_path):
    with pytest.raises(ConfigError, match='got no host'):
        parse_hostfile('# none\n\n', 'f')
    (tmp_path / 'hosts').write_text('h1 slots=2\n')
    assert options('--hostfile', tmp_path / 'hosts', '--hosts', 'h2').hosts == [
        Host('h1', 2),
        Host('h2'),
    ]
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(
        ConfigError, match='--hostfile: cannot read .*/pipe: got a named pipe, expected a file'
    ):
        options('--hostfile', tmp_path / 'pipe')


def test_local_host_is_reached_without_ssh(monkeypatch):
    monkeypatch.setenv('PATH', '')
    assert silent_hosts(['localhost', os.uname().nodename, 'h9'], None) == {'h9': 'ssh: not found'}
    assert silent_hosts([], None) == {}


def test_silent_hosts_have_the_reasons_of_ssh(tmp_path, monkeypatch):
    ssh = (
        '#!/bin/sh\ncase $6 in h1) exit;; h2) echo Banner >&2; echo "ssh: no route" >&2; exit '
        '255;; *) exit 1;; esac'
    )
    write_files(tmp_path, {'ssh': ssh}, mode=0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with own_signals():
        signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS)
        assert silent_hosts(['h1', 'h2', 'h3'], signals) == {'h2': 'ssh: no route', 'h3': ''}


def test_own_host_needs_neither_ssh_nor_hostname(tmp_path):
    write_files(tmp_path, dict.fromkeys(('ssh', 'hostname'), '#!/bin/sh\nexit 127'), mode=0o755)
    env = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'HOSTNAME': 'of.another.host'}
    done = run([ROOT / 'launch/guard.sh', '--list', os.uname().nodename, 'far', '1-a'], env=env)
    assert done.stdout == 'host far, which does not answer\n'


# --- options
# ----------------------------------------------------------------------------------------------


def test_unknown_options_go_to_train():
    o = options(
        '--config=c.yaml',
        '--seeds',
        2,
        '--train.max_epochs',
        -1,
        '--hosts',
        'h1,h2',
        '--clear-caches',
    )
    assert (o.config, o.seeds, [h.name for h in o.hosts]) == ('c.yaml', 2, ['h1', 'h2'])
    assert o.train == ['--train.max_epochs', '-1', '--run.clear_caches', 'true']
    assert (
        not o.only_prints
        and options('--dry-run').only_prints
        and options('--print=run.dir').only_prints
    )
    assert options('--hosts', 'h1', script='local').hosts == []
    assert options('--container', 'x', '--mount', '/a', '--mount', '/b', script='slurm').mounts == [
        '/a',
        '/b',
    ]


@pytest.mark.parametrize(
    'words, ranks, batch',
    [
        (['local', '--ranks-per-node', 2], 2, 64),
        (['local', '--nodes', 2, '--ranks-per-node', 2], 4, 128),
        (['mpirun', '--hosts', 'h1,h2'], 2, 64),
        (['mpirun', '--hosts', 'h1:3,h2:3'], 6, 192),
        (['mpirun', '--hosts', 'h1,h2,h3', '--nodes', 2, '--ranks-per-node', 2], 4, 128),
        (['local'], 1, 32),
        (['slurm', '--nodes', 2, '--ranks-per-node', 4], 8, 256),
        (
            [
                'kubernetes',
                '--image',
                'x',
                '--volume',
                'a:/b',
                '--run-dir',
                '/b/r',
                '--nodes',
                3,
                '--ranks-per-node',
                2,
            ],
            6,
            192,
        ),
    ],
)
def test_dry_run_of_a_launcher_has_its_ranks(tmp_path, monkeypatch, words, ranks, batch):
    monkeypatch.delenv('SLURM_JOB_NODELIST', raising=False)
    (tmp_path / 'c.yaml').write_text('train: {local_batch_size: 32}\ndata: {synthetic: true}\n')
    done = call('launch', *words, '--config', tmp_path / 'c.yaml', '--dry-run')
    assert done.returncode == 0, done.stderr
    plan = dict(
        line.split(maxsplit=1)
        for line in done.stdout.splitlines()
        if line[:1].islower() and ' ' in line
    )
    assert plan['ranks'] == str(ranks) and f'global batch          {batch}' in done.stdout


def test_dry_run_of_a_launcher_checks_its_hosts():
    config = ROOT / 'launch/configs/c4140_v100_4node.yaml'
    done = call('launch', 'mpirun', '--hosts', 'h1,h2', '--config', config, '--dry-run')
    assert done.returncode == 2 and 'got 4 with 2 hosts' in done.stderr


def test_dry_run_of_a_sweep_shows_each_layout_without_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.yaml').write_text('train: {global_batch_size: 32}\ndata: {synthetic: true}\n')
    done = call('sweep', '--study', 'x', '--layouts', '1x1 2x2', '--config', 'c.yaml', '--dry-run')
    assert done.returncode == 0 and 'no such folder' not in done.stderr
    assert re.findall(r'^ranks +(\d+)$', done.stdout, re.MULTILINE) == ['1', '4']


@pytest.mark.parametrize(
    'script, hosts, ranks, config, expected',
    [
        (
            'local',
            ['localhost'] * 8,
            8,
            {},
            'got 8 nodes with 8 ranks, 64 on this machine, which has 2 CPUs, expected',
        ),
        ('local', ['localhost'], 17, {}, '17 on this machine, which has 2 CPUs'),
        ('local', ['localhost'], 16, {}, None),
        ('mpirun', ['localhost', 'h2'], 17, {}, '17 on this machine'),
        ('mpirun', ['h1', 'h2'], 17, {}, None),
        ('slurm', ['localhost'], 17, {}, None),
        ('local', ['localhost'], 1, {'device': 'gpu'}, None),
        ('local', ['localhost'], 4, {'device': 'gpu'}, None),
        (
            'local',
            ['localhost'],
            8,
            {'device': 'gpu'},
            'which has 1 GPU, expected 8; give other machines with --hosts',
        ),
    ],
)
def test_ranks_that_this_machine_cannot_bear_are_refused(
    monkeypatch, script, hosts, ranks, config, expected
):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1})
    monkeypatch.setattr(checks, 'find_limits', lambda: SimpleNamespace(quota_cpus=None))
    monkeypatch.setattr(checks, 'all_bus_ids', lambda sys: ['0000:3b:00.0'])
    place, config = (
        supervisor.Placement(None, tuple(hosts), ranks),
        Config(train=TrainConfig(**config)),
    )
    words = ['--ranks-per-device', 4] if ranks == 4 else []
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        check_machine(ENGINES[script], options(*words, script=script), place, config)
    monkeypatch.setattr(checks, 'find_limits', lambda: SimpleNamespace(quota_cpus=0.5))
    if expected and config.train.device == 'cpu':
        with pytest.raises(ConfigError, match='has 1 CPU, expected at most 8 ranks per CPU'):
            check_machine(ENGINES[script], options(*words, script=script), place, config)


def test_environment_of_ranks_and_of_redirected_output():
    before = {'GLIBC_TUNABLES': 'user', 'A': 'b', 'MLPERF_RN50_DEVICE': 'gpu'}
    env = environment(options('--ranks-per-device', 4), before, '7-ab', 'cpu')
    assert env == {
        'GLIBC_TUNABLES': 'user',
        'A': 'b',
        'MLPERF_RN50_RANKS_PER_DEVICE': '4',
        'MLPERF_RN50_JOB': '7-ab',
        'MLPERF_RN50_COMMAND': 'mlperf-rn50 launch mpirun --ranks-per-device 4',
        'MLPERF_RN50_DEVICE': 'cpu',
        'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '50',
    }
    assert plain_output(io.StringIO(), {}) == {'NO_COLOR': '1'}
    assert plain_output(io.StringIO(), {'FORCE_COLOR': '1'}) == {}
    assert plain_output(SimpleNamespace(isatty=lambda: True), {}) == {}


# --- attempts
# ---------------------------------------------------------------------------------------------


def begin(folder, number=0):
    run = RunFolder(folder, number)
    run.result.write_text(':::MLLOG {"key": "run_start"}\n')
    return run


def write(run, *events):
    with open(run.metrics, 'a') as f:
        f.writelines(json.dumps(event) + '\n' for event in events)


def keep(run, step):
    (run.checkpoints / f'step_{step:08d}').mkdir(parents=True)


def test_newest_run_that_can_be_resumed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(COMMAND, 'launch/ranks.sh 2 mlperf-rn50 train')
    expected = (
        'run 1 here was interrupted at step 24; this command starts another run; to resume run 1 '
        'instead: '
        f'launch/ranks.sh 2 mlperf-rn50 train --resume {tmp_path}/checkpoints_1'
    )
    assert attempts.describe_unfinished(tmp_path / 'none') == ''
    begin(tmp_path)
    run = begin(tmp_path, 1)
    assert attempts.describe_unfinished(tmp_path) == ''  # no checkpoint
    keep(run, 24)
    with closing(FileLock(run.lock)) as lock:
        lock.take()
        assert attempts.describe_unfinished(tmp_path) == ''  # it runs
    assert attempts.describe_unfinished(tmp_path) == expected  # killed
    write(run, {'event': 'end', 'status': 'interrupted'})
    begin(tmp_path, 2)  # without a checkpoint
    assert attempts.describe_unfinished(tmp_path) == expected
    write(run, {'event': 'end', 'status': 'converged'})
    assert attempts.describe_unfinished(tmp_path) == ''


def test_attempt_without_a_run_is_recorded(tmp_path):
    write(begin(tmp_path), {'event': 'end', 'status': 'converged'})
    before = read_progress(tmp_path)
    assert read_attempt(tmp_path, before, 1, is_resumed=False).run is None
    begin(tmp_path, 1)
    assert read_attempt(tmp_path, before, 1, is_resumed=False) == Attempt(
        1, 1, None, gained=False, can_resume=False, place='step 0, start-up'
    )


def test_stop_without_a_checkpoint_is_reported():
    def judge(gained):
        return attempts.judge(Attempt(None, 1, None, gained, gained), True, 0, [])

    assert judge(gained=False) == (1, 'stopped; this start wrote no checkpoint') and judge(
        gained=True
    ) == (75, '')


def test_progress_counts_images_if_the_batch_size_changes(tmp_path):
    run = begin(tmp_path)
    keep(run, 100)
    before = read_progress(tmp_path)
    (run.checkpoints / 'step_00000100').rmdir()
    keep(run, 50)  # the same images in a larger batch
    write(run, {'event': 'resumed', 'step': 50})
    assert not read_attempt(tmp_path, before, 1, is_resumed=True).gained
    keep(run, 60)
    assert read_attempt(tmp_path, before, 1, is_resumed=True).gained


def test_stuck_attempts_are_counted_across_starts_of_a_job(tmp_path):
    for job, gained in [('7', True), ('7', False), ('8', False), ('7', False)]:
        note_attempt(tmp_path, job, Attempt(0, 1, None, gained, True))

    def count(job):
        return attempts.count_stuck(read_attempts(tmp_path, job))

    assert [count(job) for job in ('7', '8', '9')] == [2, 1, 0]
    # before its first step
    note_attempt(tmp_path, '7', Attempt(0, 1, None, False, True, origin='outside'))
    assert count('7') == 2
    # a run without a checkpoint
    note_attempt(tmp_path, '7', Attempt(1, 0, 'converged', False, False))
    assert count('7') == 0
    note_attempt(tmp_path / 'none', '7', Attempt(0, 1, None, False, True))
    assert not (tmp_path / 'none').exists()
    assert [attempts.pause_s(n) for n in (0, 1, 2)] == [0, 5, 10]


# --- failed hosts
# -----------------------------------------------------------------------------------------


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
    assert supervisor.bad_hosts(failures, ['h1', 'h2', 'h3']) == {'h2': 'killed'}
    # two failures in one attempt count once
    assert supervisor.bad_hosts(failures[2:], ['h1', 'h2', 'h3']) == {}
    assert supervisor.bad_hosts(failures, ['h2']) == {}  # the last host is kept
    cut = [Failure(job, host, 'had no contact') for job in ('1', '2') for host in ('h2', 'h3')]
    assert supervisor.bad_hosts(cut, ['h1', 'h2', 'h3']) == {}  # the launcher's own link was cut
    assert supervisor.bad_hosts(cut, ['h1', 'h2', 'h3', 'h4']) == {
        'h2': 'had no contact',
        'h3': 'had no contact',
    }
    assert supervisor.bad_hosts([f for f in cut if f.host == 'h2'], ['h1', 'h2']) == {
        'h2': 'had no contact'
    }
    place = supervisor.Placement(tmp_path, ('10.0.0.1', '10.0.0.2', '10.0.0.3'), 2)
    assert place.ranks_of('10.0.0.2') == '2, 3'
    assert place.name_of(failures[0]) == 'h1'
    assert [place.name_of(Failure('a', 'n', 'killed', rank)) for rank in (3, 4, 6)] == [
        *place.hosts[1:],
        'n',
    ]


# --- the lock
# ---------------------------------------------------------------------------------------------


def test_second_launcher_is_refused_and_a_crash_releases_the_lock(tmp_path):
    folder = tmp_path / 'a/run'
    with (
        folder_lock(folder),
        pytest.raises(ConfigError, match=rf'is in use by process {os.getpid()} on '),
        folder_lock(folder),
    ):
        pass
    assert not (tmp_path / 'a').exists()  # as before
    code = f"""import time; from pathlib import Path; from mlperf_rn50.runfolder.locks import folder_lock
with folder_lock(Path({str(folder)!r})): print(flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ConfigError, match='is in use by'), folder_lock(folder):
            pass
        holder.kill()
    with folder_lock(folder):  # the lock file of the killed process still exists
        note_failure(folder, Failure('1-a', 'h9', 'was not reached'))
        (folder / 'result_0.txt').touch()
    assert sorted(p.name for p in folder.iterdir()) == ['failures.jsonl', 'result_0.txt']
    with folder_lock(tmp_path / 'b/run'):  # no run begins
        note_failure(tmp_path / 'b/run', Failure('1-a', 'h9', 'was not reached'))
    assert not (tmp_path / 'b').exists()


# --- engines and how they end
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'required, expected',
    [
        ([Stage.STOPPING, Stage.STOPPING], Stage.STOPPING),
        ([Stage.STOPPING, Stage.TERMINATING], Stage.TERMINATING),
        # None: the time of a stage is over
        ([Stage.TERMINATING], Stage.TERMINATING),
        ([None], Stage.TERMINATING),
        ([Stage.TERMINATING, None, Stage.STOPPING], Stage.KILLING),
        ([Stage.STOPPING, None, None, None], Stage.KILLING),
    ],
)
def test_stop_stages(required, expected):
    assert functools.reduce(next_stage, required, Stage.RUNNING) is expected


STOP, AT_ONCE, LOST = 'stop request', 'second Ctrl-C', 'host lost'


class ScriptedSignals:
    """Signals of events in the given order once the engine is up; the clock advances only if
    `is_late`."""

    def __init__(self, folder, events, is_late):
        self.folder, self.events, self.is_late, self.now, self.is_forced = (
            folder,
            list(events),
            is_late,
            0.0,
            False,
        )

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
        monkeypatch.setattr(process, 'time', signals)
        monkeypatch.setattr(process, 'STOP_LIMIT_S', 5.0)
        monkeypatch.setattr(process, '_LOOK_S', 1.0)
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


def test_stop_request_is_forwarded(run_shell):
    assert run_shell(WAITS, STOP) == (75, [])
    assert run_shell(WAITS, STOP, status=None) == (15, [])  # no state to save
    sent = []
    messenger = SimpleNamespace(send_signal=lambda number: sent.append(number))
    code, _ = run_shell(WAITS, STOP, AT_ONCE, messengers=[messenger])
    assert (code, sent) == (15, [signal.SIGUSR1])


@pytest.mark.parametrize(
    'events, texts',
    [
        ([STOP], ['the stop request has had no effect after 5 s']),
        ([STOP, AT_ONCE], []),
        ([LOST], []),
    ],
)
def test_engine_that_does_not_stop_is_killed_with_all_processes(run_shell, events, texts):
    late = []
    assert run_shell(IGNORES, *events, is_late=True, report=late.append) == (
        1 if LOST in events else 137,
        [],
    )
    assert late == texts


def test_start_limit_applies_until_the_ranks_have_begun(run_shell):
    late, calls = [], []
    assert run_shell(WAITS, is_late=True, limit_s=20.0, report=late.append) == (1, [])
    assert run_shell(
        'UP; sleep 0.3; exit 7',
        is_late=True,
        limit_s=2.0,
        status=lambda: calls.append(True) or '',
        report=late.append,
    ) == (7, [])
    assert calls and late == ['still starting after 20 s']


@pytest.mark.parametrize('events, text', [((), '120 s'), ((STOP,), '30 s')])
def test_processes_that_outlive_their_run_are_reported_and_ended(run_shell, events, text):
    late = []
    code, left = run_shell(
        IGNORES, *events, is_late=True, status=lambda: 'converged', report=late.append
    )
    assert code and not left and late == [f'the run has ended, but not its processes after {text}']


INT, TERM, HUP, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2


@pytest.mark.parametrize(
    'before, sent, expected',
    [
        (
            signal.SIG_DFL,
            [(USR2, 0), (TERM, 0), (INT, 0.5), (INT, 1.1), (TERM, 1.2), (signal.SIGCHLD, 2)],
            [
                Stage.TERMINATING,
                Stage.STOPPING,
                Stage.STOPPING,
                Stage.TERMINATING,
                Stage.TERMINATING,
                None,
            ],
        ),
        (signal.SIG_DFL, [(HUP, 0), (signal.SIGUSR1, 9)], [Stage.STOPPING] * 2),
        (signal.SIG_IGN, [(HUP, 0), (INT, 9)], [None, Stage.STOPPING]),
    ],
    ids=['once more', 'hangup', 'nohup'],
)
def test_stages_of_signals_even_of_those_ignored_before(monkeypatch, before, sent, expected):
    """Send signals to this process at given times."""
    with own_signals():
        for number, handler in (
            (INT, signal.SIG_IGN),
            (signal.SIGUSR1, signal.SIG_IGN),
            (HUP, before),
        ):
            signal.signal(number, handler)
        signals, stages = stop_signals.SignalQueue(LAUNCHER_SIGNALS), []
        for number, now_s in sent:
            monkeypatch.setattr(
                stop_signals, 'time', SimpleNamespace(monotonic=lambda now_s=now_s: now_s)
            )
            os.kill(os.getpid(), number)
            stages.append(stage_of(signals.next(0), signals.is_forced))
    assert stages == expected


def test_signals_of_one_number_are_discarded():
    with own_signals():
        signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS)
        signals.discard(USR2)
        for number in (USR2, TERM):
            os.kill(os.getpid(), number)
        signals.discard(USR2)
        assert [signals.next(0), signals.next(0)] == [TERM, None]


def test_guard_forwards_a_stop_request_to_ranks_with_a_handler(tmp_path):
    env = {**os.environ, 'MLPERF_RN50_JOB': f'{os.getpid()}-{time.monotonic_ns():x}'}

    def start(script, **variables):
        process = subprocess.Popen(
            ['bash', '-c', script], env=env | variables, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == 'up\n'
        return process

    waits = 'trap "exit 75" USR1; echo up; while :; do sleep 0.05; done'
    ready, starting = (
        start(waits, HOROVOD_RANK='0'),
        start('echo up; exec sleep 600', HOROVOD_RANK='0'),
    )
    engine = start(waits)
    command = [ROOT / 'launch/guard.sh', '--here', 'h1', tmp_path, env['MLPERF_RN50_JOB']]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as guard:
        print('\nstop', file=guard.stdin, flush=True)
        assert ready.wait() == 75
        assert starting.poll() is None and engine.poll() is None
    # The end of its input tells the guard that the launcher has ended.
    assert (starting.wait(), engine.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
    assert not read_failures(tmp_path)


def test_guard_without_contact_to_its_launcher_ends_the_ranks_and_records_it(tmp_path):
    job, precious = f'{os.getpid()}-{time.monotonic_ns():x}', tmp_path / 'precious'
    quick = tmp_path / 'guard.sh'
    quick.write_text((ROOT / 'launch/guard.sh').read_text().replace('silence_s=20', 'silence_s=1'))
    quick.chmod(0o755)
    with (
        subprocess.Popen(['sleep', '600'], env={**os.environ, 'MLPERF_RN50_JOB': job}) as rank,
        subprocess.Popen([quick, '--here', 'h2', tmp_path, job], stdin=subprocess.PIPE) as guard,
    ):
        assert rank.wait() == -signal.SIGTERM and guard.wait() == 0
    wait_for(lambda: read_failures(tmp_path), lambda: True, lambda: 'no line')
    assert untimed(read_failures(tmp_path)) == [
        Failure(job, 'h2', 'had no contact to the launcher for 1 s', is_outside=True)
    ]
    (tmp_path / 'failures.jsonl').rename(precious)
    before = precious.read_text()
    (tmp_path / 'failures.jsonl').symlink_to(precious)
    with subprocess.Popen([quick, '--here', 'h2', tmp_path, job], stdin=subprocess.PIPE) as guard:
        assert guard.wait() == 0
    assert precious.read_text() == before


def test_remaining_processes_are_named_and_stopped_ones_alone(tmp_path):
    job, guard = f'{os.getpid()}-{time.monotonic_ns():x}', ROOT / 'launch/guard.sh'
    env = {**os.environ, 'MLPERF_RN50_JOB': job}

    def find():
        return sorted(run([guard, '--list', 'localhost', job]).stdout.splitlines())

    assert not find()
    with (
        subprocess.Popen(['sleep', '600'], env=env) as engine,
        subprocess.Popen(['sleep', '600'], env={**env, 'OMPI_COMM_WORLD_RANK': '3'}) as watcher,
    ):
        names = [
            f'process {engine.pid} (sleep) on localhost',
            f'process {watcher.pid} (sleep, rank 3) on localhost',
        ]
        wait_for(lambda: len(find()) == 2, lambda: True, lambda: 'not started')
        assert find() == sorted(names)
        watcher.send_signal(signal.SIGSTOP)
        assert find() == [f'{names[1]}, which is stopped']
        engine.kill()
        watcher.kill()


# Stand-in for ssh up to the first line of the far side; the job is the last word of the remote
# command.
CONNECTED = 'for job in $*; do :; done; echo "connected $job"\n'


@pytest.mark.parametrize(
    'ssh, reason',
    [
        (
            'echo "ssh: Could not resolve hostname h2: Name or service not known" >&2; exit 255',
            'ssh: Could not resolve hostname h2: Name or service not known',
        ),
        ('echo Welcome; printf "\\033[31mbash: no guard.sh"; exit 127', '?[31mbash: no guard.sh'),
        ('exit 255', 'ssh gave no reason'),
        ('echo Welcome; exec sleep 600', 'no login within 1 s'),
    ],
)
def test_host_that_was_never_reached_is_recorded_with_the_reason_of_ssh(
    tmp_path, monkeypatch, ssh, reason
):
    write_files(tmp_path, {'ssh': f'#!/bin/sh\n{ssh}'}, mode=0o755)
    quick = tmp_path / 'guard.sh'
    quick.write_text((ROOT / 'launch/guard.sh').read_text().replace('login_s=60', 'login_s=1'))
    quick.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setattr(launcher, '_GUARD', str(quick))
    with own_signals():
        guarded = launcher_of('--hosts', 'h2', signals=stop_signals.SignalQueue(LAUNCHER_SIGNALS))
        with guarded._guards(supervisor.Placement(tmp_path, ('h2',), 1), '1-a') as guards:
            guards[0].wait(HANG_LIMIT_S)
    assert untimed(read_failures(tmp_path)) == [
        Failure('1-a', 'h2', f'was not reached: {reason}', is_outside=True)
    ]


def test_host_whose_guard_ended_by_itself_is_recorded(tmp_path, monkeypatch):
    write_files(
        tmp_path,
        {'ssh': f'#!/bin/sh\n{CONNECTED}[ "$9" != h2 ] || exit 255\nexec cat >/dev/null'},
        mode=0o755,
    )
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with own_signals():
        guarded = launcher_of(
            '--hosts', 'h1,h2', signals=stop_signals.SignalQueue(LAUNCHER_SIGNALS)
        )
        with guarded._guards(supervisor.Placement(tmp_path, ('h1', 'h2'), 1), '1-a') as guards:
            os.kill(guards[0].pid, signal.SIGSTOP)  # does not keep the launcher
            guards[1].wait(HANG_LIMIT_S)
    assert untimed(read_failures(tmp_path)) == [
        Failure('1-a', 'h2', 'lost its connection to the launcher', is_outside=True)
    ]


@pytest.mark.parametrize(
    'num_hosts, num_files', [(40, 20), pytest.param(1250, 1000, marks=pytest.mark.slow)]
)
def test_guards_of_many_hosts_need_few_open_files(tmp_path, monkeypatch, num_hosts, num_files):
    (tmp_path / 'connected').mkdir()
    write_files(
        tmp_path, {'ssh': f'#!/bin/sh\n>"{tmp_path}/connected/$$"\nexec cat >/dev/null'}, mode=0o755
    )
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    hosts, (soft, hard) = (
        [f'h{i}' for i in range(num_hosts)],
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    with own_signals():
        guarded = launcher_of(
            '--hosts', ','.join(hosts), signals=stop_signals.SignalQueue(LAUNCHER_SIGNALS)
        )
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (num_files + len(os.listdir('/proc/self/fd')), hard)
        )
        try:
            with guarded._guards(
                supervisor.Placement(tmp_path, tuple(hosts), 8), f'{os.getpid()}-a'
            ) as guards:
                wait_for(
                    lambda: len(os.listdir(tmp_path / 'connected')) == num_hosts,
                    lambda: True,
                    lambda: '',
                )
                assert [g.poll() for g in guards] == [None] * num_hosts
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_stop_request_goes_to_a_host_over_ssh(tmp_path):
    inbox = tmp_path / 'inbox'
    # The guard reads more than fits into a pipe only after it has seen that it is connected.
    ssh = f'#!/bin/bash\necho connected 1-a\nyes | head -c 200000\ncat >"{inbox}"'
    write_files(tmp_path, {'ssh': ssh}, mode=0o755)
    command = [
        ROOT / 'launch/guard.sh',
        '--host',
        'far',
        '--launcher',
        os.getpid(),
        tmp_path,
        '1-a',
    ]
    with subprocess.Popen(
        [str(c) for c in command],
        env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
        stdout=subprocess.PIPE,
        text=True,
    ) as guard:
        assert guard.stdout.readline() == 'ready\n'
        wait_for(inbox.exists, lambda: guard.poll() is None, lambda: '')
        guard.send_signal(signal.SIGUSR1)
        wait_for(lambda: 'stop\n' in inbox.read_text(), lambda: guard.poll() is None, lambda: '')
        guard.terminate()
    assert guard.returncode == 0


def test_slow_start_is_reported(capfd, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(Launcher, 'start_ranks', lambda self, *a: calls.append(a[-3:]) or 143)
    monkeypatch.setattr(
        launcher, 'wait_briefly', lambda processes, signals, limit_s: processes[0].wait() == 0
    )
    place = supervisor.Placement(tmp_path, ('localhost',), 1)
    for limit_s in (900.0, 0.0):
        config = Config(comm=CommConfig(start_limit_s=limit_s))
        launcher_of('--config', 'c.yaml').start(config, place, '1-2', ['doctor'], lambda: None)
    assert [limit_s for limit_s, *_ in calls] == [1020.0, 0.0]
    calls[0][2]('still starting after 1020 s')
    assert capfd.readouterr().err == (
        'mlperf-rn50 launch mpirun: doctor: still starting after 1020 s; waiting for '
        'nothing; stopped\n'
    )
    assert untimed(read_failures(tmp_path)) == [
        Failure('1-2', '', 'doctor: still starting after 1020 s')
    ]


@pytest.mark.parametrize(
    'script, num_ranks, reason',
    [('local', 2, '2 ranks need it; start one rank'), ('horovodrun', 1, 'horovodrun needs it')],
)
def test_launcher_without_horovod_refuses_several_ranks(
    script, num_ranks, reason, monkeypatch, tmp_path
):
    monkeypatch.setattr(engines, 'find_spec', lambda name: None)
    ENGINES['local'].check_horovod(None, 1)
    ENGINES['apptainer'].check_horovod('a.sif', 8)  # the image has its own packages
    start = launcher_of('--config', 'c', script=script)
    with pytest.raises(ConfigError, match=f'Horovod is not installed, but {reason}'):
        start.start_ranks(
            supervisor.Placement(tmp_path, ('localhost',), num_ranks), '1-2', ['true'], 'gpu'
        )


FILE = RunConfig('/r', num_nodes=2, ranks_per_node=3)


@pytest.mark.parametrize(
    'words, run, expected',
    [
        (['--config', 'c'], FILE, (['localhost'] * 2, 3)),
        (['--config', 'c', '--ranks-per-node', 4], FILE, (['localhost'] * 2, 4)),
        (['--config', 'c', '--nodes', 1], FILE, (['localhost'], 3)),
        (['--config', 'c', '--hosts', 'h1,h2,h3'], FILE, (['h1', 'h2'], 3)),
        (['--config', 'c', '--hosts', 'h1,h2,h3'], RunConfig('/r'), (['h1', 'h2', 'h3'], 1)),
        (['--config', 'c', '--hosts', 'h1'], FILE, '--nodes: got 2 with 1 hosts'),
        (['--resume', '--run-dir', '/r'], replace(FILE, dir='/before'), (['localhost'] * 2, 3)),
        (['--resume', '--run-dir', '/r', '--hosts', 'h1'], FILE, (['h1'], 3)),
        (['--config', 'c', '--hosts', 'h1:4,h2:4'], FILE, (['h1', 'h2'], 4)),
        (
            ['--config', 'c', '--hosts', 'h1:4,h2:4', '--ranks-per-node', '2'],
            FILE,
            'h1: got 2 ranks, expected 4',
        ),
        (['--resume'], FILE, 'got no --run-dir'),
        ([], FILE, '--config: got nothing'),
    ],
)
def test_place_of_options_hosts_and_configuration(words, run, expected, monkeypatch):
    monkeypatch.setattr(checks, 'newest_run', lambda folder: RunFolder(folder, 0))

    def settle():
        return place_ranks(ENGINES['mpirun'], options(*words), lambda words: Config(run))

    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            settle()
        return
    place, config = settle()
    assert (
        (list(place.hosts), place.ranks_per_node) == expected
        and str(place.run_dir) == '/r'
        and config.run is run
    )


@pytest.mark.parametrize(
    'words, message',
    [
        *(
            (
                ['--resume', 'RUN/checkpoints_1', *words],
                '--resume: got .*/checkpoints_1 with --config, --seeds or',
            )
            for words in (['--config', 'c'], ['--seeds', 2], ['--run-dir', '/x'])
        ),
        (['--resume', 'RUN/checkpoints_2'], 'checkpoints_2: contains no checkpoint'),
    ],
)
def test_older_run_to_resume_is_given_without_contradiction(tmp_path, words, message):
    run = begin(tmp_path, 1)
    keep(run, 24)
    run.config.touch()
    done = call('launch', 'local', *(str(w).replace('RUN', str(tmp_path)) for w in words))
    assert done.returncode == 2 and re.search(message.replace('RUN', str(tmp_path)), done.stderr), (
        done.stderr
    )


def test_plan_of_a_resume_is_that_of_its_run(tmp_path):
    for number, batch in enumerate((32, 64)):
        run = begin(tmp_path, number)
        keep(run, 24)
        run.config.write_text(f'train: {{local_batch_size: {batch}}}\ndata: {{synthetic: true}}\n')
    for words, batch in (
        (['--resume', '--run-dir', tmp_path], 64),
        (['--resume', tmp_path / 'checkpoints'], 32),
    ):
        done = call('launch', 'local', *words, '--ranks-per-node', 2, '--dry-run')
        assert f'global batch          {2 * batch}' in done.stdout, done.stderr


@pytest.mark.parametrize(
    'scontrol, reason',
    [
        (None, 'No such file'),
        ('#!/bin/sh\necho slurm_load_jobs error: down >&2; exit 1', 'slurm_load_jobs error: down'),
        ('#!/bin/sh\nexec sleep 600', 'no answer within 1 s'),
    ],
)
def test_slurm_without_an_answer_is_named(tmp_path, monkeypatch, scontrol, reason):
    monkeypatch.setattr(engines, '_SCONTROL_S', 1)
    if scontrol:
        write_files(tmp_path, {'scontrol': scontrol}, mode=0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin' if scontrol else str(tmp_path))
    with pytest.raises(ConfigError, match=f'scontrol: {reason}'):
        engines.nodes_of_slurm_job({'SLURM_JOB_NODELIST': 'n1'})


def test_missing_or_full_tmpdir_is_refused_although_another_folder_has_space(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'none'))
    for name in ('local', 'horovodrun'):
        with pytest.raises(
            ConfigError, match=f'TMPDIR: {tmp_path}/none is not a writable folder; create it or set'
        ):
            check_room(ENGINES[name], 1)
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    free = {tmp_path: 0}
    monkeypatch.setattr(shutil, 'disk_usage', lambda p: SimpleNamespace(free=free.get(p, 10**9)))
    with pytest.raises(ConfigError, match=f'TMPDIR: {tmp_path} has 0.0 MB free, expected 17 MB'):
        check_room(ENGINES['local'], 1)
    del free[tmp_path]
    check_room(ENGINES['local'], 1)


@pytest.mark.parametrize(
    'limit, num_ranks, is_refused',
    [
        (35, 1, True),
        (36, 1, False),
        (64, 8, False),
        (63, 8, True),
        (resource.RLIM_INFINITY, 999, False),
    ],
)
def test_too_few_open_files_for_open_mpi_are_refused(monkeypatch, limit, num_ranks, is_refused):
    limits = {resource.RLIMIT_NOFILE: (limit, limit)}
    monkeypatch.setattr(
        resource, 'getrlimit', lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2)
    )
    message = rf'ulimit -n: got {limit} open files, expected at least {32 + 4 * num_ranks},'
    with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        check_room(ENGINES['local'], num_ranks)


@pytest.mark.parametrize('limit, is_refused', [(10 << 10, True), (16 << 20, False)])
def test_limit_of_file_sizes_that_blocks_open_mpi_is_refused(monkeypatch, limit, is_refused):
    limits = {resource.RLIMIT_FSIZE: (limit, limit)}
    monkeypatch.setattr(
        resource, 'getrlimit', lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2)
    )
    with (
        pytest.raises(
            ConfigError, match='ulimit -f: got 10 KiB per file, .* run ulimit -f unlimited'
        )
        if (is_refused)
        else nullcontext()
    ):
        check_room(ENGINES['local'], 1)


@pytest.mark.parametrize(
    'free, num_ranks, is_refused', [(79, 2, True), (80, 2, False), (48, 1, False)]
)
def test_too_few_processes_for_the_ranks_are_refused(monkeypatch, free, num_ranks, is_refused):
    monkeypatch.setattr(checks, 'free_processes', lambda: (free, 'ulimit -u is 99'))
    message = (
        f'processes: ulimit -u is 99, of which {free} are free, expected 80 for 2 ranks on a node'
    )
    with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        check_room(ENGINES['local'], num_ranks)


def test_deleted_current_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / 'gone').mkdir()
    monkeypatch.chdir(tmp_path / 'gone')
    (tmp_path / 'gone').rmdir()
    done = call('launch', 'local', '--config', 'c.yaml')
    assert done.returncode == 2
    assert (
        done.stderr == 'mlperf-rn50: the current folder has been deleted; change to another one\n'
    )


def test_python_that_the_user_cannot_execute_is_named(tmp_path):
    for folder in ('a/.venv/bin', 'a/launch/engines'):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / 'a/launch/local.sh'
    for name in ('local.sh', 'engines/program.sh'):
        shutil.copy(ROOT / 'launch' / name, script.parent / name)
    done = run([script, 'word', '--help'])  # not the help of the script
    assert done.returncode == 2
    assert done.stderr == f'mlperf-rn50: {tmp_path}/a/.venv is missing; run launch/setup.sh there\n'
    (tmp_path / 'a/.venv/bin/python').symlink_to('python3.11')
    done = run([script])
    assert (
        done.returncode == 2
        and f' cannot execute {tmp_path}/a/.venv/bin/python3.11, to which' in done.stderr
    )
    # of a user without a name
    write_files(tmp_path, {'bin/id': '#!/bin/sh\necho 4711\nexit 1'}, mode=0o755)
    done = run([script], env={**os.environ, 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'})
    assert f': user {os.geteuid()} cannot' in done.stderr and done.stderr.count('\n') == 1


def test_empty_folders_of_a_killed_launcher_are_removed(tmp_path):
    job = f'{os.getpid()}-{os.urandom(4).hex()}-1'
    gone, full, mps, running = (
        tmp_path / f'mlperf_rn50-{n}' for n in ('9-01234567-1', '9-01234568-1d', 'mps-0', job)
    )
    for folder in (gone, full / 'files', mps, running):
        folder.mkdir(parents=True)
    with subprocess.Popen(
        ['sh', '-c', 'echo up; cat'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, 'MLPERF_RN50_JOB': job},
    ) as process:
        # before exec, a process lacks the new environment
        assert process.stdout.readline() == b'up\n'
        remove_leftovers([tmp_path, tmp_path / 'nothing'])
    assert sorted(tmp_path.iterdir()) == sorted([full, mps, running])


ON_A_TERMINAL = """import os
from mlperf_rn50.launch.process import LAUNCHER_SIGNALS, run_engine
from mlperf_rn50.system.signals import SignalQueue

class Quick(SignalQueue):
    def next(self, timeout_s):
        print('waits', flush=True)
        return super().next(min(timeout_s, 0.2))

job, engine = 'terminal', 'trap "echo stopping; exit 75" USR1; while :; do sleep 0.05; done'
code = run_engine(['bash', '-c', engine], dict(os.environ, MLPERF_RN50_JOB=job), Quick(LAUNCHER_SIGNALS), job,
                  status=lambda: None)
print('ended', code, flush=True)
"""


def test_ctrl_z_and_fg_on_a_terminal(tmp_path):
    """A pause sends no stop request to the engine, even beyond the deadline of a wait; a later
    Ctrl-C does."""
    (tmp_path / 'launcher.py').write_text(ON_A_TERMINAL)
    pid, terminal = pty.fork()
    if not pid:
        # in English
        os.execvpe('bash', ['bash', '--norc', '--noprofile', '-i'], {**os.environ, 'LC_ALL': 'C'})

    def read_to(text):
        read = ''
        while not read.endswith(text):
            assert select.select([terminal], [], [], HANG_LIMIT_S)[0], f'{text} not in {read}'
            read += os.read(terminal, 1).decode(errors='replace')
        return read

    try:
        os.write(
            terminal,
            f'stty -echo; {shlex.join([sys.executable, str(tmp_path / "launcher.py")])}\n'.encode(),
        )
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
