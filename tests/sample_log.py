"""Logs of made-up runs from the log writer of mlperf-rn50: single runs and sets of five."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.resnet import ResNet
from mlperf_rn50.train.options import OptimizerConfig, ScheduleConfig, TrainConfig
from mlperf_rn50.train.sinks.mlperf_log import describe_layers

SGD = Config(
    run=RunConfig(submission_org='us', submission_platform='here'),
    train=TrainConfig(local_batch_size=8),
    schedule=ScheduleConfig(base_lr=0.5, warmup_epochs=5),
)
LARS = replace(SGD, optimizer=OptimizerConfig('lars'))
NET = ResNet(Config(data=DataConfig(num_classes=10)))
TENSORS = sorted(n for n, p in NET.collect_params().items() if p.grad_req != 'null')
SEED = 4_242_424_242  # placeholder, replaced in the runs of a set
ENV = {
    'git_commit': None,
    'packages': {'mxnet-cu117': '1.9.1', 'horovod': '0.28.1'},
    'host': {
        'os_name': 'Debian GNU/Linux 12',
        'memory_bytes': 512_000_000_000,
        'hardware': {
            'cpu': {
                'model': 'Xeon',
                'sockets': 2,
                'cores_per_socket': 20,
                'threads_per_core': 2,
                'max_mhz': 3700.0,
                'caches': 'L3 55 MiB',
            },
            'storage': [{'kind': 'NVMe SSD', 'model': 'x', 'bytes': 1_600_000_000_000}] * 2,
            'networks': [{'name': 'mlx5_0', 'rate': '100 Gb/sec'}],
            'gpus': [{'name': 'V100', 'memory.total': '32510 MiB', 'clocks.max.sm': '1530 MHz'}]
            * 4,
        },
    },
}


def closed(config):
    """Return the configuration in the closed division."""
    return replace(config, run=replace(config.run, submission_division='closed'))


def write_run(
    path, config=SGD, accuracies=(0.1, 0.7595), end='converged', v06=None, seed=7, batch=64
):
    """Write a log with an evaluation every two epochs, and its v0.6 lines to `v06`; end=None omits
    run_stop."""
    logs = _logs(config, accuracies, end, seed, batch)
    for place, text in zip((path, v06), logs):
        if place:
            place.write_text(text)
    return path


@cache
def _logs(*arguments):
    """Return the log for v0.5 and v0.7+, and the log for v0.6.

    Runs in a thread with a short stack, because the v0.5 library reads the source of every stack
    frame per line.
    """
    with TemporaryDirectory() as place, ThreadPoolExecutor(1) as pool:
        paths = Path(place, 'log'), Path(place, 'v06')
        pool.submit(_write, *paths, *arguments).result()
        return [p.read_text() for p in paths]


def _write(path, v06, config, accuracies, end, seed, batch):
    log = RunLog(path, v06)
    log.submission(config)
    log.cache_clear(True, 'a reason')
    log.init_start()
    log.seed(seed)
    log.hyperparameters(config, batch, 8, 1000, 100, 48 / batch)
    log.model(describe_layers(config), TENSORS)
    log.init_stop()
    log.run_start()
    log.data(config, 8, 2)
    for block, accuracy in enumerate(accuracies):
        log.block_start(2 * block, 2)
        for epoch in (2 * block, 2 * block + 1):
            log.epoch_start(epoch)
            log.epoch_stop(epoch, 123.4, 0.25)
        log.eval_start(epoch)
        log.eval_stop(epoch, accuracy)
        log.block_stop(2 * block)
    if end:
        log.run_stop(end)
    log.close()


def at_another_pace(log, extra_ms):
    """Delay each MLLOG line by extra_ms more than the previous one, so that runs have different
    times."""
    return ''.join(
        re.sub(
            r'("time_ms": )(\d+)', lambda m, late=i * extra_ms: f'{m[1]}{int(m[2]) + late}', line
        )
        for i, line in enumerate(log.splitlines(keepends=True))
    )


def shift_clock(log, share, seconds):
    """Shift the times of all lines after the given share of them, as a step of the wall clock
    does."""
    lines = log.splitlines(keepends=True)
    first = int(len(lines) * share)
    later = ''.join(lines[first:])
    later = re.sub(
        r'("time_ms": )(\d+)', lambda m: f'{m[1]}{int(m[2]) + round(1000 * seconds)}', later
    )
    later = re.sub(
        r'(:::MLPv0\.5\.0 resnet )([\d.]+)', lambda m: f'{m[1]}{float(m[2]) + seconds:.9f}', later
    )
    return ''.join(lines[:first]) + later


def write_five(folder, config=SGD, num=5, seeds=range(1, 9), env=ENV, ends=(), pace_ms=0, **keys):
    """Write a set of runs with env.json and config.yaml; lines of run k are pace_ms + k further
    apart."""
    folder.mkdir(parents=True)
    for k in range(num):
        end = ends[k] if k < len(ends) else 'converged'
        path = write_run(folder / f'result_{k}.txt', config, end=end, seed=SEED, **keys)
        path.write_text(
            at_another_pace(path.read_text().replace(str(SEED), str(seeds[k])), pace_ms + k)
        )
        os.utime(path, (1e9, 1e9))  # old enough to count as finished
        (folder / f'env{f"_{k}" if k else ""}.json').write_text(json.dumps(env))
        (folder / f'config{f"_{k}" if k else ""}.yaml').write_text(
            'data:\n  dir: /home/me/imagenet\n'
        )
    return folder
