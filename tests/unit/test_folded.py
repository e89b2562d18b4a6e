"""The network of evaluations is the one that is trained, layer by layer."""
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, DataConfig, ModelConfig
from mlperf_rn50.model.folded import FoldedResNet
from mlperf_rn50.model.zoo import build_model, count_flops


def make_config(name, fused=False, channels=3) -> Config:
    data = DataConfig(num_classes=10, image_size=64, resize_shorter=64, pad_to_4_channels=channels == 4)
    return Config(data=data, model=ModelConfig(name=name, fused_bn_relu=fused))


def trained_net(config):
    """A network whose norms have learned something."""
    net, random = build_model(config, mx.cpu(), 0), np.random.default_rng(1)
    for name, param in net.collect_params().items():
        kind = name.rpartition('_')[2]
        if kind in ('gamma', 'var'):
            param.set_data(mx.nd.array(random.uniform(0.5, 2.0, param.shape)))
        elif kind in ('beta', 'mean'):
            param.set_data(mx.nd.array(random.normal(0, 0.3, param.shape)))
    return net


def outputs_of(net, config, suffixes):
    """Outputs of the layers with some endings, by name, for the same images."""
    internals = net(mx.sym.var('data')).get_internals()
    names = [n for n in internals.list_outputs() if n.endswith(tuple(f'{s}_output' for s in suffixes))]
    images = mx.nd.array(np.random.default_rng(0).normal(size=(2, 3, 64, 64)))
    block = mx.gluon.SymbolBlock(mx.sym.Group([internals[n] for n in names]), mx.sym.var('data'))
    for name, param in block.collect_params().items():
        source = net.collect_params()[name].data()
        param.shape = source.shape
        param.initialize()
        param.set_data(source)
    return dict(zip((n.removesuffix('_output') for n in names), (o.asnumpy() for o in block(images))))


@pytest.mark.parametrize('name', ['resnet18', 'resnet50'])
def test_every_convolution_with_its_norm_in_it_gives_what_the_norm_gave(name):
    config = make_config(name)
    net = trained_net(config)
    folded = FoldedResNet(config, mx.cpu())
    folded.take(net)
    norms = outputs_of(net, config, [f'bn{i}_fwd' for i in ('0', '1', '2', '3', 'sc')])
    convolutions = outputs_of(folded.net, config, [f'conv{i}_fwd' for i in ('0', '1', '2', '3', '1sc')])
    assert len(norms) == len(convolutions) == {'resnet18': 20, 'resnet50': 53}[name]
    for layer, expected in norms.items():
        got = convolutions[layer.replace('bnsc', 'conv1sc').replace('bn', 'conv')]
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-4 * np.abs(expected).max(), err_msg=layer)


@pytest.mark.parametrize('fused, channels', [(False, 3), (True, 3), (False, 4)])
def test_the_logits_are_the_same(fused, channels):
    config = make_config('resnet18', fused, channels)
    net, folded = trained_net(config), FoldedResNet(config, mx.cpu())
    images = mx.nd.random.normal(shape=(4, channels, 64, 64))
    folded.take(net)
    expected = net(images).asnumpy()
    np.testing.assert_allclose(folded.net(images).asnumpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_it_follows_the_network_that_is_trained():
    config = make_config('resnet18')
    net, folded = trained_net(config), FoldedResNet(config, mx.cpu())
    images = mx.nd.random.normal(shape=(2, 3, 64, 64))
    folded.take(net)
    before = folded.net(images).asnumpy()
    net.collect_params()['bn0_running_mean'].set_data(mx.nd.ones((64,)))
    folded.take(net)
    after = folded.net(images).asnumpy()
    assert (before != after).any()
    np.testing.assert_allclose(after, net(images).asnumpy(), rtol=1e-3, atol=1e-4 * np.abs(after).max())


def test_maps_of_one_pixel_are_folded_too():
    config = make_config('resnet18')
    config = replace(config, data=replace(config.data, image_size=32, resize_shorter=32))
    net, folded = trained_net(config), FoldedResNet(config, mx.cpu())
    images = mx.nd.random.normal(shape=(4, 3, 32, 32))
    folded.take(net)
    expected = net(images).asnumpy()
    np.testing.assert_allclose(folded.net(images).asnumpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert count_flops(folded.net, (3, 32, 32)) == count_flops(net, (3, 32, 32))  # rows leave taps out
