"""Norms joined with what follows them: what the MXNet at hand has, and what a network uses of it.

CPU builds have BatchNormReLU. NVIDIA's builds have BatchNorm with act_type=relu, and BatchNormAddRelu for the end of a
residual unit; both have a kernel for float16 with channels last only. Without it the first ends the program, and the
second leaves out the sum and the ReLU and says nothing (batch_norm.cu and batch_norm_add_relu.cu of NVIDIA's MXNet).
There the graph of a network is searched for such places, too, and they are joined unless MXNET_USE_FUSION=0.
"""
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import mxnet as mx
from mxnet.gluon import nn

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError


class NormRelu(nn.BatchNorm):
    """BatchNorm and ReLU, by NVIDIA's BatchNorm."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return F.BatchNorm(x, gamma, beta, running_mean, running_var, act_type='relu', name='fwd', **self._kwargs)


class NormAddRelu(nn.BatchNorm):
    """BatchNorm, the sum with another array and ReLU, by NVIDIA's BatchNormAddRelu."""

    def hybrid_forward(self, F, x, addend, gamma, beta, running_mean, running_var):
        # By name: the addend is the fourth input in some of NVIDIA's releases and the last in others.
        return F.BatchNormAddRelu(data=x, gamma=gamma, beta=beta, addend=addend, moving_mean=running_mean,
                                  moving_var=running_var, name='fwd', **self._kwargs)


@dataclass(frozen=True)
class Fusion:
    """The layers that stand for several, None where a network has these one by one.

    Args:
        norm_add_relu: for the last BatchNorm of a unit, the sum with the shortcut and ReLU.
    """

    norm_relu: type[nn.HybridBlock] | None = None
    norm_add_relu: type[nn.HybridBlock] | None = None

    def __str__(self) -> str:
        used = ['BatchNormAddRelu'] * bool(self.norm_add_relu)
        if self.norm_relu:
            used.append('BatchNorm with act_type=relu' if self.norm_relu is NormRelu else 'BatchNormReLU')
        return f'fused operators: {", ".join(used) or "none"}'


PLAIN = Fusion()


def has_norm_relu() -> bool:
    """Whether BatchNorm of this MXNet takes act_type."""
    return 'act_type' in inspect.signature(mx.sym.BatchNorm).parameters


def has_norm_add_relu() -> bool:
    """Whether this MXNet has BatchNormAddRelu."""
    return hasattr(mx.nd, 'BatchNormAddRelu') and hasattr(mx.sym, 'BatchNormAddRelu')


def _suits_kernels(config: Config) -> bool:
    """Whether a network computes in what NVIDIA's kernels are for."""
    return (config.train.device, config.train.precision, config.model.layout) == ('gpu', 'float16', 'NHWC')


def fusion_of(config: Config) -> Fusion:
    """What a ResNet uses: of a GPU build what is there, unless the configuration says otherwise.

    Raises:
        ConfigError: it wants an operator that this MXNet does not have.
    """
    model = config.model
    if config.train.device == 'cpu':
        return Fusion(nn.BatchNormReLU if model.fused_bn_relu else None)
    found = (('fused_bn_relu', 'BatchNorm with act_type', model.fused_bn_relu, has_norm_relu()),
             ('fused_bn_add_relu', 'BatchNormAddRelu', model.fused_bn_add_relu, has_norm_add_relu()))
    for key, operator, wanted, is_there in found:
        if wanted and not is_there:
            raise ConfigError(f'model.{key}: got true, and this MXNet ({mx.__version__}) has no {operator}; leave the '
                              "key out, or use a build of NVIDIA's, which has it")
    uses = [is_there and wanted is not False and _suits_kernels(config) for _, _, wanted, is_there in found]
    return Fusion(NormRelu if uses[0] else None, NormAddRelu if uses[1] else None)


def runs_nvidias_kernels(config: Config) -> bool:
    """Whether norms run in NVIDIA's kernels, fused or not.

    These write the gradients of gamma and beta, also where they were asked to add to them.
    """
    return _suits_kernels(config) and (has_norm_relu() or has_norm_add_relu())


def fusion_text(config: Config, environ: Mapping[str, str]) -> str:
    """What the log says of the operators of a ResNet."""
    fusion = fusion_of(config)
    is_joined_later = (runs_nvidias_kernels(config) and None in (fusion.norm_relu, fusion.norm_add_relu)
                       and environ.get('MXNET_USE_FUSION') != '0')
    return str(fusion) + '; MXNet joins the plain ones by itself unless MXNET_USE_FUSION=0' * is_joined_later
