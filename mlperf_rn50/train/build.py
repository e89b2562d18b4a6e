"""Build of a run, up to the start of its clock: network, data pipelines and warm-up."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import mxnet as mx

from mlperf_rn50.config import Config, for_evaluation, image_shape, with_size
from mlperf_rn50.data.batches import eval_batches, synthetic_batches, train_batches
from mlperf_rn50.data.records import class_names
from mlperf_rn50.model.fused import fusion_text
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters
from mlperf_rn50.runfolder.records import NetworkRecord
from mlperf_rn50.system.environment import git_commit
from mlperf_rn50.system.processor import find_processor, leave_openmp_to_engine
from mlperf_rn50.text import plural
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.comm.device import device_id_of, measure_peak
from mlperf_rn50.train.comm.rank_checks import WallClock, boot_clock
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.compare import reference_event
from mlperf_rn50.train.loop import TrainingRun
from mlperf_rn50.train.options import parse_trace
from mlperf_rn50.train.resume import continue_clock, report_resumption, restore
from mlperf_rn50.train.trainer import Trainer

# matrix products that measure the peak, small enough not to delay a start
_PEAK = {'num': 3, 'side': 1024}
_DROP_CACHES = Path('/proc/sys/vm/drop_caches')
# Variables for bit-identical results on a GPU: deterministic algorithms only, none chosen by
# measured times.
DETERMINISM = {'MXNET_ENFORCE_DETERMINISM': '1', 'MXNET_CUDNN_AUTOTUNE_DEFAULT': '0'}


def build(run: TrainingRun) -> None:
    """Build and warm up the network and the data pipelines; raise UserError for unusable inputs."""
    plan, progress, comm, config = run.plan, run.progress, run.comm, run.plan.config
    if not run.resumption:
        run.emit(events.Opened(plan, progress.seed, run.nodes, *_clear_caches(run)))
    run.emit(events.Noted('building the network'))
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    run.trainer = trainer = Trainer(
        plan, comm, progress.seed, device_id, run.heartbeat.mark_exchange, run.heartbeat.record_step
    )
    place = run.hosts[comm.rank]
    run.times = RankTimes(
        comm, trainer.timer, {'rank': comm.rank, 'host': place.name}, run.folder, run.heartbeat
    )
    source, notes = _initial_weights(run) if not run.resumption else ('', [])
    trainer.broadcast()
    train_shard, eval_shard = plan.train_shard(comm.rank), plan.eval_shard(comm.rank)
    run.train_data = run.heartbeat.track_reading(
        train_batches(config, train_shard, progress.seed, progress.step, device_id)
    )
    eval_data = eval_batches(config, eval_shard, device_id)
    run.eval_data = lambda: run.heartbeat.track_reading(eval_data())
    run.emit(events.Noted('warming up on synthetic images, before the clock starts'))
    trainer.warm_up(
        (
            synthetic_batches(with_size(config, side), train_shard, device_id)
            for side in trainer.nets
        ),
        next(synthetic_batches(for_evaluation(config), eval_shard, device_id)),
        config.train.num_warmup_steps,
    )
    by_size = {
        side: count_flops(net, image_shape(with_size(config, side)))
        for side, net in trainer.nets.items()
    }
    flops = round(mean(by_size[config.data.size_of(epoch)] for epoch in range(plan.max_epochs)))
    traced = parse_trace(config.run.trace)
    # after the warm-up, which also counts steps
    trainer.timer.start_trace(len(traced), traced.start)
    if run.resumption:
        restore(run, run.resumption)
    else:
        if (
            config.train.precision == 'float16'
            and trainer.loss_scale.value != config.train.loss_scale
        ):
            run.emit(events.LossScaleChanged(0, config.train.loss_scale, trainer.loss_scale.value))
        run.emit(
            events.Built(
                plan,
                progress.seed,
                sorted(t.name for t in trainer.optimizer.tensors),
                count_parameters(trainer.net),
                flops,
                source,
                notes,
            )
        )
    if comm.rank == 0 and (reason := git_commit().get('git_commit_missing')):
        run.emit(
            events.Noted(f'the commit of the program is unknown: {reason}; keep a copy of the code')
        )
    for text in device_notes(config, os.environ):
        run.emit(events.Noted(text))
    num_bytes = sum(
        t.grad.size * (2 if config.comm.compression == 'fp16' else t.grad.dtype().itemsize)
        for t in trainer.optimizer.tensors
    )
    comm.barrier()
    peak = measure_peak(config.train.precision, trainer.context, **_PEAK)
    run.emit(
        events.NetworkMeasured(
            NetworkRecord(
                plan.global_batch_size // comm.world_size,
                flops,
                num_bytes,
                len(trainer.optimizer.buckets),
                peak,
                os.environ.get('MLPERF_RN50_JOB', ''),
            )
        )
    )
    mx.nd.waitall()
    mx.random.seed(progress.seed)  # gives dropout the same masks with and without a warm-up
    if comm.rank == 0 and (event := reference_event(run.comparison, config, comm.world_size)):
        run.emit(event)
    run.best_weights = BestWeights(
        run.folder, plan, class_names(config.data) if comm.rank == 0 else [], progress.data_sha256
    )
    run.writer = BackgroundWriter(run.heartbeat.beat)
    if not run.resumption:
        run.emit(events.InitStopped())


def start_clock(run: TrainingRun) -> None:
    """Start the clock of a new run, or continue that of a resumed one, on all ranks together."""
    run.comm.barrier()
    run.clock_start, run.wall_clock = time.monotonic(), WallClock()
    run.times.start()
    if run.resumption:
        continue_clock(run)
        report_resumption(run, run.resumption)
    else:
        run.progress.boot, run.progress.start_s = boot_clock()
        run.emit(events.RunStarted(run.plan, len(run.nodes)))


def _clear_caches(run: TrainingRun) -> tuple[bool, str]:
    """Flush the page cache of every node if configured; return True and the command, or False and
    the reason."""
    if not run.plan.config.run.clear_caches:
        return False, 'not requested (run.clear_caches)'
    problem = None
    if run.comm.local_rank == 0:
        try:
            os.sync()
            _DROP_CACHES.write_text('3\n')
        except OSError as e:
            problem = f'{_DROP_CACHES}: {e.strerror} (needs root)'
    num_failed = run.comm.sum([problem is not None])[0]
    if num_failed:
        text = problem or f'{plural(num_failed, "node")} failed (needs root)'
        run.emit(events.Warned(f'the page cache was not flushed: {text}'))
        return False, text
    return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'


def _initial_weights(run: TrainingRun) -> tuple[str, list[str]]:
    """Load train.init_weights, if set, into rank 0's network; return a description of the weights,
    and notes."""
    path = run.plan.config.train.init_weights
    if path is None:
        return '', []

    def take() -> list[Any]:
        description, arrays = load_weights(Path(path))
        data = run.plan.config.data
        is_other = not data.synthetic and list(description.classes) != class_names(data)
        notes = set_weights(run.trainer.net, run.trainer.corrected(arrays, -1), is_other)
        run.trainer.optimizer.reset_masters()
        return [
            f'{path} ({description.model["name"]}, {description.epoch} epochs on '
            f'{description.data["dataset"]}, SHA-256 {description.sha256[:12]}…)',
            notes,
        ]

    source, notes = run.comm.from_rank_0(take)
    return source, notes


def device_notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return notes for the log: how layers are computed, and on a GPU missing settings for
    bit-identical results."""
    is_resnet = config.model.name.startswith('resnet')
    notes = [fusion_text(config, environ, find_processor())] if is_resnet else []
    if config.train.device == 'cpu':
        return notes
    if missing := [
        f'{name}={value}' for name, value in DETERMINISM.items() if environ.get(name) != value
    ]:
        notes.append(
            'results are not reproducible to the bit; on a GPU this requires '
            f'{" and ".join(missing)}'
        )
    return notes
