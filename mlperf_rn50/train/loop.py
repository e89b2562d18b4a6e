"""The training loop: epochs, evaluations and checkpoints until the target is reached, and the end
of a run."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import partial

from mlperf_rn50.data.batches import Batch
from mlperf_rn50.errors import RunFailed, StorageError
from mlperf_rn50.mllog.elapsed import Resume, elapsed_parts
from mlperf_rn50.mllog.read.clock import STEP_S
from mlperf_rn50.runfolder.names import RunFolder, check_present
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import WallClock, check_agreement, check_finite
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.compare import ReferenceComparison
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.trainer import Flags, Norms, PendingStep, Trainer
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

# Number of steps that the loop runs ahead of the device: enough to keep the device busy, few enough
# to limit memory.
STEPS_AHEAD = 2


@dataclass(frozen=True)
class RankPlace:
    """Host and cores of a rank, its number on that host, and the number of ranks there."""

    name: str
    local_rank: int
    local_size: int
    cores: str


@dataclass
class TrainingRun:
    """A run on one rank, which changes while it trains. open_run(), build() and start_clock() set
    the last fields.

    Only rank 0 has reference runs and the arrays of the checkpoint to resume. train_data is
    endless.
    """

    plan: Plan
    progress: Progress
    comm: Comm
    hosts: Sequence[RankPlace]
    heartbeat: Heartbeat
    folder: RunFolder
    comparison: ReferenceComparison
    resumption: checkpoint.LoadedCheckpoint | None
    sinks: list[events.Sink] = field(init=False)
    trainer: Trainer = field(init=False)
    times: RankTimes = field(init=False)
    train_data: Iterator[Batch] = field(init=False)
    eval_data: Callable[[], Iterator[Batch]] = field(init=False)
    best_weights: BestWeights = field(init=False)
    writer: BackgroundWriter = field(init=False)
    wall_clock: WallClock = field(init=False)
    clock_start: float = field(init=False)  # monotonic time of run_start
    resumes: Sequence[Resume] = ()  # on rank 0 only
    # time since run_start that training lost, or in which the run was paused or down
    without_s: float = 0.0

    @property
    def nodes(self) -> list[tuple[str, int]]:
        """Name and number of ranks of each host, in the order of the hosts' first ranks."""
        return [(h.name, h.local_size) for h in self.hosts if h.local_rank == 0]

    def emit(self, event: events.Event) -> None:
        for sink in self.sinks:
            sink.handle(event)

    def now_s(self) -> float:
        """Return the time since run_start, including what was lost and paused before a resume."""
        return time.monotonic() - self.clock_start

    def trained_s(self) -> float:
        """Return the time since run_start that the result is made of."""
        return self.now_s() - self.without_s

    def requests(self) -> Flags:
        """Return what this rank requests now; the clocks of ranks may differ."""
        period_s = self.plan.config.checkpoint.period_s
        return Flags(
            self.heartbeat.is_stop_requested,
            bool(period_s) and self.trained_s() - self.progress.clock_s >= period_s,
            self.times.request,
        )


def run_to_end(run: TrainingRun) -> events.Ended:
    """Run epochs to the end of the run; a run that fails still writes its best network."""
    try:
        return run_epochs(run)
    except RunFailed:
        with ExitStack() as cleanup:
            cleanup.callback(run.best_weights.write_best)
            cleanup.callback(run.writer.finish)
            run.emit(events.Ended('failed', None, 0.0, run.progress.best_top1, 0.0))
        raise
    except StorageError:
        # waits until an unfinished checkpoint is removed; the writer's own error replaces this one
        run.writer.finish()
        raise


def run_epochs(run: TrainingRun) -> events.Ended:
    """Run epochs until the target is reached or the run ends for a different reason."""
    plan, progress, options = run.plan, run.progress, run.plan.config.checkpoint
    # first epoch of a block (see Plan.block_epochs)
    first_epoch = progress.step // plan.steps_per_epoch
    for epoch in range(first_epoch, plan.max_epochs):
        if train_epoch(run, epoch, is_block_start=epoch == first_epoch):
            return end(run, 'interrupted')
        report_reads(run, epoch)
        if plan.is_eval_epoch(epoch):
            evaluated = evaluate_epoch(run, epoch, first_epoch)
            if evaluated.accuracy.top1 >= plan.config.train.target_accuracy:
                return end(run, 'converged', epoch + 1, evaluated.time_s)
            if plan.config.run.stop_when_behind and run.comm.sum([run.comparison.is_behind])[0] > 0:
                save_checkpoint(run)
                return end(run, 'aborted')
            first_epoch = epoch + 1
        own = run.requests()
        num_stops, num_due = run.comm.sum([own.stop, own.checkpoint])
        is_planned = is_due(options.period_epochs, epoch + 1) or is_due(
            options.period_steps, progress.step
        )
        if num_stops or num_due or is_planned:
            save_checkpoint(run)
        if num_stops and epoch + 1 < plan.max_epochs:
            return end(run, 'interrupted')
    return end(run, 'aborted')


