"""The loss, and which device a rank takes."""
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, TrainConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train import loop
from mlperf_rn50.train.trainer import SmoothedCrossEntropy


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_smoothed_cross_entropy_by_hand(smoothing):
    random = np.random.default_rng(0)
    logits, labels, weights = random.normal(size=(5, 7)), random.integers(0, 7, 5), random.random(5)
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(target * log_p).sum(axis=1) * weights
    got = SmoothedCrossEntropy(smoothing)(mx.nd.array(logits), mx.nd.array(labels, dtype='int32'), mx.nd.array(weights))
    np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5)


@pytest.mark.parametrize('num_gpus, expected', [(4, [0, 1, 2, 3, 0, 1]), (2, [0, 1, 0, 1, 0, 1]), (1, [0] * 6)])
def test_ranks_share_the_gpus_of_their_node(monkeypatch, num_gpus, expected):
    monkeypatch.setattr(mx.context, 'num_gpus', lambda: num_gpus)
    config = Config(train=TrainConfig(device='gpu'))
    assert [loop._device_id(config, SimpleNamespace(local_rank=r)) for r in range(6)] == expected


def test_no_gpu_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(mx.context, 'num_gpus', lambda: 0)
    with pytest.raises(ConfigError, match='MXNet sees none'):
        loop._device_id(Config(train=TrainConfig(device='gpu')), SimpleNamespace(local_rank=0))
    assert loop._device_id(Config(), SimpleNamespace(local_rank=0)) is None
