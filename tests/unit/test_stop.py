"""Ctrl-C, a closed terminal and a launcher's word: asked once a run stops by itself, asked twice it ends at once."""
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from helpers import CLI, HANG_LIMIT_S, own_signals, skip_for, wait_for

from mlperf_rn50.train.watchdog import signals as stop_signals
from mlperf_rn50.train.watchdog.signals import StopRequests

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
# Asked to stop it ends with 75, as a run does after its checkpoint; stuck, it is in a native call for good.
PROGRAM = '''
import ctypes, os, signal, sys, time
from mlperf_rn50.cli import main
from mlperf_rn50.cli.ranks import in_rank
from mlperf_rn50.config import Config
def rank(position):
    print('ready', flush=True)
    {body}
    return 7
sys.modules['mlperf_rn50.cli.report'] = sys  # a command of its own
sys.run = lambda _: in_rank(rank, Config(), can_stop={can_stop})
sys.exit(main(['report']))
'''
ASKED = 'import itertools; next(time.sleep(0.1) for _ in itertools.count() if position.is_stop_requested); return 75'
# Native, so that no handler of Python's runs: a lock that is taken already.
STUCK = 'lock = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(lock) for _ in range(2)]'
WAIT_S = 1.1  # between two signals that are not the same one


def start(body, can_stop=True, command=(), ignored=(), **variables):
    def set_signals():  # whatever started the tests may ignore some of them, as nohup does
        for number in (INT, TERM, HUP, USR1):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    code = PROGRAM.format(body=body, can_stop=can_stop)
    process = subprocess.Popen([*command, sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, preexec_fn=set_signals,
                               env={**os.environ, **variables})
    assert process.stdout.readline() == 'ready\n', process.communicate()
    return process


def end(process):
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert 'Traceback' not in err
    return process.returncode, err


def insist(process):
    """Ctrl-C until it counts, which is a second after the first one was heard, whenever that was."""
    while process.poll() is None:
        process.send_signal(INT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_S)


@pytest.mark.parametrize('signals, expected', [
    ([(INT, 0)], [False]), ([(INT, 0), (INT, 0.9)], [False, False]), ([(INT, 0), (INT, 1.5)], [False, True]),
    ([(USR1, 0), (USR1, 60)], [False, False]), ([(USR1, 0), (INT, 2)], [False, True]),
    ([(TERM, 0), (HUP, 5), (TERM, 6)], [False, False, False])])
def test_what_means_at_once(signals, expected):
    asked = StopRequests()
    assert [asked.is_forced(number, 100.0 + at) for number, at in signals] == expected


@pytest.fixture
def heard(monkeypatch):
    """Sends signals to a program without a watcher, in this process; what each of them leads to: 'ask', 'end' or both.
    """
    def hear(can_stop, *sent):
        calls = queue.Queue()
        monkeypatch.setattr(stop_signals, 'end_at_once', lambda: calls.put('end'))
        with own_signals():
            for number in stop_signals.STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(INT, signal.SIG_IGN)  # as a shell in the background does
            stop_signals.catch(lambda *_: None, stop_signals.END_SIGNALS)
            with stop_signals.handle_in_thread((lambda: calls.put('ask')) if can_stop else None):
                for number, now_s in sent:
                    clock = SimpleNamespace(monotonic=lambda now_s=now_s: now_s, sleep=lambda _: None)
                    monkeypatch.setattr(stop_signals, 'time', clock)
                    os.kill(os.getpid(), number)
                    yield calls.get(timeout=10)
    return hear


@pytest.mark.parametrize('can_stop, sent, expected', [
    # Asked once, a run stops by itself, and a command with nothing to finish ends; asked twice, it ends at once.
    *((True, [(number, 0)], ['ask']) for number in (INT, TERM, HUP, USR1)),
    *((False, [(number, 0)], ['end']) for number in (INT, TERM, HUP)),
    (True, [(INT, 0), (INT, 0.5), (INT, 1.5)], ['ask', 'ask', 'end'])])
def test_what_a_signal_leads_to(heard, can_stop, sent, expected):
    assert list(heard(can_stop, *sent)) == expected


def test_asked_in_a_process_it_stops_and_asked_twice_it_ends_wherever_it_is_but_not_by_a_hangup_under_nohup():
    process = start(ASKED)
    process.send_signal(TERM)
    assert end(process) == (75, '')
    process = start(STUCK, ignored=[INT, HUP])
    process.send_signal(HUP)
    time.sleep(0.2)
    assert process.poll() is None
    insist(process)
    assert end(process) == (130, '')


def test_a_watched_rank_ends_with_its_watcher():
    process = start(STUCK, HOROVOD_RANK='0', HOROVOD_SIZE='1')
    [rank] = psutil.Process(process.pid).children()
    insist(process)
    assert end(process) == (130, '') and not rank.is_running()
    process = start(STUCK, can_stop=False, HOROVOD_RANK='0', HOROVOD_SIZE='1')
    process.send_signal(USR1)  # nothing to finish: it is ended at once
    assert end(process) == (130, '')


def test_as_the_first_process_of_a_container():
    skip_for('' if shutil.which('unshare') and not subprocess.run(['unshare', '-pf', 'true']).returncode
             else 'a process namespace takes root')
    outer = start(ASKED, command=['unshare', '-pf', '--kill-child'])
    [first] = psutil.Process(outer.pid).children()
    os.kill(first.pid, TERM)
    assert end(outer) == (75, '')


@pytest.mark.slow
def test_a_preparation_is_interrupted_with_its_workers(tmp_path):
    from PIL import Image
    for split, count in (('train', 2500), ('val', 1)):
        folder = tmp_path / 'source' / split / 'a'
        folder.mkdir(parents=True)
        Image.effect_noise((600, 600), 50).save(folder / '0.png')
        for i in range(1, count):
            os.link(folder / '0.png', folder / f'{i}.png')
    words = ['prepare', 'folder', '--source', tmp_path / 'source', '--out', tmp_path / 'out', '--name', 'x',
             '--workers', '2', '--resize-shorter', '500']
    process = subprocess.Popen([str(w) for w in [*CLI, *words]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob('out/**/*.rec')), lambda: process.poll() is None, process.communicate)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(process.pid, INT)  # as a terminal does
    assert end(process)[0] == 130
    assert not list(tmp_path.glob('out/**/train_*.json'))  # no part was finished first
    psutil.wait_procs(workers, timeout=HANG_LIMIT_S)
    assert not [w for w in workers if w.is_running()]


def test_an_error_for_want_of_memory_is_one_line():
    code = '''import resource, sys
import mlperf_rn50.cli as cli
sys.modules['mlperf_rn50.cli.report'] = sys
def run(_):
    resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
    bytearray(8 << 30)
sys.run = run
sys.exit(cli.main(['report']))'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert 'out of memory: the address space of this process is limited to 1.6 GB (ulimit -v), ' in done.stderr
