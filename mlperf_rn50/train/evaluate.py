"""Exact Top-1 and Top-5 over all ranks: integer counts, summed, divided once."""
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mxnet as mx

from mlperf_rn50.config import IMAGENET, DataConfig
from mlperf_rn50.data.pipeline import Batch
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train.comm import Comm


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
