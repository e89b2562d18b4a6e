"""ResNet v1.5 in Gluon, with the stride of a downsampling block on its 3x3 convolution and its
projection.

Parameters have the names of MLPerf's weights_initialization events (conv0_weight,
stage1_unit1_bn1_gamma, ...). Source: He et al. 2015 (https://arxiv.org/abs/1512.03385) with the
v1.5 stride; initialisation as in MLPerf's MXNet submissions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mxnet as mx
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from mlperf_rn50.config import Config, for_evaluation
from mlperf_rn50.model.fused import PLAIN, Fusion, pads_images
from mlperf_rn50.model.options import ModelConfig

# number of units in each stage, by depth; from 50 on, they are bottlenecks
STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STAGE_CHANNELS = (64, 128, 256, 512)
EXPANSION = 4
# side in pixels of the largest images that five strides of 2 reduce to one pixel
_LARGEST_ROW_IMAGE = 32


@dataclass(frozen=True)
class Layer:
    """A convolution of a unit and the BatchNorm after it."""

    kernel: int
    stride: int
    out_channels: int
    has_relu: bool


@dataclass(frozen=True)
class ResidualUnit:
    """A residual unit, as used for the network and the log."""

    name: str
    in_channels: int
    channels: int
    out_channels: int
    # stride of the projection and of the 3x3 convolution (in a basic unit, the first one)
    stride: int
    has_projection: bool  # whether the shortcut is a 1x1 convolution
    is_bottleneck: bool  # whether the convolutions are 1x1, 3x3 and 1x1 instead of two 3x3

    @property
    def layers(self) -> list[Layer]:
        if self.is_bottleneck:
            return [
                Layer(1, 1, self.channels, True),
                Layer(3, self.stride, self.channels, True),
                Layer(1, 1, self.out_channels, False),
            ]
        return [Layer(3, self.stride, self.channels, True), Layer(3, 1, self.out_channels, False)]


def side_after(side: int, stride: int) -> int:
    """Return the side of a feature map in pixels after a padded layer. A stride of 2 halves the
    side, rounded up."""
    return -(-side // stride)


def row_image_size(config: Config) -> int | None:
    """Return the image size if a ResNet on a CPU has 1x1 maps, which it computes as rows
    (_RowConv); otherwise None."""
    side = config.data.size_of()
    return side if config.train.device == 'cpu' and side <= _LARGEST_ROW_IMAGE else None


def depth_of(config: ModelConfig) -> int:
    return int(config.name.removeprefix('resnet'))


def units(depth: int) -> list[ResidualUnit]:
    """Return the residual units of a ResNet of this depth, in order."""
    counts, is_bottleneck = STAGES[depth], depth >= 50
    in_channels = STAGE_CHANNELS[0]
    result = []
    for stage, (num_units, channels) in enumerate(zip(counts, STAGE_CHANNELS), start=1):
        out_channels = channels * (EXPANSION if is_bottleneck else 1)
        for unit in range(1, num_units + 1):
            stride = 2 if unit == 1 and stage > 1 else 1
            result.append(
                ResidualUnit(
                    name=f'stage{stage}_unit{unit}',
                    in_channels=in_channels,
                    channels=channels,
                    out_channels=out_channels,
                    stride=stride,
                    has_projection=stride > 1 or in_channels != out_channels,
                    is_bottleneck=is_bottleneck,
                )
            )
            in_channels = out_channels
    return result


class _ChannelsLastXavier(mx.init.Xavier):
    """Xavier for weights of shape (out, height, width, in), with the numbers that MXNet's Xavier
    draws for NCHW."""

    def _init_weight(self, name, arr):
        num_out, height, width, num_in = arr.shape
        drawn = mx.nd.empty((num_out, num_in, height, width), arr.context, arr.dtype)
        super()._init_weight(name, drawn)
        arr[:] = drawn.transpose((0, 2, 3, 1))


# Axes that transpose 1x1 maps, (batch, channels, 1, 1), to one row of pixels of all images, (1,
# channels, 1, batch).
_ROW = (2, 1, 3, 0)


class _RowConv(nn.Conv2D):
    """A convolution to 1x1 maps, computed as a matrix product over a row of one pixel per image.
    Only for NCHW.

    oneDNN sums weight gradients image by image, which is slow for 1x1 maps. A row has the same
    BatchNorm statistics as the maps.
    """

    def __init__(self, in_side: int, *args: Any, **keys: Any):
        """in_side: side of the input maps in pixels, 1 for a row. The other arguments are those of
        nn.Conv2D."""
        super().__init__(*args, **keys)
        self._in_side = in_side
        # on each axis, kernel taps _first to _first + _num - 1 cover a pixel
        self._first = self._kwargs['pad'][0]
        self._num = min(in_side, self._kwargs['kernel'][0] - self._first)

    def hybrid_forward(self, F, x, weight, bias=None):
        side = self._kwargs['kernel'][0]
        first = self._first
        num = self._num
        end = first + num
        if self._in_side > 1:  # turn the covered pixels into channels
            # keep only the first pixel, by pooling, so that its gradient has oneDNN's layout
            if num < self._in_side:
                x = F.Pooling(x, kernel=(1, 1), stride=self._kwargs['stride'], pool_type='avg')
            x = F.transpose(F.reshape(x, (0, -1, 1, 1)), _ROW)
        if num < side:  # keep only the taps that cover a pixel
            if num == 1:  # as a column, whose gradient takes half the time
                tap = first * (side + 1)
                weight = F.slice_axis(F.reshape(weight, (-3, -3)), axis=1, begin=tap, end=tap + 1)
            else:
                weight = F.slice(weight, (None, None, first, first), (None, None, end, end))
            weight = F.reshape(weight, (self._channels, -1, 1, 1))
        keys = dict(kernel=(1, 1), num_filter=self._channels, name='fwd')
        if bias is None:
            return F.Convolution(x, weight, no_bias=True, **keys)
        return F.Convolution(x, weight, bias, **keys)


class _PaddedConv(nn.Conv2D):
    """A convolution of RGB images that adds a channel of zeros to images and weights, which changes
    no result.

    With four channels, oneDNN has a fast bfloat16 kernel. The parameter and its gradient keep
    three. Only for NCHW.
    """

    def hybrid_forward(self, F, x, weight, bias=None):
        padded = [
            F.concat(a, F.zeros_like(F.slice_axis(a, axis=1, begin=0, end=1)), dim=1)
            for a in (x, weight)
        ]
        return super().hybrid_forward(F, *padded, bias)


@dataclass(frozen=True)
class LayerMaker:
    """Factory of layers. Convolutions have BatchNorms or, if these are folded, biases. 1x1 maps are
    rows."""

    config: ModelConfig
    is_folded: bool
    fusion: Fusion

    def conv(self, name: str, in_channels: int, layer: Layer, in_side: int) -> nn.Conv2D:
        make: Callable[..., nn.Conv2D] = nn.Conv2D
        if side_after(in_side, layer.stride) == 1:
            make = partial(_RowConv, in_side)
        elif self.fusion.pads_images and in_channels == 3:
            make = _PaddedConv
        xavier = mx.init.Xavier if self.config.layout == 'NCHW' else _ChannelsLastXavier
        init = xavier(rnd_type='gaussian', factor_type='in', magnitude=2)
        return make(
            channels=layer.out_channels,
            kernel_size=layer.kernel,
            strides=layer.stride,
            padding=layer.kernel // 2,
            use_bias=self.is_folded,
            in_channels=in_channels,
            layout=self.config.layout,
            weight_initializer=init,
            prefix=f'{name}_',
        )

    def norm(self, name: str, layer: Layer, is_last: bool = False) -> list[nn.HybridBlock]:
        """Return a layer's BatchNorm, unless it is folded, and its ReLU, if any. is_last: the layer
        ends a unit."""
        keys = self._norm_keys(name, layer, is_last)
        if layer.has_relu and self.fusion.norm_relu and not self.is_folded:
            return [self.fusion.norm_relu(**keys)]
        layers = [] if self.is_folded else [nn.BatchNorm(**keys)]
        return [*layers, nn.Activation('relu')] if layer.has_relu else layers

    def norm_add_relu(self, name: str, layer: Layer) -> nn.HybridBlock | None:
        """Return BatchNorm, addition and ReLU at the end of a unit as one layer, or None if they
        are separate."""
        if self.is_folded or not self.fusion.norm_add_relu:
            return None
        return self.fusion.norm_add_relu(**self._norm_keys(name, layer, is_last=True))

    def _norm_keys(self, name: str, layer: Layer, is_last: bool) -> dict[str, Any]:
        config = self.config
        return dict(
            axis=3 if config.layout == 'NHWC' else 1,
            momentum=config.bn_momentum,
            epsilon=config.bn_epsilon,
            in_channels=layer.out_channels,
            prefix=f'{name}_',
            gamma_initializer='zeros' if is_last and config.zero_gamma else 'ones',
        )


class UnitBlock(nn.HybridBlock):
    def __init__(self, unit: ResidualUnit, make: LayerMaker, in_side: int):
        super().__init__(prefix=f'{unit.name}_')
        with self.name_scope():
            num = len(unit.layers)
            channels = unit.in_channels
            side = in_side
            self.body = nn.HybridSequential(prefix='')
            # Created before the shortcut, so that the parameters have the same order with and
            # without fusion.
            self.end = make.norm_add_relu(f'bn{num}', unit.layers[-1])
            with self.body.name_scope():
                for i, layer in enumerate(unit.layers, start=1):
                    self.body.add(make.conv(f'conv{i}', channels, layer, side))
                    if i < num or self.end is None:
                        self.body.add(*make.norm(f'bn{i}', layer, is_last=i == num))
                    channels = layer.out_channels
                    side = side_after(side, layer.stride)
            self.shortcut = None
            if unit.has_projection:
                layer = Layer(1, unit.stride, unit.out_channels, False)
                self.shortcut = nn.HybridSequential(prefix='')
                with self.shortcut.name_scope():
                    self.shortcut.add(
                        make.conv('conv1sc', unit.in_channels, layer, in_side),
                        *make.norm('bnsc', layer),
                    )

    def hybrid_forward(self, F, x):
        shortcut = x if self.shortcut is None else self.shortcut(x)
        if self.end is not None:
            return self.end(self.body(x), shortcut)
        # On a CPU, Activation stays in oneDNN's layout; relu would not, which would cost a third of
        # a bfloat16 step.
        return F.Activation(self.body(x) + shortcut, act_type='relu')


class ResNet(nn.HybridBlock):
    """ResNet v1.5, from images in the configured layout to float32 logits."""

    def __init__(
        self,
        config: Config,
        is_folded: bool = False,
        fusion: Fusion = PLAIN,
        image_size: int | None = None,
    ):
        """image_size: side of all images, if 1x1 maps are to be rows; else None."""
        super().__init__(prefix='')
        model = replace(config.model, layout=config.model.layout or 'NCHW')
        make = LayerMaker(model, is_folded, fusion)
        stem = Layer(7, 2, STAGE_CHANNELS[0], True)
        residual_units = units(depth_of(model))
        # side of the first unit's input; 0: any
        side = side_after(side_after(image_size or 0, stem.stride), 2)
        with self.name_scope():
            self.features = nn.HybridSequential(prefix='')
            with self.features.name_scope():
                num_channels = 4 if config.data.pad_to_4_channels else 3
                self.features.add(
                    make.conv('conv0', num_channels, stem, 0),
                    *make.norm('bn0', stem),
                    nn.MaxPool2D(3, 2, 1, layout=model.layout),
                )
                if side == 1:
                    self.features.add(nn.HybridLambda(lambda F, x: F.transpose(x, _ROW)))
                for unit in residual_units:
                    self.features.add(UnitBlock(unit, make, side))
                    side = side_after(side, unit.stride)
                if side == 1:  # undo _ROW
                    self.features.add(
                        nn.HybridLambda(lambda F, x: F.transpose(F.reshape(x, (-3, -3))))
                    )
                else:
                    self.features.add(nn.GlobalAvgPool2D(layout=model.layout), nn.Flatten())
            self.fc = nn.Dense(
                config.data.num_classes,
                in_units=residual_units[-1].out_channels,
                weight_initializer=mx.init.Normal(0.01),
                bias_initializer='zeros',
                prefix='fc1_',
            )

    def hybrid_forward(self, F, x):
        return F.cast(self.fc(self.features(x)), 'float32')


def initialise_with_zeros(net: nn.HybridBlock, context: mx.Context) -> None:
    """Initialise a network whose weights will be set, which takes less time than random weights."""
    net.collect_params().setattr('init', mx.init.Zero())
    net.initialize(ctx=context)


class FoldedResNet:
    """A ResNet for evaluations, with the trained BatchNorms folded into the preceding convolutions.

    With running statistics, BatchNorm is y = (x - mean) gamma / sqrt(var + eps) + beta. The factor
    goes into the convolution's weights, the rest into a bias. Source: Jacob et al. 2017
    (https://arxiv.org/abs/1712.05877, sec. 3.2).
    """

    def __init__(self, config: Config, context: mx.Context):
        config = for_evaluation(config)
        self._epsilon = config.model.bn_epsilon
        self.net = ResNet(
            config,
            is_folded=True,
            fusion=replace(PLAIN, pads_images=pads_images(config)),
            image_size=row_image_size(config),
        )
        initialise_with_zeros(self.net, context)
        if config.train.precision == 'float16':
            self.net.cast('float16')
        # MXNet's MKLDNN backend would fuse more operators, but also keep using the weights of an
        # earlier evaluation.
        self.net.hybridize(static_alloc=True, static_shape=True)

    def copy_weights(self, trained: nn.HybridBlock) -> None:
        """Copy the current weights of a trained network, with its running statistics folded in."""
        source = {n: p.data() for n, p in trained.collect_params().items()}
        for name, param in self.net.collect_params().items():
            layer, _, kind = name.rpartition('_')
            array = source[name] if layer.endswith('fc1') else self._fold(layer, source)[kind]
            param.set_data(array.astype(param.dtype))

    def _fold(self, layer: str, source: dict[str, NDArray]) -> dict[str, NDArray]:
        """Return the weight and bias of a convolution with its BatchNorm folded in. Both are
        float32."""
        head, _, number = layer.rpartition('conv')
        norm = f'{head}bnsc' if number == '1sc' else f'{head}bn{number}'
        gamma, beta, mean, var = (
            source[f'{norm}_{kind}'].astype('float32')
            for kind in ('gamma', 'beta', 'running_mean', 'running_var')
        )
        factor = gamma / mx.nd.sqrt(var + self._epsilon)
        weight = source[f'{layer}_weight'].astype('float32') * factor.reshape((-1, 1, 1, 1))
        return {'weight': weight, 'bias': beta - mean * factor}


def eval_network(config: Config, context: mx.Context, trained: nn.HybridBlock) -> nn.HybridBlock:
    """Return the evaluation network of a trained network: folded for a ResNet, otherwise
    unchanged."""
    if not config.model.is_resnet:
        return trained
    folded = FoldedResNet(config, context)
    folded.copy_weights(trained)
    return folded.net
