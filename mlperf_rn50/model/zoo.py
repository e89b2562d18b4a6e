"""Networks other than ResNet, for throughput studies; functions that build any network and count
its FLOPs.

Networks come from Gluon's model zoo if it has them. Sources: AlexNet, Krizhevsky 2014
(https://arxiv.org/abs/1404.5997); VGG, Simonyan and Zisserman 2014
(https://arxiv.org/abs/1409.1556); GoogLeNet, Szegedy et al. 2014 (https://arxiv.org/abs/1409.4842),
without local response normalisation; Inception-v3, Szegedy et al. 2015
(https://arxiv.org/abs/1512.00567); Inception-v4, Szegedy et al. 2016
(https://arxiv.org/abs/1602.07261). The networks here have no auxiliary classifiers.
"""

import json
import math
import os
from collections.abc import Iterator

import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import HybridConcurrent
from mxnet.gluon.model_zoo import vision

from mlperf_rn50.config import Config, image_shape, with_size
from mlperf_rn50.errors import ConfigError, DataError, UserError
from mlperf_rn50.model.fused import fusion_of
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import ResNet, initialise_with_zeros, row_image_size
from mlperf_rn50.model.weights import set_weights
from mlperf_rn50.npz import Arrays
from mlperf_rn50.system.processor import find_processor

# GoogLeNet's channels in stages 3 to 5 (table 1): 1x1; reduction and 3x3; reduction and 5x5;
# projection of the pool.
_GOOGLENET = """
    64 96 128 16 32 32
    128 128 192 32 96 64

    192 96 208 16 48 64
    160 112 224 24 64 64
    128 128 256 24 64 64
    112 144 288 32 64 64
    256 160 320 32 128 128

    256 160 320 32 128 128
    384 192 384 48 128 128
"""

# Inception-v4 (figure 9), from the units of figures 3 to 8 with the sizes of table 1. Each row is a
# number of equal units and their parallel paths, in the words that _path explains. The units A, B
# and C are repeated; a reduction follows A and B.
_INCEPTION_V4 = """
    1 | max | 96:3/2
    1 | 64:1 96:3/1 | 64:1 64:7x1 64:1x7 96:3/1
    1 | 192:3/2 | max
    4 | avg 96:1 | 96:1 | 64:1 96:3 | 64:1 96:3 96:3
    1 | max | 384:3/2 | 192:1 224:3 256:3/2
    7 | avg 128:1 | 384:1 | 192:1 224:1x7 256:7x1 | 192:1 192:1x7 224:7x1 224:1x7 256:7x1
    1 | max | 192:1 192:3/2 | 256:1 256:1x7 320:7x1 320:3/2
    3 | avg 256:1 | 256:1 | 384:1 256:1x3|256:3x1 | 384:1 448:1x3 512:3x1 256:1x3|256:3x1
"""


def image_size_of(name: str) -> int:
    """Return the side, in pixels, of the square images for which a network was designed."""
    return 299 if name.startswith('inception') else 224


def _chain(*blocks: nn.HybridBlock) -> nn.HybridSequential:
    chain = nn.HybridSequential(prefix='')
    chain.add(*blocks)
    return chain


def _branches(*blocks: nn.HybridBlock) -> HybridConcurrent:
    """Return parallel paths from one input, whose output channels are concatenated."""
    result = HybridConcurrent(axis=1, prefix='')
    result.add(*blocks)
    return result


def _classifier(dropout: float, num_classes: int) -> list[nn.HybridBlock]:
    """Return the last layers of the networks here, which accept feature maps of any size."""
    return [nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dropout(dropout), nn.Dense(num_classes)]


