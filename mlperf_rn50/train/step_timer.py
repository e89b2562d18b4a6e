"""Where the time of a rank's steps goes: waiting for data, computing, waiting for the other ranks.

The loop runs ahead of the device, so it cannot tell. A thread waits for two small copies of each step, one made when
backward is done and one when the last gradients are summed, and reads the clock when they are there: the steps
themselves wait for nothing more than before.
"""
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import mxnet as mx


@dataclass
class StepTimes:
    """What some steps of a rank took, in seconds; wait_s: from the end of backward to that of the exchange."""

    num_steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0


class _Watch(threading.Thread):
    """Waits for steps and adds up what they took."""

    def __init__(self, computed: Callable[[bool], None]) -> None:
        super().__init__(name='pace', daemon=True)
        self.computed = computed
        self.steps = queue.SimpleQueue[tuple[float, mx.nd.NDArray, mx.nd.NDArray] | None]()
        self.num_seen = 0
        self.last_end = time.monotonic()
        self.times = StepTimes()
        self.error: Exception | None = None

    def run(self) -> None:
        while step := self.steps.get():
            data_at, computed, exchanged = step
            try:
                computed.wait_to_read()
                computed_at = time.monotonic()
                self.computed(True)
                exchanged.wait_to_read()
                self.computed(False)
                self.add(data_at, computed_at, time.monotonic())
            except Exception as e:  # whatever it is, the loop has to hear of it
                self.error = e
            finally:
                del step, computed, exchanged
                self.num_seen += 1

    def add(self, data_at: float, computed_at: float, exchanged_at: float) -> None:
        """A step is done: its images came, its backward and its exchange were done, at these times."""
        start = max(self.last_end, data_at)
        self.times.num_steps += 1
        self.times.data_s += start - self.last_end
        self.times.compute_s += max(0.0, computed_at - start)
        self.times.wait_s += exchanged_at - max(start, computed_at)
        self.last_end = exchanged_at


class Pace:
    """The clock of a rank's steps: has_data once a pass, then stepped; take when the steps are done.

    With gradient accumulation, what later passes wait for counts as computing.
    """

    def __init__(self, computed: Callable[[bool], None] = lambda is_exchanging: None) -> None:
        """computed is called when a step is computed and its exchange begins (True), and when that is done."""
        self._watch = _Watch(computed)
        self._data_at, self._is_begun, self._num_pushed = 0.0, False, 0
        self._watch.start()
        weakref.finalize(self, self._watch.steps.put, None)  # the thread ends with its owner

    def has_data(self) -> None:
        """The images of a pass have come."""
        if not self._is_begun:
            self._data_at, self._is_begun = time.monotonic(), True

    def stepped(self, computed: mx.nd.NDArray, exchanged: mx.nd.NDArray) -> None:
        """A step was pushed: copies that are there when backward, and when the exchange, is done."""
        self._num_pushed += 1
        self._watch.steps.put((self._data_at, computed, exchanged))
        self._is_begun = False

    def check(self) -> None:
        """Raise what a step raised: the engine tells of a failure only once, to whoever waits first."""
        if self._watch.error:
            raise self._watch.error

    def take(self) -> StepTimes:
        """The times since the last call."""
        self.drain()
        taken, self._watch.times = self._watch.times, StepTimes()
        return taken

    def start(self) -> None:
        """The clock of the next step begins now, when those before are done."""
        self.drain()
        self._watch.last_end = time.monotonic()

    def drain(self) -> None:
        """Waits until all steps are seen; raises what one of them raised."""
        while self._watch.num_seen < self._num_pushed:
            time.sleep(0.001)
        self.check()
