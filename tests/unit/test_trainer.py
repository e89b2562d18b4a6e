"""The loss, the step, and which device a rank takes."""
from dataclasses import replace
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from mlperf_rn50.data.pipeline import made_up_batches
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train import start
from mlperf_rn50.train.comm import LocalComm
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import SmoothedCrossEntropy, Trainer


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


def make_trainer(**train):
    """A small network for batches of 8 of 20 images: the third step of an epoch holds 4."""
    data = DataConfig(num_train=20, num_val=8, num_classes=3, image_size=32, resize_shorter=32, synthetic=True)
    config = Config(data=data, model=ModelConfig(name='resnet18'), train=TrainConfig(local_batch_size=8, **train))
    plan = make_plan(config, 1)
    return Trainer(plan, LocalComm(), 0, None), made_up_batches(config, plan.train_shard(), None)


def test_the_last_step_takes_the_share_of_the_rate_that_its_images_fill(monkeypatch):
    trainer, batches = make_trainer()
    taken = []
    monkeypatch.setattr(trainer.optimizer, 'step', lambda *a: taken.append(a))
    for step in (0, 2):
        trainer.step(batches, step, 0.4, False)
    assert taken == [(0.4, 1.0, 1.0, None), (0.4, 0.5, 2.0, None)]


def test_what_is_padded_weighs_nothing():
    trainer, batches = make_trainer()
    batch = next(batches)
    losses = [trainer.forward(replace(batch, num_valid=n)).asnumpy() for n in (8, 3)]
    np.testing.assert_allclose(losses[1][:3], losses[0][:3], rtol=1e-5)
    assert not losses[1][3:].any() and losses[0].all()


def test_the_loss_of_a_step_is_the_mean_over_its_images():
    trainer, batches = make_trainer()
    batch = replace(next(batches), num_valid=4)
    expected = trainer.forward(batch).asnumpy().sum() * 8 / 4
    loss, is_asked = trainer.read(trainer.step(iter([batch]), 2, 1e-9, True))
    assert loss == pytest.approx(expected, rel=1e-5) and is_asked


def test_a_warm_up_asks_for_nothing_where_none_is_wanted():
    trainer, _ = make_trainer()
    trainer.warm_up(iter(()), None, 0)
