"""`bench allreduce`: time and bandwidth of the gradient exchange alone, with the training code.

Source: nccl-tests, PERFORMANCE.md. S bytes in t s on n ranks: algorithm bandwidth S / t, bus S / t x 2 (n - 1) / n.
"""
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np

from mlperf_rn50.bench.measure import BenchSession, ResultTable
from mlperf_rn50.bench.steps import Case, case_config, measure_case
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm.device import wait_for
from mlperf_rn50.train.comm.sharing import sharing_of

SIZES = tuple(4**k * 4096 for k in range(9))  # 4 KiB to 256 MiB


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Return the bytes per second over each rank's link, which are comparable between different numbers of ranks."""
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def predict_s(rows: list[dict[str, Any]], num_bytes: int) -> float:
    """Return the predicted seconds for a size, interpolated between rows. Larger sizes use the last row's bandwidth."""
    sizes, seconds = [r['bytes'] for r in rows], [r['time_ms'] / 1000 for r in rows]
    return float(np.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])


def _time(session: BenchSession, arrays: list[mx.nd.NDArray]) -> dict[str, float]:
    """Time the exchange of some arrays. Return columns for a result row."""
    def exchange() -> None:
        session.comm.average_gradients(arrays)
        for array in arrays:  # waitall() does not wait for Horovod's stream
            wait_for(array)
    session.comm.barrier()
    seconds, num_bytes = session.time(exchange), sum(4 * a.size for a in arrays)
    return {'bytes': num_bytes, 'time_ms': 1000 * seconds.median_s, 'spread': seconds.relative, 'num': seconds.num,
            'bus_gb_per_s': bus_bandwidth(num_bytes, seconds.median_s, session.comm.world_size) / 1e9}


def bench_exchange(session: BenchSession, case: Case) -> list[ResultTable]:
    """Time messages of several sizes, and a network's gradients and training step. Return tables only on rank 0."""
    comm = session.comm
    if comm.world_size < 2:
        raise ConfigError('ranks: got 1, expected 2 or more; start them with a launcher, such as '
                          'launch/ranks.sh 2 mlperf-rn50 bench allreduce')
    sizes = [_time(session, [mx.nd.zeros((size // 4,), session.context)]) for size in SIZES]
    rows = [{**row, 'algorithm_gb_per_s': row['bytes'] / row['time_ms'] / 1e6} for row in sizes]
    session = replace(session, config=case_config(session.config, case))
    params = build_model(session.config, mx.cpu(), 0).collect_params().values()
    grads = [mx.nd.zeros(p.shape, session.context) for p in params if p.grad_req != 'null']
    measured, step_ms = _time(session, grads), measure_case(session, case)['step_ms']
    predicted_ms = 1000 * predict_s(rows, int(measured['bytes']))
    gradients = {'model': case.model, 'num_gradients': len(grads), 'predicted_ms': predicted_ms, **measured,
                 'step_ms': step_ms, 'predicted_share': predicted_ms / step_ms,
                 'measured_share': measured['time_ms'] / step_ms, 'local_batch_size': case.local_batch_size,
                 'num_ranks': comm.world_size, 'num_hosts': comm.sum([comm.local_rank == 0])[0]}
    if comm.rank:
        return []
    num_sharing = sharing_of(session.config)
    first = f' The {num_sharing} ranks of each GPU first sum their gradients in host memory.' if num_sharing > 1 else ''
    return [
        ResultTable(f'All-reduce over {comm.world_size} ranks', (
            ('bytes', 'bytes', ',d'), ('num', 'n', 'd'), ('time_ms', 'ms', ',.3f'), ('spread', '±', '.0%'),
            ('algorithm_gb_per_s', 'algorithm GB/s', '.3f'), ('bus_gb_per_s', 'bus GB/s', '.3f')), rows,
            f'float32, summed in place like gradients; times of rank 0.{first}'),
        ResultTable('The gradients of a step', (
            ('model', 'model', 's'), ('num_gradients', 'tensors', 'd'), ('bytes', 'bytes', ',d'),
            ('predicted_ms', 'predicted ms', ',.1f'), ('time_ms', 'measured ms', ',.1f'), ('spread', '±', '.0%'),
            ('bus_gb_per_s', 'bus GB/s', '.3f'), ('local_batch_size', 'batch', 'd'), ('step_ms', 'step, ms', ',.1f'),
            ('predicted_share', 'predicted share', '.1%'), ('measured_share', 'measured share', '.1%')), [gradients],
            'Predicted times are interpolated from the sizes above. Shares are of the step time, without overlap.')]
