"""The report as CSV: a row per run or evaluation, whose cells hold one value each."""
import csv
import io
import re
from dataclasses import replace

import pandas as pd
import pytest
from helpers import ROOT, call
from lines import run_lines, write_lines, write_set

from mlperf_rn50.study.report_data import render_csv, render_evaluations_csv
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems

NUMBERS = ['num_nodes', 'num_accelerators', 'global_batch_size', 'target_accuracy', 'seed']


@pytest.fixture
def studies(tmp_path):
    write_set(tmp_path / 'sweep/1x4', 2, submission_org='we, us', target=0.759)
    write_set(tmp_path / 'sweep/2x4', 2, nodes=2, ranks=8, batch=128, target=0.759)
    write_lines(tmp_path / 'sweep/2x4/result_0.txt', run_lines((0.25,), seed=7, nodes=2, ranks=8, batch=128,
                                                               target=0.759, status=None))
    return make_studies(load_systems([tmp_path]))


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_row_is_a_run_with_the_facts_of_its_system(studies):
    rows = rows_of(render_csv(studies))
    assert [(r['system'], r['num_nodes'], r['file'][-12:], r['status'], r['epochs_to_converge']) for r in rows] == [
        ('1x4', '1', 'result_0.txt', 'converged', '2'), ('1x4', '1', 'result_1.txt', 'converged', '2'),
        ('2x4', '2', 'result_0.txt', 'failed', ''), ('2x4', '2', 'result_1.txt', 'converged', '2')]
    assert [r['num_evaluations'] for r in rows] == ['2', '2', '1', '2'] and rows[2]['time_to_train_s'] == ''


def test_a_row_is_an_evaluation_with_its_run(studies):
    rows = rows_of(render_evaluations_csv(studies))
    assert [(r['system'], r['seed'], r['epoch'], r['accuracy'], r['time_s']) for r in rows] == [
        ('1x4', '1', '1', '0.5', '11.0'), ('1x4', '1', '2', '0.76', '22.0'), ('1x4', '2', '1', '0.5', '11.0'),
        ('1x4', '2', '2', '0.76', '22.0'), ('2x4', '7', '1', '0.25', '11.0'), ('2x4', '2', '1', '0.5', '11.0'),
        ('2x4', '2', '2', '0.76', '22.0')]


@pytest.mark.parametrize('render, numbers', [
    (render_csv, [*NUMBERS, 'epochs_to_converge', 'time_to_train_s', 'final_accuracy', 'speedup', 'num_warnings']),
    (render_evaluations_csv, [*NUMBERS, 'epoch', 'accuracy', 'time_s', 'line'])])
def test_pandas_reads_numbers_as_numbers(studies, render, numbers):
    table = pd.read_csv(io.StringIO(render(studies)))
    assert all(pd.api.types.is_numeric_dtype(table[n]) for n in numbers)
    assert not table.isin(['None', 'null', '[]', '{}']).any(axis=None) and set(table['system']) == {'1x4', '2x4'}


def test_refused_sets_and_running_runs_have_rows(studies):
    [study] = studies
    first, second = study.systems
    refused = replace(first, refusal='their batches differ')
    running = replace(second, runs=(replace(second.runs[0], status='running'),))
    rows = rows_of(render_csv([replace(study, systems=(refused, running))]))
    assert [(r['system'], r['file'][-12:], r['status']) for r in rows] == [
        ('1x4', 'result_0.txt', 'converged'), ('1x4', 'result_1.txt', 'converged'), ('2x4', 'result_0.txt', 'running')]


@pytest.mark.parametrize('name', ['=cmd|x', '@SUM'])
def test_a_spreadsheet_runs_no_text_of_a_log(tmp_path, name):
    write_set(tmp_path / name, 1)
    studies = make_studies(load_systems([tmp_path]))
    for render in (render_csv, render_evaluations_csv):
        row = rows_of(render(studies))[0]
        assert row['system'] == f"'{name}" and float(row['accuracy' if 'accuracy' in row else 'final_accuracy']) > 0


def test_every_column_is_documented(studies):
    page = (ROOT / 'docs/results.md').read_text()
    named = set(re.findall(r'`(\w+)`', page))
    for render in (render_csv, render_evaluations_csv):
        assert set(render(studies).partition('\n')[0].split(',')) - named == set()


def test_the_command_prints_and_writes_both(tmp_path, studies):
    runs = call('report', tmp_path / 'sweep', '--format', 'csv', '--out', tmp_path / 'out')
    evaluations = call('report', tmp_path / 'sweep', '--format', 'csv', '--rows', 'evaluations')
    assert (tmp_path / 'out/report.csv').read_text() == runs.stdout and len(runs.stdout.splitlines()) == 5
    assert (tmp_path / 'out/report_evaluations.csv').read_text() == evaluations.stdout != runs.stdout
    done = call('report', tmp_path / 'sweep', '--rows', 'runs')
    assert done.returncode == 2 and '--rows: got --format table, expected --format csv' in done.stderr
