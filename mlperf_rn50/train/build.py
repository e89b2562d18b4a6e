"""Build of a run, up to the start of its clock: network, data pipelines and warm-up."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config, for_evaluation, image_shape, with_size
from mlperf_rn50.data.batches import Batch, eval_batches, synthetic_batches, train_batches
from mlperf_rn50.data.recordio import class_names
from mlperf_rn50.model.fused import fusion_text
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters
from mlperf_rn50.runfolder.records import (
    LossScaleRecord,
    NetworkRecord,
    PartRecord,
    read_records,
)
from mlperf_rn50.system.environment import git_commit
from mlperf_rn50.system.processor import find_processor, leave_openmp_to_engine
from mlperf_rn50.text import plural
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.checkpoint.period import AutoPeriod
from mlperf_rn50.train.comm.device import device_id_of, measure_peak
from mlperf_rn50.train.comm.rank_checks import boot_clock
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.compare import reference_event
from mlperf_rn50.train.loop import BuiltRun, OpenRun, RunClock, TrainingRun
from mlperf_rn50.train.options import parse_trace
from mlperf_rn50.train.resume import continued_clock, report_resumption, restore
from mlperf_rn50.train.trainer import Trainer

# matrix products that measure the peak, small enough not to delay a start
_PEAK = {'num': 3, 'side': 1024}
_DROP_CACHES = Path('/proc/sys/vm/drop_caches')
# Variables for bit-identical results on a GPU: deterministic algorithms only, none chosen by
# measured times.
DETERMINISM = {'MXNET_ENFORCE_DETERMINISM': '1', 'MXNET_CUDNN_AUTOTUNE_DEFAULT': '0'}


def build(run: OpenRun) -> BuiltRun:
    """Build and warm up the network and the data pipelines; raise UserError for unusable inputs."""
    plan, progress, comm, config = run.plan, run.progress, run.comm, run.plan.config
    heartbeat = run.heartbeat
    if not run.resumption:
        run.emit(events.Opened(plan, progress.seed, run.nodes, *_clear_caches(run)))
    run.emit(events.Noted('building the network'))

    # the network, with its first weights
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    resumption = run.resumption
    trainer = Trainer(
        plan,
        comm,
        None if resumption else progress.seed,
        device_id,
        on_exchange=heartbeat.mark_exchange,
        on_step=heartbeat.record_step,
        on_pass=heartbeat.beat,
    )
    own = {'rank': comm.rank, 'host': run.host}
    times = RankTimes(comm, trainer.timer, own, run.folder.trace_request, heartbeat)

    # the data; the pipelines read none before the clock starts
    train_shard = plan.train_shard(comm.rank)
    train_data = train_batches(config, train_shard, progress.seed, progress.step, device_id)
    eval_data = eval_batches(config, plan.eval_shard(comm.rank), device_id)

    # the state of the checkpoint, or initial weights and the warm-up
    flops = _mean_flops(trainer)
    if resumption:  # its clock runs already, so that a warm-up would only delay the first step
        restore(run, trainer, resumption)
    else:
        _begin(run, trainer, flops, device_id)
    traced = parse_trace(config.run.trace)
    # after the warm-up, which also counts steps
    trainer.timer.start_trace(len(traced), traced.start)

    # facts for the log and for later analysis
    _report_settings(run)
    run.emit(events.NetworkMeasured(_measure(run, trainer, flops)))
    mx.nd.waitall()
    # the same masks of dropout with and without a warm-up, others on each rank and after a resume
    origin = np.random.SeedSequence([progress.seed, progress.step, comm.rank])
    mx.random.seed(int(origin.generate_state(1)[0] >> 1))
    batch = progress.lr_batch_size
    if comm.rank == 0 and (event := reference_event(run.comparison, config, batch)):
        run.emit(event)

    # the run, ready for its clock
    classes = class_names(config.data) if comm.rank == 0 else []
    built = BuiltRun(
        **vars(run),
        trainer=trainer,
        times=times,
        train_data=heartbeat.track_reading(train_data),
        eval_data=lambda: heartbeat.track_reading(eval_data()),
        best_weights=BestWeights(run.folder, plan, classes, progress.data_sha256),
        writer=BackgroundWriter(),
    )
    if not resumption:
        run.emit(events.InitStopped())
    return built


def _mean_flops(trainer: Trainer) -> int:
    """Return the FLOP of a forward pass per image, as the mean over the planned epochs."""
    plan, config = trainer.plan, trainer.plan.config
    flops = {
        side: count_flops(net, image_shape(with_size(config, side)))
        for side, net in trainer.nets.items()
    }
    return round(mean(flops[config.data.size_of(epoch)] for epoch in range(plan.max_epochs)))


def _warm_up(trainer: Trainer, device_id: int | None) -> None:
    """Warm up the network for each size of images."""
    plan, config, rank = trainer.plan, trainer.plan.config, trainer.comm.rank
    sizes = (with_size(config, side) for side in trainer.nets)
    train_shard, eval_shard = plan.train_shard(rank), plan.eval_shard(rank)
    trainer.warm_up(
        (synthetic_batches(c, train_shard, device_id) for c in sizes),
        next(synthetic_batches(for_evaluation(config), eval_shard, device_id)),
        config.train.num_warmup_steps,
    )


def _begin(run: OpenRun, trainer: Trainer, flops: int, device_id: int | None) -> None:
    """Give all ranks of a new run the same initial weights, warm up, and report the network, and
    the loss scale if the warm-up has changed it."""
    train, source, notes = run.plan.config.train, '', list[str]()
    if (given := train.init_weights) is not None:
        source, notes = run.comm.from_rank_0(lambda: _load_initial(trainer, Path(given)))
    trainer.broadcast()
    run.emit(events.Noted('warming up on synthetic images, before the clock starts'))
    _warm_up(trainer, device_id)
    first, now = train.loss_scale, trainer.loss_scale.value
    if train.precision == 'float16' and now != first:
        run.emit(events.LossScaleChanged(LossScaleRecord(step=0, before=first, now=now)))
    run.emit(
        events.Built(
            run.plan,
            run.progress.seed,
            tensor_names=sorted(t.name for t in trainer.optimizer.tensors),
            num_parameters=count_parameters(trainer.net),
            flops_per_image=flops,
            initial_weights=source,
            notes=notes,
        )
    )


def _report_settings(run: OpenRun) -> None:
    texts = device_notes(run.plan.config, os.environ)
    if run.comm.rank == 0 and (reason := git_commit().get('git_commit_missing')):
        texts.insert(0, f'the commit of the program is unknown: {reason}; keep a copy of the code')
    for text in texts:
        run.emit(events.Noted(text))


def start_clock(run: BuiltRun) -> TrainingRun:
    """Start the clock of a new run, or continue that of a resumed one, on all ranks together."""
    run.comm.barrier()
    clock = RunClock(start_s=time.monotonic())
    run.times.start()
    if run.resumption:
        clock = continued_clock(run, clock)
    run.progress.boot, now_s = boot_clock()
    run.progress.start_s = now_s - clock.now_s()
    started = TrainingRun(**vars(run), clock=clock, auto_period=_make_auto_period(run, clock))
    if run.resumption:
        report_resumption(started, run.resumption)
    else:
        run.emit(events.RunStarted(run.plan, len(run.nodes)))
    started.report_part('start_up', run.heartbeat.age_s)
    started.report_period()
    return replace(started, train_data=_report_reading(started))


def _make_auto_period(run: BuiltRun, clock: RunClock) -> AutoPeriod | None:
    if run.comm.rank or run.plan.config.checkpoint.period_s != 'auto':
        return None
    parts = (part for _, part in read_records(run.folder.metrics, PartRecord))
    return AutoPeriod(
        run.comm.world_size,
        num_faults=sum(not r.is_pause for r in clock.resumes),
        down_s=sum(r.resumed_s - r.stopped_s for r in clock.resumes),
        costs_s=[part.seconds for part in parts if part.name == 'checkpoint'],
    )


def _report_reading(run: TrainingRun) -> Iterator[Batch]:
    """Yield the batches of a run; report how long its clock ran before the first one."""
    start = time.monotonic()
    for number, batch in enumerate(run.train_data):
        if not number:
            run.report_part('reading', time.monotonic() - start)
        yield batch


def _measure(run: OpenRun, trainer: Trainer, flops: int) -> NetworkRecord:
    """Return facts about a step; all ranks together measure a peak that is not known."""
    config = run.plan.config
    local_batch_size = run.plan.global_batch_size // run.comm.world_size
    job = os.environ.get('MLPERF_RN50_JOB', '')
    peak = run.comm.from_rank_0(lambda: known_peak(run.folder.metrics, job, local_batch_size))
    return NetworkRecord(
        local_batch_size=local_batch_size,
        flops_per_image=flops,
        gradient_bytes=trainer.gradient_bytes,
        num_buckets=len(trainer.optimizer.buckets),
        peak_flops_per_s=peak or measure_peak(config.train.precision, trainer.context, **_PEAK),
        job=job,
    )


def known_peak(metrics: Path, job: str, local_batch_size: int) -> float | None:
    """Return the peak that an earlier start by the same launcher has measured with as many ranks;
    None if there is none."""
    launcher = job.rpartition('-')[0]
    peaks = [
        network.peak_flops_per_s
        for _, network in read_records(metrics, NetworkRecord)
        if (network.job.rpartition('-')[0], network.local_batch_size)
        == (launcher, local_batch_size)
    ]
    return peaks[-1] if launcher and peaks else None


def _clear_caches(run: OpenRun) -> tuple[bool, str]:
    """Flush the page cache of every node if configured; return True and the command, or False and
    the reason."""
    if not run.plan.config.run.clear_caches:
        return False, 'not requested (run.clear_caches)'
    problem = ''
    if run.comm.local_rank == 0:
        try:
            os.sync()
            _DROP_CACHES.write_text('3\n')
        except OSError as e:
            problem = f'{_DROP_CACHES}: {e.strerror} (needs root)'
    num_failed = run.comm.sum([bool(problem)])[0]
    if not num_failed:
        return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'
    text = problem or f'{plural(num_failed, "node")} failed (needs root)'
    run.emit(events.Warned(f'the page cache was not flushed: {text}'))
    return False, text


def _load_initial(trainer: Trainer, path: Path) -> tuple[str, list[str]]:
    """Load initial weights; return a description of them, and notes."""
    found, arrays = load_weights(path)
    data = trainer.plan.config.data
    is_other = not data.synthetic and list(found.classes) != class_names(data)
    notes = set_weights(trainer.net, trainer.from_unbiased(arrays), is_other)
    trainer.optimizer.reset_masters()
    origin = f'{found.epoch} epochs on {found.data["dataset"]}, SHA-256 {found.sha256[:12]}…'
    # without the folder, because logs are published
    return f'{path.name} ({found.model["name"]}, {origin})', notes


def device_notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return notes for the log: how layers are computed, and on a GPU missing settings for
    bit-identical results."""
    notes = []
    if config.model.is_resnet:
        notes.append(fusion_text(config, environ, find_processor()))
    missing = [
        f'{name}={value}' for name, value in DETERMINISM.items() if environ.get(name) != value
    ]
    if missing and config.train.device == 'gpu':
        settings = ' and '.join(missing)
        notes.append(f'results are not reproducible to the bit; on a GPU this requires {settings}')
    return notes
