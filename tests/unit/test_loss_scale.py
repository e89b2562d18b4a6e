"""float16: gradients keep their bits at any global batch, on any number of ranks."""
import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config, DataConfig, ModelConfig
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm import fp16_scale
from mlperf_rn50.train.loss_scale import GROWTH_STEPS, LossScale


def test_it_is_halved_on_overflow_once_for_all_steps_under_way():
    scale = LossScale(1024.0)
    for used, is_finite in [(1024, True), (1024, False), (1024, False), (1024, True), (512, False), (256, True)]:
        scale.read(used, is_finite)
    assert scale == LossScale(256.0, 1)
    scale.read(1024, False)  # of a step before the last changes
    assert scale == LossScale(256.0, 1)


def test_it_is_doubled_when_it_held_for_long_and_has_bounds():
    scale, low, high = LossScale(1024.0), LossScale(1.0), LossScale(2.0**24, GROWTH_STEPS - 1)
    for _ in range(GROWTH_STEPS):
        scale.read(scale.value, True)
    low.read(1.0, False)
    high.read(high.value, True)
    assert (scale, low.value, high.value) == (LossScale(2048.0, 0), 1.0, 2.0**24)


def test_few_compressed_values_flush_to_zero_at_any_number_of_ranks():
    data = DataConfig(num_classes=10, image_size=32, resize_shorter=32)
    net = build_model(Config(data=data, model=ModelConfig(name='resnet18')), mx.cpu(), 0)
    images, labels = mx.nd.random.normal(shape=(8, 3, 32, 32)), mx.nd.arange(8)
    with mx.autograd.record():
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels).mean()
    loss.backward()
    params = net.collect_params().values()
    values = np.concatenate([p.grad().asnumpy().ravel() for p in params if p.grad_req != 'null'])
    values = values[values != 0]
    flushed = {n: np.mean((values * np.float32(fp16_scale(n))).astype(np.float16) == 0) for n in (2, 64, 1024, 4096)}
    assert max(flushed.values()) < 2e-5 and flushed[64] < 0.2 * np.mean(values.astype(np.float16) == 0), flushed
    assert np.mean((values / 1024).astype(np.float16) == 0) > 20 * flushed[1024]  # as 0.4.0 had it
    assert all(16 * n * fp16_scale(n) <= 65536 for n in flushed)
