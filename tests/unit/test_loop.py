"""The training loop with a made-up trainer: stops, checkpoints, changes of the loss scale, bytes
read by each host."""

import time
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from mlperf_rn50.config import Config, RunConfig
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train import events, loop
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_checks import WallClock
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.options import CheckpointConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.schedule import LossScale


class MadeUpTimes:
    """Times of a rank that gets a request for a trace with a report; it lists the calls of
    trace()."""

    def __init__(self, requested_at):
        self.request, self._requested_at, self._num_reports, self.traces = (
            False,
            requested_at,
            0,
            [],
        )

    def find_request(self):
        self._num_reports += 1
        self.request = self._num_reports == self._requested_at

    def trace(self, num_steps):
        self.traces.append(num_steps)


class MadeUpTrainer:
    """Trainer that applies half the learning rate and gets a stop request from a step on; it lists
    the steps read."""

    def __init__(self, stops_at, overflows_at):
        self.loss_scale, self._overflows_at = LossScale(1024.0), overflows_at
        self.timer = SimpleNamespace(start=lambda step: None)
        self.ema = SimpleNamespace(update=lambda step: None)
        self._stops_at, self._num_pushed, self.read_steps = stops_at, 0, []

    def step(self, *arguments):
        self._num_pushed += 1
        _, _, rate, requests, _ = arguments
        return SimpleNamespace(
            step=self._num_pushed - 1, norms=None, learning_rate=rate / 2, requests=requests
        )

    def read(self, pending):
        self.read_steps.append(pending.step)
        self.loss_scale.read(self.loss_scale.value, pending.step != self._overflows_at)
        return 1.0, replace(pending.requests, stop=pending.step >= self._stops_at)

    def settle(self):
        pass


def train_epoch(
    monkeypatch,
    stops_at,
    period_steps=0,
    period_s=0.0,
    overflows_at=None,
    last_batch='weight',
    requested_at=None,
):
    """Train an epoch of ten steps of 1 s and 8 images, the last with 4; return its result, the run
    and steps saved."""
    config = Config(
        data=DataConfig(num_train=76, last_batch=last_batch),
        train=TrainConfig(local_batch_size=8),
        checkpoint=CheckpointConfig(period_steps=period_steps, period_s=period_s),
        run=RunConfig(metrics_period_steps=2),
    )
    progress = Progress(
        step=0,
        seed=1,
        world_size=1,
        best_top1=0.0,
        clock_s=0.0,
        global_batch_size=8,
        lr_batch_size=8,
        num_train=76,
        result_index=0,
        nodes=[0],
    )
    handled: list[events.Event] = []
    run: Any = SimpleNamespace(
        plan=make_plan(config, 1),
        progress=progress,
        trainer=MadeUpTrainer(stops_at, overflows_at),
        train_data=None,
        emit=handled.append,
        handled=handled,
        comm=Comm(),
        times=MadeUpTimes(requested_at),
        writer=SimpleNamespace(check=lambda: None),
        heartbeat=SimpleNamespace(is_stop_requested=False),
        now_s=lambda: float(progress.step),
        trained_s=lambda: float(progress.step),
    )
    run.requests = partial(loop.TrainingRun.requests, run)
    saved: list[tuple[int, int]] = []

    def save(run):
        saved.append((progress.step, len(run.trainer.read_steps)))
        progress.clock_s = run.now_s()

    monkeypatch.setattr(loop, 'save_checkpoint', save)
    return loop.train_epoch(run, 0, is_block_start=True), run, saved


@pytest.mark.parametrize(
    'stops_at, period_steps, expected',
    [
        (2, 0, [5]),  # read when STEPS_AHEAD further steps are pushed
        (3, 4, [4]),  # read before the checkpoint of step 4
        (5, 4, [4, 8]),  # read in the step of the next checkpoint
    ],
)
def test_stop_within_an_epoch_saves_once_and_its_images_count(
    monkeypatch, stops_at, period_steps, expected
):
    is_stopped, run, saved = train_epoch(monkeypatch, stops_at, period_steps)
    assert is_stopped and saved == [(step, step) for step in expected]
    assert run.progress.images == 8 * expected[-1] and run.progress.train_s > 0


def test_requested_trace_starts_once_on_all_ranks(monkeypatch):
    """The request is found when step 4 is read, after the push of step 6, and is in the exchange of
    step 7."""
    _, run, _ = train_epoch(monkeypatch, 99, requested_at=2)
    assert run.times.traces == [False] * 8 + [True, False]


