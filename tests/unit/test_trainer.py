"""Trainer: loss, steps, reproducibility notes, warm-up."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import ROOT, address_of, run

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import eval_batches, synthetic_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.training import SmoothedCrossEntropy
from mlperf_rn50.model.weights import set_weights
from mlperf_rn50.model.zoo import restore_model
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.train.build import DETERMINISM, device_notes
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import check_finite
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.schedule import LossScale
from mlperf_rn50.train.trainer import Flags, Trainer

ENFORCED, AUTOTUNE = 'MXNET_ENFORCE_DETERMINISM', 'MXNET_CUDNN_AUTOTUNE_DEFAULT'
GPU = Config(model=ModelConfig(layout='NCHW'), train=TrainConfig(local_batch_size=4, device='gpu'))


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_smoothed_cross_entropy_matches_reference(smoothing):
    random = np.random.default_rng(0)
    logits, labels, weights = random.normal(size=(5, 7)), random.integers(0, 7, 5), random.random(5)
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(target * log_p).sum(axis=1) * weights
    got = SmoothedCrossEntropy(smoothing)(
        mx.nd.array(logits), mx.nd.array(labels, dtype='int32'), mx.nd.array(weights)
    )
    np.testing.assert_allclose(got.asnumpy(), expected, rtol=1e-5)


@pytest.fixture
def small_training(thin_resnets):
    """Trainer of a small network, and batches of 8 from 20 images, so the third step of an epoch
    has 4."""
    return make_normed()[:2]


def memory_of(array) -> range:
    """Return the addresses of an array."""
    return range(start := address_of(array), start + array.size * array.dtype().itemsize)


@pytest.mark.parametrize('precision', ['float32', 'float16'])
def test_broadcast_covers_a_checkpoint_with_arrays_that_share_no_memory(small_training, precision):
    """Horovod never ends an exchange of two views of one array."""
    config = small_training[0]._plan.config
    config = replace(config, train=replace(config.train, precision=precision))
    sent = []
    comm = SimpleNamespace(broadcast=lambda arrays: sent.extend(arrays.values()))
    trainer = Trainer(make_plan(config, 1), comm, 0, None)
    trainer.broadcast()
    owned = sorted(map(memory_of, sent), key=lambda r: r.start)
    # views would be adjacent, unlike allocations
    assert all(a.stop < b.start for a, b in zip(owned, owned[1:]))
    for name, array in trainer._live_arrays().items():
        part = memory_of(array)
        assert any(part.start in r and part[-1] in r for r in owned), name


def test_learning_rate_of_partial_last_step_is_scaled_by_its_images(small_training, monkeypatch):
    trainer, batches = small_training
    taken = []
    update = trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, 'step', lambda *a: taken.append(a) or update(*a))
    assert [trainer.step(batches, step, 0.4).learning_rate for step in (0, 2)] == [0.4, 0.2]
    assert taken == [(0.4, 1.0, 1.0, None), (0.4, 0.5, 2.0, None)]


@pytest.mark.parametrize('device', ['cpu', 'gpu'])
def test_non_finite_array_is_found_at_evaluation(small_training, monkeypatch, device):
    trainer, batches = small_training
    trainer.read(trainer.step(batches, 0, 0.01))
    # the arrays stay where they are
    monkeypatch.setattr(trainer, 'context', SimpleNamespace(device_type=device))
    assert trainer.find_non_finite() is None
    check_finite(None, 3)
    name, before = (
        next(n for n in trainer.array_shapes() if n.endswith('running_var')),
        trainer.digests(),
    )
    assert trainer.digests() == before
    trainer._live_arrays()[name][:1] = float('nan')
    assert trainer.find_non_finite() == name and trainer.digests() != before
    with pytest.raises(RunFailed, match=f'^{name} holds values that are not finite after epoch 4'):
        check_finite(name, 3)


def test_padding_does_not_contribute_to_loss(small_training):
    trainer, batches = small_training
    batch = next(batches)
    losses = [trainer.forward(replace(batch, num_valid=n)).asnumpy() for n in (8, 3)]
    np.testing.assert_allclose(losses[1][:3], losses[0][:3], rtol=1e-5)
    assert not losses[1][3:].any() and losses[0].all()


def test_results_of_step_are_mean_loss_over_its_images_and_flags(small_training):
    trainer, batches = small_training
    batch = replace(next(batches), num_valid=4)
    expected = trainer.forward(batch).asnumpy().sum() * 8 / 4
    for flags in (Flags(stop=True), Flags(checkpoint=True), Flags(trace=True)):
        loss, received = trainer.read(trainer.step(iter([batch]), 2, 1e-9, flags))
        assert loss == pytest.approx(expected, rel=1e-5) and received == flags


def test_warm_up_keeps_the_loss_scale_that_fits_and_restores_the_rest(small_training, monkeypatch):
    trainer, batches = small_training
    trainer.loss_scale, trainer.optimizer.last_lr, trainer._can_skip = LossScale(1024.0), None, True
    outcomes = [mx.nd.array([v]) for v in (0, 0, 1, 0, 1, 1)]
    monkeypatch.setattr(trainer.optimizer, 'all_finite', lambda: outcomes.pop(0))
    monkeypatch.setattr(trainer.optimizer, 'step', lambda *_: None)
    before = trainer.digests()
    trainer.warm_up([batches], next(batches), 3)
    assert (
        trainer.loss_scale == LossScale(128.0, 0) and trainer.digests() == before and not outcomes
    )


@pytest.mark.parametrize('num_ranks', [2, 1000])
def test_exchanges_of_a_step_do_not_grow_with_the_number_of_ranks(
    small_training, tmp_path, num_ranks
):
    """They are the loss with the requests, and the gradients; times of ranks are gathered at
    evaluations only."""
    trainer, batches = small_training
    trainer._comm = comm = Mock(wraps=Comm(), rank=0, world_size=num_ranks, threads=())
    times = RankTimes(comm, trainer.timer, {}, RunFolder(tmp_path, 0), None)
    comm.reset_mock()  # the start of the attempt
    for step in range(3):  # the timer marks the buckets of the second one
        trainer.read(trainer.step(batches, step, 0.01))
        times.find_request()
        times.trace()
    sizes = [
        (name, sum(a.size for a in (args if name == 'sum_in_background' else args[0])))
        for name, args, _ in comm.method_calls
    ]
    gradients = [
        ('average_gradients', sum(g.size for g in b.grads)) for b in trainer.optimizer.buckets
    ]
    assert sizes == [('sum_in_background', 4), *gradients] * 3


# --- running variances
# -----------------------------------------------------------------------------------------


def make_normed(num_images=20, num_passes=1, momentum=0.9, **model):
    data = DataConfig(
        num_train=num_images,
        num_val=8,
        num_classes=3,
        image_size=16,
        resize_shorter=16,
        synthetic=True,
    )
    train = TrainConfig(local_batch_size=min(8, num_images), gradient_accumulation_steps=num_passes)
    config = Config(
        data=data, model=ModelConfig(name='resnet18', bn_momentum=momentum, **model), train=train
    )
    plan = make_plan(config, 1)
    return (
        Trainer(plan, Comm(), 0, None),
        synthetic_batches(config, plan.train_shard(), None),
        config,
    )


def variances_of(arrays):
    return {
        n.removeprefix('model/'): a if isinstance(a, np.ndarray) else a.asnumpy()
        for n, a in arrays.items()
        if n.endswith('running_var')
    }


def follow_variances(net, momentum=0.9):
    """Return a dict that follows PyTorch's rule in float64 as the network is trained."""
    expected = {
        n: np.ones(p.shape) for n, p in net.collect_params().items() if n.endswith('running_var')
    }

    def follow(layer, inputs):
        if mx.autograd.is_training():
            values = (
                inputs[0].asnumpy().astype(float).swapaxes(0, 1).reshape(inputs[0].shape[1], -1)
            )
            variance = values.var(axis=1, ddof=min(1, values.shape[1] - 1))
            name = layer.running_var.name
            expected[name] = momentum * expected[name] + (1 - momentum) * variance

    net.hybridize(False)  # otherwise hooks of its layers would not be called
    net.apply(
        lambda layer: hasattr(layer, 'running_var') and layer.register_forward_pre_hook(follow)
    )
    return expected


