"""Output of rank 0: a progress bar per epoch, or lines if stderr is not a terminal. All lines also go to train.log."""
import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

from mlperf_rn50.config import Config
from mlperf_rn50.files import LineHandler
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.train import events

_PLAIN_PERIOD_S = 30.0  # time between two progress lines if stderr is not a terminal


def _open_console(log_path: Path) -> logging.Logger:
    logger = logging.getLogger('mlperf_rn50.train')
    logger.handlers[:] = []
    logger.propagate = False
    logger.setLevel(logging.INFO)
    formatter = logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S')
    for handler in (logging.StreamHandler(sys.stderr), LineHandler(log_path)):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    return logger


class Terminal:
    def __init__(self, run: RunFolder, config: Config):
        self._run, self._console = run, _open_console(run.train_log)
        self._epoch: EpochProgress | None = None
        self._dataset = config.data.dataset + (', synthetic' if config.data.synthetic else '')
        self._target = config.train.target_accuracy

    def handle(self, event: events.Event) -> None:
        info = self._console.info
        match event:
            case events.Built():
                self._introduce(event)
            case events.Resumed():
                self._report_resume(event)
            case events.EpochStarted():
                first_step = event.first_step % event.num_steps
                self._epoch = EpochProgress(self._console, event.epoch, event.num_steps, first_step)
            case events.StepDone():
                if self._epoch:
                    self._epoch.update(event.loss, event.learning_rate, event.images_per_s)
            case events.EpochDone():
                self._end_bar()
            case events.Evaluated():
                accuracy = event.accuracy
                info('epoch %d  Top-1 %.2f %%  Top-5 %.2f %%  of %d images (%s)  target %.2f %%  %.0f s',
                     event.epoch + 1, 100 * accuracy.top1, 100 * accuracy.top5, accuracy.num_images, self._dataset,
                     100 * self._target, event.time_s)
            case events.LossScaleChanged():
                info('loss scale %g -> %g after %s', event.before, event.now,
                     f'step {event.step}' if event.step else 'the warm-up')
            case events.Noted():
                info('%s', event.text)
            case events.ReferenceFound():
                info('%s', event.record.text)
            case events.Compared():
                (self._console.warning if event.is_new else info)('%s', event.record.text)
            case events.RanksTimed():
                for text in event.stragglers:
                    self._console.warning('%s', text)
            case events.ClockStepped():
                self._console.warning('the wall clock of %s jumped by %+.1f s during the run (set, or the machine was '
                                      'suspended); times follow the monotonic clock', event.host, event.step_s)
            case events.Warned():
                self._console.warning('%s', event.text)
            case events.Ended():
                self._end_bar()
                if event.status != 'failed':  # the error message reports a failure
                    info('%s after %.1f s, best Top-1 %.2f %% on %s', event.status, event.time_s,
                         100 * event.best_top1, self._dataset)

    def _introduce(self, event: events.Built) -> None:
        plan = event.plan
        self._console.info('%s -> %s', plan.config.data.dataset, self._run.result)
        self._console.info('%s: %s parameters, %.2f GFLOP per image; %d ranks x %d = global batch %d; seed %d',
                           plan.config.model.name, f'{event.num_parameters:,}', event.flops_per_image / 1e9,
                           plan.world_size, plan.global_batch_size // plan.world_size, plan.global_batch_size,
                           event.seed)
        if event.initial_weights:
            self._console.info('%s', '; '.join([f'starts from {event.initial_weights}', *event.notes]))

    def _report_resume(self, event: events.Resumed) -> None:
        plan = event.plan
        self._console.info('resumed from %s at step %d; this log can no longer be submitted', event.checkpoint,
                           event.step)
        if plan.world_size != event.world_size_before:
            self._console.info('new plan: %d ranks (before: %d), global batch %d (before: %d), '
                               'learning rate times %.4g', plan.world_size, event.world_size_before,
                               plan.global_batch_size, event.batch_before, plan.lr_scale)
        if event.changes:
            self._console.info('changed: %s', ', '.join(map(str, event.changes)))

    def _end_bar(self) -> None:
        if self._epoch:
            self._epoch.close()
            self._epoch = None

    def close(self) -> None:
        self._end_bar()
        for handler in self._console.handlers:
            handler.close()


class EpochProgress:
    """Progress of one epoch, numbered from 0 here but from 1 in the output; first_step: steps done before a resume."""

    def __init__(self, console: logging.Logger, epoch: int, num_steps: int, first_step: int):
        self._console, self._epoch, self._num_steps = console, epoch, num_steps
        self._is_plain = not sys.stderr.isatty()
        self._done, self._first = first_step, first_step
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm(total=num_steps, initial=first_step, desc=f'epoch {epoch + 1}', unit='step', leave=False,
                         dynamic_ncols=True, disable=self._is_plain)

    def update(self, loss: float, lr: float, images_per_s: float) -> None:
        self._done += 1
        self._bar.set_postfix_str(f'{images_per_s:.0f} img/s, loss {loss:.3f}, lr {lr:.4g}', refresh=False)
        self._bar.update()
        now = time.monotonic()
        if self._is_plain and now - self._last_line >= _PLAIN_PERIOD_S and self._done < self._num_steps:
            self._last_line = now
            left_s = (now - self._start) / (self._done - self._first) * (self._num_steps - self._done)
            self._console.info('epoch %d  step %d/%d  %.0f img/s  loss %.3f  lr %.4g  %.0f s left in the epoch',
                               self._epoch + 1, self._done, self._num_steps, images_per_s, loss, lr, left_s)

    def close(self) -> None:
        self._bar.close()
