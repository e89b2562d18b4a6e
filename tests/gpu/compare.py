"""Blocks and steps on a device against the same in float32 and NCHW on the CPU; arrays are compared in NCHW.

What float16 rounds away in the inputs is rounded away in the reference, too: what is left is what kernels do.
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
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import OptimizerConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

Arrays = dict[str, np.ndarray]
LAST_GAMMA = 0.2
# Largest distance from the reference, as a share of its size: |got - expected| / |expected|, norms over an array. Of
# a layer: float32 sums in another order; float16 has 11 bits. Of a step: every layer of the network adds its own, and
# BatchNorm over few images makes differences larger on the way back.
LAYER_TOLERANCE = {'float32': 1e-4, 'float16': 1e-2}
STEP_TOLERANCE = {'float32': {'loss': 1e-4, 'grad': 5e-2, 'weight': 1e-3, 'statistics': 1e-3},
                  'float16': {'loss': 1e-2, 'grad': 0.3, 'weight': 1e-2, 'statistics': 2e-2}}


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """|got - expected| / |expected|; inf where something is no number, or shapes differ."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float('inf')
    size = np.linalg.norm(b)
    return float(np.linalg.norm(a - b) / size) if size else float(np.linalg.norm(a))


def distances(got: Arrays, expected: Arrays) -> dict[str, float]:
    """The distance of each array, by name; inf for one that only one side has."""
    return {n: distance(got[n], expected[n]) if n in got and n in expected else float('inf')
            for n in {**expected, **got}}


def to_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Images or weights of a convolution from NCHW to a layout."""
    return array.transpose(0, 2, 3, 1) if layout == 'NHWC' and array.ndim == 4 else array


def from_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """And back."""
    return array.transpose(0, 3, 1, 2) if layout == 'NHWC' and array.ndim == 4 else array


def rounded(array: np.ndarray, precision: str) -> np.ndarray:
    """What is left of float32 numbers in a precision."""
    return array.astype(precision).astype(np.float32)


def _parameter(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Numbers for a parameter, of the size that it has in training."""
    values = random.standard_normal(shape).astype(np.float32)
    if name.endswith('running_var'):
        return np.abs(values) + 0.5
    if name.endswith('gamma'):
        return 1 + 0.1 * values
    return values * np.sqrt(2 / np.prod(shape[1:])).astype(np.float32) if len(shape) > 1 else 0.1 * values


def run_block(make: Callable[[str], Any], shape: tuple[int, ...], layout: str, precision: str, rounding: str,
              context: mx.Context) -> Arrays:
    """Output, gradients and statistics of a block for the same numbers each time, in NCHW.

    Args:
        make: makes it for a layout.
        shape: of its input in NCHW.
        rounding: the precision that its input and parameters are rounded to first.
    """
    random = np.random.default_rng(7)

    def put(values: np.ndarray, dtype: Any) -> mx.nd.NDArray:
        return mx.nd.array(to_layout(rounded(values.astype(np.float32), rounding), layout), context, dtype)

    def get(array: mx.nd.NDArray) -> np.ndarray:
        return from_layout(array.asnumpy(), layout)
    block = make(layout)
    block.initialize(ctx=context)
    if precision == 'float16':
        block.cast('float16')
    block.hybridize(static_alloc=True, static_shape=True)
    params = list(block.collect_params().values())
    for p in params:
        p.set_data(put(_parameter(p.name, from_layout(np.empty(p.shape), layout).shape, random), p.dtype))
    x = put(random.standard_normal(shape), precision)
    x.attach_grad()
    with autograd.record():
        y = block(x)
    out = get(y)
    y.backward(put(np.random.default_rng(8).standard_normal(out.shape), y.dtype))
    mx.nd.waitall()
    found = {'output': out, 'gradient of the input': get(x.grad)}
    for i, p in enumerate(params):
        what, array = ('', p.data()) if p.grad_req == 'null' else ('gradient of ', p.grad())
        found[f'{what}{p.name.rpartition("_")[2]} {i}'] = get(array)
    return found


def compare_block(make: Callable[[str], Any], shape: tuple[int, ...], layout: str, precision: str,
                  context: mx.Context, reference: Callable[[str], Any] | None = None) -> dict[str, float]:
    """Distances of a block on a device from the CPU; reference makes the CPU's where it is another one."""
    expected = run_block(reference or make, shape, 'NCHW', 'float32', precision, mx.cpu())
    return distances(run_block(make, shape, layout, precision, precision, context), expected)


