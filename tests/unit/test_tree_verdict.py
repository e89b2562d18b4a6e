"""The verdict on a tree: code, files, evaluations, caches, images, epochs and bypass."""

import json
import shutil

import pytest
from helpers import argv, call, write_files
from lines import complete, mllog, run_lines, write_lines
from made_systems import commit_program
from sample_log import LARS, closed, write_five

from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.mllog.check.code_lines import named_places
from mlperf_rn50.mllog.check.faults import Fault
from mlperf_rn50.mllog.check.official_tree import TreeVerdict, judge_tree
from mlperf_rn50.mllog.package.system_desc import fields_of
from mlperf_rn50.mllog.package.tree_layouts import layout_of, rule_files
from mlperf_rn50.mllog.package.tree_verdict import judge_package

IMPLEMENTATION = 'benchmarks/resnet/implementations'
CURVE = (0.5,) * 8 + (0.7595,)  # 36 epochs with an evaluation every 4


def make_tree(home, systems=('box',)):
    """Write a tree with the rule files, and logs whose lines name train.py:1."""
    for system in systems:
        files = rule_files(layout_of('v4.0'), system, 'code')
        write_files(home, dict.fromkeys(files, 'exit'))
        for k in range(5):
            lines = complete(run_lines(CURVE, seed=k, period=4, epoch_s=10 + k))
            lines.append(mllog('place', 99, file='/w/train.py', lineno=1))
            write_lines(home / f'results/{system}/resnet/result_{k}.txt', lines)
    write_files(home, {f'{IMPLEMENTATION}/code/train.py': 'log.event()'})
    return home


@pytest.fixture
def judged(monkeypatch):
    """Function that returns the faults of a tree without its descriptions; tools: errors of the
    official tools."""

    def judge(home, round_name='v4.0', tools=(), rulesets=('4.0.0',)):
        official = 'mlperf_rn50.mllog.package.tree_verdict.judge_tree'
        monkeypatch.setattr(official, lambda *_: TreeVerdict(tools))
        sets = load_run_sets([home / 'results'], Rules(rulesets))
        by_system = {s.name: (s.runs, s.judgement) for s in sets}
        faults = judge_package(home, round_name, by_system).faults
        return [f for f in faults if not f.file.startswith('systems/') and 'org' not in f.key]

    return judge


def test_tree_with_all_files_and_the_code_that_ran_has_no_fault(tmp_path, judged):
    assert judged(make_tree(tmp_path)) == []


@pytest.mark.parametrize(
    'keys, key, text',
    [
        ({'period': 8}, 'eval_accuracy', 'epochs 0 and 8, expected every 4'),
        ({'period': 3}, 'eval_accuracy', 'epochs 3 and 6'),
        ({'cache_clear': False}, 'cache_clear', 'got false, expected true'),
        ({'eval_samples': 49_999}, 'eval_samples', 'got 49999, expected 50000'),
    ],
)
def test_faults_of_the_runs_are_one_line_for_all_logs(tmp_path, judged, keys, key, text):
    make_tree(tmp_path)
    for k in range(5):
        log = tmp_path / f'results/box/resnet/result_{k}.txt'
        lines = complete(run_lines(CURVE, seed=k, **{'period': 4, 'epoch_s': 10 + k} | keys))
        if 'cache_clear' in keys:
            lines[0] = lines[0].replace(
                '"cache_clear", "value": true', '"cache_clear", "value": false'
            )
        if 'eval_samples' in keys:
            lines = [line.replace('50000', '49999') for line in lines]
        write_lines(log, lines)
    [fault] = [f for f in judged(tmp_path) if f.key == key]
    assert fault.file == 'all 5 logs' and text in fault.text


def test_evaluations_may_be_more_frequent_in_v07(tmp_path, judged):
    make_tree(tmp_path)
    for k in range(5):
        lines = complete(run_lines(CURVE * 4, seed=k, period=1, epoch_s=10 + k))
        write_lines(tmp_path / f'results/box/resnet/result_{k}.txt', lines)
    keys = [
        [f.key for f in judged(tmp_path, name, rulesets=(ruleset,))]
        for name, ruleset in (('v0.7', '0.7.0'), ('v1.0', '1.0.0'))
    ]
    assert 'eval_accuracy' not in keys[0] and 'eval_accuracy' in keys[1]


