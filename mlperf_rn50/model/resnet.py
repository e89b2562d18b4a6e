"""ResNet v1.5 in Gluon: the stride of a downsampling block sits on its 3x3 convolution and its projection.

Parameters carry the names of MLPerf's weights_initialization events (conv0_weight, stage1_unit1_bn1_gamma, ...).
Source: He et al. 2015 (https://arxiv.org/abs/1512.03385) with the v1.5 stride; initialisation as in MLPerf's
MXNet submissions.
"""
from dataclasses import dataclass

import mxnet as mx
from mxnet.gluon import nn

from mlperf_rn50.config import ModelConfig

# depth: (units per stage, whether units are bottlenecks)
STAGES: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True), 101: ((3, 4, 23, 3), True), 152: ((3, 8, 36, 3), True)}
STAGE_CHANNELS = (64, 128, 256, 512)
EXPANSION = 4


@dataclass(frozen=True)
class Layer:
    """A convolution of a unit and the norm after it, by the numbers in their names.

    Args:
        kernel: side.
        stride: of both axes.
        out_channels: of its output.
        has_relu: whether a ReLU follows the norm.
    """

    kernel: int
    stride: int
    out_channels: int
    has_relu: bool


@dataclass(frozen=True)
class Unit:
    """One residual unit, as build and log describe it.

    Args:
        name: such as stage1_unit1.
        in_channels: of its input.
        channels: of its inner convolutions.
        out_channels: of its output.
        stride: of its 3x3 convolution (the first one in a basic unit) and projection.
        has_projection: whether the shortcut is a 1x1 convolution.
        is_bottleneck: 1x1, 3x3, 1x1 instead of 3x3, 3x3.
    """

    name: str
    in_channels: int
    channels: int
    out_channels: int
    stride: int
    has_projection: bool
    is_bottleneck: bool

    @property
    def layers(self) -> list[Layer]:
        """The convolutions of its body, in order."""
        if self.is_bottleneck:
            return [Layer(1, 1, self.channels, True), Layer(3, self.stride, self.channels, True),
                    Layer(1, 1, self.out_channels, False)]
        return [Layer(3, self.stride, self.channels, True), Layer(3, 1, self.out_channels, False)]


def depth_of(config: ModelConfig) -> int:
    """The number of layers in the name of a ResNet."""
    return int(config.name.removeprefix('resnet'))


def units(depth: int) -> list[Unit]:
    """The residual units of a depth, in order."""
    counts, is_bottleneck = STAGES[depth]
    result, in_channels = [], STAGE_CHANNELS[0]
    for stage, (num_units, channels) in enumerate(zip(counts, STAGE_CHANNELS), start=1):
        out_channels = channels * (EXPANSION if is_bottleneck else 1)
        for unit in range(1, num_units + 1):
            stride = 2 if unit == 1 and stage > 1 else 1
            result.append(Unit(f'stage{stage}_unit{unit}', in_channels, channels, out_channels, stride,
                               stride > 1 or in_channels != out_channels, is_bottleneck))
            in_channels = out_channels
    return result


@dataclass(frozen=True)
class _Layers:
    """Makes the layers of a network: convolutions with norms, or (folded, for evaluations) with a bias instead."""

    config: ModelConfig
    is_folded: bool

    def conv(self, name: str, in_channels: int, layer: Layer) -> nn.Conv2D:
        init = mx.init.Xavier(rnd_type='gaussian', factor_type='in', magnitude=2)
        return nn.Conv2D(layer.out_channels, layer.kernel, layer.stride, layer.kernel // 2, use_bias=self.is_folded,
                         in_channels=in_channels, layout=self.config.layout, weight_initializer=init,
                         prefix=f'{name}_')

    def norm(self, name: str, layer: Layer, is_last: bool = False) -> list[nn.HybridBlock]:
        """BatchNorm, with ReLU after it where the layer has one; is_last marks the last of a unit (zero_gamma)."""
        config = self.config
        relu = [nn.Activation('relu')] if layer.has_relu else []
        if self.is_folded:
            return relu
        gamma = 'zeros' if is_last and config.zero_gamma else 'ones'
        keys = dict(axis=config.layout.index('C'), momentum=config.bn_momentum, epsilon=config.bn_epsilon,
                    in_channels=layer.out_channels, gamma_initializer=gamma, prefix=f'{name}_')
        if layer.has_relu and config.fused_bn_relu:
            return [nn.BatchNormReLU(**keys)]
        return [nn.BatchNorm(**keys), *relu]


class ResidualUnit(nn.HybridBlock):
    """One residual unit: body plus shortcut, then ReLU."""

    def __init__(self, unit: Unit, make: _Layers):
        super().__init__(prefix=f'{unit.name}_')
        with self.name_scope():
            self.body, channels = nn.HybridSequential(prefix=''), unit.in_channels
            with self.body.name_scope():
                for i, layer in enumerate(unit.layers, start=1):
                    self.body.add(make.conv(f'conv{i}', channels, layer),
                                  *make.norm(f'bn{i}', layer, is_last=i == len(unit.layers)))
                    channels = layer.out_channels
            self.shortcut = None
            if unit.has_projection:
                self.shortcut, layer = nn.HybridSequential(prefix=''), Layer(1, unit.stride, unit.out_channels, False)
                with self.shortcut.name_scope():
                    self.shortcut.add(make.conv('conv1sc', unit.in_channels, layer), *make.norm('bnsc', layer))

    def hybrid_forward(self, F, x):
        shortcut = x if self.shortcut is None else self.shortcut(x)
        # Activation, not relu: on a CPU only that one stays in oneDNN and its layout (bfloat16: a third of the step).
        return F.Activation(self.body(x) + shortcut, act_type='relu')


class ResNet(nn.HybridBlock):
    """ResNet v1.5: images in the configured layout to logits, float32 whatever the layers compute in."""

    def __init__(self, config: ModelConfig, num_classes: int, in_channels: int = 3, is_folded: bool = False):
        """in_channels is 3, or 4 with data.pad_to_4_channels; is_folded leaves the norms out, for evaluations."""
        super().__init__(prefix='')
        make, stem = _Layers(config, is_folded), Layer(7, 2, STAGE_CHANNELS[0], True)
        with self.name_scope():
            self.features = nn.HybridSequential(prefix='')
            with self.features.name_scope():
                self.features.add(make.conv('conv0', in_channels, stem), *make.norm('bn0', stem),
                                  nn.MaxPool2D(3, 2, 1, layout=config.layout))
                for unit in units(depth_of(config)):
                    self.features.add(ResidualUnit(unit, make))
                self.features.add(nn.GlobalAvgPool2D(layout=config.layout), nn.Flatten())
            self.fc = nn.Dense(num_classes, in_units=units(depth_of(config))[-1].out_channels,
                               weight_initializer=mx.init.Normal(0.01), bias_initializer='zeros', prefix='fc1_')

    def hybrid_forward(self, F, x):
        return F.cast(self.fc(self.features(x)), 'float32')