@pytest.mark.parametrize(
    'kind',
    [
        {},
        {'fused_bn_relu': True},
        {'num_passes': 2, 'momentum': 0.5},
        {'num_images': 1},
        {'num_images': 2},
    ],
    ids=str,
)
def test_running_variances_follow_the_unbiased_rule(thin_resnets, kind):
    """An epoch ends with a partly filled step; with one image, the last maps have one value per
    channel."""
    trainer, batches, config = make_normed(**kind)
    num_steps = make_plan(config, 1).steps_per_epoch
    expected = follow_variances(trainer.net, config.model.bn_momentum)
    for step in range(3):
        trainer.read(trainer.step(batches, step % num_steps, 0.01))
    stored = trainer.copy_network()
    for arrays in (stored, trainer.snapshot()):
        variances = variances_of(arrays)
        assert variances.keys() == expected.keys()
        for name, values in variances.items():
            np.testing.assert_allclose(values, expected[name], rtol=2e-5, atol=1e-9, err_msg=name)
    plain = restore_model(config, mx.cpu(), {n: a.asnumpy() for n, a in stored.items()}, '')
    images = next(batches).images
    with trainer.evaluating() as net:
        np.testing.assert_allclose(
            net(images).asnumpy(), plain(images).asnumpy(), rtol=1e-3, atol=1e-4
        )


