"""Sets are judged one by one: a bad one is refused and the others are reported; copies and lost lines are found."""
import csv
import io
import json
import os
import shutil
import socket
from dataclasses import replace

import pytest
from helpers import call
from lines import write_set

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.run import LogWarning
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


def by_name(folder):
    return {s.name: s for s in load_systems([folder])}


@pytest.fixture
def tree(tmp_path):
    """A study of two sets, and a folder between them whose runs differ in their batch and end at other times."""
    for nodes in (1, 2, 4):
        write_set(tmp_path / f'study/{nodes}n', nodes=nodes, ranks=4 * nodes, epoch_s=40.0 / nodes,
                  batch=lambda k, nodes=nodes: 32 if nodes == 2 and k == 3 else 64 * nodes)
    return tmp_path


REFUSAL = ('global_batch_size is 128 in result_0.txt and 32 in result_3.txt; runs that differ in it are no set: report '
           'them apart')


def test_a_refused_set_is_a_row_with_its_reason_and_the_others_are_reported(tree):
    whole = json.loads(call('report', tree / 'study/1n', tree / 'study/4n', '--format', 'json').stdout)['systems']
    done = call('report', tree, '--format', 'json')
    assert (done.returncode, done.stderr) == (1, '')
    first, last, refused = json.loads(done.stdout)['systems']
    assert [first, last] == whole and (first['refusal'], refused['refusal']) == (None, REFUSAL)
    assert refused['warnings'][0] == REFUSAL and [r['status'] for r in refused['runs']] == ['converged'] * 5
    for key in ('global_batch_size', 'score_minutes', 'official_score_minutes', 'epochs_to_converge_mean', 'speedup',
                'time_to_train_mean_s', 'time_to_train_spread_s', 'images_per_s', 'time_parts_s', 'efficiency'):
        assert refused[key] is None and (first[key] is not None or key == 'dataset'), key
    assert (refused['num_nodes'], refused['num_converged']) == (2, 5)


@pytest.mark.parametrize('form', ['table', 'markdown', 'csv', 'html'])
def test_every_form_has_the_reason(tree, form):
    done = call('report', tree, '--format', form)
    assert (done.returncode, done.stderr) == (1, '') and REFUSAL in done.stdout
    if form == 'csv':
        assert [r['refusal'] for r in csv.DictReader(io.StringIO(done.stdout))] == [*[''] * 10, *[REFUSAL] * 5]
    else:
        assert 'refused: global_batch_size is 128 in result_0.txt and 32 in result_3.txt' in done.stdout


def test_a_refused_set_is_compared_with_nothing(tree):
    study, = make_studies(load_systems([tree]))
    assert [s.name for s in study.systems] == ['1n', '4n', '2n'] and study.baseline.name == '1n'
    assert study.comparisons[2] is None and study.rates[2] is None and not study.splits
    with pytest.raises(UserError, match='--baseline: 2n is no set: global_batch_size is 128'):
        make_studies(load_systems([tree]), '2n')
    alone, = make_studies(load_systems([tree / 'study/2n']))
    assert alone.comparisons == (None,) and 'Speed-up and efficiency against' not in render_table([alone])
    done = call('package', tree / 'study/2n', '--org', 'us', '--system', 'x', '--out', tree / 'out')
    assert done.returncode and REFUSAL in done.stdout + done.stderr and not (tree / 'out').exists()


def test_a_copy_with_another_seed_is_no_run_of_its_own(tmp_path):
    write_set(tmp_path, epoch_s=lambda k: 10.123 + k, eval_s=1.01)
    copied = (tmp_path / 'result_1.txt').read_text().replace('"key": "seed", "value": 2', '"key": "seed", "value": 77')
    (tmp_path / 'result_3.txt').write_text(copied)
    system, = load_systems([tmp_path])
    assert (len(system.runs), len(system.counted), len(system.converged), system.score_minutes) == (5, 4, 4, None)
    assert system.runs[3].seed == 77 and system.warnings[0].startswith('result_3.txt is a copy of result_1.txt')
    assert 'no MLPerf score: it takes 5 runs, here are 4' in system.warnings
    assert system.time_s == pytest.approx(2 * (10.123 + (0 + 1 + 2 + 4) / 4 + 1.01))
    found = json.loads(call('report', tmp_path, '--format', 'json').stdout)['systems'][0]
    assert (found['num_runs'], found['num_converged'], found['score_minutes']) == (5, 4, None)


def test_a_copy_of_a_system_of_the_same_name_names_its_folder(tmp_path):
    write_set(tmp_path / 'x/box', 1, epoch_s=10.123)
    shutil.copytree(tmp_path / 'x/box', tmp_path / 'y/box')
    found = [text for s in load_systems([tmp_path]) for text in s.doubts]
    assert found == [f'result_0.txt has the times of result_0.txt of {tmp_path / "x/box"}: one is a copy of the other']


