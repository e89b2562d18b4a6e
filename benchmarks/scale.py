"""Measure the time that one of 1,024 ranks takes to prepare input, at batch 65,536 and without decoding images.

Measure the thread that feeds DALI (order, random numbers, requests to the reading threads), per step and at the start
of an epoch, and the time to open the data: as many records as ImageNet, in empty files of the right size. Then time
what each of 10,000 ranks computes for all ranks: nodes and GPUs once, and the order of every epoch with shuffle=node.
Usage: .venv/bin/python benchmarks/scale.py [ROUNDS [EPOCHS]]
"""
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlperf_rn50.data.batches import _read_ahead, train_requests
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.records import MANIFEST_FORMAT, Record, RecordFile, index_path, open_split
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.data.verify import dump_manifest
from mlperf_rn50.system.gpus import View, choose_gpus
from mlperf_rn50.train.session import RankPlace, nodes_of

DATA = DataConfig()  # the defaults have ImageNet's numbers of images and classes
RANK, WORLD_SIZE, BATCH, RANKS_PER_NODE = 512, 1024, 65_536, 8
SHARD = Shard(DATA.num_train, RANK, WORLD_SIZE, BATCH // WORLD_SIZE,
              nodes=tuple(r // RANKS_PER_NODE for r in range(WORLD_SIZE)))
MANY_RANKS = 10_000
RECORD_BYTES = 115_000
STEP_S = 0.05  # duration of a short step, in which other threads read data and draw random numbers
ROUNDS, EPOCHS = (*map(int, sys.argv[1:]), *(3, 4)[len(sys.argv) - 1:])
# The first bytes of a PNG image of 500x375 pixels. They contain the size, which is enough to choose a crop.
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
        np.save(index_path(folder / f'{name}.rec'), np.stack([starts, lengths]))
        splits[name] = {'num_images': num, 'rec_bytes': int(lengths.sum())}
    dump_manifest(folder, {'format': MANIFEST_FORMAT, 'dataset': DATA.dataset, 'splits': splits,
                           'classes': [f'n{i:08d}' for i in range(DATA.num_classes)]})


def feeding_ms(records: RecordFile, seed: int) -> tuple[list[float], list[float]]:
    """Return milliseconds per step of the thread that feeds DALI, within epochs and at the start of later epochs."""
    source, steps, starts = _read_ahead(lambda: records, DATA, train_requests(DATA, SHARD, seed, 0)), [], []
    next(source)  # the first step fills the queue
    # The source is ahead of training, so the first steps of an epoch are requested during the previous epoch.
    ahead = DATA.prefetch_depth + DATA.read_threads + 1
    for step in range(ahead, ahead + EPOCHS * SHARD.steps_per_epoch):
        time.sleep(STEP_S)
        begin = time.perf_counter()
        next(source)
        (steps if step % SHARD.steps_per_epoch else starts).append(1e3 * (time.perf_counter() - begin))
    source.close()
    return steps, starts


def opening_s(folder: Path) -> float:
    begin = time.perf_counter()
    for split in ('train', 'validation'):
        open_split(replace(DATA, dir=str(folder)), split)
    return time.perf_counter() - begin


def many_ranks_ms() -> list[tuple[str, float]]:
    """Return the milliseconds to find all ranks' nodes, choose their GPUs, and order an epoch with shuffle=node."""
    node_of = [r // RANKS_PER_NODE for r in range(MANY_RANKS)]
    hosts = [RankPlace(f'n{node}', 0, RANKS_PER_NODE, '') for node in node_of]
    views = [View(f'n{node}', tuple(f'GPU-{node}-{i}' for i in range(RANKS_PER_NODE))) for node in node_of]
    shard = replace(SHARD, world_size=MANY_RANKS, local_batch_size=8, nodes=tuple(node_of), rotation_epochs=10)
    rows = []
    for name, work in (('nodes', lambda: nodes_of(hosts)), ('GPUs', lambda: choose_gpus(views, 1)),
                       ('order of an epoch', lambda: epoch_order(shard, 0, 0))):
        begin = time.perf_counter()
        work()
        rows.append((name, 1e3 * (time.perf_counter() - begin)))
    return rows


def main() -> None:
    timings: tuple[list[float], ...] = ([], [], [])
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        records = NoImages(Path(name) / 'train.rec')
        for number in range(ROUNDS):
            for values, new in zip(timings, (*feeding_ms(records, number), [opening_s(Path(name))])):
                values.extend(new)
            print(f'round {number + 1} of {ROUNDS}', file=sys.stderr, flush=True)
    print(f'rank {RANK} of {WORLD_SIZE:,}, batch {BATCH:,}, {DATA.num_train:,} images: medians (worst)')
    limits = (('step, ms', 1), ('start of an epoch, ms', 5), ('opening the data, s', 0.2))
    for (row, limit), values in zip(limits, timings):
        print(f'{row:22s} {statistics.median(values):8.3f} ({max(values):.3f})   limit {limit}')
    print(f'{MANY_RANKS:,} ranks on {MANY_RANKS // RANKS_PER_NODE:,} nodes')
    for row, value_ms in many_ranks_ms():
        print(f'{row + ", ms":22s} {value_ms:8.1f}')


if __name__ == '__main__':
    main()
