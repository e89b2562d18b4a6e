"""Event sinks: on a full disk, of a run resumed with a changed configuration, and traces."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from helpers import emit, wait_for
from tensorboardX import record_writer
from tiny import tiny_config

from mlperf_rn50.errors import StorageError
from mlperf_rn50.files import LineFile
from mlperf_rn50.mllog.elapsed import ElapsedParts
from mlperf_rn50.mllog.read.reader import read_events, read_run
from mlperf_rn50.mllog.writer import RunLog
from mlperf_rn50.runfolder import records
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.system import telemetry
from mlperf_rn50.system.telemetry import Telemetry
from mlperf_rn50.train import run_events as events
from mlperf_rn50.train.checkpoint.changes import Change
from mlperf_rn50.train.checkpoint.progress import Progress
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.sinks.every_rank import Sampled, TraceFile
from mlperf_rn50.train.sinks.metrics_file import Metrics
from mlperf_rn50.train.sinks.mlperf_log import MlperfLog
from mlperf_rn50.train.sinks.progress_lines import EpochBar, ProgressLines
from mlperf_rn50.train.sinks.tensorboard import TensorBoard

FULL = Path('/dev/full')
PLAN = make_plan(tiny_config(), 1)
STEP = events.StepDone(records.TrainRecord(1, 0.1, 1.0, 2.0), 1, 1.5, 0.1, 100.0)
RESUMED = events.Resumed(
    PLAN,
    hosts=[('h1', 1)],
    step=40,
    clock_s=9.0,
    elapsed_s=100.0,
    stopped_s=12.0,
    after_fault=True,
    parts=ElapsedParts(9.0, 3.0, 0.0, 88.0),
    checkpoint='step_00000040',
    before=Progress(40, 1, 1, 0.0, 9.0, 8, 8, 20, 0, [0]),
)
CHANGES = [Change('schedule.base_lr', 0.02, 0.5), Change('train.max_epochs', None, 9)]


def assert_named(sink, event, name):
    with pytest.raises(StorageError, match=f'{name}: cannot write: No space left') as e:
        sink.handle(event)
    assert '\n' not in str(e.value)


def open_sinks(run):
    log = MlperfLog(RunLog(run.result, run.result_v06))
    return Metrics(run, ''), ProgressLines(run, PLAN.config), log


def test_configuration_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr('os.fsync', Mock(side_effect=OSError(28, 'No space left on device')))
    run = RunFolder(tmp_path, 0)
    assert_named(Metrics(run, ''), events.Opened(PLAN, 0, [('h', 1)], False, ''), run.config)
    assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl'] and not run.metrics.read_text()


def test_metrics_and_terminal_log_on_a_full_disk(capsys):
    assert_named(Metrics(SimpleNamespace(metrics=FULL), ''), STEP, FULL)
    run = SimpleNamespace(train_log=FULL, result=Path('r'))
    assert_named(ProgressLines(run, PLAN.config), events.Warned('x'), FULL)
    output = capsys.readouterr().err
    assert output.count('\n') == 1 and 'Traceback' not in output


def test_terminal_shows_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    bar = EpochBar(print, 0, num_steps=5, first_step=2)
    bar.update(STEP)
    bar.bar.refresh()
    bar.close()
    text = r'epoch 1:\s+60%\|.*3/5 \[\d+:\d+<\d+:\d+.*100 img/s, loss 1.500, lr 0.1'
    assert re.search(text, capsys.readouterr().err)


def test_trace_is_replaced_by_a_newer_one_and_an_error_is_one_line(tmp_path, capsys):
    path = tmp_path / 'new' / 'trace_0_1.jsonl'
    spans = [StepSpans(s, 1, 2, 3, 4, 5, 6, [(2.5, 3)]) for s in (7, 8)]
    for traced in (spans[:1], spans):
        TraceFile(path).handle(events.StepsTraced(traced))

        def is_written(traced=traced):
            return path.exists() and [s for _, s in read_lines(path, StepSpans)] == traced

        wait_for(is_written, lambda: True, lambda: 'no trace')
    TraceFile(path / 'x').handle(events.StepsTraced([]))
    text = ''

    def is_reported():
        nonlocal text
        text += capsys.readouterr().err
        return text.endswith('File exists; the trace is not written\n')

    wait_for(is_reported, lambda: True, lambda: text)


def test_end_of_a_run_without_an_evaluation_shows_no_accuracy():
    texts = [events.Ended('interrupted', best).best_text for best in (0.0, 0.749)]
    assert texts == ['no evaluation above 0 % yet', '74.90 %']


def test_reason_of_a_failure_is_only_in_the_file(tmp_path, capsys):
    run = RunFolder(tmp_path, 0)
    lines = ProgressLines(run, PLAN.config)
    lines.handle(events.Ended('failed', 0.1, reason='the loss is nan at step 2'))
    lines.close()
    assert run.train_log.read_text().endswith(' failed: the loss is nan at step 2\n')
    assert 'nan' not in capsys.readouterr().err  # the command reports it


def test_tensorboard_on_a_full_disk(tmp_path, monkeypatch):
    def open_board(buffering):
        monkeypatch.setattr(record_writer, 'open_file', lambda _: open(FULL, 'wb', buffering))
        return TensorBoard(tmp_path / 'tensorboard', 0, PLAN.config)

    with pytest.raises(StorageError, match=f'{tmp_path}/tensorboard: cannot write: No space left'):
        open_board(0)
    assert_named(open_board(-1), STEP, tmp_path / 'tensorboard')  # fails when it is flushed


@pytest.mark.parametrize('first_step', [0, 480])
def test_tensorboard_shows_an_evaluation_at_its_step(tmp_path, first_step, monkeypatch):
    board = TensorBoard(tmp_path, first_step, PLAN.config)
    written = Mock()
    monkeypatch.setattr(board, '_writer', written)
    evaluated = events.Evaluated(1, 0, 1.0, Accuracy(1, 1, 2))
    board.handle(evaluated)
    board.handle(events.StepDone(None, first_step + 12, 1.5, 0.1, 100.0))
    board.handle(evaluated)
    steps = {call.args[0].step for call in written.write_event.call_args_list}
    assert steps == {first_step, first_step + 12}


def test_telemetry_on_a_full_disk_ends_the_run_from_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, 'PERIOD_S', 0.0)
    sink = Sampled(Telemetry(tmp_path / 'telemetry_0_n1.jsonl'))
    sink.handle(STEP)
    monkeypatch.setattr(LineFile, 'write', Mock(side_effect=StorageError('the disk is full')))

    def is_failed():
        try:
            sink.handle(STEP)
        except StorageError as e:
            return str(e)
        return ''

    for _ in range(2):
        assert wait_for(is_failed, lambda: True, lambda: 'no error') == 'the disk is full'
    sink.close()


def test_change_of_the_loss_scale_is_in_every_output(tmp_path):
    run = RunFolder(tmp_path, 0)
    changes = [records.LossScaleRecord(step, 65536.0, 32768.0) for step in (0, 7)]
    emit(open_sinks(run), *map(events.LossScaleChanged, changes))
    assert [r for _, r in read_lines(run.metrics, records.LossScaleRecord)] == changes
    for when in ('the warm-up', 'step 7'):
        assert f'loss scale 65536 -> 32768 after {when}' in run.train_log.read_text()
    logged = [e for _, e in read_events(run.result) if e.key == 'loss_scale']
    assert [(e.value, e.metadata['step']) for e in logged] == [(32768.0, 0), (32768.0, 7)]


def test_resume_on_fewer_ranks_names_the_hosts_and_their_ranks(tmp_path):
    run = RunFolder(tmp_path, 0)
    hosts, before = [('h1', 1), ('h4', 2)], replace(RESUMED.before, world_size=4)
    emit(open_sinks(run), msgspec.structs.replace(RESUMED, hosts=hosts, before=before))
    [resumed] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert resumed['hosts'] == {'h1': 1, 'h4': 2}
    assert 'new plan: 1 rank (before: 4) on h1, h4' in run.train_log.read_text()
    assert 'h4' not in run.result.read_text()  # may be published


def test_changes_of_a_resumed_run_are_in_every_output(tmp_path, capsys):
    run = RunFolder(tmp_path, 0)
    run.metrics.write_text('{"event": "train", "step": 40}\n{"event": "tra')
    emit(open_sinks(run), RESUMED, msgspec.structs.replace(RESUMED, changes=CHANGES))
    same, other = [json.loads(line) for line in run.metrics.read_text().splitlines()][1:]
    changed = {'schedule.base_lr': [0.02, 0.5], 'train.max_epochs': [None, 9]}
    assert 'changed' not in same and other['changed'] == changed
    for path in (run.train_log, None):
        output = path.read_text() if path else capsys.readouterr().err
        assert output.count('schedule.base_lr 0.02 -> 0.5, train.max_epochs null -> 9') == 1
    for path in (run.result, run.result_v06):
        resumed = [line for line in path.read_text().splitlines() if 'run_resumed' in line]
        assert ['"changed"' in line for line in resumed] == [False, True]
        assert json.dumps(changed) in resumed[1]
    (found,) = (f for f in read_run(run.result).findings if f.kind == 'resumed_with_changes')
    assert found.text.endswith('schedule.base_lr 0.02 -> 0.5, train.max_epochs None -> 9')


def test_log_of_a_resumed_run_continues_although_the_wall_clock_was_set(tmp_path):
    log = RunLog(tmp_path / 'result_0.txt', None)
    MlperfLog(log).handle(msgspec.structs.replace(RESUMED, time_s=1.6e9))
    log.epoch_start(2)
    times_s = [event.time_s for _, event in read_events(tmp_path / 'result_0.txt')]
    assert len(times_s) > 1 and all(abs(s - 1.6e9) < 9 for s in times_s)


def test_log_has_the_learning_rates_of_a_run_on_fewer_ranks_than_configured(tmp_path):
    log = RunLog(tmp_path / 'result_0.txt', tmp_path / 'v06.txt')
    plan = replace(PLAN, lr_scale=0.75)
    MlperfLog(log).handle(events.Opened(plan, 0, [('h', 1)], False, ''))
    logged = (tmp_path / 'result_0.txt').read_text()
    schedule = PLAN.config.schedule
    for name, value in (('base', schedule.base_lr), ('end', schedule.end_lr)):
        [rate] = re.findall(f'"sgd_opt_{name}_learning_rate", "value": ([^,]*),', logged)
        assert float(rate) == 0.75 * value
