"""Child processes of a launcher. Short helper programs, such as ssh, have a time limit, and a stop
request ends the wait for them."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from mlperf_rn50.system.signals import STOP_SIGNALS, SignalQueue, end_with_parent

HOST_LOST = signal.SIGUSR2  # sent by a guard
LAUNCHER_SIGNALS = (*STOP_SIGNALS, HOST_LOST, signal.SIGCHLD)
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC of linux/memfd.h
_KILL_LIMIT_S = 2.0  # time for a killed process to disappear


def memory_file() -> TextIO:
    """Return a file for the output of a helper that needs no disk."""
    # os.memfd_create is absent from a Python that was built with an older C library
    number = ctypes.CDLL(None).memfd_create(b'output', _CLOSE_ON_EXEC)
    return open(number, 'w+', errors='replace')


def text_of(output: TextIO) -> str:
    """Return the text that processes have written to a file."""
    output.seek(0)
    return output.read()


def as_child() -> None:
    """Reset the signals of a new process, and let it end with the launcher; used as preexec_fn."""
    signal.set_wakeup_fd(-1)  # the pipe belongs to the launcher
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, HOST_LOST, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
    end_with_parent(signal.SIGTERM)


def start_helper(command: Sequence[str], **outputs: Any) -> subprocess.Popen:
    """Start a program in its own session; it ends with the launcher."""
    return subprocess.Popen(command, preexec_fn=as_child, start_new_session=True, **outputs)


def kill_session(process: subprocess.Popen) -> None:
    """Kill a helper and its children, without a wait for their end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def wait_briefly(
    processes: Sequence[subprocess.Popen], signals: SignalQueue, limit_s: float
) -> bool:
    """Wait for processes up to a limit or the next stop request; return whether all ended, and kill
    the others."""
    end = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes) and (left_s := end - time.monotonic()) > 0:
        if signals.next(min(1.0, left_s)) in STOP_SIGNALS:
            break
    late = [p for p in processes if p.returncode is None]
    for process in late:
        kill_session(process)
        with suppress(subprocess.TimeoutExpired):  # it may hang in a file system
            process.wait(_KILL_LIMIT_S)
    return not late
