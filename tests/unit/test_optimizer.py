"""SGD and LARS against the equations, in NumPy."""
import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import OptimizerConfig
from mlperf_rn50.train.optimizer import Optimizer, _groups_of

SHAPES = {'conv0_weight': (4, 3, 3, 3), 'fc1_weight': (5, 6), 'zero_weight': (2, 2), 'fc1_bias': (5,),
          'bn0_gamma': (4,), 'bn0_beta': (4,), 'a_weight': (7,), 'b_weight': (3, 1)}


def make_params(dtype='float32'):
    params, random = {}, np.random.default_rng(0)
    for name, shape in SHAPES.items():
        own = 'float32' if name.startswith('bn') else dtype
        p = mx.gluon.Parameter(name, shape=shape, dtype=own)
        p.initialize(mx.init.Zero())
        p.set_data(mx.nd.array(random.normal(size=shape), dtype=own) * (not name.startswith('zero')))
        params[name] = p
    return params


def set_grads(params, seed, scale=1.0):
    random = np.random.default_rng(seed)
    grads = {n: random.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    for n, p in params.items():
        p.grad()[:] = mx.nd.array(grads[n] * scale)
    return grads


def reference(config, weights, all_grads, lrs):
    """The update, tensor by tensor, in float64."""
    weights = {n: w.astype(np.float64) for n, w in weights.items()}
    velocity = {n: np.zeros_like(w) for n, w in weights.items()}
    last = None
    for grads, lr in zip(all_grads, lrs):
        momentum = config.momentum * (lr / last if config.name == 'lars' and last else 1)
        last = lr
        for n, w in weights.items():
            g = grads[n].astype(np.float64)
            is_weight = n.endswith('_weight')
            wd = config.weight_decay if is_weight or config.decay_bn_and_bias else 0.0
            own = lr
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            if config.name == 'lars' and is_weight and norm_w > 0 and norm_g > 0:
                own = lr * config.lars_eta * norm_w / (norm_g + wd * norm_w + config.lars_epsilon)
            velocity[n] = momentum * velocity[n] - own * (g + wd * w)
            weights[n] = w + velocity[n]
    return weights


@pytest.mark.parametrize('config', [
    OptimizerConfig(), OptimizerConfig(momentum=0.0), OptimizerConfig(weight_decay=0.1, decay_bn_and_bias=True),
    OptimizerConfig('lars', weight_decay=0.01), OptimizerConfig('lars', momentum=0.94, lars_eta=0.1),
    OptimizerConfig('lars', momentum=0.0, decay_bn_and_bias=True)], ids=str)
@pytest.mark.parametrize('scale', [1.0, 128.0])
def test_four_steps_with_a_changing_rate(config, scale):
    params = make_params()
    start = {n: p.data().asnumpy() for n, p in params.items()}
    optimizer = Optimizer(params, config, scale)
    lrs, grads = [0.1, 0.5, 0.5, 0.05], []
    for step, lr in enumerate(lrs):
        grads.append(set_grads(params, step, scale))
        optimizer.step(lr)
    expected = reference(config, start, grads, lrs)
    for n, p in params.items():
        np.testing.assert_allclose(p.data().asnumpy(), expected[n], rtol=2e-4, atol=2e-5, err_msg=n)


@pytest.mark.parametrize('name', ['sgd', 'lars'])
def test_float16_weights_follow_their_float32_masters(name):
    params = make_params('float16')
    start = {n: p.data().asnumpy() for n, p in params.items()}
    config = OptimizerConfig(name, weight_decay=0.01)
    optimizer = Optimizer(params, config, 8.0)
    lrs = [1e-4] * 20  # steps too small for float16 alone
    grads = []
    for step, lr in enumerate(lrs):
        grads.append(set_grads(params, step, 8.0))
        optimizer.step(lr)
    expected, state = reference(config, start, grads, lrs), optimizer.state()
    for n in SHAPES:
        if np.dtype(params[n].dtype) == np.float16:
            np.testing.assert_allclose(state[f'master/{n}'].asnumpy(), expected[n], rtol=1e-3, atol=1e-5, err_msg=n)
            np.testing.assert_array_equal(params[n].data().asnumpy(), state[f'master/{n}'].asnumpy().astype('float16'))
        else:
            assert f'master/{n}' not in state


def test_state_is_the_live_velocity():
    params = make_params()
    optimizer = Optimizer(params, OptimizerConfig())
    assert set(optimizer.state()) == {f'velocity/{n}' for n in SHAPES}
    set_grads(params, 0)
    optimizer.step(0.1)
    assert optimizer.state()['velocity/fc1_weight'].asnumpy().any()


@pytest.mark.parametrize('kinds, expected', [
    ([], []), ([True], [(0, 1)]), ([True] * 5, [(0, 4), (4, 5)]),
    ([True, True, False], [(0, 2), (2, 3)]), ([False] * 4 + [True] * 4, [(0, 4), (4, 8)])])
def test_groups(kinds, expected):
    assert [(g.start, g.stop) for g in _groups_of(kinds)] == expected