def train_epoch(run: TrainingRun, epoch: int, is_block_start: bool) -> bool:
    """Run the remaining steps of an epoch; return True if a stop request ended it early, after a
    checkpoint."""
    plan, progress, trainer, period_steps = (
        run.plan,
        run.progress,
        run.trainer,
        run.plan.config.checkpoint.period_steps,
    )
    first, last = progress.step, (epoch + 1) * plan.steps_per_epoch
    run.emit(
        events.EpochStarted(
            epoch, plan.steps_per_epoch, first, plan.block_epochs(epoch) if is_block_start else None
        )
    )
    start_steps(run)
    reporter, pending = StepReporter(run), deque[PendingStep]()
    for step in range(first, last):
        run.writer.check()
        # Push a step to the device without waiting for it.
        pending.append(
            trainer.step(
                run.train_data,
                step % plan.steps_per_epoch,
                plan.learning_rate(step),
                run.requests(),
                reporter.has_norms(step + 1),
            )
        )
        trainer.ema.update(step + 1)
        progress.step, run.times.request = step + 1, False
        # Wait for the loss of an earlier step and for what any rank requested then; at the end, for
        # all steps.
        num_ahead = STEPS_AHEAD if progress.step < last else 0
        requests = [reporter.read(pending.popleft()) for _ in range(len(pending) - num_ahead)]
        run.times.trace(any(r.trace for r in requests))
        # Take a checkpoint, which contains only steps with a checked loss. After the last step,
        # run_epochs does it.
        if progress.step < last and (
            any(r.stop or r.checkpoint for r in requests) or is_due(period_steps, step + 1)
        ):
            requests += [reporter.read(pending.popleft()) for _ in range(len(pending))]
            is_stop_requested = any(r.stop for r in requests)
            if is_stop_requested:
                progress.add_training(
                    (progress.step - first) * plan.global_batch_size, reporter.elapsed_s()
                )
            save_checkpoint(run)
            if is_stop_requested:
                return True
            start_steps(run)
    # Read the clock when the work is done, not when it is queued.
    trainer.settle()
    num_images = (
        plan.train_shard().num_counted - first % plan.steps_per_epoch * plan.global_batch_size
    )
    progress.add_training(num_images, reporter.elapsed_s())
    run.emit(
        events.EpochDone(
            epoch, run.now_s(), num_images / reporter.elapsed_s(), plan.learning_rate(last - 1)
        )
    )
    return False


def start_steps(run: TrainingRun) -> None:
    """Start the clock of the next step on all ranks, so that no step waits for other work of rank
    0."""
    run.comm.barrier()
    run.trainer.timer.start(run.progress.step)


def report_reads(run: TrainingRun, epoch: int) -> None:
    """Report the bytes of records that each host read for an epoch."""
    if run.plan.config.data.synthetic:
        return
    own = dict.fromkeys((h.name for h in run.hosts), (0, 0))
    own[run.hosts[run.comm.rank].name] = run.trainer.take_bytes()
    sums = run.comm.sum([n for counts in own.values() for n in counts])
    run.emit(events.RecordsRead(epoch, dict(zip(own, sums[::2])), dict(zip(own, sums[1::2]))))


def evaluate_epoch(run: TrainingRun, epoch: int, first_epoch: int) -> events.Evaluated:
    """Evaluate after an epoch, check that the ranks agree, and report their times and
    stragglers."""
    start = time.monotonic()
    report_clock_steps(run)
    run.emit(events.EvalStarted(epoch))
    trainer, num_val = run.trainer, run.plan.config.data.num_val
    with trainer.evaluating() as net:
        result = evaluate(net, run.eval_data(), num_val, run.comm, run.heartbeat.beat)
    evaluated = events.Evaluated(epoch, first_epoch, run.now_s(), result)
    run.emit(evaluated)
    if compared := run.comparison.compare(epoch + 1, result.top1, run.trained_s()):
        run.emit(compared)
    check_agreement(run.comm, trainer.digests(), epoch)
    check_finite(trainer.find_non_finite(), epoch)
    if run.comm.rank == 0:
        run.best_weights.update(
            run.progress.step, result, result.top1 > run.progress.best_top1, trainer.copy_network
        )
    run.progress.best_top1 = max(run.progress.best_top1, result.top1)
    run.emit(events.RanksTimed(run.times.report(epoch, evaluated.time_s, time.monotonic() - start)))
    return evaluated


def report_clock_steps(run: TrainingRun) -> None:
    """Report each host whose wall clock jumped since the last call; all ranks must call this."""
    own = [run.hosts[run.comm.rank].name, run.wall_clock.take_step_s()]
    steps = dict(run.comm.gather_object(own, only_on_rank_0=True))
    for host in (h for h, step_s in steps.items() if abs(step_s) > STEP_S):
        run.emit(events.ClockStepped(host, steps[host]))


