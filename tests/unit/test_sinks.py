"""Event sinks on a full disk, and of a run resumed with a changed configuration."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import HANG_LIMIT_S, emit
from msgspec.structs import replace
from tensorboardX import record_writer

from mlperf_rn50.config import Config
from mlperf_rn50.errors import StorageError
from mlperf_rn50.mllog.elapsed import ElapsedParts
from mlperf_rn50.mllog.read.reader import read_events, read_run
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import MetricsRecord, NetworkRecord, RanksRecord, RankSteps
from mlperf_rn50.system import telemetry
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import events
from mlperf_rn50.train.checkpoint.changes import Change
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.sinks.metrics import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.tensorboard import TensorBoard
from mlperf_rn50.train.sinks.terminal import EpochProgress, Terminal
from mlperf_rn50.train.sinks.watched import Sampled

FULL = Path('/dev/full')
PLAN = make_plan(Config(train=TrainConfig(local_batch_size=8)), 1)
STEP = events.StepDone(1, 0.1, 1.0, 2.0, 0.1, 100.0, is_reported=True)
RESUMED = events.Resumed(
    PLAN, 1, 40, 9.0, 100.0, 12.0, ElapsedParts(9.0, 3.0, 0.0, 88.0), 'step_00000040', 1, 8
)
CHANGES = [Change('schedule.base_lr', 0.02, 0.5), Change('train.max_epochs', None, 9)]


def assert_named(sink, event, name):
    with pytest.raises(
        StorageError, match=f'{name}: cannot write: No space left on device; the disk at '
    ) as e:
        sink.handle(event)
    assert '\n' not in str(e.value)


def test_configuration_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr('os.fsync', Mock(side_effect=OSError(28, 'No space left on device')))
    run = RunFolder(tmp_path, 0)
    assert_named(Metrics(run, ''), events.Opened(PLAN, 0, [('h', 1)], False, ''), run.config)
    assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl'] and not run.metrics.read_text()


def test_metrics_and_terminal_log_on_a_full_disk(capsys):
    assert_named(Metrics(SimpleNamespace(metrics=FULL), ''), STEP, FULL)
    assert_named(
        Terminal(SimpleNamespace(train_log=FULL, result=Path('r')), PLAN.config),
        events.Warned('x'),
        FULL,
    )
    output = capsys.readouterr().err
    assert output.count('\n') == 1 and 'Traceback' not in output


def test_times_of_ranks_and_facts_of_the_network_are_read_back(tmp_path):
    sink, network = Metrics(RunFolder(tmp_path, 0), ''), NetworkRecord(8, 1e9, 2 * 10**7, 8, 3e10)
    rank = RankSteps(
        rank=1,
        host='h',
        num_steps=3,
        data_s=1.0,
        read_s=0.5,
        compute_s=4.0,
        wait_s=2.0,
        slow_rank_s=1.5,
        spread_s={'wait': (1.0, 2.0, 2.0)},
        critical_s={'wait': 0.5},
    )
    times = RanksRecord(5, 60.0, [rank], ['rank 1 is slow'], 5.0, 2.0, 0.001, {'wait': [0, 3]})
    sink.handle(events.NetworkMeasured(network))
    sink.handle(events.RanksTimed(times))
    assert [r for _, r in read_lines(tmp_path / 'metrics.jsonl', MetricsRecord)] == [network, times]


def test_terminal_shows_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    progress = EpochProgress(print, 0, 5, 2)
    progress.update(1.5, 0.1, 100.0)
    progress._bar.refresh()
    progress.close()
    assert re.search(
        r'epoch 1:\s+60%\|.*3/5 \[\d+:\d+<\d+:\d+.*100 img/s, loss 1.500, lr 0.1',
        capsys.readouterr().err,
    )


@pytest.mark.parametrize('best, text', [(0.0, 'no evaluation above 0 % yet'), (0.749, '74.90 %')])
def test_end_of_a_run_without_an_evaluation_shows_no_accuracy(best, text):
    assert events.Ended('interrupted', None, 1.0, best, 8.0).best_text == text


def test_tensorboard_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(record_writer, 'open_file', lambda _: open(FULL, 'wb', buffering=0))
    with pytest.raises(StorageError, match=f'{tmp_path}/tensorboard: cannot write: No space left'):
        TensorBoard(tmp_path / 'tensorboard', 0, PLAN.config)
    # fails when it is flushed
    monkeypatch.setattr(record_writer, 'open_file', lambda _: open(FULL, 'wb'))
    assert_named(
        TensorBoard(tmp_path / 'tensorboard', 0, PLAN.config), STEP, tmp_path / 'tensorboard'
    )


def test_telemetry_on_a_full_disk_ends_the_run_from_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.0)
    sampler = Telemetry(tmp_path / 'telemetry_0_n1.jsonl')
    sink = Sampled(sampler)
    sink.handle(STEP)
    monkeypatch.setattr(sampler._file, '_file', open(FULL, 'ab', buffering=0))
    sampler._thread.join(HANG_LIMIT_S)
    assert_named(sink, STEP, 'telemetry_0_n1.jsonl')
    sink.close()


def test_change_of_the_loss_scale_is_in_every_output(tmp_path):
    run = RunFolder(tmp_path, 0)
    sinks = [
        Metrics(run, ''),
        Terminal(run, PLAN.config),
        MlperfLog(RunLog(run.result, run.result_v06)),
    ]
    emit(sinks, *(events.LossScaleChanged(step, 65536.0, 32768.0) for step in (0, 7)))
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {'event': 'loss_scale', 'step': step, 'before': 65536.0, 'now': 32768.0} for step in (0, 7)
    ]
    text = run.train_log.read_text()
    assert (
        'loss scale 65536 -> 32768 after the warm-up' in text
        and 'loss scale 65536 -> 32768 after step 7' in text
    )
    logged = [e for _, e in read_events(run.result) if e.key == 'loss_scale']
    assert [(e.value, e.metadata['step']) for e in logged] == [(32768.0, 0), (32768.0, 7)]


def test_changes_of_a_resumed_run_are_in_every_output(tmp_path, capsys):
    run = RunFolder(tmp_path, 0)
    run.metrics.write_text('{"event": "train", "step": 40}\n{"event": "tra')
    sinks = [
        Metrics(run, ''),
        Terminal(run, PLAN.config),
        MlperfLog(RunLog(run.result, run.result_v06)),
    ]
    emit(sinks, RESUMED, replace(RESUMED, changes=CHANGES))
    same, other = [json.loads(line) for line in run.metrics.read_text().splitlines()][1:]
    changed = {'schedule.base_lr': [0.02, 0.5], 'train.max_epochs': [None, 9]}
    assert 'changed' not in same and other['changed'] == changed
    for path in (run.train_log, None):
        output = path.read_text() if path else capsys.readouterr().err
        assert (
            output.count('changed: schedule.base_lr 0.02 -> 0.5, train.max_epochs null -> 9') == 1
        )
    for path in (run.result, run.result_v06):
        resumed = [line for line in path.read_text().splitlines() if 'run_resumed' in line]
        assert ['"changed"' in line for line in resumed] == [False, True]
        assert json.dumps(changed) in resumed[1]
    (found,) = (f for f in read_run(run.result).findings if f.kind == 'resumed_with_changes')
    assert found.text.endswith('schedule.base_lr 0.02 -> 0.5, train.max_epochs None -> 9')
