"""Cost per rank on 64, 1,024 and 10,000 ranks, 8 on each node, with ImageNet's counts; no image is
decoded.

Measures the thread that feeds DALI, per step and at the start of an epoch (order, random numbers,
requests to the reading threads), the main thread in a training step, and the time to open the data.
Uses synthetic indexes for empty files of the right size. The time of operators and of Horovod's
exchange does not count in a step: its arrays have 4 channels and an image of 32 pixels, and
Horovod's library returns at once. Then times what a rank computes for all 10,000: nodes, GPUs and
sets of ranks once, the values of all ranks at evaluations, only on rank 0, and with shuffle=node
the order of every epoch.

Usage: .venv/bin/python benchmarks/scale.py [ROUNDS [EPOCHS]]
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from horovod.mxnet import mpi_ops

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import _read_ahead, synthetic_batches, train_requests
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.records import INDEX, MANIFEST_FORMAT, Record, RecordFile, find_split
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.data.verify import dump_manifest
from mlperf_rn50.launch.hosts import parse_hosts
from mlperf_rn50.model import resnet
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.system.gpus import View, choose_gpus
from mlperf_rn50.train import optimizer as optimizer_module
from mlperf_rn50.train.comm import horovod as comm_module
from mlperf_rn50.train.comm.horovod import open_comm
from mlperf_rn50.train.comm.rank_checks import describe_divergence, find_stragglers
from mlperf_rn50.train.comm.rank_times import sum_times
from mlperf_rn50.train.comm.sharing import find_sets
from mlperf_rn50.train.comm.step_timer import COLUMNS
from mlperf_rn50.train.loop import RankPlace
from mlperf_rn50.train.optimizer import group_size
from mlperf_rn50.train.options import OptimizerConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.run import nodes_of
from mlperf_rn50.train.trainer import Trainer

DATA = DataConfig()  # the defaults have ImageNet's numbers of images and classes
RANKS_PER_NODE, MANY_RANKS = 8, 10_000
IMAGES_PER_RANK = {64: 256, 1024: 64, MANY_RANKS: 8}
RECORD_BYTES = 115_000
STEP_S = 0.05  # duration of a short step, in which other threads read data and draw random numbers
ROUNDS, EPOCHS = (*map(int, sys.argv[1:]), *(3, 4)[len(sys.argv) - 1 :])
# The first bytes of a PNG image of 500x375 pixels. They contain the size, which is enough to choose
# a crop.
IMAGE = np.frombuffer(b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\xf4\0\0\1\x77\x08\2\0\0\0', np.uint8)


class NoImages(RecordFile):
    """A record file that returns the same image for every record."""

    def read(self, position: int) -> Record:
        return Record(IMAGE, 0, position)


def make_folder(folder: Path) -> None:
    """Write a prepared folder with as many records as ImageNet, but without images."""
    splits = {}
    for name, num in (('train', DATA.num_train), ('validation', DATA.num_val)):
        lengths = np.random.default_rng(0).integers(1, RECORD_BYTES // 2, num) * 4
        starts = np.append(0, lengths.cumsum()[:-1])
        with open(folder / f'{name}.rec', 'wb') as f:
            f.truncate(int(lengths.sum()))
        np.save((folder / f'{name}.rec').with_suffix(INDEX), np.stack([starts, lengths]))
        splits[name] = {'num_images': num, 'rec_bytes': int(lengths.sum())}
    dump_manifest(
        folder,
        {
            'format': MANIFEST_FORMAT,
            'dataset': DATA.dataset,
            'splits': splits,
            'classes': [f'n{i:08d}' for i in range(DATA.num_classes)],
        },
    )


def shard_of(num_ranks: int) -> Shard:
    return Shard(
        DATA.num_train,
        num_ranks // 2,
        num_ranks,
        IMAGES_PER_RANK[num_ranks],
        nodes=tuple(r // RANKS_PER_NODE for r in range(num_ranks)),
    )


def measure_ms(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    work()
    return 1e3 * (clock() - begin)


def feeding_ms(records: RecordFile, shard: Shard, seed: int) -> tuple[list[float], list[float]]:
    """Return ms in the thread that feeds DALI for steps within epochs, and for the first steps of
    later epochs."""
    requests, steps, starts = train_requests(DATA, shard, seed, 0), [], []
    source = _read_ahead(lambda: records, DATA, requests, DATA.prefetch_depth)
    next(source)  # the first step fills the queue
    # The source is ahead of training, so the first steps of an epoch are requested during the
    # previous epoch.
    ahead = DATA.prefetch_depth + DATA.read_threads + 1
    for step in range(ahead, ahead + EPOCHS * shard.steps_per_epoch):
        time.sleep(STEP_S)
        cost_ms = measure_ms(lambda: next(source))
        (steps if step % shard.steps_per_epoch else starts).append(cost_ms)
    source.close()
    return steps, starts


@contextmanager
def made_up_ranks(num_ranks):
    """Let Horovod report a number of ranks, 8 on each node, and exchange nothing."""
    library = SimpleNamespace(horovod_mxnet_allreduce_async=lambda *_: 0)
    names = {'init': None, 'rank': 1, 'size': num_ranks, 'local_rank': 1, 'local_size': 8}
    with (
        patch.multiple(
            hvd, **{name: lambda value=value, **_: value for name, value in names.items()}
        ),
        patch.object(mpi_ops, 'MPI_MXNET_LIB_CTYPES', library),
        patch.object(comm_module, 'launched_size', lambda: num_ranks),
    ):
        yield


def step_ms(num_ranks: int) -> list[float]:
    """Return ms of the main thread for each step of ResNet-50 with LARS and the calls of a GPU."""
    config = Config(
        data=replace(DATA, image_size=32, resize_shorter=32, num_classes=10, synthetic=True),
        model=ModelConfig(name='resnet50'),
        optimizer=OptimizerConfig('lars'),
        train=TrainConfig(local_batch_size=1),
    )
    sums = patch.object(
        optimizer_module,
        '_sums_of_squares',
        lambda arrays: mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays)),
    )
    with made_up_ranks(num_ranks), sums:
        plan, comm, times = make_plan(config, num_ranks), open_comm('none'), []
        trainer = Trainer(plan, comm, 0, None)
        trainer.optimizer.group_size = group_size('gpu', 'lars')
        batches = synthetic_batches(config, plan.train_shard(comm.rank), None)
        for step in range(3 + ROUNDS * 30):
            trainer.settle()
            number, rate = step % plan.steps_per_epoch, plan.learning_rate(step)
            work = partial(trainer.step, batches, number, rate)
            times.append(measure_ms(work, time.thread_time))
    return times[3:]


def opening_ms(folder: Path) -> float:
    data = replace(DATA, dir=str(folder))
    return measure_ms(lambda: [find_split(data, split)() for split in ('train', 'validation')])


def many_ranks_ms() -> list[tuple[str, float]]:
    """Return ms for each computation over all ranks."""
    node_of = [r // RANKS_PER_NODE for r in range(MANY_RANKS)]
    hosts = [RankPlace(f'n{node}', 0, RANKS_PER_NODE, '') for node in node_of]
    views = [
        View(f'n{node}', tuple(f'GPU-{node}-{i}' for i in range(RANKS_PER_NODE)))
        for node in node_of
    ]
    names = ','.join(dict.fromkeys(h.name for h in hosts))
    times = sum_times(np.random.default_rng(0).random((156, len(COLUMNS))), np.zeros(156))
    ranks = [
        {'rank': rank, 'host': h.name, 'cores': '0-15', **times} for rank, h in enumerate(hosts)
    ]
    texts = json.dumps(ranks)  # as HorovodComm.gather_object parses them
    digests = [{f'array{i}': i + (rank == i) for i in range(150)} for rank in range(MANY_RANKS)]
    shard = replace(shard_of(MANY_RANKS), rotation_epochs=10)
    works = (
        ('hosts of the launcher', lambda: parse_hosts(names)),
        ('nodes', lambda: nodes_of(hosts)),
        ('GPUs', lambda: choose_gpus(views, 1)),
        ('sets of ranks', lambda: find_sets(MANY_RANKS, 1)),
        ('parsed step times', lambda: json.loads(texts)),
        ('stragglers', lambda: find_stragglers(ranks)),
        ('ranks that differ', lambda: describe_divergence(digests, 0)),
        ('order of an epoch', lambda: epoch_order(shard, 0, 0)),
    )
    return [(name, measure_ms(work)) for name, work in works]


def print_row(name: str, values: list[float], limit: float) -> None:
    print(
        f'{name:28s} {statistics.median(values):8.3f} ({max(values):.3f})   limit {limit}',
        flush=True,
    )


def main() -> None:
    resnet.STAGE_CHANNELS = (4,) * 4
    print('medians (worst)')
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        print_row('opening the data, ms', [opening_ms(Path(name)) for _ in range(ROUNDS)], 200)
        records = NoImages(Path(name) / 'train.rec')
        for num_ranks in IMAGES_PER_RANK:
            shard, steps, starts = shard_of(num_ranks), [], []
            for seed in range(ROUNDS):
                for values, new in zip((steps, starts), feeding_ms(records, shard, seed)):
                    values += new
            print(f'rank {shard.rank:,} of {num_ranks:,}, batch {shard.global_batch_size:,}')
            print_row('feeding, step, ms', steps, 1)
            print_row('feeding, epoch start, ms', starts, 20)
            print_row('training step, Python, ms', step_ms(num_ranks), 5)
    print(f'{MANY_RANKS:,} ranks on {MANY_RANKS // RANKS_PER_NODE:,} nodes   limit 2,000')
    for row, value_ms in many_ranks_ms():
        print(f'{row + ", ms":28s} {value_ms:8.1f}')


if __name__ == '__main__':
    main()
