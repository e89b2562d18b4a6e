"""One start of the ranks as a process: its signals, its end, and what it must not leave behind.

The launcher reads signals itself, one after another; the engine has a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone, which passes on a word to stop that gives the ranks time for their checkpoint.
"""
from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED
from mlperf_rn50.train.watchdog.signals import STOP_SIGNALS, StopRequests, catch

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
# After the word to stop, the ranks have so long for their checkpoint; after SIGTERM, the engine for its end.
STOP_LIMIT_S = 600.0
TERM_LIMIT_S = 10.0


class Stage(Enum):
    """How an engine is being brought to its end."""

    RUNNING = 'running'
    STOPPING = 'asked to stop'
    TERMINATING = 'told to end'
    KILLING = 'killed'


class EngineEvent(Enum):
    """What happens while an engine runs."""

    STOP = 'a word to stop'
    AT_ONCE = 'Ctrl-C once more'
    LOST = 'a host is cut off'
    LATE = 'the time of the stage is over'


def react(stage: Stage, event: EngineEvent) -> Stage:
    """The stage after an event; it never goes back, and a stage that lasts too long is followed by the next."""
    order = list(Stage)
    if event is EngineEvent.STOP:
        wanted = Stage.STOPPING
    elif event is EngineEvent.LATE:
        wanted = Stage.KILLING if stage in (Stage.TERMINATING, Stage.KILLING) else Stage.TERMINATING
    else:
        wanted = Stage.TERMINATING
    return max(stage, wanted, key=order.index)


@dataclass
class Signals:
    """The signals of the launcher: is_asked to stop with a checkpoint, is_at_once after Ctrl-C once more."""

    is_asked: bool = False
    is_at_once: bool = False

    def __post_init__(self) -> None:
        self._reader, writer = os.pipe()
        self._writer = open(writer, 'wb', buffering=0)  # closed with this object
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        # Python writes the number of each signal into the pipe. sigtimedwait would be shorter, but interrupted after
        # its time is over, as by SIGCONT, it returns a signal that was never sent.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        catch(lambda *_: None, _SIGNALS)
        self._asked = StopRequests()

    def next(self, timeout_s: float) -> EngineEvent | None:
        """Wait up to timeout_s for a signal or the end of a child; return what it means, if anything."""
        if not select.select([self._reader], [], [], max(0.0, timeout_s))[0]:
            return None
        number = os.read(self._reader, 1)[0]
        if number == signal.SIGUSR2:
            return EngineEvent.LOST
        if number not in STOP_SIGNALS:
            return None
        self.is_asked = True
        self.is_at_once |= self._asked.is_forced(number, time.monotonic())
        return EngineEvent.AT_ONCE if self.is_at_once else EngineEvent.STOP

    def forget_lost(self) -> None:
        """Drop the loss of a host of a job that is over; other signals stay in order."""
        with suppress(BlockingIOError):
            waiting = os.read(self._reader, select.PIPE_BUF)
            self._writer.write(waiting.replace(bytes([signal.SIGUSR2]), b''))

    def pause(self, seconds: float) -> None:
        """Waits so long, or until the launcher is asked to stop."""
        end = time.monotonic() + seconds
        while not self.is_asked and time.monotonic() < end:
            self.next(end - time.monotonic())


def as_child() -> None:
    """In the new process: signals as a program expects them, and an end with the launcher's."""
    signal.set_wakeup_fd(-1)  # the pipe is the launcher's
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_engine(command: Sequence[str], env: Mapping[str, str], signals: Signals, job: str, limit_s: float = 0.0,
               is_overdue: Callable[[], bool] = lambda: True, end_signal: signal.Signals = signal.SIGTERM,
               messengers: Sequence[subprocess.Popen] = ()) -> int:
    """Runs an engine to its end; returns its exit code, that of a shell for one that a signal ended.

    Where a host was cut off that is EXIT_FAILED, whatever the other ranks made of their end.

    Args:
        job: what every process of the job carries in its environment as MLPERF_RN50_JOB.
        limit_s: 0 for no limit.
        is_overdue: called once limit_s is over; if it returns False, there is no limit any more.
        messengers: hand SIGUSR1 on to the ranks, which then stop with a checkpoint; the engine if there are none.
    """
    process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True,
                               preexec_fn=as_child)
    stage, since, is_lost = Stage.RUNNING, time.monotonic(), False
    limits = {Stage.RUNNING: limit_s or float('inf'), Stage.STOPPING: STOP_LIMIT_S, Stage.TERMINATING: TERM_LIMIT_S,
              Stage.KILLING: 1.0}
    while process.poll() is None:
        event = signals.next(min(1.0, since + limits[stage] - time.monotonic()))
        if event is None and time.monotonic() - since >= limits[stage]:
            if stage is Stage.RUNNING and not is_overdue():
                limits[stage] = float('inf')
            else:
                event = EngineEvent.LATE
        if event is None:
            continue
        is_lost |= event is EngineEvent.LOST
        after = react(stage, event)
        if after is stage and event is not EngineEvent.LATE:
            continue  # said already
        stage, since = after, time.monotonic()
        if stage is Stage.STOPPING:
            for messenger in messengers or [process]:
                messenger.send_signal(signal.SIGUSR1)
        elif stage is Stage.TERMINATING:
            process.send_signal(end_signal)
        elif stage is Stage.KILLING:
            kill_job(job, process.pid)
    if signals.is_at_once or stage is Stage.KILLING:
        kill_job(job, process.pid)
    if is_lost:
        return EXIT_FAILED
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def kill_job(job: str, group: int) -> None:
    """Ends what is left of a job on this machine."""
    for pid in (-group, *processes_of(job)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes_of(job: str) -> list[int]:
    """The processes of this machine that carry a job in their environment."""
    wanted, found = f'MLPERF_RN50_JOB={job}'.encode(), []
    for path in Path('/proc').glob('[0-9]*/environ'):
        try:
            if wanted in path.read_bytes().split(b'\0'):
                found.append(int(path.parent.name))
        except OSError:
            continue  # gone, or somebody else's
    return found
