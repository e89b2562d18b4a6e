"""Evaluation with BatchNorm folded into the convolutions against the trained network.

Usage: python benchmarks/evaluation.py

ResNet-50, 224x224, batch 32, float32, 2 threads, in turn; and what it costs to fold, and to compare the ranks.
"""
import os
import statistics
import time

os.environ.setdefault('OMP_NUM_THREADS', '2')

import mxnet as mx  # noqa: E402

from mlperf_rn50.config import Config, ModelConfig, OptimizerConfig, TrainConfig  # noqa: E402
from mlperf_rn50.system.topology import leave_openmp_to_engine  # noqa: E402
from mlperf_rn50.train.comm import LocalComm  # noqa: E402
from mlperf_rn50.train.plan import make_plan  # noqa: E402
from mlperf_rn50.train.trainer import Trainer  # noqa: E402

BATCH, ROUNDS = 32, 9


def main() -> None:
    config = Config(model=ModelConfig(fused_bn_relu=True), optimizer=OptimizerConfig('lars'),
                    train=TrainConfig(local_batch_size=BATCH))
    leave_openmp_to_engine()
    trainer = Trainer(make_plan(config, 1), LocalComm(), 0, None)
    images = mx.nd.random.normal(shape=(BATCH, 3, 224, 224))
    trainer.fold()
    sides = {'as trained': lambda: trainer.net(images).wait_to_read(),
             'folded': lambda: trainer.eval_net(images).wait_to_read(),
             'averaging': trainer.average_statistics, 'folding': trainer.fold, 'comparing the ranks': trainer.digests}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, work in sides.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name in ('as trained', 'folded'):
        print(f'{name:24s}{BATCH / medians[name]:8.1f} images/s')
    for name in ('averaging', 'folding', 'comparing the ranks'):
        print(f'{name:24s}{1000 * medians[name]:8.0f} ms')


if __name__ == '__main__':
    main()
