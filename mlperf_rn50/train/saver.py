"""Writes what is kept while training goes on."""
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mlperf_rn50.system.topology import leave_openmp_to_engine


class Saver:
    """One thing after the other, in a thread; the next one waits until the one before is written."""

    def __init__(self, on_wait: Callable[[], None] = lambda: None):
        """on_wait is called now and then while something waits."""
        self._pool, self._on_wait = ThreadPoolExecutor(1, 'save', leave_openmp_to_engine), on_wait
        self._pending: Future[object] | None = None

    def submit(self, *writes: Callable[[], object]) -> None:
        """Writes in the background, one after the other, when what was submitted before is written.

        Raises:
            CheckpointError: that could not be written.
        """
        self.finish()
        self._pending = self._pool.submit(lambda: [write() for write in writes])

    def check(self) -> None:
        """Raise the error of what was written, if it is done and there was one."""
        if self._pending and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Waits until all is written; raises its error."""
        while self._pending and not wait([self._pending], timeout=1).done:
            self._on_wait()
        pending, self._pending = self._pending, None
        if pending:
            pending.result()
