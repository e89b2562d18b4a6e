"""float16: gradients keep their bits at any global batch, on any number of ranks."""
import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, DataConfig, ModelConfig, TrainConfig
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm import fp16_scale
from mlperf_rn50.train.loss_scale import GROWTH_STEPS, LossScale
from mlperf_rn50.train.plan import make_plan

LOCAL_BATCH, NUM_FEATURES, NUM_CLASSES = 64, 32, 10


def test_it_is_halved_on_overflow_once_for_all_steps_under_way():
    scale = LossScale(1024.0)
    for used, is_finite in [(1024, True), (1024, False), (1024, False), (1024, True), (512, False), (256, True)]:
        scale.read(used, is_finite)
    assert scale == LossScale(256.0, 1)


def test_it_is_doubled_when_it_held_for_long():
    scale = LossScale(1024.0)
    for _ in range(GROWTH_STEPS):
        scale.read(scale.value, True)
    assert scale == LossScale(2048.0, 0)
    scale.read(1024.0, False)  # of a step before
    assert scale == LossScale(512.0, 0)


def test_it_has_bounds():
    low, high = LossScale(1.0), LossScale(2.0**24, GROWTH_STEPS - 1)
    low.read(1.0, False)
    high.read(high.value, True)
    assert low.value == 1.0 and high.value == 2.0**24


def sum_in_float16(rows):
    """The sum of the ranks' gradients, two and two."""
    while len(rows) > 1:
        rows = rows[::2] + rows[1::2]
    return rows[0]


def gradients(images, errors, weight):
    """Gradients of a layer, (ranks, features, classes): all in float16, accumulated in float32 within a rank."""
    scaled = (errors * weight).astype(np.float16)
    ranks = (images.reshape(-1, LOCAL_BATCH, NUM_FEATURES), scaled.reshape(-1, LOCAL_BATCH, NUM_CLASSES))
    with np.errstate(over='ignore'):
        return np.einsum('rbf,rbc->rfc', *(a.astype(np.float32) for a in ranks)).astype(np.float16)


def error_of(got, expected):
    return np.linalg.norm(got.astype(float) - expected) / np.linalg.norm(expected)


@pytest.fixture(scope='module')
def errors():
    """By global batch: the relative error of a float16 gradient of backward and after a sum in float16, ours; and of
    backward with losses that shrink with the batch, as in 0.4.0."""
    random, found = np.random.default_rng(0), {}
    for batch in (256, 1024, 4096, 16384, 65536):
        images = random.normal(size=(batch, NUM_FEATURES)).astype(np.float16)
        # Late in a training most images are almost right: the errors of their logits are small, and cancel little.
        wrong = random.random((batch, NUM_CLASSES)) * 10 ** random.uniform(-7, -4, (batch, 1))
        exact = images.astype(float).T @ wrong / batch
        plan = make_plan(Config(train=TrainConfig(global_batch_size=batch)), batch // LOCAL_BATCH)
        scale = LossScale(TrainConfig.loss_scale)
        while True:
            used = scale.value
            ranks = gradients(images, wrong, used * plan.loss_weight)
            scale.read(used, bool(np.isfinite(sum_in_float16(ranks)).all()))
            if scale.value == used:
                break
        rescale, before = plan.rescale(0) / used, gradients(images, wrong, 1024 / batch)
        found[batch] = (error_of(ranks.sum(axis=0, dtype=float) * rescale, exact),
                        error_of(sum_in_float16(ranks).astype(float) * rescale, exact),
                        error_of(before.sum(axis=0, dtype=float) / 1024, exact))
    return found


def test_the_error_of_a_float16_gradient_does_not_grow_with_the_batch(errors):
    backward, summed, _ = zip(*errors.values())
    assert max(backward) < 5e-4 and max(backward) < 1.2 * backward[0], backward
    assert max(summed) < 1.5e-3, summed  # each doubling of the ranks rounds once more


def test_losses_that_shrink_with_the_batch_would_lose_it(errors):
    own, _, before = errors[65536]
    assert before > 20 * own and before > 10 * errors[256][2]


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
