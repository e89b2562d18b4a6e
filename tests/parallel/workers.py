"""Worker of the parallel tests, run by every rank: python workers.py OUT NUM_SHARING CALLS.

CALLS is a JSON list of [key, function, arguments]; rank r writes the results by key to OUT/r.json.
If several ranks share a GPU, arrays on mx.cpu(1) stand in for GPU arrays, which are copied to the
host and back.
"""

import json
import sys
import time
import zlib
from collections.abc import Iterator
from copy import copy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.model import resnet
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train import trainer as trainer_module
from mlperf_rn50.train.checkpoint.progress import TrainerState
from mlperf_rn50.train.comm import step_timer
from mlperf_rn50.train.comm.horovod import open_comm
from mlperf_rn50.train.comm.rank_checks import check_agreement
from mlperf_rn50.train.optimizer import Optimizer
from mlperf_rn50.train.options import CommConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer


def collectives(comm):
    """Call every method of Comm, with results that depend on the participating ranks."""
    r = comm.rank
    special = np.array([-0.0, 0.0, np.inf, 1e-40, 1.5]) if r == 0 else np.full(5, np.nan)
    shared = {
        'b': mx.nd.full((3,), r),
        'a': mx.nd.full((2,), 10 + r),
        'c': mx.nd.array(special, dtype='float32'),
        'd': mx.nd.array(special, dtype='float16'),
    }
    comm.broadcast(shared)
    grads = [mx.nd.full((4,), 1.0 + r), mx.nd.full((2, 2), 10.0 * (r + 1))]
    comm.average_gradients(grads)
    halves = [mx.nd.array([60000.0 * (r < 2), 1 + r], dtype='float16')]
    comm.average_gradients(halves, 1)
    means = [mx.nd.full((2,), float(r))]
    comm.average(means)
    pulse = mx.nd.array([float(r), 1.0])
    total = comm.sum_in_background(pulse)
    comm.barrier()
    return {
        'rank': r,
        'world_size': comm.world_size,
        'local': [comm.local_rank, comm.local_size],
        'broadcast': [shared[n].asnumpy().tolist() for n in 'ab'],
        'special': [shared[n].asnumpy().tobytes().hex() for n in 'cd'],
        'gathered': comm.gather_object({'rank': r, 'text': 'ü' * r}),
        'grads': [g.asnumpy().ravel().tolist() for g in grads],
        'halves': halves[0].asnumpy().tolist(),
        'mean': means[0].asnumpy().tolist(),
        'pulse': total.asnumpy().tolist(),
        'kept': pulse.asnumpy().tolist(),
        'counts': comm.sum([r, 2**40, r == 0]),
        'minimum': comm.minimum(np.array([r, 2.0**-40 - r])).tolist(),
    }


def three_ranks(comm):
    """Run collectives on the first three ranks; rank 2 of four shares its GPU with a rank outside
    this subset."""
    part = comm.subset(3)
    result = collectives(part) if part else None
    comm.barrier()
    return result


def late_rank(comm):
    """Start the sum of the last rank after the sums of the other ranks have returned, so no rank
    may wait for it."""
    is_last = comm.rank == comm.world_size - 1
    if is_last:
        comm.barrier()
    arrays = [mx.nd.full((4,), 1.0)]
    comm.average_gradients(arrays, 5)
    if not is_last:
        comm.barrier()
    return arrays[0].asnumpy().tolist()


