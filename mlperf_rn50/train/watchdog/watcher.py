"""Watcher process of a rank, which reports and ends a rank that dies or hangs.

The launcher starts the watcher, which forks the rank before heavy imports, reads its heartbeat from
shared memory and reports the end of the rank in one line. If the watcher is killed, the rank
reports it.
"""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED, RankLost, UserError
from mlperf_rn50.system import cgroup, out_of_memory
from mlperf_rn50.system.launcher_env import (
    launched_local,
    launched_rank,
    launched_size,
    print_stderr,
    rank_name,
)
from mlperf_rn50.system.signals import (
    STOP_SIGNALS,
    StopRequests,
    catch,
    end_with_parent,
    handle_in_thread,
)
from mlperf_rn50.train.watchdog import stall_report
from mlperf_rn50.train.watchdog.heartbeat import PHASES, WAITING, Heartbeat, RankState

_GRACE_S = 15.0  # time for a checkpoint after the launcher has ended
# time for other stalled ranks to write their reports; their last beat may be a step later
REPORTS_S = 10.0
_RECORD_LIMIT_S = 15.0
_READ_LIMIT_S = 5.0
_POLL_S = 0.5
# Least time without a poll after which this process was suspended, as by scontrol or docker pause.
_LEAST_SUSPENSION_S = 5.0
# Number of stored samples of the count of out-of-memory kills. The oldest must precede the kill
# that ended the rank.
_NUM_KILL_SAMPLES = 40
_UNREADABLE = (
    'a file mapped into memory, such as <split>.index.npy of the data, was truncated or cannot be '
    'read'
)


@dataclass(frozen=True)
class Health:
    """State of a rank as seen by its watcher; times are in seconds on the monotonic clock.

    beat_at: last sign of life. limit_s: time allowed without one, 0 for no limit. orphaned_at: end
    of the launcher. stacks: path of the stacks recorded in this stall, '' if there are none, None
    before they are recorded. is_learned: whether limit_s is below the configured one.
    """

    rank: int
    phase: str
    limit_s: float
    beat_at: float
    num_beats: int = 0
    orphaned_at: float | None = None
    is_stopped: bool = False
    stacks: str | None = None
    is_learned: bool = False


class Action(Enum):
    WAIT = auto()
    RECORD = auto()
    END = auto()
    END_AND_EXPLAIN = auto()


def assess(health: Health, now: float) -> tuple[Action, str]:
    """Return the next action for a rank, and the reason to end it. Pure."""
    if health.orphaned_at is not None and now - health.orphaned_at > _GRACE_S:
        return Action.END, 'the launcher has ended'
    silent_s = now - health.beat_at
    if not health.limit_s or silent_s < health.limit_s:
        return Action.WAIT, ''
    if health.stacks is None:
        return Action.RECORD, ''
    if health.is_stopped:
        return Action.END, f'stopped (SIGSTOP) for {silent_s:.0f} s'
    # Wait for the reports of other stalled ranks; the wait grows with the rank, so that the lowest
    # rank reports first.
    if silent_s < health.limit_s + REPORTS_S + min(health.rank, 10):
        return Action.WAIT, ''
    limit = f'comm.{PHASES[health.phase]}'
    if health.is_learned:
        limit = f'limit of {health.limit_s:.0f} s, learned from this run, at most {limit}'
    return Action.END_AND_EXPLAIN, f'no progress for {silent_s:.0f} s ({limit})'


