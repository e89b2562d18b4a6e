"""SGD and LARS against NumPy, grouped updates, and overflows."""

from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import address_of

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


def make_params(dtype='float32'):
    params, random = {}, np.random.default_rng(0)
    for name, shape in SHAPES.items():
        param_dtype = 'float32' if name.startswith('bn') else dtype
        p = mx.gluon.Parameter(name, shape=shape, dtype=param_dtype)
        p.initialize(mx.init.Zero())
        values = mx.nd.array(random.normal(size=shape), dtype=param_dtype)
        p.set_data(values * (not name.startswith('zero')))
        params[name] = p
    return params


def set_grads(params, seed, scale=1.0):
    random = np.random.default_rng(seed)
    grads = {n: random.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    for n, p in params.items():
        p.grad()[:] = mx.nd.array(grads[n] * scale)
    return grads


def reference(config, weights, all_grads, lrs, fractions=None, new_batch_at=None):
    """Update tensor by tensor in float64. `fractions` are the filled parts of the global batch per
    step."""
    weights = {n: w.astype(np.float64) for n, w in weights.items()}
    velocity = {n: np.zeros_like(w) for n, w in weights.items()}
    last = None
    for step, (grads, lr, fraction) in enumerate(zip(all_grads, lrs, fractions or [1] * len(lrs))):
        momentum = config.momentum * (
            lr / last if (config.name == 'lars' or step == new_batch_at) and last else 1
        )
        last = lr
        for n, w in weights.items():
            g = grads[n].astype(np.float64)
            is_weight = n.endswith('_weight')
            wd = config.weight_decay if is_weight or config.decay_bn_and_bias else 0.0
            own = lr * fraction * (config.last_layer_lr_factor if n.startswith('fc1') else 1)
            rate = own
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            if config.name == 'lars' and is_weight and norm_w > 0 and norm_g > 0:
                rate = own * config.lars_eta * norm_w / (norm_g + wd * norm_w + config.lars_epsilon)
            kept, change = momentum * velocity[n], rate * (g + wd * w)
            velocity[n] = kept - change
            weights[n] = w + velocity[n]
            if config.nesterov:  # the operator computes its velocity from the weight after the step
                weights[n] = w + config.momentum * velocity[n] - change
                velocity[n] = kept - rate * (g + wd * weights[n])
    return weights


@pytest.mark.parametrize('new_batch_at', [None, 2])
@pytest.mark.parametrize(
    'config',
    [
        OptimizerConfig(momentum=0.0),
        OptimizerConfig(weight_decay=0.1, nesterov=True),
        OptimizerConfig(weight_decay=0.1, decay_bn_and_bias=True, last_layer_lr_factor=0.1),
        OptimizerConfig(weight_decay=0.1, nesterov=True, last_layer_lr_factor=0.1),
        OptimizerConfig('lars', weight_decay=0.01),
        OptimizerConfig('lars', last_layer_lr_factor=3),
        OptimizerConfig('lars', momentum=0.94, lars_eta=0.1, decay_bn_and_bias=True),
    ],
    ids=str,
)
def test_four_steps_of_a_changing_rate_match_numpy(config, new_batch_at):
    params, grads, scale = make_params(), [], 128.0
    lrs, fractions = (0.1, 0.5, 0.05, 0.05), (1.0, 0.25, 1.0, 0.5)
    start = {n: p.data().asnumpy() for n, p in params.items()}
    optimizer = Optimizer(params, config, 3)
    for step, (lr, fraction) in enumerate(zip(lrs, fractions)):
        grads.append(set_grads(params, step, scale))
        optimizer.is_batch_new = step == new_batch_at
        optimizer.step(lr, fraction, 1 / scale)
    expected = reference(config, start, grads, lrs, fractions, new_batch_at)
    for n, p in params.items():
        np.testing.assert_allclose(p.data().asnumpy(), expected[n], rtol=2e-4, atol=2e-5, err_msg=n)


@pytest.mark.parametrize(
    'config',
    [
        OptimizerConfig(weight_decay=0.01),
        OptimizerConfig('lars', weight_decay=0.01),
        OptimizerConfig(weight_decay=0.01, nesterov=True),
    ],
    ids=str,
)
@pytest.mark.parametrize('can_skip', [False, True])
def test_float16_weights_follow_their_float32_masters(config, can_skip):
    params = make_params('float16')
    start = {n: p.data().asnumpy() for n, p in params.items()}
    optimizer = Optimizer(params, config, 2, can_skip)
    lrs = [1e-4] * 20  # steps too small for float16 weights
    grads = []
    for step, lr in enumerate(lrs):
        grads.append(set_grads(params, step, 8.0))
        optimizer.step(lr, rescale=1 / 8, is_finite=optimizer.all_finite() if can_skip else None)
    expected, state = reference(config, start, grads, lrs), optimizer.state()
    for n in SHAPES:
        weight = params[n].data().asnumpy()
        master = state[f'master/{n}'].asnumpy() if weight.dtype == np.float16 else weight
        np.testing.assert_allclose(master, expected[n], rtol=1e-3, atol=1e-5, err_msg=n)
        np.testing.assert_array_equal(weight, master.astype(weight.dtype))


@pytest.mark.parametrize(
    'dtype, shape, scale',
    [
        ('float32', (512, 512, 3, 3), 0.01),
        ('float32', (1, 2**21), 1e-6),
        ('float16', (4, 9), 5000.0),
    ],
)
def test_norms_of_large_tensors_and_values_match_float64(dtype, shape, scale):
    random, params = np.random.default_rng(0), {}
    for name in ('a_weight', 'b_weight'):
        param = mx.gluon.Parameter(name, shape=shape, dtype=dtype)
        param.initialize(mx.init.Zero())
        values = random.normal(size=shape) * scale
        if name == 'b_weight':
            values = np.full(shape, scale / 3)
        sparse = random.permuted(values) * (random.random(shape) < 0.1)
        param.set_data(mx.nd.array(sparse, dtype=dtype))
        param.grad()[:] = mx.nd.array(values, dtype=dtype)
        params[name] = param

    def norms(arrays):
        values = [arrays[t.name].asnumpy().astype(float) for t in optimizer.tensors]
        return np.array([np.linalg.norm(v) for v in values])

    config = OptimizerConfig('lars', lars_eta=0.1, weight_decay=0.0, lars_epsilon=0.0)
    optimizer = Optimizer(params, config)
    grads = norms({n: p.grad() for n, p in params.items()})
    weights = norms({n: p.data() for n, p in params.items()})
    np.testing.assert_allclose(np.sqrt(optimizer.squared_norms().asnumpy()), grads[::-1], rtol=1e-5)
    optimizer.step(1e-9, 0.5, is_finite=mx.nd.ones((1,)) if dtype == 'float16' else None)
    ((names, ratios),) = optimizer.trust_ratios()
    np.testing.assert_allclose(ratios.asnumpy(), (0.1 * weights / grads)[::-1], rtol=1e-5)
    assert names == [t.name for t in optimizer.tensors[::-1]]


@pytest.mark.parametrize(
    'sizes, kinds, num_buckets, expected',
    [
        ('4', 'a', 8, '0'),
        ('1111', 'aaaa', 2, '01 23'),
        ('81111', 'aaaaa', 2, '0 1234'),
        ('119', 'aaa', 3, '012'),
        ('1111', 'abab', 1, '02 13'),
        ('1111', 'abab', 4, '0 1 2 3'),
        # 4, and formerly 8
        ('91919191', 'abababab', 4, '02 4 6 1357'),
    ],
)
def test_bucket_boundaries(sizes, kinds, num_buckets, expected):
    buckets = cut_buckets([int(size) for size in sizes], kinds, num_buckets)
    assert ' '.join(''.join(map(str, bucket)) for bucket in buckets) == expected


# --- groups and overflows
# --------------------------------------------------------------------------------

LRS, FRACTIONS = (0.1, 0.5, 0.5, 0.05), (1.0, 0.25, 1.0, 0.5)
BOTH = pytest.mark.parametrize(
    'config',
    [
        OptimizerConfig('sgd', weight_decay=0.01),
        OptimizerConfig('lars', weight_decay=0.01, decay_bn_and_bias=True),
    ],
    ids=['sgd', 'lars'],
)


def bits_of(optimizer) -> dict[str, bytes]:
    arrays = {**optimizer.state(), **{t.name: t.weight for t in optimizer.tensors}}
    return {n: a.asnumpy().tobytes() for n, a in arrays.items()}


def run(config, dtype, size, num_buckets=1, can_skip=False):
    """Return the bits after four steps."""
    params = make_params(dtype)
    optimizer = Optimizer(params, config, num_buckets, can_skip)
    optimizer.group_size = size
    for step, (lr, fraction) in enumerate(zip(LRS, FRACTIONS)):
        set_grads(params, step, 8.0)
        optimizer.step(lr, fraction, 1 / 8, optimizer.all_finite() if can_skip else None)
    return bits_of(optimizer)


@BOTH
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_grouped_updates_give_the_bits_of_single_updates(config, dtype):
    expected = run(config, dtype, 1)
    assert any(n.startswith('master/') for n in expected) == (dtype == 'float16')
    for size, num_buckets in ((2, 1), (5, 4), (54, 1)):
        assert run(config, dtype, size, num_buckets) == expected, size
        if dtype == 'float16':  # the loss-scale policies differ only in steps that overflow
            assert run(config, dtype, size, num_buckets, can_skip=True) == expected, size


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_lars_finds_its_operators_under_nvidias_names(monkeypatch, dtype):
    config = OptimizerConfig('lars')
    expected = run(config, dtype, 54)
    for kind in ('multi_sgd_mom_update', 'multi_mp_sgd_mom_update'):
        operator = getattr(mx.nd, f'preloaded_{kind}')
        monkeypatch.setattr(mx.nd, f'lars_{kind}', operator, raising=False)
        monkeypatch.delattr(mx.nd, f'preloaded_{kind}')
    assert run(config, dtype, 54) == expected


def test_parameters_in_flat_arrays_are_aligned_and_train_as_before():
    """Float16 kernels need starts at multiples of 16 bytes."""
    params = make_params('float16')
    grads = {n: p.grad() for n, p in params.items()}
    optimizer = Optimizer(params, OptimizerConfig(), can_skip=True)
    for name, array in [*((n, p.data()) for n, p in params.items()), *optimizer.state().items()]:
        assert address_of(array) % 64 == 0, name
    for name, param in params.items():
        with mx.autograd.record():
            param.data().astype('float32').sum().backward()
        assert (grads[name].asnumpy() == 1).all() and param.grad() is grads[name], name


@BOTH
@pytest.mark.parametrize('size, num_buckets', [(1, 1), (54, 3)])
def test_overflowed_step_changes_no_bit(config, size, num_buckets):
    params = make_params('float16')
    optimizer = Optimizer(params, config, num_buckets, can_skip=True)
    optimizer.group_size = size
    set_grads(params, 0, 8.0)
    optimizer.step(0.1, is_finite=optimizer.all_finite())
    optimizer.tensors[0].velocity[:] = -0.0
    before = bits_of(optimizer)
    for bad, name in ((np.inf, 'fc1_bias'), (np.nan, 'bn0_gamma'), (np.inf, 'conv0_weight')):
        set_grads(params, 1, 8.0)
        params[name].grad().reshape((-1,))[1:2] = bad
        optimizer.step(0.1, is_finite=optimizer.all_finite())
        assert bits_of(optimizer) == before, (name, bad)
    set_grads(params, 1, 8.0)
    optimizer.step(0.5, is_finite=optimizer.all_finite())
    after = bits_of(optimizer)
    assert all(after[n] != before[n] for n in after if n.startswith('velocity'))


@pytest.mark.parametrize(
    'config',
    [*BOTH.args[1], OptimizerConfig('sgd', weight_decay=0.01, nesterov=True)],
    ids=['sgd', 'lars', 'nesterov'],
)
@pytest.mark.parametrize('is_batch_new', [False, True])
def test_momentum_after_overflowed_steps_follows_the_last_applied_rate(config, is_batch_new):
    states = []
    for rates in [(0.1, 0.4), (0.1, 0.4, 0.4, 0.4) if is_batch_new else (0.1, 0.2, 0.3, 0.4)]:
        params = make_params('float16')
        optimizer = Optimizer(params, config, 2, can_skip=True)
        for step, lr in enumerate(rates):
            set_grads(params, int(step > 0), 8.0)
            if 0 < step < len(rates) - 1:
                params['fc1_bias'].grad()[0] = np.nan
            optimizer.is_batch_new |= is_batch_new and step == 1
            optimizer.step(lr, rescale=1 / 8, is_finite=optimizer.all_finite())
        states.append({n: a.asnumpy() for n, a in optimizer.state().items()})
    for name, expected in states[0].items():
        np.testing.assert_allclose(states[1][name], expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_overflow_check_passes_at_most_200_tensors_to_the_operator(monkeypatch):
    names = [f't{i:03}_gamma' for i in range(450)]
    params = {name: mx.gluon.Parameter(name, shape=(2,)) for name in names}
    for p in params.values():
        p.initialize(mx.init.One())
    optimizer = Optimizer(params, OptimizerConfig())
    check = Mock(wraps=mx.nd.multi_all_finite)
    monkeypatch.setattr(mx.nd, 'multi_all_finite', check)
    assert optimizer.all_finite().asscalar() == 1
    nums = [call.kwargs['num_arrays'] for call in check.mock_calls]
    assert nums == [len(call.args) for call in check.mock_calls]
    assert max(nums) <= 200 and sum(nums) == 450
    for bad in (0, 199, 200, 449):
        params[names[bad]].grad()[1] = np.inf
        assert optimizer.all_finite().asscalar() == 0, bad
        params[names[bad]].grad()[:] = 1
