"""bench allreduce: the gradient exchange alone, as training does it.

Source: nccl-tests' definitions (PERFORMANCE.md): algorithm bandwidth S / t, bus bandwidth S / t x 2 (n - 1) / n.
"""
from typing import Any

import mxnet as mx

from mlperf_rn50.bench.measure import Shown, time_repeated
from mlperf_rn50.bench.steps import Case, case_config, gradient_shapes, measure_case
from mlperf_rn50.config import Config
from mlperf_rn50.data.pipeline import device_context
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.comm import Comm, sharing_of
from mlperf_rn50.train.watch import Position

SIZES = tuple(4**k * 4096 for k in range(9))  # 4 KiB to 256 MiB


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bytes per second that cross each rank's link, whatever the number of ranks."""
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def predict_s(rows: list[dict[str, Any]], num_bytes: int) -> float:
    """Seconds for a size between those measured, in proportion; beyond the largest at its bandwidth.

    Args:
        rows: with 'bytes' and 'time_ms', by size.
    """
    points = [(r['bytes'], r['time_ms'] / 1000) for r in rows]
    if num_bytes >= points[-1][0]:
        return points[-1][1] * num_bytes / points[-1][0]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if num_bytes <= x1:
            return y0 + (y1 - y0) * max(0.0, (num_bytes - x0) / (x1 - x0))
    return points[0][1]


def _time(comm: Comm, arrays: list[mx.nd.NDArray], num_warmup: int, num: int) -> dict[str, float]:
    def exchange() -> None:
        comm.sum_gradients(arrays)
        mx.nd.waitall()
    comm.barrier()
    seconds = time_repeated(exchange, num_warmup, num)
    return {'time_ms': 1000 * seconds.median_s, 'spread': seconds.relative, 'num': seconds.num}


def measure_sizes(comm: Comm, context: mx.Context, num_warmup: int, num: int) -> list[dict[str, Any]]:
    """One row per message size."""
    rows = []
    for size in SIZES:
        seconds = _time(comm, [mx.nd.zeros((size // 4,), context)], num_warmup, num)
        rows.append({'bytes': size, **seconds, 'algorithm_gb_per_s': size / seconds['time_ms'] / 1e6,
                     'bus_gb_per_s': bus_bandwidth(size, seconds['time_ms'] / 1000, comm.world_size) / 1e9})
    return rows


def bench_exchange(config: Config, case: Case, comm: Comm, device_id: int | None, num_warmup: int, num: int,
                   position: Position) -> list[Shown]:
    """Message sizes, then the gradients of a network, and their share of its training step. Complete on rank 0.

    Raises:
        ConfigError: there is one rank only.
    """
    if comm.world_size < 2:
        raise ConfigError('ranks: got 1, expected 2 or more to exchange anything; start it with a launcher, such as '
                          'launch/ranks.sh 2 mlperf-rn50 bench allreduce')
    context = device_context(device_id)
    rows = measure_sizes(comm, context, num_warmup, num)
    config = case_config(config, case)
    grads = [mx.nd.zeros(shape, context) for shape in gradient_shapes(config)]
    num_bytes = sum(4 * g.size for g in grads)
    own = _time(comm, grads, num_warmup, num)
    step = measure_case(config, case, comm, device_id, num_warmup, num, position)
    predicted_ms = 1000 * predict_s(rows, num_bytes)
    gradients = {'model': case.model, 'num_gradients': len(grads), 'bytes': num_bytes, 'predicted_ms': predicted_ms,
                 **own, 'bus_gb_per_s': bus_bandwidth(num_bytes, own['time_ms'] / 1000, comm.world_size) / 1e9,
                 'step_ms': step['step_ms'], 'predicted_share': predicted_ms / step['step_ms'],
                 'measured_share': own['time_ms'] / step['step_ms'], 'local_batch_size': case.local_batch_size}
    if comm.rank:
        return []
    num_sharing = sharing_of(config)
    first = f' The {num_sharing} ranks of a GPU sum among themselves first, in host memory.' if num_sharing > 1 else ''
    return [
        Shown(f'All-reduce over {comm.world_size} ranks', (
            ('bytes', 'bytes', ',d'), ('num', 'n', 'd'), ('time_ms', 'ms', ',.3f'), ('spread', '±', '.0%'),
            ('algorithm_gb_per_s', 'algorithm GB/s', '.3f'), ('bus_gb_per_s', 'bus GB/s', '.3f')), rows,
            f'float32, summed in place, as gradients are; waited for by rank 0.{first}'),
        Shown('The gradients of a step', (
            ('model', 'model', 's'), ('num_gradients', 'tensors', 'd'), ('bytes', 'bytes', ',d'),
            ('predicted_ms', 'predicted ms', ',.1f'), ('time_ms', 'measured ms', ',.1f'), ('spread', '±', '.0%'),
            ('bus_gb_per_s', 'bus GB/s', '.3f'), ('local_batch_size', 'batch', 'd'), ('step_ms', 'step, ms', ',.1f'),
            ('predicted_share', 'predicted share', '.1%'), ('measured_share', 'measured share', '.1%')), [gradients],
            'Predicted from the sizes above. Share of a step without overlap.')]
