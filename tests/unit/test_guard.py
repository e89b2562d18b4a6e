"""launch/guard.sh: ranks end without their launcher, and its causes are recorded."""

import os
import signal
import subprocess
import time

import pytest
from helpers import ROOT, prepend_path, run, untimed, wait_for, write_programs

from mlperf_rn50.runfolder.records import Failure, read_failures

GUARD = ROOT / 'launch/guard.sh'
SLEEPS = 'echo up; exec sleep 600'


@pytest.fixture
def job():
    return f'{os.getpid()}-{time.monotonic_ns():x}'


def start(command, job, **variables):
    """Start a process of a job; wait until it has printed up."""
    process = subprocess.Popen(
        ['bash', '-c', command],
        env={**os.environ, 'MLPERF_RN50_JOB': job, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == 'up\n'
    return process


def test_own_host_needs_neither_ssh_nor_hostname(tmp_path, monkeypatch):
    write_programs(tmp_path, ssh='exit 127', hostname='exit 127')
    prepend_path(monkeypatch, tmp_path)
    monkeypatch.setenv('HOSTNAME', 'of.another.host')
    done = run([GUARD, '--list', os.uname().nodename, 'far', '1-a'])
    assert done.stdout == 'host far, which does not answer\n'


def test_guard_forwards_a_stop_request_to_ranks_with_a_handler(tmp_path, job):
    waits = 'trap "exit 75" USR1; echo up; while :; do sleep 0.05; done'
    ready = start(waits, job, HOROVOD_RANK='0')
    starting = start(SLEEPS, job, HOROVOD_RANK='0')
    engine = start(waits, job)
    command = [GUARD, '--here', 'h1', tmp_path, job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as guard:
        print('\nstop', file=guard.stdin, flush=True)
        assert ready.wait() == 75
        assert starting.poll() is None and engine.poll() is None
    # The end of its input tells the guard that the launcher has ended.
    assert (starting.wait(), engine.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
    assert not read_failures(tmp_path)


def test_guard_without_contact_to_its_launcher_ends_the_ranks_and_records_it(tmp_path, job):
    quick = tmp_path / 'guard.sh'
    quick.write_text(GUARD.read_text().replace('silence_s=20', 'silence_s=1'))
    quick.chmod(0o755)
    command = [quick, '--here', 'h2', tmp_path, job]
    rank = start(SLEEPS, job)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert rank.wait() == -signal.SIGTERM and guard.wait() == 0
    wait_for(lambda: read_failures(tmp_path))
    assert untimed(read_failures(tmp_path)) == [
        Failure(job, 'h2', 'had no contact to the launcher for 1 s', is_outside=True)
    ]
    # It writes through no link.
    precious = (tmp_path / 'failures.jsonl').rename(tmp_path / 'precious')
    before = precious.read_text()
    (tmp_path / 'failures.jsonl').symlink_to(precious)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.wait() == 0
    assert precious.read_text() == before


def test_remaining_processes_are_named_and_stopped_ones_alone(job):
    def find():
        return sorted(run([GUARD, '--list', 'localhost', job]).stdout.splitlines())

    with start(SLEEPS, job) as engine, start(SLEEPS, job, OMPI_COMM_WORLD_RANK='3') as watcher:
        names = [
            f'process {engine.pid} (sleep) on localhost',
            f'process {watcher.pid} (sleep, rank 3) on localhost',
        ]
        wait_for(lambda: find() == sorted(names), lambda: True, find)
        watcher.send_signal(signal.SIGSTOP)
        wait_for(lambda: find() == [f'{names[1]}, which is stopped'], lambda: True, find)
        engine.kill()
        watcher.kill()
    assert not find()


def test_stop_request_goes_to_a_host_over_ssh(tmp_path, monkeypatch):
    inbox = tmp_path / 'inbox'
    # The guard reads more than fits into a pipe only after it has seen that it is connected.
    ssh = f'echo connected 1-a\nyes | head -c 200000\ncat >"{inbox}"'
    write_programs(tmp_path, ssh=ssh)
    prepend_path(monkeypatch, tmp_path)
    command = [GUARD, '--host', 'far', '--launcher', str(os.getpid()), tmp_path, '1-a']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout.readline() == 'ready\n'
        wait_for(inbox.exists, lambda: guard.poll() is None, str)
        guard.send_signal(signal.SIGUSR1)
        wait_for(lambda: 'stop\n' in inbox.read_text(), lambda: guard.poll() is None, str)
        guard.terminate()
    assert guard.returncode == 0
