"""Stop signals: the first stop request ends a run gracefully, the second one immediately."""

import errno
import os
import queue
import re
import shutil
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from helpers import (
    CLI,
    HANG_LIMIT_S,
    ROOT,
    json_table,
    own_signals,
    run,
    shipped_logs,
    skip_for,
    start_program,
    table,
    wait_for,
)

from mlperf_rn50.launch.helpers import LAUNCHER_SIGNALS
from mlperf_rn50.launch.launcher import stage_of
from mlperf_rn50.system import signals as stop_signals

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
USR2 = signal.SIGUSR2
# STOPS makes it exit with 75 on a stop request, as a run does after its checkpoint; STUCK keeps it
# from stopping.
PROGRAM = """
import ctypes, os, signal, sys, time
from mlperf_rn50.cli import main
from mlperf_rn50.cli.ranks import in_rank
from mlperf_rn50.config import Config
def rank(heartbeat):
    print('ready', flush=True)
    {body}
    return 7
sys.modules['mlperf_rn50.cli.report'] = sys  # a made-up command
sys.run = lambda _: in_rank(rank, Config(), can_stop={can_stop})
sys.exit(main(['report']))
"""
STOPS = (
    'import itertools; next(time.sleep(0.1) for _ in itertools.count() if '
    'heartbeat.is_stop_requested); return 75'
)
# A native wait for a lock that is already taken, so that no Python handler runs.
STUCK = (
    'lock = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(lock) for '
    '_ in range(2)]'
)
WAIT_S = 1.1  # minimum between signals that count separately


def start(body, can_stop=True, command=(), ignored=(), **variables):
    def set_signals():  # the tests may run with some signals ignored, as under nohup
        for number in (INT, TERM, HUP, USR1):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    code = PROGRAM.format(body=body, can_stop=can_stop)
    words = [*command, sys.executable, '-c', code]
    return ready(start_program(words, preexec_fn=set_signals, env={**os.environ, **variables}))


def ready(process):
    """Wait until a process has printed ready; return it."""
    assert process.stdout.readline() == 'ready\n', process.communicate()
    return process


def end(process):
    err = process.communicate(timeout=HANG_LIMIT_S)[1]
    assert 'Traceback' not in err
    return process.returncode, err


def insist(process):
    """Send Ctrl-C until the process ends; a second one counts from one second after the first was
    handled."""
    while process.poll() is None:
        process.send_signal(INT)
        with suppress(TimeoutExpired):
            process.wait(WAIT_S)


@pytest.fixture
def send_at(monkeypatch):
    """Function that sends a signal to this process at a time of a fixed clock."""

    def send_at(number, now_s):
        clock = SimpleNamespace(monotonic=lambda: now_s, sleep=lambda _: None)
        monkeypatch.setattr(stop_signals, 'time', clock)
        os.kill(os.getpid(), number)

    with own_signals():
        yield send_at


@pytest.mark.parametrize(
    'can_stop, sent',
    json_table("""
# The first request stops a run gracefully, or ends a command that has nothing to finish; the second
# ends a run.
true  | [["INT", 0, "stop"]]
true  | [["TERM", 0, "stop"]]
true  | [["HUP", 0, "stop"]]
true  | [["USR1", 0, "stop"]]
false | [["INT", 0, "end"]]
false | [["TERM", 0, "end"]]
false | [["HUP", 0, "end"]]
true  | [["INT", 0, "stop"], ["INT", 0.5, "stop"], ["INT", 1.5, "end"]]
true  | [["USR1", 0, "stop"], ["INT", 2, "end"]]
# only Ctrl-C ends a run that writes its checkpoint
true  | [["USR1", 0, "stop"], ["TERM", 9, "stop"], ["HUP", 60, "stop"]]
"""),
)
def test_first_signal_stops_and_second_ends(monkeypatch, send_at, can_stop, sent):
    calls = queue.Queue()
    monkeypatch.setattr(stop_signals, 'end_at_once', lambda: calls.put('end'))
    for number in stop_signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(INT, signal.SIG_IGN)  # as a shell in the background does
    stop_signals.catch(lambda *_: None, stop_signals.END_SIGNALS)
    with stop_signals.handle_in_thread((lambda: calls.put('stop')) if can_stop else None):
        for name, now_s, effect in sent:
            send_at(signal.Signals[f'SIG{name}'], now_s)
            assert calls.get(timeout=HANG_LIMIT_S) == effect


