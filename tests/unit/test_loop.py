"""The training loop: stops, checkpoints, requests for a trace, and the end of a run."""

import time
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import mxnet as mx
import pytest
from helpers import json_table
from tiny import tiny_config, tiny_run

from mlperf_rn50.errors import (
    CheckpointError,
    DataError,
    NonFiniteState,
    RunFailed,
    StorageError,
)
from mlperf_rn50.runfolder.names import list_checkpoints, step_of
from mlperf_rn50.runfolder.records import EpochRecord, LossScaleRecord
from mlperf_rn50.train import loop
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.loop import RankPlace, report_reads, train_to_end
from mlperf_rn50.train.plan import Plan
from mlperf_rn50.train.schedule import LossScale

pytestmark = pytest.mark.usefixtures('thin_resnets')
CONFIG = tiny_config(num_images=76)  # ten steps, the last with half a batch


class StepClock(loop.RunClock):
    """Clock on which each pushed step takes a second; start_s: the progress of the run."""

    def now_s(self):
        return float(self.start_s.step)


def saved_by(run, recorder) -> list[int]:
    """Return the steps of the checkpoints, each taken after the report of its last step."""
    reported, step = [], 0
    for event in recorder.events:
        step = event.step if isinstance(event, events.StepDone) else step
        reported += [step] * isinstance(event, events.Saving)
    assert [step_of(p) for p in list_checkpoints(run.folder.checkpoints)] == reported
    return reported


@pytest.mark.parametrize(
    'asked_at, period_steps, expected',
    json_table("""
# The request is in the exchange of the next step that is pushed, STEPS_AHEAD further ones
# before it is read.
2 | 0 | [7]
1 | 6 | [6]  # read before the checkpoint of step 6
3 | 4 | [4, 7]
"""),
)
def test_stop_within_an_epoch_saves_once_and_its_images_count(
    tmp_path, asked_at, period_steps, expected
):
    def ask(event, run):
        if isinstance(event, events.StepDone) and event.step == asked_at:
            run.heartbeat.request_stop()

    with tiny_run(tmp_path, CONFIG, ask, period_steps=period_steps) as (run, recorder):
        assert train_to_end(run).status == 'interrupted'
    assert saved_by(run, recorder) == expected
    assert run.progress.images == 8 * expected[-1] and run.progress.train_s > 0


def test_checkpoint_in_progress_is_completed_before_an_error_ends_the_run(tmp_path, monkeypatch):
    save = loop.checkpoint.save

    def save_slowly(*args):
        time.sleep(0.3)
        return save(*args)

    def fail(event, run):
        if isinstance(event, events.StepDone) and event.step == 6:
            raise DataError('a file has vanished')

    monkeypatch.setattr(loop.checkpoint, 'save', save_slowly)
    with tiny_run(tmp_path, CONFIG, fail, period_steps=4) as (run, recorder):
        with pytest.raises(DataError):
            train_to_end(run)
    assert saved_by(run, recorder) == [4]


@pytest.mark.parametrize('period_steps, status, code', [(4, 'failed', 1), (0, 'interrupted', 2)])
def test_run_with_weights_that_are_not_finite_ends_once(
    tmp_path, monkeypatch, period_steps, status, code
):
    """A checkpoint finds them during the training, or after a stop request."""

    def stop(event, run):
        if isinstance(event, events.StepDone) and event.step == 2 and not period_steps:
            run.heartbeat.request_stop()

    monkeypatch.setattr(loop.checkpoint, 'save', Mock(side_effect=NonFiniteState('not finite')))
    with tiny_run(tmp_path, CONFIG, stop, period_steps=period_steps) as (run, recorder):
        with pytest.raises(CheckpointError, match='not finite') as e:
            train_to_end(run)
    assert [x.status for x in recorder.events if isinstance(x, events.Ended)] == [status]
    assert e.value.exit_code == code


