"""Trainer: loss, steps, warm-up, running variances, and moving average of the network."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import address_of, json_table
from tiny import tiny_config, tiny_training

from mlperf_rn50.data.batches import eval_batches, synthetic_batches, train_batches
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.model.weights import set_weights
from mlperf_rn50.model.zoo import restore_model
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import check_finite
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.schedule import LossScale
from mlperf_rn50.train.trainer import Flags

pytestmark = pytest.mark.usefixtures('thin_resnets')


@pytest.fixture
def training(thin_resnets):
    """Trainer of a small network, and batches of 8 from 20 images, so the third step of an epoch
    has 4."""
    return tiny_training(tiny_config())


def values_of(arrays) -> dict[str, np.ndarray]:
    return {n: a if isinstance(a, np.ndarray) else a.asnumpy() for n, a in arrays.items()}


def part_of(arrays, start='', end='') -> dict[str, np.ndarray]:
    """Return the values of arrays with such names, by the rest of their names."""
    values = values_of(arrays).items()
    return {n.removeprefix(start): a for n, a in values if n.startswith(start) and n.endswith(end)}


def variances_of(arrays) -> dict[str, np.ndarray]:
    return {n.removeprefix('model/'): a for n, a in part_of(arrays, end='running_var').items()}


def current_weights(net) -> dict[str, np.ndarray]:
    return values_of({n: p.data() for n, p in net.collect_params().items()})


def assert_equal(got, expected, rtol=0.0, atol=0.0):
    got, expected = values_of(got), values_of(expected)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol, atol, err_msg=name)


def take_steps(training, first, last):
    trainer, batches = training
    for step in range(first, last):
        trainer.read(trainer.step(batches, step % trainer.plan.steps_per_epoch, 0.05))
        trainer.ema.update(step + 1)
    trainer.settle()


@pytest.mark.parametrize('precision', ['float32', 'float16'])
def test_broadcast_covers_a_checkpoint_with_arrays_that_share_no_memory(precision):
    """Horovod never ends an exchange of two views of one array."""
    sent = {}
    comm = SimpleNamespace(broadcast=sent.update)
    trainer, _ = tiny_training(tiny_config(precision=precision, ema=0.9), comm)
    trainer.broadcast()
    places = [(address_of(a), a.size * a.dtype().itemsize) for a in sent.values()]
    owned = [range(start, start + size) for start, size in sorted(places)]
    # views would be adjacent, unlike allocations
    assert all(a.stop < b.start for a, b in zip(owned, owned[1:]))
    for name, array in trainer.arrays().items():
        assert any(address_of(array) in memory for memory in owned), name


@pytest.mark.parametrize('device', ['cpu', 'gpu'])
def test_non_finite_array_is_found_at_evaluation(training, monkeypatch, device):
    trainer, _ = training
    take_steps(training, 0, 1)
    # the arrays stay where they are
    monkeypatch.setattr(trainer, 'context', SimpleNamespace(device_type=device))
    assert trainer.find_non_finite() is None
    check_finite(None, 3)
    name = next(n for n in trainer.array_shapes() if n.endswith('running_var'))
    before = trainer.digests()
    assert trainer.digests() == before
    trainer.arrays()[name][:1] = float('nan')
    assert trainer.find_non_finite() == name and trainer.digests() != before
    with pytest.raises(RunFailed, match=f'^{name} holds values that are not finite after epoch 4'):
        check_finite(name, 3)


def test_partial_last_step_has_the_mean_loss_of_its_images_and_a_scaled_rate(training):
    trainer, batches = training
    whole = next(batches)
    half = replace(whole, num_valid=4)
    losses, expected = (trainer.forward(b).asnumpy() for b in (whole, half))
    np.testing.assert_allclose(expected[:4], losses[:4], rtol=1e-5)
    assert not expected[4:].any() and losses.all()
    for flags in (Flags(stop=True), Flags(checkpoint=True), Flags(trace=True)):
        pending = trainer.step(iter([half]), 2, 1e-9, flags, with_norms=True)
        assert (pending.learning_rate, pending.norms.rescale) == (5e-10, 2)
        loss, received = trainer.read(pending)
        assert loss == pytest.approx(expected.sum() * 8 / 4, rel=1e-5) and received == flags
    assert Flags(stop=True) | Flags(trace=True) == Flags(True, False, True)
    assert trainer.step(batches, 0, 0.4).learning_rate == 0.4


def test_passes_of_a_step_and_of_a_warm_up_are_signs_of_life(thin_resnets):
    config = tiny_config(640)
    config = replace(config, train=replace(config.train, gradient_accumulation_steps=8))
    passes = []
    trainer, batches = tiny_training(config, on_pass=lambda: passes.append(1))
    trainer.read(trainer.step(batches, 0, 0.05))
    assert len(passes) == 6  # all but the two that may be ahead
    trainer.warm_up([batches], next(batches), 3)
    assert len(passes) == 6 + 3 * (6 + 1)


def test_warm_up_keeps_the_loss_scale_that_fits_and_restores_the_rest(training, monkeypatch):
    trainer, batches = training
    trainer.loss_scale, trainer.can_skip = LossScale(1024.0), True
    outcomes = [mx.nd.array([v]) for v in (0, 0, 1, 0, 1, 1)]
    monkeypatch.setattr(trainer.optimizer, 'all_finite', lambda: outcomes.pop(0))
    before = trainer.digests()
    trainer.warm_up([batches], next(batches), 3)
    assert trainer.loss_scale == LossScale(128.0, 0) and trainer.digests() == before
    assert not outcomes and trainer.optimizer.last_lr is None


def test_exchanges_of_a_step_do_not_grow_with_the_number_of_ranks(training, tmp_path):
    """They are the loss with the requests, and the gradients; times of ranks are gathered at
    evaluations only."""
    trainer, batches = training
    trainer.comm = comm = Mock(wraps=Comm(), rank=0, world_size=1000, threads=())
    times = RankTimes(comm, trainer.timer, {}, tmp_path / 'trace', None)
    comm.reset_mock()  # the start of the attempt
    for step in range(3):  # the timer marks the buckets of the second one
        trainer.read(trainer.step(batches, step, 0.01))
        times.find_trace_request()
        times.take_trace()
    of_a_step = ['sum_in_background', *['average_gradients'] * len(trainer.optimizer.buckets)]
    assert [name for name, *_ in comm.method_calls] == 3 * of_a_step
    assert comm.sum_in_background.call_args.args[0].size == 4


def record_inputs(net) -> set:
    """Return a set that collects shape, dtype and use of every input of a network."""
    seen = set()

    def record(_, inputs):
        seen.add((inputs[0].shape, inputs[0].dtype, mx.autograd.is_recording()))

    net.register_forward_pre_hook(record)
    return seen


@pytest.mark.parametrize(
    'train',
    [
        {'local_batch_size': 4, 'gradient_accumulation_steps': 2},
        {'local_batch_size': None, 'global_batch_size': 6, 'eval_batch_size': 100},
    ],
    ids=str,
)
def test_warm_up_covers_every_shape_of_the_run(train):
    """Use 19 and 9 images, so that the last batches are partial."""
    config = tiny_config(19, {'num_val': 9}, **train)
    trainer, batches = tiny_training(config)
    plan = trainer.plan
    nets = trainer.net, trainer.folded.net
    warmed = [record_inputs(net) for net in nets]
    trainer.warm_up([batches], next(synthetic_batches(config, plan.eval_shard(), None)), 1)
    before = [set(shapes) for shapes in warmed]
    used = [record_inputs(net) for net in nets]
    batches = train_batches(config, plan.train_shard(), 0, 0, None)
    take_steps((trainer, batches), 0, plan.steps_per_epoch)
    with trainer.evaluating() as net:
        evaluate(net, eval_batches(config, plan.eval_shard(), None)(), 9, Comm())
    assert used == before and before[0] != before[1]


# --- running variances


def follow_variances(net, momentum):
    """Return a dict that follows PyTorch's rule in float64 as the network is trained."""
    params = net.collect_params('.*running_var')
    expected = {n: np.ones(p.shape) for n, p in params.items()}

    def follow(layer, inputs):
        if mx.autograd.is_training():
            values = inputs[0].asnumpy().astype(float)
            num_values = values[:, 0].size
            variance = values.var(axis=(0, 2, 3), ddof=min(1, num_values - 1))
            name = layer.running_var.name
            expected[name] = momentum * expected[name] + (1 - momentum) * variance

    net.hybridize(False)  # otherwise hooks of its layers would not be called
    net.apply(
        lambda layer: hasattr(layer, 'running_var') and layer.register_forward_pre_hook(follow)
    )
    return expected


