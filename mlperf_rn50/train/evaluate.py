"""Exact Top-1, Top-5 and confusions over all ranks, from summed integer counts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train.comm.horovod import Comm, wait_for

Forward = Callable[[NDArray], NDArray]  # from images to logits
NO_CLASS = 'none: not a number'
# Batches that Python gives to the device before it waits for an earlier one. With no limit, it
# would give all of them at once: they would fill the memory, and the run would show no sign of
# life while the device computes.
_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Accuracy:
    """Counts over the whole validation set; top1 and top5 are fractions."""

    num_top1: int
    num_top5: int
    num_images: int

    @property
    def top1(self) -> float:
        return self.num_top1 / self.num_images

    @property
    def top5(self) -> float:
        return self.num_top5 / self.num_images


def data_label(data: DataConfig) -> str:
    """Return the data set's name as shown next to an accuracy."""
    name = f'{data.dataset}, synthetic images' if data.synthetic else data.dataset
    return name if data.is_imagenet else f'{name} (not ImageNet)'


def correct_counts(logits: NDArray, labels: NDArray, num_valid: int) -> NDArray:
    """Count the images among the first num_valid that are correct by Top-1 and by Top-5; do not
    wait for the result.

    Equal logits rank by class number; an image with a NaN is wrong. Result: float32, (2,), exact
    below 2**24.

    Args:
        logits: float32, shape (batch, classes).
        labels: int32, shape (batch,).
    """
    labels = labels.astype('float32').reshape((-1, 1))
    # the classes that rank before the true class of an image, (batch, classes)
    own = nd.pick(logits, labels, keepdims=True)
    classes = nd.arange(logits.shape[1], ctx=logits.context).reshape((1, -1))
    has_lower_number = nd.broadcast_lesser(classes, labels)
    is_before = nd.broadcast_greater(logits, own)
    is_before = is_before + nd.broadcast_equal(logits, own) * has_lower_number
    num_before = is_before.sum(axis=1)
    # images that are neither padding nor have a NaN, which alone differs from itself
    is_valid = nd.arange(len(logits), ctx=logits.context) < num_valid
    is_valid = is_valid * nd.broadcast_equal(logits, logits).min(axis=1)
    counts = [((num_before < most) * is_valid).sum() for most in (1, 5)]
    return nd.concat(*counts, dim=0)


def with_mirror(net: Forward, config: Config) -> Forward:
    """Return a network or, with data.eval_flip, the mean of its logits for images and for their
    mirror images."""
    if not config.data.eval_flip:
        return net
    axis = 2 if config.model.layout == 'NHWC' else 3
    return lambda x: (net(x) + net(nd.flip(x, axis=axis))) / 2


def evaluate(
    net: Forward,
    batches: Iterable[Batch],
    num_images: int,
    comm: Comm,
    on_batch: Callable[[], None] = lambda: None,
    on_logits: Callable[[NDArray, Batch], None] = lambda logits, batch: None,
) -> Accuracy:
    """Return the accuracy of a network on the validation set; raise RunFailed unless each image was
    evaluated once."""
    num_seen, counts = 0, [nd.zeros((2,))]
    for batch in batches:
        on_batch()
        logits = net(batch.images)
        on_logits(logits, batch)
        counts.append(correct_counts(logits, batch.labels, batch.num_valid))
        num_seen += batch.num_valid
        if len(counts) > _BATCHES_AHEAD:
            wait_for(counts[-1 - _BATCHES_AHEAD])
    top1, top5 = sum(c.asnumpy().astype(int) for c in counts)
    num_top1, num_top5, total = comm.sum([int(top1), int(top5), num_seen])
    if total != num_images:
        raise RunFailed(f'evaluation: got {total} images over all ranks, expected {num_images}')
    return Accuracy(num_top1, num_top5, total)


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were classified as another; share: their fraction of the class."""

    true_class: str
    taken_for: str
    num_images: int
    share: float


class ConfusionMatrix:
    """Counts of images by true class (row) and predicted class (column), int64; the last column is
    for NaN logits.

    As in correct_counts, the first of several equally large logits decides.
    """

    def __init__(self, num_classes: int):
        self.counts = np.zeros((num_classes, num_classes + 1), np.int64)

    def add(self, logits: NDArray, batch: Batch) -> None:
        values = logits[: batch.num_valid].asnumpy()
        labels = batch.labels[: batch.num_valid].asnumpy()
        taken = np.where(np.isnan(values).any(axis=1), values.shape[1], values.argmax(axis=1))
        np.add.at(self.counts, (labels, taken), 1)

    def sum(self, comm: Comm) -> None:
        """Sum the counts over all ranks, which exchange only those above 0."""
        places = np.flatnonzero(self.counts)
        own = [places.tolist(), self.counts.flat[places].tolist()]
        self.counts[:] = 0
        for others, numbers in comm.gather_object(own):
            self.counts.flat[others] += np.array(numbers, np.int64)

    def largest(self, number: int, classes: Sequence[str]) -> list[Confusion]:
        """Return at most `number` confusions, most frequent first; equally frequent ones are in
        class order."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        names, sizes = [*classes, NO_CLASS], self.counts.sum(axis=1)
        order = np.argsort(-wrong, axis=None, kind='stable')[:number]
        found = []
        for a, b in zip(*np.unravel_index(order, wrong.shape)):
            if num := int(wrong[a, b]):
                found.append(Confusion(names[a], names[b], num, num / int(sizes[a])))
        return found
