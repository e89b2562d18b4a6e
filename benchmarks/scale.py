"""What one of 1,024 ranks pays at batch 65,536 on ImageNet's counts; no image is decoded.

The thread that feeds DALI, a step and at an epoch's start: order, random numbers, handing over to the threads that
read. And opening the data. On made-up indexes beside empty files of their size.
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
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.data.verify import dump_manifest

DATA = DataConfig()  # ImageNet's counts
RANK, WORLD_SIZE, BATCH, RANKS_PER_NODE = 512, 1024, 65_536, 8
SHARD = Shard(DATA.num_train, RANK, WORLD_SIZE, BATCH // WORLD_SIZE,
              nodes=tuple(r // RANKS_PER_NODE for r in range(WORLD_SIZE)))
RECORD_BYTES = 115_000
STEP_S = 0.05  # a short step: the threads that read and draw ahead have no longer than this for each
ROUNDS, EPOCHS = (*map(int, sys.argv[1:]), *(3, 4)[len(sys.argv) - 1:])
# The first bytes of a PNG of 500x375: all that a crop asks of an image.
IMAGE = np.frombuffer(b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\xf4\0\0\1\x77\x08\2\0\0\0', np.uint8)


class NoImages(RecordFile):
    """A file whose records are all the same image."""

    def read(self, position: int) -> Record:
        return Record(IMAGE, 0, position)


def make_folder(folder: Path) -> None:
    """A prepared folder of ImageNet's counts, without its images."""
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
    """Milliseconds of the thread that feeds DALI: of each step in an epoch, and of each first one but the run's."""
    source, steps, starts = _read_ahead(records, DATA, train_requests(DATA, SHARD, seed, 0)), [], []
    next(source)  # the first of a run fills the queue
    # The source is ahead of training, so the first steps of an epoch are asked for while another one is trained on.
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


def main() -> None:
    found: tuple[list[float], ...] = ([], [], [])
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        records = NoImages(Path(name) / 'train.rec')
        for number in range(ROUNDS):
            for values, more in zip(found, (*feeding_ms(records, number), [opening_s(Path(name))])):
                values.extend(more)
            print(f'round {number + 1} of {ROUNDS}', file=sys.stderr, flush=True)
    print(f'rank {RANK} of {WORLD_SIZE:,}, batch {BATCH:,}, {DATA.num_train:,} images: medians (worst)')
    wanted = (('a step, ms', 1), ("an epoch's start, ms", 5), ('opening the data, s', 0.2))
    for (row, limit), values in zip(wanted, found):
        print(f'{row:22s} {statistics.median(values):8.3f} ({max(values):.3f})   wanted {limit}')


if __name__ == '__main__':
    main()
