"""Comparison of blocks and steps on a device with float32 and NCHW on the CPU; arrays are compared
in NCHW.

Inputs of the reference are also rounded to float16, so only kernel differences remain.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch, device_context
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import depth_of, units
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import OptimizerConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

Arrays = dict[str, np.ndarray]
LAST_GAMMA = 0.2
# Largest relative distance from the reference: |got - expected| / |expected|, with norms over an
# array. For a layer, float32 is summed in a different order and float16 has 11 bits. For a step,
# the distances of all layers add up, and BatchNorm over few images amplifies them in the backward
# pass.
LAYER_TOLERANCE = {'float32': 1e-4, 'float16': 1e-2}
STEP_TOLERANCE = {
    'float32': {'loss': 1e-4, 'grad': 5e-2, 'weight': 1e-3, 'statistics': 1e-3},
    'float16': {'loss': 1e-2, 'grad': 0.3, 'weight': 1e-2, 'statistics': 2e-2},
}


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Return |got - expected| / |expected|; inf for non-finite values or different shapes."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float('inf')
    size = np.linalg.norm(b)
    return float(np.linalg.norm(a - b) / size) if size else float(np.linalg.norm(a))


def distances(got: Arrays, expected: Arrays) -> dict[str, float]:
    """Return the distance of each array by name; inf for an array missing on one side."""
    none = np.empty(0)
    return {n: distance(got.get(n, none), expected.get(n, none)) for n in {**expected, **got}}


def to_layout(array: np.ndarray, layout: str, source: int = 1, target: int = -1) -> np.ndarray:
    """Convert images or convolution weights from NCHW to a layout."""
    has_channels_last = layout == 'NHWC' and array.ndim == 4
    return np.moveaxis(array, source, target) if has_channels_last else array


def from_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Convert images or convolution weights from a layout to NCHW."""
    return to_layout(array, layout, -1, 1)


def rounded(array: np.ndarray, precision: str) -> np.ndarray:
    """Round float32 numbers to a precision."""
    return array.astype(precision).astype(np.float32)


