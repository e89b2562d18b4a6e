"""The training loop: epochs, evaluations and checkpoints until the target is reached."""
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import mxnet as mx

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.errors import RankLost, RunFailed, StorageError
from mlperf_rn50.model.fused import layout_warnings
from mlperf_rn50.runfolder.names import RunFolder, check_present
from mlperf_rn50.runfolder.records import EXIT_CODES
from mlperf_rn50.system.signals import catch
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import check_agreement, check_finite, find_stragglers
from mlperf_rn50.train.evaluate import evaluate
from mlperf_rn50.train.session import TrainingRun, hold_run, open_session
from mlperf_rn50.train.start import open_sinks, start
from mlperf_rn50.train.trainer import Norms, PendingStep
from mlperf_rn50.train.watchdog.heartbeat import Heartbeat

# Number of steps that the loop runs ahead of the device: enough to keep the device busy, few enough to limit memory.
STEPS_AHEAD = 2


@dataclass(frozen=True)
class Outcome:
    """The end of a run (converged, aborted or interrupted) and the files of the run."""

    end: events.Ended
    run: RunFolder

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.end.status]


def train(config: Config, comm: Comm, heartbeat: Heartbeat, resume: tuple[RunFolder, Path] | None = None,
          is_elastic: bool = False, allowed: Sequence[str] = (), warnings: Sequence[str] = ()) -> Outcome:
    """Train until the target is reached, the epochs are used up, or a stop is requested; raise UserError on failure.

    Args:
        config: the configuration, not yet checked; that of a resumed run was read from its run folder.
        resume: the run to resume, with its checkpoints folder or a single checkpoint; None starts a new run.
        is_elastic: True if a resumed run may have a different number of ranks.
        allowed: configuration keys that may change on resume, in addition to the keys of changes.FREE.
    """
    check_values(config)
    catch(heartbeat.request_stop)
    heartbeat.beat('start-up')
    with ExitStack() as cleanup:
        if resume:
            cleanup.enter_context(hold_run(comm, resume[0], heartbeat))
        session = open_session(config, comm, heartbeat, resume, is_elastic, allowed)
        if not resume:
            cleanup.enter_context(hold_run(comm, session.folder, heartbeat))
        sinks = open_sinks(session)
        cleanup.callback(sinks.close)
        try:
            for text in [*warnings, *layout_warnings(session.plan.config)]:
                sinks.handle(events.Warned(text))
            return train_to_target(start(session, sinks))
        except mx.MXNetError as e:
            if 'Horovod has been shut down' not in str(e):
                raise
            raise RankLost('the connection to another rank was lost') from e


def train_to_target(run: TrainingRun) -> Outcome:
    """Train and evaluate; a run that fails still writes its best network."""
    try:
        return run_epochs(run)
    except RunFailed:
        with ExitStack() as cleanup:
            cleanup.callback(run.best_weights.write_best)
            cleanup.callback(run.writer.finish)
            run.sinks.handle(events.Ended('failed', None, 0.0, run.progress.best_top1, 0.0))
        raise
    except StorageError:
        run.writer.finish()  # waits until an unfinished checkpoint is removed; the writer's own error replaces this one
        raise


def run_epochs(run: TrainingRun) -> Outcome:
    """Run epochs until the target is reached or the run ends for a different reason."""
    plan, progress = run.plan, run.progress
    first_epoch = progress.step // plan.steps_per_epoch  # first epoch of a block (see Plan.block_epochs)
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
        num_stops, num_due = run.comm.sum([run.heartbeat.is_stop_requested, is_time_checkpoint_due(run)])
        is_stop_requested = num_stops > 0
        if is_stop_requested or num_due > 0 or is_checkpoint_due(run):
            save_checkpoint(run)
        if is_stop_requested and epoch + 1 < plan.max_epochs:
            return end(run, 'interrupted')
    return end(run, 'aborted')


