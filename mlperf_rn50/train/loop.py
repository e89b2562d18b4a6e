"""The training program: epoch -> evaluate -> checkpoint, until the target is reached."""
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import mxnet as mx

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, RankLost, RunFailed, StorageError
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint import checkpoint
from mlperf_rn50.train.checkpoint.run_folder import RunFolder, check_is_there
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import check_agreement, check_finite, find_stragglers
from mlperf_rn50.train.evaluate import Accuracy, evaluate
from mlperf_rn50.train.session import Session, TrainingRun, hold_run, open_session
from mlperf_rn50.train.start import open_sinks, start
from mlperf_rn50.train.trainer import Norms, PendingStep
from mlperf_rn50.train.watchdog.position import Position
from mlperf_rn50.train.watchdog.signals import catch

# Steps the loop may be ahead of the device: enough to keep it busy, few enough to bound memory.
STEPS_AHEAD = 2


@dataclass(frozen=True)
class Outcome:
    """How a run ended (converged, aborted or interrupted), and where its files are."""

    end: events.Ended
    run: RunFolder

    @property
    def exit_code(self) -> int:
        return {'converged': EXIT_OK, 'interrupted': EXIT_RESUMABLE}.get(self.end.status, EXIT_FAILED)


def train(config: Config, comm: Comm, position: Position, resume: tuple[RunFolder, Path] | None = None,
          is_elastic: bool = False, allowed: Sequence[str] = (), warnings: Sequence[str] = ()) -> Outcome:
    """Trains until the target is reached, the epochs are used up, or the run is asked to stop.

    Args:
        config: checked for values here; for a resume, that of the run folder.
        resume: run, and its checkpoints or one of them, to go on from; None starts a new run.
        is_elastic: whether a resumed run may have another number of ranks than before.
        allowed: keys that a resumed run may have other values for than before, beside those that it always may.
        warnings: what rank 0 says first.

    Raises:
        UserError: the configuration, the data or the checkpoint cannot be used.
        RunFailed: the loss is no longer finite, the ranks no longer agree, or an evaluation did not see every image
            once.
        StorageError: the disk takes nothing more.
    """
    check_values(config)
    catch(position.ask)
    position.now('start-up')
    with ExitStack() as held:
        if resume:
            held.enter_context(hold_run(comm, resume[0], position))
        session = open_session(config, comm, position, resume, is_elastic, allowed)
        if not resume:
            held.enter_context(hold_run(comm, session.folder, position))
        return train_in(session, warnings)


def train_in(session: Session, warnings: Sequence[str] = ()) -> Outcome:
    """Train in a run folder that is held."""
    sinks = open_sinks(session)
    try:
        for text in warnings:
            sinks.see(events.Warned(text))
        return train_to_target(start(session, sinks))
    except mx.MXNetError as e:
        if 'Horovod has been shut down' not in str(e):
            raise
        raise RankLost('another rank is gone') from e
    finally:
        sinks.close()


def train_to_target(run: TrainingRun) -> Outcome:
    """Trains and evaluates; a run that cannot go on leaves its best network, too."""
    try:
        return run_epochs(run)
    except RunFailed:
        with ExitStack() as after:
            after.callback(run.keeper.write_best)
            after.callback(run.saver.finish)
            run.sinks.see(events.Ended('failed', None, 0.0, run.progress.best_top1, 0.0))
        raise
    except StorageError:
        run.saver.finish()  # a checkpoint that filled the disk says more; what it had begun makes room
        raise


def run_epochs(run: TrainingRun) -> Outcome:
    """Epoch after epoch, until the target is reached or the run ends otherwise."""
    plan, progress = run.plan, run.progress
    first_epoch = progress.step // plan.steps_per_epoch  # of the block: the epochs up to an evaluation
    for epoch in range(first_epoch, plan.max_epochs):
        if train_epoch(run, epoch, is_block_start=epoch == first_epoch):
            return end(run, 'interrupted', None)
        tell_reads(run, epoch)
        if plan.is_eval_epoch(epoch):
            accuracy = evaluate_epoch(run, epoch, first_epoch)
            if accuracy.top1 >= plan.config.train.target_accuracy:
                return end(run, 'converged', epoch + 1)
            if is_to_end(run):
                save(run)
                return end(run, 'aborted', None)
            first_epoch = epoch + 1
        is_asked = run.comm.sum([run.position.is_asked])[0] > 0
        if is_asked or is_checkpoint_due(run):
            save(run)
        if is_asked and epoch + 1 < plan.max_epochs:
            return end(run, 'interrupted', None)
    return end(run, 'aborted', None)


