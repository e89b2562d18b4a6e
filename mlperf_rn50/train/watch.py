"""A rank and its watcher: two processes, so that a rank that dies or hangs is still reported and never left behind.

The watcher is the process the launcher started. It forks the rank before anything heavy is imported, reads
the rank's position from shared memory, and says in one line what became of it. A rank whose watcher is killed says so.
"""
import ctypes
import faulthandler
import mmap
import os
import platform
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from mlperf_rn50.errors import EXIT_AT_ONCE, EXIT_FAILED
from mlperf_rn50.system import out_of_memory
from mlperf_rn50.system.launched import launched_local, launched_rank, launched_size, rank_name, say
from mlperf_rn50.train import stalled
from mlperf_rn50.train.stop import STOP_SIGNALS, Asked, catch

T = TypeVar('T')
# The phases of a rank, and which key of comm says how long it may be without a sign of life.
PHASES = {'start-up': 'start_limit_s', 'training': 'stall_limit_s', 'evaluation': 'eval_limit_s',
          'writing a checkpoint': 'checkpoint_limit_s'}
# How long a rank may take to write its checkpoint once its launcher is gone.
_LAST_WORDS_S = 15.0
# How long the others that stand still are given to say so.
_HEAR_OTHERS_S = 3.0
_RECORD_LIMIT_S = 50.0
_READ_LIMIT_S = 5.0
# How long before a rank is gone the kernel may have counted that it killed it.
_KILL_S = 20.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616d61


class _Cell(IntEnum):
    """The numbers a rank and its watcher share: each is written by one thread of one of them."""

    BEATS = 0
    PHASE = 1
    STEP = 2
    READING = 3
    CALLING = 4
    CALLS = 5
    COMPUTED = 6
    EXCHANGING = 7
    ASKED = 8


