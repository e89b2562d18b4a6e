"""Training step, evaluation network and grouped optimizer updates, against the CPU."""

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from gpu.compare import (
    STEP_TOLERANCE,
    compare_steps,
    distance,
    make_batch,
    make_trainer,
    set_weights,
    step_config,
    weights_of,
)
from gpu.conftest import IS_DRY
from unit.test_optimizer import arrays_of, reference

from mlperf_rn50.model.fused import PLAIN, fusion_of, with_layout
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.system.processor import find_processor
from mlperf_rn50.train.comm.rank_checks import device_digests
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.options import OptimizerConfig


def test_compared_networks_have_no_operators_of_cpus_only():
    """A CPU with AVX-512 selects a fused operator that MXNet lacks on a GPU."""
    processor = replace(find_processor(), uses='AVX-512')
    assert fusion_of(step_config('resnet18', 'NCHW', 'float32', 'sgd'), processor).norm_relu is None


@pytest.mark.parametrize('optimizer', ['sgd', 'lars'])
@pytest.mark.parametrize('layout', ['NCHW', 'NHWC'])
@pytest.mark.parametrize('precision', ['float32', 'float16'])
@pytest.mark.parametrize('name', ['resnet18', 'resnet50'])
def test_two_steps_match_cpu(name, precision, layout, optimizer, device_id, check_distances):
    distances = compare_steps(step_config(name, layout, precision, optimizer), device_id)
    check_distances(
        f'{name}, {precision}, {layout}, {optimizer}', distances, STEP_TOLERANCE[precision]
    )


def test_two_fused_steps_match_cpu(device_id, check_distances):
    config = step_config('resnet50', 'NHWC', 'float16', 'lars', device='gpu')
    if (fusion := fusion_of(config, find_processor())) == PLAIN:
        pytest.skip('this MXNet lacks fused operators')
    check_distances(str(fusion), compare_steps(config, device_id), STEP_TOLERANCE['float16'])


def test_overflow_changes_no_bit_and_halves_the_scale(device_id):
    config = with_layout(
        step_config('resnet18' if IS_DRY else 'resnet50', None, 'float16', 'lars', device='gpu')
    )
    trainer = make_trainer(config, device_id)
    for scale in (2.0**24, 128.0):
        trainer.loss_scale.value = scale
        before = {n: a.asnumpy() for n, a in trainer.optimizer.owners().items()}
        if IS_DRY:  # a CPU has no float16 step, only its update
            for tensor in trainer.optimizer.tensors:
                tensor.grad[:] = 0.01 if scale == 128 else np.inf
            pending = trainer.update(mx.nd.zeros((3,)), 0, 0.05)
        else:
            pending = trainer.step(iter([make_batch(config, 'float16', device_id)]), 0, 0.05)
        trainer.read(pending)
        now = trainer.optimizer.owners()
        is_same = all((a.asnumpy() == before[n]).all() for n, a in now.items())
        is_finite = scale == 128
        assert is_same != is_finite
        assert trainer.loss_scale.value == (scale if is_finite else scale / 2)
    assert trainer.find_non_finite() is None


def test_digests_and_first_non_finite_array_match_cpu(device_id):
    trainer = make_trainer(step_config('resnet18', 'NCHW', 'float16', 'lars'), device_id)
    arrays = trainer.arrays()
    on_cpu = {n: mx.nd.array(a.asnumpy(), mx.cpu(), a.dtype) for n, a in arrays.items()}
    assert device_digests(arrays) == device_digests(on_cpu) and trainer.find_non_finite() is None
    name = 'optimizer/velocity/stage3_unit1_conv1_weight'
    arrays[name][0, 0, 0, 0] = np.nan
    assert trainer.find_non_finite() == name


@pytest.mark.parametrize('layout', ['NCHW', 'NHWC'])
@pytest.mark.parametrize('precision', ['float32', 'float16'])
def test_evaluation_network_matches_cpu(precision, layout, device_id, check_distances):
    outputs = []
    for config, device in (
        (step_config('resnet18', 'NCHW', 'float32', 'sgd'), None),
        (step_config('resnet18', layout, precision, 'sgd'), device_id),
    ):
        trainer = make_trainer(config, device)
        set_weights(trainer, weights_of(config), config.model.layout)
        with trainer.evaluating() as net:
            outputs.append(net(make_batch(config, precision, device).images).asnumpy())
    far = {'logits': distance(outputs[1], outputs[0])}
    tolerance = STEP_TOLERANCE[precision]['statistics']
    check_distances(f'evaluation, {precision}, {layout}', far, tolerance)


@pytest.mark.parametrize('name', ['sgd', 'lars'])
@pytest.mark.parametrize('precision', ['float32', 'float16'])
def test_grouped_updates_match_single_updates(name, precision, context, check_distances):
    net = build_model(
        step_config('resnet18' if IS_DRY else 'resnet50', 'NHWC', precision, 'sgd'), context, 0
    )
    params = {n: p for n, p in net.collect_params().items() if p.grad_req != 'null'}
    config = OptimizerConfig(name, weight_decay=1e-3)
    start, all_grads = arrays_of(params), []
    optimizer, lrs = Optimizer(params, config, 3), [0.1, 0.2, 0.2]
    for step, lr in enumerate(lrs):
        random, grads = np.random.default_rng(step), {}
        for n, p in params.items():
            grads[n] = (0.01 * random.standard_normal(p.shape)).astype(np.float16)
            p.grad()[:] = mx.nd.array(grads[n], context, p.dtype)
        all_grads.append(grads)
        optimizer.step(lr)
    expected = reference(config, start, all_grads, [(lr, 1.0) for lr in lrs])
    state = optimizer.state()
    distances = {
        n: distance(state.get(f'master/{n}', p.data()).asnumpy(), expected[n])
        for n, p in params.items()
    }
    check_distances(f'{name}, {precision}: {len(params)} tensors after 3 updates', distances, 1e-4)