def is_due(period: int, number: int) -> bool:
    """Check whether a number of steps or epochs is a multiple of a period; a period of 0 is never
    due."""
    return bool(period) and number % period == 0


def save_checkpoint(run: TrainingRun) -> None:
    """Take a checkpoint; training waits only until the arrays have been copied in memory."""
    start = time.monotonic()
    run.emit(events.Saving())
    run.trainer.average_statistics()
    run.progress.clock_s = run.trained_s()
    if run.comm.rank == 0:
        write = partial(
            checkpoint.save,
            run.folder.checkpoints,
            copy(run.progress),
            run.trainer.state(),
            run.plan.config.checkpoint.keep,
        )
        # Write the best network before the checkpoint, so that a run killed in between repeats the
        # evaluation.
        run.writer.submit(partial(check_present, run.folder), run.best_weights.write_best, write)
    run.times.checkpoint_s += time.monotonic() - start


def end(
    run: TrainingRun,
    status: str,
    epochs_to_converge: int | None = None,
    time_s: float | None = None,
) -> events.Ended:
    """Log the end of the run, then write the remaining files. time_s: when the clock stopped; None
    stops it now."""
    time_s = run.now_s() if time_s is None else time_s
    ended = events.Ended(
        status,
        epochs_to_converge,
        time_s,
        run.progress.best_top1,
        run.progress.images_per_s,
        run.times.checkpoint_s,
        elapsed_parts(run.resumes, time_s),
    )
    with ExitStack() as cleanup:  # calls these in reverse order, even if one fails
        cleanup.callback(write_networks, run, status)
        cleanup.callback(run.writer.finish)
        run.times.trace(is_end=True)
        report_clock_steps(run)
        run.emit(ended)
    return ended


def write_networks(run: TrainingRun, status: str) -> None:
    """Write the networks of a finished run; an interrupted run has written its best network with
    the checkpoint."""
    if run.comm.rank == 0 and status != 'interrupted':
        check_present(run.folder)
        run.best_weights.write_at_end(run.progress.step, run.trainer.copy_network())


class StepReporter:
    """Reader that reports each step of an epoch when the step is done."""

    def __init__(self, run: TrainingRun):
        self._run, self._start = run, time.monotonic()
        self._losses: list[float] = []
        self._first, self._num_steps = run.progress.step, 0

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def has_norms(self, step: int) -> bool:
        """Check whether the report of a step, counted from 1, contains the norms of its
        gradients."""
        config = self._run.plan.config.run
        return config.tensorboard and is_due(config.metrics_period_steps, step)

    def read(self, pending: PendingStep) -> Flags:
        """Report the next step once it is done; return what any rank requested, or raise
        RunFailed."""
        run, plan, scale = self._run, self._run.plan, self._run.trainer.loss_scale.value
        step = self._first + self._num_steps
        loss, requests = run.trainer.read(pending)
        if run.trainer.loss_scale.value != scale:
            run.emit(events.LossScaleChanged(step + 1, scale, run.trainer.loss_scale.value))
        if not math.isfinite(loss):
            run.trainer.settle()  # raises a different error if the cause is a lost rank
            train = plan.config.train
            advice = (
                'set train.loss_scale_policy to dynamic, lower '
                f'train.loss_scale={train.loss_scale:g}, '
                if (train.precision, train.loss_scale_policy) == ('float16', 'static')
                else ''
            )
            raise RunFailed(
                f'the loss is {loss} at step {step} (epoch {step // plan.steps_per_epoch + 1}), '
                'and '
                f'all earlier losses were finite; {advice}lower schedule.base_lr='
                f'{plan.config.schedule.base_lr} or lengthen schedule.warmup_epochs'
            )
        self._losses.append(loss)
        self._num_steps += 1
        is_reported = is_due(plan.config.run.metrics_period_steps, step + 1)
        norm, ratios = _read_norms(pending.norms) if pending.norms else (None, {})
        run.emit(
            events.StepDone(
                step + 1,
                (step + 1) / plan.steps_per_epoch,
                run.now_s(),
                loss,
                pending.learning_rate,
                self._num_steps * plan.global_batch_size / self.elapsed_s(),
                is_reported,
                sum(self._losses) / len(self._losses),
                norm,
                ratios,
                plan.learning_rate(step),
            )
        )
        if is_reported:
            self._losses.clear()
            run.times.find_request()
        return requests


def _read_norms(norms: Norms) -> tuple[float, dict[str, float]]:
    """Return the gradient norm of the mean loss, and LARS's trust ratio for each tensor."""
    ratios = {
        n: float(r) for names, values in norms.trust_ratios for n, r in zip(names, values.asnumpy())
    }
    return norms.rescale * math.sqrt(float(norms.squared.asnumpy().sum())), ratios