@pytest.mark.parametrize(
    'num_images, model, num_passes',
    json_table("""
20 | {} | 1
20 | {"fused_bn_relu": true} | 1
20 | {"bn_momentum": 0.5} | 2
1  | {} | 1
2  | {} | 1
"""),
    ids=str,
)
def test_running_variances_follow_the_unbiased_rule(num_images, model, num_passes):
    """An epoch ends with a partly filled step; with one image, the last maps have one value per
    channel."""
    config = tiny_config(num_images, model=model, gradient_accumulation_steps=num_passes)
    training = trainer, batches = tiny_training(config)
    expected = follow_variances(trainer.net, config.model.bn_momentum)
    take_steps(training, 0, 3)
    stored = trainer.copy_network()
    for arrays in (stored, trainer.snapshot()):
        assert_equal(variances_of(arrays), expected, rtol=2e-5, atol=1e-9)
    plain = restore_model(config, mx.cpu(), values_of(stored), '')
    images = next(batches).images
    with trainer.evaluating() as net:
        got = net(images).asnumpy()
    np.testing.assert_allclose(got, plain(images).asnumpy(), rtol=1e-3, atol=1e-4)


def test_network_that_is_not_folded_is_evaluated_with_the_stored_variances():
    training = trainer, _ = tiny_training(tiny_config(2))
    trainer.folded = None
    take_steps(training, 0, 1)
    stored, kept = variances_of(trainer.copy_network()), variances_of(trainer.arrays())
    with trainer.evaluating() as net:
        assert_equal(variances_of(current_weights(net)), stored)
    assert_equal(variances_of(trainer.arrays()), kept)
    assert all((values != kept[name]).any() for name, values in stored.items())


