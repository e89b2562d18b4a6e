"""`bench data`: speed of the input pipeline alone, and the storage bandwidth that training
needs."""

import os
import time
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.bench.measure import BenchSession, ResultTable, Row, with_local_batch
from mlperf_rn50.config import with_size
from mlperf_rn50.data.batches import train_batches
from mlperf_rn50.data.recordio import find_split
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import open_regular, sync_if_possible
from mlperf_rn50.model.fused import with_layout
from mlperf_rn50.system.out_of_memory import PROC, read_numbers
from mlperf_rn50.train.comm.horovod import wait_for
from mlperf_rn50.train.plan import make_plan

CACHES = ('cold', 'warm')
NODE_COUNTS = (1, 2, 4, 8, 16, 32)


_SPEED_COLUMNS = """
    num_threads       threads            d
    local_batch_size  batch              d
    cache             page cache         s
    num_batches       n                  d
    images_per_s      images/s           ,.0f
    batch_ms          ms/batch           ,.1f
    spread            ±                  .1%
    mb_per_s          MB/s of records    ,.1f
    storage_mb_per_s  MB/s from storage  ,.1f"""
_STORAGE_COLUMNS = """
    num_nodes     nodes         d
    images_per_s  images/s      ,.0f
    mb_per_s      MB/s to read  ,.1f"""


def _bytes_read() -> int:
    """Return the bytes that this process has read from storage, not from the page cache."""
    return read_numbers(PROC / 'self/io')['read_bytes']


def measure_input(session: BenchSession, cache: str) -> Row:
    """Measure one rank's training batches. The page cache starts without the file (cold) or with it
    (warm)."""
    config, plan = session.config, make_plan(session.config, 1)
    path = Path(config.data.dir) / 'train.rec'
    with open_regular(path) as f:
        if cache == 'cold':  # drop the clean pages of the file, which works without root
            sync_if_possible(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while cache == 'warm' and f.read(2**24):
            session.heartbeat.beat()
    start, before = time.perf_counter(), _bytes_read()
    batches = train_batches(config, plan.train_shard(), 0, 0, session.device_id)
    # batches of a pipeline run, so each measurement includes a run
    num_joined = config.data.input_batch_multiplier

    def read() -> None:
        for _ in range(num_joined):
            wait_for(next(batches).images)

    seconds = session.time(read)
    storage_bytes_per_s = (_bytes_read() - before) / (time.perf_counter() - start)
    images_per_s = plan.local_batch_size * num_joined / seconds.mean_s
    record_bytes = path.stat().st_size / config.data.num_train
    return {
        'num_threads': config.data.num_threads,
        'local_batch_size': plan.local_batch_size,
        'cache': cache,
        'num_batches': num_joined * seconds.num,
        'images_per_s': images_per_s,
        'batch_ms': 1000 * seconds.median_s / num_joined,
        'spread': seconds.relative,
        'record_bytes': record_bytes,
        'mb_per_s': images_per_s * record_bytes / 1e6,
        'storage_mb_per_s': storage_bytes_per_s / 1e6,
    }


def bench_input(
    session: BenchSession,
    threads: list[int],
    batch_sizes: list[int],
    caches: list[str],
    node_images_per_s: float | None,
) -> list[ResultTable]:
    """Measure all cases and compute storage bandwidths for node_images_per_s (None: speed of the
    fastest case)."""
    config = with_layout(with_size(session.config, session.config.data.image_size))
    if config.data.synthetic:
        raise ConfigError(
            'data.synthetic: got true, expected false; bench data reads files from data.dir'
        )

    find_split(config.data, 'train')  # names the command that creates missing data

    def with_case(num_threads: int, size: int) -> BenchSession:
        changed = replace(
            with_local_batch(config, size), data=replace(config.data, num_threads=num_threads)
        )
        return replace(session, config=changed)

    cases = [(with_case(t, size), c) for t in threads for size in batch_sizes for c in caches]
    # This first run loads the program's own pages, so that the measured runs do not count them as
    # reads of data.
    measure_input(replace(cases[0][0], num_warmup=0, num=1), 'cold')
    rows = [measure_input(case, cache) for case, cache in cases]
    speed = node_images_per_s or max(r['images_per_s'] for r in rows)
    record_bytes = rows[0]['record_bytes']
    storage = [
        {'num_nodes': n, 'images_per_s': n * speed, 'mb_per_s': n * speed * record_bytes / 1e6}
        for n in NODE_COUNTS
    ]
    return [
        ResultTable(
            f'Input pipeline: {config.data.dataset}, {config.data.image_size} pixels',
            _SPEED_COLUMNS,
            rows,
            'One rank. images/s: from the mean time of n batches. ms/batch: median of n batches. '
            "MB/s from storage: this process's reads during the whole measurement.",
        ),
        ResultTable(
            'Storage that training needs until the data is in the page cache',
            _STORAGE_COLUMNS,
            storage,
            f'At {speed:,.0f} images/s per node and {record_bytes:,.0f} bytes per record.',
        ),
    ]