def train_epoch(run: TrainingRun, epoch: int, is_block_start: bool) -> bool:
    """The steps of an epoch; True if the run was asked to stop in the middle of it (a checkpoint is taken)."""
    plan, progress, trainer = run.plan, run.progress, run.trainer
    last = (epoch + 1) * plan.steps_per_epoch
    run.sinks.see(events.EpochStarted(epoch, plan.steps_per_epoch, progress.step,
                                      plan.block_epochs(epoch) if is_block_start else None))
    reports, under_way = Reports(run), deque[tuple[int, PendingStep]]()
    num_done = progress.step - epoch * plan.steps_per_epoch
    trainer.pace.start()
    for step in range(progress.step, last):
        run.saver.check()
        lr = plan.learning_rate(step)
        pulse = trainer.step(run.train_data, step % plan.steps_per_epoch, lr, run.position.is_asked,
                             reports.wants_norms(step + 1))
        progress.step, progress.last_lr = step + 1, lr
        under_way.append((step, pulse))
        is_asked = False
        while len(under_way) > (STEPS_AHEAD if step < last - 1 else 0):
            is_asked |= reports.read(*under_way.popleft())
        # At the last step, the end of the epoch handles both.
        if step < last - 1 and (is_asked or is_step_checkpoint_due(run)):
            while under_way:  # what is kept has been looked at
                reports.read(*under_way.popleft())
            save(run)
            if is_asked:
                return True
    trainer.settle()  # clocks are read when the work is done, not when it is ordered
    num_images = plan.config.data.num_train - num_done * plan.global_batch_size
    progress.images, progress.train_s = progress.images + num_images, progress.train_s + reports.elapsed_s()
    run.sinks.see(events.EpochDone(epoch, run.clock.now_s(), num_images / reports.elapsed_s(),
                                   plan.learning_rate(last - 1)))
    return False


def tell_reads(run: TrainingRun, epoch: int) -> None:
    """Tells what each host has read for an epoch."""
    num_bytes, num_new_bytes = Counter[str](), Counter[str]()
    for host, (own, new) in zip(run.hosts, run.comm.gather_object(run.trainer.take_bytes())):
        num_bytes[host.name] += own
        num_new_bytes[host.name] += new
    if not run.plan.config.data.synthetic:
        run.sinks.see(events.RecordsRead(epoch, num_bytes, num_new_bytes))


def evaluate_epoch(run: TrainingRun, epoch: int, first_epoch: int) -> Accuracy:
    """Evaluates after an epoch; all ranks are shown to be the same, and the slow ones named."""
    run.sinks.see(events.EvalStarted(epoch))
    trainer, num_val = run.trainer, run.plan.config.data.num_val
    trainer.average_statistics()
    trainer.fold()
    result = evaluate(trainer.eval_net, run.eval_data(), num_val, run.comm, lambda: run.sinks.see(events.Alive()))
    time_s = run.clock.now_s()
    run.sinks.see(events.Evaluated(epoch, first_epoch, time_s, result.num_top1, result.num_top5, result.num_images))
    if compared := run.course.evaluated(epoch + 1, result.top1, time_s):
        run.sinks.see(compared)
    check_agreement(run.comm, trainer.digests(), epoch)
    check_finite(trainer.find_non_finite(), epoch)
    if run.comm.rank == 0:
        is_better = result.top1 > run.progress.best_top1
        run.keeper.evaluated(run.progress.step, result, is_better, trainer.copy_network)
    run.progress.best_top1 = max(run.progress.best_top1, result.top1)
    time_ranks(run, epoch)
    return result


def is_to_end(run: TrainingRun) -> bool:
    """Whether the run is behind its reference, as rank 0 knows, and is to end for it."""
    return run.plan.config.run.stop_when_behind and run.comm.sum([run.course.is_behind])[0] > 0


def time_ranks(run: TrainingRun, epoch: int) -> None:
    """Tells what the steps since the last evaluation took each rank."""
    taken = [asdict(run.trainer.pace.take()), run.comm.rank]
    ranks = [{'rank': rank, 'host': run.hosts[rank].name, 'cores': run.hosts[rank].cores, **times}
             for times, rank in run.comm.gather_object(taken)]
    run.sinks.see(events.RanksTimed(epoch, run.clock.now_s(), ranks, find_stragglers(ranks)))


