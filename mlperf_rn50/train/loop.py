"""The training program: from a configuration to a logged run."""
import json
import logging
import math
import platform
import secrets
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import mxnet as mx

from mlperf_rn50.config import IMAGENET, Config, check_values, render_yaml
from mlperf_rn50.data.pipeline import eval_batches, train_batches
from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, CheckpointError, ConfigError, RankLost, RunFailed
from mlperf_rn50.files import write_atomically
from mlperf_rn50.mlperf.writer import RunLog
from mlperf_rn50.model.describe import describe
from mlperf_rn50.model.zoo import count_flops, count_parameters, image_shape
from mlperf_rn50.system.environment import dump_environment
from mlperf_rn50.system.page_cache import drop_page_cache
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import checkpoint
from mlperf_rn50.train.comm import Comm, gather_texts
from mlperf_rn50.train.evaluate import Accuracy, evaluate
from mlperf_rn50.train.plan import Plan, make_elastic_plan, make_plan, resumed_step
from mlperf_rn50.train.progress import EpochProgress, open_console
from mlperf_rn50.train.run_folder import RunFolder, new_run
from mlperf_rn50.train.trainer import Trainer
from mlperf_rn50.train.watch import STOP_SIGNALS, Position

# Steps the loop may be ahead of the device: enough to keep it busy, few enough to bound memory.
STEPS_AHEAD = 2


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        status: converged, aborted (gave up) or interrupted (asked to stop, and can be resumed).
        epochs_to_converge: epochs trained when the target was reached; None where it was not.
        time_to_train_s: seconds on the run's clock, from run_start to run_stop.
        best_top1: best Top-1, a fraction.
        images_per_s: training throughput over all ranks, evaluations not counted.
        run: where the files are.
        exit_code: of the program.
    """

    status: str
    epochs_to_converge: int | None
    time_to_train_s: float
    best_top1: float
    images_per_s: float
    run: RunFolder

    @property
    def exit_code(self) -> int:
        return {'converged': EXIT_OK, 'interrupted': EXIT_RESUMABLE}.get(self.status, EXIT_FAILED)


class StopRequest:
    """Whether SIGTERM or SIGUSR1 asked this rank to stop."""

    def __init__(self) -> None:
        self.is_set = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _set(self, *_: object) -> None:
        self.is_set = True


class Clock:
    """The run's clock: monotonic, and going on from an earlier part of the run."""

    def __init__(self, before_s: float):
        self._start = time.monotonic() - before_s

    def now_s(self) -> float:
        return time.monotonic() - self._start


def train(config: Config, comm: Comm, position: Position, resume: tuple[RunFolder, Path] | None = None,
          is_elastic: bool = False) -> Outcome:
    """Trains until the target is reached, the epochs are used up, or the run is asked to stop.

    Args:
        config: checked for values here; for a resume, that of the run folder.
        comm: the ranks.
        position: where this rank says how far it is.
        resume: run and checkpoint to go on from; None starts a new run.
        is_elastic: whether a resumed run may have another number of ranks than before.

    Raises:
        UserError: the configuration, the data or the checkpoint cannot be used.
        RunFailed: the loss is no longer finite, or an evaluation did not see every image once.
    """
    check_values(config)
    stop = StopRequest()
    position.now('start-up')
    state = checkpoint.load_state(resume[1])[0] if resume else None
    if state and is_elastic:
        plan = make_elastic_plan(config, comm.world_size, state.lr_batch_size)
    else:
        plan = make_plan(config, comm.world_size)
    if resume and state:
        _check_state(resume[1], state, plan, is_elastic)
        step = resumed_step(plan, state.step, state.global_batch_size)
        if step >= plan.max_epochs * plan.steps_per_epoch:
            raise ConfigError(f'train.max_epochs: got {plan.max_epochs}, and the checkpoint has taken all of them; '
                              'raise it to go on')
    seed = state.seed if state else config.run.seed
    seed = comm.broadcast_number(secrets.randbelow(2**31) if seed is None else seed)
    plan = replace(plan, config=replace(config, run=replace(config.run, seed=seed)))
    run = resume[0] if resume else claim_run(config, comm)
    is_first = comm.rank == 0
    log = RunLog(run.result if is_first else None, run.result_v06 if is_first and config.run.log_v06 else None,
                 is_resumed=resume is not None)
    console = open_console(run.train_log if is_first else None)
    telemetry = open_telemetry(config, comm, run)
    program = Program(plan, comm, run, log, console, telemetry, stop, seed, position)
    try:
        return program.run_to_end(state, resume[1] if resume else None)
    except RunFailed:
        program.give_up()
        raise
    except mx.MXNetError as e:
        if 'Horovod has been shut down' not in str(e):
            raise
        raise RankLost('another rank is gone') from e
    finally:
        telemetry.close()
        log.close()


