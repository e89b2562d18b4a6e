"""`bench ops`: speed of matrix products and of a ResNet's convolutions, forward and backward,
relative to the peak."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass

import mxnet as mx
from mxnet import autograd, nd
from mxnet.ndarray import NDArray

from mlperf_rn50.bench.measure import BenchSession, ResultTable, Row, spread_of
from mlperf_rn50.config import Config
from mlperf_rn50.model.resnet import depth_of, side_after, units
from mlperf_rn50.train.comm.device import cast, gemm_times, measure_peak, wait_for

GEMM_SIDES = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Convolution:
    """A convolution of a network. `side` is the width and height of its input in pixels."""

    in_channels: int
    channels: int
    side: int
    kernel: int
    stride: int

    def flops(self, batch_size: int) -> int:
        """FLOPs of one forward pass, two per multiply-add."""
        out_side = side_after(self.side, self.stride)
        return 2 * batch_size * out_side**2 * self.channels * self.in_channels * self.kernel**2


def convolutions(config: Config) -> Counter[Convolution]:
    """Count a ResNet's convolutions. CPU training computes those with 1x1 outputs as matrix
    products."""
    channels, side = 4 if config.data.pad_to_4_channels else 3, config.data.image_size
    counts = Counter([Convolution(channels, 64, side, 7, 2)])
    side = side_after(side_after(side, 2), 2)
    for unit in units(depth_of(config.model)):
        in_channels, inside = unit.in_channels, side
        for layer in unit.layers:
            counts[
                Convolution(in_channels, layer.out_channels, inside, layer.kernel, layer.stride)
            ] += 1
            in_channels, inside = layer.out_channels, side_after(inside, layer.stride)
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
    w = cast(
        nd.random.normal(shape=(c.channels, c.in_channels, c.kernel, c.kernel), ctx=context),
        precision,
    )
    out_grad = _native(c.channels, side_after(c.side, c.stride), batch_size, precision, context)
    variables = [x, w] if c.in_channels >= 16 else [w]
    autograd.mark_variables(
        variables, [cast(nd.zeros(a.shape, context), precision) for a in variables]
    )
    keys = dict(
        kernel=(c.kernel,) * 2,
        stride=(c.stride,) * 2,
        pad=(c.kernel // 2,) * 2,
        num_filter=c.channels,
        no_bias=True,
    )
    nd.waitall()

    def convolve(**more: NDArray) -> NDArray:
        return nd.Convolution(x, w, **keys, **more)

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
    backward = [backward_s() for _ in range(session.num_warmup + session.num)][session.num_warmup :]
    return forward.median_s, statistics.median(backward)


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
    passes = (('forward', flops), ('backward', flops * (2 if c.in_channels >= 16 else 1)))
    for (name, done), seconds in zip(
        passes, measure_convolution(c, batch_size, precision, session)
    ):
        row |= {
            f'{name}_ms': 1000 * seconds,
            f'{name}_gflops': done / seconds / 1e9,
            f'{name}_share': done / seconds / peak,
        }
    return row


def bench_operators(
    session: BenchSession, precisions: list[str], batch_size: int
) -> list[ResultTable]:
    """Measure matrix products and the convolutions of the configured ResNet for each precision,
    bfloat16 last."""
    context, tables = session.context, []
    for precision in sorted(precisions, key=lambda p: p == 'bfloat16'):
        if precision == 'bfloat16':
            from mxnet.contrib import amp

            amp.init('bfloat16')
        peak = measure_peak(precision, context)
        gemms = []
        for side in GEMM_SIDES:
            seconds, flops = (
                spread_of(gemm_times(side, precision, context, session.num)),
                2 * side**3,
            )
            gemms.append(
                {
                    'side': side,
                    'precision': precision,
                    'time_ms': 1000 * seconds.median_s,
                    'spread': seconds.relative,
                    'gflops': flops / seconds.median_s / 1e9,
                    'share': flops / seconds.median_s / peak,
                }
            )
        rows = [
            _convolution_row(c, count, batch_size, precision, session, peak)
            for c, count in convolutions(session.config).items()
        ]
        tables += [
            ResultTable(
                f'Matrix products, {precision}',
                (
                    ('side', 'side', 'd'),
                    ('time_ms', 'ms', ',.2f'),
                    ('spread', '±', '.0%'),
                    ('gflops', 'GFLOP/s', ',.0f'),
                    ('share', 'of peak', '.0%'),
                ),
                gemms,
                f'Peak: {peak / 1e9:,.0f} GFLOP/s, the fastest of 12 samples.',
            ),
            ResultTable(
                f'Convolutions of {session.config.model.name}, batch {batch_size}, {precision}',
                (
                    ('layer', 'layer', 's'),
                    ('side', 'pixels', 'd'),
                    ('count', 'times', 'd'),
                    ('gflop', 'GFLOP', '.2f'),
                    ('forward_ms', 'forward ms', ',.2f'),
                    ('forward_gflops', 'GFLOP/s', ',.0f'),
                    ('forward_share', 'of peak', '.0%'),
                    ('backward_ms', 'backward ms', ',.2f'),
                    ('backward_gflops', 'GFLOP/s', ',.0f'),
                    ('backward_share', 'of peak', '.0%'),
                ),
                rows,
                f'Medians of {session.num} passes. Backward: gradients of weights and input (first '
                'layer: weights).',
            ),
        ]
    return tables
