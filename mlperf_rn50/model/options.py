"""Options for the network."""

from dataclasses import dataclass
from typing import Literal

from mlperf_rn50.bounds import ABOVE_0, FRACTION_BELOW_1, option, refuse


@dataclass(frozen=True)
class ModelConfig:
    """Network.

    Args:
        name: network; resnet50 is the benchmark, the others are for throughput studies. All ResNets
            are v1.5.
        layout: memory layout of images and activations; null selects NHWC if NVIDIA's kernels run
            (float16 on a GPU with NVIDIA's build of MXNet), otherwise NCHW. A CPU supports only
            NCHW.
        zero_gamma: initialise the last BatchNorm of each block with gamma = 0.
        fused_bn_relu: compute BatchNorm and ReLU in one operator (on GPUs: only NVIDIA's builds,
            float16 and NHWC); null uses the operator on a GPU where available, and on a CPU with
            AVX-512.
        fused_bn_add_relu: compute BatchNorm, addition of the shortcut and ReLU in one operator,
            which NVIDIA's builds have for float16 with NHWC; null uses the operator where
            available.
        bn_momentum: weight of the old value in an update of the running statistics.
        bn_epsilon: constant added to the variance in BatchNorm.
    """

    name: Literal[
        'resnet18',
        'resnet34',
        'resnet50',
        'resnet101',
        'resnet152',
        'alexnet',
        'googlenet',
        'inception_v3',
        'inception_v4',
        'vgg16',
        'vgg19',
    ] = 'resnet50'
    layout: Literal['NCHW', 'NHWC'] | None = None
    zero_gamma: bool = False
    fused_bn_relu: bool | None = None
    fused_bn_add_relu: bool | None = None
    bn_momentum: float = option(0.9, FRACTION_BELOW_1, 'fraction')
    bn_epsilon: float = option(1e-5, ABOVE_0)

    @property
    def is_resnet(self) -> bool:
        return self.name.startswith('resnet')


def check_model(m: ModelConfig, device: str, precision: str) -> None:
    """Raise ConfigError for a network that the device does not support at the precision (keys of
    the section train)."""
    refuse(
        m.layout == 'NHWC' and device != 'gpu',
        'model.layout: got NHWC with train.device=cpu, expected NCHW; convolutions on a CPU do '
        'not support NHWC',
    )
    refuse(
        m.layout == 'NHWC' and not m.is_resnet,
        f'model.layout: got NHWC with model.name={m.name}, expected NCHW; only ResNets support '
        'NHWC',
    )
    is_nvidia = (device, precision) == ('gpu', 'float16') and m.layout != 'NCHW' and m.is_resnet
    kind = f'train.device={device}, train.precision={precision}, model.layout={m.layout}'
    refuse(
        m.fused_bn_relu and device != 'cpu' and not is_nvidia,
        f'model.fused_bn_relu: got true with {kind}, expected null; a GPU supports it only for '
        'float16 with NHWC',
    )
    refuse(
        m.fused_bn_add_relu and not is_nvidia,
        f'model.fused_bn_add_relu: got true with {kind}, expected null; it needs gpu, float16 and '
        'NHWC',
    )
