"""What the ranks of test_shared_gpu.py run: python sharers.py OUT DATA NUM_SHARING; rank r writes OUT/r.json.

An array of mx.cpu(1) stands for one of a GPU: it is copied to the host and back.
"""
import json
import sys
import zlib
from copy import copy
from pathlib import Path

import mxnet as mx
import numpy as np
from workers import _config, _freeze_statistics

from mlperf_rn50.data.pipeline import train_batches
from mlperf_rn50.train.comm import open_comm
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

DEVICES = {'host': mx.cpu(), 'device': mx.cpu(1)}
SHAPES = [(1000,), (3, 5, 7), (1,)]
# Every float16 but those that are no number, and the edges of float32.
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
HALVES = HALVES[~np.isnan(HALVES)]
FLOATS = np.array([-0.0, 0.0, np.inf, -np.inf, 1e-45, 1.5, 3.4e38], np.float32)


def crc(arrays):
    return [zlib.crc32(a.asnumpy().tobytes()) for a in arrays]


def with_values(comm, **values):
    """The same ranks with other attributes."""
    other = copy(comm)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def own_gradients(rank):
    random = np.random.default_rng(rank)
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def sum_up(comm, device, bucket=0):
    """The sum of all ranks' gradients: its digests, and how far it is from the exact one."""
    grads = [mx.nd.array(g, device) for g in own_gradients(comm.rank)]
    comm.sum_gradients(grads, bucket)
    each = [own_gradients(rank) for rank in range(comm.world_size)]
    errors = [np.abs(g.asnumpy() - sum(a.astype(np.float64) for a in own)).max() for g, own in zip(grads, zip(*each))]
    return {'crc': crc(grads), 'error': float(max(errors))}


def exchanges(comm, device):
    """Each way of exchanging arrays of a device."""
    result = {'sum': sum_up(comm, device), 'again': sum_up(comm, device),
              'compressed': sum_up(with_values(comm, _compression='fp16'), device)}
    halves = [mx.nd.array([60000.0 * (comm.rank < 2), 1 + comm.rank, 0.5], device, 'float16')]
    comm.sum_gradients(halves)
    result['halves'] = [str(v) for v in halves[0].asnumpy()]
    shared = {'half': mx.nd.array(HALVES if comm.rank == 0 else HALVES * 0 + 7, device, 'float16'),
              'float': mx.nd.array(FLOATS if comm.rank == 0 else FLOATS * np.nan, device)}
    comm.broadcast(shared)
    result['broadcast'] = [a.asnumpy().tobytes() == b.tobytes()
                           for a, b in ((shared['half'], HALVES), (shared['float'], FLOATS))]
    under_way = [comm.sum_in_background(mx.nd.array([comm.rank, k], device)) for k in range(8)]
    result['background'] = [t.asnumpy().tolist() for t in under_way]
    means = [mx.nd.full((2,), float(comm.rank), device)]
    comm.average(means)
    result['mean'] = means[0].asnumpy().tolist()
    return result


def does_not_wait(comm, device):
    """The last rank starts its sum after the others have gone on from theirs: nobody may wait for it."""
    is_last = comm.rank == comm.world_size - 1
    if is_last:
        comm.barrier()
    arrays = [mx.nd.full((4,), 1.0, device)]
    comm.sum_gradients(arrays, 5)
    if not is_last:
        comm.barrier()
    return arrays[0].asnumpy().tolist()


def train(comm, data_dir):
    """Weights after two steps, as numbers and as digests."""
    plan = make_plan(_config(data_dir, 'sgd', 1), comm.world_size)
    trainer = Trainer(plan, comm, comm.rank, None)
    trainer.broadcast()
    _freeze_statistics(trainer.net)
    batches = train_batches(plan.config, plan.train_shard(comm.rank), 5, 0, None)
    for step in range(2):
        trainer.step(batches, step, plan.learning_rate(step), False)
    trainer.settle()
    weights = trainer.net.collect_params()
    return {'digests': trainer.digests(), 'fc1': weights['fc1_weight'].data().asnumpy().ravel()[:200].tolist(),
            'conv0': weights['conv0_weight'].data().asnumpy().ravel()[:200].tolist()}


def main():
    out, data_dir, num_sharing = sys.argv[1], sys.argv[2], int(sys.argv[3])
    comm = open_comm('none', [3], num_sharing=num_sharing)
    result = {'ranks': comm.gather_object(comm.rank)}
    for name, device in DEVICES.items():
        result[name] = exchanges(comm, device)
        result[name]['after the last'] = does_not_wait(comm, device)
        part = comm.subset(3) if comm.world_size > 3 else None
        if part:
            result[name]['of three'] = {**exchanges(part, device), 'counts': part.sum([1])}
        comm.barrier()
    if data_dir != 'none':
        result['trained'] = train(comm, data_dir)
        result['flat'] = train(with_values(comm, _num_sharing=1), data_dir)
    (Path(out) / f'{comm.rank}.json').write_text(json.dumps(result))
    comm.barrier()


if __name__ == '__main__':
    main()