def _parameter(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return random values of a parameter, of a size typical of training."""
    values = random.standard_normal(shape).astype(np.float32)
    if name.endswith('running_var'):
        return np.abs(values) + 0.5
    if name.endswith('gamma'):
        return 1 + 0.1 * values
    if len(shape) == 1:
        return 0.1 * values
    return values * np.sqrt(2 / np.prod(shape[1:])).astype(np.float32)


def run_block(
    make: Callable[[str], Any],
    shape: tuple[int, ...],
    layout: str,
    precision: str,
    rounding: str,
    context: mx.Context,
) -> Arrays:
    """Return output, gradients and statistics of a block in NCHW, for the same inputs at each call.

    Args:
        make: builds the block for a layout.
        shape: input shape in NCHW.
        rounding: precision to which input and parameters are rounded first.
    """
    random = np.random.default_rng(7)

    def put(values: np.ndarray, dtype: Any) -> mx.nd.NDArray:
        return mx.nd.array(to_layout(rounded(values, rounding), layout), context, dtype)

    def get(array: mx.nd.NDArray) -> np.ndarray:
        return from_layout(array.asnumpy(), layout)

    block = make(layout)
    block.initialize(ctx=context)
    if precision == 'float16':
        block.cast('float16')
    block.hybridize(static_alloc=True, static_shape=True)
    params = list(block.collect_params().values())
    for p in params:
        plain_shape = from_layout(np.empty(p.shape), layout).shape
        p.set_data(put(_parameter(p.name, plain_shape, random), p.dtype))
    x = put(random.standard_normal(shape), precision)
    x.attach_grad()
    with autograd.record():
        y = block(x)
    out = get(y)
    y.backward(put(np.random.default_rng(8).standard_normal(out.shape), y.dtype))
    mx.nd.waitall()
    arrays = {'output': out, 'gradient of the input': get(x.grad)}
    for i, p in enumerate(params):
        prefix, array = ('', p.data()) if p.grad_req == 'null' else ('gradient of ', p.grad())
        arrays[f'{prefix}{p.name.rpartition("_")[2]} {i}'] = get(array)
    return arrays


def compare_block(
    make: Callable[[str], Any],
    shape: tuple[int, ...],
    layout: str,
    precision: str,
    context: mx.Context,
    reference: Callable[[str], Any] | None = None,
) -> dict[str, float]:
    """Return distances between a block on a device and on the CPU, where `reference` can build a
    different block."""
    expected = run_block(reference or make, shape, 'NCHW', 'float32', precision, mx.cpu())
    return distances(run_block(make, shape, layout, precision, precision, context), expected)


def step_config(
    name: str, layout: Any, precision: str, optimizer: str, device: str = 'cpu'
) -> Config:
    """Configuration of a small training on images of 64 pixels with 4 channels, the last one zero.

    With device=gpu the network uses fused operators if kernels exist; with cpu, none, so that it
    also runs on a GPU.
    """
    images = dict(num_train=32, num_val=16, num_classes=10, image_size=64, resize_shorter=64)
    steps = dict(loss_scale=128.0, label_smoothing=0.1)
    fused = None if device == 'gpu' else False
    return Config(
        data=DataConfig(**images, synthetic=True, pad_to_4_channels=True),
        model=ModelConfig(name, layout, fused_bn_relu=fused, fused_bn_add_relu=fused),
        optimizer=OptimizerConfig(optimizer, weight_decay=1e-3, lars_eta=0.02),
        train=TrainConfig(16, precision=precision, device=device, **steps),
    )


def make_trainer(config: Config, device_id: int | None) -> Trainer:
    return Trainer(make_plan(config, 1), Comm(), 0, device_id)


def network_of(trainer: Trainer) -> Arrays:
    return {n: a for n, a in trainer.snapshot().items() if n.startswith('model/')}


def plain(config: Config) -> Config:
    """Return the same configuration for the CPU, in float32 and NCHW, without fused operators."""
    return replace(
        config,
        model=replace(config.model, layout='NCHW', fused_bn_relu=False, fused_bn_add_relu=False),
        train=replace(config.train, precision='float32', device='cpu'),
    )


def weights_of(config: Config) -> Arrays:
    """Return initial weights and statistics for a comparison, in NCHW, by checkpoint name.

    The last gamma of each block is small, as after a start with zero_gamma. With gamma = 1, float16
    rounding errors of an untrained network of 50 layers would be as large as its gradients.
    """
    last = 'bn3_gamma' if units(depth_of(config.model))[0].is_bottleneck else 'bn2_gamma'
    arrays = network_of(make_trainer(plain(config), None))
    return {n: a * LAST_GAMMA if n.endswith(last) else a for n, a in arrays.items()}


def set_weights(trainer: Trainer, weights: Arrays, layout: str) -> None:
    """Set weights, including float32 masters of float16 weights, and set velocities to 0."""
    arrays = {}
    for name, shape in trainer.array_shapes().items():
        source = weights.get(name.replace('optimizer/master/', 'model/'))
        arrays[name] = np.zeros(shape, np.float32) if source is None else to_layout(source, layout)
    trainer.load_state(TrainerState(arrays, loss_scale=trainer.loss_scale.value))


def make_batch(config: Config, rounding: str, device_id: int | None) -> Batch:
    """Return the same images at each call, in the layout and precision of a configuration."""
    random, size = np.random.default_rng(3), config.train.local_batch_size
    images = rounded(random.standard_normal((size, 4, 64, 64)).astype(np.float32), rounding)
    images[:, 3] = 0
    context, precision = device_context(device_id), config.train.precision
    return Batch(
        mx.nd.array(to_layout(images, config.model.layout), context, precision),
        mx.nd.array(random.integers(0, 10, size), context, 'int32'),
        size,
    )


def run_steps(config: Config, weights: Arrays, rounding: str, device_id: int | None) -> Arrays:
    """Return loss and gradients of the first of two steps, and weights and statistics after the
    second, by kind.

    All gradients and all weights form one vector each, because tiny gradients of single tensors are
    mostly noise.
    """
    layout, trainer = config.model.layout, make_trainer(config, device_id)
    start = {n: rounded(a, rounding) if n.endswith('weight') else a for n, a in weights.items()}
    set_weights(trainer, start, layout)
    batch, scale = make_batch(config, rounding, device_id), trainer.loss_scale.value

    def step(number: int) -> float:
        return trainer.read(trainer.step(iter([batch]), number, 0.05))[0]

    def vector(arrays: Arrays) -> np.ndarray:
        sorted_arrays = [a.astype(np.float64) for _, a in sorted(arrays.items())]
        return np.concatenate([from_layout(a, layout).ravel() for a in sorted_arrays])

    loss = step(0)
    grad = vector({t.name: t.grad.asnumpy() for t in trainer.optimizer.tensors}) / scale
    step(1)
    end = network_of(trainer)
    statistics = {n: end.pop(n) for n in [*end] if 'running' in n}
    return {
        'loss': np.array([loss]),
        'grad': grad,
        'weight': vector(end),
        'statistics': vector(statistics),
    }


def compare_steps(config: Config, device_id: int | None) -> dict[str, float]:
    """Return the distance of each kind (loss, grad, weight, statistics) from the CPU."""
    precision, weights = config.train.precision, weights_of(config)
    return distances(
        run_steps(config, weights, precision, device_id),
        run_steps(plain(config), weights, precision, None),
    )
