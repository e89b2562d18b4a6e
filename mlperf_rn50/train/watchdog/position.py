"""The position of a rank (phase, step, signs of life), in memory that it shares with its watcher."""
import ctypes
import mmap
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from mlperf_rn50.system.launcher_env import launched_rank
from mlperf_rn50.train.watchdog import stall_report

T = TypeVar('T')
# The phases of a rank, and the key of comm that limits the time without a sign of life in each.
PHASES = {'start-up': 'start_limit_s', 'training': 'stall_limit_s', 'evaluation': 'eval_limit_s',
          'writing a checkpoint': 'checkpoint_limit_s'}


class _Shared(ctypes.Structure):
    """The numbers a rank and its watcher share: each is written by one thread of one of them."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        'beats', 'phase', 'step', 'reading', 'calling', 'calls', 'computed', 'exchanging', 'asked')]


class Position:
    """Where a rank is: signs of life, phase, step and activity, in memory it shares with its watcher."""

    def __init__(self) -> None:
        self._shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))

    def now(self, phase: str | None = None, step: int | None = None) -> None:
        """Give a sign of life, in one of PHASES at a number of steps taken; None: as before."""
        if phase is not None:
            self._shared.phase = list(PHASES).index(phase)
        if step is not None:
            self._shared.step = step
        self._shared.beats += 1

    def track_reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches; while one is waited for, the rank is reading data."""
        while True:
            self._shared.reading = 1
            batch = next(batches, None)
            self._shared.reading = 0
            if batch is None:
                return
            yield batch

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Enter around what waits for all ranks."""
        self._shared.calls += 1
        self._shared.calling = 1
        try:
            yield
        finally:
            self._shared.calling = 0

    def computed(self, is_exchanging: bool) -> None:
        """Record that a step has been computed and its gradients are exchanged; or have been."""
        self._shared.computed += is_exchanging
        self._shared.exchanging = is_exchanging

    def ask(self, *_: object) -> None:
        """Request a stop."""
        self._shared.asked = 1

    @property
    def is_asked(self) -> bool:
        return bool(self._shared.asked)

    @property
    def has_started(self) -> bool:
        """Whether the rank has begun to train."""
        return self._shared.phase > 0

    @property
    def num_beats(self) -> int:
        return self._shared.beats

    @property
    def phase(self) -> str:
        return list(PHASES)[self._shared.phase]

    def state(self) -> stall_report.State:
        """What other ranks read when this one is stalled."""
        shared = self._shared
        is_waiting = shared.calling or shared.exchanging
        doing = 'reading data' if shared.reading else stall_report.WAITING if is_waiting else \
            'computing' if self.phase in ('training', 'evaluation') else self.phase
        return stall_report.State(launched_rank(), platform.node(), shared.step, self.phase, doing,
                             shared.calls + shared.computed, time.time())

    def __str__(self) -> str:
        return f'step {self._shared.step}, {self.phase}'