def _conv(channels: int, kernel: int, stride: int = 1) -> nn.HybridBlock:
    """Return a convolution with bias and ReLU, as in GoogLeNet."""
    return nn.Conv2D(channels, kernel, stride, kernel // 2, activation='relu')


def _googlenet_unit(a: int, b0: int, b: int, c0: int, c: int, d: int) -> nn.HybridBlock:
    return _branches(
        _conv(a, 1),
        _chain(_conv(b0, 1), _conv(b, 3)),
        _chain(_conv(c0, 1), _conv(c, 5)),
        _chain(nn.MaxPool2D(3, 1, 1), _conv(d, 1)),
    )


def _googlenet(num_classes: int) -> nn.HybridBlock:
    def pool() -> nn.HybridBlock:
        return nn.MaxPool2D(3, 2, ceil_mode=True)

    blocks = [_conv(64, 7, 2), pool(), _conv(64, 1), _conv(192, 3)]
    for stage in _GOOGLENET.split('\n\n'):
        blocks.append(pool())
        blocks += [_googlenet_unit(*map(int, row.split())) for row in stage.strip().splitlines()]
    return _chain(*blocks, *_classifier(0.4, num_classes))


def _path(text: str) -> nn.HybridBlock:
    """Return a chain of layers of the later Inception networks, given as words.

    64:3 is a padded convolution with 64 channels and a kernel of 3x3, BatchNorm and ReLU; 64:1x7
    has a kernel of 1x7; 64:3/2 has a stride of 2 and no padding. max and avg are pools. Paths
    separated by | are parallel.
    """
    blocks: list[nn.HybridBlock] = []
    for word in text.split():
        if word == 'max':
            blocks.append(nn.MaxPool2D(3, 2))
        elif word == 'avg':
            blocks.append(nn.AvgPool2D(3, 1, 1, count_include_pad=False))
        elif '|' in word:
            blocks.append(_branches(*map(_path, word.split('|'))))
        else:
            channels, _, shape = word.partition(':')
            sides, _, stride = shape.partition('/')
            height, *width = map(int, sides.split('x'))
            kernel = (height, *(width or [height]))
            padding = 0 if stride else tuple(side // 2 for side in kernel)
            blocks += [
                nn.Conv2D(int(channels), kernel, int(stride or 1), padding, use_bias=False),
                nn.BatchNorm(epsilon=0.001),
                nn.Activation('relu'),
            ]
    return _chain(*blocks)


def _inception_v4(num_classes: int) -> nn.HybridBlock:
    # Gluon numbers the parameters in the order of creation, which is that of the network.
    stem = _path('32:3/2 32:3/1 64:3')
    rows = [row.strip().split(' | ') for row in _INCEPTION_V4.strip().splitlines()]
    units = [_branches(*map(_path, paths)) for times, *paths in rows for _ in range(int(times))]
    return _chain(stem, *units, *_classifier(0.2, num_classes))


def _inception_v3(num_classes: int) -> nn.HybridBlock:
    """Return Gluon's network with global pooling, so that it accepts images of any size."""
    features = vision.inception_v3(prefix='').features[:-2]
    return _chain(features, *_classifier(0.5, num_classes))


# Networks that Gluon lacks, or has for a single size of images.
_MAKERS = {'googlenet': _googlenet, 'inception_v3': _inception_v3, 'inception_v4': _inception_v4}


class Classifier(nn.HybridBlock):
    def __init__(self, config: ModelConfig, num_classes: int):
        super().__init__(prefix=f'{config.name}_')
        with self.name_scope():
            if config.name in _MAKERS:
                self.net = _MAKERS[config.name](num_classes)
            else:
                self.net = getattr(vision, config.name)(classes=num_classes, prefix='')

    def hybrid_forward(self, F, x):
        return F.cast(self.net(x), 'float32')


def build_for_sizes(config: Config, net: nn.HybridBlock) -> dict[int, nn.HybridBlock]:
    """Return the networks by size of training images, largest first; net is that of the first
    epoch.

    They share their parameters. A ResNet on a CPU needs another network for each size with 1x1 maps
    (row_image_size).
    """
    sides = sorted({*config.data.sizes, config.data.size_of()}, reverse=True)
    if not config.model.is_resnet:
        return dict.fromkeys(sides, net)
    data = mx.sym.var('data', dtype='float32')
    fusion = fusion_of(config, find_processor())
    nets = {row_image_size(config): net}
    result = {}
    for side in sides:
        rows = row_image_size(with_size(config, side))
        if rows not in nets:
            symbol = ResNet(config, fusion=fusion, image_size=rows)(data)
            nets[rows] = mx.gluon.SymbolBlock(symbol, data, net.collect_params())
            nets[rows].hybridize(static_alloc=True, static_shape=True)
        result[side] = nets[rows]
    return result


def _make_resnet(config: Config, is_plain: bool) -> ResNet:
    if is_plain:
        return ResNet(config)
    fusion = fusion_of(config, find_processor())
    return ResNet(config, fusion=fusion, image_size=row_image_size(config))


def _make_classifier(config: Config) -> Classifier:
    net = Classifier(config.model, config.data.num_classes)
    data = config.data
    smallest = min({*data.sizes, data.size_of(), data.eval_size or data.image_size})
    try:  # infer shapes without a forward pass, which would change the layout of the weights
        net.infer_shape(mx.nd.zeros((1, *image_shape(with_size(config, smallest)))))
    except (mx.MXNetError, ValueError) as e:
        if 'exceed' not in str(e):  # MXNet's message for a kernel larger than its input
            raise
        name = config.model.name
        raise ConfigError(
            f'data.image_size, data.sizes, data.eval_size: got {smallest}, too small for {name}, '
            f'expected about {image_size_of(name)}; raise it'
        ) from e
    return net


def build_model(
    config: Config, context: mx.Context, seed: int | None, is_plain: bool = False
) -> nn.HybridBlock:
    """Return an initialised, hybridized network.

    Args:
        seed: of the initial weights; None for zeros, if weights will be set.
        is_plain: a ResNet has no fused operators and takes any image size.
    """
    if config.train.precision == 'bfloat16':
        from mxnet.contrib import amp

        # amp adds casts around operators; weights stay float32. No loss scaling is needed with
        # bfloat16's range.
        amp.init('bfloat16')
    net = _make_resnet(config, is_plain) if config.model.is_resnet else _make_classifier(config)
    if seed is None:
        initialise_with_zeros(net, context)
    else:
        mx.random.seed(seed)
        # of layers that state no initialisation, which a ResNet does not have
        default = mx.init.Xavier(rnd_type='gaussian', factor_type='in', magnitude=2)
        net.initialize(default, ctx=context)
    if config.train.precision == 'float16':
        net.cast('float16')
    keys = {}
    variable = 'MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD'
    # On a GPU, the backward pass is one segment if the exchange follows it; otherwise several, so
    # that both overlap. NVIDIA's builds pass every keyword on, and reject None.
    if config.train.device == 'gpu' and variable not in os.environ:
        keys['backward_bulk_size'] = 999 if config.comm.num_buckets == 1 else 25
    net.hybridize(static_alloc=True, static_shape=True, **keys)
    return net


def restore_model(
    config: Config, context: mx.Context, arrays: Arrays, where: str
) -> nn.HybridBlock:
    """Return a network of ordinary operators with these weights. Raise DataError if any are missing
    or do not fit."""
    net = build_model(config, context, None, is_plain=True)
    try:
        notes = set_weights(net, arrays)
    except UserError as e:
        raise DataError(f'{where}: {e}') from e
    if notes:
        raise DataError(f'{where}: {notes[0]}; expected weights of all layers')
    return net


def count_parameters(net: nn.HybridBlock) -> int:
    """Return the number of trained parameters, which excludes running statistics."""
    return sum(p.data().size for p in net.collect_params().values() if p.grad_req != 'null')


def _nodes(
    net: nn.HybridBlock, shape: tuple[int, ...]
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """Yield operator, last input's name, second input's shape and output's shape of each node with
    several inputs."""
    symbol = net(mx.sym.var('data'))
    internals = symbol.get_internals()
    shape_of = dict(zip(internals.list_outputs(), internals.infer_shape(data=shape)[1]))
    graph = json.loads(symbol.tojson())['nodes']
    names = [node['name'] if node['op'] == 'null' else f'{node["name"]}_output' for node in graph]
    for node, name in zip(graph, names):
        given = [names[i] for i, *_ in node['inputs']]
        if len(given) > 1:
            yield node['op'], given[-1], shape_of[given[1]], shape_of[name]


def count_flops(net: nn.HybridBlock, shape: tuple[int, int, int]) -> int:
    """Return the FLOPs of one image's forward pass, two per multiply-add of convolutions and dense
    layers."""
    return sum(
        2 * math.prod(output) * math.prod(weight) // weight[0]
        for op, _, weight, output in _nodes(net, (1, *shape))
        if op in ('Convolution', 'FullyConnected')
    )


def variance_corrections(net: nn.HybridBlock, shape: tuple[int, ...]) -> dict[str, float]:
    """Return N / (N - 1) for each running variance by name. N is the number of values per channel
    in a batch."""
    corrections = {}
    for op, var, gamma, output in _nodes(net, shape):
        if 'BatchNorm' in op:
            num = math.prod(output) // gamma[0]
            corrections[var] = num / max(1, num - 1)
    return corrections
