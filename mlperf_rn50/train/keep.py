"""The networks that a run keeps: its best and its last."""
from dataclasses import dataclass

import mxnet as mx

from mlperf_rn50.data.records import class_names
from mlperf_rn50.model.weights import BEST, LAST, describe_weights, save_weights
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.run_folder import RunFolder


@dataclass(frozen=True)
class Network:
    """A network as it was after a step: copies, by parameter; accuracy None where it was not evaluated."""

    step: int
    accuracy: Accuracy | None
    arrays: dict[str, mx.nd.NDArray]


class Keeper:
    """Rank 0's networks that are worth keeping."""

    def __init__(self, folder: RunFolder, plan: Plan):
        self._folder, self._plan = folder.weights, plan
        self._best: Network | None = None
        self._is_written = True

    def is_best(self, network: Network) -> None:
        """A network that is better than all before."""
        self._best, self._is_written = network, False

    def write_best(self) -> None:
        """Writes the best network so far, unless it is there already.

        Raises:
            UserError: it cannot be written.
        """
        if self._best and not self._is_written:
            self._write(BEST, self._best, is_last=False)

    def write_at_end(self, last: Network) -> None:
        """Writes what is left to write at the end of a run that is over; one file if the last is the best.

        Raises:
            UserError: it cannot be written.
        """
        if self._best and self._best.step == last.step:
            self._write(BEST, self._best, is_last=True)
        else:
            self.write_best()
            self._write(LAST, last, is_last=True)

    def _write(self, stem: str, network: Network, is_last: bool) -> None:
        config, found = self._plan.config, network.accuracy
        description = describe_weights(
            config, class_names(config.data), self._plan.eval_batch_size, network.step // self._plan.steps_per_epoch,
            config.run.seed or 0, is_best=stem == BEST, is_last=is_last,
            counts=(found.num_top1, found.num_top5, found.num_images) if found else None)
        save_weights(self._folder, stem, description, {n: a.asnumpy() for n, a in network.arrays.items()})
        self._is_written = self._is_written or stem == BEST
