"""The network of an evaluation: BatchNorm folded into the convolution before it.

With running statistics a BatchNorm is y = (x - mean) gamma / sqrt(var + eps) + beta: a factor and a term for each
channel, which the convolution's weights and a bias take over. Source: Jacob et al. 2017
(https://arxiv.org/abs/1712.05877, section 3.2).
"""
import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.model.resnet import ResNet, row_image_size


class FoldedResNet:
    """A ResNet for evaluations, fed with the weights of the one that is trained."""

    def __init__(self, config: Config, context: mx.Context):
        self._epsilon = config.model.bn_epsilon
        self.net = ResNet(config.model, config.data.num_classes, 4 if config.data.pad_to_4_channels else 3,
                          is_folded=True, image_size=row_image_size(config))
        self.net.initialize(mx.init.Zero(), ctx=context)
        if config.train.precision == 'float16':
            self.net.cast('float16')
        # Not with the MKLDNN backend, which would fuse more: it keeps weights of an evaluation for the next one.
        self.net.hybridize(static_alloc=True, static_shape=True)

    def take(self, trained: mx.gluon.HybridBlock) -> None:
        """Takes over weights and running statistics as they stand."""
        source = {n: p.data() for n, p in trained.collect_params().items()}
        for name, param in self.net.collect_params().items():
            layer, _, kind = name.rpartition('_')
            if layer.endswith('fc1'):
                param.set_data(source[name])
            else:
                weight, bias = self._fold(layer, source)
                param.set_data((weight if kind == 'weight' else bias).astype(param.dtype))

    def _fold(self, layer: str, source: dict[str, mx.nd.NDArray]) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
        """Weight and bias of a convolution with its norm in it, float32."""
        head, _, number = layer.rpartition('conv')
        norm = f'{head}bn{number.removeprefix("1") if number == "1sc" else number}'
        gamma, beta, mean, var = (source[f'{norm}_{kind}'].astype('float32')
                                  for kind in ('gamma', 'beta', 'running_mean', 'running_var'))
        factor = gamma / mx.nd.sqrt(var + self._epsilon)
        weight = source[f'{layer}_weight'].astype('float32') * factor.reshape((-1, 1, 1, 1))
        return weight, beta - mean * factor


def eval_network(config: Config, context: mx.Context, trained: mx.gluon.HybridBlock) -> mx.gluon.HybridBlock:
    """What evaluations use of a trained network: a ResNet is folded, any other is taken as it is."""
    if not config.model.name.startswith('resnet'):
        return trained
    folded = FoldedResNet(config, context)
    folded.take(trained)
    return folded.net
