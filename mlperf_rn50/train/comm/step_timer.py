"""Times of a rank's steps: waiting for Python and for images, forward and backward pass, exchange,
update.

The training loop runs ahead of the device and cannot measure these times. Therefore a thread waits
for small copies that each step makes, such as at the end of backward and after the last exchange,
and reads the clock. This delays no step. Copies of buckets would wait for the backward pass and
delay the exchange, so for them an operation of MXNet's engine reads the clock, in one of the
threads that start exchanges.
"""

import ctypes
import math
import queue
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from mlperf_rn50.data.pipeline import has_async_engine
from mlperf_rn50.mllog.elapsed import union_s
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.comm.horovod import wait_for

# Columns of the times of a step: its phases in order, then parts of data, and the exchange during
# the backward pass.
PHASES = ('python', 'data', 'compute', 'wait', 'update')
COLUMNS = (*PHASES, 'read', 'decode', 'hidden')
# One of so many steps has marks of its buckets, because each mark is an operation for MXNet's
# engine.
_SAMPLING_STEPS = 16
StampFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_CPU = (ctypes.c_int * 2)(1, 0)  # Context::CPU()
_PRIORITIZED = ctypes.c_int(3)  # kCPUPrioritized of MXNet's engine.h


class Marks(NamedTuple):
    """A step queued in MXNet."""

    asked_at: float
    arrived_at: float
    read_s: float
    decode_s: float
    computed: mx.nd.NDArray  # ready at the end of backward
    exchanged: mx.nd.NDArray  # ready at the end of the exchange
    # Numbers of the stamps of each bucket before its exchange; one after backward for a single
    # rank; None: not sampled
    ready: Sequence[int] | None
    done: Sequence[int]  # those after its exchange


class TimerThread(threading.Thread):
    """Thread that waits for steps and keeps their times."""

    def __init__(
        self, on_exchange: Callable[[bool], None], on_step: Callable[[StepSpans], None]
    ) -> None:
        super().__init__(name='timer', daemon=True)
        self.on_exchange, self.on_step = on_exchange, on_step
        self.steps = queue.SimpleQueue[Marks | None]()
        # an array for each step that is ready after its update
        self.updates = queue.SimpleQueue[mx.nd.NDArray]()
        self.num_done = self.step = 0
        self.last_end = time.monotonic()
        self.times = array('d')  # a row of COLUMNS for each step
        self.stamps: dict[int, float] = {}
        self.function = StampFunction(self.stamp)
        # numbers of steps to trace, and those that are done
        self.traced, self.trace = range(0), list[StepSpans]()
        self.error: Exception | None = None

    def run(self) -> None:
        while marks := self.steps.get():
            try:
                wait_for(marks.computed)
                computed_at = time.monotonic()
                self.on_exchange(True)
                wait_for(marks.exchanged)
                exchanged_at = time.monotonic()
                self.on_exchange(False)
                wait_for(self.updates.get())
                updated_at = time.monotonic()
                ready, done = self.take_stamps(marks.ready or ()), self.take_stamps(marks.done)
                # a single rank, whose updates start before this thread wakes up
                if ready and not done:
                    computed_at = exchanged_at = ready[0]
                self.step += 1
                ends = computed_at, exchanged_at, updated_at
                buckets = list(zip(ready, done))
                spans, row = time_step(self.step, self.last_end, marks, ends, buckets)
                self.last_end = spans.updated_s
                self.times.extend(row)
                self.on_step(spans)
                if self.step in self.traced:
                    self.trace.append(spans)
            except Exception as e:  # any error must reach the training loop
                self.error = e
            finally:
                del marks
                self.num_done += 1

    def stamp(self, _: object, number: int) -> None:
        """Read the clock, in a thread of MXNet's engine."""
        self.stamps[number] = time.monotonic()

    def take_stamps(self, numbers: Sequence[int]) -> list[float]:
        """Return stamps, whose operations end at about the same time as the step; none if an
        operation failed."""
        for _ in range(1000):
            if all(n in self.stamps for n in numbers):
                return [self.stamps.pop(n) for n in numbers]
            time.sleep(0.001)
        return []


def time_step(
    step: int,
    start: float,
    marks: Marks,
    ends: tuple[float, float, float],
    buckets: Sequence[tuple[float, float]],
) -> tuple[StepSpans, list[float]]:
    """Return the spans of a step and its times, in the order of COLUMNS. Pure.

    start: end of the step before. ends: of backward pass, exchange and update. buckets: start and
    end of the exchange of each. The clock may have been read late, also for marks of a step before.
    """
    times = list(accumulate((start, marks.asked_at, marks.arrived_at, *ends), max))
    buckets = [(min(a, times[-1]), min(b, times[-1])) for a, b in buckets]
    # there are six times
    spans = StepSpans(step, *times, buckets)  # type: ignore[call-arg,arg-type]
    # The loop runs ahead, so the device may notice only the end of a wait for images.
    share = (spans.arrived_s - spans.asked_s) / max(marks.arrived_at - marks.asked_at, 1e-9)
    hidden_s = math.nan
    if marks.ready is not None:
        hidden_s = union_s((a, min(b, spans.computed_s)) for a, b in buckets)
    phases = [b - a for a, b in pairwise(times)]
    return spans, [*phases, share * marks.read_s, share * marks.decode_s, hidden_s]