def is_step_checkpoint_due(run: TrainingRun) -> bool:
    """Whether a checkpoint follows a step in the middle of an epoch."""
    period = run.plan.config.checkpoint.period_steps
    return bool(period) and run.progress.step % period == 0


def is_checkpoint_due(run: TrainingRun) -> bool:
    """Whether a checkpoint follows the end of an epoch."""
    period = run.plan.config.checkpoint.period_epochs
    epochs = run.progress.step // run.plan.steps_per_epoch
    return bool(period) and epochs % period == 0 or is_step_checkpoint_due(run)


def save(run: TrainingRun) -> None:
    """Takes a checkpoint; training waits for a copy in memory only."""
    run.sinks.see(events.Saving())
    trainer, progress = run.trainer, run.progress
    trainer.average_statistics()
    progress.clock_s = run.clock.now_s()
    progress.loss_scale, progress.num_finite_steps = asdict(trainer.loss_scale).values()
    if run.comm.rank == 0:
        keep = run.plan.config.checkpoint.keep
        write = partial(checkpoint.save, run.folder.checkpoints, copy(progress), trainer.snapshot(), keep)
        # The best first: a run that is killed between the two comes to its evaluation again.
        run.saver.submit(partial(check_is_there, run.folder), run.keeper.write_best, write)
    trainer.pace.start()


def end(run: TrainingRun, status: str, epochs_to_converge: int | None) -> Outcome:
    """The end of the run: in the log, then what is kept of it is written, off the clock."""
    ended = events.Ended(status, epochs_to_converge, run.clock.now_s(), run.progress.best_top1,
                         run.progress.images_per_s)
    with ExitStack() as after:  # the last first, whatever fails
        after.callback(keep_networks, run, status)
        after.callback(run.saver.finish)
        run.sinks.see(ended)
    return Outcome(ended, run.folder)


def keep_networks(run: TrainingRun, status: str) -> None:
    """Writes the networks of a run that is over; one that can go on has written its best with its checkpoint."""
    if run.comm.rank == 0 and status != 'interrupted':
        check_is_there(run.folder)
        run.keeper.write_at_end(run.progress.step, run.trainer.copy_network())


class Reports:
    """What is told of the steps of an epoch, as they are done."""

    def __init__(self, run: TrainingRun):
        self._run, self._start = run, time.monotonic()
        self._losses: list[float] = []
        self._num_steps = 0

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def _is_due(self, step: int) -> bool:
        return step % self._run.plan.config.run.metrics_period_steps == 0

    def wants_norms(self, step: int) -> bool:
        """Whether the sizes of a step's gradients (counted from 1) are told."""
        return self._run.plan.config.run.tensorboard and self._is_due(step)

    def read(self, step: int, pulse: PendingStep) -> bool:
        """Waits for a step and tells of it; whether any rank was asked to stop by then.

        Raises:
            RunFailed: the loss is no longer finite.
        """
        run, plan = self._run, self._run.plan
        loss, is_asked = run.trainer.read(pulse)
        if not math.isfinite(loss):
            run.trainer.settle()  # a rank that is lost is no loss of another kind
            raise RunFailed(f'the loss is {loss} at step {step} (epoch {step // plan.steps_per_epoch + 1}), the steps '
                            f'before it were finite; lower schedule.base_lr={plan.config.schedule.base_lr} or '
                            'lengthen schedule.warmup_epochs')
        self._losses.append(loss)
        self._num_steps += 1
        is_due = self._is_due(step + 1)
        norm, ratios = _read_norms(pulse.norms) if pulse.norms else (None, {})
        run.sinks.see(events.StepDone(
            step + 1, (step + 1) / plan.steps_per_epoch, run.clock.now_s(), loss, plan.learning_rate(step),
            self._num_steps * plan.global_batch_size / self.elapsed_s(), is_due,
            sum(self._losses) / len(self._losses), norm, ratios))
        if is_due:
            self._losses.clear()
        return is_asked


def _read_norms(norms: Norms) -> tuple[float, dict[str, float]]:
    """The norm of the gradient of the mean loss, and LARS's trust ratio by tensor."""
    ratios = {n: float(r) for names, values in norms.trust_ratios for n, r in zip(names, values.asnumpy())}
    return norms.rescale * math.sqrt(float(norms.squared.asnumpy().sum())), ratios
