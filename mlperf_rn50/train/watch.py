"""A rank and its watcher: two processes, so that a rank that dies or hangs is still reported and never left behind.

The watcher is the process the launcher started. It forks the rank before anything heavy is imported, reads
the rank's position from shared memory, and says in one line what became of it.
"""
import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED
from mlperf_rn50.system.launched import launched_rank, rank_name

# Either asks a run to stop: it writes a checkpoint and can be resumed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PHASES = ('start-up', 'training', 'evaluation', 'writing a checkpoint')
# How long a rank may take to write its checkpoint once its launcher is gone.
_LAST_WORDS_S = 15.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1
_STOPPED_STATES = ('T', 't')


class Position:
    """Where a rank is: (signs of life, phase, step), in memory it shares with its watcher."""

    _LAYOUT = struct.Struct('qqq')

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LAYOUT.size)
        self._beats = 0
        self._phase, self._step = 0, 0

    def now(self, phase: str | None = None, step: int | None = None) -> None:
        """The rank lives, in a phase (one of PHASES) at a step (steps taken); None: as before."""
        self._beats += 1
        self._phase = self._phase if phase is None else PHASES.index(phase)
        self._step = self._step if step is None else step
        self._LAYOUT.pack_into(self._memory, 0, self._beats, self._phase, self._step)

    @property
    def has_started(self) -> bool:
        """Whether the rank got so far as to train."""
        return self._phase > 0

    @property
    def num_beats(self) -> int:
        return self._LAYOUT.unpack_from(self._memory)[0]

    def __str__(self) -> str:
        _, phase, step = self._LAYOUT.unpack_from(self._memory)
        return f'step {step}, {PHASES[phase]}'


class Watcher:
    """What the watcher knows of its rank."""

    def __init__(self, pid: int, position: Position, stall_limit_s: float):
        self._pid, self._position, self._stall_limit_s = pid, position, stall_limit_s
        self._parent = os.getppid()
        self._num_beats, self._last_beat = 0, time.monotonic()
        self._orphaned_at: float | None = None

    def wait(self) -> int:
        """Watches the rank to its end; returns the exit code for the launcher."""
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        while True:
            signal.sigtimedwait([signal.SIGCHLD], _POLL_S)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return self._exit_code(status)
            reason = self._reason_to_end()
            if reason:
                self._end(reason)
                return EXIT_FAILED

    def _hand_on(self, number: int, _: object) -> None:
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            pass

    def _exit_code(self, status: int) -> int:
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        # SIGTERM comes from a launcher that ends its ranks, and says why itself.
        if self._orphaned_at is None and -code != signal.SIGTERM:
            self._say(f'killed by signal {-code} ({signal.Signals(-code).name})')
        return EXIT_FAILED

    def _reason_to_end(self) -> str | None:
        now = time.monotonic()
        if self._position.num_beats != self._num_beats:
            self._num_beats, self._last_beat = self._position.num_beats, now
        if os.getppid() != self._parent and self._orphaned_at is None:
            self._orphaned_at = now
            self._hand_on(signal.SIGTERM, None)  # a checkpoint, if the other ranks are still there
        if self._orphaned_at is not None and now - self._orphaned_at > _LAST_WORDS_S:
            return 'its launcher is gone'
        silent_s = now - self._last_beat
        if not self._stall_limit_s or silent_s < self._stall_limit_s:
            return None
        if _state(self._pid) in _STOPPED_STATES:
            return f'stopped (SIGSTOP) for {silent_s:.0f} s'
        # The rank to blame speaks first; of those that only wait for it, the lowest.
        if silent_s < self._stall_limit_s + 3 + min(launched_rank(), 10):
            return None
        return f'no progress for {silent_s:.0f} s (comm.stall_limit_s), waiting for another rank or for its data'

    def _end(self, reason: str) -> None:
        position = str(self._position)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._say(reason, position)

    def _say(self, reason: str, position: str | None = None) -> None:
        try:
            print(f'mlperf-rn50: {rank_name()}, {position or self._position}: {reason}', file=sys.stderr, flush=True)
        except OSError:  # nobody listens any more
            pass


def _state(pid: int) -> str:
    """The state letter of a process, as in proc(5)."""
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]


def watched(program: Callable[[Position], int], stall_limit_s: float) -> int:
    """Runs a rank in a process of its own and watches it; returns its exit code (in both processes).

    STOP_SIGNALS that the caller blocked reach the rank when it unblocks them; the watcher only hands them on.

    Args:
        program: the rank.
        stall_limit_s: a rank that gives no sign of life for so long is ended; 0 for never.
    """
    position = Position()
    pid = os.fork()
    if pid:
        return Watcher(pid, position, stall_limit_s).wait()
    # A killed watcher takes its rank with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return program(position)