def train_epoch(run: TrainingRun, epoch: int, is_block_start: bool) -> bool:
    """Run the remaining steps of an epoch; return True if a stop request ended it early, after a checkpoint."""
    plan, progress, trainer = run.plan, run.progress, run.trainer
    last = (epoch + 1) * plan.steps_per_epoch
    run.sinks.handle(events.EpochStarted(epoch, plan.steps_per_epoch, progress.step,
                                         plan.block_epochs(epoch) if is_block_start else None))
    reporter, pending = StepReporter(run), deque[tuple[int, PendingStep]]()
    first = progress.step
    trainer.timer.start()
    for step in range(progress.step, last):
        run.writer.check()
        lr = plan.learning_rate(step)
        pushed = trainer.step(run.train_data, step % plan.steps_per_epoch, lr, run.heartbeat.is_stop_requested,
                              reporter.has_norms(step + 1), is_time_checkpoint_due(run))
        progress.step, progress.last_lr = step + 1, lr
        pending.append((step, pushed))
        num_ahead = STEPS_AHEAD if step < last - 1 else 0
        requests = [reporter.read(*pending.popleft()) for _ in range(len(pending) - num_ahead)]
        # After the last step, run_epochs handles stop requests and checkpoints.
        if step < last - 1 and (any(map(any, requests)) or is_step_checkpoint_due(run)):
            # A checkpoint contains only steps with a checked loss.
            requests += [reporter.read(*pending.popleft()) for _ in range(len(pending))]
            is_stop_requested = any(is_stop for is_stop, _ in requests)
            if is_stop_requested:
                progress.add_training((step + 1 - first) * plan.global_batch_size, reporter.elapsed_s())
            save_checkpoint(run)
            if is_stop_requested:
                return True
    trainer.settle()  # so that the clock is read when the work is done, not when it is queued
    num_images = plan.train_shard().num_counted - first % plan.steps_per_epoch * plan.global_batch_size
    progress.add_training(num_images, reporter.elapsed_s())
    run.sinks.handle(events.EpochDone(epoch, run.now_s(), num_images / reporter.elapsed_s(),
                                      plan.learning_rate(last - 1)))
    return False


def report_reads(run: TrainingRun, epoch: int) -> None:
    """Report the bytes of records that each host read for an epoch."""
    if run.plan.config.data.synthetic:
        return
    own = dict.fromkeys((h.name for h in run.hosts), (0, 0))
    own[run.hosts[run.comm.rank].name] = run.trainer.take_bytes()
    sums = run.comm.sum([n for counts in own.values() for n in counts])
    run.sinks.handle(events.RecordsRead(epoch, dict(zip(own, sums[::2])), dict(zip(own, sums[1::2]))))


def evaluate_epoch(run: TrainingRun, epoch: int, first_epoch: int) -> events.Evaluated:
    """Evaluate after an epoch, check that the ranks agree, and report stragglers."""
    run.report_clock_steps()
    run.sinks.handle(events.EvalStarted(epoch))
    trainer, num_val = run.trainer, run.plan.config.data.num_val
    with trainer.evaluating() as net:
        result = evaluate(net, run.eval_data(), num_val, run.comm, run.heartbeat.beat)
    evaluated = events.Evaluated(epoch, first_epoch, run.now_s(), result)
    run.sinks.handle(evaluated)
    if compared := run.comparison.compare(epoch + 1, result.top1, evaluated.time_s):
        run.sinks.handle(compared)
    check_agreement(run.comm, trainer.digests(), epoch)
    check_finite(trainer.find_non_finite(), epoch)
    if run.comm.rank == 0:
        run.best_weights.update(run.progress.step, result, result.top1 > run.progress.best_top1, trainer.copy_network)
    run.progress.best_top1 = max(run.progress.best_top1, result.top1)
    report_rank_times(run, evaluated)
    return evaluated


def report_rank_times(run: TrainingRun, evaluated: events.Evaluated) -> None:
    """Report each rank's step times since the last evaluation to the sinks of rank 0."""
    taken = [asdict(run.trainer.timer.take()), run.comm.rank]
    ranks = [{'rank': rank, 'host': run.hosts[rank].name, 'cores': run.hosts[rank].cores, **times}
             for times, rank in run.comm.gather_object(taken, only_on_rank_0=True)]
    run.sinks.handle(events.RanksTimed(evaluated.epoch, evaluated.time_s, ranks, find_stragglers(ranks)))


def is_step_checkpoint_due(run: TrainingRun) -> bool:
    period = run.plan.config.checkpoint.period_steps
    return bool(period) and run.progress.step % period == 0


def is_time_checkpoint_due(run: TrainingRun) -> bool:
    """Check whether period_s have passed on this rank's clock since the last checkpoint; clocks of ranks may differ."""
    period = run.plan.config.checkpoint.period_s
    return bool(period) and run.now_s() - run.progress.clock_s >= period


def is_checkpoint_due(run: TrainingRun) -> bool:
    """Check whether a checkpoint is due at the end of an epoch, by its period in epochs or steps."""
    period = run.plan.config.checkpoint.period_epochs
    epochs = run.progress.step // run.plan.steps_per_epoch
    return bool(period) and epochs % period == 0 or is_step_checkpoint_due(run)


