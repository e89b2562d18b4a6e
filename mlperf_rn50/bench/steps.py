"""`bench train`: speed of the training code for combinations of networks, precisions, inputs,
batches and ranks.

`bench allreduce`: time and bandwidth of the gradient exchange of these steps alone. Sources:
tf_cnn_benchmarks' short test, which takes the mean of 100 steps after 10 warm-up steps; nccl-tests,
PERFORMANCE.md. S bytes in t s on n ranks: algorithm bandwidth S / t, bus S / t x 2 (n - 1) / n.
"""

import gc
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from time import perf_counter

import mxnet as mx
import numpy as np
from mxnet import nd

from mlperf_rn50.bench.measure import (
    BenchSession,
    ResultTable,
    Row,
    count_hosts,
    peak_memory_bytes,
    spread_of,
    with_local_batch,
)
from mlperf_rn50.config import Config, check_values, image_shape
from mlperf_rn50.data.batches import Batch, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model.fused import with_layout
from mlperf_rn50.model.zoo import build_model, count_flops, count_parameters, image_size_of
from mlperf_rn50.text import grouped
from mlperf_rn50.train.comm.device import measure_peak
from mlperf_rn50.train.comm.horovod import wait_for
from mlperf_rn50.train.comm.sharing import sharing_of
from mlperf_rn50.train.loop import STEPS_AHEAD
from mlperf_rn50.train.plan import Plan, make_plan
from mlperf_rn50.train.trainer import PendingStep, Trainer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

SIZES = tuple(4**k * 4096 for k in range(9))  # 4 KiB to 256 MiB
PARTS = ('data', 'forward', 'backward', 'all_reduce', 'update')
_NUM_SPLIT_STEPS = 5  # maximum number of steps measured in parts
_BEAT_S = 5.0  # between signs of life of a rank that waits for a case of others
_STEP_COLUMNS = """
    model             model       s
    precision         precision   s
    input             input       s
    image_size        pixels      d
    local_batch_size  batch       d
    num_ranks         ranks       d
    num_hosts         hosts       d
    num_steps         n           d
    images_per_s      images/s    ,.1f
    step_ms           ms/step     ,.1f
    spread            ±           .1%
    data_ms           data        ,.1f
    forward_ms        forward     ,.1f
    backward_ms       backward    ,.1f
    all_reduce_ms     all-reduce  ,.1f
    update_ms         update      ,.1f
    gflops            GFLOP/s     ,.0f
    share_of_peak     of peak     .0%
    memory_mib        MiB         ,d"""
_SCALING_COLUMNS = """
    num_ranks   ranks           d
    num_hosts   hosts           d
    ideal       ideal images/s  ,.1f
    real        real images/s   ,.1f
    efficiency  efficiency      .0%"""
_EXCHANGE_COLUMNS = """
    bytes               bytes           ,d
    num                 n               d
    time_ms             ms              ,.3f
    spread              ±               .0%
    algorithm_gb_per_s  algorithm GB/s  .3f
    bus_gb_per_s        bus GB/s        .3f"""
_GRADIENT_COLUMNS = """
    model             model            s
    num_gradients     tensors          d
    bytes             bytes            ,d
    predicted_ms      predicted ms     ,.1f
    time_ms           measured ms      ,.1f
    spread            ±                .0%
    bus_gb_per_s      bus GB/s         .3f
    local_batch_size  batch            d
    step_ms           step, ms         ,.1f
    predicted_share   predicted share  .1%
    measured_share    measured share   .1%"""


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    source: str
    local_batch_size: int
    num_ranks: int


def make_cases(
    models: list[str],
    precisions: list[str],
    sources: list[str],
    batch_sizes: list[int],
    rank_counts: list[int],
) -> list[Case]:
    """Return all cases, those with bfloat16 last, because bfloat16 changes the operators for the
    whole process."""
    ordered = sorted(precisions, key=lambda p: p == 'bfloat16')
    return [
        Case(model, precision, source, size, num)
        for precision, model, source, size, num in itertools.product(
            ordered, models, sources, batch_sizes, rank_counts
        )
    ]


def case_config(config: Config, case: Case) -> Config:
    """Return the configuration of a case. Synthetic images have a configured size or the network's
    design size."""
    is_synthetic = case.source == 'synthetic'
    data = replace(config.data, synthetic=is_synthetic, sizes=())
    if is_synthetic and data.image_size == DataConfig.image_size:
        side = image_size_of(case.model)
        data = replace(data, image_size=side, resize_shorter=max(data.resize_shorter, side))
    config = with_local_batch(config, case.local_batch_size)
    result = replace(
        config,
        data=data,
        train=replace(config.train, precision=case.precision),  # type: ignore[arg-type]
        model=replace(config.model, name=case.model),  # type: ignore[arg-type]
    )
    check_values(result)
    return with_layout(result)