def test_restored_variances_keep_their_values_at_another_batch(training):
    trainer, _ = training
    take_steps(training, 0, 1)
    # float32 as in a checkpoint of an earlier version
    saved = {n: a.astype(np.float32) for n, a in trainer.snapshot().items()}
    other, _ = tiny_training(tiny_config(2))
    other.load_state(TrainerState(saved))
    assert_equal(variances_of(other.snapshot()), variances_of(saved), rtol=1e-6)
    loaded = part_of(saved, 'model/')
    set_weights(other.net, other.from_unbiased(loaded))
    assert_equal(variances_of(other.copy_network()), variances_of(loaded), rtol=1e-6)


# --- moving average of the network


@pytest.fixture
def averaging(thin_resnets):
    return tiny_training(tiny_config(ema=0.9))


def test_average_is_evaluated_and_saved_and_training_continues_to_the_bit(training, averaging):
    trainer, batches = averaging
    for each in (averaging, training):
        take_steps(each, 0, 6)
    before, saved = values_of(trainer.arrays()), values_of(trainer.copy_network())
    images = next(batches).images
    with trainer.evaluating() as net:
        averaged = net(images).asnumpy()
        assert_equal(current_weights(trainer.net), saved)
    assert_equal(trainer.arrays(), before)
    with training[0].evaluating() as net:
        assert np.abs(net(images).asnumpy() - averaged).max() > 1e-4
    np.testing.assert_array_equal(saved['fc1_weight'], before['ema/fc1_weight'])
    # neither average nor evaluation changes the training
    for each in (averaging, training):
        take_steps(each, 6, 9)
    trained = {n: a for n, a in trainer.arrays().items() if not n.startswith('ema/')}
    assert_equal(trained, training[0].arrays())


def test_checkpoint_restores_network_and_average_to_the_bit(averaging):
    trainer, _ = averaging
    take_steps(averaging, 0, 3)
    state = trainer.state()
    assert part_of(state.arrays, 'ema/').keys() == current_weights(trainer.net).keys()
    assert trainer.array_shapes().keys() == state.arrays.keys() and state.last_lr == 0.05
    take_steps(averaging, 3, 7)
    restored = other, _ = tiny_training(tiny_config(ema=0.9))
    other.load_state(TrainerState(dict(state.arrays), state.last_lr))
    take_steps(restored, 3, 7)
    assert_equal(other.arrays(), trainer.arrays())
    assert other.digests() == trainer.digests()


def test_agreement_check_and_averages_over_ranks_cover_the_average(averaging):
    trainer, _ = averaging
    take_steps(averaging, 0, 1)
    before, averaged = trainer.digests(), []
    trainer.comm = SimpleNamespace(average=averaged.extend)
    trainer.average_statistics()
    name, array = next(i for i in trainer.ema.arrays.items() if i[0].endswith('running_var'))
    assert any(a is array for a in averaged) and len(averaged) == 2 * len(trainer.statistics)
    array[:1] = 5
    assert {n for n, d in trainer.digests().items() if d != before[n]} == {name}


def test_float16_weights_are_averaged_in_float32():
    trainer, _ = tiny_training(tiny_config(ema=0.9, precision='float16'))
    weight = next(t for t in trainer.optimizer.tensors if t.master is not None)
    weight.master[:] = 1 + 2.0**-20
    trainer.ema.update(1)
    assert (trainer.ema.arrays[f'ema/{weight.name}'].asnumpy() == np.float32(1 + 2.0**-20)).all()
    assert trainer.copy_network()[weight.name].dtype == np.float16
