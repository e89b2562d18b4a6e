"""The network of an evaluation, with each BatchNorm folded into the preceding convolution.

With running statistics, BatchNorm is y = (x - mean) gamma / sqrt(var + eps) + beta. The convolution's weights take over
the factor, a bias the rest. Source: Jacob et al. 2017 (https://arxiv.org/abs/1712.05877, section 3.2).
"""
import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.model.resnet import ResNet, row_image_size


class FoldedResNet:
    """A ResNet for evaluations, which uses the weights of the trained one."""

    def __init__(self, config: Config, context: mx.Context):
        self._epsilon = config.model.bn_epsilon
        self.net = ResNet(config.model, config.data.num_classes, 4 if config.data.pad_to_4_channels else 3,
                          is_folded=True, image_size=row_image_size(config))
        self.net.initialize(mx.init.Zero(), ctx=context)
        if config.train.precision == 'float16':
            self.net.cast('float16')
        # The MKLDNN backend would fuse more, but it caches the weights of one evaluation for the next.
        self.net.hybridize(static_alloc=True, static_shape=True)

    def copy_weights(self, trained: mx.gluon.HybridBlock) -> None:
        """Copy the current weights and running statistics."""
        source = {n: p.data() for n, p in trained.collect_params().items()}
        for name, param in self.net.collect_params().items():
            layer, _, kind = name.rpartition('_')
            if layer.endswith('fc1'):
                param.set_data(source[name])
            else:
                weight, bias = self._fold(layer, source)
                param.set_data((weight if kind == 'weight' else bias).astype(param.dtype))

    def _fold(self, layer: str, source: dict[str, mx.nd.NDArray]) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
        """Return weight and bias of a convolution with its BatchNorm folded in, float32."""
        head, _, number = layer.rpartition('conv')
        norm = f'{head}bn{number.removeprefix("1") if number == "1sc" else number}'
        gamma, beta, mean, var = (source[f'{norm}_{kind}'].astype('float32')
                                  for kind in ('gamma', 'beta', 'running_mean', 'running_var'))
        factor = gamma / mx.nd.sqrt(var + self._epsilon)
        weight = source[f'{layer}_weight'].astype('float32') * factor.reshape((-1, 1, 1, 1))
        return weight, beta - mean * factor


def eval_network(config: Config, context: mx.Context, trained: mx.gluon.HybridBlock) -> mx.gluon.HybridBlock:
    """Return the network for evaluations of a trained one: folded for a ResNet, else unchanged."""
    if not config.model.name.startswith('resnet'):
        return trained
    folded = FoldedResNet(config, context)
    folded.copy_weights(trained)
    return folded.net