def time_steps(
    trainer: Trainer, batches: Iterator[Batch], plan: Plan, session: BenchSession
) -> list[float]:
    """Return each step's seconds after warm-up. As in training, Python is STEPS_AHEAD steps ahead
    of the device."""
    num_steps = session.num_warmup + session.num
    pulses, stamps = deque[PendingStep](), [perf_counter()]
    for step in range(num_steps):
        pulses.append(trainer.step(batches, step % plan.steps_per_epoch, plan.learning_rate(step)))
        while len(pulses) > (STEPS_AHEAD if step < num_steps - 1 else 0):
            wait_for(pulses.popleft().sums)
            stamps.append(perf_counter())
            # in the phase of the start, whose limit is not learned from earlier cases
            session.heartbeat.beat(step=len(stamps))
        if step == session.num_warmup - 1:  # start the clock with an idle device
            nd.waitall()
            pulses.clear()
            stamps = [perf_counter()]
    nd.waitall()
    stamps[-1] = perf_counter()  # the last step ends with its update
    return [b - a for a, b in zip(stamps, stamps[1:])]


def split_step(
    trainer: Trainer, batches: Iterator[Batch], plan: Plan, step: int
) -> dict[str, float]:
    """Return the seconds of each part of one step. Without overlap, their sum exceeds the time of a
    normal step."""
    stamps = [perf_counter()]

    def done() -> None:
        nd.waitall()
        stamps.append(perf_counter())

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


def measure_case(session: BenchSession, case: Case) -> Row:
    """Measure a case on its ranks. Return a row with the times of this rank and the maximum memory
    of all ranks."""
    config, comm, device_id = session.config, session.comm, session.device_id
    plan = make_plan(config, comm.world_size)
    # resets peak_memory_bytes; if this fails, the peak includes earlier cases
    with suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')
    trainer = Trainer(plan, comm, 0, device_id)
    trainer.broadcast()
    batches = train_batches(config, plan.train_shard(comm.rank), 0, 0, device_id)
    seconds = spread_of(time_steps(trainer, batches, plan, session))
    splits = []
    for step in range(min(session.num, _NUM_SPLIT_STEPS)):
        splits.append(split_step(trainer, batches, plan, step))
        session.heartbeat.beat()
    memory = max(comm.gather_object(round(peak_memory_bytes(device_id) / 2**20)))
    peak = measure_peak(config.train.precision, session.context)
    flops = 3 * count_flops(trainer.net, image_shape(config)) * plan.local_batch_size
    # A step that waits for several batches of images follows others that do not wait.
    step_s = seconds.median_s if config.data.synthetic else seconds.mean_s
    return {
        'model': case.model,
        'precision': case.precision,
        'input': case.source,
        'image_size': config.data.image_size,
        'local_batch_size': case.local_batch_size,
        'num_ranks': comm.world_size,
        'num_hosts': count_hosts(comm),
        'num_steps': seconds.num,
        'images_per_s': plan.global_batch_size / step_s,
        'step_ms': 1000 * seconds.median_s,
        'step_low_ms': 1000 * seconds.low_s,
        'step_high_ms': 1000 * seconds.high_s,
        'spread': seconds.relative,
        **{f'{part}_ms': 1000 * spread_of([s[part] for s in splits]).median_s for part in PARTS},
        'num_parameters': count_parameters(trainer.net),
        'gradient_bytes': trainer.gradient_bytes,
        'gflop_per_step': flops / 1e9,
        'gflops': flops / step_s / 1e9,
        'peak_gflops': peak / 1e9,
        'share_of_peak': flops / step_s / peak,
        'memory_mib': memory,
    }


