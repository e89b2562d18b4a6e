"""Programs as the tests start them."""
import contextlib
import ctypes
import gc
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlperf_rn50.cli import main
from mlperf_rn50.train.watchdog.watcher import STOP_SIGNALS

ROOT = Path(__file__).parent.parent
# Only guards against hanging: what a test is about is what happens, and in which order.
HANG_LIMIT_S = 900
PUBLISHED = ROOT.parent / 'shared/published'  # real logs, for tests marked needs_published
MPIJOB_SCHEMA = ROOT.parent / 'shared/reference/mpijob-crd.yaml'  # the operator's, for tests marked needs_mpijob_schema
CLI = [sys.executable, '-m', 'mlperf_rn50']


def run(command, *, timeout=HANG_LIMIT_S, **keys) -> subprocess.CompletedProcess:
    """Runs a command to its end; output as text."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **keys)


def return_memory() -> None:
    """Return the memory that MXNet has freed to the system: glibc would keep gigabytes of it."""
    if mxnet := sys.modules.get('mxnet'):
        gc.collect()
        mxnet.nd.waitall()
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Lets a program handle signals as it likes, and goes back to how they were."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def call(*arguments) -> subprocess.CompletedProcess:
    """Runs a command of the program as one process without a launcher, in this one: a start takes seconds.

    Not for bfloat16, which changes the operators of a whole process.
    """
    words = [str(a) for a in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), own_signals():
        try:
            code = main(words)
        except SystemExit as e:  # --help
            code = e.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def write_files(folder: Path, files, mode: int = 0o644) -> None:
    """Writes texts under the names of a dict, such as those of a made-up /sys."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{text}\n')
        path.chmod(mode)


def wait_for(is_reached, is_alive, describe, pause_s=0.05):
    """Waits until a condition holds while something is alive; returns what it is by then."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while not (reached := is_reached()):
        assert is_alive() and time.monotonic() < deadline, describe()
        time.sleep(pause_s)
    return reached


def skip_for(reason: str) -> None:
    """Skips a test for a reason, if there is one; fails it where none may be skipped."""
    if reason and os.environ.get('MLPERF_RN50_NEED_ALL'):
        pytest.fail(f'this test must run here: {reason}')
    if reason:
        pytest.skip(reason)


def under_ranks(num_ranks: int, command) -> list:
    """The command that starts another one with a number of ranks; as it is for 0 ranks."""
    return [ROOT / 'launch/ranks.sh', num_ranks, *command] if num_ranks else list(command)