def step_config(name: str, layout: str, precision: str, optimizer: str, device: str = 'cpu') -> Config:
    """A small training: images of 64 pixels with 4 channels, the last of zeros.

    With device=gpu the network joins operators where there are kernels for it, with cpu it has them one by one.
    """
    data = DataConfig(num_train=32, num_val=16, num_classes=10, image_size=64, resize_shorter=64, synthetic=True,
                      pad_to_4_channels=True)
    return Config(data=data, model=ModelConfig(name=name, layout=layout),
                  optimizer=OptimizerConfig(optimizer, weight_decay=1e-3, lars_eta=0.02),
                  train=TrainConfig(local_batch_size=16, precision=precision, loss_scale=128.0, label_smoothing=0.1,
                                    device=device))


def make_trainer(config: Config, device_id: int | None) -> Trainer:
    return Trainer(make_plan(config, 1), Comm(), 0, device_id)


def plain(config: Config) -> Config:
    """The same on the CPU, in float32 and NCHW."""
    return replace(config, model=replace(config.model, layout='NCHW'),
                   train=replace(config.train, precision='float32', device='cpu'))


def weights_of(config: Config) -> Arrays:
    """The weights and statistics that a comparison starts from, in NCHW, by name in a checkpoint.

    Gamma of the last norm of each block is small, as after a start with zero_gamma: at 1 a fresh network of 50 layers
    makes the rounding of float16 as large as its gradients.
    """
    last = 'bn3_gamma' if units(depth_of(config.model))[0].is_bottleneck else 'bn2_gamma'
    found = make_trainer(plain(config), None).snapshot()
    return {n: a * LAST_GAMMA if n.endswith(last) else a for n, a in found.items() if n.startswith('model/')}


def set_weights(trainer: Trainer, weights: Arrays, layout: str) -> None:
    """Gives a trainer those weights, masters of float16 weights included, and velocities of 0."""
    arrays = {}
    for name, shape in trainer.array_shapes().items():
        source = weights.get(name) if name.startswith('model/') else \
            weights.get(name.replace('optimizer/master/', 'model/'))
        arrays[name] = np.zeros(shape, np.float32) if source is None else to_layout(source, layout)
    trainer.restore(arrays)


def make_batch(config: Config, rounding: str, device_id: int | None) -> Batch:
    """The same images each time, in the layout and precision of a configuration."""
    random, size = np.random.default_rng(3), config.train.local_batch_size
    images = rounded(random.standard_normal((size, 4, 64, 64)).astype(np.float32), rounding)
    images[:, 3] = 0
    context, precision = device_context(device_id), config.train.precision
    return Batch(mx.nd.array(to_layout(images, config.model.layout), context, precision),
                 mx.nd.array(random.integers(0, 10, size), context, 'int32'), size)


def run_steps(config: Config, weights: Arrays, rounding: str, device_id: int | None) -> Arrays:
    """Loss and gradients of the first of two steps, and weights and statistics after the second, by kind.

    The gradients and the weights are each one vector: a tensor whose gradient is next to nothing says little.
    """
    layout, trainer = config.model.layout, make_trainer(config, device_id)
    set_weights(trainer, {n: rounded(a, rounding) if n.endswith('weight') else a for n, a in weights.items()}, layout)
    batch, scale = make_batch(config, rounding, device_id), trainer.loss_scale.value

    def step(number: int) -> float:
        return trainer.read(trainer.step(iter([batch]), number, 0.05, False))[0]

    def vector(arrays: Arrays) -> np.ndarray:
        return np.concatenate([from_layout(a.astype(np.float64), layout).ravel() for _, a in sorted(arrays.items())])
    loss = step(0)
    grad = vector({t.name: t.grad.asnumpy() for t in trainer.optimizer.tensors}) / scale
    step(1)
    end = {n: a for n, a in trainer.snapshot().items() if n.startswith('model/')}
    return {'loss': np.array([loss]), 'grad': grad, 'weight': vector({n: end[n] for n in end if 'running' not in n}),
            'statistics': vector({n: end[n] for n in end if 'running' in n})}


def compare_steps(config: Config, device_id: int | None) -> dict[str, float]:
    """The distance of each kind (loss, grad, weight, statistics) from the CPU."""
    precision, weights = config.train.precision, weights_of(config)
    return distances(run_steps(config, weights, precision, device_id),
                     run_steps(plain(config), weights, precision, None))
