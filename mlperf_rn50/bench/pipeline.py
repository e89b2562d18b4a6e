"""`bench data`: speed of the input pipeline alone, and the storage bandwidth that training
needs."""

import os
import time
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.bench.measure import BenchSession, ResultTable, Row
from mlperf_rn50.config import with_size
from mlperf_rn50.data.batches import train_batches
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import open_regular
from mlperf_rn50.model.fused import with_layout
from mlperf_rn50.system.out_of_memory import PROC, read_numbers
from mlperf_rn50.train.comm.device import wait_for
from mlperf_rn50.train.plan import make_plan

CACHES = ('cold', 'warm')
NODE_COUNTS = (1, 2, 4, 8, 16, 32)


def measure_pipeline(session: BenchSession, cache: str) -> Row:
    """Measure one rank's training batches. The page cache starts without the file (cold) or with it
    (warm)."""
    config, plan = session.config, make_plan(session.config, 1)
    path = Path(config.data.dir) / 'train.rec'
    with open_regular(path) as f:
        if cache == 'cold':  # drop the clean pages of the file, which works without root
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while cache == 'warm' and f.read(2**24):
            pass
    # read_bytes counts only reads from storage, not from the page cache.
    start, before = time.perf_counter(), read_numbers(PROC / 'self/io')['read_bytes']
    batches = train_batches(config, plan.train_shard(), 0, 0, session.device_id)
    # batches of a pipeline run, so each measurement includes a run
    num_joined = config.data.input_batch_multiplier

    def read() -> None:
        for _ in range(num_joined):
            wait_for(next(batches).images)

    seconds = session.time(read)
    wall_s, read_bytes = (
        time.perf_counter() - start,
        read_numbers(PROC / 'self/io')['read_bytes'] - before,
    )
    size, batch_s = plan.local_batch_size, seconds.mean_s / num_joined
    record_bytes = path.stat().st_size / config.data.num_train
    return {
        'num_threads': config.data.num_threads,
        'local_batch_size': size,
        'cache': cache,
        'num_batches': num_joined * seconds.num,
        'images_per_s': size / batch_s,
        'batch_ms': 1000 * seconds.median_s / num_joined,
        'spread': seconds.relative,
        'record_bytes': record_bytes,
        'mb_per_s': size / batch_s * record_bytes / 1e6,
        'storage_mb_per_s': read_bytes / wall_s / 1e6,
    }


def bench_pipeline(
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
    cases = [
        (
            replace(
                session,
                config=replace(
                    config,
                    data=replace(config.data, num_threads=num_threads),
                    train=replace(config.train, local_batch_size=size, global_batch_size=None),
                    run=replace(config.run, num_nodes=None, ranks_per_node=None),
                ),
            ),
            cache,
        )
        for num_threads in threads
        for size in batch_sizes
        for cache in caches
    ]
    # This first run loads the program's own pages, so that the measured runs do not count them as
    # reads of data.
    measure_pipeline(replace(cases[0][0], num_warmup=0, num=1), 'warm')
    rows = [measure_pipeline(case, cache) for case, cache in cases]
    speed, record_bytes = (
        node_images_per_s or max(r['images_per_s'] for r in rows),
        rows[0]['record_bytes'],
    )
    storage = [
        {'num_nodes': n, 'images_per_s': n * speed, 'mb_per_s': n * speed * record_bytes / 1e6}
        for n in NODE_COUNTS
    ]
    return [
        ResultTable(
            f'Input pipeline: {config.data.dataset}, {config.data.image_size} pixels',
            (
                ('num_threads', 'threads', 'd'),
                ('local_batch_size', 'batch', 'd'),
                ('cache', 'page cache', 's'),
                ('num_batches', 'n', 'd'),
                ('images_per_s', 'images/s', ',.0f'),
                ('batch_ms', 'ms/batch', ',.1f'),
                ('spread', '±', '.1%'),
                ('mb_per_s', 'MB/s of records', ',.1f'),
                ('storage_mb_per_s', 'MB/s from storage', ',.1f'),
            ),
            rows,
            'One rank. images/s: from the mean time of n batches. ms/batch: median of n batches. '
            "MB/s from storage: this process's reads during the whole measurement.",
        ),
        ResultTable(
            'Storage that training needs until the data is in the page cache',
            (
                ('num_nodes', 'nodes', 'd'),
                ('images_per_s', 'images/s', ',.0f'),
                ('mb_per_s', 'MB/s to read', ',.1f'),
            ),
            storage,
            f'At {speed:,.0f} images/s per node and {record_bytes:,.0f} bytes per record.',
        ),
    ]
