"""Exchange between all GPUs, with one or two ranks each: every method of Comm, and sums of the size
of a step.

The ranks also run this file: python tests/gpu/test_exchange.py OUT DEVICE RANKS_PER_DEVICE.
"""

import json
import os
import re
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from gpu.conftest import IS_DRY
from helpers import ROOT, run, under_ranks
from parallel.test_ranks import collectives_of
from parallel.workers import collectives

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.batches import device_context
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import Comm, open_comm
from mlperf_rn50.train.comm.sharing import sharing_of
from mlperf_rn50.train.options import TrainConfig

COMPARED = 'rank', 'world_size', 'broadcast', 'mean', 'grads', 'counts'
# Gradients of a step, of many sizes, 100 MB of float32 in total.
SHAPES = [(64,), (1000,), (2048, 1000), (512, 512, 3, 3), *[(256, 1024)] * 20, *[(2048, 512)] * 15]


def average(comm: Comm, grads: list[mx.nd.NDArray]) -> None:
    """Average in two concurrent buckets. One rank exchanges with itself, which Comm omits, so that
    NCCL runs on a single GPU."""
    if comm.world_size > 1:
        half = len(grads) // 2
        comm.average_gradients(grads[:half], 0)
        comm.average_gradients(grads[half:], 1)
        return
    import horovod.mxnet as hvd

    hvd.init()
    for grad in grads:  # so that Horovod also scales, by half
        grad *= 2
    hvd.grouped_allreduce_(grads, op=hvd.Sum, name=str(grads[0].dtype), prescale_factor=0.5)


def large_means(comm: Comm, context: mx.Context, precision: str, num_rounds: int) -> list[float]:
    """Return the largest relative error of each exchange."""
    shapes = SHAPES if context.device_type == 'gpu' else SHAPES[:2]
    far = []
    for number in range(num_rounds):
        factor = number % 3 + 1
        grads = [mx.nd.full(s, (comm.rank + 1) * factor, context, precision) for s in shapes]
        average(comm, grads)
        expected = (comm.world_size + 1) / 2 * factor
        ratios = [g.asnumpy().astype(np.float64) / expected for g in grads]
        far.append(max(float(np.abs(r - 1).max()) for r in ratios))
    return far


def main(out: str, device: str, ranks_per_device: str) -> None:
    """Run all exchanges on a rank; rank r writes r.json."""
    steps = TrainConfig(device=device, local_batch_size=1)
    config = Config(train=steps, run=RunConfig(ranks_per_device=int(ranks_per_device)))
    comm = open_comm('none', num_sharing=sharing_of(config))
    device_id = device_id_of(config, comm)
    context = device_context(device_id)
    with context:  # the default for new arrays
        results = {'device': device_id, 'collectives': collectives(comm)}
        for precision in ('float32', 'float16'):
            results[f'large means, {precision}'] = large_means(comm, context, precision, 6)
    Path(out, f'{comm.rank}.json').write_text(json.dumps(results))


def test_sums_of_all_ranks(ranks_per_device, num_ranks, tmp_path, figure):
    n, device = num_ranks, 'cpu' if IS_DRY else 'gpu'
    path = f'PYTHONPATH={ROOT}/tests'
    worker = ['env', path, sys.executable, __file__, tmp_path, device, ranks_per_device]
    env = {'MLPERF_RN50_RANKS_PER_DEVICE': str(ranks_per_device), 'NCCL_DEBUG': 'INFO'}
    done = run(under_ranks(n, worker), env={**os.environ, **env})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall('NCCL (?:version|INFO .*via) .*', done.stdout + done.stderr)
    figure('lines of NCCL', sorted(set(lines))[:20])
    results = [json.loads((tmp_path / f'{r}.json').read_text()) for r in range(n)]
    if not IS_DRY:
        assert [f['device'] for f in results] == [r // ranks_per_device for r in range(n)]
        assert lines or 1 < n <= ranks_per_device  # ranks of one GPU sum in host memory
    for r, got in enumerate(results):
        expected = collectives_of(r, n, n)
        for key in COMPARED:
            assert got['collectives'][key] == expected[key], key
        assert max(got['large means, float32']) < 1e-6
        assert max(got['large means, float16']) < n * 2**-10


def test_sums_of_one_rank(tmp_path, figure):
    test_sums_of_all_ranks(1, 1, tmp_path, figure)


if __name__ == '__main__':
    main(*sys.argv[1:])
