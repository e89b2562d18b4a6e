"""What the ranks of test_exchange.py run: python tests/gpu/workers.py OUT DEVICE RANKS_PER_DEVICE; r writes r.json."""
import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from parallel.workers import collectives

from mlperf_rn50.config import Config, RunConfig, TrainConfig
from mlperf_rn50.data.pipeline import device_context
from mlperf_rn50.train.comm import Comm, open_comm, sharing_of
from mlperf_rn50.train.device import device_id_of

# The gradients of a step in one exchange: of many sizes, 100 MB in all in float32.
SHAPES = [(64,), (1000,), (2048, 1000), (512, 512, 3, 3), *[(256, 1024)] * 20, *[(2048, 512)] * 15]
DRY_SHAPES = SHAPES[:2]


def large_sums(comm: Comm, context: mx.Context, precision: str, num_rounds: int) -> list[float]:
    """The largest distance from the known sum of several exchanges, of which two buckets are under way at a time."""
    shapes, n, far = SHAPES if context.device_type == 'gpu' else DRY_SHAPES, comm.world_size, []
    ranks = n * (n + 1) // 2
    for number in range(num_rounds):
        # Small whole numbers: every sum of them is exact, in float16 too.
        grads = [mx.nd.full(s, (comm.rank + 1) * (number % 3 + 1), context, precision) for s in shapes]
        half = len(grads) // 2
        for bucket, part in enumerate((grads[:half], grads[half:])):
            comm.sum_gradients(part, bucket)
        far.append(max(float(np.abs(g.asnumpy().astype(np.float64) - ranks * (number % 3 + 1)).max()) for g in grads))
    return far


def main(out: str, device: str, ranks_per_device: str) -> None:
    config = Config(train=TrainConfig(device=device, local_batch_size=1),
                    run=RunConfig(ranks_per_device=int(ranks_per_device)))
    comm = open_comm('none', num_sharing=sharing_of(config))
    device_id = device_id_of(config, comm)
    context = device_context(device_id)
    with context:  # where arrays are made that name no device
        found = {'device': device_id, 'collectives': collectives(comm),
                 **{f'large sums, {p}': large_sums(comm, context, p, 6) for p in ('float32', 'float16')}}
    Path(out, f'{comm.rank}.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(*sys.argv[1:])
