"""Helpers to run programs, write files and wait."""

import contextlib
import ctypes
import functools
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mlperf_rn50.cli import main
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.train.watchdog.watcher import STOP_SIGNALS

ROOT = Path(__file__).parent.parent
# Only a guard against hangs, because tests check events and their order and not times.
HANG_LIMIT_S = 900
PUBLISHED = ROOT.parent / 'shared/published'  # for tests marked needs_published
HISTORY = ROOT.parent / 'shared/history'  # for tests marked needs_history
# for tests marked needs_mpijob_schema
MPIJOB_SCHEMA = ROOT.parent / 'shared/reference/mpijob-crd.yaml'
_COPY = tempfile.TemporaryDirectory(prefix='shipped-logs-')
CLI = [sys.executable, '-m', 'mlperf_rn50']
# Flags of processors, in /proc/cpuinfo.
AVX2 = 'fpu sse4_1 sse4_2 avx f16c fma avx2 bmi2'
AVX512 = f'{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl'
BF16 = f'{AVX512} avx512_vnni avx512_bf16'
RANGE_UJ = 262_143_328_850  # of the energy counters of write_zone


class Terminal(io.StringIO):
    """Stream that reports to be a terminal."""

    def isatty(self):
        return True


@functools.cache
def shipped_logs() -> Path:
    """Return a copy of the logs under version control, without the runs of a user in logs/."""
    listed = subprocess.run(
        ['git', '-c', 'safe.directory=*', '-C', ROOT, 'ls-files', '-z', 'logs'],
        capture_output=True,
        text=True,
    )
    if listed.returncode:  # not a checkout, such as an unpacked archive
        return ROOT / 'logs'
    for name in filter(None, listed.stdout.split('\0')):
        target = Path(_COPY.name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return Path(_COPY.name, 'logs')


def assert_one_line(done, *texts: str, code: int = 2) -> None:
    """Assert that a program failed with one line that contains some texts."""
    assert done.returncode == code and done.stderr.count('\n') == 1, done.stderr
    assert all(text in done.stderr for text in texts), done.stderr


def untimed(failures):
    """Return failures without their times, which must be of the last hour."""
    assert all(time.time() - 3600 < f.time_s < time.time() + 60 for f in failures)
    return [replace(f, time_s=0.0, silent_s=None) for f in failures]


def run(command, *, timeout=HANG_LIMIT_S, **keys) -> subprocess.CompletedProcess:
    """Run a command to completion and capture its output as text."""
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=timeout, **keys
    )


def start_program(words, **keys) -> subprocess.Popen:
    """Start a program in a new session, with its output as text in pipes."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen([str(w) for w in words], **{**pipes, 'start_new_session': True, **keys})


def git(folder: Path, *words: object) -> str:
    """Run git in a folder without the settings of the user, such as signatures; return its
    output."""
    settings = {'GIT_CONFIG_GLOBAL': os.devnull, 'GIT_CONFIG_SYSTEM': os.devnull}
    done = run(
        ['git', '-C', folder, '-c', 'user.name=x', '-c', 'user.email=x', *words],
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def return_memory() -> None:
    """Return memory freed by MXNet to the system, because glibc would keep gigabytes."""
    if mxnet := sys.modules.get('mxnet'):
        gc.collect()
        mxnet.nd.waitall()
        ctypes.CDLL(None).malloc_trim(0)


def address_of(array) -> int:
    """Return the address of an MXNet array on a CPU."""
    import mxnet as mx  # helpers.py is also for tests without MXNet

    pointer = ctypes.c_void_p()
    mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer))
    return pointer.value


def assert_near(got, expected, rtol=1e-3, share=1e-4) -> None:
    """Assert that arrays are nearly equal, or dicts of arrays with the same names in the same
    order. share: tolerance as a fraction of the largest value."""
    import numpy as np

    if not isinstance(expected, dict):
        got, expected = {'': got}, {'': expected}
    assert list(got) == list(expected)
    for name, value in expected.items():
        atol = share * np.abs(value).max()
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Restore signal handlers and the signal mask at the end of the block."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {
        number: signal.getsignal(number)
        for number in (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def call(*arguments) -> subprocess.CompletedProcess:
    """Run a command of mlperf-rn50 in this process, because starting a process takes seconds.

    Unsuitable for bfloat16, which changes the operators of the whole process.
    """
    words = [str(a) for a in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), own_signals():
        try:
            code = main(words)
        except SystemExit as e:  # --help
            code = e.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def cpuinfo(flags: str) -> str:
    """Return the text of /proc/cpuinfo for two processors, of which only the first is an EPYC."""
    entry = (
        'processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t: 1\nmodel name\t: '
        'EPYC\n'
        f'flags\t: {flags}\n'
    )
    return f'{entry}\n{entry.replace("EPYC", "other")}'


def write_files(folder: Path, files, mode: int = 0o644) -> None:
    """Write files from a dict of names to texts, such as a fake /sys tree."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{text}\n')
        path.chmod(mode)


