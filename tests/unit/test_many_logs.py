"""Reports on very many logs: read by several processes, kept small, written in parts, shown in part."""
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from types import MappingProxyType

import pytest
from helpers import ROOT
from lines import mllog, write_lines, write_set

from mlperf_rn50.files import write_atomically
from mlperf_rn50.mlperf.metrics import read_learning_rates, read_stragglers
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.mlperf.telemetry import find_telemetry
from mlperf_rn50.study import in_processes, report_tables
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.in_processes import map_in_processes
from mlperf_rn50.study.report_data import render_json, report_object
from mlperf_rn50.study.report_tables import notes_of, runs_table
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(in_processes, '_num_processors', lambda: 2)
    # Threads that tests before have left in this process; with some of its own, a program forks none.
    monkeypatch.setattr(in_processes.threading, 'active_count', lambda: 1)


def own_process(item):
    return item, os.getpid(), MappingProxyType({'item': item})


def test_many_items_go_to_other_processes_and_stay_in_order(two_processors):
    found = map_in_processes(own_process, range(100))
    assert [item for item, _, _ in found] == list(range(100)) == [m['item'] for _, _, m in found]
    assert os.getpid() not in {pid for _, pid, _ in found}
    assert {pid for _, pid, _ in map_in_processes(own_process, range(64))} == {os.getpid()}


def test_a_process_with_threads_forks_none(two_processors, monkeypatch):
    monkeypatch.setattr(in_processes.threading, 'active_count', lambda: 2)
    assert {pid for _, pid, _ in map_in_processes(own_process, range(100))} == {os.getpid()}


def die_elsewhere(place):
    item, home = place
    if os.getpid() != home:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_work_of_processes_that_are_killed_is_done_here(two_processors):
    assert map_in_processes(die_elsewhere, [(i, os.getpid()) for i in range(70)]) == list(range(70))


def test_where_no_process_can_be_started_the_work_is_done_here(two_processors, monkeypatch):
    def none(*_, **__):
        raise BrokenExecutor
    monkeypatch.setattr(in_processes.ProcessPoolExecutor, 'submit', none)
    assert {pid for _, pid, _ in map_in_processes(own_process, range(70))} == {os.getpid()}


def test_runs_are_the_same_whoever_reads_them(two_processors, tmp_path, monkeypatch):
    write_set(tmp_path / 'a', 40, accuracies=(0.3, 0.76), optimizer={'opt_x': 1.5})
    write_set(tmp_path / 'b', 30, nodes=2, status=lambda k: 'success' if k else None)
    write_lines(tmp_path / 'b/result_30.txt', ['no log'])
    write_lines(tmp_path / 'ssd/result_0.txt', [mllog('submission_benchmark', 0, 'ssd')])
    others = load_systems([tmp_path])
    monkeypatch.setattr(in_processes, '_MANY', 1000)
    assert others == load_systems([tmp_path]) and [len(s.runs) for s in others] == [40, 31]


@pytest.fixture
def studies(tmp_path):
    write_set(tmp_path / 'x/1x4', 3, status=lambda k: 'aborted' if k == 2 else 'success')
    write_set(tmp_path / 'x/2x4', 2, nodes=2, ranks=8, submission_platform='"runs": []')
    return make_studies(load_systems([tmp_path]))


def test_the_text_is_the_whole_of_the_object(studies):
    found = json.loads(render_json(studies))
    assert found == report_object(studies) and list(found['systems'][0]) == list(report_object(studies)['systems'][0])


def test_a_file_is_written_from_parts(tmp_path):
    write_atomically(tmp_path / 'a', (c for c in ('ä', 'b', '')))
    assert (tmp_path / 'a').read_text('utf-8') == 'äb'

    def torn():
        yield 'c'
        raise OSError
    with pytest.raises(OSError):
        write_atomically(tmp_path / 'a', torn())
    assert [(p.name, p.read_text('utf-8')) for p in tmp_path.iterdir()] == [('a', 'äb')]


def test_a_table_of_very_many_runs_has_those_that_did_not_converge_and_says_that_others_are_left_out(
        studies, monkeypatch):
    assert len(runs_table(studies[0]).rows) == 5 and not runs_table(studies[0]).note
    monkeypatch.setattr(report_tables, '_MAX_RUNS', 2)
    table = runs_table(studies[0])
    assert [(row[0].text, row[1].text) for row in table.rows] == [('1x4', 'result_0.txt'), ('1x4', 'result_2.txt')]
    said = ('2 of 5 runs, those that did not converge before others; all are in the JSON and the CSV of the report.')
    assert table.note == said and said in render_table(studies)


def test_notes_beyond_a_number_are_counted(studies, monkeypatch):
    whole = notes_of(studies[0])
    monkeypatch.setattr(report_tables, '_MAX_NOTES', 1)
    assert notes_of(studies[0]) == [whole[0], f'{len(whole) - 1} more such notes are in the JSON of the report']


def test_what_a_system_has_is_looked_up_once(studies):
    system = studies[0].systems[0]
    for name in ('converged', 'scored', 'parts', 'epoch_s', 'warnings', 'eval_period', 'training_lines', 'num_units'):
        assert name in dir(System) and getattr(system, name) is getattr(system, name) and name in vars(system), name


def test_a_folder_is_searched_for_samples_of_nodes_once(tmp_path):
    for name in ('telemetry_2_b', 'telemetry_2_a_1', 'telemetry_10_a', 'telemetry_x_a', 'metrics'):
        (tmp_path / f'{name}.jsonl').write_text('')
    assert find_telemetry(tmp_path) == {'10': [tmp_path / 'telemetry_10_a.jsonl'],
                                        '2': [tmp_path / 'telemetry_2_a_1.jsonl', tmp_path / 'telemetry_2_b.jsonl']}
    assert find_telemetry(tmp_path / 'none') == {}


def test_pictures_of_many_runs_look_into_their_folder_once(tmp_path):
    """A look for each run, in a folder that grows with them, took minutes."""
    write_set(tmp_path / '1x4', 20)
    code = ('import sys\nlooks = []\nsys.addaudithook(lambda name, args: looks.append(name) if name in ("os.scandir", '
            '"os.listdir", "glob.glob") and str(args[0]).endswith("1x4") else None)\n'
            'from pathlib import Path\nfrom mlperf_rn50.study import report_plots, scaling, systems\n'
            'found = systems.load_systems([Path(sys.argv[1])])\ndel looks[:]\n'
            'report_plots.draw_study(scaling.make_studies(found)[0])\nprint(len(looks))')
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.stdout == '1\n', done.stderr


def test_metrics_are_found_among_very_many_lines(tmp_path):
    run = read_run(write_set(tmp_path, 1) / 'result_0.txt')
    (tmp_path / 'metrics.jsonl').write_text('\n'.join([
        '{"event": "x"}', '{"learning_rate": 0.5, "time_s": 2}', 'learning_rate torn', '["stragglers"]',
        '{"event": "ranks", "stragglers": ["rank 1 is slow: y"]}']))
    assert read_learning_rates(run) == ((2, 0.5),)
    assert read_stragglers(run) == ['rank 1 is slow: y (at 1 of 1 evaluations)']


def test_a_note_is_found_by_the_system_that_it_names(studies):
    study = replace(studies[0], cautions=('a: b: c',), notes=('a: d', 'e'))
    assert study.notes_by_start == {'a': ['a: b: c', 'a: d'], 'a: b': ['a: b: c']}
