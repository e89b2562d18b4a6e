"""Start of a run, up to the start of its clock: sinks, network, data pipelines and warm-up."""
import os
import platform
import time
from pathlib import Path
from typing import Any

import mxnet as mx

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import eval_batches, synthetic_batches, train_batches
from mlperf_rn50.data.records import class_names
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.model.weights import load_weights, set_weights
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.environment import git_commit
from mlperf_rn50.system.processor import leave_openmp_to_engine
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.text import plural
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.checkpoint.changes import find_changes
from mlperf_rn50.train.comm.device import device_id_of
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import WallClock
from mlperf_rn50.train.reference import open_comparison, reference_event
from mlperf_rn50.train.session import Session, TrainingRun, from_rank_0, on_rank_0
from mlperf_rn50.train.sinks.metrics import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.terminal import Terminal
from mlperf_rn50.train.sinks.watched import Sampled, Watched
from mlperf_rn50.train.trainer import Trainer, device_notes

_DROP_CACHES = Path('/proc/sys/vm/drop_caches')


def open_sinks(session: Session) -> events.Sinks:
    """Open this rank's sinks for events; most of them exist only on rank 0."""
    config, folder = session.plan.config, session.folder
    sinks: list[events.Sink] = [Watched(session.heartbeat), Sampled(open_telemetry(config, session.comm, folder))]
    if session.comm.rank == 0:
        log = RunLog(folder.result, folder.result_v06 if config.run.log_v06 else None, session.resumption is not None)
        sinks += [MlperfLog(log), Metrics(folder, config.data.dataset), Terminal(folder, config)]
        if config.run.tensorboard:
            from mlperf_rn50.train.sinks.tensorboard import TensorBoard
            sinks.append(TensorBoard(folder.tensorboard, session.progress.step, config))
    return events.Sinks(sinks)