def write_programs(folder: Path, **programs: str) -> None:
    """Write shell programs, such as stand-ins of ssh."""
    files = {name: f'#!/bin/bash\n{text}' for name, text in programs.items()}
    write_files(folder, files, mode=0o755)


def write_zone(sys_folder: Path, zone: str, name: str, energy_uj: int) -> Path:
    """Write an energy counter to a fake /sys tree; return its file."""
    folder = sys_folder / 'class/powercap' / zone
    write_files(folder, {'name': name, 'energy_uj': energy_uj, 'max_energy_range_uj': RANGE_UJ})
    return folder / 'energy_uj'


def deny(monkeypatch, end: str, *functions: str) -> None:
    """Make functions of os refuse paths that end with a text, as for a user who is not root."""

    def refuse(allowed, path, *rest, **keys):
        if not str(path).endswith(end):
            return allowed(path, *rest, **keys)
        if allowed is access:
            return False
        raise PermissionError(13, 'Permission denied', str(path))

    access = os.access
    for name in functions:
        monkeypatch.setattr(os, name, partial(refuse, getattr(os, name)))


def wait_for(is_reached, is_alive=lambda: True, describe=str, pause_s=0.05):
    """Wait until is_reached() is true, and return its value; fail if is_alive() is false before."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while not (reached := is_reached()):
        assert is_alive() and time.monotonic() < deadline, describe()
        time.sleep(pause_s)
    return reached


def skip_for(reason: str) -> None:
    """Skip a test if there is a reason, or fail it if MLPERF_RN50_NEED_ALL forbids skips."""
    if reason and os.environ.get('MLPERF_RN50_NEED_ALL'):
        pytest.fail(f'this test must run here: {reason}')
    if reason:
        pytest.skip(reason)


def slow(*values, marks=()):
    """Return the values of a parametrized test that only launch/test.sh --all runs."""
    return pytest.param(*values, marks=[pytest.mark.slow, *marks])


def emit(sinks, *events) -> None:
    """Pass events of a run to sinks, then close them."""
    for event in events:
        for sink in sinks:
            sink.handle(event)
    for sink in sinks:
        sink.close()


def under_ranks(num_ranks: int, command) -> list:
    """Wrap a command so that it runs on a number of ranks; with 0 ranks return it unchanged."""
    return [ROOT / 'launch/ranks.sh', num_ranks, *command] if num_ranks else list(command)


def launch_options(*words, script='mpirun'):
    """Return the options of a launcher; a single text may have several words."""
    from mlperf_rn50.launch.engines import ENGINES, parse_arguments

    split = str(words[0]).split() if len(words) == 1 else [str(w) for w in words]
    return parse_arguments(ENGINES[script].make_parser(script), split)


def prepend_path(monkeypatch, folder: Path) -> None:
    """Put a folder with stand-ins of programs first in PATH."""
    monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')


def begin_run(folder: Path, number: int = 0) -> RunFolder:
    """Write the start of the log of a run."""
    run = RunFolder(folder, number)
    run.result.write_text(':::MLLOG {"key": "run_start"}\n')
    return run


def write_metrics(run: RunFolder, *events: dict) -> None:
    """Append records to metrics.jsonl of a run."""
    with open(run.metrics, 'a') as f:
        f.writelines(json.dumps(event) + '\n' for event in events)


def keep_checkpoint(run: RunFolder, step: int) -> None:
    """Create the folder of a checkpoint."""
    (run.checkpoints / f'step_{step:08d}').mkdir(parents=True)


def variables(text: str) -> dict[str, str]:
    """Return environment variables of a text such as 'A=1 B=2'."""
    return dict(word.split('=', 1) for word in text.split())


def argv(template: str, *values: object) -> list[str]:
    """Return the words of a command line, with values, such as paths with spaces, for each {}."""
    left = iter(values)
    return [str(next(left)) if word == '{}' else word for word in template.split()]


def table(text: str) -> list[list[str]]:
    """Return the cells of each line of a table such as 'a | b'."""
    return [[cell.strip() for cell in line.split('|')] for line in text.strip('\n').splitlines()]


def json_table(text: str) -> list[list]:
    """Return the JSON values in the cells of each line of a table such as '1 | "a"  # why'."""
    lines = [line.partition(' #')[0] for line in text.splitlines() if line and line[0] != '#']
    return [[json.loads(cell) for cell in line.split('|')] for line in lines]


def values(text: str) -> dict:
    """Return the keys and JSON values of a text such as data=41 host="h0"."""
    return {name: json.loads(value) for name, value in (w.split('=', 1) for w in text.split())}
