"""Cost of a checkpoint and of a fault: what rank 0 measures, and the check that states it."""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.doctor.result import Check, RankFacts, WriteTrial
from mlperf_rn50.model.zoo import build_model, count_parameters
from mlperf_rn50.system.cgroup import read_small
from mlperf_rn50.system.out_of_memory import PROC
from mlperf_rn50.system.power import BOOT_ID
from mlperf_rn50.text import plural
from mlperf_rn50.train.checkpoint.period import AutoPeriod
from mlperf_rn50.train.options import CheckpointConfig

_MAX_BYTES = 256_000_000
_BLOCK_BYTES = 8_000_000
_PERIODS = ('period_s', 'second'), ('period_steps', 'step'), ('period_epochs', 'epoch')
STARTED = 'MLPERF_RN50_STARTED'  # boot id and uptime, set by launch/engines/openmpi.sh


def start_s() -> float | None:
    """Return the time since a launcher on this host started the ranks; otherwise None."""
    boot, _, up_s = os.environ.get(STARTED, '').partition(' ')
    if not boot or boot != read_small(BOOT_ID):
        return None
    # as openmpi.sh reads it; in some containers, it is not the host's
    return float(read_small(PROC / 'uptime').split()[0]) - float(up_s)


def checkpoint_bytes(config: Config) -> int:
    """Return the approximate size of a checkpoint: weights, momentum, the float32 copies of float16
    weights, and averaged weights."""
    train = config.train
    bytes_per_parameter = 10 if train.precision == 'float16' else 8
    if train.ema is not None:
        bytes_per_parameter += 4
    return bytes_per_parameter * count_parameters(build_model(config, mx.cpu(), None))


def try_writing(folder: Path, num_bytes: int, max_bytes: int = _MAX_BYTES) -> WriteTrial:
    """Write and sync a temporary file of this size, at most max_bytes and half of the free
    space."""
    size = min(num_bytes, max_bytes)
    problem = ''
    start = time.monotonic()
    try:
        free = shutil.disk_usage(folder).free
        if free < size:
            problem = 'less than its size is free'
        else:
            size = min(size, max(1, free // 2))
            _write(folder, size)
    except OSError as e:
        problem = e.strerror or str(e)
    seconds = time.monotonic() - start
    return WriteTrial(num_bytes, size, seconds, problem)


def _write(folder: Path, size: int) -> None:
    block = os.urandom(min(size, _BLOCK_BYTES))  # a disk may compress zeros
    with tempfile.TemporaryFile(dir=folder) as file:
        for first in range(0, size, len(block)):
            file.write(block[: size - first])
        file.flush()
        os.fsync(file.fileno())


def check_fault_cost(
    rank_0: RankFacts, trial: WriteTrial, config: CheckpointConfig, num_ranks: int
) -> Check:
    """State the measured time of a checkpoint, and what a fault costs."""
    size = f'{trial.num_bytes / 1e6:.0f} MB'
    if trial.problem:
        found = f'a file of {size} for the run folder on {rank_0.host}: {trial.problem}'
        return Check('checkpoint', 'failed', found, 'choose a writable run.dir, or free space')
    rate = trial.written_bytes / trial.seconds
    what = f'a checkpoint of {size} takes'
    if trial.written_bytes < trial.num_bytes:
        what = f'{trial.written_bytes / 1e6:.0f} of the {size} of a checkpoint take'
    loss = _repeated(config, trial.num_bytes / rate, num_ranks)
    restart = ''
    if rank_0.start_s is not None:
        restart = (
            f' and about {rank_0.start_s:.0f} s to start the ranks, as long as this start took'
        )
    time_text = f'{what} {trial.seconds:.2g} s on this disk ({rate / 1e6:.0f} MB/s)'
    return Check('checkpoint', 'ok', f'{time_text}; a fault costs {loss}{restart}')


def _repeated(config: CheckpointConfig, cost_s: float, num_ranks: int) -> str:
    """Return how much training a fault repeats; cost_s: time of a checkpoint."""
    note = ''
    if config.period_s == 'auto':
        auto = AutoPeriod(num_ranks, num_faults=0, down_s=0.0, costs_s=[cost_s])
        config = replace(config, period_s=auto.period_s(0.0))
        note = ': auto, if training waits for the whole checkpoint'
    for key, unit in _PERIODS:
        if num := round(getattr(config, key)):
            return f'at most {plural(num, unit)} of repeated training (checkpoint.{key}{note})'
    return 'all training so far, because the configuration writes no checkpoints'
