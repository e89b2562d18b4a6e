"""The options of the network."""
from dataclasses import dataclass
from typing import Literal

from mlperf_rn50.bounds import ABOVE_0, FRACTION_BELOW_1, option, require


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: resnet50 is the benchmark (ResNet v1.5, as the other depths); the others are for throughput studies.
        layout: NCHW or NHWC; the CPU wheel wants NCHW.
        zero_gamma: start the last BatchNorm of each block at gamma = 0.
        fused_bn_relu: BatchNorm and ReLU as one operator. CPU builds have it, NVIDIA's builds have it for float16 with
            NHWC; null: on a CPU not, on a GPU where it is there.
        fused_bn_add_relu: BatchNorm, the sum with the shortcut and ReLU as one operator, which NVIDIA's builds have for
            float16 with NHWC; null: where it is there.
        bn_momentum: weight of the old value in the running statistics.
        bn_epsilon: added to the variance.
    """

    name: Literal['resnet18', 'resnet34', 'resnet50', 'resnet101', 'resnet152', 'alexnet', 'googlenet', 'inception_v3',
                  'inception_v4', 'vgg16', 'vgg19'] = 'resnet50'
    layout: Literal['NCHW', 'NHWC'] = 'NCHW'
    zero_gamma: bool = False
    fused_bn_relu: bool | None = None
    fused_bn_add_relu: bool | None = None
    bn_momentum: float = option(0.9, FRACTION_BELOW_1, 'fraction')
    bn_epsilon: float = option(1e-5, ABOVE_0)


def check_model(m: ModelConfig, device: str, precision: str) -> None:
    """Raise ConfigError for a network that a device does not have; device and precision: of train."""
    require(device == 'gpu' or m.layout == 'NCHW',
            'model.layout: got NHWC with train.device=cpu, expected NCHW; the CPU convolutions have no NHWC')
    require(m.layout == 'NCHW' or m.name.startswith('resnet'),
            f'model.layout: got NHWC with model.name={m.name}, expected NCHW; only the ResNets have NHWC')
    is_nvidia = (device, precision, m.layout) == ('gpu', 'float16', 'NHWC')
    kind = f'train.device={device}, train.precision={precision}, model.layout={m.layout}'
    require(is_nvidia or device == 'cpu' or not m.fused_bn_relu,
            f'model.fused_bn_relu: got true with {kind}, expected null; on a GPU it is there for float16 with NHWC')
    require(is_nvidia or not m.fused_bn_add_relu,
            f'model.fused_bn_add_relu: got true with {kind}, expected null; it is there for gpu, float16 and NHWC')
