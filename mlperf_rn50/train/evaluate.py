"""Exact Top-1, Top-5 and confusions over all ranks: integer counts, summed, divided once."""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mxnet as mx
import numpy as np

from mlperf_rn50.data.batches import Batch
from mlperf_rn50.data.options import IMAGENET, DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train.comm.horovod import Comm

NO_CLASS = 'none: not a number'


@dataclass(frozen=True)
class Accuracy:
    """Counts over the whole validation set; top1 and top5 are fractions of it."""

    num_top1: int
    num_top5: int
    num_images: int

    @property
    def top1(self) -> float:
        return self.num_top1 / self.num_images

    @property
    def top5(self) -> float:
        return self.num_top5 / self.num_images


def data_name(data: DataConfig) -> str:
    """The data set as it stands beside an accuracy."""
    return (data.dataset + (', synthetic images' if data.synthetic else '')
            + ('' if data.dataset == IMAGENET else ' (not ImageNet)'))


def correct_counts(logits: mx.nd.NDArray, labels: mx.nd.NDArray, num_valid: int) -> mx.nd.NDArray:
    """How many of the first num_valid images have their label among the 1 and the 5 largest logits.

    Equal logits rank by class number; a logit that is not a number ranks its image last.

    Args:
        logits: float32, (batch, classes).
        labels: int32, (batch,).

    Returns:
        float32, (2,), exact below 2**24; not waited for.
    """
    num_classes = logits.shape[1]
    labels = labels.astype('float32')
    own = mx.nd.pick(logits, labels).reshape((-1, 1))
    classes = mx.nd.arange(num_classes, ctx=logits.context).reshape((1, -1))
    later = mx.nd.broadcast_greater(classes, labels.reshape((-1, 1)))
    # Counting what ranks lower, not what ranks higher, makes NaN the worst place and not the best.
    lower = mx.nd.broadcast_lesser(logits, own) + mx.nd.broadcast_equal(logits, own) * later
    place = num_classes - 1 - lower.sum(axis=1)
    valid = mx.nd.arange(len(logits), ctx=logits.context) < num_valid
    return mx.nd.stack(((place < 1) * valid).sum(), ((place < 5) * valid).sum()).reshape((2,))


def evaluate(net: mx.gluon.HybridBlock, batches: Iterable[Batch], num_images: int, comm: Comm,
             on_batch: Callable[[], None] = lambda: None,
             on_logits: Callable[[mx.nd.NDArray, Batch], None] = lambda logits, batch: None) -> Accuracy:
    """The accuracy of a network on the whole validation set.

    Args:
        net: images to logits; the same on every rank.
        on_batch: called for each batch.
        on_logits: called with what the network says of each.

    Raises:
        RunFailed: the ranks together did not see each image once.
    """
    num_seen, counts = 0, mx.nd.zeros((2,))
    for batch in batches:
        on_batch()
        logits = net(batch.images)
        on_logits(logits, batch)
        counts = counts.as_in_context(batch.labels.context) + correct_counts(logits, batch.labels, batch.num_valid)
        num_seen += batch.num_valid
    top1, top5 = counts.asnumpy()
    num_top1, num_top5, total = comm.sum([int(top1), int(top5), num_seen])
    if total != num_images:
        raise RunFailed(f'evaluation: got {total} images over all ranks, expected {num_images}')
    return Accuracy(num_top1, num_top5, total)


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
