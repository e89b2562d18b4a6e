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
from mlperf_rn50.errors import CheckpointError, NonFiniteState, RunFailed, UserError
from mlperf_rn50.mllog.elapsed import Resume, elapsed_parts
from mlperf_rn50.mllog.read.clock import STEP_S
from mlperf_rn50.runfolder.names import RunFolder, check_present
from mlperf_rn50.runfolder.records import (
    ClockStepRecord,
    EpochRecord,
    LossScaleRecord,
    PartRecord,
    TrainRecord,
)
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter, BestWeights
from mlperf_rn50.train.checkpoint.period import AutoPeriod, is_due
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import WallClock, check_agreement, check_finite
from mlperf_rn50.train.comm.rank_times import RankTimes
from mlperf_rn50.train.compare import ReferenceComparison
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.trainer import NO_FLAGS, Flags, PendingStep, Trainer
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


@dataclass(frozen=True)
class OpenRun:
    """A run on one rank, which holds its folder and has open sinks; progress changes in training.

    Only rank 0 has reference runs and the arrays of the checkpoint to resume.
    """

    plan: Plan
    progress: Progress
    comm: Comm
    hosts: Sequence[RankPlace]
    heartbeat: Heartbeat
    folder: RunFolder
    comparison: ReferenceComparison
    resumption: checkpoint.LoadedCheckpoint | None
    sinks: list[events.Sink]

    @property
    def host(self) -> str:
        return self.hosts[self.comm.rank].name

    @property
    def nodes(self) -> list[tuple[str, int]]:
        """Name and number of ranks of each host, in the order of the hosts' first ranks."""
        return [(h.name, h.local_size) for h in self.hosts if h.local_rank == 0]

    def emit(self, event: events.Event) -> None:
        for sink in self.sinks:
            sink.handle(event)


@dataclass(frozen=True)
class BuiltRun(OpenRun):
    """A run whose network and data are ready; train_data is endless."""

    trainer: Trainer
    times: RankTimes
    train_data: Iterator[Batch]
    eval_data: Callable[[], Iterator[Batch]]
    best_weights: BestWeights
    writer: BackgroundWriter


@dataclass(frozen=True)
class RunClock:
    """Clock of a run, which never stops, also not between its attempts.

    start_s: monotonic time of run_start. without_s: time since then that training lost, or in which
    the run was paused or down. resumes: on rank 0 only.
    """

    start_s: float
    without_s: float = 0.0
    resumes: Sequence[Resume] = ()
    wall: WallClock = field(default_factory=WallClock)

    def now_s(self) -> float:
        """Return the time since run_start, including what was lost and paused before a resume."""
        return time.monotonic() - self.start_s

    def trained_s(self) -> float:
        """Return the time since run_start that the result is made of."""
        return self.now_s() - self.without_s


@dataclass(frozen=True)
class TrainingRun(BuiltRun):
    """A run whose clock runs. auto_period: on rank 0, if checkpoint.period_s is auto."""

    clock: RunClock
    auto_period: AutoPeriod | None = None

    def requests(self) -> Flags:
        """Return what this rank requests now; the clocks of ranks may differ."""
        period_s = self.plan.config.checkpoint.period_s
        if period_s == 'auto':
            auto = self.auto_period
            period_s = auto.period_s(self.clock.now_s()) if auto else math.inf
        return Flags(
            stop=self.heartbeat.is_stop_requested,
            checkpoint=0 < period_s <= self.clock.trained_s() - self.progress.clock_s,
            trace=self.times.is_trace_requested,
        )

    def report_part(self, name: str, seconds: float) -> None:
        """Report a part of the elapsed time that ends now."""
        self.emit(events.PartEnded(PartRecord(name, self.clock.now_s(), seconds)))

    def report_period(self) -> None:
        """Report the chosen period of checkpoints, if it is new."""
        if self.auto_period and (text := self.auto_period.news(self.clock.now_s())):
            self.emit(events.Noted(text))


def train_to_end(run: TrainingRun) -> events.Ended:
    """Run epochs to the end of the run; a run that fails still writes its best network."""
    try:
        return run_epochs(run)
    except RunFailed as e:
        run.heartbeat.note_place(e)  # the clean-up is another phase
        # The last callback is called first, and all are, even if one fails: the failure is
        # reported, the checkpoint that is being written is finished, and the best network is
        # written. All ranks fail, and wait for this, because the end of one ends the others.
        with ExitStack() as cleanup:
            cleanup.callback(run.comm.barrier)
            cleanup.callback(write_best, run)
            cleanup.callback(run.writer.finish)
            run.emit(events.failed(run.progress.best_top1, e))
        raise
    except Exception as e:
        if isinstance(e, UserError):
            run.heartbeat.note_place(e)
        if isinstance(e, NonFiniteState):  # only on rank 0, so it waits for no other rank
            run.emit(events.failed(run.progress.best_top1, e))
        if run.writer.is_busy:
            run.heartbeat.beat('writing a checkpoint')
        # An error of the writer replaces this one.
        run.writer.finish()
        raise


