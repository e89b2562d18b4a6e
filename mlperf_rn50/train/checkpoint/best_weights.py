"""The best and the last network of a run, and the thread that writes networks and checkpoints."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from mxnet.ndarray import NDArray

from mlperf_rn50.model.weights import (
    BEST,
    LAST,
    best_top1,
    describe_weights,
    save_weights,
)
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.processor import leave_openmp_to_engine
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.plan import Plan


@dataclass(frozen=True)
class Network:
    """Copy of a network's parameters after a step; accuracy is None if the network was not
    evaluated."""

    step: int
    accuracy: Accuracy | None
    arrays: dict[str, NDArray]


class BestWeights:
    """Best network so far, kept on rank 0; update() is safe while a thread writes the previous best
    network."""

    def __init__(self, folder: RunFolder, plan: Plan, classes: Sequence[str], data_sha256: str):
        self._folder, self._plan = folder.weights, plan
        self._classes, self._data_sha256 = classes, data_sha256
        self._best: Network | None = None
        self._best_top1: float | None = None  # once it is known
        self._written: Network | None = None
        self._last_accuracy: tuple[int, Accuracy] | None = None

    def update(self, step: int, accuracy: Accuracy, copy: Callable[[], dict[str, NDArray]]) -> None:
        """Record the accuracy after a step; keep a copy of the network if it is better than the one
        in memory or, after a resume, in the folder."""
        self._last_accuracy = step, accuracy
        # A run that went back may have a better accuracy on record than that of its kept network.
        if self._best_top1 is None:
            self._best_top1 = best_top1(self._folder)
        if self._best_top1 is None or accuracy.top1 > self._best_top1:
            self._best = Network(step, accuracy, copy())
            self._best_top1 = accuracy.top1

    def write_best(self) -> None:
        """Write the best network so far unless it is already written; raise UserError on
        failure."""
        best = self._best
        if best and best is not self._written:
            self._write(BEST, best, is_last=False)
            self._written = best

    def write_at_end(self, step: int, arrays: dict[str, NDArray]) -> None:
        """Write a finished run's best and last network, to one file if they are equal; raise
        UserError on failure."""
        if self._best and self._best.step == step:
            self._write(BEST, self._best, is_last=True)
            return
        self.write_best()
        accuracy = None
        if self._last_accuracy and self._last_accuracy[0] == step:
            accuracy = self._last_accuracy[1]
        self._write(LAST, Network(step, accuracy, arrays), is_last=True)

    def _write(self, stem: str, network: Network, is_last: bool) -> None:
        plan, accuracy = self._plan, network.accuracy
        description = describe_weights(
            plan.config,
            self._classes,
            eval_batch_size=plan.eval_batch_size,
            epoch=network.step // plan.steps_per_epoch,
            seed=plan.config.run.seed or 0,
            is_best=stem == BEST,
            is_last=is_last,
            data_sha256=self._data_sha256,
            **({**asdict(accuracy), 'top1': accuracy.top1} if accuracy else {}),
        )
        arrays = {n: a.asnumpy() for n, a in network.arrays.items()}
        save_weights(self._folder, stem, description, arrays)


class BackgroundWriter:
    """Thread that runs submitted writes; a submission waits until the previous one is written."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, 'save', leave_openmp_to_engine)
        self._pending: Future[object] | None = None

    def submit(self, *writes: Callable[[], object]) -> Future[object]:
        """Wait for the previous submission and raise its error, if any; then start these writes in
        the background."""
        self.finish()
        self._pending = self._pool.submit(lambda: [write() for write in writes])
        return self._pending

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def check(self) -> None:
        """Raise the error of a finished submission, if any."""
        if self._pending and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last submission is written; raise its error, if any."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()
