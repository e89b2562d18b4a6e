"""bench data: the input pipeline alone, and the storage that training will need."""
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlperf_rn50.bench.measure import BenchSession, Shown, proc_number
from mlperf_rn50.data.batches import train_batches
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import regular_file
from mlperf_rn50.train.plan import make_plan

CACHES = ('cold', 'warm')
NODE_COUNTS = (1, 2, 4, 8, 16, 32)


def forget_file(path: Path) -> None:
    """Drops a file's clean pages from this host's page cache, which needs no root."""
    with open(path, 'rb', opener=regular_file) as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_file(path: Path) -> None:
    """Reads a file into the page cache."""
    with open(path, 'rb', opener=regular_file) as f:
        while f.read(2**24):
            pass


def measure_pipeline(session: BenchSession, cache: str) -> dict[str, Any]:
    """One row: training batches of one rank, made and thrown away.

    Warm reads go over the whole file first; cold ones start with none of it in the page cache.
    """
    config, plan = session.config, make_plan(session.config, 1)
    path = Path(config.data.dir) / 'train.rec'
    (forget_file if cache == 'cold' else load_file)(path)
    # Bytes fetched from storage; what came from the page cache is not among them.
    start, before = time.perf_counter(), proc_number('io', 'read_bytes:')
    batches = train_batches(config, plan.train_shard(), 0, 0, session.device_id)
    seconds = session.time(lambda: next(batches).images.wait_to_read())
    wall_s, read_bytes = time.perf_counter() - start, proc_number('io', 'read_bytes:') - before
    size = plan.local_batch_size
    record_bytes = path.stat().st_size / config.data.num_train
    return {'num_threads': config.data.num_threads, 'local_batch_size': size, 'cache': cache,
            'num_batches': seconds.num, 'images_per_s': size / seconds.mean_s, 'batch_ms': 1000 * seconds.median_s,
            'spread': seconds.relative, 'record_bytes': record_bytes,
            'mb_per_s': size / seconds.mean_s * record_bytes / 1e6, 'storage_mb_per_s': read_bytes / wall_s / 1e6}


def bench_pipeline(session: BenchSession, threads: list[int], batch_sizes: list[int], caches: list[str],
                   node_images_per_s: float | None) -> list[Shown]:
    """Measures the grid; then what nodes of a training speed read, None for that of the fastest pipeline measured."""
    config = session.config
    if config.data.synthetic:
        raise ConfigError('data.synthetic: got true, expected false: bench data reads the files of data.dir')
    cases = [(replace(session, config=replace(config, data=replace(config.data, num_threads=num_threads),
                      train=replace(config.train, local_batch_size=size, global_batch_size=None),
                      run=replace(config.run, num_nodes=None, ranks_per_node=None))), cache)
             for num_threads in threads for size in batch_sizes for cache in caches]
    # The program's own pages are no reads of the data.
    measure_pipeline(replace(cases[0][0], num_warmup=0, num=1), 'warm')
    rows = [measure_pipeline(case, cache) for case, cache in cases]
    speed = node_images_per_s or max(r['images_per_s'] for r in rows)
    return [
        Shown(f'Input pipeline: {config.data.dataset}, {config.data.image_size} pixels', (
            ('num_threads', 'threads', 'd'), ('local_batch_size', 'batch', 'd'), ('cache', 'page cache', 's'),
            ('num_batches', 'n', 'd'), ('images_per_s', 'images/s', ',.0f'), ('batch_ms', 'ms/batch', ',.1f'),
            ('spread', '±', '.1%'), ('mb_per_s', 'MB/s of records', ',.1f'),
            ('storage_mb_per_s', 'MB/s from storage', ',.1f')), rows,
            'One rank with DALI threads as given; images/s over all n batches, ms/batch is their median. From storage: '
            'what the kernel fetched for this process, over the whole measurement.'),
        Shown('Storage that training needs until the data is in the page cache', (
            ('num_nodes', 'nodes', 'd'), ('images_per_s', 'images/s', ',.0f'), ('mb_per_s', 'MB/s to read', ',.1f')),
            need_rows(speed, rows[0]['record_bytes']),
            f'For {speed:,.0f} images/s per node and {rows[0]["record_bytes"]:,.0f} bytes per record.')]


def need_rows(node_images_per_s: float, record_bytes: float) -> list[dict[str, Any]]:
    """The read bandwidth that numbers of nodes of a training speed need together."""
    return [{'num_nodes': n, 'images_per_s': n * node_images_per_s,
             'mb_per_s': n * node_images_per_s * record_bytes / 1e6} for n in NODE_COUNTS]