class Position:
    """Where a rank is: signs of life, phase, step, and what it is busy with, in memory it shares with its watcher."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * len(_Cell))).cast('q')

    def now(self, phase: str | None = None, step: int | None = None) -> None:
        """The rank lives, in a phase (one of PHASES) at a step (steps taken); None: as before."""
        if phase is not None:
            self._cells[_Cell.PHASE] = list(PHASES).index(phase)
        if step is not None:
            self._cells[_Cell.STEP] = step
        self._cells[_Cell.BEATS] += 1

    def told(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; while one is waited for, the rank is reading data."""
        while True:
            self._cells[_Cell.READING] = 1
            batch = next(batches, None)
            self._cells[_Cell.READING] = 0
            if batch is None:
                return
            yield batch

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what waits for all ranks."""
        self._cells[_Cell.CALLS] += 1
        self._cells[_Cell.CALLING] = 1
        try:
            yield
        finally:
            self._cells[_Cell.CALLING] = 0

    def computed(self, is_exchanging: bool) -> None:
        """A step has been computed, and its gradients are exchanged; or they have been."""
        self._cells[_Cell.COMPUTED] += is_exchanging
        self._cells[_Cell.EXCHANGING] = is_exchanging

    def ask(self, *_: object) -> None:
        """The rank is asked to stop."""
        self._cells[_Cell.ASKED] = 1

    @property
    def is_asked(self) -> bool:
        return bool(self._cells[_Cell.ASKED])

    @property
    def has_started(self) -> bool:
        """Whether the rank got so far as to train."""
        return self._cells[_Cell.PHASE] > 0

    @property
    def num_beats(self) -> int:
        return self._cells[_Cell.BEATS]

    @property
    def phase(self) -> str:
        return list(PHASES)[self._cells[_Cell.PHASE]]

    def state(self) -> stalled.State:
        """What is told of a rank that stands still."""
        cells = self._cells
        is_waiting = cells[_Cell.CALLING] or cells[_Cell.EXCHANGING]
        doing = 'reading data' if cells[_Cell.READING] else stalled.WAITING if is_waiting else \
            'computing' if self.phase in ('training', 'evaluation') else self.phase
        return stalled.State(launched_rank(), platform.node(), cells[_Cell.STEP], self.phase, doing,
                             cells[_Cell.CALLS] + cells[_Cell.COMPUTED], time.time())

    def __str__(self) -> str:
        return f'step {self._cells[_Cell.STEP]}, {self.phase}'


class Watcher:
    """What the watcher knows of its rank; see watched for the arguments."""

    def __init__(self, pid: int, position: Position, limits_s: Mapping[str, float], folder: Path | None,
                 can_stop: bool, stack_fd: int, parent: int):
        self._pid, self._position, self._limits_s, self._can_stop = pid, position, limits_s, can_stop
        self._folder, self._stack_fd, self._parent = folder, stack_fd, parent  # that is gone already, maybe
        self._num_beats, self._last_beat, self._start_s = 0, time.monotonic(), time.time()
        self._orphaned_at: float | None = None
        self._asked, self._is_ended = Asked(), False
        self._recorded: str | None = None  # where the stacks of this stall are; '' if nowhere
        self._cgroup = out_of_memory.memory_cgroup(Path('/proc/self/cgroup').read_text())
        self._memory = out_of_memory.take_sample(pid, self._cgroup)
        self._kills = deque([(time.monotonic(), self._memory.num_kills)])

    def wait(self) -> int:
        """Watches the rank to its end; returns the exit code for the launcher."""
        catch(self._hear)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        while True:
            signal.sigtimedwait([signal.SIGCHLD], _POLL_S)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return self._exit_code(status)
            self._sample_memory()
            reason = self._reason_to_end()
            if reason:
                self._end(reason)
                return EXIT_FAILED

    def _sample_memory(self) -> None:
        """What the rank uses now, and how many the kernel had killed a while ago.

        The kernel counts a kill before the rank is gone: the last number may have this one in it.
        """
        now = time.monotonic()
        sample = out_of_memory.take_sample(self._pid, self._cgroup, self._memory)
        self._kills.append((now, sample.num_kills))
        while now - self._kills[1][0] > _KILL_S:
            self._kills.popleft()
        self._memory = replace(sample, num_kills=self._kills[0][1])

    def _hear(self, number: int, _: object) -> None:
        """Asked to stop, or to end at once."""
        self._position.ask()
        if self._asked.means_at_once(number, time.monotonic()) or not self._can_stop:
            self._is_ended = True
            self._signal(signal.SIGKILL)
        else:
            self._signal(number)

    def _signal(self, number: int) -> None:
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            pass

    def _exit_code(self, status: int) -> int:
        if self._is_ended:
            return EXIT_AT_ONCE
        code = os.waitstatus_to_exitcode(status)
        number = 9 if code == 128 + signal.SIGKILL else -code  # a program in between says it so
        if number <= 0:
            return code
        # A signal that asks to stop comes from a launcher that ends its ranks, and says why itself.
        if self._orphaned_at is None and number not in STOP_SIGNALS:
            self._say(': '.join([f'killed by signal {number} ({_signal_name(number)})', *self._cause(number)]))
        return EXIT_FAILED

    def _cause(self, number: int) -> list[str]:
        """What brought the signal about, as far as that can be told."""
        after = out_of_memory.take_sample(self._pid, self._cgroup, self._memory)
        _, num_ranks = launched_local()
        found = [out_of_memory.explain_death(number, self._memory, after, self._cgroup, num_ranks)]
        if number == signal.SIGBUS:  # of memory that is a file there is no room for
            found.append(stalled.within(_READ_LIMIT_S, stalled.full_folders) or '')
        return [f for f in found if f]

    def _reason_to_end(self) -> str | None:
        now = time.monotonic()
        if self._position.num_beats != self._num_beats:
            self._num_beats, self._last_beat, self._recorded = self._position.num_beats, now, None
        if os.getppid() != self._parent and self._orphaned_at is None:
            self._orphaned_at = now
            self._position.ask()
            self._signal(signal.SIGTERM)  # a checkpoint, if the other ranks are still there
        if self._orphaned_at is not None and now - self._orphaned_at > _LAST_WORDS_S:
            return 'its launcher is gone'
        silent_s, limit_s = now - self._last_beat, self._limits_s[self._position.phase]
        if not limit_s or silent_s < limit_s:
            return None
        if self._recorded is None:
            self._recorded = self._record() or ''
        if self._num_beats != self._position.num_beats:
            return None
        if stalled.is_stopped(self._pid):
            return f'stopped (SIGSTOP) for {silent_s:.0f} s{self._stacks()}'
        # The rank to blame speaks first; of those that only wait for it, the lowest.
        if silent_s < limit_s + _HEAR_OTHERS_S + min(launched_rank(), 10):
            return None
        key = PHASES[self._position.phase]
        return f'no progress for {silent_s:.0f} s (comm.{key}){self._why()}{self._stacks()}'

    def _record(self) -> str | None:
        """Writes where the rank stands still, with its stacks; returns where these are."""
        if self._folder is None:
            return None
        return stalled.within(_RECORD_LIMIT_S, partial(stalled.record, self._folder, self._position.state(), self._pid,
                                                       self._stack_fd))

    def _stacks(self) -> str:
        return f'; its stacks: {self._recorded}' if self._recorded else ''

    def _why(self) -> str:
        """Whom the rank waits for, as far as the others say, and whether what a start writes to is full."""
        said = stalled.within(_READ_LIMIT_S, self._explain) if self._folder and self._recorded else None
        said = f': {said}' if said else ', waiting for another rank or for its data'
        full = '' if self._position.has_started else stalled.within(_READ_LIMIT_S, stalled.full_folders)
        return said + (f'; {full}' if full else '')

    def _explain(self) -> str:
        assert self._folder
        own = self._position.state()
        others = [s for s in stalled.read_states(self._folder, self._start_s) if s.rank != own.rank]
        return stalled.explain(own.rank, sorted([own, *others], key=lambda s: s.rank), launched_size() or 1)

    def _end(self, reason: str) -> None:
        position = str(self._position)
        self._signal(signal.SIGKILL)
        self._say(reason, position)
        end = time.monotonic() + _LAST_WORDS_S  # one that waits for storage may never end
        while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.05)

    def _say(self, reason: str, position: str | None = None) -> None:
        if self._folder and self._orphaned_at is None:
            stalled.within(_READ_LIMIT_S, partial(stalled.note, self._folder, reason.partition(';')[0]))
        try:
            say(f'mlperf-rn50: {rank_name()}, {position or self._position}: {reason}')
        except OSError:  # nobody listens any more
            pass


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f'signal {number}'


def watched(program: Callable[[Position], int], stall_limit_s: float, other_limits_s: Mapping[str, float] | None = None,
            folder: Path | None = None, can_stop: bool = True) -> int:
    """Runs a rank in a process of its own and watches it; returns its exit code (in both processes).

    STOP_SIGNALS that the caller blocked reach the rank when it unblocks them; the watcher only hands them on. Asked
    twice, it ends the rank at once.

    Args:
        program: the rank.
        stall_limit_s: a rank that gives no sign of life for so long is ended; 0 for never.
        other_limits_s: the same for phases in which it is another one.
        folder: where is written what is found out about a rank that stands still; None for nowhere.
        can_stop: whether the rank stops by itself when it is asked to; one that cannot is ended at once.
    """
    position, parent = Position(), os.getppid()
    limits_s = {**dict.fromkeys(PHASES, stall_limit_s), **(other_limits_s or {})}
    stack_fd = open_stacks()
    reader, writer = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the watcher hands on from the first moment
    pid = os.fork()
    if pid:
        os.close(reader)  # the writer stays open for as long as this process lives
        return Watcher(pid, position, limits_s, folder, can_stop, stack_fd, parent).wait()
    os.close(writer)
    _be_watched(position, reader, stack_fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return program(position)


def open_stacks() -> int:
    """A file without a name, for the stacks of a rank."""
    if hasattr(os, 'memfd_create'):
        return os.memfd_create('stacks')
    with tempfile.TemporaryFile() as f:  # Pythons that were built on an old glibc, such as conda's, have no other
        return os.dup(f.fileno())


def _be_watched(position: Position, reader: int, stack_fd: int) -> None:
    """Prepares a rank for the end of its watcher, which it follows, and for being asked where it stands still."""
    libc = ctypes.CDLL(None)
    threading.Thread(target=_follow, args=(position, reader), name='watched', daemon=True).start()
    # The thread cannot run while native code holds Python's lock. So this signal, whose C handler is alarm(its number),
    # ends the rank after 12 s.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    libc.signal(signal.SIGUSR2, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # what the watcher starts may read its stacks
    faulthandler.register(stalled.STACK_SIGNAL, file=stack_fd, all_threads=True)


def _follow(position: Position, reader: int) -> NoReturn:
    """Waits for the end of the watcher, in a thread; says so, and ends the rank."""
    os.read(reader, 1)
    if not position.is_asked and not signal.sigpending() & set(STOP_SIGNALS):  # else a launcher ends its ranks
        line = (f'mlperf-rn50: {rank_name()}, {position}: its watcher was killed (SIGKILL by somebody, or out of '
                'memory); the rank ends with it\n')
        try:
            os.write(2, line.encode())
        except OSError:  # nobody listens any more
            pass
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