def write_best(run: TrainingRun) -> None:
    """Write the best network of a failed run."""
    if run.comm.rank == 0:
        check_present(run.folder)
        run.best_weights.write_best()


def run_epochs(run: TrainingRun) -> events.Ended:
    """Run epochs until the target is reached or the run ends for a different reason."""
    plan, progress, periods = run.plan, run.progress, run.plan.config.checkpoint
    # first epoch of a block (see Plan.block_epochs)
    first_epoch = progress.step // plan.steps_per_epoch
    for epoch in range(first_epoch, plan.max_epochs):
        if train_epoch(run, epoch, is_block_start=epoch == first_epoch):
            return end(run, 'interrupted')
        report_reads(run, epoch)
        if plan.is_eval_epoch(epoch):
            evaluated = evaluate_epoch(run, epoch, first_epoch)
            if evaluated.accuracy.top1 >= plan.config.train.target_accuracy:
                return end(run, 'converged', evaluated)
            if plan.config.run.stop_when_behind and run.comm.sum([run.comparison.is_behind])[0]:
                save_checkpoint(run)
                return end(run, 'aborted')
            first_epoch = epoch + 1
        own = run.requests()
        num_stops, num_due = run.comm.sum([own.stop, own.checkpoint])
        is_planned = is_due(periods.period_epochs, epoch + 1)
        if num_stops or num_due or is_planned or is_due(periods.period_steps, progress.step):
            save_checkpoint(run)
        if num_stops and epoch + 1 < plan.max_epochs:
            return end(run, 'interrupted')
    if not plan.is_eval_epoch(plan.max_epochs - 1):
        run.trainer.average_statistics()  # for the last network, which was not evaluated
    return end(run, 'aborted')


def train_epoch(run: TrainingRun, epoch: int, is_block_start: bool) -> bool:
    """Run the remaining steps of an epoch; return True if a stop request ended it early, after a
    checkpoint."""
    plan, progress, trainer = run.plan, run.progress, run.trainer
    first = progress.step
    last = (epoch + 1) * plan.steps_per_epoch

    # the start of the epoch
    size_of = plan.config.data.size_of
    if epoch and size_of(epoch) != size_of(epoch - 1):
        run.heartbeat.forget('training')
    run.emit(
        events.EpochStarted(
            epoch,
            num_steps=plan.steps_per_epoch,
            first_step=first,
            block_epochs=plan.block_epochs(epoch) if is_block_start else None,
        )
    )
    start_steps(run)
    reporter = StepReporter(run)

    # its remaining steps
    for step in range(first, last):
        run.writer.check()
        # Push a step to the device without waiting for it.
        reporter.push(step)
        trainer.ema.update(step + 1)
        progress.step = step + 1
        # Wait for the loss of an earlier step and for what any rank requested then; at the end, for
        # all steps.
        requests = reporter.read(num_ahead=STEPS_AHEAD if progress.step < last else 0)
        is_planned = is_due(plan.config.checkpoint.period_steps, progress.step)
        is_asked = requests.stop or requests.checkpoint
        # run_epochs takes the checkpoint after the last step
        must_save = progress.step < last and (is_asked or is_planned)
        if must_save:  # a checkpoint contains only steps with a checked loss
            requests |= reporter.read()
        if requests.trace:
            run.times.start_trace()
        report_trace(run)
        if must_save:
            if requests.stop:
                num_images = (progress.step - first) * plan.global_batch_size
                progress.add_training(num_images, reporter.elapsed_s())
            save_checkpoint(run)
            if requests.stop:
                return True
            start_steps(run)

    # the end of the epoch; the clock is read when the work is done, not when it is queued
    trainer.settle()
    num_before = first % plan.steps_per_epoch * plan.global_batch_size
    num_images = plan.train_shard().num_counted - num_before
    trained_s = reporter.elapsed_s()
    progress.add_training(num_images, trained_s)
    run.emit(
        events.EpochDone(
            epoch,
            time_s=run.clock.now_s(),
            images_per_s=num_images / trained_s,
            learning_rate=plan.learning_rate(last - 1),
        )
    )
    return False


