"""The training loop with a made-up trainer: stops within an epoch."""
from types import SimpleNamespace
from typing import Any

import pytest

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.train import events, loop
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.options import CheckpointConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan


class MadeUpTrainer:
    """Trainer whose results contain a stop request from a step on, counted from 0; it lists the steps read."""

    def __init__(self, stops_at):
        self.timer = SimpleNamespace(start=lambda: None)
        self._stops_at, self._num_pushed, self.read_steps = stops_at, 0, []

    def step(self, *_):
        self._num_pushed += 1
        return SimpleNamespace(step=self._num_pushed - 1, norms=None)

    def read(self, pending):
        self.read_steps.append(pending.step)
        return 1.0, pending.step >= self._stops_at

    def settle(self):
        pass


def train_epoch(monkeypatch, stops_at, period_steps, last_batch='weight'):
    """Train an epoch of ten steps of 8 images, the last with 4; return its result, the run, and the steps saved."""
    config = Config(data=DataConfig(num_train=76, last_batch=last_batch), train=TrainConfig(local_batch_size=8),
                    checkpoint=CheckpointConfig(period_steps=period_steps))
    progress = Progress(step=0, seed=1, world_size=1, best_top1=0.0, clock_s=0.0, global_batch_size=8, lr_batch_size=8,
                        num_train=76, result_index=0, nodes=[0])
    handled: list[events.Event] = []
    run: Any = SimpleNamespace(
        plan=make_plan(config, 1), progress=progress, trainer=MadeUpTrainer(stops_at), train_data=None,
        sinks=SimpleNamespace(handle=handled.append, handled=handled), writer=SimpleNamespace(check=lambda: None),
        position=SimpleNamespace(is_stop_requested=False), now_s=lambda: 0.0)
    saved: list[tuple[int, int]] = []
    monkeypatch.setattr(loop, 'save', lambda run: saved.append((progress.step, len(run.trainer.read_steps))))
    return loop.train_epoch(run, 0, is_block_start=True), run, saved


@pytest.mark.parametrize('stops_at, period_steps, expected', [
    (2, 0, [5]),     # read when STEPS_AHEAD further steps are pushed
    (3, 4, [4]),     # read before the checkpoint of step 4
    (5, 4, [4, 8]),  # read in the step of the next checkpoint
])
def test_stop_within_an_epoch_saves_once_and_its_images_count(monkeypatch, stops_at, period_steps, expected):
    is_stopped, run, saved = train_epoch(monkeypatch, stops_at, period_steps)
    assert is_stopped and saved == [(step, step) for step in expected]
    assert run.progress.images == 8 * expected[-1] and run.progress.train_s > 0


@pytest.mark.parametrize('last_batch, images, factor', [('weight', 76, 0.5), ('wrap', 80, 1)])
def test_complete_epoch_counts_each_image_and_reports_applied_rates(monkeypatch, last_batch, images, factor):
    is_stopped, run, saved = train_epoch(monkeypatch, 99, 4, last_batch)
    assert not is_stopped and saved == [(4, 4), (8, 8)] and run.trainer.read_steps == list(range(10))
    assert run.progress.images == images and run.progress.images_per_s > 0
    rates = [e.learning_rate for e in run.sinks.handled if isinstance(e, events.StepDone)]
    assert rates == pytest.approx([run.plan.learning_rate(s) * (factor if s == 9 else 1) for s in range(10)])