def open_telemetry(config: Config, comm: Comm, run: RunFolder) -> Telemetry:
    """The telemetry of this rank's node, which its first rank writes, if it is asked for."""
    if not config.run.telemetry or comm.local_rank:
        return Telemetry(None)
    run.dir.mkdir(parents=True, exist_ok=True)  # a node may have a folder of its own there
    return Telemetry(run.telemetry(platform.node()))


def claim_run(config: Config, comm: Comm) -> RunFolder:
    """The run's folder and number, which rank 0 chooses."""
    folder = Path(config.run.dir)
    index = new_run(folder).index if comm.rank == 0 else 0
    return RunFolder(folder, comm.broadcast_number(index))


def _check_state(path: Path, state: checkpoint.State, plan: Plan, is_elastic: bool) -> None:
    """Raise CheckpointError where a checkpoint does not fit the ranks and the configuration."""
    facts = [('data.num_train', plan.config.data.num_train, state.num_train, 'use the same data')]
    if not is_elastic:
        facts += [('ranks', plan.world_size, state.world_size,
                   f'start {state.world_size} ranks, or give --elastic to go on with {plan.world_size}'),
                  ('train.global_batch_size', plan.global_batch_size, state.global_batch_size,
                   'leave the batch as it was')]
    for name, got, expected, fix in facts:
        if got != expected:
            raise CheckpointError(f'{path}: {name}: got {got}, the checkpoint has {expected}; {fix}')


