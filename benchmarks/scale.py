"""What one of 1,024 ranks pays at batch 65,536 on ImageNet's counts, beside what 0.4.0 paid; no image is decoded.

The thread that feeds DALI, a step and at an epoch's start: order, random numbers, handing over to the threads that
read. And opening the data. Both sides in turn in this process, on made-up indexes beside empty files of their size.
Usage: .venv/bin/python benchmarks/scale.py [ROUNDS [EPOCHS]]
"""
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlperf_rn50.config import DataConfig
from mlperf_rn50.data.augment import NUM_DRAWS
from mlperf_rn50.data.pipeline import Request, _read_ahead, train_requests, train_steps
from mlperf_rn50.data.records import MANIFEST_FORMAT, MANIFEST_NAME, Record, RecordFile, index_path, open_split
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


def requests_of_now(seed: int) -> Iterator[Request]:
    return train_requests(DATA, SHARD, seed, 0)


def requests_of_0_4_0(seed: int) -> Iterator[Request]:
    """0.4.0: a permutation at an epoch's start, and random numbers for the whole global batch at every step."""
    def generator(*key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    current, order, none_new = -1, np.empty(0), np.zeros(SHARD.local_batch_size, bool)
    for epoch, step, micro in train_steps(SHARD, 0):
        if epoch != current:
            current, order = epoch, generator(1, seed, epoch).permutation(SHARD.num_samples)
        draws = generator(2, seed, epoch, step).random((SHARD.global_batch_size, NUM_DRAWS))
        samples = order[SHARD.positions(step, micro) % SHARD.num_samples]
        uniforms = draws[SHARD.positions(0, micro)]
        yield Request(samples, none_new, uniforms, uniforms[:, -1] < 0.5)


def open_as_0_4_0(folder: Path) -> None:
    """0.4.0: both .idx parsed, sorted and searched."""
    json.loads((folder / MANIFEST_NAME).read_text())
    for split in ('train', 'validation'):
        starts = np.fromfile(folder / f'{split}.idx', np.int64, sep=' ')[1::2]
        ordered = np.sort(starts)
        ends = np.append(ordered[1:], (folder / f'{split}.rec').stat().st_size)
        ends[np.searchsorted(ordered, starts)] - starts


def open_as_now(folder: Path) -> None:
    for split in ('train', 'validation'):
        open_split(replace(DATA, dir=str(folder)), split)


def make_folder(folder: Path) -> None:
    """A prepared folder of ImageNet's counts, without its images."""
    splits = {}
    for name, num in (('train', DATA.num_train), ('validation', DATA.num_val)):
        lengths = np.random.default_rng(0).integers(1, RECORD_BYTES // 2, num) * 4
        starts = np.append(0, lengths.cumsum()[:-1])
        with open(folder / f'{name}.rec', 'wb') as f:
            f.truncate(int(lengths.sum()))
        (folder / f'{name}.idx').write_text(''.join(f'{i}\t{start}\n' for i, start in enumerate(starts.tolist())))
        np.save(index_path(folder / f'{name}.rec'), np.stack([starts, lengths]))
        splits[name] = {'num_images': num, 'rec_bytes': int(lengths.sum())}
    dump_manifest(folder, {'format': MANIFEST_FORMAT, 'dataset': DATA.dataset, 'splits': splits,
                           'classes': [f'n{i:08d}' for i in range(DATA.num_classes)]})


def feeding_ms(records: RecordFile, requests: Iterator[Request]) -> tuple[list[float], list[float]]:
    """Milliseconds of the thread that feeds DALI: of each step in an epoch, and of each first one but the run's."""
    source, steps, starts = _read_ahead(records, DATA, requests), [], []
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


def opening_s(open_data, folder: Path) -> float:
    begin = time.perf_counter()
    open_data(folder)
    return time.perf_counter() - begin


def main() -> None:
    rows = ('a step, ms', "an epoch's start, ms", 'opening the data, s')
    found: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name))
        records = NoImages(Path(name) / 'train.rec')
        for number in range(ROUNDS):
            for side, (requests_of, open_data) in enumerate([(requests_of_now, open_as_now),
                                                             (requests_of_0_4_0, open_as_0_4_0)]):
                steps, starts = feeding_ms(records, requests_of(number))
                for row, values in zip(rows, (steps, starts, [opening_s(open_data, Path(name))])):
                    found[row][side].extend(values)
            print(f'round {number + 1} of {ROUNDS}', file=sys.stderr, flush=True)
    print(f'rank {RANK} of {WORLD_SIZE:,}, batch {BATCH:,}, {DATA.num_train:,} images: medians (worst)')
    for (row, (now, before)), wanted in zip(found.items(), (1, 5, 0.2)):
        print(f'{row:22s} {statistics.median(now):8.3f} ({max(now):.3f})   0.4.0 {statistics.median(before):8.3f} '
              f'({max(before):.3f})   wanted {wanted}')


if __name__ == '__main__':
    main()
