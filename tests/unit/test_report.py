"""Reports as text, JSON and CSV: exact output, and no injection from logs."""

import csv
import json
import tracemalloc

import pytest
from helpers import CLI, call, run
from lines import write_set
from made_systems import studies_of

from mlperf_rn50.analysis.report.data import evaluations_csv, report_data, runs_csv
from mlperf_rn50.analysis.report.headings import study_heading
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.text import MARKDOWN, render_text

HOSTILE = '<script>alert(1)</script>|`=1+1\x1b[31m"'


@pytest.fixture
def studies(tmp_path):
    """Two systems; the first run of the second system was killed after an evaluation."""
    keys = {'target': 0.759, 'eval_s': 0.0, 'is_complete': True}
    write_set(tmp_path / 'sweep/1x4', 2, epoch_s=lambda k: 60.0 + 6 * k, **keys)
    write_set(
        tmp_path / 'sweep/2x4',
        2,
        nodes=2,
        ranks=8,
        batch=128,
        epoch_s=40.0,
        **keys,
        status=lambda k: 'success' if k else None,
        accuracies=lambda k: (0.5, 0.76) if k else (0.25,),
    )
    return studies_of(tmp_path)


def test_title_names_every_target_of_a_set(tmp_path):
    write_set(tmp_path / 'x', 2, target=lambda k: (0.6, 0.9)[k])
    [study] = studies_of(tmp_path / 'x')
    assert 'time to 60.00 % or 90.00 % Top-1 on ' in study_heading(study)


def rows_of(parts):
    return list(csv.DictReader(parts))


def test_results_of_systems_in_json(studies):
    """tests/docs compares the keys with docs/output.md."""
    first, second = json.loads(''.join(render_json(report_data(studies))))['systems']
    assert (second['num_runs'], second['num_converged'], second['score_minutes']) == (2, 1, None)
    assert (
        second['runs'][0]['epochs_to_converge'] is None and second['runs'][0]['status'] == 'failed'
    )
    assert first['time_parts_s'] == {
        'init': 4.0,
        'first_epoch': 63.0,
        'later_epochs': 63.0,
        'evaluation': 0.0,
        'other': 0.0,
    }


def test_json_is_indented_as_a_whole(studies):
    text = ''.join(render_json(report_data(studies)))
    assert text == json.dumps(json.loads(text), indent=1)


def test_memory_of_a_report_does_not_grow_with_its_text(tmp_path):
    [study] = studies_of(write_set(tmp_path / 'x', 50, accuracies=lambda k: [0.5] * 60 + [0.76]))
    for render in (lambda x: render_json(report_data(x)), evaluations_csv):
        assert list(render([study]))  # the first time, properties of the set are computed and kept
        tracemalloc.start()
        length = sum(map(len, render([study])))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < length / 2


def test_csv_has_a_row_per_run_with_system_fields(studies):
    rows = rows_of(runs_csv(studies))
    assert [
        (
            r['system'],
            r['num_nodes'],
            r['file'][-12:],
            r['status'],
            r['epochs_to_converge'],
            r['num_evaluations'],
        )
        for r in rows
    ] == [
        ('1x4', '1', 'result_0.txt', 'converged', '2', '2'),
        ('1x4', '1', 'result_1.txt', 'converged', '2', '2'),
        ('2x4', '2', 'result_0.txt', 'failed', '', '1'),
        ('2x4', '2', 'result_1.txt', 'converged', '2', '2'),
    ]
    assert rows[2]['time_to_train_s'] == ''
    assert not {'None', 'null', '[]', '{}'} & {value for row in rows for value in row.values()}


def test_evaluations_csv_has_a_row_per_evaluation(studies):
    rows = rows_of(evaluations_csv(studies))
    assert [(r['system'], r['seed'], r['epoch'], r['accuracy'], r['time_s']) for r in rows] == [
        ('1x4', '1', '1', '0.5', '60.0'),
        ('1x4', '1', '2', '0.76', '120.0'),
        ('1x4', '2', '1', '0.5', '66.0'),
        ('1x4', '2', '2', '0.76', '132.0'),
        ('2x4', '1', '1', '0.25', '40.0'),
        ('2x4', '2', '1', '0.5', '40.0'),
        ('2x4', '2', '2', '0.76', '80.0'),
    ]


@pytest.mark.parametrize('name', ['=cmd|x', '@SUM'])
def test_log_cannot_inject_into_terminal_markdown_or_spreadsheet(tmp_path, name):
    write_set(tmp_path / name, 1, org=HOSTILE, dataset=HOSTILE, nodes=HOSTILE, opt_name2=HOSTILE)
    studies = studies_of(tmp_path)
    markdown = render_text(make_report(studies), MARKDOWN)
    assert '\x1b' not in render_text(make_report(studies)) + markdown + ''.join(runs_csv(studies))
    assert '<script' not in markdown and '\\|' in markdown
    for render, accuracy in ((runs_csv, 'final_accuracy'), (evaluations_csv, 'accuracy')):
        row = rows_of(render(studies))[0]
        assert row['system'] == f"'{name}" and float(row[accuracy]) > 0


def test_command_prints_only_the_report(tmp_path, studies):
    folder = tmp_path / 'sweep'
    for form, start in [
        ('table', 'sweep: '),
        ('text', 'sweep: '),
        ('markdown', '## '),
        ('json', '{'),
        ('html', '<!DOCTYPE html>'),
    ]:
        done = call('report', folder, '--format', form)
        # a run was killed
        assert (done.returncode, done.stderr) == (1, '') and done.stdout.startswith(start)
    runs = call('report', folder, '--format', 'csv', '--out', tmp_path / 'out')
    evaluations = call('report', folder, '--format', 'csv', '--rows', 'evaluations')
    assert (tmp_path / 'out/report.csv').read_text() == runs.stdout and len(
        runs.stdout.splitlines()
    ) == 5
    assert (
        (tmp_path / 'out/report_evaluations.csv').read_text() == evaluations.stdout != runs.stdout
    )


@pytest.mark.parametrize('name', ['prepare', 'report'])
def test_help_has_no_heavy_imports(name):
    done = run([CLI[0], '-X', 'importtime', *CLI[1:], name, '--help'])
    imported = {
        line.rpartition('|')[2].strip().partition('.')[0] for line in done.stderr.splitlines()
    }
    assert 'mlperf_rn50' in imported and 'examples:' in done.stdout
    assert not imported & {
        'mxnet',
        'nvidia',
        'horovod',
        'pandas',
        'scipy',
        'matplotlib',
        'jinja2',
        'numpy',
        'jsonargparse',
        'yaml',
        'mlperf_logging',
    }