def save_checkpoint(run: TrainingRun) -> None:
    """Take a checkpoint; training waits only until the arrays have been copied in memory."""
    run.sinks.handle(events.Saving())
    trainer, progress = run.trainer, run.progress
    trainer.average_statistics()
    progress.clock_s = run.now_s()
    progress.loss_scale, progress.num_finite_steps = asdict(trainer.loss_scale).values()
    if run.comm.rank == 0:
        keep = run.plan.config.checkpoint.keep
        write = partial(checkpoint.save, run.folder.checkpoints, copy(progress), trainer.snapshot(), keep)
        # Write the best network before the checkpoint, so that a run killed in between repeats the evaluation.
        run.writer.submit(partial(check_present, run.folder), run.best_weights.write_best, write)
    trainer.timer.start()


def end(run: TrainingRun, status: str, epochs_to_converge: int | None = None, time_s: float | None = None) -> Outcome:
    """Log the end of the run, then write the remaining files. time_s: when the clock stopped; None stops it now."""
    ended = events.Ended(status, epochs_to_converge, run.now_s() if time_s is None else time_s, run.progress.best_top1,
                         run.progress.images_per_s)
    with ExitStack() as cleanup:  # calls these in reverse order, even if one fails
        cleanup.callback(write_networks, run, status)
        cleanup.callback(run.writer.finish)
        run.report_clock_steps()
        run.sinks.handle(ended)
    return Outcome(ended, run.folder)


def write_networks(run: TrainingRun, status: str) -> None:
    """Write the networks of a finished run; an interrupted run has written its best network with the checkpoint."""
    if run.comm.rank == 0 and status != 'interrupted':
        check_present(run.folder)
        run.best_weights.write_at_end(run.progress.step, run.trainer.copy_network())


class StepReporter:
    """Reader that reports each step of an epoch when the step is done."""

    def __init__(self, run: TrainingRun):
        self._run, self._start = run, time.monotonic()
        self._losses: list[float] = []
        self._num_steps = 0

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def _is_due(self, step: int) -> bool:
        return step % self._run.plan.config.run.metrics_period_steps == 0

    def has_norms(self, step: int) -> bool:
        """Check whether the report of a step, counted from 1, contains the norms of its gradients."""
        return self._run.plan.config.run.tensorboard and self._is_due(step)

    def read(self, step: int, pending: PendingStep) -> tuple[bool, bool]:
        """Report a step, counted from 0, once it is done; return the flags of Trainer.read, or raise RunFailed."""
        run, plan, scale = self._run, self._run.plan, self._run.trainer.loss_scale.value
        loss, *flags = run.trainer.read(pending)
        if run.trainer.loss_scale.value != scale:
            run.sinks.handle(events.LossScaleChanged(step + 1, scale, run.trainer.loss_scale.value))
        if not math.isfinite(loss):
            run.trainer.settle()  # raises a different error if the cause is a lost rank
            train = plan.config.train
            advice = (f'set train.loss_scale_policy to dynamic, lower train.loss_scale={train.loss_scale:g}, '
                      if (train.precision, train.loss_scale_policy) == ('float16', 'static') else '')
            raise RunFailed(f'the loss is {loss} at step {step} (epoch {step // plan.steps_per_epoch + 1}), and '
                            f'all earlier losses were finite; {advice}lower schedule.base_lr='
                            f'{plan.config.schedule.base_lr} or lengthen schedule.warmup_epochs')
        self._losses.append(loss)
        self._num_steps += 1
        is_due = self._is_due(step + 1)
        norm, ratios = _read_norms(pending.norms) if pending.norms else (None, {})
        run.sinks.handle(events.StepDone(
            step + 1, (step + 1) / plan.steps_per_epoch, run.now_s(), loss, plan.applied_rate(step),
            self._num_steps * plan.global_batch_size / self.elapsed_s(), is_due,
            sum(self._losses) / len(self._losses), norm, ratios))
        if is_due:
            self._losses.clear()
        return flags[0], flags[1]


def _read_norms(norms: Norms) -> tuple[float, dict[str, float]]:
    """Return the gradient norm of the mean loss, and LARS's trust ratio for each tensor."""
    ratios = {n: float(r) for names, values in norms.trust_ratios for n, r in zip(names, values.asnumpy())}
    return norms.rescale * math.sqrt(float(norms.squared.asnumpy().sum())), ratios
