"""Networks of the throughput studies: parameters, FLOPs, initialisation."""

import math

import mxnet as mx
import pytest
from helpers import json_table

from mlperf_rn50.analysis.predict.anchors import num_parameters
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import ResNet
from mlperf_rn50.model.zoo import (
    Classifier,
    build_model,
    count_flops,
    count_parameters,
    image_shape,
    image_size_of,
)
from mlperf_rn50.train.options import TrainConfig


def config_of(name, num_classes=1000, image_size=None, **data):
    return Config(
        model=ModelConfig(name=name),
        train=TrainConfig(local_batch_size=1),
        data=DataConfig(
            num_classes=num_classes, image_size=image_size or image_size_of(name), **data
        ),
    )


def graph_of(config):
    """Return a network without allocated weights, and its symbol."""
    net = (
        ResNet(config)
        if config.model.is_resnet
        else Classifier(config.model, config.data.num_classes)
    )
    return net, net(mx.sym.var('data'))


def parameters_of(config):
    """Return the size of each trained parameter from shape inference."""
    symbol = graph_of(config)[1]
    shapes, _, _ = symbol.infer_shape(data=(1, *image_shape(config)))
    return {n: math.prod(s) for n, s in zip(symbol.list_arguments(), shapes) if n != 'data'}


# Parameters: torchvision's (AlexNet, VGG, ResNet, Inception-v3 without its auxiliary part), BVLC's
# GoogLeNet, timm's Inception-v4. Multiply-adds in G: as published with these networks, without
# biases and norms.
PUBLISHED = """
alexnet 61100840 0.714
googlenet 6998552 1.58
inception_v3 23834568 5.71
inception_v4 42679816 12.25
vgg16 138357544 15.47
vgg19 143667240 19.63
resnet18 11689512 1.81
resnet34 21797672 3.66
resnet50 25557032 4.09
resnet101 44549160 7.80
resnet152 60192808 11.51
"""


@pytest.mark.parametrize('line', PUBLISHED.strip().splitlines())
def test_parameters_and_flops(line):
    name, parameters, giga_macs = line.split()
    config = config_of(name)
    net, symbol = graph_of(config)
    assert sum(parameters_of(config).values()) == int(parameters)
    giga_flops = count_flops(net, image_shape(config)) / 1e9
    assert giga_flops / 2 == pytest.approx(float(giga_macs), abs=0.01)
    used = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    assert set(net.collect_params()) == used - {'data'}  # no unconnected layers
    # known without MXNet
    assert num_parameters(name, 10) == sum(parameters_of(config_of(name, 10)).values())


def test_parameter_count_excludes_running_statistics(thin_resnets):
    config = config_of('resnet18', 4)
    assert count_parameters(build_model(config, mx.cpu(), 0)) == sum(parameters_of(config).values())


def test_seed_determines_weights_but_not_their_names():
    config = config_of('googlenet', 4, pad_to_4_channels=True)
    nets = [build_model(config, mx.cpu(), seed).collect_params() for seed in (1, 1, 2)]
    weights = [net['googlenet_conv0_weight'].data().asnumpy() for net in nets]
    assert (weights[0] == weights[1]).all() and (weights[0] != weights[2]).any()
    assert weights[0].shape[1] == 4
    assert list(nets[0]) == list(nets[1]) and all(n.startswith('googlenet_') for n in nets[0])


@pytest.mark.parametrize('name', ['resnet18', 'googlenet'])
def test_without_a_seed_all_weights_are_0(name):
    params = build_model(config_of(name, 4), mx.cpu(), None).collect_params().values()
    assert not any(p.data().asnumpy().any() for p in params)


@pytest.mark.parametrize(
    'name, sizes',
    json_table("""
"alexnet"      | {"image_size": 16}
"inception_v4" | {"image_size": 299, "sizes": [96, 16]}
"inception_v4" | {"image_size": 96, "eval_size": 16}
"""),
)
def test_too_small_images_are_refused(name, sizes):
    with pytest.raises(ConfigError, match=f'data.eval_size: got 16, too small for {name}, exp'):
        build_model(config_of(name, 4, **sizes), mx.cpu(), 0)
