"""Output of rank 0: a progress bar per epoch, or lines if stderr is not a terminal. All lines also
go to train.log."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from tqdm import tqdm

from mlperf_rn50.config import Config
from mlperf_rn50.files import LineFile
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.system.launcher_env import print_stderr
from mlperf_rn50.text import plural, printable, some
from mlperf_rn50.train import run_events as events

_PLAIN_PERIOD_S = 30.0  # time between two progress lines if stderr is not a terminal


class ProgressLines:
    def __init__(self, run: RunFolder, config: Config):
        self._run, self._file = run, LineFile(run.train_log)
        self._bar: EpochBar | None = None
        self._dataset = config.data.dataset + (', synthetic' if config.data.synthetic else '')
        self._target = config.train.target_accuracy

    def handle(self, event: events.Event) -> None:
        match event:
            case events.Built():
                self._introduce(event)
            case events.Resumed():
                self._report_resume(event)
            case events.EpochStarted(epoch=epoch, num_steps=num_steps):
                self._bar = EpochBar(self._print, epoch, num_steps, event.first_step % num_steps)
            case events.StepDone():
                if self._bar:
                    self._bar.update(event)
            case events.EpochDone():
                self._end_bar()
            case events.Evaluated(accuracy=accuracy):
                self._print(
                    f'epoch {event.epoch + 1}  Top-1 {100 * accuracy.top1:.2f} %  Top-5 '
                    f'{100 * accuracy.top5:.2f} %  of {accuracy.num_images} images '
                    f'({self._dataset})  target {100 * self._target:.2f} %  {event.time_s:.0f} s'
                )
            case events.LossScaleChanged(record=change):
                when = f'step {change.step}' if change.step else 'the warm-up'
                self._print(f'loss scale {change.before:g} -> {change.now:g} after {when}')
            case events.Noted():
                self._print(event.text)
            case events.ReferenceFound() | events.Compared():
                self._print(event.record.text)
            case events.RanksTimed():
                for text in event.record.stragglers:
                    self._print(text)
            case events.ClockStepped(record=jump):
                self._print(
                    f'the wall clock of {jump.host} jumped by {jump.step_s:+.1f} s during the run '
                    '(set, or the machine was suspended); times follow the monotonic clock'
                )
            case events.Ended():
                self._end_bar()
                if event.status == 'failed':  # the error message goes to the terminal
                    self._file.write(_timed(f'failed: {event.reason}'))
                    return
                parts = f' (resumed: {event.parts.text})' if event.parts else ''
                self._print(
                    f'{event.status} after {event.time_s:.1f} s{parts}, best Top-1 '
                    f'{event.best_text} on {self._dataset}'
                )

    def _print(self, text: str) -> None:
        line = _timed(text)
        with suppress(OSError):  # the terminal may be gone
            print_stderr(line)
        self._file.write(line)

    def _introduce(self, event: events.Built) -> None:
        plan, config = event.plan, event.plan.config
        mean = ' (mean of data.sizes)' if config.data.sizes else ''
        self._print(f'{config.data.dataset} -> {self._run.result}')
        self._print(
            f'{config.model.name}: {event.num_parameters:,} parameters, '
            f'{event.flops_per_image / 1e9:.2f} GFLOP per image{mean}; '
            f'{plural(plan.world_size, "rank")} x {plan.global_batch_size // plan.world_size} = '
            f'global batch {plan.global_batch_size}; seed {event.seed}'
        )
        configured = config.world_size
        if configured not in (None, plan.world_size):  # with --elastic
            self._print(
                f'{plan.world_size} of {configured} configured ranks: learning rate times '
                f'{plan.lr_scale:.4g}'
            )
        if event.initial_weights:
            self._print('; '.join([f'starts from {event.initial_weights}', *event.notes]))

    def _report_resume(self, event: events.Resumed) -> None:
        plan, before = event.plan, event.before
        self._print(
            f'resumed from {event.checkpoint} at step {event.step}, {event.elapsed_s:.1f} s after '
            'run_start; MLPerf does not accept the log of a resumed run'
        )
        if event.parts:
            self._print(f'time since run_start: {event.parts.text}')
        if plan.world_size != before.world_size:
            hosts = some([name for name, _ in event.hosts], 8)
            self._print(
                f'new plan: {plural(plan.world_size, "rank")} (before: {before.world_size}) on '
                f'{hosts}, '
                f'global batch {plan.global_batch_size} (before: {before.global_batch_size}), '
                f'learning rate times {plan.lr_scale:.4g}'
            )
        if event.changes:
            self._print(f'changed: {", ".join(map(str, event.changes))}')

    def _end_bar(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        self._end_bar()
        self._file.close()


class EpochBar:
    """Progress of one epoch, numbered from 0 here but from 1 in the output; first_step: steps done
    before a resume."""

    def __init__(self, write: Callable[[str], None], epoch: int, num_steps: int, first_step: int):
        self._write, self._name, self._num_steps = write, f'epoch {epoch + 1}', num_steps
        self._is_plain = not sys.stderr.isatty()
        self._done, self._first = first_step, first_step
        self._start = self._last_line = time.monotonic()
        self.bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc=self._name,
            unit='step',
            leave=False,
            dynamic_ncols=True,
            disable=self._is_plain,
        )

    def update(self, step: events.StepDone) -> None:
        self._done += 1
        rate, loss, lr = f'{step.images_per_s:.0f}', f'{step.loss:.3f}', f'{step.learning_rate:.4g}'
        self.bar.set_postfix_str(f'{rate} img/s, loss {loss}, lr {lr}', refresh=False)
        self.bar.update()
        now, num_left = time.monotonic(), self._num_steps - self._done
        if self._is_plain and num_left and now - self._last_line >= _PLAIN_PERIOD_S:
            self._last_line = now
            left_s = (now - self._start) / (self._done - self._first) * num_left
            self._write(
                f'{self._name}  step {self._done}/{self._num_steps}  {rate} img/s  loss {loss}  '
                f'lr {lr}  {left_s:.0f} s left in the epoch'
            )

    def close(self) -> None:
        self.bar.close()


def _timed(text: str) -> str:
    return f'{time.strftime("%H:%M:%S")} {printable(text)}'