# before: handler of a hangup
@pytest.mark.parametrize(
    'before, sent',
    table("""
SIG_DFL | USR2 0 TERMINATING, TERM 0 STOPPING, INT 0.5 STOPPING, INT 1.1 TERMINATING, \
TERM 1.2 TERMINATING
SIG_DFL | HUP 0 STOPPING, USR1 9 STOPPING, CHLD 9 none
SIG_IGN | HUP 0 none, INT 9 STOPPING
"""),
    ids=['once more', 'hangup', 'nohup'],
)
def test_stages_of_signals_even_of_those_ignored_before(send_at, before, sent):
    """Send signals to this process, a launcher, at given times."""
    signal.signal(INT, signal.SIG_IGN)
    signal.signal(USR1, signal.SIG_IGN)
    signal.signal(HUP, getattr(signal, before))
    signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS)
    for name, now_s, stage in map(str.split, sent.split(', ')):
        send_at(signal.Signals[f'SIG{name}'], float(now_s))
        found = stage_of(signals.next(0), signals.is_forced)
        assert (found.name if found else 'none') == stage


def test_request_counts_although_the_terminal_is_gone(send_at, monkeypatch):
    monkeypatch.setattr(stop_signals, 'print_stderr', Mock(side_effect=OSError(errno.EIO, 'gone')))
    signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS, 'stopping')
    send_at(HUP, 0)
    assert signals.is_requested


def test_queue_for_a_part_of_the_program_leaves_the_handlers(send_at):
    signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS)
    with closing(stop_signals.SignalQueue(())) as part:
        send_at(USR1, 0)
        assert part.next(0) == USR1 and not part.is_requested
    send_at(TERM, 0)
    assert signals.is_requested and signals.next(0) == TERM


def test_signals_of_one_number_are_discarded(send_at):
    signals = stop_signals.SignalQueue(LAUNCHER_SIGNALS)
    signals.discard(USR2)
    for number in (USR2, TERM):
        send_at(number, 0)
    signals.discard(USR2)
    assert [signals.next(0), signals.next(0)] == [TERM, None]


def test_first_request_stops_second_ends_and_nohup_ignores_a_hangup():
    process = start(STOPS)
    process.send_signal(TERM)
    assert end(process) == (75, f'{stop_signals.STOPPING}\n')
    process = start(STUCK, ignored=[INT, HUP])
    process.send_signal(HUP)
    time.sleep(0.2)
    assert process.poll() is None
    insist(process)
    assert end(process) == (130, f'{stop_signals.STOPPING}\n')


def test_watched_rank_ends_with_its_watcher():
    process = start(STUCK, HOROVOD_RANK='0', HOROVOD_SIZE='1')
    [rank] = psutil.Process(process.pid).children()
    insist(process)
    assert end(process) == (130, '') and not rank.is_running()
    process = start(STUCK, can_stop=False, HOROVOD_RANK='0', HOROVOD_SIZE='1')
    process.send_signal(USR1)  # ends immediately, because there is nothing to finish
    assert end(process) == (130, '')


def test_signal_to_a_watched_rank_itself_is_a_stop_request():
    process = start(STOPS, HOROVOD_RANK='0', HOROVOD_SIZE='1')
    [rank] = psutil.Process(process.pid).children()
    rank.send_signal(TERM)
    assert end(process) == (75, '')


def test_stop_as_the_first_process_of_a_container():
    can_unshare = shutil.which('unshare') and not run(['unshare', '-pf', 'true']).returncode
    skip_for('' if can_unshare else 'a process namespace takes root')
    outer = start(STOPS, command=['unshare', '-pf', '--kill-child'])
    [first] = psutil.Process(outer.pid).children()
    os.kill(first.pid, TERM)
    assert end(outer)[0] == 75


# A made-up command that swallows exceptions as packages do in their imports, and as the interpreter
# does in finalisers.
SWALLOWING = """
import sys, time
sys.path.insert(0, {folder!r})
from mlperf_rn50.cli import main
from mlperf_rn50.system.signals import is_interrupted
class Array:
    def __del__(self):
        show()
def show():
    print('ready', flush=True)
    while not is_interrupted():
        pass
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
def run(_):
    {body}
    time.sleep({hang_s})
    return 7
sys.modules['mlperf_rn50.cli.report'] = sys.modules['shown'] = sys
sys.run, sys.show = run, show
sys.exit(main(['report']))
"""


@pytest.mark.parametrize(
    'body',
    [
        'import swallows',
        'Array()',
        'import weakref\n    array = type("A", (), {})()\n    kept = weakref.ref(array, lambda _: '
        'show())\n    del array',
        'try:\n        show()\n    finally:\n        undefined',
    ],
)
@pytest.mark.parametrize('number', [INT, TERM])
def test_ctrl_c_in_an_import_or_finaliser_is_not_lost(tmp_path, body, number):
    (tmp_path / 'swallows.py').write_text(
        'from shown import show\ntry:\n    show()\nexcept BaseException:\n    pass\n'
    )
    code = SWALLOWING.format(folder=str(tmp_path), body=body, hang_s=HANG_LIMIT_S)
    process = ready(start_program([sys.executable, '-c', code]))
    process.send_signal(number)
    assert end(process) == (130, '')


