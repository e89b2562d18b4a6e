"""A rank and its watcher: what is said of a rank that dies or hangs, and that nothing is left behind."""
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import HANG_LIMIT_S

PROGRAM = '''
import os, signal, sys, time
from mlperf_rn50.train.watch import watched
def rest():  # not one long sleep: a handler whose signal comes just before it would wait for its end
    for _ in range(600):
        time.sleep(0.1)
def rank(position):
    position.now('training', 41)
    position.now('training', 42)
    {body}
    return 7
sys.exit(watched(rank, {limit}))
'''


def start(body, limit=0, command=(), **variables):
    code = PROGRAM.format(body=body, limit=limit)
    return subprocess.Popen([*command, sys.executable, '-c', code], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env={**os.environ, 'HOROVOD_RANK': '0', **variables})


def child_of(process):
    end = time.monotonic() + HANG_LIMIT_S
    while time.monotonic() < end:
        found = psutil.Process(process.pid).children()
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError('no rank was started')


def test_the_exit_code_is_the_ranks():
    process = start('pass')
    assert process.communicate()[1] == '' and process.returncode == 7


@pytest.mark.parametrize('number, name', [(signal.SIGKILL, 'SIGKILL'), (signal.SIGSEGV, 'SIGSEGV')])
def test_a_killed_rank_is_named_with_its_step_and_phase(number, name):
    process = start(f'os.kill(os.getpid(), {number})', HOROVOD_RANK='3')
    err = process.communicate()[1]
    assert process.returncode == 1
    where = f'rank 3 on {os.uname().nodename}, step 42, training'
    assert err == f'mlperf-rn50: {where}: killed by signal {number} ({name})\n'


def test_a_silent_rank_is_ended():
    process = start('time.sleep(60)', limit=0.5)
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert process.returncode == 1 and 'step 42, training: no progress for ' in err
    assert 'comm.stall_limit_s' in err


def test_a_stopped_rank_is_ended_and_said_to_be_stopped():
    process = start('os.kill(os.getpid(), signal.SIGSTOP)', limit=0.5)
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert process.returncode == 1 and 'step 42, training: stopped (SIGSTOP) for ' in err


def test_signs_of_life_keep_it_going():
    process = start('[(time.sleep(0.2), position.now()) for _ in range(30)]', limit=3)
    assert process.communicate()[1] == '' and process.returncode == 7


def test_signals_are_handed_on():
    body = 'signal.signal(signal.SIGUSR1, lambda *_: os._exit(75)); print("ready", flush=True); rest()'
    process = start(body)
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 75


def test_a_signal_at_the_start_waits_for_the_rank():
    body = """signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
    os.kill(os.getppid(), signal.SIGUSR1)  # as early as can be: the watcher may not have its handlers yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]); rest()"""
    code = PROGRAM.format(body=body, limit=0).replace(
        'sys.exit(', 'signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\nsys.exit(')
    assert subprocess.run([sys.executable, '-c', code], timeout=HANG_LIMIT_S).returncode == 75


def test_a_rank_dies_with_its_watcher():
    process = start('print("ready", flush=True); time.sleep(60)')
    assert process.stdout.readline() == 'ready\n'
    rank = child_of(process)
    process.kill()
    psutil.wait_procs([rank], timeout=HANG_LIMIT_S)
    assert not rank.is_running()


def test_without_a_launcher_the_rank_is_asked_to_stop():
    body = 'signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); print(os.getppid(), flush=True); rest()'
    launcher = start(body, command=['sh', '-c', '"$@" & wait', 'sh'])
    watcher = psutil.Process(int(launcher.stdout.readline()))
    assert watcher.ppid() == launcher.pid
    launcher.kill()
    psutil.wait_procs([watcher], timeout=HANG_LIMIT_S)
    assert not watcher.is_running()