def _handles(arrays: Sequence[mx.nd.NDArray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(a.handle for a in arrays))


class StepTimer:
    """Timer of a rank's steps; with gradient accumulation, waiting for data of later passes counts
    as computing."""

    def __init__(
        self,
        on_exchange: Callable[[bool], None] = lambda is_exchanging: None,
        on_step: Callable[[StepSpans], None] = lambda spans: None,
    ) -> None:
        """on_exchange is called with True at the start of a gradient exchange and with False at its
        end."""
        self.thread = TimerThread(on_exchange, on_step)
        self._data: tuple[float, float, float, float] = (0.0,) * 4
        self._num_pushed = self._num_taken = self._num_stamps = self._step = 0
        self._planned = range(0)  # numbers of the steps to trace that are not the next ones
        self.thread.start()
        weakref.finalize(self, self.thread.steps.put, None)  # the thread ends with the timer

    @property
    def is_sampling(self) -> bool:
        """Whether the buckets of the next step are to be marked; not those of a first step, which
        is not typical."""
        # an array then counts as written when the operation that writes it is launched
        if has_async_engine():
            return False
        num_pushed = self._num_pushed - self._num_taken
        return num_pushed % _SAMPLING_STEPS == 1 or self._step + 1 in self.thread.traced

    def mark_data(self, asked_at: float, read_s: float = 0.0, decode_s: float = 0.0) -> None:
        """Record that the images of a step's first pass, for which the loop asked at a time, have
        arrived."""
        self._data = asked_at, time.monotonic(), read_s, decode_s

    def mark(self, written: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return an array for Marks that is ready when an array has been written."""
        return written.copy()

    def stamp(self, written: mx.nd.NDArray) -> int:
        """Let MXNet's engine read the clock when an array has been written; return the number of
        the stamp."""
        return self._push_stamp(read=[written])

    def separate(self, arrays: Sequence[mx.nd.NDArray]) -> int:
        """Let MXNet's engine read the clock when arrays have been written, and only then start
        later uses of them.

        No thread waits. So the updates of a single rank follow its backward pass, and their time is
        known.
        """
        return self._push_stamp(written=arrays)

    def _push_stamp(
        self, read: Sequence[mx.nd.NDArray] = (), written: Sequence[mx.nd.NDArray] = ()
    ) -> int:
        """Push the stamp as an operation that reads or writes arrays, which orders it among the
        others."""
        self._num_stamps += 1
        code = mx.base._LIB.MXEnginePushSyncND(
            self.thread.function,
            ctypes.c_void_p(self._num_stamps),  # its second argument
            None,  # nothing to delete afterwards
            ctypes.byref(_CPU),
            _handles(read),
            len(read),
            _handles(written),
            len(written),
            ctypes.byref(_PRIORITIZED),
            0,  # priority among operations of this kind
            b'stamp',
        )
        mx.base.check_call(code)
        return self._num_stamps

    def mark_exchange(self, *arrays: Any) -> None:
        """Record a step queued in MXNet up to its exchange, given the arrays and stamps of
        Marks."""
        self.thread.steps.put(Marks(*self._data, *arrays))

    def mark_update(self, updated: mx.nd.NDArray) -> None:
        """Record the end of the step, given an array that is ready after its update."""
        self._num_pushed, self._step = self._num_pushed + 1, self._step + 1
        self.thread.updates.put(updated)

    def check(self) -> None:
        """Raise the error of a failed step, which MXNet reports only to the first thread that waits
        for the step."""
        if self.thread.error:
            raise self.thread.error

    def take(self) -> np.ndarray:
        """Return the seconds of the steps since the last call, (steps, COLUMNS); NaN: hidden, of
        other steps."""
        self.drain()
        taken, self.thread.times = self.thread.times, array('d')
        self._num_taken = self._num_pushed
        return np.array(taken).reshape(-1, len(COLUMNS))

    def start(self, step: int = 0) -> None:
        """Wait until all earlier steps are done, then start the clock of the step after `step`, the
        last completed."""
        self.drain()
        self._step = self.thread.step = step
        self.thread.last_end = time.monotonic()

    def start_trace(self, num_steps: int, first: int | None = None) -> None:
        """Keep the times of steps and all of their buckets; first: number of a step, None for the
        next one."""
        if first is None:
            first = self._step + 1
            traced = self.thread.traced
            if num_steps and first in traced:  # extend them
                self.thread.traced = range(traced.start, max(traced.stop, first + num_steps))
                return
        else:
            self._planned = range(first, first + num_steps)
        self.thread.traced, self.thread.trace = range(first, first + num_steps), []

    def take_trace(self, is_end: bool = False) -> list[StepSpans]:
        """Return the traced steps once the last one is done, and at the end of the run those that
        are done."""
        taken = self.thread.trace
        if not taken or not is_end and taken[-1].step + 1 < self.thread.traced.stop:
            return []
        self.start_trace(0)
        # those of the planned steps that were not traced on request
        first = max(self._planned.start, self._step + 1)
        if first < self._planned.stop:
            self.start_trace(self._planned.stop - first, first)
        return taken

    def drain(self) -> None:
        """Wait until all steps are timed; raise the error of a failed step."""
        while self.thread.num_done < self._num_pushed:
            time.sleep(0.001)
        self.check()
