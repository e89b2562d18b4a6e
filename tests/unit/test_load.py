"""Reading of many logs by several processes, and limits on rows and notes of their report."""

import os
import signal

import pytest
from lines import mllog, write_lines, write_set
from made_systems import studies_of

from mlperf_rn50.analysis.report import tables
from mlperf_rn50.analysis.report.detail_tables import runs_table
from mlperf_rn50.analysis.report.tables import finding_lines
from mlperf_rn50.analysis.sets import load
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.runfolder.names import find_telemetry


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 1})
    # Earlier tests may have left threads in this process, and load does not fork a process that has
    # threads.
    monkeypatch.setattr(load.threading, 'active_count', lambda: 1)


PARENT_PID = os.getpid()


def die_in_child(paths, _):
    if os.getpid() != PARENT_PID:
        os.kill(os.getpid(), signal.SIGKILL)
    return paths


def test_logs_of_killed_processes_are_read_in_the_parent(two_processors, monkeypatch):
    monkeypatch.setattr(load, 'load_folder', die_in_child)
    folders = [[k] for k in range(70)]
    assert load.load_folders(folders, None) == folders


def test_runs_do_not_depend_on_the_number_of_processes(two_processors, tmp_path, monkeypatch):
    write_set(tmp_path / 'a', 40, accuracies=(0.3, 0.76), optimizer={'opt_x': 1.5})
    write_set(tmp_path / 'b', 30, nodes=2, status=lambda k: 'success' if k else None)
    write_lines(tmp_path / 'b/result_30.txt', ['no log'])
    write_lines(tmp_path / 'ssd/result_0.txt', [mllog('submission_benchmark', 0, 'ssd')])
    parallel = load_run_sets([tmp_path])
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0})
    assert [*map(vars, parallel)] == [*map(vars, load_run_sets([tmp_path]))]
    assert [len(s.runs) for s in parallel] == [40, 31]


def test_unreadable_log_beside_those_of_another_benchmark_is_no_such_log(tmp_path):
    write_set(tmp_path / 'a', 1)
    write_lines(tmp_path / 'b/result_0.txt', [mllog('submission_benchmark', 0, 'ssd')])
    assert [s.name for s in load_run_sets([tmp_path])] == ['a']
    write_lines(tmp_path / 'b/result_1.txt', ['no log'])
    assert {s.name: len(s.runs) for s in load_run_sets([tmp_path])} == {'a': 1, 'b': 1}


@pytest.fixture
def studies(tmp_path):
    write_set(tmp_path / 'x/1x4', 3, status=lambda k: 'aborted' if k == 2 else 'success')
    write_set(tmp_path / 'x/2x4', 2, nodes=2, ranks=8, platform='"runs": []')
    return studies_of(tmp_path)


def test_truncated_run_table_keeps_unconverged_runs_and_has_a_note(studies):
    whole, table = runs_table(studies[0]), runs_table(studies[0], most=2)
    assert len(whole.rows) == 5 and not whole.note
    assert [row[1].text for row in table.rows] == ['result_0.txt', 'result_2.txt']
    assert table.note.startswith('2 of 5 runs; converged runs are omitted first')


def test_findings_beyond_the_limit_are_counted(studies, monkeypatch):
    whole = finding_lines(studies[0], has_all=True)
    monkeypatch.setattr(tables, 'MAX_FINDINGS', 1)
    left = f'{len(whole) - 1} more findings are in the JSON report'
    assert finding_lines(studies[0], has_all=True) == [whole[0], left]


def test_telemetry_files_are_found_by_node(tmp_path):
    for name in ('telemetry_2_b', 'telemetry_2_a_1', 'telemetry_10_a', 'telemetry_x_a', 'metrics'):
        (tmp_path / f'{name}.jsonl').write_text('')
    found = {node: [p.stem for p in paths] for node, paths in find_telemetry(tmp_path).items()}
    assert found == {10: ['telemetry_10_a'], 2: ['telemetry_2_a_1', 'telemetry_2_b']}
    assert find_telemetry(tmp_path / 'none') == {}
