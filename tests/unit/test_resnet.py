"""ResNets: parameter names, forward pass against NumPy, maps of one pixel, and the evaluation
network."""

import re
from pathlib import Path

import mlperf_logging
import mxnet as mx
import numpy as np
import pytest
from helpers import assert_near
from nets import arrays_of, gradients_of

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.fused import PLAIN, Fusion
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import FoldedResNet, ResNet, units
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.sinks.mlperf_log import describe_layers

pytestmark = pytest.mark.usefixtures('thin_resnets')


def net_of(num_classes=10, fusion=PLAIN, image_size=None, **model) -> ResNet:
    mx.random.seed(0)
    config = Config(model=ModelConfig(**model), data=DataConfig(num_classes=num_classes))
    net = ResNet(config, fusion=fusion, image_size=image_size)
    net.initialize()
    return net


def set_trained_norms(net):
    """Set norms and the last layer to values that are typical after training."""
    random = np.random.default_rng(1)
    for name, param in net.collect_params().items():
        if name.endswith(('gamma', 'running_var')):
            param.set_data(mx.nd.array(random.uniform(0.5, 2.0, param.shape)))
        elif name.endswith(('beta', 'running_mean', 'bias')):
            param.set_data(mx.nd.array(random.normal(0, 0.3, param.shape)))


def test_names_match_the_rules_and_values_the_initialisation():
    checker = Path(mlperf_logging.__file__).parent / 'compliance_checker'
    rules = checker / 'training_2.1.0/closed_resnet.yaml'
    values = {n: a for n, a in arrays_of(net_of(1000, zero_gamma=True)).items() if 'run' not in n}
    assert set(values) == set(re.findall(r'"(\w+)"', rules.read_text()))
    assert values['fc1_weight'].std() == pytest.approx(0.01, rel=0.02)
    assert not values['fc1_bias'].any()
    # Xavier, fan-in, magnitude 2
    weight = values['stage4_unit1_conv2_weight']
    assert weight.std() == pytest.approx(np.sqrt(2 / (128 * 9)), rel=0.01)
    for name, value in values.items():
        if name.endswith('gamma'):
            assert set(value) == {0 if name.endswith('_bn3_gamma') else 1}, name
    assert (arrays_of(net_of())['stage1_unit1_bn3_gamma'] == 1).all()


@pytest.mark.parametrize(
    'name, side, fused', [('resnet18', 4, False), ('resnet18', 17, True), ('resnet50', 32, False)]
)
def test_maps_of_one_pixel_as_a_row_give_the_same_results(name, side, fused):
    results = []
    fusion = Fusion(mx.gluon.nn.BatchNormReLU if fused else None)
    images = mx.nd.array(np.random.default_rng(1).standard_normal((16, 3, side, side)))
    for image_size in (None, side):
        net = net_of(name=name, image_size=image_size, fusion=fusion)
        net.hybridize(static_alloc=True, static_shape=True)
        with mx.autograd.record():
            logits = net(images)
        logits.backward(mx.nd.arange(160).reshape((16, 10)) / 160)
        results.append({'logits': logits.asnumpy(), **gradients_of(net)})
    assert_near(results[1], results[0], share=1e-3)


# --- forward pass in NumPy


def conv(x, w, stride):
    """Cross-correlate (n, c, h, w) with (o, c, k, k), with padding k // 2, by sliding windows."""
    pad = w.shape[2] // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))[
        :, :, ::stride, ::stride
    ]
    return np.einsum('ncyxij,ocij->noyx', windows, w)


def norm(x, p, name):
    g, b, m, v = (
        p[f'{name}_{k}'].reshape(1, -1, 1, 1)
        for k in ('gamma', 'beta', 'running_mean', 'running_var')
    )
    return (x - m) / np.sqrt(v + 1e-5) * g + b


def unit_forward(x, p, unit):
    layers = (
        [(1, 1), (2, unit.stride), (3, 1)] if unit.is_bottleneck else [(1, unit.stride), (2, 1)]
    )
    y = x
    for i, stride in layers:
        y = norm(conv(y, p[f'{unit.name}_conv{i}_weight'], stride), p, f'{unit.name}_bn{i}')
        y = np.maximum(y, 0) if i < len(layers) else y
    if unit.has_projection:
        x = norm(conv(x, p[f'{unit.name}_conv1sc_weight'], unit.stride), p, f'{unit.name}_bnsc')
    return np.maximum(x + y, 0)


def resnet_forward(x, p, depth):
    x = np.maximum(norm(conv(x, p['conv0_weight'], 2), p, 'bn0'), 0)
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max(
        axis=(4, 5)
    )
    for unit in units(depth):
        x = unit_forward(x, p, unit)
    return x.mean(axis=(2, 3)) @ p['fc1_weight'].T + p['fc1_bias']


@pytest.mark.parametrize('depth', [18, 50])
def test_forward_pass_matches_numpy(depth):
    net = net_of(name=f'resnet{depth}')
    set_trained_norms(net)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    params = {n: a.astype(np.float64) for n, a in arrays_of(net).items()}
    expected = resnet_forward(x.astype(np.float64), params, depth)
    net.hybridize(static_alloc=True, static_shape=True)
    assert_near(net(mx.nd.array(x)).asnumpy(), expected)


def test_description_for_the_v05_log_has_every_layer():
    lines = describe_layers(Config())
    tags = [tag for tag, _ in lines]
    assert tags.count('model_hp_begin_block') == tags.count('model_hp_end_block') == 16
    assert tags.count('model_hp_projection_shortcut') == 4
    assert [v for t, v in lines if t == 'model_hp_end_block'][-1] == 'Block Output: (512, 7, 7)'
    small = describe_layers(Config(model=ModelConfig(name='resnet18')))
    assert [v for t, v in small if t == 'model_hp_block_type'][0] == 'basic_block'


# --- the evaluation network ----------------------------------------------------------------------


def trained_net(name='resnet18', side=32, channels=3, **model):
    """Return a network with trained norms and its evaluation network."""
    data = DataConfig(
        num_classes=10, image_size=side, resize_shorter=side, pad_to_4_channels=channels == 4
    )
    config = Config(data=data, model=ModelConfig(name=name, **model))
    net = build_model(config, mx.cpu(), 0)
    set_trained_norms(net)
    folded = FoldedResNet(config, mx.cpu())
    folded.copy_weights(net)
    return net, folded


def test_channels_last_is_folded_like_channels_first():
    first, last = (arrays_of(trained_net(layout=x)[1].net) for x in ('NCHW', 'NHWC'))
    turned = {n: a.transpose(0, 3, 1, 2) if a.ndim == 4 else a for n, a in last.items()}
    assert_near(turned, first, rtol=0, share=0)
