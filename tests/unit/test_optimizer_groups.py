"""Updates in groups: the same bits as one by one, whatever the group; and steps that overflowed."""
import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import OptimizerConfig
from mlperf_rn50.train import optimizer as optimizers
from mlperf_rn50.train.optimizer import Bucket, Optimizer, group_size

# 13 tensors: groups of 2, 3, 5 and 8 leave a rest.
SHAPES = {'conv0_weight': (4, 3, 3, 3), 'bn0_gamma': (4,), 'bn0_beta': (4,), 'conv1_weight': (8, 4, 1, 1),
          'bn1_gamma': (8,), 'bn1_beta': (8,), 'conv2_weight': (3, 8, 3, 3), 'bn2_gamma': (3,), 'bn2_beta': (3,),
          'zero_weight': (2, 2), 'one_weight': (1, 1), 'fc1_weight': (5, 6), 'fc1_bias': (5,)}
LRS, FRACTIONS = (0.1, 0.5, 0.5, 0.05), (1.0, 0.25, 1.0, 0.5)
CONFIGS = [OptimizerConfig(name, weight_decay=0.01, decay_bn_and_bias=is_all, momentum=momentum)
           for name in ('sgd', 'lars') for is_all, momentum in ((False, 0.9), (True, 0.94))]


def make_params(dtype):
    params, random = {}, np.random.default_rng(0)
    for name, shape in SHAPES.items():
        own = 'float32' if name.startswith('bn') else dtype
        params[name] = p = mx.gluon.Parameter(name, shape=shape, dtype=own)
        p.initialize(mx.init.Zero())
        p.set_data(mx.nd.array(random.normal(size=shape), dtype=own) * (not name.startswith('zero')))
    return params


def set_grads(params, seed):
    random = np.random.default_rng(seed)
    for n, p in params.items():
        p.grad()[:] = mx.nd.array(8 * random.normal(size=SHAPES[n]))


def bits_of(optimizer) -> dict[str, bytes]:
    arrays = {**optimizer.state(), **{t.name: t.weight for t in optimizer.tensors}}
    return {n: a.asnumpy().tobytes() for n, a in arrays.items()}


def run(config, dtype, size, num_buckets=1, overflows=()):
    """Bits after four steps; in some of them a gradient overflows."""
    params = make_params(dtype)
    optimizer = Optimizer(params, config, num_buckets)
    optimizer.group_size = size
    for step, (lr, fraction) in enumerate(zip(LRS, FRACTIONS)):
        set_grads(params, step)
        is_finite = None
        if overflows:
            if step in overflows:
                params['fc1_bias'].grad()[2] = np.inf
            is_finite = optimizer.all_finite()
        optimizer.step(lr, fraction, 1 / 8, is_finite)
    return bits_of(optimizer)


@pytest.mark.parametrize('config', CONFIGS, ids=str)
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_any_group_gives_the_bits_of_single_updates(config, dtype):
    expected = run(config, dtype, 1)
    assert any(n.startswith('master/') for n in expected) == (dtype == 'float16')
    for size in (2, 3, 5, 8, 13, 54):
        assert run(config, dtype, size) == expected, size
    assert run(config, dtype, 5, num_buckets=4) == expected


def recorded(monkeypatch, *names):
    """The number of weights of each call of some operators."""
    calls = {name: [] for name in names}

    def recorder(name, plain):
        def call(*inputs, **keys):
            calls[name].append(keys.get('num_weights', 1))
            return plain(*inputs, **keys)
        return call
    for name in names:
        monkeypatch.setattr(mx.nd, name, recorder(name, getattr(mx.nd, name)))
    return calls


@pytest.mark.parametrize('name, size, expected', [
    ('sgd', 1, {'sgd_mom_update': [1] * 6, 'mp_sgd_mom_update': [1] * 7}),
    ('sgd', 5, {'multi_sgd_mom_update': [5, 1], 'multi_mp_sgd_mom_update': [5, 2]}),
    ('lars', 4, {'preloaded_multi_sgd_mom_update': [4, 2], 'preloaded_multi_mp_sgd_mom_update': [4, 3]})])
def test_the_operators_of_a_step(monkeypatch, name, size, expected):
    every = ['sgd_mom_update', 'mp_sgd_mom_update', 'multi_sgd_mom_update', 'multi_mp_sgd_mom_update',
             'preloaded_multi_sgd_mom_update', 'preloaded_multi_mp_sgd_mom_update']
    params = make_params('float16')
    optimizer = Optimizer(params, OptimizerConfig(name))
    optimizer.group_size = size
    calls = recorded(monkeypatch, *every)
    optimizer.step(0.1)
    assert {n: c for n, c in calls.items() if c} == expected


