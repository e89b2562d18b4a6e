"""Resumption of a run: checkpoint, plan, check of the configuration, and state of the trainer."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.config import Config, render_value, to_tree
from mlperf_rn50.errors import CheckpointError, ConfigError
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import SKEW_S, Resume, elapsed_parts, make_resume
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.model.weights import put_aside_later
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import (
    EvalRecord,
    Failure,
    NetworkRecord,
    PartRecord,
    ResumedRecord,
    TrainRecord,
    read_all_records,
    read_failures,
)
from mlperf_rn50.text import plural
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.changes import check_changes, find_changes, with_taken_back
from mlperf_rn50.train.checkpoint.checkpoint import LoadedCheckpoint
from mlperf_rn50.train.checkpoint.progress import Progress, dump_state, parse_state
from mlperf_rn50.train.checkpoint.resumable import check_unfinished, is_checkpoint
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import boot_clock
from mlperf_rn50.train.loop import BuiltRun, OpenRun, RunClock, TrainingRun
from mlperf_rn50.train.optimizer import scale_velocities
from mlperf_rn50.train.plan import Plan, make_elastic_plan, make_plan, resumed_step
from mlperf_rn50.train.trainer import Trainer


def load_resumption(comm: Comm, run: RunFolder, path: Path) -> LoadedCheckpoint:
    """Load a checkpoint, or the newest intact one of a folder, on rank 0; send all ranks its state
    or UserError."""

    def load() -> LoadedCheckpoint:
        check_unfinished(run)
        if is_checkpoint(path):
            found = LoadedCheckpoint(path, *checkpoint.load(path))
        else:
            found = checkpoint.load_newest(path)
        own = RunFolder(run.dir, found.progress.result_index)
        if own.index != run.index:  # a copy in a folder without the number of its run
            raise CheckpointError(
                f'{found.path}: of run {own.index}, expected one of run {run.index}; copy it to '
                f'{own.checkpoints} to resume run {own.index}'
            )
        return found

    loaded = comm.on_rank_0(load)
    shared = None
    if loaded:
        shared = [str(loaded.path), dump_state(loaded.progress, loaded.trainer)]
    name, state = comm.gather_object(shared)[0]
    return loaded or LoadedCheckpoint(Path(name), *parse_state(state))


def plan_resumed(
    config: Config,
    world_size: int,
    nodes: Sequence[int],
    resumption: LoadedCheckpoint,
    is_elastic: bool,
    allowed: Sequence[str] = (),
    digest: str = '',
) -> tuple[Plan, Progress]:
    """Return plan and progress of a resumed run; raise UserError if configuration, ranks or
    checkpoint do not match."""
    before = resumption.progress
    if is_elastic:
        plan = make_elastic_plan(config, world_size, before.lr_batch_size)
    elif world_size != before.world_size:
        ranks = plural(before.world_size, 'rank')
        raise CheckpointError(
            f'{resumption.path}: ranks: got {world_size}, the checkpoint has {before.world_size}; '
            f'start {ranks}, or resume with {world_size} and --elastic'
        )
    else:
        plan = make_plan(config, world_size)
        # an elastic resume may have changed the batch for which the rate is configured
        plan = replace(plan, lr_scale=plan.global_batch_size / before.lr_batch_size)
    _check(resumption, plan, is_elastic, digest)
    step = resumed_step(plan, before.step, before.global_batch_size, before.nodes == list(nodes))
    if step >= plan.max_epochs * plan.steps_per_epoch:
        raise ConfigError(
            f'train.max_epochs: got {plan.max_epochs}, and the run has already completed all of '
            'them; increase it to resume'
        )
    check_changes(find_changes(before.config, config), allowed, str(resumption.path))
    config = replace(config, run=replace(config.run, seed=before.seed))
    plan = replace(plan, config=config, nodes=tuple(nodes))
    progress = replace(
        before,
        step=step,
        world_size=plan.world_size,
        global_batch_size=plan.global_batch_size,
        data_sha256=digest,
        nodes=list(nodes),
        num_resumes=before.num_resumes + 1,
        images=0,
        train_s=0.0,
        config=to_tree(config),
    )
    return plan, progress


def _check(resumption: LoadedCheckpoint, plan: Plan, is_elastic: bool, digest: str) -> None:
    """Raise CheckpointError if data, seed, average of weights or batch do not match."""
    config, before = plan.config, resumption.progress
    seed = before.seed if config.run.seed is None else config.run.seed
    # name, value found, value in the checkpoint, advice
    images = f'images and classes in {config.data.dir}'
    now, then = f'SHA-256 {digest:.12}…', f'SHA-256 {before.data_sha256 or digest:.12}…'
    facts: list[tuple[str, object, object, str]] = [
        ('data.num_train', config.data.num_train, before.num_train, 'use the same data'),
        (images, now, then, 'use the same data'),
        ('run.seed', seed, before.seed, 'omit run.seed'),
    ]
    averages = config.train.ema, before.config.get('train', {}).get('ema')
    if averages.count(None) == 1:
        now, then = map(render_value, averages)
        advice = 'keep it; the average of weights begins with the run'
        facts.append(('train.ema', now, then, advice))
    if not is_elastic:
        batch, batch_before = plan.global_batch_size, before.global_batch_size
        facts.append(('train.global_batch_size', batch, batch_before, 'keep the batch size'))
    for name, got, expected, fix in facts:
        if got != expected:
            raise CheckpointError(
                f'{resumption.path}: {name}: got {got}, the checkpoint has {expected}; {fix}'
            )


def restore(run: OpenRun, trainer: Trainer, loaded: LoadedCheckpoint) -> None:
    """Give all ranks the state of a trainer that rank 0 has read, and free its arrays.

    The learning rate changes with the global batch size. LARS corrects its velocities for this; for
    SGD they are corrected here, before a checkpoint can have them with the new size.
    """
    batch_factor = run.progress.global_batch_size / loaded.progress.global_batch_size

    def check() -> None:
        checkpoint.check_arrays(loaded.path, loaded.trainer.arrays, trainer.array_shapes())
        if batch_factor != 1 and run.plan.config.optimizer.name == 'sgd':
            scale_velocities(loaded.trainer.arrays, batch_factor)
        checkpoint.put_aside([p for p, _ in loaded.damaged])
        checkpoint.rewind(run.folder.checkpoints, loaded.path, run.progress, loaded.trainer)
        put_aside_later(run.folder.weights, run.progress.step // run.plan.steps_per_epoch)

    run.comm.on_rank_0(check)
    trainer.load_state(loaded.trainer)
    loaded.trainer.arrays.clear()


def continued_clock(run: BuiltRun, clock: RunClock) -> RunClock:
    """Return the clock of a resumed run, given one that starts now; find on rank 0 what became of
    the time so far."""
    progress = run.progress
    resumes = run.comm.on_rank_0(
        lambda: find_resumes(run.folder, progress, boot_clock(), time.time())
    )
    resumed_s = run.comm.gather_object(resumes and resumes[-1].resumed_s)[0]
    return replace(
        clock,
        start_s=clock.start_s - resumed_s,
        without_s=resumed_s - progress.clock_s,
        resumes=resumes or (),
    )


def find_resumes(
    folder: RunFolder, progress: Progress, boot_clock: tuple[str, float], now_s: float
) -> list[Resume]:
    """Return the earlier resumes of a run and the present one. now_s: wall clock, in seconds since
    1970.

    The time since run_start comes from the clock of the boot, which cannot be set. On another host,
    or after another boot, it comes from the wall clocks.
    """
    log = read_run(folder.result, is_own=True)
    if log.start_s is None:
        raise CheckpointError(
            f'{folder.result}: got no run_start, expected the log of the run to resume'
        )
    seen_s, failures = last_signs(folder, (log.last_s or log.start_s) - log.start_s)
    last_s = log.start_s + seen_s
    attempt_s = log.start_s + (log.resumes[-1].resumed_s if log.resumes else 0.0)
    is_asked = keys.RUN_STOP in log.lines and log.status != 'failed'
    # A rank that loses its engine is asked to stop, too, as are those of a host without contact to
    # the launcher. This is recorded before.
    is_pause = is_asked and not any(attempt_s < f.time_s <= last_s for f in failures)
    stopped_s, stalled_s = seen_s, 0.0
    later = [f for f in failures if f.time_s > last_s]
    if later and not is_asked:
        failure = min(later, key=lambda f: f.time_s)
        stopped_s = failure.time_s - log.start_s
        stalled_s = stopped_s - seen_s
        if failure.silent_s is not None:
            stalled_s = min(stalled_s, failure.silent_s)
    boot, boot_s = boot_clock
    is_same_boot = boot and boot == progress.boot
    resumed_s = boot_s - progress.start_s if is_same_boot else max(now_s - log.start_s, stopped_s)
    if is_same_boot and progress.clock_s > resumed_s + SKEW_S:
        raise CheckpointError(
            f'{folder.checkpoints}: the checkpoint has {progress.clock_s:.6g} s of training, '
            f'expected at most {resumed_s:.6g} s since run_start; resume from an earlier checkpoint'
        )
    now = make_resume(
        log.resumes,
        progress.clock_s,
        resumed_s=resumed_s,
        stopped_s=stopped_s,
        is_pause=is_pause,
    )
    return [*log.resumes, now._replace(stalled_s=stalled_s)]


def last_signs(folder: RunFolder, seen_s: float) -> tuple[float, list[Failure]]:
    """Return the time of the last record of a run, and the failures of the attempt that wrote it.

    seen_s: time of the last line of the log, in seconds since run_start, as the result.
    """
    job = last_job = ''
    for record in read_all_records(folder.metrics):
        if isinstance(record, NetworkRecord):
            job = record.job  # written before the clock of its attempt continues
        elif isinstance(record, EvalRecord | PartRecord | ResumedRecord | TrainRecord):
            last_job = job
        if isinstance(record, TrainRecord):
            seen_s = max(seen_s, record.time_s or 0.0)
    return seen_s, [f for f in read_failures(folder.dir) if f.job == last_job]


def report_resumption(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Report from where the run resumes, and what differs from before."""
    if loaded.damaged:
        reasons = '; '.join(reason for _, reason in loaded.damaged)
        text = f'{reasons}; renamed to damaged_step_*; the run resumes from {loaded.path}'
        run.emit(events.Warned(text))
    progress, before, clock = run.progress, loaded.progress, run.clock
    if progress.data_sha256 and not before.data_sha256:
        text = 'the images were not compared, because the checkpoint has no digest of them'
        run.emit(events.Noted(text))
    elapsed_s = clock.without_s + progress.clock_s
    changes, time_s = find_changes(before.config, run.plan.config), None
    if run.comm.rank == 0:
        changes = with_taken_back(changes, run.folder, run.plan.config)
        start_s = read_run(run.folder.result, is_own=True).start_s or 0.0
        time_s = start_s + clock.now_s()
    run.emit(
        events.Resumed(
            run.plan,
            hosts=run.nodes,
            step=progress.step,
            clock_s=progress.clock_s,
            elapsed_s=elapsed_s,
            stopped_s=clock.resumes[-1].stopped_s if clock.resumes else 0.0,
            after_fault=any(not resume.is_pause for resume in clock.resumes[-1:]),
            parts=elapsed_parts(clock.resumes, elapsed_s),
            checkpoint=str(loaded.path),
            before=before,
            changes=changes,
            time_s=time_s,
        )
    )
    for resume in clock.resumes[-1:]:
        stall = PartRecord('stall', resume.stopped_s, resume.stalled_s)
        run.emit(events.PartEnded(stall))
