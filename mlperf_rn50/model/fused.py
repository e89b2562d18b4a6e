"""Fused BatchNorm operators that the installed MXNet provides and that a network uses.

CPU builds have BatchNormReLU. NVIDIA's builds have BatchNorm with act_type=relu, and
BatchNormAddRelu for the end of a residual unit. Both NVIDIA operators need float16 with channels
last. For other inputs, the former aborts the process and the latter silently omits sum and ReLU
(batch_norm.cu and batch_norm_add_relu.cu of NVIDIA's MXNet). NVIDIA's builds also fuse separate
operators of a network's graph automatically, unless MXNET_USE_FUSION=0.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mxnet as mx
from mxnet.gluon import nn

from mlperf_rn50.config import Config
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.processor import Processor


class NormRelu(nn.BatchNorm):
    """BatchNorm and ReLU in one operator, the BatchNorm of NVIDIA's builds."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        # The layer of NVIDIA's builds stores act_type, with None as its default.
        keys = {**self._kwargs, 'act_type': 'relu'}
        return F.BatchNorm(x, gamma, beta, running_mean, running_var, name='fwd', **keys)


class NormAddRelu(nn.BatchNorm):
    """BatchNorm, addition and ReLU in one operator, NVIDIA's BatchNormAddRelu."""

    def hybrid_forward(self, F, x, addend, gamma, beta, running_mean, running_var):
        # the operator has no act_type
        keys = {key: value for key, value in self._kwargs.items() if key != 'act_type'}
        # Arguments are passed by name, because the position of the addend differs between NVIDIA's
        # releases.
        return F.BatchNormAddRelu(
            data=x,
            gamma=gamma,
            beta=beta,
            addend=addend,
            moving_mean=running_mean,
            moving_var=running_var,
            name='fwd',
            **keys,
        )


@dataclass(frozen=True)
class Fusion:
    """Types of fused layers, or None for separate ones. norm_add_relu ends a unit with BatchNorm,
    addition and ReLU.

    pads_images: the first convolution adds a channel of zeros to RGB images and to its weights.
    """

    norm_relu: type[nn.HybridBlock] | None = None
    norm_add_relu: type[nn.HybridBlock] | None = None
    pads_images: bool = False

    def __str__(self) -> str:
        used = []
        if self.norm_add_relu:
            used.append('BatchNormAddRelu')
        if self.norm_relu is NormRelu:
            used.append('BatchNorm with act_type=relu')
        elif self.norm_relu:
            used.append('BatchNormReLU')
        text = f'fused operators: {", ".join(used) or "none"}'
        return (
            f'{text}; the first convolution adds a channel of zeros' if self.pads_images else text
        )


PLAIN = Fusion()
_MAX_ROWS = 880_801


def has_norm_relu() -> bool:
    """Return whether the BatchNorm of this MXNet accepts act_type."""
    return 'act_type' in inspect.signature(mx.sym.BatchNorm).parameters


def has_norm_add_relu() -> bool:
    """Return whether this MXNet has BatchNormAddRelu."""
    return hasattr(mx.nd, 'BatchNormAddRelu') and hasattr(mx.sym, 'BatchNormAddRelu')


def _suits_kernels(config: Config) -> bool:
    """Return whether a network has the device, precision and layout that NVIDIA's kernels
    support."""
    train = config.train
    return (train.device, train.precision, config.model.layout) == ('gpu', 'float16', 'NHWC')


def pads_images(config: Config) -> bool:
    """Return whether the first convolution adds a channel, by default for bfloat16, whose kernels
    need two pairs."""
    is_bfloat16 = (config.train.device, config.train.precision) == ('cpu', 'bfloat16')
    return is_bfloat16 and config.data.pad_to_4_channels is None


def fusion_of(config: Config, processor: Processor) -> Fusion:
    """Return how a ResNet's layers are computed. A key that is null selects what is fastest on this
    processor or GPU.

    On a GPU, these are all fused layers that MXNet has for the configuration. On a CPU,
    BatchNormReLU saves passes over memory, which pays off with AVX-512; with AVX2,
    benchmarks/README.md found no gain. Raise ConfigError if the configuration requires a layer that
    MXNet lacks.
    """
    model = config.model
    if config.train.device == 'cpu':
        is_fused = processor.has_avx512 if model.fused_bn_relu is None else model.fused_bn_relu
        return Fusion(nn.BatchNormReLU if is_fused else None, pads_images=pads_images(config))
    if model.fused_bn_relu and not has_norm_relu():
        raise _lack_of('fused_bn_relu', 'BatchNorm with act_type')
    if model.fused_bn_add_relu and not has_norm_add_relu():
        raise _lack_of('fused_bn_add_relu', 'BatchNormAddRelu')
    if not _suits_kernels(config):
        return PLAIN
    has_relu = has_norm_relu() and model.fused_bn_relu is not False
    has_add_relu = has_norm_add_relu() and model.fused_bn_add_relu is not False
    return Fusion(NormRelu if has_relu else None, NormAddRelu if has_add_relu else None)


def _lack_of(key: str, operator: str) -> ConfigError:
    return ConfigError(
        f'model.{key}: got true, but MXNet {mx.__version__} has no {operator}; omit the key or use '
        'a build from NVIDIA'
    )


def runs_nvidias_kernels(config: Config) -> bool:
    """Return whether NVIDIA's kernels run BatchNorm. They overwrite gradients of gamma and beta,
    never add to them."""
    return _suits_kernels(config) and (has_norm_relu() or has_norm_add_relu())


def with_layout(config: Config) -> Config:
    """Return a configuration with a layout, by default NHWC where NVIDIA's kernels run and
    otherwise NCHW."""
    if config.model.layout:
        return config
    nhwc = replace(config, model=replace(config.model, layout='NHWC'))
    if config.model.is_resnet and runs_nvidias_kernels(nhwc):
        return nhwc
    return replace(config, model=replace(config.model, layout='NCHW'))


def layout_warnings(config: Config) -> list[str]:
    """Return a warning if a network has the layout NHWC but NVIDIA's kernels do not run.

    MXNet 1.9.1 then describes each pixel to cuDNN as a row (cudnn_batch_norm-inl.h). PyTorch does
    not use cuDNN's BatchNorm to train on more than 880,801 rows (Normalization.cpp).
    """
    if config.model.layout != 'NHWC' or runs_nvidias_kernels(config):
        return []
    side = max([config.data.image_size, *config.data.sizes])
    # the first BatchNorm has the most rows, a quarter of the pixels
    num_images = _MAX_ROWS // (-(-side // 2)) ** 2
    return [
        "model.layout: got NHWC without NVIDIA's kernels, expected NCHW; cuDNN's BatchNorm is slow "
        f'on it and supports at most {_MAX_ROWS:,} rows in training, which is {num_images:,} '
        f'images of {side} pixels per rank; set model.layout to null'
    ]


def fusion_text(config: Config, environ: Mapping[str, str], processor: Processor) -> str:
    """Return the text of log and doctor about how a ResNet's layers are computed, and on a CPU for
    which processor."""
    fusion = fusion_of(config, processor)
    if config.train.device == 'cpu':
        return f'{processor.uses}, {config.train.precision}: layout NCHW; {fusion}'
    is_fused_later = (
        runs_nvidias_kernels(config)
        and None in (fusion.norm_relu, fusion.norm_add_relu)
        and environ.get('MXNET_USE_FUSION') != '0'
    )
    text = f'layout {config.model.layout}; {fusion}'
    if is_fused_later:
        text += '; MXNet fuses the plain operators automatically unless MXNET_USE_FUSION=0'
    return text
