"""`bench ops`: speed of matrix products and of a ResNet's convolutions, forward and backward,
relative to the peak."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import mxnet as mx
from mxnet import autograd, nd
from mxnet.ndarray import NDArray

from mlperf_rn50.bench.measure import BenchSession, ResultTable, Row, spread_of
from mlperf_rn50.config import Config
from mlperf_rn50.model.resnet import depth_of, side_after, units
from mlperf_rn50.train.comm.device import cast, gemm_times, measure_peak
from mlperf_rn50.train.comm.horovod import wait_for

GEMM_SIDES = (512, 1024, 2048, 4096)
_PRODUCT_COLUMNS = """
    side     side     d
    time_ms  ms       ,.2f
    spread   ±        .0%
    gflops   GFLOP/s  ,.0f
    share    of peak  .0%"""
_CONVOLUTION_COLUMNS = """
    layer            layer        s
    side             pixels       d
    count            times        d
    gflop            GFLOP        .2f
    forward_ms       forward ms   ,.2f
    forward_gflops   GFLOP/s      ,.0f
    forward_share    of peak      .0%
    backward_ms      backward ms  ,.2f
    backward_gflops  GFLOP/s      ,.0f
    backward_share   of peak      .0%"""


@dataclass(frozen=True)
class Convolution:
    """A convolution of a network. `side` is the width and height of its input in pixels."""

    in_channels: int
    channels: int
    side: int
    kernel: int
    stride: int

    @property
    def is_first(self) -> bool:
        """Whether its input is the image, which needs no gradient."""
        return self.in_channels < 16

    def flops(self, batch_size: int) -> int:
        """FLOPs of one forward pass, two per multiply-add."""
        out_side = side_after(self.side, self.stride)
        return 2 * batch_size * out_side**2 * self.channels * self.in_channels * self.kernel**2


def convolutions(config: Config) -> Counter[Convolution]:
    """Count a ResNet's convolutions. CPU training computes those with 1x1 outputs as matrix
    products."""
    channels = 4 if config.data.pad_to_4_channels else 3
    side = config.data.image_size
    counts = Counter([Convolution(channels, 64, side, 7, 2)])
    side = side_after(side_after(side, 2), 2)
    for unit in units(depth_of(config.model)):
        in_channels, inside = unit.in_channels, side
        for layer in unit.layers:
            counts[
                Convolution(in_channels, layer.out_channels, inside, layer.kernel, layer.stride)
            ] += 1
            in_channels = layer.out_channels
            inside = side_after(inside, layer.stride)
        if unit.has_projection:
            counts[Convolution(unit.in_channels, unit.out_channels, side, 1, unit.stride)] += 1
        side = inside
    return counts


def _native(
    channels: int, side: int, batch_size: int, precision: str, context: mx.Context
) -> NDArray:
    """Return random activations, in the layout that the convolution library gives them inside a
    network."""
    plain = cast(nd.random.normal(shape=(batch_size, channels, side, side), ctx=context), precision)
    if channels < 16:
        return plain
    eye = cast(nd.eye(channels, ctx=context).reshape((channels, channels, 1, 1)), precision)
    return nd.Convolution(plain, eye, kernel=(1, 1), num_filter=channels, no_bias=True)


def measure_convolution(
    c: Convolution, batch_size: int, precision: str, session: BenchSession
) -> tuple[float, float]:
    """Return a convolution's forward and backward seconds. In the first layer, backward skips the
    input's gradient."""
    context = session.context
    x = _native(c.in_channels, c.side, batch_size, precision, context)
    shape = (c.channels, c.in_channels, c.kernel, c.kernel)
    w = cast(nd.random.normal(shape=shape, ctx=context), precision)
    out_grad = _native(c.channels, side_after(c.side, c.stride), batch_size, precision, context)
    variables = [w] if c.is_first else [x, w]
    gradients = [cast(nd.zeros(a.shape, context), precision) for a in variables]
    autograd.mark_variables(variables, gradients)
    convolve = partial(
        nd.Convolution,
        x,
        w,
        kernel=(c.kernel,) * 2,
        stride=(c.stride,) * 2,
        pad=(c.kernel // 2,) * 2,
        num_filter=c.channels,
        no_bias=True,
    )
    nd.waitall()

    def backward_s() -> float:
        with autograd.record():
            y = convolve()
        wait_for(y)
        start = time.perf_counter()
        y.backward(out_grad)
        nd.waitall()
        return time.perf_counter() - start

    # reused as in a network, because allocating memory can take longer than the convolution
    out = convolve()
    with autograd.train_mode():
        forward = session.time(lambda: wait_for(convolve(out=out)))
    backward = [backward_s() for _ in range(session.num_warmup + session.num)]
    return forward.median_s, statistics.median(backward[session.num_warmup :])


def _convolution_row(
    c: Convolution, count: int, batch_size: int, precision: str, session: BenchSession, peak: float
) -> Row:
    flops = c.flops(batch_size)
    row = {
        'layer': f'{c.kernel}x{c.kernel}/{c.stride} {c.in_channels} -> {c.channels}',
        'side': c.side,
        'count': count,
        'precision': precision,
        'gflop': flops / 1e9,
    }
    forward_s, backward_s = measure_convolution(c, batch_size, precision, session)
    backward_flops = flops if c.is_first else 2 * flops
    passes = ('forward', forward_s, flops), ('backward', backward_s, backward_flops)
    for name, seconds, done in passes:
        row[f'{name}_ms'] = 1000 * seconds
        row[f'{name}_gflops'] = done / seconds / 1e9
        row[f'{name}_share'] = done / seconds / peak
    return row


def _product_row(side: int, precision: str, session: BenchSession, peak: float) -> Row:
    seconds = spread_of(gemm_times(side, precision, session.context, session.num))
    rate = 2 * side**3 / seconds.median_s
    return {
        'side': side,
        'precision': precision,
        'time_ms': 1000 * seconds.median_s,
        'spread': seconds.relative,
        'gflops': rate / 1e9,
        'share': rate / peak,
    }


def bench_operators(
    session: BenchSession, precisions: list[str], batch_size: int
) -> list[ResultTable]:
    """Measure matrix products and the convolutions of the configured ResNet for each precision,
    bfloat16 last."""
    tables = []
    for precision in sorted(precisions, key=lambda p: p == 'bfloat16'):
        if precision == 'bfloat16':
            from mxnet.contrib import amp

            amp.init('bfloat16')
        peak = measure_peak(precision, session.context)
        products = ResultTable(
            f'Matrix products, {precision}',
            _PRODUCT_COLUMNS,
            [_product_row(side, precision, session, peak) for side in GEMM_SIDES],
            f'Peak: {peak / 1e9:,.0f} GFLOP/s, the fastest of 12 samples.',
        )
        layers = ResultTable(
            f'Convolutions of {session.config.model.name}, batch {batch_size}, {precision}',
            _CONVOLUTION_COLUMNS,
            [
                _convolution_row(c, count, batch_size, precision, session, peak)
                for c, count in convolutions(session.config).items()
            ],
            f'Medians of {session.num} passes. Backward: gradients of weights and input (first '
            'layer: weights).',
        )
        tables += [products, layers]
    return tables