def test_ctrl_c_during_the_first_imports_is_silent(tmp_path):
    """At the import of argparse, which the command line needs first; argparse.py sends the
    signal."""
    (tmp_path / 'argparse.py').write_text('import os, signal; os.kill(os.getpid(), signal.SIGINT)')
    code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); import mlperf_rn50.cli'
    done = run([sys.executable, '-I', '-c', code])
    assert (done.returncode, done.stderr) == (-INT, '')
    assert signal.getsignal(INT) is not signal.SIG_DFL  # only during these imports


# States of a process in which it is interrupted: it handles signals, or has loaded a library.
STATES = ['', 'numpy', 'ft2font', 'libmxnet']
COMMANDS = """report {logs}/digits_five --out out
check {logs}/digits_five
predict {logs}/digits_sweep --out out
recipe 8192 --out out.yaml
package {logs}/digits_five --org o --system s --out out
completion bash
prepare digits --out out
train --dry-run --config {config}
bench ops --config {config}
doctor --config {config}
why {logs}/digits_2ranks --out out
watch {logs}/digits_2ranks --once
classify missing x.png
evaluate missing
export missing --format gluon
launch local --config {config} --dry-run
--version
sweep --study x --layouts wrong --config {config}""".splitlines()


def has_reached(process, state):
    """Return whether a process handles signals, and has loaded a library; also True after its
    end."""
    try:
        status, maps = (
            Path(f'/proc/{process.pid}/{name}').read_text() for name in ('status', 'maps')
        )
    except OSError:
        return True
    caught = int(re.search(r'^SigCgt:\t(\w+)', status, re.MULTILINE)[1], 16)
    return process.poll() is not None or bool(caught >> TERM - 1 & 1) and state in maps


@pytest.mark.slow
@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_can_be_interrupted(tmp_path, command):
    """It ends with exit code 130, at most one line and no temporary file; a second call then
    works."""
    config = ROOT / 'launch/configs/digits_cpu.yaml'
    words = [*CLI, *(w.format(logs=shipped_logs(), config=config) for w in command.split())]
    (tmp_path / 'tmp').mkdir()
    keys = {
        'cwd': tmp_path,
        'env': {**os.environ, 'TMPDIR': str(tmp_path / 'tmp')},
        'preexec_fn': lambda: signal.signal(INT, signal.SIG_DFL),
    }
    for state in STATES:
        process = start_program(words, **keys)
        wait_for(
            lambda process=process, state=state: has_reached(process, state),
            lambda: True,
            str,
            pause_s=0.005,
        )
        process.send_signal(INT)
        code, err = end(process)
        left = [p for p in tmp_path.rglob('*.tmp') if p.is_file()]
        left += [p for p in (tmp_path / 'tmp').rglob('*') if p.is_file()]
        assert 'Exception' not in err
        if code not in (130, -INT):  # it had ended before the signal
            break
        assert err.count('\n') <= 1 and not left, (state, err, left)
    done = run(words, **keys)
    assert done.returncode in (0, 1, 2) and 'Traceback' not in done.stderr


@pytest.mark.slow
def test_preparation_is_interrupted_between_two_images(tmp_path):
    from PIL import Image

    for place, count in (('train/a', 2500), ('train/b', 1), ('val/a', 1), ('val/b', 1)):
        folder = tmp_path / 'source' / place
        folder.mkdir(parents=True)
        Image.effect_noise((600, 600), 50).save(folder / '0.png')
        for i in range(1, count):
            os.link(folder / '0.png', folder / f'{i}.png')
    words = 'prepare folder --name x --workers 2 --resize-shorter 500'.split()
    words += ['--source', tmp_path / 'source', '--out', tmp_path / 'out']
    process = start_program([*CLI, *words])
    wait_for(
        lambda: list(tmp_path.glob('out/**/*.rec')),
        lambda: process.poll() is None,
        process.communicate,
    )
    os.killpg(process.pid, INT)  # as a terminal does
    assert end(process)[0] == 130
    assert not list(tmp_path.glob('out/**/train_*.json'))  # no part was finished


def test_out_of_memory_error_is_one_line():
    code = """import resource, sys
import mlperf_rn50.cli as cli
sys.modules['mlperf_rn50.cli.report'] = sys
def run(_):
    resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
    bytearray(8 << 30)
sys.run = run
sys.exit(cli.main(['report']))"""
    done = run([sys.executable, '-c', code])
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    text = 'out of memory: the address space of this process is limited to 1.6 GB (ulimit -v), '
    assert text in done.stderr
