"""Submission trees: what they are made from, what is refused, said and checked again before they are handed in."""
import json
import os
import shutil
import sys
from dataclasses import replace

import pytest
from helpers import ROOT, call
from lines import mllog
from sample_log import LARS
from submissions import at_another_pace, closed, write_five

import mlperf_rn50
from mlperf_rn50.mlperf.describe_system import describe_system, find_base, find_gaps, merge_description
from mlperf_rn50.mlperf.package import Order, make_package
from mlperf_rn50.study.systems import load_systems

# 18 evaluations, as the reference converges with a batch of 1632: two epochs each.
AS_REFERENCE = {'accuracies': (0.5,) * 17 + (0.7595,), 'batch': 1632}


def package(folder, tmp_path, *options):
    return call('package', folder, '--org', 'us', '--system', 'box', '--out', tmp_path / 'out', *options)


def order(tmp_path, **keys):
    return Order(**{'org': 'us', 'system': 'box', 'round': 'v4.0', 'out': tmp_path / 'out', **keys})


def runs_of(folder):
    return load_systems([folder])[0].runs


def append(folder, k, *lines):
    with open(folder / f'result_{k}.txt', 'a') as f:
        f.write('\n'.join(lines) + '\n')


def in_tree(tmp_path, description, **keys):
    """A set where a submission has it, with a description beside it."""
    home = tmp_path / 'theirs'
    folder = write_five(home / 'results/node/resnet', **keys)
    (home / 'systems').mkdir()
    (home / 'systems/node.json').write_text(json.dumps(description))
    return folder


def test_copies_are_refused_whatever_their_seed(tmp_path):
    folder = write_five(tmp_path / 'runs')
    for k, path in enumerate(sorted(folder.glob('result_*.txt'))):
        path.write_text(at_another_pace(path.read_text(), 40 * min(k, 3)))
    text = (folder / 'result_3.txt').read_text().replace('"value": 4,', '"value": 99,')
    (folder / 'result_4.txt').write_text(text)
    made = make_package(runs_of(folder), order(tmp_path))
    assert made.home is None and not (tmp_path / 'out').exists()
    assert [r for r in made.refusals if 'copy' in r][0].startswith('result_4.txt is a copy of result_3.txt: all ')


