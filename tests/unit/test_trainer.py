"""The loss and the step."""
import os
import sys
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from helpers import ROOT, run

from mlperf_rn50.config import Config, DataConfig, ModelConfig, TrainConfig
from mlperf_rn50.data.pipeline import made_up_batches
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train.agreement import check_finite
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


@pytest.fixture
def made(thin_resnets):
    """The trainer of a small network, and batches of 8 of 20 images: the third step of an epoch holds 4."""
    data = DataConfig(num_train=20, num_val=8, num_classes=3, image_size=16, resize_shorter=16, synthetic=True)
    config = Config(data=data, model=ModelConfig(name='resnet18'), train=TrainConfig(local_batch_size=8))
    plan = make_plan(config, 1)
    return Trainer(plan, LocalComm(), 0, None), made_up_batches(config, plan.train_shard(), None)


def test_the_last_step_takes_the_share_of_the_rate_that_its_images_fill(made, monkeypatch):
    trainer, batches = made
    taken = []
    monkeypatch.setattr(trainer.optimizer, 'step', lambda *a: taken.append(a))
    for step in (0, 2):
        trainer.step(batches, step, 0.4, False)
    assert taken == [(0.4, 1.0, 1.0, None), (0.4, 0.5, 2.0, None)]


def test_an_array_that_is_not_finite_is_found_at_an_evaluation(made):
    trainer, _ = made
    assert trainer.find_non_finite() is None
    check_finite(None, 3)
    name = next(n for n in trainer.digests() if n.endswith('running_var'))
    trainer._live_arrays()[name][:1] = float('nan')
    assert trainer.find_non_finite() == name
    with pytest.raises(RunFailed, match=f'^{name} holds values that are not finite after epoch 4'):
        check_finite(name, 3)


def test_what_is_padded_weighs_nothing(made):
    trainer, batches = made
    batch = next(batches)
    losses = [trainer.forward(replace(batch, num_valid=n)).asnumpy() for n in (8, 3)]
    np.testing.assert_allclose(losses[1][:3], losses[0][:3], rtol=1e-5)
    assert not losses[1][3:].any() and losses[0].all()


def test_the_loss_of_a_step_is_the_mean_over_its_images(made):
    trainer, batches = made
    batch = replace(next(batches), num_valid=4)
    expected = trainer.forward(batch).asnumpy().sum() * 8 / 4
    loss, is_asked = trainer.read(trainer.step(iter([batch]), 2, 1e-9, True))
    assert loss == pytest.approx(expected, rel=1e-5) and is_asked


# A small graph, then reads of its parameters here and in the thread of a saver; threads that each read starts.
TEAMS = '''import os
import mxnet as mx
from mlperf_rn50.system.topology import leave_openmp_to_engine
from mlperf_rn50.train.saver import Saver
leave_openmp_to_engine()
net = mx.gluon.nn.Conv2D(16, 3, in_channels=16, layout='NCHW')
net.initialize()
net.hybridize(static_alloc=True)
net(mx.nd.ones((4, 16, 32, 32))).wait_to_read()
read = lambda: [p.data().asnumpy() for p in net.collect_params().values()]
saver = Saver()
saver.submit(os.getpid)
saver.finish()
before = len(os.listdir('/proc/self/task'))
read()
saver.submit(read)
saver.finish()
print(len(os.listdir('/proc/self/task')) - before)
'''


def test_reading_weights_starts_no_threads():
    done = run([sys.executable, '-c', TEAMS], cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '2',
                                                             'PYTHONPATH': str(ROOT)})
    assert done.stdout.split() == ['0'], done.stderr
