"""Layers of the network against the CPU: outputs, and gradients of inputs and parameters."""

import pytest
from gpu.compare import LAYER_TOLERANCE, compare_block
from mxnet.gluon import nn

from mlperf_rn50.model.fused import (
    PLAIN,
    Fusion,
    NormAddRelu,
    NormRelu,
    has_norm_add_relu,
    has_norm_relu,
)
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import LayerMaker, UnitBlock, units
from mlperf_rn50.model.training import SmoothedCrossEntropy


def conv(in_channels, channels, kernel, stride=1):
    return lambda layout: nn.Conv2D(
        channels,
        kernel,
        stride,
        kernel // 2,
        use_bias=False,
        in_channels=in_channels,
        layout=layout,
    )


def norm(channels):
    return lambda layout: nn.BatchNorm(axis=layout.index('C'), in_channels=channels)


def norm_and_relu(layout):
    block = nn.HybridSequential()
    block.add(norm(64)(layout), nn.Activation('relu'))
    return block


def unit(number, fusion=PLAIN):
    return lambda layout: UnitBlock(
        units(50)[number], LayerMaker(ModelConfig(layout=layout), False, fusion), 0
    )


class Smoothed(SmoothedCrossEntropy):
    """Loss of float32 logits for labels 0, 1, 2, … and weights of 1."""

    def hybrid_forward(self, F, x):
        logits = F.cast(x, 'float32')
        labels = F.contrib.arange_like(logits, axis=0)
        return super().hybrid_forward(F, logits, labels, F.ones_like(labels))


KINDS = {
    'convolution 7x7, stride 2': (conv(4, 64, 7, 2), (8, 4, 32, 32)),
    'convolution 1x1': (conv(64, 256, 1, 1), (8, 64, 14, 14)),
    'convolution 3x3': (conv(64, 64, 3, 1), (8, 64, 14, 14)),
    'convolution 3x3, stride 2': (conv(64, 64, 3, 2), (8, 64, 14, 14)),
    'convolution 1x1, stride 2': (conv(64, 128, 1, 2), (8, 64, 14, 14)),
    'BatchNorm': (norm(64), (8, 64, 14, 14)),
    'BatchNorm and ReLU': (norm_and_relu, (8, 64, 14, 14)),
    'max pooling': (lambda layout: nn.MaxPool2D(3, 2, 1, layout=layout), (8, 16, 32, 32)),
    'average pooling': (lambda layout: nn.GlobalAvgPool2D(layout=layout), (8, 64, 7, 7)),
    'dense': (lambda layout: nn.Dense(1000, in_units=256), (8, 256)),
    'loss': (lambda layout: Smoothed(0.1), (8, 10)),
    'residual unit with projection': (unit(0), (8, 64, 14, 14)),
    'residual unit': (unit(1), (8, 256, 14, 14)),
}
# Tolerance factor for several layers, because each one rounds and a ReLU amplifies the error if a
# sign changes.
SEVERAL = 10


@pytest.mark.parametrize('layout', ['NCHW', 'NHWC'])
@pytest.mark.parametrize('precision', ['float32', 'float16'])
@pytest.mark.parametrize('kind', KINDS)
def test_layer_matches_cpu(kind, precision, layout, context, check_distances):
    make, shape = KINDS[kind]
    factor = SEVERAL if 'unit' in kind else 1
    check_distances(
        f'{kind}, {precision}, {layout}',
        compare_block(make, shape, layout, precision, context),
        factor * LAYER_TOLERANCE[precision],
    )


FUSED = {
    'BatchNorm and ReLU': Fusion(NormRelu),
    'BatchNorm, sum and ReLU': Fusion(None, NormAddRelu),
    'both': Fusion(NormRelu, NormAddRelu),
}


@pytest.mark.skipif(not (has_norm_relu() and has_norm_add_relu()), reason='needs NVIDIA operators')
@pytest.mark.parametrize('name', FUSED)
def test_fused_unit_matches_cpu(name, context, check_distances):
    far = compare_block(unit(1, FUSED[name]), (8, 256, 14, 14), 'NHWC', 'float16', context, unit(1))
    check_distances(f'residual unit with {name}', far, SEVERAL * LAYER_TOLERANCE['float16'])
