"""The loss, and which device a rank takes."""
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, RunConfig, TrainConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train import start
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


@pytest.mark.parametrize('num_gpus, per_device, expected', [(4, 1, [0, 1, 2, 3]), (2, 2, [0, 0, 1, 1]),
                                                           (2, 3, [0, 0, 0, 1]), (1, 4, [0] * 4)])
def test_neighbouring_ranks_share_a_gpu(monkeypatch, num_gpus, per_device, expected):
    monkeypatch.setattr(mx.context, 'num_gpus', lambda: num_gpus)
    config = Config(train=TrainConfig(device='gpu'), run=RunConfig(ranks_per_device=per_device))
    ranks = [SimpleNamespace(local_rank=r, local_size=4) for r in range(4)]
    assert [start.device_id_of(config, r) for r in ranks] == expected


def test_too_few_gpus_are_named(monkeypatch):
    monkeypatch.setattr(mx.context, 'num_gpus', lambda: 2)
    with pytest.raises(ConfigError, match='got 1 with 4 ranks on a node of 2 GPUs, expected at least 2'):
        start.device_id_of(Config(train=TrainConfig(device='gpu')), SimpleNamespace(local_rank=2, local_size=4))


def test_no_gpu_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(mx.context, 'num_gpus', lambda: 0)
    with pytest.raises(ConfigError, match='MXNet sees none'):
        start.device_id_of(Config(train=TrainConfig(device='gpu')), SimpleNamespace(local_rank=0))
    assert start.device_id_of(Config(), SimpleNamespace(local_rank=0)) is None
