"""Heartbeat of a rank: signs of life, phase, step and activity, in memory shared with its
watcher."""

import ctypes
import math
import mmap
import platform
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import msgspec

from mlperf_rn50.errors import UserError
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.system.launcher_env import launched_rank, rank_name

T = TypeVar('T')
_NUM_STEPS = 64  # last steps whose times are kept
# Numbers that a rank and its watcher share.
_NUMBERS = (
    'beats',  # signs of life
    'phase',  # index in PHASES
    'step',  # completed steps
    'reading',  # 1 while the rank waits for a batch
    'calling',  # 1 while the loop waits for all ranks
    'calls',  # such waits so far
    'computed',  # steps computed up to their gradient exchange
    'exchanging',  # 1 during a gradient exchange
    'stop_requested',
    'stopped_ms',  # time for which the rank was stopped (SIGSTOP)
)
WAITING = 'waiting'
# Phases of a rank, each with the key in section comm that limits the time without a sign of life.
PHASES = {
    'start-up': 'start_limit_s',
    'training': 'stall_limit_s',
    'evaluation': 'eval_limit_s',
    'writing a checkpoint': 'checkpoint_limit_s',
}
# The others wait for storage or happen once, so that earlier pauses predict no later one.
LEARNED = 'training', 'evaluation'
_SHORTEST_S, _NUM_CLASSES = 1e-3, 80  # up to 888 s
_LEAST_PAUSES, _LEAST_LIMIT_S = 20, 20.0


@dataclass(frozen=True)
class RankState:
    """State of a rank. num_reached: number of exchanges that the rank has reached; time_s: seconds
    since 1970."""

    rank: int
    host: str
    step: int
    phase: str
    doing: str
    num_reached: int
    time_s: float


class Pauses(ctypes.Structure):
    """Numbers of pauses between two signs of life in a phase, in classes of about equal length.

    Class k counts pauses up to _SHORTEST_S * 2 ** (k / 4).
    """

    _fields_ = [('counts', ctypes.c_int64 * _NUM_CLASSES)]

    def add(self, seconds: float) -> None:
        number = math.ceil(4 * math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S))
        self.counts[min(number, _NUM_CLASSES - 1)] += 1

    def limit_s(self, fixed_s: float) -> float:
        """Return the time limit of a pause: at most fixed_s, which applies until _LEAST_PAUSES are
        known."""
        ends = list(accumulate(self.counts))
        if ends[-1] < _LEAST_PAUSES:
            return fixed_s
        usual, longest = (bisect_left(ends, share * ends[-1]) for share in (0.99, 1.0))
        usual_s, longest_s = (_SHORTEST_S * 2 ** (k / 4) for k in (usual, longest))
        # some long pauses, such as those between epochs, are rarer than one of a hundred
        return min(fixed_s, max(_LEAST_LIMIT_S, 5 * usual_s, 2 * longest_s))


class _Shared(ctypes.Structure):
    """Memory shared by a rank and its watcher; each number is written by a single thread."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ('spans', ctypes.c_double * 7 * _NUM_STEPS),
        ('pauses', Pauses * len(PHASES)),
    ]


class Heartbeat:
    def __init__(self) -> None:
        self._shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))
        self._taken_ms = 0
        self._start = self._beat_at = time.monotonic()

    def beat(self, phase: str | None = None, step: int | None = None) -> None:
        """Give a sign of life; set the phase and the number of completed steps, unless None."""
        now = time.monotonic()
        self._shared.pauses[self._shared.phase].add(now - self._beat_at)
        self._beat_at = now
        if phase is not None:
            self._shared.phase = list(PHASES).index(phase)
        if step is not None:
            self._shared.step = step
        self._shared.beats += 1

    def forget(self, phase: str) -> None:
        """Forget the pauses of a phase, whose steps will take another time from now on."""
        self._shared.pauses[list(PHASES).index(phase)] = Pauses()

    def track_reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches; the rank counts as reading data while it waits for one."""
        while True:
            self._shared.reading = 1
            batch = next(batches, None)
            self._shared.reading = 0
            if batch is None:
                return
            yield batch

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Mark a section that waits for all ranks."""
        self._shared.calls += 1
        self._shared.calling = 1
        try:
            yield
        finally:
            self._shared.calling = 0

    def mark_exchange(self, is_exchanging: bool) -> None:
        """Record the start (True) or end (False) of a gradient exchange; at its start, the step has
        been computed."""
        self._shared.computed += is_exchanging
        self._shared.exchanging = is_exchanging

    def record_step(self, spans: StepSpans) -> None:
        """Record the times of a step without its buckets, instead of those of an earlier step."""
        self._shared.spans[spans.step % _NUM_STEPS] = msgspec.structs.astuple(spans)[:7]

    def last_steps(self) -> list[StepSpans]:
        return [
            StepSpans(int(step), *times)
            for step, *times in sorted(map(tuple, self._shared.spans))
            if step
        ]

    def add_stopped_s(self, seconds: float) -> None:
        """Record that the rank was stopped (SIGSTOP)."""
        self._shared.stopped_ms += round(1000 * seconds)

    def take_stopped_s(self) -> float:
        """Return for how long the rank was stopped since the last call."""
        before, self._taken_ms = self._taken_ms, self._shared.stopped_ms
        return (self._taken_ms - before) / 1000

    def request_stop(self, *_: object) -> None:
        """Ask this rank to stop, from its watcher or a signal handler. The loop passes the request
        on to all ranks."""
        self._shared.stop_requested = 1

    @property
    def is_stop_requested(self) -> bool:
        return bool(self._shared.stop_requested)

    @property
    def age_s(self) -> float:
        """Time since the start of the program, which is the watcher if there is one."""
        return time.monotonic() - self._start

    @property
    def has_started(self) -> bool:
        return self._shared.phase > 0

    def limit_s(self, fixed_s: float) -> float:
        """Return the time limit without a sign of life in the present phase, learned from this run
        in phases that repeat; at most fixed_s."""
        # The wait for the slowest rank, as at the end of an evaluation, happens once.
        if self.phase not in LEARNED or self._shared.calling:
            return fixed_s
        return self._shared.pauses[self._shared.phase].limit_s(fixed_s)

    @property
    def num_beats(self) -> int:
        return self._shared.beats

    @property
    def phase(self) -> str:
        return list(PHASES)[self._shared.phase]

    def state(self) -> RankState:
        shared, doing = self._shared, self.phase
        if shared.reading:
            doing = 'reading data'
        elif shared.calling or shared.exchanging:
            doing = WAITING
        elif doing in ('training', 'evaluation'):
            doing = 'computing'
        return RankState(
            rank=launched_rank(),
            host=platform.node(),
            step=shared.step,
            phase=self.phase,
            doing=doing,
            num_reached=shared.calls + shared.computed,
            time_s=time.time(),
        )

    def note_place(self, error: UserError) -> None:
        """Record rank, host, step and phase in an error, unless it has them from where it arose."""
        if self.has_started and not error.where:
            error.where = f'{rank_name()}, {self}: '

    def __str__(self) -> str:
        return f'step {self._shared.step}, {self.phase}'