@dataclass
class Watcher:
    """Watcher of one rank; see run_watched.

    stacks: pipe from which to read the stacks of the rank. parent: process of the engine, because
    getppid() may have changed since.
    """

    pid: int
    heartbeat: Heartbeat
    limits_s: Mapping[str, float]
    folder: Path | None
    can_stop: bool
    stacks: int
    parent: int

    def __post_init__(self) -> None:
        self._start_s = time.time()
        self._refreshed_at = self._running_at = time.monotonic()
        phase = self.heartbeat.phase
        self.health = Health(launched_rank(), phase, self.limits_s[phase], self._refreshed_at)
        self._stop_requests = StopRequests()
        self._is_ended = self._has_lost_engine = False
        self._cgroup = cgroup.memory_cgroup()
        self._memory = out_of_memory.take_sample(self.pid, self._cgroup)
        self._kills = deque([self._memory.num_kills], _NUM_KILL_SAMPLES)

    def wait(self) -> int:
        """Watch the rank until it ends; return the exit code for the launcher."""
        catch(self._on_signal)
        while True:
            signal.sigtimedwait([signal.SIGCHLD], _POLL_S)
            self._check_engine()  # first, because Open MPI ends a rank whose daemon has ended
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return self.exit_code(status)
            self.refresh()
            action, reason = assess(self.health, time.monotonic())
            if action is Action.RECORD:
                self.health = replace(self.health, stacks=self._record())
                self._refreshed_at = time.monotonic()  # recording took seconds
            elif action is not Action.WAIT:
                late_rank = None
                if action is Action.END_AND_EXPLAIN:
                    reason += self._describe_stall()
                    late_rank = self._late_rank()
                self._end(reason, late_rank)
                return EXIT_FAILED

    def refresh(self) -> None:
        now, heartbeat, health = time.monotonic(), self.heartbeat, self.health
        if health.is_stopped:  # SIGCHLD wakes this process when the rank is stopped or continues
            heartbeat.add_stopped_s(now - self._refreshed_at)
        suspended_s = now - self._refreshed_at - _POLL_S
        if suspended_s > _LEAST_SUSPENSION_S:  # the rank, too, had no time to show a sign of life
            health = replace(health, beat_at=health.beat_at + suspended_s, stacks=None)
            self._running_at += suspended_s
        self._refreshed_at = now
        self._sample_memory()
        if heartbeat.num_beats != health.num_beats:
            health = replace(health, num_beats=heartbeat.num_beats, beat_at=now, stacks=None)
        fixed_s = self.limits_s[heartbeat.phase]
        limit_s = heartbeat.limit_s(fixed_s)
        is_stopped = stall_report.is_stopped(self.pid)
        if not is_stopped:
            self._running_at = now
        if is_stopped and heartbeat.has_started and (training_s := self.limits_s['training']):
            # Other ranks may wait for it in a step already; this rank knows the cause.
            stopped_s = max(0.0, self._running_at - health.beat_at) + training_s
            limit_s = min(limit_s or stopped_s, stopped_s)
        self.health = replace(
            health,
            phase=heartbeat.phase,
            limit_s=limit_s,
            is_learned=limit_s < fixed_s,
            is_stopped=is_stopped,
        )

    def _check_engine(self) -> None:
        if os.getppid() == self.parent or self.health.orphaned_at is not None:
            return
        # After a stop request, the launcher has ended the ranks.
        if self._has_lost_engine or not self._stop_requests.is_requested:
            self._report(
                'the engine (mpirun, horovodrun or srun) on this host has ended', is_outside=True
            )
        self.health = replace(self.health, orphaned_at=time.monotonic())
        self.heartbeat.request_stop()  # the rank takes a checkpoint if the other ranks are alive

    def _sample_memory(self) -> None:
        sample = out_of_memory.take_sample(self.pid, self._cgroup, self._memory)
        self._kills.append(sample.num_kills)
        self._memory = replace(sample, num_kills=self._kills[0])

    def _on_signal(self, number: int, _: object) -> None:
        # If the engine dies, the launcher's guard stops the ranks, often before the watcher looks
        # at the engine again.
        if not self._stop_requests.is_requested and os.getppid() != self.parent:
            self._has_lost_engine = True
        self.heartbeat.request_stop()
        self._stop_requests.add(number, time.monotonic())
        if self._stop_requests.is_forced or not self.can_stop:
            self._is_ended = True
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def exit_code(self, status: int) -> int:
        if self._is_ended:
            return EXIT_AT_ONCE
        code = os.waitstatus_to_exitcode(status)
        # a shell between watcher and rank returns 128 + 9
        number = 9 if code == 128 + signal.SIGKILL else -code
        if number <= 0:
            return code
        # A stop signal comes from a launcher that ends its ranks and reports the reason.
        if self.health.orphaned_at is None and number not in STOP_SIGNALS:
            causes = self._causes(number)
            # real-time signals have no name
            name = next((s.name for s in signal.Signals if s == number), f'signal {number}')
            reason = ': '.join([f'killed by signal {number} ({name})', *causes])
            self._report(reason, is_outside=number == signal.SIGKILL and not causes)
        return EXIT_FAILED

    def _causes(self, number: int) -> list[str]:
        """Return the known causes of the death of the rank by a signal."""
        after = out_of_memory.take_sample(self.pid, self._cgroup, self._memory)
        memory = out_of_memory.explain_death(number, self._memory, after, launched_local()[1])
        causes = [memory] if memory else []
        if number == signal.SIGBUS:
            full = stall_report.run_limited(_READ_LIMIT_S, stall_report.full_folders)
            causes.append(full if full else _UNREADABLE)
        return causes

    def _record(self) -> str:
        if self.folder is None or self.health.is_stopped:
            return ''
        state, steps = self.heartbeat.state(), self.heartbeat.last_steps()
        work = partial(stall_report.record, self.folder, state, self.pid, self.stacks, steps)
        return stall_report.run_limited(_RECORD_LIMIT_S, work)

    def _describe_stall(self) -> str:
        """Describe the cause of a stall, full folders if the rank is in start-up, and the path of
        the stacks."""
        stacks = self.health.stacks
        text = ', waiting for another rank or for its data'
        if stacks and (found := stall_report.run_limited(_READ_LIMIT_S, self._explain)):
            text = f': {found}'
        if not self.heartbeat.has_started:
            full = stall_report.run_limited(_READ_LIMIT_S, stall_report.full_folders)
            text += f'; {full}' if full else ''
        return f'{text}; stacks: {stacks}' if stacks else text

    def _others(self) -> list[RankState]:
        assert self.folder
        states = stall_report.read_states(self.folder, self._start_s)
        return [s for s in states if s.rank != self.health.rank]

    def _explain(self) -> str:
        return stall_report.explain(self.heartbeat.state(), self._others(), launched_size() or 1)

    def _late_rank(self) -> int | None:
        """Return the rank for which this one waits, -1 if it is not known which; None if it waits
        for none."""
        own = self.heartbeat.state()
        if own.doing != WAITING:
            return None
        if not self.health.stacks:
            return -1
        find = lambda: stall_report.find_late([own, *self._others()])  # noqa: E731
        return int(stall_report.run_limited(_READ_LIMIT_S, find) or -1)

    def _end(self, reason: str, late_rank: int | None) -> None:
        where = str(self.heartbeat)
        self._kill()
        self._report(reason, where, self.health.is_stopped, late_rank)
        end = time.monotonic() + _GRACE_S  # a rank that waits for storage may never end
        while not os.waitpid(self.pid, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.05)

    def _report(
        self,
        reason: str,
        where: str | None = None,
        is_outside: bool = False,
        late_rank: int | None = None,
    ) -> None:
        if self.health.orphaned_at is None:
            cause = reason.partition(';')[0]
            silent_s = time.monotonic() - self.health.beat_at
            note = partial(stall_report.note_failed, self.folder, cause, is_outside, silent_s)
            stall_report.run_limited(_READ_LIMIT_S, partial(note, late_rank))
        with suppress(OSError):  # the terminal may be gone
            print_stderr(f'mlperf-rn50: {rank_name()}, {where or self.heartbeat}: {reason}')


