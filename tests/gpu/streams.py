"""Batches whose pixels say which image they are of, read long after they were handed out."""
from collections.abc import Iterable
from itertools import islice

import mxnet as mx
import numpy as np

from mlperf_rn50.data.pipeline import Batch

SIDE = 64


def tagged(number: int) -> list[np.ndarray]:
    """So many images, each of one level: its number."""
    return [np.full((SIDE, SIDE, 3), i, np.uint8) for i in range(number)]


def read_late(batches: Iterable[Batch], num_steps: int, context: mx.Context, side: int) -> list[tuple[list, list]]:
    """What is read of some batches by a device that is kept busy before each: (levels, labels) of each.

    Nothing waits for the device meanwhile, so that the pipeline goes on with batches that it has yet to read. A batch
    whose memory is used again too early has the levels of a later one, or several.

    Args:
        batches: of tagged images.
        num_steps: how many of them.
        context: of the device.
        side: of the square matrices it multiplies before it reads a batch.
    """
    busy, read = mx.nd.random.uniform(-1, 1, shape=(side, side), ctx=context) / side, []
    for batch in islice(batches, num_steps):
        for _ in range(4):
            busy = mx.nd.clip(mx.nd.dot(busy, busy), -1, 1)
        late = mx.nd.sum(busy * 0)
        images = mx.nd.broadcast_add(batch.images, late.reshape((1, 1, 1, 1)).astype(batch.images.dtype))
        flat = images.reshape((images.shape[0], -1))
        read.append((flat.min(axis=1), flat.max(axis=1), batch.labels + late.astype('int32')))
        del batch, images, flat
    return [(_levels(low.asnumpy(), high.asnumpy()), labels.asnumpy().tolist()) for low, high, labels in read]


def _levels(lows: np.ndarray, highs: np.ndarray) -> list[int | None]:
    """The level of each image, None for one that has several."""
    return [int(a) if a == b else None for a, b in zip(lows, highs)]


def overwritten(read: list[tuple[list, list]], expected: list[list[int]]) -> list[str]:
    """What is wrong with what was read, a line for each batch that is not the expected one.

    Args:
        read: of read_late.
        expected: the images of each batch by their numbers, which are their labels.
    """
    return [f'batch {i}: images {levels}, labels {labels}, expected {wanted}'
            for i, ((levels, labels), wanted) in enumerate(zip(read, expected)) if not levels == labels == wanted]