def _training(
    comm, data_dir, optimizer='sgd', micro=1, first=0, seed=0, num_buckets=8
) -> tuple[Trainer, Iterator[Batch]]:
    """Return a trainer with the weights of rank 0, and its batches of digits."""
    threads = {'num_threads': 1, 'read_threads': 1}
    sizes = {'num_train': 1437, 'num_val': 360, 'image_size': 32, 'resize_shorter': 32}
    names = {'dir': data_dir, 'dataset': 'digits', 'num_classes': 10, 'crop': 'random_resized'}
    config = Config(
        data=DataConfig(**names, **sizes, **threads),
        model=ModelConfig(name='resnet18', zero_gamma=True),
        optimizer=OptimizerConfig(optimizer, weight_decay=1e-3, lars_eta=0.1),
        schedule=ScheduleConfig(base_lr=0.02, warmup_epochs=0, decay='step'),
        train=TrainConfig(
            global_batch_size=48, gradient_accumulation_steps=int(micro), label_smoothing=0.1
        ),
        comm=CommConfig(num_buckets=num_buckets),
    )
    plan = make_plan(config, comm.world_size)
    trainer = Trainer(plan, comm, seed, None)
    trainer.broadcast()
    return trainer, train_batches(config, plan.train_shard(comm.rank), 5, first, None)


def freeze_statistics(net):
    """Use initial running statistics in BatchNorm, so that a sample does not depend on its
    batch."""

    def freeze(block):
        if isinstance(block, (mx.gluon.nn.BatchNorm, mx.gluon.nn.BatchNormReLU)):
            block._kwargs['use_global_stats'] = True

    net.apply(freeze)
    for param in net.collect_params('.*running_var').values():
        # the network holds variances without a factor that depends on the local batch
        param.data()[:] = 1


def steps(comm, data_dir, optimizer, micro, first_step):
    """Return losses and weights of three steps of 48 images, including the padded last step of an
    epoch (step 29)."""
    first = int(first_step)
    # a different seed per rank; the weights of rank 0 must be used
    trainer, batches = _training(comm, data_dir, optimizer, micro, first, seed=comm.rank)
    plan = trainer.plan
    freeze_statistics(trainer.net)
    losses = []
    for step in range(first, first + 3):
        pulse = trainer.step(batches, step % plan.steps_per_epoch, plan.learning_rate(step))
        losses.append(float(pulse.sums.asnumpy()[0]))
    params = trainer.net.collect_params()
    names = 'conv0_weight stage3_unit1_conv1_weight bn0_gamma fc1_weight fc1_bias'.split()
    weights = {n: params[n].data().asnumpy().ravel()[:200].tolist() for n in names}
    return {'losses': losses, **weights}


def compressed_steps(comm, data_dir):
    """Return the result of steps with gradients compressed to 16 bits."""
    compressed = copy(comm)
    compressed.compression = 'fp16'
    return steps(compressed, data_dir, 'sgd', 1, 0)


def _run_steps(trainer, batches, num_steps):
    for step in range(num_steps):
        trainer.step(batches, step, 0.01)
    trainer.settle()


def _statistics_of(arrays):
    return np.concatenate([a.ravel() for n, a in sorted(arrays.items()) if 'running' in n])


def statistics(comm, data_dir):
    """Return running statistics averaged only at the end, or also midway as by a checkpoint."""
    trainer, batches = _training(comm, data_dir)
    _run_steps(trainer, batches, 2)
    local = _statistics_of(trainer.snapshot())
    _run_steps(trainer, batches, 2)
    trainer.average_statistics()
    once = trainer.snapshot()
    trainer, batches = _training(comm, data_dir)
    _run_steps(trainer, batches, 2)
    trainer.average_statistics()
    middle = trainer.snapshot()
    _run_steps(trainer, batches, 2)
    trainer.average_statistics()
    twice = trainer.snapshot()
    trainer.load_state(TrainerState(middle if comm.rank == 0 else {}))
    back = trainer.snapshot()
    learned = [n for n in once if 'running' not in n]
    return {
        'local': local.tolist(),
        'middle': _statistics_of(middle).tolist(),
        'once': _statistics_of(once).tolist(),
        'twice': _statistics_of(twice).tolist(),
        # Bits may differ, because the order of ring sums depends on which gradients were fused.
        'is_learning_the_same': all(
            np.allclose(once[n], twice[n], rtol=1e-5, atol=1e-7) for n in learned
        ),
        'is_restored': all((middle[n] == back[n]).all() for n in middle),
    }