def run_rank(program: Callable[[Heartbeat], int], heartbeat: Heartbeat, can_stop: bool) -> int:
    """Run a rank, which reads stop requests from its heartbeat; return its exit code.

    An error after its start states rank, host, step and phase. Without can_stop, a stop request
    ends the rank at once.
    """
    # before the imports, which take seconds
    with handle_in_thread(heartbeat.request_stop if can_stop else None):
        try:
            with _convert_lost_rank():
                return program(heartbeat)
        except UserError as e:
            heartbeat.note_place(e)
            raise


@contextmanager
def _convert_lost_rank() -> Iterator[None]:
    """Turn an error after the loss of another rank, which shuts Horovod down, into RankLost."""
    try:
        yield
    except Exception as e:
        if 'Horovod has been shut down' not in str(e):
            raise
        raise RankLost('the connection to another rank was lost') from e


def run_watched(
    program: Callable[[Heartbeat], int],
    limits_s: Mapping[str, float],
    folder: Path | None,
    can_stop: bool,
) -> int:
    """Run a rank in a forked process and watch it; return its exit code in both processes.

    The watcher turns STOP_SIGNALS into a stop request of the heartbeat, which the rank reads. Those
    that reach the rank itself wait until run_rank handles them in the same way; without can_stop,
    they stay blocked. A forced stop request (see StopRequests) ends the rank at once.

    Args:
        limits_s: time without a sign of life before a rank is ended, by phase; 0 disables the
            limit.
        can_stop: True if the rank handles a stop request; otherwise the request ends the rank at
            once.
    """
    heartbeat, parent = Heartbeat(), os.getppid()
    stacks_reader, stacks_writer = os.pipe()
    reader, writer = os.pipe()
    # Those that arrive now wait for the handlers of watcher and rank, and SIGCHLD for the watcher's
    # loop.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGCHLD])
    pid = os.fork()
    if pid:  # this process is the watcher
        os.close(reader)  # the writer stays open until this process ends
        os.close(stacks_writer)
        watcher = Watcher(
            pid,
            heartbeat,
            limits_s,
            folder=folder,
            can_stop=can_stop,
            stacks=stacks_reader,
            parent=parent,
        )
        return watcher.wait()

    # this process is the rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    os.close(writer)
    os.close(stacks_reader)
    _prepare_rank(heartbeat, reader, stacks_writer, folder)
    try:
        return run_rank(program, heartbeat, can_stop)
    except Exception as e:
        memory = out_of_memory.explain_error(e).partition(';')[0]
        text = memory or str(e).strip() or type(e).__name__
        # The loss of another rank is not a failure of this one. Without can_stop, the program
        # reports findings.
        if can_stop and not isinstance(e, RankLost):
            stall_report.note_failed(folder, text.splitlines()[-1].strip(), is_outside=False)
        raise


