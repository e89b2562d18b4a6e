"""Process of one start of the ranks: signals, exit code and cleanup.

The engine runs in a separate session, so that a terminal's Ctrl-C reaches only the launcher. The launcher reads its
signals one after another, and forwards a stop request that gives the ranks time for a checkpoint.
"""
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
STOP_LIMIT_S = 600.0  # for a checkpoint after a stop request
TERM_LIMIT_S = 10.0  # for the end of the engine after SIGTERM


class Stage(Enum):
    """Stage of stopping an engine."""

    RUNNING = 'running'
    STOPPING = 'stop requested'
    TERMINATING = 'terminating'
    KILLING = 'killed'


class EngineEvent(Enum):
    """Event while an engine runs."""

    STOP = 'stop request'
    AT_ONCE = 'second Ctrl-C'
    LOST = 'host lost'
    LATE = 'stage timed out'


def react(stage: Stage, event: EngineEvent) -> Stage:
    """Return the stage after an event; stages only advance, and a timeout leads to the next one."""
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
    """Signals of the launcher: is_asked after a stop request, is_at_once after a second Ctrl-C."""

    is_asked: bool = False
    is_at_once: bool = False

    def __post_init__(self) -> None:
        self._reader, writer = os.pipe()
        self._writer = open(writer, 'wb', buffering=0)  # closed with this object
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        # Python writes the number of each signal into the pipe. sigtimedwait would be shorter, but when interrupted
        # after its timeout, as by SIGCONT, it returns a signal that was never sent.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        catch(lambda *_: None, _SIGNALS)
        self._asked = StopRequests()

    def next(self, timeout_s: float) -> EngineEvent | None:
        """Wait up to timeout_s for a signal or the end of a child; return the event, if any."""
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
        """Discard pending notices of lost hosts from a finished job; other signals stay in order."""
        with suppress(BlockingIOError):
            waiting = os.read(self._reader, select.PIPE_BUF)
            self._writer.write(waiting.replace(bytes([signal.SIGUSR2]), b''))

    def pause(self, seconds: float) -> None:
        """Wait for a time or until a stop request."""
        end = time.monotonic() + seconds
        while not self.is_asked and time.monotonic() < end:
            self.next(end - time.monotonic())


def as_child() -> None:
    """Reset the signals of a new process, and let it end with the launcher; for preexec_fn."""
    signal.set_wakeup_fd(-1)  # the pipe belongs to the launcher
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_engine(command: Sequence[str], env: Mapping[str, str], signals: Signals, job: str, limit_s: float = 0.0,
               is_overdue: Callable[[], bool] = lambda: True, end_signal: signal.Signals = signal.SIGTERM,
               messengers: Sequence[subprocess.Popen] = ()) -> int:
    """Run an engine to its end; return its exit code, 128 + number for a signal, EXIT_FAILED if a host was lost.

    Args:
        job: MLPERF_RN50_JOB in the environment of every process of the job.
        limit_s: 0 for no limit.
        is_overdue: called after limit_s; if it returns False, the limit is lifted.
        messengers: processes that forward SIGUSR1 to the ranks as a stop request; the engine if empty.
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
            continue  # signalled already
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
    """Kill the remaining processes of a job on this machine."""
    for pid in (-group, *processes_of(job)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes_of(job: str) -> list[int]:
    """Return the processes of a job on this machine, found by their environment."""
    wanted, found = f'MLPERF_RN50_JOB={job}'.encode(), []
    for path in Path('/proc').glob('[0-9]*/environ'):
        try:
            if wanted in path.read_bytes().split(b'\0'):
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended, or owned by another user
    return found
