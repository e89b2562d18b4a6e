"""Ctrl-C, a closed terminal and a launcher's word: asked once a run stops by itself, asked twice it ends at once."""
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from helpers import CLI, HANG_LIMIT_S, skip_for

from mlperf_rn50.train.stop import Asked

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
# Asked to stop it ends with 75, as a run does after its checkpoint; stuck, it is in a native call for good.
PROGRAM = '''
import ctypes, os, signal, sys, time
from mlperf_rn50.cli import main
from mlperf_rn50.cli._ranks import in_rank
from mlperf_rn50.config import Config
def rank(position):
    print('ready', flush=True)
    {body}
    return 7
sys.modules['mlperf_rn50.cli.report'] = sys  # a command of its own
sys.run = lambda _: in_rank(rank, Config(), can_stop={can_stop})
sys.exit(main(['report']))
'''
ASKED = 'import itertools; next(time.sleep(0.1) for _ in itertools.count() if position.is_asked); return 75'
# Native, so that no handler of Python's runs: a lock that is taken already.
STUCK = 'lock = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(lock) for _ in range(2)]'
WAIT_S = 1.1  # between two signals that are not the same one


def start(body, can_stop=True, command=(), **keys):
    code = PROGRAM.format(body=body, can_stop=can_stop)
    process = subprocess.Popen([*command, sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, **keys)
    assert process.stdout.readline() == 'ready\n', process.communicate()
    return process


def end(process):
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert 'Traceback' not in err
    return process.returncode, err


def insist(process, pid=None):
    """Ctrl-C until it counts, which is a second after the first one was heard, whenever that was."""
    while process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(pid or process.pid, INT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


@pytest.mark.parametrize('signals, expected', [
    ([(INT, 0)], [False]), ([(INT, 0), (INT, 0.9)], [False, False]), ([(INT, 0), (INT, 1.5)], [False, True]),
    ([(USR1, 0), (USR1, 60)], [False, False]), ([(USR1, 0), (INT, 2)], [False, True]),
    ([(TERM, 0), (HUP, 5), (TERM, 6)], [False, False, False])])
def test_what_means_at_once(signals, expected):
    asked = Asked()
    assert [asked.means_at_once(number, 100.0 + at) for number, at in signals] == expected


@pytest.mark.parametrize('number', [INT, TERM, HUP, USR1])
def test_asked_once_a_run_stops_by_itself(number):
    process = start(ASKED, preexec_fn=lambda: signal.signal(INT, signal.SIG_IGN))  # as a shell in the background does
    process.send_signal(number)
    assert end(process) == (75, '')


def test_nohup_keeps_its_word():
    process = start(STUCK, preexec_fn=lambda: signal.signal(HUP, signal.SIG_IGN))
    for number in (HUP, HUP, INT):
        process.send_signal(number)
        time.sleep(WAIT_S)
        assert process.poll() is None
    insist(process)
    assert end(process) == (130, '')


@pytest.mark.parametrize('variables', [{}, {'HOROVOD_RANK': '0', 'HOROVOD_SIZE': '1'}], ids=['alone', 'watched'])
def test_asked_twice_it_ends_at_once_wherever_it_is(variables):
    process = start(STUCK, env={**os.environ, **variables})
    process.send_signal(INT)
    time.sleep(WAIT_S)
    ranks = psutil.Process(process.pid).children()
    assert process.poll() is None and len(ranks) == len(variables) / 2
    insist(process)
    assert end(process) == (130, '')
    assert not [r for r in ranks if r.is_running()]


@pytest.mark.parametrize('variables', [{}, {'HOROVOD_RANK': '0', 'HOROVOD_SIZE': '1'}], ids=['alone', 'watched'])
def test_a_command_with_nothing_to_finish_is_ended_at_once(variables):
    for number in (INT, HUP, *([USR1] if variables else [TERM])):
        process = start(STUCK, can_stop=False, env={**os.environ, **variables})
        process.send_signal(number)
        assert end(process) == (130, '')


@pytest.mark.parametrize('numbers, code', [([TERM], 75), ([HUP, INT], 130)])
def test_as_the_first_process_of_a_container(numbers, code):
    skip_for('' if shutil.which('unshare') and not subprocess.run(['unshare', '-pf', 'true']).returncode
             else 'a process namespace takes root')
    outer = start(ASKED if code == 75 else STUCK, command=['unshare', '-pf', '--kill-child'])
    [first] = psutil.Process(outer.pid).children()
    os.kill(first.pid, numbers[0])
    if len(numbers) > 1:
        time.sleep(WAIT_S)
        insist(outer, first.pid)
    assert end(outer) == (code, '')


def test_a_preparation_is_interrupted_with_its_workers(tmp_path):
    from PIL import Image
    for split, count in (('train', 2500), ('val', 10)):
        (tmp_path / 'source' / split / 'a').mkdir(parents=True)
        for i in range(count):
            Image.effect_noise((600, 600), 50).save(tmp_path / f'source/{split}/a/{i}.png') if i < 1 else \
                os.link(tmp_path / f'source/{split}/a/0.png', tmp_path / f'source/{split}/a/{i}.png')
    words = ['prepare', 'folder', '--source', tmp_path / 'source', '--out', tmp_path / 'out', '--name', 'x',
             '--workers', '2', '--resize-shorter', '500']
    process = subprocess.Popen([str(w) for w in [*CLI, *words]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)
    deadline = time.monotonic() + HANG_LIMIT_S
    while not list(tmp_path.glob('out/**/*.rec')):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
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
    assert 'out of memory: the address space of this process is limited to 1.6 GB (ulimit -v), of which' in done.stderr
