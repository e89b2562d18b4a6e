"""Times of a rank's steps: waiting for data, computing, waiting for the other ranks.

The training loop runs ahead of the device and cannot measure these times. Therefore a thread waits for two small copies
that each step makes, at the end of backward and after the last exchange, and reads the clock. This delays no step.
"""
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import mxnet as mx

from mlperf_rn50.train.comm.device import wait_for


@dataclass
class StepTimes:
    """Times of several steps of a rank, in seconds; wait_s: from the end of backward to the end of the exchange."""

    num_steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0


class _TimerThread(threading.Thread):
    """Thread that waits for steps and adds up their times."""

    def __init__(self, on_exchange: Callable[[bool], None]) -> None:
        super().__init__(name='timer', daemon=True)
        self.on_exchange = on_exchange
        self.steps = queue.SimpleQueue[tuple[float, mx.nd.NDArray, mx.nd.NDArray] | None]()
        self.num_done = 0
        self.last_end = time.monotonic()
        self.times = StepTimes()
        self.error: Exception | None = None

    def run(self) -> None:
        while step := self.steps.get():
            data_at, computed, exchanged = step
            try:
                wait_for(computed)
                computed_at = time.monotonic()
                self.on_exchange(True)
                wait_for(exchanged)
                self.on_exchange(False)
                self.add(data_at, computed_at, time.monotonic())
            except Exception as e:  # any error must reach the training loop
                self.error = e
            finally:
                del step, computed, exchanged
                self.num_done += 1

    def add(self, data_at: float, computed_at: float, exchanged_at: float) -> None:
        """Add a step, given the times at which its images arrived, its backward pass ended and its exchange ended."""
        start = max(self.last_end, data_at)
        self.times.num_steps += 1
        self.times.data_s += start - self.last_end
        self.times.compute_s += max(0.0, computed_at - start)
        self.times.wait_s += exchanged_at - max(start, computed_at)
        self.last_end = exchanged_at


class StepTimer:
    """Timer of a rank's steps; with gradient accumulation, waiting for data of later passes counts as computing."""

    def __init__(self, on_exchange: Callable[[bool], None] = lambda is_exchanging: None) -> None:
        """on_exchange is called with True at the start of a gradient exchange and with False at its end."""
        self._thread = _TimerThread(on_exchange)
        self._data_at, self._is_begun, self._num_pushed = 0.0, False, 0
        self._thread.start()
        weakref.finalize(self, self._thread.steps.put, None)  # the thread ends with the timer

    def mark_data(self) -> None:
        """Record the arrival of a pass's images; only the first pass of a step counts."""
        if not self._is_begun:
            self._data_at, self._is_begun = time.monotonic(), True

    def mark_step(self, computed: mx.nd.NDArray, exchanged: mx.nd.NDArray) -> None:
        """Record a step queued in MXNet, given arrays that are ready at the end of backward and of the exchange."""
        self._num_pushed += 1
        self._thread.steps.put((self._data_at, computed, exchanged))
        self._is_begun = False

    def check(self) -> None:
        """Raise the error of a failed step, which MXNet reports only to the first thread that waits for the step."""
        if self._thread.error:
            raise self._thread.error

    def take(self) -> StepTimes:
        """Return the step times since the last call."""
        self.drain()
        taken, self._thread.times = self._thread.times, StepTimes()
        return taken

    def start(self) -> None:
        """Wait until all earlier steps are done, then start the clock of the next step."""
        self.drain()
        self._thread.last_end = time.monotonic()

    def drain(self) -> None:
        """Wait until all steps are timed; raise the error of a failed step."""
        while self._thread.num_done < self._num_pushed:
            time.sleep(0.001)
        self.check()
