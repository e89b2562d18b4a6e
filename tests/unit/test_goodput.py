"""Goodput as report, watch and why show it; tests/property/test_goodput.py has its arithmetic."""

import json
import shutil
from dataclasses import replace

import pytest
from helpers import call, shipped_logs
from lines import mllog, run_lines, write_lines

from mlperf_rn50.mllog.goodput import read_goodput
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder.jsonl import append, encode
from mlperf_rn50.runfolder.records import PartRecord, TrainRecord

COMMANDS = ['report'], ['watch', '--once'], ['why']
RECORDS = [
    PartRecord('start_up', time_s=0.0, seconds=9.0),
    PartRecord('reading', time_s=0.25, seconds=0.25),
    PartRecord('checkpoint', time_s=1.0, seconds=0.5),
    *(PartRecord('evaluation', time_s=1.0 + k, seconds=0.5) for k in range(20)),
]


@pytest.fixture
def folder(tmp_path):
    """A run folder of a version that did not record the parts."""
    return shutil.copytree(shipped_logs() / 'digits_h100', tmp_path / 'run')


def record(folder):
    with open(folder / 'metrics.jsonl', 'a') as f:
        f.writelines(encode(r) + '\n' for r in RECORDS)


def shown(folder, *words):
    """Return goodput and parts in the JSON of a command, and whether its text has them."""
    value = json.loads(call(*words, folder, '--format', 'json').stdout)
    run = value['systems'][0]['runs'][0] if 'systems' in value else value
    run = run['runs'][0] if words[0] == 'watch' else run
    is_in_text = 'goodput' in call(*words, folder).stdout.lower()
    return run['goodput'], run['goodput_parts_s'], is_in_text


def test_report_watch_and_why_show_the_same_parts_only_if_they_were_recorded(folder):
    assert [shown(folder, *words) for words in COMMANDS] == [(None, None, False)] * 3
    record(folder)
    first, *others = [shown(folder, *words) for words in COMMANDS]
    assert others == [first, first]
    share, parts, is_in_text = first
    time_s = read_run(folder / 'result_0.txt').time_to_train_s
    assert sum(parts.values()) == pytest.approx(9.0 + time_s, abs=0.01)
    assert share == pytest.approx(1 - (9.0 + 0.25 + 0.5) / (9.0 + time_s), abs=0.001)
    assert is_in_text


def test_running_run_is_counted_to_its_last_record(folder):
    record(folder)
    with open(folder / 'metrics.jsonl', 'a') as f:
        f.write(encode(TrainRecord(900, 40.0, time_s=5000.0)) + '\n')
    run = replace(read_run(folder / 'result_0.txt'), status='running', time_to_train_s=None)
    assert read_goodput(run).elapsed_s == pytest.approx(9.0 + 5000.0)


def test_part_after_the_last_line_of_the_log_counts_in_every_command(tmp_path):
    stop = mllog('run_stop', 5, status='aborted', reason='interrupted')
    write_lines(tmp_path / 'run/result_0.txt', [*run_lines((0.2,), status=None), stop])
    for part in (*RECORDS[:4], PartRecord('checkpoint', time_s=45.0, seconds=30.0)):
        append(tmp_path / 'run/metrics.jsonl', part)
    report, watch = [shown(tmp_path / 'run', *words) for words in COMMANDS[:2]]
    assert report == watch and report[1]['checkpoints'] == 30.5


def test_run_that_lost_the_record_of_an_evaluation_has_no_goodput(folder):
    record(folder)
    run = read_run(folder / 'result_0.txt')
    evaluations = [*run.evaluations] * 9
    assert read_goodput(run) and read_goodput(replace(run, evaluations=evaluations)) is None


def test_failed_run_has_no_goodput_because_a_resume_decides_what_is_preserved(folder):
    record(folder)
    run = read_run(folder / 'result_0.txt')
    assert read_goodput(run) and read_goodput(replace(run, status='failed')) is None
