"""`bench train`: speed of the training code for combinations of networks, precisions, inputs, batches and ranks.

Source: tf_cnn_benchmarks' short test, which takes the mean of 100 steps after 10 warm-up steps.
"""
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mxnet as mx

from mlperf_rn50.bench import measure
from mlperf_rn50.bench.measure import BenchSession, ResultTable, spread_of
from mlperf_rn50.config import Config, check_values
from mlperf_rn50.data.batches import Batch, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.fused import with_layout
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape, image_size_of
from mlperf_rn50.train.comm.device import wait_for
from mlperf_rn50.train.loop import STEPS_AHEAD
from mlperf_rn50.train.plan import Plan, make_plan
from mlperf_rn50.train.trainer import PendingStep, Trainer

PARTS = ('data', 'forward', 'backward', 'all_reduce', 'update')
_NUM_SPLIT_STEPS = 5  # maximum number of steps measured in parts


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    source: str
    local_batch_size: int
    num_ranks: int


def make_cases(models: list[str], precisions: list[str], sources: list[str], batch_sizes: list[int],
               rank_counts: list[int]) -> list[Case]:
    """Return all cases, those with bfloat16 last, because bfloat16 changes the operators for the whole process."""
    return [Case(m, p, s, b, n) for p in sorted(precisions, key=lambda p: p == 'bfloat16') for m in models
            for s in sources for b in batch_sizes for n in rank_counts]


def case_config(config: Config, case: Case) -> Config:
    """Return the configuration of a case. Synthetic images have a configured size or the network's design size."""
    is_synthetic = case.source == 'synthetic'
    data = replace(config.data, synthetic=is_synthetic)
    if is_synthetic and data.image_size == DataConfig.image_size:
        side = image_size_of(case.model)
        data = replace(data, image_size=side, resize_shorter=max(data.resize_shorter, side))
    train = replace(config.train, precision=case.precision,  # type: ignore[arg-type]
                    local_batch_size=case.local_batch_size, global_batch_size=None)
    model = replace(config.model, name=case.model)  # type: ignore[arg-type]
    result = replace(config, data=data, train=train, model=model,
                     run=replace(config.run, num_nodes=None, ranks_per_node=None))
    check_values(result)
    return with_layout(result)


def time_steps(trainer: Trainer, batches: Iterator[Batch], plan: Plan, session: BenchSession) -> list[float]:
    """Return each step's seconds after warm-up. As in training, Python is STEPS_AHEAD steps ahead of the device."""
    num_steps = session.num_warmup + session.num
    pulses, stamps = deque[PendingStep](), [time.perf_counter()]
    for step in range(num_steps):
        pulses.append(trainer.step(batches, step % plan.steps_per_epoch, plan.learning_rate(step)))
        while len(pulses) > (STEPS_AHEAD if step < num_steps - 1 else 0):
            wait_for(pulses.popleft().sums)
            stamps.append(time.perf_counter())
            session.heartbeat.beat('training', len(stamps))
        if step == session.num_warmup - 1:  # start the clock with an idle device
            mx.nd.waitall()
            pulses.clear()
            stamps = [time.perf_counter()]
    mx.nd.waitall()
    stamps[-1] = time.perf_counter()  # the last step ends with its update
    return [b - a for a, b in zip(stamps, stamps[1:])]


def split_step(trainer: Trainer, batches: Iterator[Batch], plan: Plan, step: int) -> dict[str, float]:
    """Return the seconds of each part of one step. Without overlap, their sum exceeds the time of a normal step."""
    stamps = [time.perf_counter()]

    def done() -> None:
        mx.nd.waitall()
        stamps.append(time.perf_counter())
    batch = next(batches)
    done()
    step_in_epoch = step % plan.steps_per_epoch
    losses = trainer.forward(batch)
    done()
    losses.backward()
    done()
    sums = trainer.exchange(losses.detach().sum(), step_in_epoch)
    done()
    trainer.update(sums, step_in_epoch, plan.learning_rate(step))
    done()
    return {part: b - a for part, a, b in zip(PARTS, stamps, stamps[1:])}


