"""Everything before the clock of a run starts: ranks, plan, sinks, network, pipelines, warm-up."""
import os
import platform
from pathlib import Path
from typing import Any

import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import eval_batches, synthetic_batches, train_batches
from mlperf_rn50.data.records import class_names
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.system.topology import leave_openmp_to_engine
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BestWeights, Saver
from mlperf_rn50.train.checkpoint.changes import find_changes
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.checkpoint.run_folder import RunFolder
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.reference import open_course, reference_event
from mlperf_rn50.train.session import Clock, Session, TrainingRun, from_rank_0, on_rank_0
from mlperf_rn50.train.sinks.metrics import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.terminal import Terminal
from mlperf_rn50.train.sinks.watched import Sampled, Watched
from mlperf_rn50.train.trainer import Trainer, device_notes

_DROP_CACHES = Path('/proc/sys/vm/drop_caches')


def open_sinks(session: Session) -> events.Sinks:
    """What reads the events on this rank: most of it on rank 0 only."""
    run, folder = session.plan.config.run, session.folder
    sinks: list[events.Sink] = [Watched(session.position),
                                Sampled(open_telemetry(session.plan.config, session.comm, folder))]
    if session.comm.rank == 0:
        log = RunLog(folder.result, folder.result_v06 if run.log_v06 else None, session.resumption is not None)
        sinks += [MlperfLog(log), Metrics(folder), Terminal(folder)]
        if run.tensorboard:
            from mlperf_rn50.train.sinks.tensorboard import TensorBoard
            sinks.append(TensorBoard(folder.tensorboard, session.progress.step))
    return events.Sinks(sinks)


def open_telemetry(config: Config, comm: Comm, run: RunFolder) -> Telemetry:
    """The telemetry of this rank's node, which its first rank writes, if it is asked for."""
    if not config.run.telemetry or comm.local_rank:
        return Telemetry(None)
    run.dir.mkdir(parents=True, exist_ok=True)  # a node may have a folder of its own there
    num_gpus = -(-comm.local_size // config.run.ranks_per_device) if config.train.device == 'gpu' else 0
    return Telemetry(run.telemetry(platform.node()), num_gpus)


def _drop_page_cache() -> str | None:
    """Flush this host's page cache, so that a run reads its data from storage; return why that failed, or None."""
    try:
        os.sync()
        _DROP_CACHES.write_text('3\n')
    except OSError as e:
        return f'{_DROP_CACHES}: {e.strerror} (needs root)'
    return None


def _clear_caches(config: Config, comm: Comm, sinks: events.Sinks) -> tuple[bool, str]:
    """Flushes the page cache of every node if asked to; whether all of them did, and why not."""
    if not config.run.clear_caches:
        return False, 'not asked for (run.clear_caches)'
    problem = _drop_page_cache() if comm.local_rank == 0 else None
    num_failed = comm.sum([problem is not None])[0]
    if num_failed:
        text = problem or f'{num_failed} nodes could not (needs root)'
        sinks.see(events.Warned(f'the page cache was not flushed: {text}'))
        return False, text
    return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'


def start(session: Session, sinks: events.Sinks) -> TrainingRun:
    """Build and warm up everything, off the clock; the clock starts when this returns.

    Raises:
        UserError: the data or the weights cannot be used.
    """
    plan, progress, comm, position = session.plan, session.progress, session.comm, session.position
    config, resumption = plan.config, session.resumption
    if not resumption:
        sinks.see(events.Opened(config, session.nodes, *_clear_caches(config, comm, sinks)))
        sinks.see(events.InitStarted(plan, progress.seed))
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    trainer = Trainer(plan, comm, progress.seed, device_id, position.computed)
    source, notes = _initial_weights(config, comm, trainer) if not resumption else ('', [])
    trainer.broadcast()
    train_shard, eval_shard = plan.train_shard(comm.rank), plan.eval_shard(comm.rank)
    train_data = position.track_reading(train_batches(config, train_shard, progress.seed, progress.step, device_id))
    eval_data = eval_batches(config, eval_shard, device_id)
    trainer.warm_up(synthetic_batches(config, train_shard, device_id),
                    next(synthetic_batches(config, eval_shard, device_id)), config.train.num_warmup_steps)
    if resumption:
        _restore(trainer, comm, resumption, progress)
    else:
        sinks.see(events.Built(plan, progress.seed, trainer.tensor_names, count_parameters(trainer.net),
                               count_flops(trainer.net, image_shape(config)), source, notes))
    for text in device_notes(config, os.environ):
        sinks.see(events.Noted(text))
    mx.nd.waitall()
    mx.random.seed(progress.seed)  # dropout, the same with and without a warm-up
    course = open_course(session.reference, plan, session.folder.metrics, progress.step // plan.steps_per_epoch)
    if comm.rank == 0 and (event := reference_event(course, config, comm.world_size)):
        sinks.see(event)
    classes = class_names(config.data) if comm.rank == 0 else []
    saver, keeper = Saver(position.now), BestWeights(session.folder, plan, classes)
    if not resumption:
        sinks.see(events.InitStopped())
    comm.barrier()
    run = TrainingRun(**vars(session), sinks=sinks, saver=saver, keeper=keeper, trainer=trainer, train_data=train_data,
              eval_data=lambda: position.track_reading(eval_data()), clock=Clock(progress.clock_s), course=course)
    _begin(run)
    return run


def _begin(run: TrainingRun) -> None:
    """Log the start of the clock."""
    found = run.resumption
    if not found:
        run.sinks.see(events.RunStarted(run.plan, len(run.nodes)))
        return
    if found.damaged:
        reasons = '; '.join(reason for _, reason in found.damaged)
        run.sinks.see(events.Warned(f'{reasons}; put aside, the run goes on from {found.path}'))
    before = found.progress
    run.sinks.see(events.Resumed(
        run.plan, len(run.nodes), run.progress.step, run.progress.clock_s, str(found.path), before.world_size,
        before.global_batch_size, find_changes(before.config, run.plan.config)))


def _initial_weights(config: Config, comm: Comm, trainer: Trainer) -> tuple[str, list[str]]:
    """Put kept weights into rank 0's network, where asked for; return where they came from, and notes."""
    path = config.train.init_weights
    if path is None:
        return '', []

    def take() -> list[Any]:
        kept, arrays = load_weights(Path(path))
        notes = set_weights(trainer.net, arrays)
        trainer.optimizer.reset_masters()
        return [f'{path} ({kept.model["name"]}, {kept.epoch} epochs on {kept.data["dataset"]}, SHA-256 '
                f'{kept.sha256[:12]}…)', notes]
    source, notes = from_rank_0(comm, take)
    return source, notes


def _restore(trainer: Trainer, comm: Comm, found: checkpoint.LoadedCheckpoint, progress: Progress) -> None:
    """Go back to a checkpoint, which only rank 0 has read; its arrays are let go of."""
    def check() -> None:
        checkpoint.check_arrays(found.path, found.arrays, trainer.array_shapes())
        checkpoint.put_aside([p for p, _ in found.damaged])
        checkpoint.begin_again(found.path.parent, found.path, progress, found.arrays)
    on_rank_0(comm, check)
    trainer.restore(found.arrays if comm.rank == 0 else None)
    found.arrays.clear()
    trainer.optimizer.last_lr = progress.last_lr or None
    trainer.optimizer.is_batch_new = found.progress.global_batch_size != progress.global_batch_size
    trainer.loss_scale.value, trainer.loss_scale.num_finite_steps = progress.loss_scale, progress.num_finite_steps