def test_a_folder_that_cannot_be_read_is_named(tree, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith('2n'):
            raise PermissionError(13, 'Permission denied', str(path))
        return scan(path)
    monkeypatch.setattr(os, 'scandir', refuse)
    done = call('report', tree)
    assert (done.returncode, done.stderr) == (1, '')
    assert 'refused: the folder cannot be read: Permission denied' in done.stdout
    assert by_name(tree)['2n'].refusal == 'the folder cannot be read: Permission denied'
    study, = make_studies(load_systems([tree]))
    assert study.baseline.name == '1n' and [c is None for c in study.comparisons] == [False, False, True]
    done = call('report', tree / 'study/2n')  # alone, too
    assert done.returncode == 1 and 'Permission denied' in done.stdout


def test_a_description_in_a_folder_that_may_not_be_entered_is_left_out(tmp_path, monkeypatch):
    folder = write_set(tmp_path / 'us/results/box/resnet', 1)
    stat = os.stat

    def refuse(path, **keys):
        if 'systems' in str(path):
            raise PermissionError(13, 'Permission denied', str(path))
        return stat(path, **keys)
    monkeypatch.setattr(os, 'stat', refuse)
    assert any('box.json cannot be read: Permission denied; left out' in w for w in load_systems([folder])[0].warnings)


def test_what_is_wrong_is_said_before_what_is_weak_or_odd(tmp_path):
    write_set(tmp_path, 4, epoch_s=lambda k: 10.123 + k, batch=lambda k: 64 if k else 32, train_samples=1437)
    (tmp_path / 'result_4.txt').write_text((tmp_path / 'result_2.txt').read_text())
    run = load_systems([tmp_path])[0].runs[0]
    runs = [replace(run, path=tmp_path / f'result_{k}.txt', warnings=(LogWarning(1, 'odd'), LogWarning(k, 'no', True)))
            for k in range(2)]
    system = System('box', tmp_path, tmp_path, tuple(runs))
    assert system.warnings == (f'{runs[1].path.name} is a copy of {runs[0].path.name}: all 10 times of epochs and '
                               'evaluations are equal to the millisecond; it counts once', 'all 2 logs: no',
                               'no MLPerf score: it takes 5 runs, here is 1; one run says nothing about the spread',
                               'the data is another set, not ImageNet', 'all 2 logs: odd')
    refused, = load_systems([tmp_path])
    assert refused.warnings[0] == refused.refusal and 'is a copy of' in refused.warnings[1]


@pytest.mark.parametrize('num_running', [1, 2])
def test_a_set_has_no_score_while_a_run_is_running(tmp_path, num_running):
    found, = load_systems([write_set(tmp_path)])
    runs = [replace(r, status='running') if k < num_running else r for k, r in enumerate(found.runs)]
    system = replace(found, runs=tuple(runs))
    assert found.score_minutes and system.score_minutes is None and len(system.converged) == 5 - num_running
    assert system.warnings == (f'no MLPerf score yet: {num_running} of 5 runs still running',)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(os.path.relpath(path))


@pytest.mark.parametrize('make, why', [
    (os.mkfifo, 'it is a named pipe, not a file'), (os.mkdir, 'it is a folder, not a file'),
    (lambda p: os.symlink('/dev/zero', p), 'it is a device, not a file'), (make_socket, 'No such device or address'),
    (lambda p: os.symlink(p.name, p), 'Too many levels of symbolic links')])
def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch, make, why):
    write_set(tmp_path / 'runs', 2)
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    make(tmp_path / 'runs/result_2.txt')
    done = call('report', 'runs')
    assert done.returncode == 1 and f'result_2.txt: cannot read the log: {why}' in done.stdout
    done = call('check', 'runs/result_2.txt')
    assert done.returncode == 2 and (f'result_2.txt: cannot read the log: {why}\n' in done.stderr or make is os.mkdir)


def test_named_pipes_beside_a_log_are_not_waited_for(tmp_path):
    write_set(tmp_path / 'runs', 5)
    for name in ('env.json', 'metrics.jsonl', 'telemetry_0_alpha.jsonl'):
        os.mkfifo(tmp_path / 'runs' / name)
    assert call('report', tmp_path / 'runs', '--out', tmp_path / 'out').returncode == 0
    call('package', tmp_path / 'runs', '--org', 'us', '--system', 'x', '--out', tmp_path / 'o')


def test_paths_that_lead_nowhere_are_one_line(tmp_path):
    os.symlink('loop', tmp_path / 'loop')
    os.mkfifo(tmp_path / 'pipe')
    os.symlink(tmp_path, tmp_path / 'again')  # a loop of folders is walked once
    write_set(tmp_path / 'runs', 1)
    assert len(load_systems([tmp_path])) == 1
    for name, why in [('pipe', 'neither a file nor a folder'), ('none', 'no such folder')]:
        done = call('report', tmp_path / name)
        assert (done.returncode, done.stdout) == (2, '') and f'{name}: {why}; expected' in done.stderr
    done = call('report', tmp_path / 'loop')
    assert done.returncode == 1 and 'Too many levels of symbolic links' in done.stdout