def test_network_that_is_not_folded_is_evaluated_with_the_stored_variances(thin_resnets):
    trainer, batches, config = make_normed(num_images=2)
    trainer._folded = None
    trainer.read(trainer.step(batches, 0, 0.01))
    stored, kept = variances_of(trainer.copy_network()), variances_of(trainer._live_arrays())
    with trainer.evaluating() as net:
        used = variances_of({n: p.data() for n, p in net.collect_params().items()})
    after = variances_of(trainer._live_arrays())
    for name, values in stored.items():
        assert (
            (used[name] == values).all()
            and (after[name] == kept[name]).all()
            and (values != kept[name]).any()
        )


def test_restored_variances_continue_to_the_bit_and_keep_their_values_at_another_batch(
    thin_resnets,
):
    trainer, batches, _ = make_normed()
    trainer.read(trainer.step(batches, 0, 0.01))
    before, saved = variances_of(trainer._live_arrays()), trainer.snapshot()
    trainer.step(batches, 1, 0.01)
    trainer.load_state(TrainerState(saved))
    for name, values in variances_of(trainer._live_arrays()).items():
        assert (values == before[name]).all(), name
    other, *_ = make_normed(num_images=2)
    # as in a checkpoint of an earlier version
    older = {n: a.astype(np.float32) for n, a in saved.items()}
    other.load_state(TrainerState(older))
    for name, values in variances_of(other.snapshot()).items():
        np.testing.assert_allclose(values, variances_of(saved)[name], rtol=1e-6)
    loaded = {n.removeprefix('model/'): a for n, a in older.items() if n.startswith('model/')}
    set_weights(other.net, other.corrected(loaded, -1))
    for name, values in variances_of(other.copy_network()).items():
        np.testing.assert_allclose(values, loaded[name], rtol=1e-6)


@pytest.mark.parametrize('policy, is_checked', [('dynamic', True), ('static', False)])
def test_static_scale_neither_checks_nor_skips_steps(
    small_training, monkeypatch, policy, is_checked
):
    config = small_training[0]._plan.config
    train = replace(config.train, precision='float16', loss_scale=512.0, loss_scale_policy=policy)
    trainer, checks, skips = (
        Trainer(make_plan(replace(config, train=train), 1), Comm(), 0, None),
        [],
        [],
    )
    monkeypatch.setattr(
        trainer.optimizer, 'all_finite', lambda: checks.append(mx.nd.zeros((1,))) or checks[-1]
    )
    monkeypatch.setattr(trainer.optimizer, 'step', lambda *arguments: skips.append(arguments[3]))
    pending = trainer.update(trainer.exchange(mx.nd.zeros((1,)), 0), 0, 0.1)
    trainer.read(pending)
    assert skips == [checks[0] if is_checked else None] and len(checks) == is_checked
    assert trainer.loss_scale.value == (256.0 if is_checked else 512.0)