def open_telemetry(config: Config, comm: Comm, run: RunFolder) -> Telemetry:
    """Return this node's telemetry; it records only if configured, and only on the node's first rank."""
    if not config.run.telemetry or comm.local_rank:
        return Telemetry(None)
    run.dir.mkdir(parents=True, exist_ok=True)  # the run folder may be on a local disk of each node
    num_gpus = -(-comm.local_size // config.run.ranks_per_device) if config.train.device == 'gpu' else 0
    return Telemetry(run.telemetry(platform.node()), num_gpus)


def _clear_caches(session: Session, sinks: events.Sinks) -> tuple[bool, str]:
    """Flush the page cache of every node if configured; return True and the command, or False and the reason."""
    if not session.plan.config.run.clear_caches:
        return False, 'not requested (run.clear_caches)'
    problem = None
    if session.comm.local_rank == 0:
        try:
            os.sync()
            _DROP_CACHES.write_text('3\n')
        except OSError as e:
            problem = f'{_DROP_CACHES}: {e.strerror} (needs root)'
    num_failed = session.comm.sum([problem is not None])[0]
    if num_failed:
        text = problem or f'{plural(num_failed, "node")} failed (needs root)'
        sinks.handle(events.Warned(f'the page cache was not flushed: {text}'))
        return False, text
    return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'


def start(session: Session, sinks: events.Sinks) -> TrainingRun:
    """Build and warm up the network and data pipelines, then start the clock; raise UserError for unusable inputs."""
    plan, progress, comm, heartbeat = session.plan, session.progress, session.comm, session.heartbeat
    config, resumption = plan.config, session.resumption
    if not resumption:
        sinks.handle(events.Opened(config, session.nodes, *_clear_caches(session, sinks)))
        sinks.handle(events.InitStarted(plan, progress.seed))
    device_id = device_id_of(config, comm)
    leave_openmp_to_engine()
    trainer = Trainer(plan, comm, progress.seed, device_id, heartbeat.mark_exchange)
    source, notes = _initial_weights(session, trainer) if not resumption else ('', [])
    trainer.broadcast()
    train_shard, eval_shard = plan.train_shard(comm.rank), plan.eval_shard(comm.rank)
    train_data = heartbeat.track_reading(train_batches(config, train_shard, progress.seed, progress.step, device_id))
    eval_data = eval_batches(config, eval_shard, device_id)
    trainer.warm_up(synthetic_batches(config, train_shard, device_id),
                    next(synthetic_batches(config, eval_shard, device_id)), config.train.num_warmup_steps)
    if resumption:
        _restore(session, trainer, resumption)
    else:
        if config.train.precision == 'float16' and trainer.loss_scale.value != config.train.loss_scale:
            sinks.handle(events.LossScaleChanged(0, config.train.loss_scale, trainer.loss_scale.value))
        sinks.handle(events.Built(plan, progress.seed, sorted(t.name for t in trainer.optimizer.tensors),
                                  count_parameters(trainer.net), count_flops(trainer.net, image_shape(config)), source,
                                  notes))
    if comm.rank == 0 and (reason := git_commit().get('git_commit_missing')):
        sinks.handle(events.Noted(f'the commit of the program is unknown: {reason}; keep a copy of the code'))
    for text in device_notes(config, os.environ):
        sinks.handle(events.Noted(text))
    mx.nd.waitall()
    mx.random.seed(progress.seed)  # gives dropout the same masks with and without a warm-up
    comparison = open_comparison(session.reference, plan, session.folder.metrics, progress.step // plan.steps_per_epoch)
    if comm.rank == 0 and (event := reference_event(comparison, config, comm.world_size)):
        sinks.handle(event)
    best_weights = BestWeights(session.folder, plan, class_names(config.data) if comm.rank == 0 else [],
                               progress.data_sha256)
    writer = BackgroundWriter(heartbeat.beat)
    if not resumption:
        sinks.handle(events.InitStopped())
    comm.barrier()
    run = TrainingRun(**vars(session), sinks=sinks, writer=writer, best_weights=best_weights, trainer=trainer,
                      train_data=train_data, eval_data=lambda: heartbeat.track_reading(eval_data()),
                      comparison=comparison, clock_start=time.monotonic() - progress.clock_s,
                      wall_clock=WallClock())
    _log_start(run)
    return run


def _log_start(run: TrainingRun) -> None:
    resumption = run.resumption
    if not resumption:
        run.sinks.handle(events.RunStarted(run.plan, len(run.nodes)))
        return
    if resumption.damaged:
        reasons = '; '.join(reason for _, reason in resumption.damaged)
        run.sinks.handle(events.Warned(f'{reasons}; renamed to damaged_step_*; the run resumes from {resumption.path}'))
    before = resumption.progress
    if run.progress.data_sha256 and not before.data_sha256:
        run.sinks.handle(events.Noted('the images were not compared, because the checkpoint has no digest of them'))
    run.sinks.handle(events.Resumed(
        run.plan, len(run.nodes), run.progress.step, run.progress.clock_s, str(resumption.path), before.world_size,
        before.global_batch_size, find_changes(before.config, run.plan.config)))


def _initial_weights(session: Session, trainer: Trainer) -> tuple[str, list[str]]:
    """Load train.init_weights, if set, into rank 0's network; return a description of the weights, and notes."""
    path = session.plan.config.train.init_weights
    if path is None:
        return '', []

    def take() -> list[Any]:
        description, arrays = load_weights(Path(path))
        data = session.plan.config.data
        is_other = not data.synthetic and list(description.classes) != class_names(data)
        notes = set_weights(trainer.net, trainer.corrected(arrays, -1), is_other)
        trainer.optimizer.reset_masters()
        return [f'{path} ({description.model["name"]}, {description.epoch} epochs on '
                f'{description.data["dataset"]}, SHA-256 {description.sha256[:12]}…)', notes]
    source, notes = from_rank_0(session.comm, take)
    return source, notes


def _restore(session: Session, trainer: Trainer, loaded: checkpoint.LoadedCheckpoint) -> None:
    """Restore a checkpoint that rank 0 has read, and free its arrays."""
    progress = session.progress

    def check() -> None:
        checkpoint.check_arrays(loaded.path, loaded.arrays, trainer.array_shapes())
        checkpoint.put_aside([p for p, _ in loaded.damaged])
        checkpoint.rewind(loaded.path.parent, loaded.path, progress, loaded.arrays)
    on_rank_0(session.comm, check)
    trainer.restore(loaded.arrays if session.comm.rank == 0 else None)
    loaded.arrays.clear()
    trainer.optimizer.last_lr = progress.last_lr or None
    trainer.optimizer.is_batch_new = loaded.progress.global_batch_size != progress.global_batch_size
    if session.plan.config.train.loss_scale_policy == 'dynamic':
        trainer.loss_scale.value, trainer.loss_scale.num_finite_steps = progress.loss_scale, progress.num_finite_steps