def test_failed_run_writes_nothing_into_the_folder_of_a_lost_mount(tmp_path):
    def lose(event, run):
        if isinstance(event, events.Evaluated):
            run.folder.result.unlink()
            raise RunFailed('the ranks differ')

    with tiny_run(tmp_path, CONFIG, lose) as (run, _):
        with pytest.raises(StorageError, match='has vanished'):
            train_to_end(run)
    assert not run.folder.weights.exists()


def test_stop_after_the_last_step_keeps_the_result_because_no_step_is_left_to_resume(tmp_path):
    def ask(event, run):
        if isinstance(event, events.EvalStarted):
            run.heartbeat.request_stop()

    with tiny_run(tmp_path, CONFIG, ask) as (run, recorder):
        assert train_to_end(run).status == 'aborted'
    assert saved_by(run, recorder) == [10]


def test_last_network_that_is_not_evaluated_has_the_statistics_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(Plan, 'is_eval_epoch', lambda self, epoch: False)
    with tiny_run(tmp_path, CONFIG) as (run, recorder):
        average = Mock(wraps=run.trainer.average_statistics)
        monkeypatch.setattr(run.trainer, 'average_statistics', average)
        train_to_end(run)
    assert not saved_by(run, recorder) and average.call_count == 1


@pytest.mark.parametrize('last_batch, images, filled', [('weight', 76, 0.5), ('wrap', 80, 1)])
def test_complete_epoch_counts_each_image_and_reports_applied_rates(
    tmp_path, monkeypatch, last_batch, images, filled
):
    now_s = 0.0
    monkeypatch.setattr(time, 'time', lambda: 1.6e9 + now_s + time.monotonic())

    def jump(event, run):
        nonlocal now_s
        now_s = -3.0 if isinstance(event, events.EpochDone) else now_s

    config = tiny_config(76, {'last_batch': last_batch})
    with tiny_run(tmp_path, config, jump, period_steps=4) as (run, recorder):
        assert train_to_end(run).status == 'aborted'
    assert saved_by(run, recorder) == [4, 8]
    assert run.progress.images == images and run.progress.images_per_s > 0
    steps = recorder.of(events.StepDone)
    scheduled = [run.plan.learning_rate(s) for s in range(10)]
    assert [s.learning_rate for s in steps] == [*scheduled[:-1], filled * scheduled[-1]]
    records = [s.record for s in steps if s.record]
    assert [r.step for r in records] == [2, 4, 6, 8, 10]
    assert records[1].loss == sum(s.loss for s in steps[2:4]) / 2
    assert records[-1].scheduled_learning_rate == scheduled[-1] and records[-1].epoch == 1.0
    (jumped,) = recorder.of(events.ClockStepped)
    assert (jumped.record.host, round(jumped.record.step_s, 1)) == (run.host, -3.0)


@pytest.mark.parametrize('problem', ['', 'differing ranks', 'not finite'])
def test_clock_stops_when_the_target_is_detected_and_checks_still_decide(
    tmp_path, monkeypatch, problem
):
    def break_array(event, run):
        if isinstance(event, events.Evaluated) and problem == 'not finite':
            next(iter(run.trainer.arrays().values()))[:1] = float('nan')

    if problem == 'differing ranks':
        monkeypatch.setattr(loop, 'check_agreement', Mock(side_effect=RunFailed(problem)))
    config = tiny_config(76, {'num_classes': 1}, target_accuracy=1e-9)
    with tiny_run(tmp_path, config, break_array) as (run, recorder):
        with pytest.raises(RunFailed, match=problem) if problem else nullcontext():
            train_to_end(run)
    (evaluated,), ended = recorder.of(events.Evaluated), recorder.events[-1]
    assert ended.status == ('failed' if problem else 'converged')
    if not problem:
        assert (ended.time_s, ended.epochs_to_converge) == (evaluated.time_s, 1)
        assert ended.best_top1 == evaluated.accuracy.top1 == 1


