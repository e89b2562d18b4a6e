"""Exponential moving average of a network."""

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import synthetic_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.training import PERIOD, MovingAverage
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer


@pytest.mark.parametrize('decay', [0.0, 0.9, 0.9999])
def test_average_weights_values_by_their_age_and_not_the_initial_one(decay):
    values = np.random.default_rng(0).normal(size=40)
    source = mx.nd.array([99.0])
    average, taken = MovingAverage(decay, {'w': source}), []
    for step, value in enumerate(values, start=1):
        source[:] = value
        average.update(step)
        taken += [value] * (step % PERIOD == 1)
        weights = decay ** (PERIOD * np.arange(len(taken))[::-1])
        assert average.arrays['w'].asscalar() == pytest.approx(
            (weights * taken).sum() / weights.sum(), abs=1e-5
        )


def test_no_decay_averages_nothing():
    assert MovingAverage(None, {'w': mx.nd.ones((1,))}).arrays == {}


def make_trainer(decay=0.9, precision='float32'):
    data = DataConfig(
        num_train=40, num_val=8, num_classes=3, image_size=16, resize_shorter=16, synthetic=True
    )
    config = Config(
        data=data,
        model=ModelConfig(name='resnet18'),
        train=TrainConfig(local_batch_size=8, ema=decay, precision=precision),
    )
    plan = make_plan(config, 1)
    return Trainer(plan, Comm(), 0, None), synthetic_batches(config, plan.train_shard(), None)


def take_steps(trainer, batches, first, last):
    for step in range(first, last):
        trainer.read(trainer.step(batches, step % 5, 0.05))
        trainer.ema.update(step + 1)
    trainer.settle()


def values_of(arrays):
    return {n: a if isinstance(a, np.ndarray) else a.asnumpy() for n, a in arrays.items()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_average_is_evaluated_and_saved_and_training_continues_to_the_bit(thin_resnets):
    trainer, batches = make_trainer()
    plain, others = make_trainer(None)
    for t, b in ((trainer, batches), (plain, others)):
        take_steps(t, b, 0, 6)
    before = values_of(trainer._live_arrays())
    saved = values_of(trainer.copy_network())
    images = next(batches).images
    with trainer.evaluating() as net:
        averaged = net(images).asnumpy()
        assert_equal(
            {n: p.data().asnumpy() for n, p in trainer.net.collect_params().items()}, saved
        )
    assert_equal(values_of(trainer._live_arrays()), before)
    with plain.evaluating() as net:
        assert np.abs(net(images).asnumpy() - averaged).max() > 1e-4
    name = 'fc1_weight'
    np.testing.assert_array_equal(saved[name], before[f'ema/{name}'])
    assert (saved[name] != before[f'model/{name}']).any()
    # neither average nor evaluation changes the training
    for t, b in ((trainer, batches), (plain, others)):
        take_steps(t, b, 6, 9)
    after = values_of(trainer._live_arrays())
    assert_equal(
        {n: a for n, a in after.items() if not n.startswith('ema/')},
        values_of(plain._live_arrays()),
    )


def test_checkpoint_restores_network_and_average_to_the_bit(thin_resnets):
    trainer, batches = make_trainer()
    take_steps(trainer, batches, 0, 3)
    state = trainer.state()
    assert {n for n in state.arrays if n.startswith('ema/')} == {
        f'ema/{n}' for n in trainer.net.collect_params()
    } and trainer.array_shapes().keys() == state.arrays.keys()
    take_steps(trainer, batches, 3, 7)
    other, others = make_trainer()
    other.load_state(TrainerState(dict(state.arrays), state.last_lr))
    take_steps(other, others, 3, 7)
    assert_equal(values_of(other._live_arrays()), values_of(trainer._live_arrays()))
    assert other.digests() == trainer.digests()


def test_agreement_check_and_exchanges_cover_the_average(thin_resnets):
    trainer, batches = make_trainer()
    take_steps(trainer, batches, 0, 1)
    name = next(n for n in trainer.ema.arrays if n.endswith('running_var'))
    sent, averaged, before = [], [], trainer.digests()
    trainer._comm = replace_comm(sent, averaged)
    trainer.broadcast()
    trainer.average_statistics()
    assert any(a is trainer.ema.arrays[name] for a in averaged) and len(averaged) == 2 * len(
        trainer._statistics
    )
    assert {id(a) for a in trainer.ema.arrays.values()} <= {id(a) for a in sent}
    trainer.ema.arrays[name][:1] = 5
    assert {n for n, d in trainer.digests().items() if d != before[n]} == {name}


def replace_comm(sent, averaged):
    comm = Comm()
    comm.broadcast, comm.average = lambda arrays: sent.extend(arrays.values()), averaged.extend
    return comm


def test_float16_weights_are_averaged_in_float32(thin_resnets):
    trainer, _ = make_trainer(precision='float16')
    weight = next(t for t in trainer.optimizer.tensors if t.master is not None)
    weight.master[:] = 1 + 2.0**-20
    trainer.ema.update(1)
    assert (trainer.ema.arrays[f'ema/{weight.name}'].asnumpy() == np.float32(1 + 2.0**-20)).all()
    assert trainer.copy_network()[weight.name].dtype == np.float16