class Program:
    """One run on one rank: what it works with, and its parts in the order they happen."""

    def __init__(self, plan: Plan, comm: Comm, run: RunFolder, log: RunLog, console: logging.Logger,
                 telemetry: Telemetry, stop: StopRequest, seed: int, position: Position):
        self.position = position
        self.lr_batch_size = plan.global_batch_size
        self.plan, self.config, self.comm, self.run, self.log = plan, plan.config, comm, run, log
        self.console, self.telemetry, self.stop, self.seed = console, telemetry, stop, seed
        self.is_first = comm.rank == 0
        self.device_id = device_id_of(self.config, comm)
        self.best_top1, self.num_resumes, self.train_s, self.num_images = 0.0, 0, 0.0, 0

    def run_to_end(self, state: checkpoint.State | None, checkpoint_path: Path | None) -> Outcome:
        """Initialisation (off the clock), then training to the end."""
        is_new = state is None
        if is_new:
            self._describe_run()
        self.trainer = self._build(is_new)
        self.position.now()
        self.first_step = 0
        if state is not None and checkpoint_path is not None:
            self._restore(state, checkpoint_path)
        if is_new:
            self.log.init_stop()
        self.comm.barrier()
        self.clock = Clock(state.clock_s if state else 0.0)
        self.telemetry.run_start(self.clock.now_s())
        if is_new:
            self.log.run_start()
        else:
            self._describe_resume()
        return self._train()

    def _describe_run(self) -> None:
        """The run's own files, and who runs it, before initialisation."""
        ranks_of_hosts = self._ranks_of_hosts()
        if self.is_first:
            write_atomically(self.run.config, render_yaml(self.config))
            dump_environment(self.run.env, ranks_of_hosts)
        self.log.submission(self.config)
        self.log.cache_clear(*self._clear_caches())

    def _describe_resume(self) -> None:
        """From where and with what a resumed run goes on."""
        now = {'number_of_ranks': self.plan.world_size, 'number_of_nodes': len(self._ranks_of_hosts()),
               'global_batch_size': self.plan.global_batch_size, 'lr_scale': self.plan.lr_scale}
        self.log.run_resumed(self.first_step, self.first_step // self.plan.steps_per_epoch, self.clock.now_s(), **now)
        self._metrics(event='resumed', step=self.first_step, **now)

    def _ranks_of_hosts(self) -> list[tuple[str, int]]:
        """Name and number of ranks of each node, nodes in the order of their first rank."""
        rows = [json.loads(t) for t in gather_texts(self.comm, json.dumps(
            [platform.node(), self.comm.local_rank, self.comm.local_size]))]
        return [(name, local_size) for name, local_rank, local_size in rows if local_rank == 0]

    def _clear_caches(self) -> tuple[bool, str]:
        """Flushes the page cache of every node if asked to; whether all of them did, and why not."""
        if not self.config.run.clear_caches:
            return False, 'not asked for (run.clear_caches)'
        problem = drop_page_cache() if self.comm.local_rank == 0 else None
        num_failed = self.comm.sum_counts([problem is not None])[0]
        if num_failed:
            self.console.warning('the page cache was not flushed: %s', problem or f'{num_failed} nodes could not')
            return False, problem or f'{num_failed} nodes could not (needs root)'
        return True, 'sync; echo 3 > /proc/sys/vm/drop_caches on every node'

    def _build(self, is_new: bool) -> Trainer:
        """Network and optimizer, equal on all ranks, and everything the log says of them."""
        if is_new:
            self.log.init_start()
            self.log.seed(self.seed)
            self.log.hyperparameters(self.config, self.plan.global_batch_size, self.plan.local_batch_size,
                                     self.plan.decay_steps,
                                     round(self.config.schedule.warmup_epochs * self.plan.steps_per_epoch))
        trainer = Trainer(self.plan, self.comm, self.seed, self.device_id)
        trainer.broadcast()
        if is_new:
            self.log.model(describe(self.config), trainer.tensor_names)
            self._introduce(trainer)
        mx.nd.waitall()
        return trainer

    def _introduce(self, trainer: Trainer) -> None:
        self.console.info('%s -> %s', self.config.data.dataset, self.run.result)
        self.console.info('%s: %s parameters, %.2f GFLOP per image; %d ranks x %d = global batch %d; '
                          'seed %d', self.config.model.name, f'{count_parameters(trainer.net):,}',
                          count_flops(trainer.net, image_shape(self.config)) / 1e9, self.plan.world_size,
                          self.plan.global_batch_size // self.plan.world_size, self.plan.global_batch_size, self.seed)

    def _restore(self, state: checkpoint.State, path: Path) -> None:
        """Goes back to a checkpoint, which only rank 0 needs to see."""
        arrays = None
        if self.is_first:
            arrays = checkpoint.load_arrays(path)
            checkpoint.check_arrays(path, arrays, self.trainer.array_shapes(state.world_size))
        self.trainer.restore(arrays)
        plan = self.plan
        self.first_step = resumed_step(plan, state.step, state.global_batch_size)
        self.best_top1, self.num_resumes, self.lr_batch_size = (state.best_top1, state.num_resumes + 1,
                                                                state.lr_batch_size)
        self.trainer.optimizer.last_lr = plan.learning_rate(self.first_step - 1) if self.first_step else None
        self.console.info('resumed from %s at step %d; this log can no longer be submitted', path, self.first_step)
        if plan.world_size != state.world_size:
            self.console.info('planned again: %d ranks (before: %d), global batch %d (before: %d), '
                              'learning rate times %.4g', plan.world_size, state.world_size, plan.global_batch_size,
                              state.global_batch_size, plan.lr_scale)

    def _train(self) -> Outcome:
        """Epoch after epoch, until the target is reached or the run ends otherwise."""
        plan = self.plan
        self.train_data = train_batches(self.config, plan.train_shard(self.comm.rank), self.seed, self.first_step,
                                        self.device_id)
        self.eval_data = eval_batches(self.config, plan.eval_shard(self.comm.rank), self.device_id)
        if not self.num_resumes:
            self.log.data(self.config, self.comm.world_size, len(self._ranks_of_hosts()))
        self.block = -1
        self.position.now('training', self.first_step)
        for epoch in range(self.first_step // plan.steps_per_epoch, plan.max_epochs):
            is_interrupted = self._train_epoch(epoch)
            if is_interrupted:
                return self._finish('interrupted', None)
            if plan.is_eval_epoch(epoch) and self._evaluate(epoch).top1 >= self.config.train.target_accuracy:
                return self._finish('converged', epoch + 1)
            step = (epoch + 1) * plan.steps_per_epoch
            is_asked = self._any_asked_to_stop()
            if is_asked or self._is_checkpoint_due(step):
                self._save(step)
            if is_asked and epoch + 1 < plan.max_epochs:
                return self._finish('interrupted', None)
        return self._finish('aborted', None)

    def _train_epoch(self, epoch: int) -> bool:
        """The steps of an epoch; True if the run was asked to stop in the middle of it (a checkpoint is written)."""
        plan, pulses = self.plan, deque[tuple[int, mx.nd.NDArray]]()
        if self.block < 0:
            self.block = epoch
            self.log.block_start(epoch, plan.block_epochs(epoch))
        self.log.epoch_start(epoch)
        begin, end = max(self.first_step, epoch * plan.steps_per_epoch), (epoch + 1) * plan.steps_per_epoch
        shown = EpochProgress(self.console, epoch, plan.steps_per_epoch, begin % plan.steps_per_epoch, self.is_first)
        meter = Meter(plan.global_batch_size)
        try:
            for step in range(begin, end):
                pulse = self.trainer.step(self.train_data, step % plan.steps_per_epoch, plan.learning_rate(step),
                                          self.stop.is_set)
                pulses.append((step, pulse))
                is_asked = False
                while len(pulses) > (STEPS_AHEAD if step < end - 1 else 0):
                    is_asked |= self._read_pulse(*pulses.popleft(), shown, meter)
                # At the last step, the end of the epoch handles both.
                if step < end - 1 and (is_asked or self._is_step_checkpoint_due(step + 1)):
                    self._save(step + 1)
                    if is_asked:
                        return True
        finally:
            shown.close()
        self.trainer.settle()  # clocks are read when the work is done, not when it is ordered
        elapsed_s = meter.elapsed_s()
        self.train_s += elapsed_s
        num_images = plan.config.data.num_train - (begin % plan.steps_per_epoch) * plan.global_batch_size
        self.num_images += num_images
        self.log.epoch_stop(epoch, num_images / elapsed_s, plan.learning_rate(end - 1))
        return False

    def _read_pulse(self, step: int, pulse: mx.nd.NDArray, shown: EpochProgress, meter: 'Meter') -> bool:
        """Waits for a step's loss and reports it; whether any rank was asked to stop by then."""
        loss, num_asked = (float(v) for v in pulse.asnumpy())
        plan = self.plan
        if not math.isfinite(loss):
            raise RunFailed(f'the loss is {loss} at step {step} (epoch {step // plan.steps_per_epoch + 1}), the steps '
                            f'before it were finite; lower schedule.base_lr={self.config.schedule.base_lr} or '
                            'lengthen schedule.warmup_epochs')
        meter.add(loss)
        self.position.now('training', step + 1)
        lr = plan.learning_rate(step)
        shown.update(loss, lr, meter.images_per_s())
        if (step + 1) % self.config.run.metrics_period_steps == 0:
            self._metrics(event='train', step=step + 1, epoch=(step + 1) / plan.steps_per_epoch,
                          time_s=self.clock.now_s(), loss=meter.take_mean_loss(), learning_rate=lr,
                          images_per_s=meter.images_per_s())
        return num_asked > 0

    def _evaluate(self, epoch: int) -> Accuracy:
        """Evaluates after an epoch, and ends the block."""
        self.position.now('evaluation')
        self.log.eval_start(epoch)
        self.trainer.average_statistics()
        data = self.config.data
        result = evaluate(self.trainer.net, self.eval_data(), data.num_val, self.comm, self.position.now)
        self.log.eval_stop(epoch, result.top1)
        self.log.block_stop(self.block)
        self.block = -1
        self.best_top1 = max(self.best_top1, result.top1)
        self._metrics(event='eval', epoch=epoch + 1, time_s=self.clock.now_s(), num_top1=result.num_top1,
                      num_top5=result.num_top5, num_images=result.num_images, dataset=data.dataset)
        self.console.info('epoch %d  Top-1 %.2f %%  Top-5 %.2f %%  of %d images (%s%s)  target %.2f %%  %.0f s',
                          epoch + 1, 100 * result.top1, 100 * result.top5, result.num_images, data.dataset,
                          ', synthetic' if data.synthetic else '', 100 * self.config.train.target_accuracy,
                          self.clock.now_s())
        return result

    def _any_asked_to_stop(self) -> bool:
        return self.comm.sum_counts([self.stop.is_set])[0] > 0

    def _is_step_checkpoint_due(self, step: int) -> bool:
        period = self.config.checkpoint.period_steps
        return bool(period) and step % period == 0

    def _is_checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint follows the end of an epoch that ends with a step (from 1)."""
        period = self.config.checkpoint.period_epochs
        epoch_is_due = bool(period) and step // self.plan.steps_per_epoch % period == 0
        return epoch_is_due or self._is_step_checkpoint_due(step)

    def _save(self, step: int) -> None:
        """Writes a checkpoint after a step (from 1)."""
        self.position.now('writing a checkpoint')
        arrays = self.trainer.snapshot()
        if self.is_first:
            state = checkpoint.State(step, self.seed, self.comm.world_size, self.best_top1, self.clock.now_s(),
                                     self.plan.global_batch_size, self.lr_batch_size, self.config.data.num_train,
                                     self.run.index, self.num_resumes)
            checkpoint.save(self.run.checkpoints, state, arrays, self.config.checkpoint.keep)
        self.position.now('training')

    def _metrics(self, **values: object) -> None:
        if self.is_first:
            self.run.append_metrics(**values)

    def give_up(self) -> None:
        """The end of a run that cannot go on, in the log."""
        self.log.run_stop('failed')
        self._metrics(event='end', status='failed', epochs_to_converge=None)

    def _finish(self, status: str, epochs_to_converge: int | None) -> Outcome:
        """The end of the run, in the log and on the screen."""
        time_s = self.clock.now_s()
        self.log.run_stop(status)
        outcome = Outcome(status, epochs_to_converge, time_s, self.best_top1,
                          self.num_images / self.train_s if self.train_s else 0.0, self.run)
        self._metrics(event='end', status=status, epochs_to_converge=epochs_to_converge, time_to_train_s=time_s,
                      best_top1=self.best_top1, images_per_s=outcome.images_per_s)
        self.console.info('%s after %.1f s, best Top-1 %.2f %% on %s', status, time_s, 100 * self.best_top1,
                          self.config.data.dataset)
        return outcome


class Meter:
    """Mean loss since the last report, and throughput over the epoch so far."""

    def __init__(self, global_batch_size: int):
        self._batch, self._start = global_batch_size, time.monotonic()
        self._losses: list[float] = []
        self._num_steps = 0

    def add(self, loss: float) -> None:
        self._losses.append(loss)
        self._num_steps += 1

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def images_per_s(self) -> float:
        return self._num_steps * self._batch / self.elapsed_s()

    def take_mean_loss(self) -> float:
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        return mean


def device_id_of(config: Config, comm: Comm) -> int | None:
    """The GPU of this rank: run.ranks_per_device neighbours share one."""
    if config.train.device == 'cpu':
        return None
    num_gpus = mx.context.num_gpus()
    if not num_gpus:
        raise ConfigError('train.device: got gpu, and MXNet sees none; install a cu112 or cu117 build and its driver, '
                          'or set train.device=cpu')
    device_id = comm.local_rank // config.run.ranks_per_device
    if device_id >= num_gpus:
        raise ConfigError(f'run.ranks_per_device: got {config.run.ranks_per_device} with {comm.local_size} ranks on a '
                          f'node of {num_gpus} GPUs, expected at least {-(-comm.local_size // num_gpus)}')
    return device_id


def render_outcome(outcome: Outcome, config: Config) -> str:
    """How a run ended, with its data set wherever an accuracy stands."""
    data, train_ = config.data, config.train
    name = data.dataset + (', synthetic images' if data.synthetic else '')
    if data.dataset != IMAGENET:
        name += ' (not ImageNet)'
    end = {'converged': 'converged', 'aborted': 'aborted: the target was not reached',
           'interrupted': f'interrupted; go on with: mlperf-rn50 train --resume {outcome.run.dir}'}[outcome.status]
    epochs = 'none' if outcome.epochs_to_converge is None else str(outcome.epochs_to_converge)
    return '\n'.join([
        f'status              {end}',
        f'best Top-1          {100 * outcome.best_top1:.2f} % on {name}, target {100 * train_.target_accuracy:.2f} %',
        f'epochs to converge  {epochs}',
        f'time to train       {outcome.time_to_train_s:.1f} s{"" if outcome.epochs_to_converge else " so far"}',
        f'throughput          {outcome.images_per_s:.0f} images/s in training',
        f'log                 {outcome.run.result}',
        f'beside it           {", ".join(p.name for p in (outcome.run.config, outcome.run.metrics, outcome.run.env))}, '
        f'{outcome.run.train_log.name}'])