def test_a_run_that_failed_is_said_first(tmp_path):
    done = package(write_five(tmp_path / 'runs', ends=[None]), tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == (
        '  mind: one of 5 did not converge (result_0.txt: failed): it counts as the slowest')


def test_a_run_that_failed_and_one_that_breaks_a_rule_are_two(tmp_path):
    folder = write_five(tmp_path / 'runs', ends=['aborted'])
    text = (folder / 'result_1.txt').read_text()
    (folder / 'result_1.txt').write_text(text.replace('"key": "cache_clear"', '"key": "other"'))
    made = make_package(runs_of(folder), order(tmp_path))
    assert made.refusals == ('result_1.txt: cache_clear is missing', 'result_0.txt: did not converge (aborted)')


def test_what_is_odd_about_a_log_is_said(tmp_path):
    folder = write_five(tmp_path / 'runs')
    append(folder, 2, mllog('run_stop', 600_000_000, status='aborted'))
    done = package(folder, tmp_path)
    assert done.returncode == 0, done.stdout
    assert any(line.startswith('  mind: result_2.txt:') and 'run_stop' in line for line in done.stdout.splitlines())


def test_a_log_that_is_still_written_is_refused(tmp_path):
    found = runs_of(write_five(tmp_path / 'runs'))
    made = make_package((replace(found[0], status='running'), *found[1:]), order(tmp_path))
    assert made.refusals == ('result_0.txt: is still being written',)


def test_a_named_pipe_is_no_result(tmp_path):
    found = runs_of(write_five(tmp_path / 'runs'))
    os.mkfifo(tmp_path / 'runs/pipe')
    made = make_package((replace(found[0], path=tmp_path / 'runs/pipe', status='unreadable'), *found[1:]),
                        order(tmp_path))
    assert made.refusals == ('pipe: is no file',)


def test_a_long_line_is_refused_before_the_official_tools(tmp_path):
    folder = write_five(tmp_path / 'runs')
    append(folder, 1, mllog('seed', 0, 'x' * 10_000))
    made = make_package(runs_of(folder), order(tmp_path))
    assert len(made.refusals) == 1 and 'is longer than 8192 characters' in made.refusals[0]


def test_the_description_beside_the_logs_is_the_base_and_env_json_fills_its_gaps(tmp_path):
    theirs = {'submitter': 'them', 'division': 'closed', 'status': 'onprem', 'system_name': 'node',
              'number_of_nodes': 3, 'accelerators_per_node': '0', 'host_processor_model_name': 'EPYC',
              'host_memory_capacity': ' N/A', 'cooling': 'water', 'other_software_stack': {'a': '1'}, 'extra': 'x'}
    made = make_package(runs_of(in_tree(tmp_path, theirs)), order(tmp_path))
    assert made.refusals == ()
    found = json.loads((made.home / 'systems/box.json').read_text())
    assert {k: found[k] for k in ('host_processor_model_name', 'cooling', 'other_software_stack', 'extra',
                                  'number_of_nodes')} == {
        'host_processor_model_name': 'EPYC', 'cooling': 'water', 'other_software_stack': {'a': '1'}, 'extra': 'x',
        'number_of_nodes': '3'}
    assert [found[k] for k in ('submitter', 'system_name', 'division', 'host_memory_capacity')] == [
        'us', 'box', 'open', '512 GB']
    assert made.notes[0].startswith('the system description is systems/node.json; from env.json: ')
    env, logs = made.notes[0].split('; from the logs: ')
    assert 'host_memory_capacity' in env and 'hw_notes' in logs and 'cooling' not in made.notes[0]
    assert 'systems/node.json says number_of_nodes 3, the logs 2; results and description are to agree' in made.notes
    assert 'systems/node.json says division closed, the logs open; the logs count' in made.notes


@pytest.mark.parametrize('theirs', ['[1', '[]', '{"number_of_nodes": {"a": 1}, "other_software_stack": [1]}',
                                    '{"nodes": 3, "sw_notes": {}, "division": 7}', '[' * 100_000, '\ud800'])
def test_whatever_stands_in_a_description(tmp_path, theirs):
    path = tmp_path / 'systems/node.json'
    path.parent.mkdir(parents=True)
    path.write_bytes(theirs.encode('utf-8', 'surrogatepass'))
    base = find_base(tmp_path / 'results/node/resnet/result_0.txt')
    ours = describe_system((), {}, 'us', 'box', 'v4.0', base)
    made = merge_description(base, ours, ours)[0] if base else ours
    assert all(isinstance(made[k], type(v)) for k, v in ours.items() if k != 'other_software_stack')
    assert made['division'] == 'open' and json.dumps(made)
    assert (base is None) == theirs.startswith(('[', '\ud800'))


def test_an_installed_copy_has_no_code_to_submit(tmp_path, monkeypatch):
    site = tmp_path / 'site-packages'
    (site / 'mlperf_rn50').mkdir(parents=True)
    (site / 'mlperf_rn50/__main__.py').touch()
    monkeypatch.setattr(mlperf_rn50, '__file__', str(site / 'mlperf_rn50/__init__.py'))
    folder = write_five(tmp_path / 'runs')
    done = package(folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, '') and not (tmp_path / 'out').exists()
    assert done.stderr == (
        f'mlperf-rn50: --code: {site} lacks setup.cfg, launch/setup.sh, launch/requirements.lock, launch/local.sh, '
        'launch/mpirun.sh; name a checkout of mlperf_rn50 with --code DIR\n')
    assert package(folder, tmp_path, '--code', ROOT).returncode == 0
    code = tmp_path / 'out/us/benchmarks/resnet/implementations/mlperf_rn50/code'
    assert (code / 'launch/setup.sh').is_file() and (code / 'launch/requirements.lock').is_file()


def test_a_failed_log_that_crashes_the_official_tools_is_said(tmp_path):
    folder = write_five(tmp_path / 'runs', closed(LARS), **AS_REFERENCE)
    (folder / 'result_2.txt').write_text('killed at once\n')
    made = make_package(runs_of(folder), order(tmp_path))
    assert made.home is None and len(made.refusals) == 1
    assert made.refusals == ('package_checker crashed: KeyError: None',)


@pytest.mark.parametrize('num_evaluations, factor', [(18, None), (17, 35 / 34)])
def test_a_score_is_scaled_as_the_reference_convergence_asks(tmp_path, num_evaluations, factor):
    accuracies = (0.5,) * (num_evaluations - 1) + (0.7595,)
    found = runs_of(write_five(tmp_path / 'runs', closed(LARS), accuracies=accuracies, batch=1632))
    minutes = sum(sorted(r.time_to_train_s for r in found)[1:4]) / 3 / 60
    made = make_package(found, order(tmp_path))
    assert made.refusals == ()
    assert made.official_score_minutes == pytest.approx(minutes * (factor or 1), rel=1e-6)
    scaling = [text for name, text in made.findings if name == 'scaling']
    assert scaling == ([f'{factor:.4f} for box: faster than the reference, within its bounds'] if factor else [])
    assert len(list((made.home / 'results/box/resnet').iterdir())) == 5


def test_folders_whose_names_are_patterns_are_no_hindrance(tmp_path):
    made = make_package(runs_of(write_five(tmp_path / 'runs')), order(tmp_path, out=tmp_path / 'a[b]{c,d}*'))
    assert made.refusals == () and made.official_score_minutes is not None


def test_json_says_the_same(tmp_path):
    folder = write_five(tmp_path / 'runs', ends=[None])
    done = package(folder, tmp_path, '--format', 'json')
    said = json.loads(done.stdout)
    assert done.returncode == 0 and set(said) == {
        'passed', 'tree', 'refusals', 'flaws', 'oddities', 'findings', 'notes', 'score_minutes',
        'official_score_minutes'}
    assert said['passed'] and said['tree'] == str(tmp_path / 'out/us') and said['refusals'] == []
    assert said['oddities'][0].startswith('one of 5 did not converge')
    assert {'checker': 'package_checker', 'text': 'found no errors (4.0.0)'} in said['findings']
    assert said['official_score_minutes'] == pytest.approx(said['score_minutes'], abs=0.01)
    shutil.rmtree(folder)
    refused = package(write_five(folder, num=4), tmp_path, '--system', 'other', '--format', 'json')
    said = json.loads(refused.stdout)
    assert (refused.returncode, said['passed'], said['tree']) == (1, False, None)
    assert said['refusals'] == ['a ResNet result is 5 runs; here are 4']


@pytest.fixture(scope='module')
def good_tree(tmp_path_factory):
    place = tmp_path_factory.mktemp('good')
    return make_package(runs_of(write_five(place / 'runs')), order(place)).home


@pytest.fixture
def tree(tmp_path, good_tree):
    """A tree of one system that the checkers accept."""
    return shutil.copytree(good_tree, tmp_path / 'us')


def files_of(tree):
    return {p: p.read_bytes() for p in tree.rglob('*') if p.is_file()}


def test_a_finished_tree_is_checked_again(tree):
    before = files_of(tree)
    done = call('package', '--check', tree)
    assert done.returncode == 0, done.stdout
    rows = done.stdout.splitlines()
    assert rows[0] == f'{tree}: v4.0, no errors found'
    assert '  logs                box: 5 of 5 pass the rules of 4.0.0' in rows
    assert '  package_checker     found no errors (4.0.0)' in rows
    assert any(row.startswith('  result_summarizer   box: 0.0') for row in rows)
    [gaps] = [row for row in rows if 'says nothing of' in row]
    assert gaps.startswith('  mind: systems/box.json says nothing of ') and 'cooling' in gaps
    assert files_of(tree) == before


def change(path, **fields):
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


@pytest.mark.parametrize('harm, problem', [
    (lambda t: change(t / 'systems/box.json', number_of_nodes=''),
     "systems/box.json: number_of_nodes is '', expected a whole number"),
    (lambda t: change(t / 'systems/box.json', division='closed'),
     'systems/box.json: division is closed, the logs say open'),
    (lambda t: change(t / 'systems/box.json', cooling=...), "Missing field cooling"),
    (lambda t: (t / 'systems/box.json').write_text('{'), 'systems/box.json: Expecting property name'),
    (lambda t: (t / 'systems/box.json').unlink(), 'systems/box.json: No such file'),
    (lambda t: (t / 'results/box/resnet/result_4.txt').unlink(), 'box: a ResNet result is 5 runs; here are 4'),
    (lambda t: append(t / 'results/box/resnet', 3, mllog('opt_name', 0, '../../x')),
     "box: result_3.txt: opt_name: got '../../x'"),
    (lambda t: (t / 'benchmarks/resnet/implementations/mlperf_rn50/code/launch/setup.sh').unlink(),
     'benchmarks/resnet/implementations/mlperf_rn50/code lacks launch/setup.sh')])
def test_what_is_wrong_with_a_finished_tree(tree, harm, problem):
    harm(tree)
    done = call('package', '--check', tree, '--format', 'json')
    assert done.returncode == 1
    assert any(problem in text for text in json.loads(done.stdout)['refusals']), done.stdout


@pytest.mark.parametrize('words, said', [
    ([], 'RUNS, --org ORG, --system SYSTEM, --out DIR: missing'),
    (['runs', '--org', 'us'], '--system SYSTEM, --out DIR: missing'),
    (['--check', 'x', '--org', 'us'], '--check: looks at a finished tree and builds none; got --org too'),
    (['--check', 'x'], '--check: x has no folder results')])
def test_options_that_do_not_go_together(words, said):
    done = call('package', *words)
    assert (done.returncode, done.stdout) == (2, '') and said in done.stderr


def test_without_mlperf_logging_one_line_says_what_to_install(tmp_path, monkeypatch):
    folder = write_five(tmp_path / 'runs')
    monkeypatch.setitem(sys.modules, 'mlperf_logging', None)
    for name in [n for n in sys.modules if n.startswith('mlperf_logging.')]:
        monkeypatch.delitem(sys.modules, name)
    done = package(folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, '') and not (tmp_path / 'out').exists()
    assert done.stderr == "mlperf-rn50: needs mlperf-logging: pip install 'mlperf-rn50[check]'\n"


def test_gaps_are_those_that_matter():
    assert find_gaps({'cooling': '', 'hw_notes': '', 'accelerators_per_node': '0', 'accelerator_frequency': ''}) == [
        'cooling']
