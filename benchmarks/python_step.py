"""Time of the main thread per training step of ResNet-50, without the time of operators and of
Horovod's exchange.

Real: Trainer with its 161 tensors, schedule, optimizer (with the calls of a GPU), StepTimer,
HorovodComm, Horovod's Python, MXNet's Python and C interface, which pushes every operator to the
engine. Not real: the arrays, which have 4 channels and an image of 32 pixels, so that the engine's
threads, whose time does not count, finish them quickly; Horovod's library, which returns at once;
and for float16, for which CPUs have no convolution, the network, which stays float32 while
optimizer and exchange get arrays of the types that it has on a GPU. Usage: .venv/bin/python
benchmarks/python_step.py [ROUNDS]
"""

import statistics
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import horovod.mxnet as hvd
import mxnet as mx
from horovod.mxnet import mpi_ops

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import synthetic_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model import resnet
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train import optimizer as optimizer_module
from mlperf_rn50.train.comm import horovod as comm_module
from mlperf_rn50.train.optimizer import Optimizer, group_size
from mlperf_rn50.train.options import CommConfig, OptimizerConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.trainer import Trainer

IMAGES, STEPS, LIMIT_MS = 1_281_167, 30, 5


@contextmanager
def made_up_ranks(num_ranks):
    """Let Horovod report a number of ranks, 8 on each node, and exchange nothing; yield a list of
    exchanges."""
    exchanges = []
    library = SimpleNamespace(horovod_mxnet_allreduce_async=lambda *a: exchanges.append(a[2]) or 0)
    names = {'init': None, 'rank': 1, 'size': num_ranks, 'local_rank': 1, 'local_size': 8}
    with (
        patch.multiple(
            hvd, **{name: lambda value=value, **_: value for name, value in names.items()}
        ),
        patch.object(mpi_ops, 'MPI_MXNET_LIB_CTYPES', library),
        patch.object(comm_module, 'launched_size', lambda: num_ranks),
    ):
        yield exchanges


def float16_params(net):
    """Return new parameters with the types of a network in float16, whose BatchNorm stays
    float32."""
    params = {}
    for name, param in net.collect_params().items():
        if param.grad_req != 'null':
            dtype = 'float32' if name.endswith(('_gamma', '_beta')) else 'float16'
            params[name] = mx.gluon.Parameter(name, shape=param.shape, dtype=dtype)
            params[name].initialize(mx.init.One())
    return params


def step_times(precision, num_buckets, num_ranks, rounds):
    """Return ms of the main thread for each step, and the number of exchanges in a step."""
    config = Config(
        data=DataConfig(
            num_train=IMAGES, image_size=32, resize_shorter=32, num_classes=10, synthetic=True
        ),
        model=ModelConfig(name='resnet50'),
        optimizer=OptimizerConfig('lars'),
        comm=CommConfig(num_buckets=num_buckets),
        train=TrainConfig(local_batch_size=1),
    )
    sums = patch.object(
        optimizer_module,
        '_sums_of_squares',
        lambda arrays: mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays)),
    )
    with made_up_ranks(num_ranks) as exchanges, sums:
        plan, comm = make_plan(config, num_ranks), comm_module.open_comm('none')
        trainer, times = Trainer(plan, comm, 0, None), []
        if precision == 'float16':
            trainer._can_skip = True
            trainer.optimizer = Optimizer(
                float16_params(trainer.net), config.optimizer, num_buckets, can_skip=True
            )
        trainer.optimizer.group_size = group_size('gpu', 'lars')
        batches = synthetic_batches(config, plan.train_shard(comm.rank), None)
        for step in range(3 + rounds * STEPS):
            trainer.settle()
            exchanges.clear()
            begin = time.thread_time()
            trainer.step(batches, step % plan.steps_per_epoch, plan.learning_rate(step))
            times.append(1e3 * (time.thread_time() - begin))
    return times[3:], len(exchanges)


def main():
    [rounds] = sys.argv[1:] or [3]
    resnet.STAGE_CHANNELS = (4,) * 4
    cases = {'float32': (1, 7, 17), 'float16': (1, 8, 18)}
    for precision, num_buckets in [(p, n) for p, numbers in cases.items() for n in numbers]:
        times, num_exchanges = step_times(precision, num_buckets, 1024, int(rounds))
        print(
            f'{precision}, {num_exchanges} exchanges, ms: {statistics.median(times):.2f} (fastest '
            f'{min(times):.2f})'
            f'   limit {LIMIT_MS}',
            flush=True,
        )


if __name__ == '__main__':
    main()
