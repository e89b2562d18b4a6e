"""A rank and its watcher: what is said of a rank that dies or hangs, and that nothing is left behind."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.system import out_of_memory
from mlperf_rn50.train.watch import PHASES, Position, Watcher, open_stacks

# A line of the program below in a stack, as py-spy and as faulthandler write it.
STACK = re.compile(r'rank \(<string>:\d+\)|File "<string>", line \d+ in rank')

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


def test_a_kill_that_is_counted_while_the_rank_still_dies_is_its_own(tmp_path, monkeypatch):
    (tmp_path / 'memory.events').write_text('oom_kill 3\n')
    monkeypatch.setattr(out_of_memory, 'memory_cgroup', lambda own: tmp_path)
    watcher = Watcher(os.getpid(), Position(), {}, None, False, -1, os.getppid())
    watcher._sample_memory()
    assert watcher._cause(signal.SIGKILL) == []
    (tmp_path / 'memory.events').write_text('oom_kill 4\n')
    watcher._sample_memory()
    assert watcher._cause(signal.SIGKILL)[0].startswith('out of memory: ')


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


def test_without_a_launcher_the_rank_is_asked_to_stop(tmp_path):
    asked = f'signal.signal(signal.SIGTERM, lambda *_: (os.mkdir("{tmp_path}/asked"), os._exit(75)))'
    body = f'{asked}; print(os.getppid(), flush=True); rest()'
    launcher = start(body, command=['sh', '-c', '"$@" & wait', 'sh'])
    watcher = psutil.Process(int(launcher.stdout.readline()))
    assert watcher.ppid() == launcher.pid
    launcher.kill()
    psutil.wait_procs([watcher], timeout=HANG_LIMIT_S)
    assert not watcher.is_running() and (tmp_path / 'asked').exists()


def in_phase(phase, limits, body='time.sleep(600)', **variables):
    """What is said of a rank that stands still in a phase, with limits of other phases."""
    process = start(f'position.now("{phase}"); {body}', limit=f'900, {limits}', **variables)
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert process.returncode == 1
    return err


@pytest.mark.parametrize('phase, key', [('start-up', 'start_limit_s'), ('training', 'stall_limit_s'),
                                        ('evaluation', 'eval_limit_s'), ('writing a checkpoint', 'checkpoint_limit_s')])
def test_each_phase_has_its_own_limit(phase, key):
    limits = {p: 0.5 if p == phase else 0 for p in PHASES}
    err = in_phase(phase, limits)
    assert f'step 42, {phase}: no progress for ' in err and f' s (comm.{key})' in err


@pytest.mark.parametrize('phase', PHASES)
def test_a_stopped_rank_is_ended_in_every_phase_with_its_stacks(tmp_path, phase):
    limits = {p: 3 if p == phase else 0 for p in PHASES}  # it must be stopped by then
    err = in_phase(phase, f'{limits}, __import__("pathlib").Path("{tmp_path}")', 'os.kill(os.getpid(), signal.SIGSTOP)')
    assert f'step 42, {phase}: stopped (SIGSTOP) for ' in err and f'; its stacks: {tmp_path}/rank_0.txt\n' in err
    assert 'T (stopped)' in (tmp_path / 'rank_0.txt').read_text()


def test_the_clock_starts_anew_with_a_phase():
    body = 'time.sleep(2); position.now("evaluation"); time.sleep(2); position.now("training"); time.sleep(2)'
    process = start(body, limit='900, {"training": 3, "evaluation": 3}')
    assert process.communicate()[1] == '' and process.returncode == 7


def test_a_rank_whose_watcher_is_killed_says_so():
    process = start('print("ready", flush=True); time.sleep(600)', HOROVOD_RANK='1')
    assert process.stdout.readline() == 'ready\n'
    process.kill()
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert err == (f'mlperf-rn50: rank 1 on {os.uname().nodename}, step 42, training: its watcher was killed (SIGKILL '
                   'by somebody, or out of memory); the rank ends with it\n')


def test_a_rank_that_holds_pythons_lock_ends_with_its_watcher():
    process = start('import ctypes; print("ready", flush=True); [ctypes.PyDLL(None).sleep(1000) for _ in range(9)]')
    assert process.stdout.readline() == 'ready\n'
    rank = child_of(process)
    process.kill()
    psutil.wait_procs([rank], timeout=HANG_LIMIT_S)
    assert not rank.is_running()


def test_ranks_that_their_launcher_ends_do_not_say_that_their_watchers_were_killed():
    asked = 'signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))'
    process = start(f'{asked}; print("ready", flush=True); rest()')
    assert process.stdout.readline() == 'ready\n'
    rank = child_of(process)
    process.terminate()
    assert process.stdout.readline() == 'asked\n'  # as mpirun: SIGTERM, and SIGKILL a second later
    process.kill()
    assert process.communicate(timeout=HANG_LIMIT_S)[1] == ''
    psutil.wait_procs([rank], timeout=HANG_LIMIT_S)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_stacks_and_state_of_a_silent_rank_are_written(tmp_path):
    body = 'import ctypes; next(position.told(map(ctypes.PyDLL(None).sleep, [1000])))'
    err = in_phase('training', f'{{"training": 3}}, __import__("pathlib").Path("{tmp_path}/stalled/4-2")', body,
                   HOROVOD_RANK='2', HOROVOD_SIZE='4', MLPERF_RN50_JOB='4-2')
    path = tmp_path / 'stalled/4-2/rank_2.txt'
    assert f'busy: reading data; nothing is known of ranks 0, 1 and 3; its stacks: {path}\n' in err
    text = path.read_text()
    assert STACK.search(text) and 'MainThread' in text and 'nanosleep' in text  # Python's, and native
    assert json.loads(path.with_suffix('.json').read_text())['doing'] == 'reading data'


@pytest.mark.parametrize('body', ['time.sleep(600)', 'os.kill(os.getpid(), signal.SIGSTOP)'])
def test_without_py_spy_the_rank_tells_its_stacks_itself(tmp_path, body):
    without = 'import shutil; shutil.which = lambda *a, **k: None; '
    code = PROGRAM.format(body=body, limit=f'0.5, {{}}, __import__("pathlib").Path("{tmp_path}")')
    done = subprocess.run([sys.executable, '-c', without + code], capture_output=True, text=True, timeout=HANG_LIMIT_S)
    text = (tmp_path / 'rank_0.txt').read_text()
    assert done.returncode == 1
    if 'SIGSTOP' in body:
        assert 'The process tells no stack: it is stopped.' in text and 'T (stopped)' in text
    else:
        assert STACK.search(text)
    assert 'Threads, as the kernel sees them:' in text


def test_a_stopped_rank_has_its_stack_read(tmp_path):
    folder = f'__import__("pathlib").Path("{tmp_path}")'
    process = start('os.kill(os.getpid(), signal.SIGSTOP)', limit=f'0.5, {{}}, {folder}')
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert f'; its stacks: {tmp_path}/rank_0.txt' in err
    assert STACK.search((tmp_path / 'rank_0.txt').read_text())


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / 'file').touch()
    err = in_phase('training', f'{{"training": 0.5}}, __import__("pathlib").Path("{tmp_path}/file")')
    assert err.endswith('s (comm.stall_limit_s), waiting for another rank or for its data\n')


def test_a_rank_that_does_not_start_is_told_which_folder_is_full():
    full = 'import shutil; from types import SimpleNamespace; ' \
           'shutil.disk_usage = lambda p: SimpleNamespace(free=0 if p == "/dev/shm" else 10**9, total=64 * 10**6); '
    code = PROGRAM.format(body='position.now("start-up"); time.sleep(600)', limit='0, {"start-up": 0.5}')
    done = subprocess.run([sys.executable, '-c', full + code], capture_output=True, text=True, timeout=HANG_LIMIT_S)
    assert '(comm.start_limit_s)' in done.stderr and '; /dev/shm is full (0 bytes free of 64 MB)\n' in done.stderr


def test_a_rank_that_aborts_for_want_of_address_space_says_which_limit():
    body = '''import resource
    resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
    held = __import__('mmap').mmap(-1, 10 << 27)
    def num_looks():  # of the watcher, which waits between two
        return int(next(s for s in open(f'/proc/{os.getppid()}/status') if s.startswith('voluntary')).split()[1])
    before = num_looks()
    while num_looks() < before + 3:
        time.sleep(0.1)
    os.abort()'''
    code = PROGRAM.format(body=body, limit=0).replace('sys.exit(', 'import resource\nresource.setrlimit('
                                                      'resource.RLIMIT_AS, (3 << 29, 3 << 29))\nsys.exit(')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=HANG_LIMIT_S)
    assert done.returncode == 1 and 'killed by signal 6 (SIGABRT): out of memory: its address space is' in done.stderr
    assert 'limited to 1.6 GB (ulimit -v), of which it used 1.' in done.stderr


def test_exit_code_137_is_a_kill():
    process = start('return 137')
    assert 'killed by signal 9 (SIGKILL)' in process.communicate()[1] and process.returncode == 1


@pytest.mark.parametrize('has_memfd', [True, False])
def test_stacks_are_written_and_read_with_any_python(monkeypatch, tmp_path, has_memfd):
    if not has_memfd:
        monkeypatch.delattr(os, 'memfd_create', raising=False)
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))

    fd = open_stacks()

    os.write(fd, b'a stack')
    assert os.pread(fd, 99, 0) == b'a stack' and not os.get_inheritable(fd) and not list(tmp_path.iterdir())
    os.close(fd)