@contextmanager
def waiting(heartbeat: Heartbeat) -> Iterator[None]:
    """Give signs of life while this rank waits for the case of other ranks, which are watched."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            heartbeat.beat()

    thread = threading.Thread(target=beat, name='waiting', daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def bench_steps(session: BenchSession, cases: list[Case]) -> list[ResultTable]:
    """Measure the cases in turn, while ranks outside a case wait. Return tables only on rank 0."""
    comm = session.comm
    for case in cases:
        if case.num_ranks > comm.world_size:
            raise ConfigError(
                f'--ranks: got {case.num_ranks}, expected at most {comm.world_size}; start more '
                f'with a launcher, such as launch/ranks.sh {case.num_ranks} mlperf-rn50 bench '
                'train …'
            )
    configs = [case_config(session.config, case) for case in cases]
    rows = []
    for case, config in zip(cases, configs):
        part = comm.subset(case.num_ranks)
        if part:
            part.compression = config.gradient_compression  # that of the case's precision
            rows.append(measure_case(replace(session, config=config, comm=part), case))
            gc.collect()
        with waiting(session.heartbeat) if not part else nullcontext():
            comm.barrier()
    if comm.rank:
        return []
    steps = ResultTable(
        'Training steps',
        _STEP_COLUMNS,
        rows,
        'batch, MiB, GFLOP/s: per rank. ms/step: median of n steps, ± half the interquartile '
        'range. Columns data to update: ms of each part, without overlap. GFLOP/s: two FLOPs per '
        'multiply-add of convolutions and dense layers, backward counted twice. Peak: the fastest '
        'of 12 matrix products.',
    )
    return [steps, *_scaling_tables(rows)]


def _scaling_tables(rows: list[Row]) -> list[ResultTable]:
    """Return a scaling table for each case measured with different numbers of ranks."""
    cases = grouped(
        sorted(rows, key=itemgetter('num_ranks')),
        itemgetter('model', 'precision', 'input', 'local_batch_size'),
    )
    return [
        ResultTable(
            f'Scaling efficiency: {model}, {precision}, {source}, {size} images per rank',
            _SCALING_COLUMNS,
            scaling_rows(same),
        )
        for (model, precision, source, size), same in cases.items()
        if len(same) > 1
    ]


def scaling_rows(rows: list[Row]) -> list[Row]:
    """Return real and ideal throughput by number of ranks. Ideal is the first row's throughput,
    scaled linearly."""
    each, found = rows[0]['images_per_s'] / rows[0]['num_ranks'], []
    for row in rows:
        ideal, real = each * row['num_ranks'], row['images_per_s']
        counts = {key: row[key] for key in ('num_ranks', 'num_hosts')}
        found.append({**counts, 'ideal': ideal, 'real': real, 'efficiency': real / ideal})
    return found


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Return the bytes per second over each rank's link, which are comparable between different
    numbers of ranks."""
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def predict_s(rows: list[Row], num_bytes: int) -> float:
    """Return the predicted seconds for a size, interpolated between rows. Larger sizes use the last
    row's bandwidth."""
    sizes, seconds = [r['bytes'] for r in rows], [r['time_ms'] / 1000 for r in rows]
    return float(np.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])


def _time(session: BenchSession, arrays: list[nd.NDArray]) -> dict[str, float]:
    """Time the exchange of some arrays. Return columns for a result row."""
    of_dtype = grouped(arrays, lambda a: a.dtype).values()

    def exchange() -> None:
        for number, alike in enumerate(of_dtype):
            session.comm.average_gradients(alike, number)
        nd.waitall()
        for alike in of_dtype:  # for Horovod's stream, which writes the arrays of a group at once
            wait_for(alike[-1])

    session.comm.barrier()
    seconds = session.time(exchange)
    is_small = session.config.gradient_compression == 'fp16'
    num_bytes = sum(a.size * (2 if is_small else a.dtype().itemsize) for a in arrays)
    return {
        'bytes': num_bytes,
        'time_ms': 1000 * seconds.median_s,
        'spread': seconds.relative,
        'num': seconds.num,
        'bus_gb_per_s': bus_bandwidth(num_bytes, seconds.median_s, session.comm.world_size) / 1e9,
    }


def bench_exchange(session: BenchSession, case: Case) -> list[ResultTable]:
    """Time messages of several sizes, and a network's gradients and training step. Return tables
    only on rank 0."""
    comm = session.comm
    if comm.world_size < 2:
        raise ConfigError(
            'ranks: got 1, expected 2 or more; start them with a launcher, such as launch/ranks.sh '
            '2 mlperf-rn50 bench allreduce'
        )
    small = ', exchanged in 16 bits' if session.config.gradient_compression == 'fp16' else ''
    sizes = [_time(session, [nd.zeros((size // 4,), session.context)]) for size in SIZES]
    rows = [{**row, 'algorithm_gb_per_s': row['bytes'] / row['time_ms'] / 1e6} for row in sizes]
    session = replace(session, config=case_config(session.config, case))
    params = build_model(session.config, mx.cpu(), None).collect_params().values()
    grads = [nd.zeros(p.shape, session.context, p.dtype) for p in params if p.grad_req != 'null']
    measured = _time(session, grads)
    step_ms = measure_case(session, case)['step_ms']
    predicted_ms = 1000 * predict_s(rows, int(measured['bytes']))
    gradients = {
        'model': case.model,
        'num_gradients': len(grads),
        'predicted_ms': predicted_ms,
        **measured,
        'step_ms': step_ms,
        'predicted_share': predicted_ms / step_ms,
        'measured_share': measured['time_ms'] / step_ms,
        'local_batch_size': case.local_batch_size,
        'num_ranks': comm.world_size,
        'num_hosts': count_hosts(comm),
    }
    if comm.rank:
        return []
    num_sharing, first = sharing_of(session.config), ''
    if num_sharing > 1:
        first = f' The {num_sharing} ranks of each GPU first sum their gradients in host memory.'
    return [
        ResultTable(
            f'All-reduce over {comm.world_size} ranks',
            _EXCHANGE_COLUMNS,
            rows,
            f'float32, summed in place like gradients{small}; times of rank 0.{first}',
        ),
        ResultTable(
            'The gradients of a step',
            _GRADIENT_COLUMNS,
            [gradients],
            'Predicted times are interpolated from the sizes above. Shares are of the step time, '
            'without overlap.',
        ),
    ]