@pytest.mark.parametrize(
    'name, text, fault, rule',
    [
        (f'{IMPLEMENTATION}/code/train.py', 'x = 1', 'results/box/resnet', 'the code that ran'),
        (f'{IMPLEMENTATION}/box/setup.sh', 'if', f'{IMPLEMENTATION}/box/setup.sh', 'bash cannot'),
        (f'{IMPLEMENTATION}/box/run_and_time.sh', None, f'{IMPLEMENTATION}/box', 'run_and_time.sh'),
        (
            f'{IMPLEMENTATION}/box/env_0.json',
            '{"git_commit": "1-dirty"}',
            'env_*.json',
            'changed files',
        ),
        ('results/empty/resnet/x', '', 'results/empty/resnet', 'no log of ResNet'),
        ('results/box/resnet/result_x.txt', '', 'resnet/result_x.txt', 'not named as a log'),
    ],
)
def test_other_code_and_unusable_files_are_faults(tmp_path, judged, name, text, fault, rule):
    make_tree(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        write_files(tmp_path, {name: text})
    [found] = judged(tmp_path)
    assert found.file.endswith(fault) and rule in found.text


def test_log_that_was_not_judged_is_not_given_to_the_official_tools(tmp_path, monkeypatch):
    """Its division could make the checker run code."""
    make_tree(tmp_path)
    names = ['result_x.txt', 'old/result_0.txt']
    write_files(tmp_path / 'results/box/resnet', dict.fromkeys(names, ''))
    given = []

    def run(tool, tree, *words):
        given.extend(p.name for p in tree.rglob('result_*'))
        return '', []

    monkeypatch.setattr('mlperf_rn50.mllog.check.official_tree._run', run)
    judge_tree(tmp_path, '1.0.0', ['box'])
    assert {*given} == {f'result_{k}.txt' for k in range(5)} and len(given) == 10


def test_log_of_no_training_that_could_control_the_official_tools_is_a_fault(tmp_path, judged):
    make_tree(tmp_path)
    lines = [mllog('loadgen_version', 0, '1'), mllog('submission_division', 0, '../../evil')]
    write_lines(tmp_path / 'results/box/resnet/result_5.txt', lines)
    [found] = judged(tmp_path, tools=[Fault('x', '', 'the tools ran', 'package_checker')])
    assert found.file == 'results/box/resnet/result_5.txt'
    assert found.text.startswith("submission_division: got '../../evil'")


def test_logs_in_another_folder_of_a_tree_are_a_fault(tmp_path, without_tools):
    make_tree(tmp_path)
    (tmp_path / 'results/other').mkdir()
    (tmp_path / 'results/box/resnet').rename(tmp_path / 'results/other/box')
    make_tree(tmp_path)
    done = call('package', '--check', tmp_path, '--round', 'v4.0')
    assert done.returncode == 1 and 'results/other/box: got logs' in done.stdout


def test_place_in_a_program_that_is_no_number_is_ignored(tmp_path):
    write_lines(tmp_path / 'log', [mllog('place', 1, file='/w/train.py', lineno=[1])])
    assert named_places([tmp_path / 'log']) == set()


def test_kinds_of_fault_are_listed_once_for_all_systems(tmp_path, judged):
    make_tree(tmp_path, systems=('a', 'b'))
    write_files(tmp_path, {f'{IMPLEMENTATION}/code/train.py': ''})
    [code] = judged(tmp_path)
    assert code.file == 'results/a/resnet, results/b/resnet' and 'train.py:1' in code.text


def test_tree_without_code_is_one_fault(tmp_path, judged):
    shutil.rmtree(make_tree(tmp_path) / 'benchmarks')
    assert [(f.file, f.text[:9]) for f in judged(tmp_path)] == [('benchmarks/resnet', 'is absent')]


def test_errors_of_the_tools_are_faults_that_name_the_tool(tmp_path, judged):
    make_tree(tmp_path)
    [fault] = judged(tmp_path, tools=[Fault('a b', '', 'bad name', 'repo_checker')])
    assert (fault.file, fault.text, fault.rule) == ('a b', 'bad name', 'repo_checker')


def package(tmp_path, runs, *words):
    home = tmp_path / 'checkout'
    commit_program(home, runs)
    common = '--org us --system box --out {} --code {} --format json'
    return call('package', runs, *argv(common, tmp_path / 'out', home), *words)


def test_too_few_epochs_are_refused_with_both_ways_out_and_bypassed_with_a_reason(tmp_path):
    """The runs take 32 epochs at batch 1632, for which the reference has 35."""
    curve = (0.5,) * 15 + (0.7595,)
    runs = write_five(tmp_path / 'runs', closed(LARS), accuracies=curve, batch=1632)
    [refusal] = json.loads(package(tmp_path, runs).stdout)['refusals']
    assert 'mean 32.00 epochs at batch 1632, at least 33' in refusal and 'reference 35' in refusal
    assert 'mlcommons/logging' in refusal and '--rcp-bypass REASON' in refusal
    report = json.loads(package(tmp_path, runs, '--rcp-bypass', 'a new\nschedule').stdout)
    results = tmp_path / 'out/us/results/box/resnet'
    assert (results / 'package_checker_params').read_text() == 'rcp-bypass'
    assert 'a new schedule' in (tmp_path / f'out/us/{IMPLEMENTATION}/box/README.md').read_text()
    assert {'tool': 'package_checker', 'text': 'found no errors (v4.0)'} in report['verdicts']
    assert not any('epochs to converge' in text for text in report['flaws'])
    assert any('notify the results chair' in text for text in report['oddities'])


@pytest.fixture
def without_tools(monkeypatch):
    """Replace the official tools, which take seconds."""
    official = 'mlperf_rn50.mllog.package.tree_verdict.judge_tree'
    monkeypatch.setattr(official, lambda *_: TreeVerdict())


def test_median_window_of_seven_runs_is_submitted(tmp_path, without_tools):
    runs = write_five(tmp_path / 'runs', num=7)
    report = json.loads(package(tmp_path, runs).stdout)
    scores = [note for note in report['notes'] if note.startswith('runs result_')]
    assert len(scores) == 3 and sum('the median' in score for score in scores) == 1
    first = next(k for k, score in enumerate(scores) if 'the median' in score)
    for k in range(5):
        copy = tmp_path / f'out/us/results/box/resnet/result_{k}.txt'
        assert copy.read_bytes() == (runs / f'result_{first + k}.txt').read_bytes()
    old = package(tmp_path, runs, '--round', 'v1.0', '--org', 'old')
    assert json.loads(old.stdout)['refusals'] == ['7 runs, expected 5']


def test_ready_tree_is_packed_and_its_verdict_is_yes(tmp_path, without_tools, monkeypatch):
    packed = []
    place = 'mlperf_rn50.mllog.package.archive.pack_tree'
    monkeypatch.setattr(place, lambda home: packed.append(home) or (home, home))
    home = make_tree(tmp_path / 'us')
    counts = {'number_of_nodes': '1', 'accelerators_per_node': '4', 'host_processors_per_node': '2'}
    facts = {'submitter': 'us', 'division': 'closed', 'status': 'Available on-premise'}
    fields = dict.fromkeys(fields_of('v4.0'), 'N/A') | counts | facts
    write_files(home, {'systems/box.json': json.dumps(fields)})
    done = call('package', '--check', home, '--pack')
    assert (done.returncode, done.stdout.partition('\n')[0]) == (0, 'ready for v4.0: yes')
    assert packed == [home]


def test_tree_that_is_not_ready_is_not_packed(tmp_path, without_tools):
    runs = write_five(tmp_path / 'runs')
    report = json.loads(package(tmp_path, runs, '--pack').stdout)
    assert '--pack: nothing was packed' in report['notes'] and not report['ready']
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {'us', '.mlperf_rn50.sha256'}