def _prepare_rank(heartbeat: Heartbeat, reader: int, stacks: int, folder: Path | None) -> None:
    """Make this rank end together with its watcher, and write its stacks on STACK_SIGNAL."""
    libc = ctypes.CDLL(None)
    threading.Thread(
        target=_end_with_watcher, args=(heartbeat, reader, folder), name='watched', daemon=True
    ).start()
    # The thread cannot run while native code holds the GIL. The kernel therefore also sends SIGUSR2
    # after the end of the watcher. Its C handler is alarm(), called with the signal number 12, so
    # SIGALRM ends the rank after 12 s.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    libc.signal(signal.SIGUSR2, ctypes.cast(libc.alarm, ctypes.c_void_p))
    end_with_parent(signal.SIGUSR2)
    faulthandler.register(stall_report.STACK_SIGNAL, file=stacks, all_threads=True)


def _end_with_watcher(heartbeat: Heartbeat, reader: int, folder: Path | None) -> None:
    """Wait in a thread for the end of the watcher, report it, and end the rank."""
    os.read(reader, 1)
    # After a stop request, or a signal that is blocked in this rank, the launcher has reported the
    # reason.
    if not heartbeat.is_stop_requested and not signal.sigpending() & set(STOP_SIGNALS):
        text = 'the watcher was killed (SIGKILL, or out of memory); the rank ends with it'
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f'mlperf-rn50: {rank_name()}, {heartbeat}: {text}\n'.encode())
        stall_report.note_failed(folder, 'the watcher was killed', is_outside=True)
    os.kill(os.getpid(), signal.SIGKILL)