def start_steps(run: TrainingRun) -> None:
    """Start the clock of the next step on all ranks, so that no step waits for other work of rank
    0."""
    run.comm.barrier()
    run.trainer.timer.start(run.progress.step)


def report_trace(run: TrainingRun, is_end: bool = False) -> None:
    """Report the traced steps once all are done; at the end of the run, those that are done."""
    if spans := run.times.take_trace(is_end):
        run.emit(events.StepsTraced(spans))


def report_reads(run: TrainingRun, epoch: int) -> None:
    """Report the bytes of records that each host read for an epoch."""
    if run.plan.config.data.synthetic:
        return
    names = list(dict.fromkeys(host.name for host in run.hosts))
    taken = run.trainer.take_bytes()
    # two numbers for each host, in the order of the hosts
    sums = run.comm.sum([n if name == run.host else 0 for name in names for n in taken])
    num_bytes, num_new_bytes = (dict(zip(names, sums[k::2])) for k in (0, 1))
    run.emit(events.RecordsRead(EpochRecord(epoch + 1, num_bytes, num_new_bytes)))


def evaluate_epoch(run: TrainingRun, epoch: int, first_epoch: int) -> events.Evaluated:
    """Evaluate after an epoch, check that the ranks agree, and report their times and
    stragglers."""
    start = time.monotonic()
    report_clock_steps(run)
    run.emit(events.EvalStarted(epoch))
    trainer, progress = run.trainer, run.progress
    with trainer.evaluating() as net:
        num_val = run.plan.config.data.num_val
        result = evaluate(net, run.eval_data(), num_val, run.comm, run.heartbeat.beat)
    # The clock stops here if the target is reached.
    evaluated = events.Evaluated(epoch, first_epoch, run.clock.now_s(), result)
    run.emit(evaluated)
    if compared := run.comparison.compare(epoch + 1, result.top1, run.clock.trained_s()):
        run.emit(compared)
    check_agreement(run.comm, trainer.digests(), epoch)
    check_finite(trainer.find_non_finite(), epoch)
    if run.comm.rank == 0:
        run.best_weights.update(progress.step, result, trainer.copy_network)
    progress.best_top1 = max(progress.best_top1, result.top1)
    times = run.times.report(epoch, evaluated.time_s, eval_s=time.monotonic() - start)
    run.emit(events.RanksTimed(times))
    run.report_part('evaluation', time.monotonic() - start)
    return evaluated


def report_clock_steps(run: TrainingRun) -> None:
    """Report each host whose wall clock jumped since the last call; all ranks must call this."""
    own = [run.host, run.clock.wall.take_step_s()]
    steps = dict(run.comm.gather_object(own, only_on_rank_0=True))
    for host, step_s in steps.items():
        if abs(step_s) > STEP_S:
            run.emit(events.ClockStepped(ClockStepRecord(host, step_s)))


def save_checkpoint(run: TrainingRun) -> None:
    """Take a checkpoint; training waits only until the arrays have been copied in memory."""
    start = time.monotonic()
    run.emit(events.Saving())
    run.trainer.average_statistics()
    run.progress.clock_s = run.clock.trained_s()
    if run.comm.rank == 0:
        check = partial(check_present, run.folder)
        keep = run.plan.config.checkpoint.keep
        progress = copy(run.progress)
        state = run.trainer.state()
        # Write the best network before the checkpoint, so that a run killed in between repeats the
        # evaluation.
        write = partial(checkpoint.save, run.folder.checkpoints, progress, state, keep)
        run.writer.submit(check, run.best_weights.write_best, write)
    seconds = time.monotonic() - start
    run.times.checkpoint_s += seconds
    run.report_part('checkpoint', seconds)
    if run.auto_period:
        run.auto_period.costs_s.append(seconds)
        run.report_period()


def end(run: TrainingRun, status: str, reached: events.Evaluated | None = None) -> events.Ended:
    """Log the end of the run, then write the remaining files. reached: the evaluation at which the
    clock stopped; None stops it now."""
    time_s = reached.time_s if reached else run.clock.now_s()
    ended = events.Ended(
        status,
        best_top1=run.progress.best_top1,
        epochs_to_converge=reached.epoch + 1 if reached else None,
        time_s=time_s,
        images_per_s=run.progress.images_per_s,
        checkpoint_s=run.times.checkpoint_s,
        parts=elapsed_parts(run.clock.resumes, time_s),
    )
    # As in train_to_end, the last callback is called first, and all are, even if one fails: the end
    # is reported, the checkpoint that is being written is finished, and then networks are written.
    try:
        with ExitStack() as cleanup:
            cleanup.callback(write_networks, run, status)
            cleanup.callback(run.writer.finish)
            report_trace(run, is_end=True)
            report_clock_steps(run)
            run.emit(ended)
    except NonFiniteState as e:  # of the last checkpoint; the end has been reported
        raise CheckpointError(str(e)) from e
    return ended