@pytest.mark.parametrize('last_batch, images', [('weight', 76), ('wrap', 80)])
def test_complete_epoch_counts_each_image_and_reports_applied_rates(
    monkeypatch, last_batch, images
):
    is_stopped, run, saved = train_epoch(monkeypatch, 99, 4, last_batch=last_batch)
    assert (
        not is_stopped and saved == [(4, 4), (8, 8)] and run.trainer.read_steps == list(range(10))
    )
    assert run.progress.images == images and run.progress.images_per_s > 0
    rates = [e.learning_rate for e in run.handled if isinstance(e, events.StepDone)]
    assert rates == [run.plan.learning_rate(s) / 2 for s in range(10)]


@pytest.mark.parametrize('problem', [None, 'differing ranks', 'a weight that is not finite'])
def test_clock_stops_when_the_target_is_detected_and_checks_still_decide(monkeypatch, problem):
    clock_s, handled = count(), []

    def check(*_, is_failing=False):
        if is_failing:
            raise RunFailed(problem)

    for name, function in {
        'train_epoch': lambda *_, is_block_start: False,
        'report_reads': check,
        'report_clock_steps': check,
        'evaluate': lambda *_: Accuracy(8, 8, 10),
        'check_agreement': partial(check, is_failing=problem == 'differing ranks'),
        'check_finite': partial(check, is_failing=bool(problem and 'finite' in problem)),
        'write_networks': check,
    }.items():
        monkeypatch.setattr(loop, name, function)
    config = Config(
        data=DataConfig(num_train=80, num_val=10), train=TrainConfig(local_batch_size=8)
    )
    run: Any = Mock(
        plan=make_plan(config, 1),
        progress=Mock(step=0, best_top1=0.0, images_per_s=1.0),
        emit=handled.append,
        now_s=lambda: float(next(clock_s)),
        resumes=(),
    )
    run.trainer = MagicMock()
    run.comm.rank = 0
    run.comparison.compare.side_effect = lambda *_: handled.append(run.now_s())
    if problem:
        with pytest.raises(RunFailed, match=problem):
            loop.run_to_end(run)
    else:
        loop.run_to_end(run)
    (evaluated,) = (e for e in handled if isinstance(e, events.Evaluated))
    ended = handled[-1]
    assert ended.status == ('failed' if problem else 'converged')
    assert problem or (ended.time_s, ended.epochs_to_converge) == (
        evaluated.time_s,
        evaluated.epoch + 1,
    )


def test_change_of_the_loss_scale_is_reported_once_with_its_step(monkeypatch):
    _, run, _ = train_epoch(monkeypatch, stops_at=99, period_steps=0, overflows_at=5)
    assert [e for e in run.handled if isinstance(e, events.LossScaleChanged)] == [
        events.LossScaleChanged(step=6, before=1024.0, now=512.0)
    ]


@pytest.mark.parametrize(
    'period_s, period_steps, expected',
    [
        # due at the push of step 3, read two steps later; then due at step 9, the last of the epoch
        (3.0, 0, [6]),
        (1.5, 0, [5]),  # then due at step 7, read after the last step
        (4.0, 3, [3, 6, 9]),  # any checkpoint starts the period again
    ],
)
def test_checkpoint_is_saved_once_per_period_in_seconds(
    monkeypatch, period_s, period_steps, expected
):
    is_stopped, _, saved = train_epoch(monkeypatch, 99, period_steps, period_s)
    assert not is_stopped and saved == [(step, step) for step in expected]


def test_jump_of_a_hosts_wall_clock_is_reported_once(monkeypatch):
    now_s = 1.6e9
    monkeypatch.setattr(time, 'time', lambda: now_s + time.monotonic())
    handled: list[events.Event] = []
    hosts = [loop.RankPlace(name, 0, 1, '0') for name in ('h0', 'h1')]
    run: Any = SimpleNamespace(
        hosts=hosts,
        wall_clock=WallClock(),
        emit=handled.append,
        comm=SimpleNamespace(rank=0, gather_object=lambda own, only_on_rank_0: [own, ['h1', 0.9]]),
    )
    loop.report_clock_steps(run)
    now_s -= 3.0
    for _ in range(2):
        loop.report_clock_steps(run)
    assert [
        (e.host, round(e.step_s, 3)) for e in handled if isinstance(e, events.ClockStepped)
    ] == [('h0', -3.0)]