def times(comm, data_dir, micro):
    """Return the time of three steps in readings of the clock, the sum of their phases, and their
    hidden exchange.

    The first two are traced, and their buckets returned, but not the last, because the clock may be
    read for a bucket after the end of its step. The second half comes after a resumption.
    """
    trainer, batches = _training(comm, data_dir, micro=micro)
    readings = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(readings)), sleep=time.sleep)
    with patch.object(step_timer, 'time', clock), patch.object(trainer_module, 'time', clock):
        halves = []
        for first in (0, 3):
            trainer.load_state(trainer.state())
            trainer.timer.start(first)
            trainer.timer.start_trace(2, first + 1)
            start = trainer.timer.thread.last_end
            _run_steps(trainer, batches, 3)
            whole, rows = next(readings) - 1 - start, trainer.timer.take()
            traced = [s.buckets for s in trainer.timer.take_trace()]
            halves.append([whole, rows[:, :5].sum(), rows[:, -1].tolist(), traced])
    return halves


def float16_start(comm):
    """Broadcast the weights and the state of float16 training, which differ between ranks; return
    them."""
    params = {}
    for name, shape in (('a_weight', (3, 2)), ('b_weight', (5,)), ('bn_gamma', (3,))):
        dtype = 'float16' if name.endswith('weight') else 'float32'
        params[name] = mx.gluon.Parameter(name, shape=shape, dtype=dtype)
        params[name].initialize(mx.init.Constant(comm.rank + 1))
    optimizer = Optimizer(params, OptimizerConfig(), can_skip=True)
    optimizer.tensors[0].velocity[:] = 7 + comm.rank
    comm.broadcast(optimizer.owners())
    arrays = {**optimizer.state(), **{n: p.data() for n, p in params.items()}}
    return {n: a.asnumpy().ravel().tolist() for n, a in arrays.items()}


def background(comm):
    """Start all sums before waiting for the first; rank 1 starts each one late."""
    sums = []
    for k in range(8):
        if comm.rank == 1:
            time.sleep(0.05)
        sums.append(comm.sum_in_background(mx.nd.array([comm.rank, k])))
    return [s.asnumpy().tolist() for s in sums]


def buckets(comm, data_dir):
    """Return weight digests after two steps with one bucket of gradients and with several."""
    ends = []
    for optimizer in ('sgd', 'lars'):
        for num_buckets in (1, 5):
            trainer, batches = _training(comm, data_dir, optimizer, num_buckets=num_buckets)
            _run_steps(trainer, batches, 2)
            digest = zlib.crc32(json.dumps(trainer.digests()).encode())
            ends.append([len(trainer.optimizer.buckets), digest])
    return {'ends': ends}


def divergence(comm, data_dir):
    """Return the errors of the agreement check before and after a bit of an array on rank 1 is
    flipped."""
    trainer, batches = _training(comm, data_dir)
    _run_steps(trainer, batches, 1)
    trainer.average_statistics()
    errors = []
    for _ in range(2):
        try:
            check_agreement(comm, trainer.digests(), 3)
            errors.append('')
        except RunFailed as e:
            errors.append(str(e))
        if comm.rank == 1:
            weight = trainer.net.collect_params()['stage2_unit1_conv1_weight'].data()
            bits = weight.asnumpy()
            bits.view(np.uint32).ravel()[1234] ^= 1
            weight[:] = bits
    return {'errors': errors}


def main():
    out, num_sharing, calls = sys.argv[1:]
    # a quarter of the channels takes a sixteenth of the time
    resnet.STAGE_CHANNELS = (16, 32, 64, 128)
    comm = open_comm('none', [3], num_sharing=int(num_sharing))
    results = {}
    with mx.cpu(int(num_sharing) > 1):
        for key, name, arguments in json.loads(calls):
            results[key] = globals()[name](comm, *arguments)
    (Path(out) / f'{comm.rank}.json').write_text(json.dumps(results))
    comm.barrier()


if __name__ == '__main__':
    main()
