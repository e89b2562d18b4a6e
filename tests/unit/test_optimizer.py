"""SGD and LARS against NumPy, grouped updates, and overflows."""

from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import address_of, json_table

from mlperf_rn50.train.optimizer import Optimizer, cut_buckets
from mlperf_rn50.train.options import OptimizerConfig

SHAPES = {
    'conv0_weight': (4, 3, 3, 3),
    'zero_weight': (2, 2),
    'bn0_gamma': (4,),
    'bn0_beta': (4,),
    'a_weight': (7,),
    'b_weight': (3, 1),
    'fc1_weight': (5, 6),
    'fc1_bias': (5,),
}
SCALE = 8.0  # of the gradients
RATES = [(0.1, 1.0), (0.5, 0.25), (0.05, 1.0), (0.05, 0.5)]  # with the filled parts of the batch
SGD, LARS = OptimizerConfig(weight_decay=0.01), OptimizerConfig('lars', weight_decay=0.01)
NESTEROV = OptimizerConfig(weight_decay=0.1, nesterov=True)


def make_param(name, values, dtype='float32') -> mx.gluon.Parameter:
    param = mx.gluon.Parameter(name, shape=values.shape, dtype=dtype)
    param.initialize(mx.init.Zero())
    param.set_data(mx.nd.array(values, dtype=dtype))
    return param


def make_params(dtype='float32') -> dict[str, mx.gluon.Parameter]:
    params, random = {}, np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values = random.normal(size=shape) * (not name.startswith('zero'))
        params[name] = make_param(name, values, 'float32' if name.startswith('bn') else dtype)
    return params


