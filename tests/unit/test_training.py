"""Loss and moving average of a network in training."""

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.model.training import PERIOD, MovingAverage, SmoothedCrossEntropy


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_smoothed_cross_entropy_matches_reference(smoothing):
    random = np.random.default_rng(0)
    logits, labels, weights = random.normal(size=(5, 7)), random.integers(0, 7, 5), random.random(5)
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(target * log_p).sum(axis=1) * weights
    arrays = mx.nd.array(logits), mx.nd.array(labels, dtype='int32'), mx.nd.array(weights)
    np.testing.assert_allclose(SmoothedCrossEntropy(smoothing)(*arrays).asnumpy(), expected, 1e-5)


@pytest.mark.parametrize('decay', [0.0, 0.9, 0.9999])
def test_average_weights_values_by_their_age_and_not_the_initial_one(decay):
    source, taken = mx.nd.array([99.0]), []
    average = MovingAverage(decay, {'w': source})
    for step, value in enumerate(np.random.default_rng(0).normal(size=40), start=1):
        source[:] = value
        average.update(step)
        taken += [value] * (step % PERIOD == 1)
        weights = decay ** (PERIOD * np.arange(len(taken))[::-1])
        expected = (weights * taken).sum() / weights.sum()
        assert average.arrays['w'].asscalar() == pytest.approx(expected, abs=1e-5)


def test_no_decay_averages_nothing():
    assert MovingAverage(None, {'w': mx.nd.ones((1,))}).arrays == {}