# Reads the parameters of a small graph in the main and a saver thread, and prints how many threads
# were started.
COUNT_THREADS = """import os
import mxnet as mx
from mlperf_rn50.system.processor import leave_openmp_to_engine
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
leave_openmp_to_engine()
net = mx.gluon.nn.Conv2D(16, 3, in_channels=16, layout='NCHW')
net.initialize()
net.hybridize(static_alloc=True)
net(mx.nd.ones((4, 16, 32, 32))).wait_to_read()
read = lambda: [p.data().asnumpy() for p in net.collect_params().values()]
saver = BackgroundWriter()
saver.submit(os.getpid)
saver.finish()
before = len(os.listdir('/proc/self/task'))
read()
saver.submit(read)
saver.finish()
print(len(os.listdir('/proc/self/task')) - before)
"""


def test_reading_weights_starts_no_threads():
    environ = {**os.environ, 'OMP_NUM_THREADS': '2', 'PYTHONPATH': str(ROOT)}
    done = run([sys.executable, '-c', COUNT_THREADS], cwd=ROOT, env=environ)
    assert done.stdout.split() == ['0'], done.stderr


@pytest.mark.parametrize(
    'environ, missing',
    [
        ({}, f'{ENFORCED}=1 and {AUTOTUNE}=0'),
        ({ENFORCED: '1', AUTOTUNE: '1'}, f'{AUTOTUNE}=0'),
        (DETERMINISM, None),
    ],
)
def test_gpu_note_on_reproducibility_depends_on_environment(environ, missing):
    fused, *note = device_notes(GPU, environ)
    assert fused == 'layout NCHW; fused operators: none'
    assert note == (
        []
        if missing is None
        else [f'results are not reproducible to the bit; on a GPU this requires {missing}']
    )
    [layers] = device_notes(replace(GPU, train=TrainConfig(local_batch_size=4)), environ)
    assert 'float32: layout NCHW; fused operators: ' in layers


def record_inputs(net) -> set:
    """Return a set that collects (shape, dtype, is_recording) of every input of a network."""
    seen = set()
    net.register_forward_pre_hook(
        lambda block, inputs: seen.add(
            (inputs[0].shape, inputs[0].dtype, mx.autograd.is_recording())
        )
    )
    return seen


@pytest.mark.parametrize(
    'train',
    [
        {'local_batch_size': 4, 'gradient_accumulation_steps': 2},
        {'global_batch_size': 6, 'eval_batch_size': 100},
    ],
    ids=str,
)
def test_warm_up_covers_every_shape_of_the_run(thin_resnets, train):
    """Use 19 and 9 images, so that the last batches are partial."""
    data = DataConfig(
        num_train=19, num_val=9, num_classes=3, image_size=16, resize_shorter=16, synthetic=True
    )
    config = Config(data=data, model=ModelConfig(name='resnet18'), train=TrainConfig(**train))
    plan, comm = make_plan(config, 1), Comm()
    trainer = Trainer(plan, comm, 0, None)
    trained, evaluated = record_inputs(trainer.net), record_inputs(trainer._folded.net)
    trainer.warm_up(
        [synthetic_batches(config, plan.train_shard(), None)],
        next(synthetic_batches(config, plan.eval_shard(), None)),
        1,
    )
    in_warm_up = set(trained), set(evaluated)
    assert all(in_warm_up) and in_warm_up[0] != in_warm_up[1]
    trained.clear(), evaluated.clear()
    batches = train_batches(config, plan.train_shard(), 0, 0, None)
    for step in range(plan.steps_per_epoch):
        trainer.read(trainer.step(batches, step, 0.01))
    with trainer.evaluating() as net:
        evaluate(net, eval_batches(config, plan.eval_shard(), None)(), data.num_val, comm)
    assert (trained, evaluated) == in_warm_up