def grads_of(step) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {n: random.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def take_step(optimizer, step, lr, fraction=1.0, can_skip=True, bad=None):
    """Update by the gradients of a step; bad: tensor and value of a gradient that overflows."""
    grads = grads_of(step)
    for t in optimizer.tensors:
        t.grad[:] = mx.nd.array(grads[t.name] * SCALE)
        if bad and t.name == bad[0]:
            t.grad.reshape((-1,))[1:2] = bad[1]
    optimizer.step(lr, fraction, 1 / SCALE, optimizer.all_finite() if can_skip else None)


def run(
    config, dtype='float32', rates=RATES, *, group_size=0, num_buckets=3, can_skip=False
) -> Optimizer:
    """Return an optimizer after some steps."""
    optimizer = Optimizer(make_params(dtype), config, num_buckets, can_skip)
    optimizer.group_size = group_size or optimizer.group_size
    for step, (lr, fraction) in enumerate(rates):
        take_step(optimizer, step, lr, fraction, can_skip)
    return optimizer


def arrays_of(params) -> dict[str, np.ndarray]:
    return {n: p.data().asnumpy().astype(float) for n, p in params.items()}


def reference(config, start, all_grads, rates):
    """Update tensor by tensor in float64; all_grads, rates: of each step."""
    weights = dict(start)
    velocity, last = dict.fromkeys(weights, 0.0), None
    for step, (lr, fraction) in enumerate(rates):
        is_corrected = last and config.name == 'lars'
        momentum, last = config.momentum * (lr / last if is_corrected else 1), lr
        for n, g in all_grads[step].items():
            w, is_weight = weights[n], n.endswith('_weight')
            wd = config.weight_decay if is_weight or config.decay_bn_and_bias else 0.0
            rate = lr * fraction * (config.last_layer_lr_factor if n.startswith('fc1') else 1)
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            if config.name == 'lars' and is_weight and norm_w > 0:
                rate *= config.lars_eta * norm_w / (norm_g + wd * norm_w + config.lars_epsilon)
            kept, change = momentum * velocity[n], rate * (g + wd * w)
            velocity[n] = kept - change
            weights[n] = w + velocity[n]
            if config.nesterov:  # the operator computes its velocity from the weight after the step
                weights[n] = w + config.momentum * velocity[n] - change
                velocity[n] = kept - rate * (g + wd * weights[n])
    return weights


@pytest.mark.parametrize(
    'dtype, rates',
    [
        ('float32', RATES),
        ('float16', [(1e-4, 1.0)] * 20),  # too small for float16 weights
    ],
    ids=['float32', 'float16'],
)
@pytest.mark.parametrize(
    'config',
    [
        OptimizerConfig(momentum=0.0),
        OptimizerConfig(weight_decay=0.1, decay_bn_and_bias=True, last_layer_lr_factor=0.1),
        OptimizerConfig(weight_decay=0.1, nesterov=True, last_layer_lr_factor=0.1),
        LARS,
        OptimizerConfig('lars', last_layer_lr_factor=3),
        OptimizerConfig('lars', momentum=0.94, lars_eta=0.1, decay_bn_and_bias=True),
    ],
    ids=str,
)
def test_steps_match_numpy(config, dtype, rates):
    all_grads = [grads_of(step) for step in range(len(rates))]
    expected = reference(config, arrays_of(make_params(dtype)), all_grads, rates)
    for t in run(config, dtype, rates).tensors:
        exact = t.exact.asnumpy()
        np.testing.assert_allclose(exact, expected[t.name], rtol=1e-3, atol=2e-5, err_msg=t.name)
        np.testing.assert_array_equal(t.weight.asnumpy(), exact.astype(t.weight.dtype))


@pytest.mark.parametrize(
    'dtype, shape, scale',
    [
        ('float32', (512, 512, 3, 3), 0.01),
        ('float32', (2**9, 2**12), 1e-6),  # rows as long as those of the networks
        ('float16', (4, 9), 5000.0),
    ],
)
def test_norms_of_large_tensors_and_values_match_float64(dtype, shape, scale):
    random, params, norms = np.random.default_rng(0), {}, []
    for name, grad in (('a_weight', random.normal(size=shape)), ('b_weight', np.ones(shape) / 3)):
        weight = grad * (random.random(shape) < 0.1)  # sparse
        arrays = [(scale * a).astype(dtype) for a in (weight, grad)]
        params[name] = make_param(name, arrays[0], dtype)
        params[name].grad()[:] = mx.nd.array(arrays[1], dtype=dtype)
        norms.append([np.linalg.norm(a.astype(float)) for a in arrays])
    weights, grads = np.transpose(norms)
    config = OptimizerConfig('lars', lars_eta=0.1, weight_decay=0.0, last_layer_lr_factor=0.5)
    optimizer = Optimizer(params, config)
    np.testing.assert_allclose(optimizer.squared_norms().asnumpy(), grads**2, rtol=2e-5)
    optimizer.step(1e-9, 0.5)
    ((names, ratios),) = optimizer.trust_ratios()
    np.testing.assert_allclose(ratios.asnumpy(), 0.1 * weights / grads, rtol=1e-5)
    assert names == list(params)
    optimizer.step(0.0, 0.5)
    assert optimizer.trust_ratios() == []


@pytest.mark.parametrize(
    'sizes, kinds, num_buckets, expected',
    json_table("""
"4"        | "a"        | 8 | "0"
"1111"     | "aaaa"     | 2 | "01 23"
"81111"    | "aaaaa"    | 2 | "0 1234"
"119"      | "aaa"      | 3 | "012"
"1111"     | "abab"     | 1 | "02 13"
"1111"     | "abab"     | 4 | "0 1 2 3"
# 4, and formerly 8
"91919191" | "abababab" | 4 | "02 4 6 1357"
"""),
)
def test_bucket_boundaries(sizes, kinds, num_buckets, expected):
    buckets = cut_buckets([int(size) for size in sizes], kinds, num_buckets)
    assert ' '.join(''.join(map(str, bucket)) for bucket in buckets) == expected


# --- groups and overflows
# --------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize('config', [SGD, LARS], ids=['sgd', 'lars'])
DTYPES = pytest.mark.parametrize('dtype', ['float32', 'float16'])


def bits_of(optimizer) -> dict[str, bytes]:
    arrays = {**optimizer.state(), **{t.name: t.weight for t in optimizer.tensors}}
    return {n: a.asnumpy().tobytes() for n, a in arrays.items()}


@BOTH
@DTYPES
def test_grouped_updates_give_the_bits_of_single_updates(config, dtype):
    expected = bits_of(run(config, dtype, group_size=1))
    assert any(n.startswith('master/') for n in expected) == (dtype == 'float16')
    for size, num_buckets in ((2, 1), (5, 4), (54, 1)):
        # the loss-scale policies differ only in steps that overflow
        for can_skip in {False, dtype == 'float16'}:
            keys = {'group_size': size, 'num_buckets': num_buckets, 'can_skip': can_skip}
            assert bits_of(run(config, dtype, **keys)) == expected, keys


@DTYPES
def test_lars_finds_its_operators_under_nvidias_names(monkeypatch, dtype):
    expected = bits_of(run(LARS, dtype))
    for kind in ('multi_sgd_mom_update', 'multi_mp_sgd_mom_update'):
        operator = getattr(mx.nd, f'preloaded_{kind}')
        monkeypatch.setattr(mx.nd, f'lars_{kind}', operator, raising=False)
        monkeypatch.delattr(mx.nd, f'preloaded_{kind}')
    assert bits_of(run(LARS, dtype)) == expected


def test_parameters_in_flat_arrays_are_aligned_and_train_as_before():
    """Float16 kernels need starts at multiples of 16 bytes."""
    params = make_params('float16')
    grads = {n: p.grad() for n, p in params.items()}
    optimizer = Optimizer(params, SGD, can_skip=True)
    assert all(
        address_of(a) % 64 == 0 for t in optimizer.tensors for a in t.arrays if a is not t.grad
    )
    for name, param in params.items():
        with mx.autograd.record():
            param.data().astype('float32').sum().backward()
        assert (grads[name].asnumpy() == 1).all() and param.grad() is grads[name], name


@BOTH
@pytest.mark.parametrize('group_size, num_buckets', [(1, 1), (54, 3)])
def test_overflowed_step_changes_no_bit(config, group_size, num_buckets):
    keys = {'group_size': group_size, 'num_buckets': num_buckets, 'can_skip': True}
    optimizer = run(config, 'float16', [(0.1, 1.0)], **keys)
    optimizer.tensors[0].velocity[:] = -0.0
    before = bits_of(optimizer)
    for bad in (('fc1_bias', np.inf), ('bn0_gamma', np.nan), ('conv0_weight', np.inf)):
        take_step(optimizer, 1, 0.1, bad=bad)
        assert bits_of(optimizer) == before, bad
    take_step(optimizer, 1, 0.5)
    after = bits_of(optimizer)
    assert all(after[n] != before[n] for n in after if n.startswith('velocity'))


@pytest.mark.parametrize('config', [SGD, LARS, NESTEROV], ids=['sgd', 'lars', 'nesterov'])
def test_momentum_after_overflowed_steps_follows_the_last_applied_rate(config):
    states = []
    for overflowed in ((), (0.2, 0.3)):
        optimizer = run(config, 'float16', [(0.1, 1.0)], can_skip=True)
        for lr in overflowed:
            take_step(optimizer, 1, lr, bad=('fc1_bias', np.nan))
        take_step(optimizer, 1, 0.4)
        states.append({n: a.asnumpy() for n, a in optimizer.state().items()})
    for name, expected in states[0].items():
        np.testing.assert_allclose(states[1][name], expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_overflow_check_passes_at_most_200_tensors_to_the_operator(monkeypatch):
    names = [f't{i:03}_gamma' for i in range(450)]
    params = {name: make_param(name, np.ones(2)) for name in names}
    optimizer = Optimizer(params, SGD)
    check = Mock(wraps=mx.nd.multi_all_finite)
    monkeypatch.setattr(mx.nd, 'multi_all_finite', check)
    assert optimizer.all_finite().asscalar() == 1
    assert max(len(call.args) for call in check.mock_calls) <= 200
    for bad in (0, 199, 200, 449):
        params[names[bad]].grad()[1] = np.inf
        assert optimizer.all_finite().asscalar() == 0, bad
        params[names[bad]].grad()[:] = 1