@pytest.mark.parametrize('period_steps, traced_steps', [(0, [8, 9, 10]), (6, [7, 8, 9, 10])])
def test_requested_trace_and_change_of_the_loss_scale_are_reported_once(
    tmp_path, monkeypatch, period_steps, traced_steps
):
    """The request is found when step 2 is read, after the push of step 4, and is in the exchange of
    step 5, which is read after the push of step 7, or by the checkpoint of step 6."""
    with tiny_run(tmp_path, CONFIG, period_steps=period_steps) as (run, recorder):
        run.folder.trace_request.touch()
        outcomes = iter([1, 1, 1, 1, 1, 0, 1, 1, 1, 1])
        run.trainer.can_skip, run.trainer.loss_scale = True, LossScale(1024.0)
        monkeypatch.setattr(
            run.trainer.optimizer, 'all_finite', lambda: mx.nd.array([next(outcomes)])
        )
        train_to_end(run)
    (traced,), (changed,) = recorder.of(events.StepsTraced), recorder.of(events.LossScaleChanged)
    assert [s.step for s in traced.spans] == traced_steps
    assert changed.record == LossScaleRecord(step=6, before=1024.0, now=512.0)


def test_speed_is_that_of_the_steps_without_checkpoints(tmp_path, monkeypatch):
    name = 'mlperf_rn50.train.trainer.Trainer.average_statistics'
    monkeypatch.setattr(name, lambda _: time.sleep(0.5))
    with tiny_run(tmp_path, CONFIG, period_steps=3) as (run, recorder):
        start = time.monotonic()
        assert not loop.train_epoch(run, 0, is_block_start=True)
        took_s = time.monotonic() - start
        run.writer.finish()
    [done] = [e for e in recorder.events if isinstance(e, events.EpochDone)]
    assert took_s > 3 * 0.5 and done.images_per_s > 76 / (took_s - 1.0)


@pytest.mark.parametrize(
    'period_s, period_steps, expected',
    json_table("""
# due at the push of step 3, read two steps later; then due at step 9, the last of the epoch
3.0 | 0 | [6]
1.5 | 0 | [5]  # then due at step 7, read after the last step
4.0 | 3 | [3, 6, 9]  # any checkpoint starts the period again
"""),
)
def test_checkpoint_is_saved_once_per_period_in_seconds(tmp_path, period_s, period_steps, expected):
    keys = {'period_s': period_s, 'period_steps': period_steps}
    with tiny_run(tmp_path, CONFIG, **keys) as (run, recorder):
        run = replace(run, clock=StepClock(run.progress))
        assert not loop.train_epoch(run, 0, is_block_start=True)
        run.writer.finish()
    assert saved_by(run, recorder) == expected


def test_bytes_are_reported_for_each_host(tmp_path):
    class TwoHosts(Comm):
        def sum(self, counts):
            return [count + 10 * (place > 1) for place, count in enumerate(counts)]

    with tiny_run(tmp_path, CONFIG) as (run, recorder):
        plan = replace(run.plan, config=tiny_config(76, {'synthetic': False}))
        hosts = [RankPlace(name, 0, 1, '0') for name in ('h0', 'h1')]
        run.trainer.take_bytes = lambda: (7, 5)
        report_reads(replace(run, plan=plan, hosts=hosts, comm=TwoHosts()), 3)
    (read,) = recorder.of(events.RecordsRead)
    num_bytes, num_new_bytes = {'h0': 7, 'h1': 10}, {'h0': 5, 'h1': 10}
    assert read.record == EpochRecord(4, num_bytes, num_new_bytes)


def test_automatic_period_is_reported_when_a_checkpoint_has_shown_its_cost(tmp_path):
    with tiny_run(tmp_path, CONFIG, period_s='auto', period_steps=4) as (run, recorder):
        train_to_end(run)
    noted, *_ = recorder.of(events.Noted)
    assert noted.text.startswith('checkpoint every') and 'no fault so far' in noted.text
    assert len(run.auto_period.costs_s) == len(saved_by(run, recorder)) == 2
