"""Compare the images/s of training with mlperf-rn50 and of a bare Gluon step of the same network.

mlperf-rn50 trains on photos with input pipeline, schedule, log, progress and Horovod on one rank;
steps 11 to 30 count. The bare step has network, loss, backward pass and gluon.Trainer, on one batch
in memory. Both use huge pages.
Usage: python benchmarks/trainer.py [ROUNDS | bare]    (bare prints a single result as JSON)
"""

import json
import statistics
import sys
import time
from functools import partial

from compare import HUGE_PAGES, PYTHON, compare, run_json, train

BATCH, STEPS = 32, 10


def training_rate() -> dict:
    lines = train('benchmarks/photos.yaml')
    first, last = (next(x for x in lines if x.get('step') == step) for step in (10, 30))
    return {
        'images_per_s': BATCH * (last['step'] - first['step']) / (last['time_s'] - first['time_s'])
    }


def bare() -> None:
    import mxnet as mx
    from mxnet import autograd, gluon

    from mlperf_rn50.config import Config
    from mlperf_rn50.data.options import DataConfig
    from mlperf_rn50.model.zoo import build_model

    config = Config(data=DataConfig(num_classes=10))
    net, loss = build_model(config, mx.cpu(), 0), gluon.loss.SoftmaxCrossEntropyLoss()
    loss.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(
        net.collect_params(), 'sgd', {'learning_rate': 0.1, 'momentum': 0.9, 'wd': 1e-4}
    )
    x, y = mx.nd.random.normal(shape=(BATCH, 3, 224, 224)), mx.nd.arange(BATCH) % 10
    seconds = []
    for _ in range(2 + STEPS):
        start = time.perf_counter()
        with autograd.record():
            losses = loss(net(x), y)
        losses.backward()
        trainer.step(BATCH)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({'images_per_s': BATCH / statistics.median(seconds[2:])}))


if __name__ == '__main__':
    [what] = sys.argv[1:] or ['3']
    if what == 'bare':
        bare()
    else:
        bare_rate = partial(run_json, [PYTHON, __file__, 'bare'], **HUGE_PAGES)
        compare(
            'trainer against the bare step, float32',
            {'mlperf-rn50 train': training_rate, 'bare Gluon': bare_rate},
            int(what),
            0.98,
        )
