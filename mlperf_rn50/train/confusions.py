"""Which classes a network takes for which others, counted exactly over all ranks."""
from collections.abc import Sequence
from dataclasses import dataclass

import mxnet as mx
import numpy as np

from mlperf_rn50.data.pipeline import Batch
from mlperf_rn50.train.comm import Comm

NO_CLASS = 'none: not a number'


@dataclass(frozen=True)
class Confusion:
    """Images of a class that were taken for another one; share is their fraction of the class."""

    true_class: str
    taken_for: str
    num_images: int
    share: float


class ConfusionMatrix:
    """Images by their class (row) and the class they were taken for (column), int64.

    The last column counts those of whose logits one is not a number. Otherwise, as in correct_counts, the largest
    logit decides, and of equal ones the first.
    """

    def __init__(self, num_classes: int):
        self.counts = np.zeros((num_classes, num_classes + 1), np.int64)

    def add(self, logits: mx.nd.NDArray, batch: Batch) -> None:
        """Counts a batch. logits: float32, (batch, classes)."""
        values, labels = logits[:batch.num_valid].asnumpy(), batch.labels[:batch.num_valid].asnumpy()
        taken = np.where(np.isnan(values).any(axis=1), values.shape[1], values.argmax(axis=1))
        np.add.at(self.counts, (labels, taken), 1)

    def sum(self, comm: Comm) -> None:
        """Adds up the counts of all ranks, on each."""
        self.counts[:] = np.reshape(comm.sum(self.counts.ravel().tolist()), self.counts.shape)

    def largest(self, number: int, classes: Sequence[str]) -> list[Confusion]:
        """The most frequent confusions, at most so many; equally frequent ones by their class."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        names, sizes = [*classes, NO_CLASS], self.counts.sum(axis=1)
        order = np.argsort(-wrong, axis=None, kind='stable')[:number]
        pairs = [divmod(int(i), wrong.shape[1]) for i in order]
        return [Confusion(names[a], names[b], int(wrong[a, b]), float(wrong[a, b] / sizes[a]))
                for a, b in pairs if wrong[a, b]]