def measure_case(session: BenchSession, case: Case) -> dict[str, Any]:
    """Measure a case on its ranks. Return a row with the times of this rank and the maximum memory of all ranks."""
    config, comm, device_id = session.config, session.comm, session.device_id
    plan = make_plan(config, comm.world_size)
    with suppress(OSError):  # resets peak_memory_bytes; if this fails, the peak includes earlier cases
        Path('/proc/self/clear_refs').write_text('5')
    trainer = Trainer(plan, comm, 0, device_id)
    trainer.broadcast()
    batches = train_batches(config, plan.train_shard(comm.rank), 0, 0, device_id)
    seconds = spread_of(time_steps(trainer, batches, plan, session))
    splits = [split_step(trainer, batches, plan, step) for step in range(min(session.num, _NUM_SPLIT_STEPS))]
    memory = max(comm.gather_object(round(measure.peak_memory_bytes(device_id) / 2**20)))
    peak = measure.measure_peak(config.train.precision, session.context)
    flops = 3 * count_flops(trainer.net, image_shape(config)) * plan.local_batch_size
    return {
        'model': case.model, 'precision': case.precision, 'input': case.source, 'image_size': config.data.image_size,
        'local_batch_size': case.local_batch_size, 'num_ranks': comm.world_size,
        'num_hosts': comm.sum([comm.local_rank == 0])[0], 'num_steps': seconds.num,
        'images_per_s': plan.global_batch_size / seconds.median_s, 'step_ms': 1000 * seconds.median_s,
        'step_low_ms': 1000 * seconds.low_s, 'step_high_ms': 1000 * seconds.high_s, 'spread': seconds.relative,
        **{f'{part}_ms': 1000 * spread_of([s[part] for s in splits]).median_s for part in PARTS},
        'num_parameters': count_parameters(trainer.net), 'gflop_per_step': flops / 1e9,
        'gflops': flops / seconds.median_s / 1e9, 'peak_gflops': peak / 1e9,
        'share_of_peak': flops / seconds.median_s / peak, 'memory_mib': memory}


def bench_steps(session: BenchSession, cases: list[Case]) -> list[ResultTable]:
    """Measure the cases in turn, while ranks outside a case wait. Return tables only on rank 0."""
    comm = session.comm
    for case in cases:
        if case.num_ranks > comm.world_size:
            raise ConfigError(f'--ranks: got {case.num_ranks}, expected at most {comm.world_size}; start more with a '
                              f'launcher, such as launch/ranks.sh {case.num_ranks} mlperf-rn50 bench train …')
    configs = [case_config(session.config, case) for case in cases]
    rows = []
    for case, config in zip(cases, configs):
        part = comm.subset(case.num_ranks)
        if part:
            rows.append(measure_case(replace(session, config=config, comm=part), case))
            gc.collect()
        comm.barrier()
    return [_steps_table(rows), *_scaling_tables(rows)] if comm.rank == 0 else []


def _steps_table(rows: list[dict[str, Any]]) -> ResultTable:
    return ResultTable('Training steps', (
        ('model', 'model', 's'), ('precision', 'precision', 's'), ('input', 'input', 's'),
        ('image_size', 'pixels', 'd'), ('local_batch_size', 'batch', 'd'), ('num_ranks', 'ranks', 'd'),
        ('num_hosts', 'hosts', 'd'), ('num_steps', 'n', 'd'), ('images_per_s', 'images/s', ',.1f'),
        ('step_ms', 'ms/step', ',.1f'), ('spread', '±', '.1%'),
        *((f'{p}_ms', p.replace('_', '-'), ',.1f') for p in PARTS),
        ('gflops', 'GFLOP/s', ',.0f'), ('share_of_peak', 'of peak', '.0%'), ('memory_mib', 'MiB', ',d')), rows,
        'batch, MiB, GFLOP/s: per rank. ms/step: median of n steps, ± half the interquartile range. Columns data to '
        'update: ms of each part, without overlap. GFLOP/s: two FLOPs per multiply-add of convolutions and dense '
        'layers, backward counted twice. Peak: the fastest of 12 matrix products.')


def _scaling_tables(rows: list[dict[str, Any]]) -> list[ResultTable]:
    """Return a scaling table for each case measured with different numbers of ranks."""
    names = ('model', 'precision', 'input', 'local_batch_size')
    result = []
    for case in dict.fromkeys(tuple(r[n] for n in names) for r in rows):
        same = sorted((r for r in rows if tuple(r[n] for n in names) == case), key=lambda r: r['num_ranks'])
        if len(same) > 1:
            result.append(ResultTable(
                f'Scaling efficiency: {case[0]}, {case[1]}, {case[2]}, {case[3]} images per rank',
                (('num_ranks', 'ranks', 'd'), ('num_hosts', 'hosts', 'd'), ('ideal', 'ideal images/s', ',.1f'),
                 ('real', 'real images/s', ',.1f'), ('efficiency', 'efficiency', '.0%')), scaling_rows(same)))
    return result


def scaling_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return real and ideal throughput by number of ranks. Ideal is the first row's throughput, scaled linearly."""
    each = rows[0]['images_per_s'] / rows[0]['num_ranks']
    return [{'num_ranks': r['num_ranks'], 'num_hosts': r['num_hosts'], 'ideal': each * r['num_ranks'],
             'real': r['images_per_s'], 'efficiency': r['images_per_s'] / (each * r['num_ranks'])} for r in rows]
