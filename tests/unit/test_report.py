"""Reports as text, JSON and CSV: exact output, and no injection from logs."""

import csv
import tracemalloc

import pytest
from helpers import CLI, call, run
from lines import write_set
from made_systems import studies_of, write_layouts

from mlperf_rn50.analysis.report.headings import study_command, study_heading
from mlperf_rn50.analysis.report.report_data import evaluations_csv, report_data, runs_csv
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.plain import MARKDOWN, render_text

HOSTILE = '<script>alert(1)</script>|`=1+1\x1b[31m"'


@pytest.fixture
def studies(tmp_path):
    """Two systems; the first run of the second system was killed after an evaluation."""
    keys = {'target': 0.759, 'eval_s': 0.0, 'is_complete': True}
    write_layouts(tmp_path / 'sweep', {'1x4': lambda k: 60.0 + 6 * k}, 2, **keys)
    killed = {
        'status': lambda k: 'success' if k else None,
        'accuracies': lambda k: (0.5, 0.76) if k else (0.25,),
    }
    return studies_of(write_layouts(tmp_path / 'sweep', {'2x4': 40.0}, 2, **keys, **killed))


def test_title_names_every_target_of_a_set(tmp_path):
    write_set(tmp_path / 'x', 2, target=lambda k: (0.6, 0.9)[k])
    [study] = studies_of(tmp_path / 'x')
    assert 'time to 60.00 % or 90.00 % Top-1 on ' in study_heading(study)


def test_own_folder_called_results_is_no_submission(tmp_path):
    write_set(tmp_path / 'results/1n', 1)
    [study] = studies_of(tmp_path)
    assert study_heading(study).startswith('results: ')
    assert study_command(study).endswith('/results')


def rows_of(parts):
    return list(csv.DictReader(parts))


def test_memory_of_a_report_does_not_grow_with_its_text(tmp_path):
    [study] = studies_of(write_set(tmp_path / 'x', 50, accuracies=lambda k: [0.5] * 60 + [0.76]))
    for render in (lambda x: render_json(report_data(x)), evaluations_csv):
        assert list(render([study]))  # the first time, properties of the set are computed and kept
        tracemalloc.start()
        length = sum(map(len, render([study])))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < length / 2


def columns_of(parts, names):
    """Return the values of columns of each row of a CSV file."""
    return [' '.join(row[name] for name in names.split()) for row in rows_of(parts)]


def test_csv_has_a_row_per_run_with_system_fields(studies):
    names = 'system num_nodes status epochs_to_converge num_evaluations time_to_train_s'
    assert columns_of(runs_csv(studies), names) == [
        '1x4 1 converged 2 2 120.0',
        '1x4 1 converged 2 2 132.0',
        '2x4 2 failed  1 ',
        '2x4 2 converged 2 2 80.0',
    ]
    rows = rows_of(runs_csv(studies))
    assert [row['file'][-12:] for row in rows] == ['result_0.txt', 'result_1.txt'] * 2
    assert not {'None', 'null', '[]', '{}'} & {value for row in rows for value in row.values()}


def test_evaluations_csv_has_a_row_per_evaluation(studies):
    assert columns_of(evaluations_csv(studies), 'system seed epoch accuracy time_s') == [
        '1x4 1 1 0.5 60.0',
        '1x4 1 2 0.76 120.0',
        '1x4 2 1 0.5 66.0',
        '1x4 2 2 0.76 132.0',
        '2x4 1 1 0.25 40.0',
        '2x4 2 1 0.5 40.0',
        '2x4 2 2 0.76 80.0',
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
    folder, out = tmp_path / 'sweep', tmp_path / 'out'
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
    runs = call('report', folder, '--format', 'csv', '--out', out).stdout
    evaluations = call('report', folder, '--format', 'csv', '--rows', 'evaluations').stdout
    assert (out / 'report.csv').read_text() == runs != evaluations
    assert (out / 'report_evaluations.csv').read_text() == evaluations
    assert len(runs.splitlines()) == 5


@pytest.mark.parametrize('name', ['prepare', 'report'])
def test_help_has_no_heavy_imports(name):
    done = run([CLI[0], '-X', 'importtime', *CLI[1:], name, '--help'])
    imported = {x.rpartition('|')[2].strip().partition('.')[0] for x in done.stderr.splitlines()}
    assert 'mlperf_rn50' in imported and 'examples:' in done.stdout
    heavy = """mxnet nvidia horovod pandas scipy matplotlib jinja2 numpy jsonargparse yaml
        mlperf_logging"""
    assert not imported & {*heavy.split()}
