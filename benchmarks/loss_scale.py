"""Steps that float16 training skips at its start, with gradients summed or averaged over ranks; arithmetic of NumPy.

The gradients are those of ResNet-50 at its first step, in float32, for 8 batches of random images; rank r has batch r
modulo 8. Each rank's gradient is multiplied by the loss scale and rounded to float16, and the ranks' values are added
in float16 in order, as in a ring. Only the elements with the largest mean of each float16 tensor are used.
Usage: .venv/bin/python benchmarks/loss_scale.py [BATCH_SIZE [IMAGE_SIZE]]
"""
import sys

import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import synthetic_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.loop import STEPS_AHEAD
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.schedule import LossScale
from mlperf_rn50.train.trainer import Trainer

NUM_BATCHES, NUM_STEPS, TOP = 8, 200, 50
BATCH_SIZE, IMAGE_SIZE = (*map(int, sys.argv[1:]), *(16, 96)[len(sys.argv) - 1:])


def batch_gradients() -> np.ndarray:
    """Return the largest gradients of the mean loss; float32, shape (NUM_BATCHES, elements)."""
    data = DataConfig(num_train=1000, image_size=IMAGE_SIZE, resize_shorter=IMAGE_SIZE, synthetic=True)
    plan = make_plan(Config(data=data, train=TrainConfig(local_batch_size=BATCH_SIZE)), 1)
    trainer, template, random = Trainer(plan, Comm(), 0, None), None, np.random.default_rng(0)
    rows = []
    for _ in range(NUM_BATCHES):
        template = template or next(synthetic_batches(plan.config, plan.train_shard(), None))
        template.images[:] = mx.nd.array(random.normal(size=template.images.shape))
        template.labels[:] = mx.nd.array(random.integers(0, 1000, BATCH_SIZE))
        trainer.forward(template).backward()
        rows.append([t.grad.asnumpy().ravel() for t in trainer.optimizer.tensors
                     if not t.name.endswith(('_gamma', '_beta'))])
    tensors = [np.stack(values) for values in zip(*rows)]
    return np.concatenate([t[:, np.argsort(-np.abs(t.mean(axis=0)))[:TOP]] for t in tensors], axis=1)


def is_finite(gradients: np.ndarray, num_ranks: int, scale: float, is_averaged: bool) -> bool:
    """Check whether the exchange of gradients of a step stays within float16."""
    with np.errstate(over='ignore', invalid='ignore'):
        ranks = (gradients * np.float32(scale)).astype(np.float16)
        if is_averaged:
            ranks = (ranks * np.float16(1 / num_ranks)).astype(np.float16)
        total = np.zeros(ranks.shape[1], np.float16)
        for rank in range(num_ranks):
            total += ranks[rank % NUM_BATCHES]
    return bool(np.isfinite(total).all())


def num_skipped(gradients: np.ndarray, num_ranks: int, is_averaged: bool, start: float) -> tuple[int, float]:
    """Return the steps skipped of NUM_STEPS, and the last loss scale; the host learns of a step STEPS_AHEAD later."""
    scale, pending, skipped = LossScale(start), [], 0
    known: dict[float, bool] = {}
    for _ in range(NUM_STEPS):
        if scale.value not in known:
            known[scale.value] = is_finite(gradients, num_ranks, scale.value, is_averaged)
        pending.append((scale.value, known[scale.value]))
        skipped += not known[scale.value]
        if len(pending) > STEPS_AHEAD:
            scale.read(*pending.pop(0))
    return skipped, scale.value


def main() -> None:
    gradients, start = batch_gradients(), TrainConfig(local_batch_size=1).loss_scale
    print(f'largest gradient {np.abs(gradients.mean(axis=0)).max():.4f}, of one batch {np.abs(gradients).max():.4f}')
    print(f'of the first {NUM_STEPS} steps, skipped (and the scale after them):')
    for num_ranks in (8, 64, 512):
        (summed, low), (averaged, high) = (num_skipped(gradients, num_ranks, is_averaged, start)
                                           for is_averaged in (False, True))
        print(f'{num_ranks:5d} ranks   summed {summed:3d} ({low:g})   averaged {averaged:3d} ({high:g})   '
              f'averaged, scale of the warm-up {num_skipped(gradients, num_ranks, True, high)[0]:3d}')


if __name__ == '__main__':
    main()