@pytest.mark.parametrize('device, name, expected', [('cpu', 'sgd', 1), ('cpu', 'lars', 4), ('gpu', 'sgd', 54),
                                                    ('gpu', 'lars', 54)])
def test_the_device_decides_the_group(device, name, expected):
    assert group_size(device, name) == expected <= 60  # what MXNet's operators take


def test_this_device_is_a_cpu():
    assert [Optimizer(make_params('float32'), OptimizerConfig(n)).group_size for n in ('sgd', 'lars')] == [1, 4]


# --- steps that overflowed ---------------------------------------------------------------------------

@pytest.mark.parametrize('config', CONFIGS, ids=str)
@pytest.mark.parametrize('size, num_buckets', [(1, 1), (5, 1), (54, 3)])
def test_a_step_that_overflowed_leaves_every_bit(config, size, num_buckets):
    params = make_params('float16')
    optimizer = Optimizer(params, config, num_buckets)
    optimizer.group_size = size
    set_grads(params, 0)
    optimizer.step(0.1, is_finite=optimizer.all_finite())
    optimizer.tensors[0].velocity[:] = -0.0
    before = bits_of(optimizer)
    for bad in (np.inf, np.nan):
        for name in ('fc1_bias', 'bn1_gamma', 'conv1_weight'):
            set_grads(params, 1)
            params[name].grad().reshape((-1,))[1:2] = bad
            optimizer.step(0.5, is_finite=optimizer.all_finite())
            assert bits_of(optimizer) == before, (name, bad)
    set_grads(params, 1)
    optimizer.step(0.5, is_finite=optimizer.all_finite())
    after = bits_of(optimizer)
    assert all(after[n] != before[n] for n in after if n.startswith('velocity'))


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_looking_for_an_overflow_changes_no_bit_of_a_step(config):
    assert run(config, 'float16', 5, overflows=(99,)) == run(config, 'float16', 5)


@pytest.mark.parametrize('config', CONFIGS[::2], ids=str)
def test_overflows_give_the_same_bits_in_any_group(config):
    ends = [run(config, 'float16', size, num_buckets, (1, 3)) for size, num_buckets in ((1, 1), (5, 1), (54, 3))]
    assert ends[0] == ends[1] == ends[2] != run(config, 'float16', 1)


def test_a_bucket_of_one_tensor_is_put_back():
    params = {'fc1_weight': make_params('float16')['fc1_weight']}
    optimizer = Optimizer(params, OptimizerConfig())
    before = bits_of(optimizer)
    params['fc1_weight'].grad()[:] = np.nan
    optimizer.step(0.1, is_finite=optimizer.all_finite())
    assert bits_of(optimizer) == before


@pytest.mark.parametrize('num, bad', [(200, None), (201, None), (450, 0), (450, 199), (450, 200), (450, 449)])
def test_no_more_tensors_are_looked_at_at_once_than_the_operator_takes(monkeypatch, num, bad):
    names = [f't{i:03}_gamma' for i in range(num)]
    params = {n: mx.gluon.Parameter(n, shape=(2,)) for n in names}
    for p in params.values():
        p.initialize(mx.init.One())
    optimizer = Optimizer(params, OptimizerConfig())
    if bad is not None:
        params[names[bad]].grad()[1] = np.inf
    plain, nums = mx.nd.multi_all_finite, []

    def counted(*arrays, num_arrays, **keys):
        nums.append(num_arrays)
        assert num_arrays == len(arrays)
        return plain(*arrays, num_arrays=num_arrays, **keys)
    monkeypatch.setattr(mx.nd, 'multi_all_finite', counted)
    assert optimizer.all_finite().asscalar() == (bad is None)
    assert max(nums) <= 200 and sum(nums) == num


def test_what_is_joined_is_split_to_the_bit():
    arrays = [mx.nd.array(a) for a in ([[1.5, -0.0], [np.inf, 3]], [7.0], [[[1], [2]]])]
    bits = [a.asnumpy().tobytes() for a in arrays]
    joined = optimizers._join(arrays)
    assert joined.shape == (7,)
    for a in arrays:
        a[:] = 9
    optimizers._split(joined, arrays)
    assert [a.asnumpy().tobytes() for a in arrays] == bits


def test_groups_of_a_bucket():
    bucket = Bucket(Optimizer(make_params('float32'), OptimizerConfig()).tensors)
    assert [(g.start, g.stop) for g in bucket.groups(5)] == [(0, 5), (5, 10), (10, 13)]
    assert [(g.start, g.stop) for g in bucket.groups(54)] == [(0, 13)]