def write_networks(run: TrainingRun, status: str) -> None:
    """Write the networks of a finished run; an interrupted run has written its best network with
    the checkpoint."""
    if run.comm.rank == 0 and status != 'interrupted':
        check_present(run.folder)
        run.best_weights.write_at_end(run.progress.step, run.trainer.copy_network())


class StepReporter:
    """The steps of an epoch: pushes each to the device, and reports it when it is done."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._start = time.monotonic()
        self._saved_s = run.times.checkpoint_s
        self._pending = deque[PendingStep]()
        self._losses: list[float] = []
        self._first = run.progress.step
        self._num_steps = 0

    def elapsed_s(self) -> float:
        """Return the time of the steps, without the checkpoints between them."""
        saved_s = self._run.times.checkpoint_s - self._saved_s
        return time.monotonic() - self._start - saved_s

    def push(self, step: int) -> None:
        """Push a step to the device, with the requests of this rank; steps count from 0."""
        run, plan = self._run, self._run.plan
        pending = run.trainer.step(
            run.train_data,
            step_in_epoch=step % plan.steps_per_epoch,
            lr=plan.learning_rate(step),
            requests=run.requests(),
            with_norms=plan.config.run.tensorboard and self._has_record(step),
        )
        self._pending.append(pending)
        # The step passes the request on to all ranks, so each request starts one trace.
        run.times.is_trace_requested = False

    def read(self, num_ahead: int = 0) -> Flags:
        """Wait for all pushed steps but the last num_ahead, and report them; return what any rank
        requested, or raise RunFailed."""
        requests = NO_FLAGS
        while len(self._pending) > num_ahead:
            requests |= self._read(self._pending.popleft())
        return requests

    def _read(self, pending: PendingStep) -> Flags:
        run, plan, step = self._run, self._run.plan, self._first + self._num_steps
        scale = run.trainer.loss_scale.value
        loss, requests = run.trainer.read(pending)
        if run.trainer.loss_scale.value != scale:
            change = LossScaleRecord(step + 1, before=scale, now=run.trainer.loss_scale.value)
            run.emit(events.LossScaleChanged(change))
        if not math.isfinite(loss):
            run.trainer.settle()  # raises a different error if the cause is a lost rank
            raise RunFailed(_loss_error(plan, loss, step + 1))
        self._losses.append(loss)
        self._num_steps += 1
        images_per_s = self._num_steps * plan.global_batch_size / self.elapsed_s()
        record = None
        if self._has_record(step):
            record = TrainRecord(
                step=step + 1,
                epoch=(step + 1) / plan.steps_per_epoch,
                time_s=run.clock.now_s(),
                loss=sum(self._losses) / len(self._losses),
                learning_rate=pending.learning_rate,
                images_per_s=images_per_s,
                scheduled_learning_rate=plan.learning_rate(step),
            )
            self._losses.clear()
            run.times.find_trace_request()
        run.emit(
            events.StepDone(
                record,
                step=step + 1,
                loss=loss,
                learning_rate=pending.learning_rate,
                images_per_s=images_per_s,
                gradient_norm=pending.norms.gradient_norm() if pending.norms else None,
                trust_ratios=pending.norms.ratios() if pending.norms else {},
            )
        )
        return requests

    def _has_record(self, step: int) -> bool:
        return is_due(self._run.plan.config.run.metrics_period_steps, step + 1)


def _loss_error(plan: Plan, loss: float, step: int) -> str:
    train, schedule, advice = plan.config.train, plan.config.schedule, ''
    if (train.precision, train.loss_scale_policy) == ('float16', 'static'):
        scale = f'{train.loss_scale:g}'
        advice = f'set train.loss_scale_policy to dynamic, lower train.loss_scale={scale}, '
    epoch = (step - 1) // plan.steps_per_epoch + 1
    return (
        f'the loss is {loss} at step {step} (epoch {epoch}), and all '
        f'earlier losses were finite; {advice}lower schedule.base_lr={schedule.base_lr} or '
        'lengthen schedule.warmup_epochs'
    )
