"""Submission trees: builds from five logs, refusals, and checks of finished trees."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from helpers import CLI, argv, call, git, run, shipped_logs, write_files
from lines import mllog
from made_systems import commit_program, hide_package
from sample_log import ENV, LARS, SGD, closed, write_five

from mlperf_rn50.analysis.sets.judgement import judge_set
from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.analysis.show.text import render_text
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.package import submission
from mlperf_rn50.mllog.package.code import copy_code
from mlperf_rn50.mllog.package.system_desc import describe_system, find_base, merge_description
from mlperf_rn50.mllog.rulesets import ROUNDS

DIGITS = shipped_logs() / 'digits_five'  # five real runs
SYSTEMS = 'benchmarks/resnet/implementations'
GPU = replace(SGD, train=replace(SGD.train, device='gpu'))
OPEN = 'NOT ready for submission'


def build(folder, tmp_path):
    if folder == DIGITS:
        folder = shutil.copytree(DIGITS, tmp_path / 'digits')
    home = tmp_path / 'checkout'
    commit_program(home, folder)
    words = '--org us --system box --out {} --code {}'
    return call('package', folder, *argv(words, tmp_path / 'out', home))


def lines_of(text):
    """Return the lines of an answer with single spaces."""
    return [' '.join(line.split()) for line in text.splitlines()]


def order(tmp_path, **keys):
    given = {'org': 'us', 'system': 'box', 'round': 'v4.0', 'out': tmp_path / 'out'}
    return submission.Order(**given | {'code': tmp_path / 'checkout'} | keys)


def runs_of(folder):
    return load_run_sets([folder])[0].runs


def make_package(folder, order):
    """Build the package of a copy of the set in a folder, with a program for it."""
    runs = shutil.copytree(folder, order.code.parent / f'runs_{order.system}', dirs_exist_ok=True)
    commit_program(order.code, runs)
    return package_of(runs, order)


def package_of(folder, order):
    (run_set,) = load_run_sets([folder], Rules([ROUNDS[order.round]]))
    return submission.make_package(run_set.runs, run_set.judgement, order)


def append(path, *lines):
    path.write_text(path.read_text() + '\n'.join(lines) + '\n')


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    """Accepted package of real runs, in a folder whose name is a glob pattern."""
    return make_package(DIGITS, order(tmp_path_factory.mktemp('a[b]{c,d}')))


@pytest.fixture
def tree(tmp_path, good):
    """Tree of one system that passes the checkers."""
    return shutil.copytree(good.home, tmp_path / 'out/us')


def test_five_real_runs_pass_the_official_checkers_and_are_labelled(good):
    home, score = good.home, load_run_sets([DIGITS])[0].score_minutes
    answer = submission.package_answer(good, 'heading', score)
    assert lines_of(render_text(answer))[2:7] == [
        'logs 5 of 5 pass the rules of v4.0',
        'system description passed',
        'package_checker found no errors (v4.0)',
        f'result_summarizer {score:.2f} min',
        f'report score {score:.2f} min',
    ]
    report = answer.data
    assert report['passed'] and report['tree'] == str(home) and report['score_minutes'] == score
    assert {'checker': 'package_checker', 'text': 'found no errors (v4.0)'} in report['findings']
    label, gaps, _ = (
        next(n for n in report['notes'] if n.startswith(text))
        for text in (
            'Trained on digits, not ImageNet;',
            'the system description lacks ',
            'the system description comes from the logs and env.json',
        )
    )
    assert 'cooling' in gaps
    assert json.loads((home / 'systems/box.json').read_text())['sw_notes'] == label
    assert label in (home / SYSTEMS / 'box/README.md').read_text()
    for k in range(5):
        assert result(home / 'results/box/resnet', k).read_bytes() == result(DIGITS, k).read_bytes()
    folder = home / SYSTEMS / 'box'
    files = {f'{name}_{k}' for k in range(5) for name in ('config', 'env')}
    assert files <= {p.stem for p in folder.iterdir()}
    shellcheck = run([CLI[0].replace('python', 'shellcheck'), *folder.glob('*.sh')])
    assert shellcheck.returncode == 0, shellcheck.stdout


def result(folder, k):
    return folder / f'result_{k}.txt'


def rewrite(folder, source, target, old, new):
    result(folder, target).write_text(result(folder, source).read_text().replace(old, new))


FAILURES = 'got 2 failed runs, expected at most one: result_0.txt (aborted), result_1.txt (failed)'
SMALL_DATA = closed(replace(SGD, data=DataConfig(dataset='digits', num_train=1437, num_val=360)))


@pytest.mark.parametrize(
    'keys, damage, rules',
    [
        ({'num': 4}, None, ['4 runs, expected 5']),
        ({'num': 6}, None, ['6 runs, expected 5']),
        ({'ends': ['aborted', 'failed']}, None, [FAILURES]),
        (
            {'ends': ['aborted']},
            lambda folder: rewrite(folder, 1, 1, '"key": "cache_clear"', '"key": "other"'),
            ['result_1.txt: cache_clear is missing', 'result_0.txt: did not converge (aborted)'],
        ),
        ({'seeds': [1, 2, 3, 4, 4]}, None, ['some runs have the same seed']),
        ({'config': SMALL_DATA}, None, ['the closed division requires ImageNet, but']),
        (
            {'pace_ms': 50},
            lambda folder: rewrite(folder, 3, 4, '"value": 4,', '"value": 99,'),
            ['result_4.txt is a duplicate of result_3.txt: all '],
        ),
        (
            {'ends': ['aborted']},
            lambda folder: append(result(folder, 0), mllog('opt_name', 0, 'adam/../../../tmp/x')),
            ["result_0.txt: opt_name: got 'adam/../../../tmp/x', expected"],
        ),
        ({'config': closed(LARS)}, None, ['epochs to converge: fails: 4.00 epochs, at least 3']),
    ],
    ids='few many failed rules seeds data duplicate name epochs'.split(),
)
def test_refused_set_leaves_no_files(tmp_path, keys, damage, rules):
    folder = write_five(tmp_path / 'runs', **keys)
    if damage:
        damage(folder)
    tree = make_package(folder, order(tmp_path))
    assert tree.home is None and not (tmp_path / 'out').exists()
    texts = [t for t in tree.refusals if 'RCP' in t or not t.startswith('package_checker')]
    assert len(texts) == len(rules) and all(map(str.startswith, texts, rules)), tree.refusals


def test_unsuitable_runs_are_refused(tmp_path):
    (run_set,) = load_run_sets([DIGITS], Rules(['4.0.0']))
    first, *others = run_set.runs

    def refusals(*runs):
        return submission.refusals_of(judge_set(replace(run_set, runs=runs)).judgement, runs)

    assert refusals(first, *others) == []
    for change, rule in [
        ({'num_resumes': 1}, 'resumed'),
        ({'status': 'running'}, 'running'),
        ({'division': 'closed'}, 'got the divisions closed, open, expected one'),
    ]:
        assert refusals(replace(first, **change), *others)[0] == rule
    # accepted by MLPerf
    padded = {'division': 'closed', 'dataset': None, 'train_samples': 1_277_952}
    found = refusals(*(replace(r, **padded) for r in run_set.runs))
    assert not any('requires ImageNet' in text for text in found)
    os.mkfifo(result(tmp_path, 5))
    for k in range(1, 5):
        shutil.copy(result(DIGITS, k), tmp_path)
    assert 'error  result_5.txt: cannot read the log' in build(tmp_path, tmp_path).stdout


def test_one_failed_run_is_accepted_and_is_the_first_warning(tmp_path):
    folder = write_five(tmp_path / 'runs', ends=[None])
    append(result(folder, 2), mllog('global_batch_size', 0, 63))
    (run_set,) = load_run_sets([folder], Rules(['4.0.0']))
    assert submission.refusals_of(run_set.judgement, run_set.runs) == []
    (grade, text), *remarks = submission.find_remarks(run_set.runs, run_set.judgement)
    assert (grade, text.partition(')')[0]) == (
        'warning',
        '1 of 5 runs did not converge (result_0.txt: failed',
    )
    assert [t for _, t in remarks if re.match(r'result_2.txt:.*global_batch_size is 63', t)]


def test_score_is_scaled_by_reference_convergence_points(tmp_path):
    """The runs take 34 epochs at batch 1632, for which the reference has 35."""
    curve = (0.5,) * 16 + (0.7595,)
    folder = write_five(tmp_path / 'runs', closed(LARS), accuracies=curve, batch=1632)
    minutes = sum(sorted(r.time_to_train_s for r in runs_of(folder))[1:4]) / 3 / 60
    tree = make_package(folder, order(tmp_path))
    scaled_minutes = pytest.approx(minutes * 35 / 34, rel=1e-6)
    assert (tree.refusals, tree.official_score_minutes) == ((), scaled_minutes)
    text = f'{35 / 34:.4f} for box: faster than the reference, within its bounds'
    assert ('scaling', text) in tree.findings
    assert len(list((tree.home / 'results/box/resnet').iterdir())) == 5


def lines_as_dict(text):
    """Return keys and values of lines such as 'key: value'."""
    return dict(line.strip().split(': ') for line in text.strip().splitlines())


def test_description_of_the_machine_comes_from_the_logs_and_env_json(tmp_path):
    runs = runs_of(write_five(tmp_path / 'runs', GPU))
    built = describe_system(runs, ENV, 'us', 'box', 'v4.0', None)
    expected = lines_as_dict("""
        number_of_nodes: 2
        accelerators_per_node: 4
        accelerator_model_name: V100
        accelerator_memory_capacity: 32510 MiB
        host_processors_per_node: 2
        host_processor_core_count: 20
        host_processor_vcpu_count: 40
        host_memory_capacity: 512 GB
        host_storage_type: 2x NVMe SSD
        host_storage_capacity: 2x 1600 GB
        host_networking: mlx5_0 100 Gb/sec
        operating_system: Debian GNU/Linux 12
        framework: MXNet 1.9.1 Gluon""")
    assert built | expected == built and len(built) == 33


def test_gaps_in_the_submitted_description_are_filled_from_the_machine(tmp_path):
    kept = {'cooling': 'water', 'other_software_stack': {'a': '1'}, 'extra': 'x'}
    submitted = kept | lines_as_dict("""
        submitter: them
        division: closed
        status: onprem
        system_name: node
        number_of_nodes: 3
        accelerators_per_node: 4
        host_processor_model_name: EPYC
        host_memory_capacity:  N/A""")
    folder = write_five(tmp_path / 'results/node/resnet', GPU)
    write_files(tmp_path, {'systems/node.json': json.dumps(submitted)})
    runs, base = runs_of(folder), find_base(folder / 'result_0.txt')
    built, logged = (describe_system(runs, env, 'us', 'box', 'v4.0', base) for env in (ENV, {}))
    built['sw_notes'] = logged['sw_notes'] = 'a label'
    merged, notes = merge_description(base, built, logged)
    expected = kept | lines_as_dict("""
        host_processor_model_name: EPYC
        number_of_nodes: 3
        submitter: us
        system_name: box
        division: open
        host_memory_capacity: 512 GB
        sw_notes: a label""")
    assert merged | expected == merged and merged['status'] == built['status']
    env, logs = notes[0].split('; from the logs: ')
    assert env.startswith('the system description is systems/node.json; from env.json: ')
    assert 'host_memory_capacity' in env and 'hw_notes' in logs
    assert 'cooling' not in notes[0] and 'sw_notes' not in notes[0]
    assert [n.partition(' is ')[0] for n in notes[1:]] == ['number_of_nodes', 'division']


@pytest.mark.parametrize(
    'submitted',
    [
        '[]',
        '{"number_of_nodes": {"a": 1}, "other_software_stack": [1]}',
        '{"nodes": 3, "sw_notes": {}, "division": 7}',
        '[' * 100_000,
    ],
)
@pytest.mark.parametrize(
    'env',
    [
        {'host': 3, 'packages': []},
        {'host': {'hardware': {'cpu': [], 'storage': {}, 'gpus': [1], 'networks': 'x'}}},
    ],
)
def test_malformed_description_and_env_json_are_tolerated(tmp_path, submitted, env):
    write_files(tmp_path, {'systems/node.json': submitted})
    base = find_base(tmp_path / 'results/node/resnet/result_0.txt')
    built = describe_system((), env, 'us', 'box', 'v4.0', base)
    assert (base is None) == submitted.startswith('[')
    if base:
        merged, _ = merge_description(base, built, built)
        for k, v in built.items():
            assert isinstance(merged[k], type(v)) or k == 'other_software_stack'
        assert merged['division'] == 'open' and json.dumps(merged)


def test_code_comes_from_the_commit_of_the_runs(tmp_path):
    home = tmp_path / 'checkout'
    commit = commit_program(home)
    (home / 'launch/local.sh').write_text('now')
    commit_program(home, later='int')
    copy_code(tmp_path / 'code', home, commit)
    assert (tmp_path / 'code/launch/local.sh').read_text() == 'exec true\n'


def contents(tree):
    return {p: p.read_bytes() for p in tree.rglob('*') if p.is_file()}


def test_second_system_is_added_and_nothing_is_overwritten(tmp_path, tree):
    before = contents(tree)
    with pytest.raises(UserError, match='exists and is not overwritten'):
        make_package(DIGITS, order(tmp_path))
    assert make_package(DIGITS, order(tmp_path, system='box2', round='v1.0')).refusals == ()
    assert (tree / SYSTEMS / 'box2/run_and_time.sh').is_file()
    assert contents(tmp_path / 'out') == contents(tree) == contents(tree) | before


@pytest.mark.parametrize(
    'keys, message',
    [
        ({'org': ''}, '--org: got'),
        ({'system': '../x'}, '--system: got'),
        ({'org': '.x'}, '--org: got'),
        ({'system': 'x' * 200}, '--system: got'),
        ({'round': 'v0.5'}, '--poc-email: missing'),
    ],
)
def test_invalid_names_are_refused(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        make_package(DIGITS, order(tmp_path, **keys))
    assert not (tmp_path / 'out').exists()


def test_finished_tree_is_rechecked(tree):
    before = contents(tree)
    done = call('package', '--check', tree)
    assert done.returncode == 0 and contents(tree) == before
    first, _, *rows = lines_of(done.stdout)
    assert first == f'{tree}: v4.0, no errors found'
    assert 'logs box: 5 of 5 pass the rules of v4.0' in rows
    for start in (
        "note box: all 5 logs: submission_org is 'unnamed', but 'us' in box.json;",
        'result_summarizer box: ',
    ):
        assert any(row.startswith(start) for row in rows)
    [gaps] = [row for row in rows if row.startswith('note systems/box.json lacks ')]
    assert 'cooling' in gaps
    assert 'accelerator' not in gaps and 'hw_notes' not in gaps  # the machine has no accelerators


def change(**fields):
    """Return a function that changes fields of a system description, or removes those of ..."""

    def write(tree):
        path = tree / 'systems/box.json'
        content = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return write


@pytest.mark.parametrize(
    'damage, problem',
    [
        (change(host_processors_per_node='1' * 10), "host_processors_per_node is '111"),
        (change(division='closed'), 'division is closed, expected open as in the logs'),
        (change(cooling=...), "['Missing field cooling']"),
        (
            lambda t: (t / 'systems/box.json').write_text('{'),
            'systems/box.json: Expecting property name',
        ),
        (
            lambda t: append(result(t / 'results/box/resnet', 3), mllog('opt_name', 0, '../../x')),
            "box: result_3.txt: opt_name: got '../../x'",
        ),
    ],
)
def test_errors_in_a_finished_tree_are_reported(tree, damage, problem):
    damage(tree)
    done = call('package', '--check', tree, '--format', 'json')
    refusals = json.loads(done.stdout)['refusals']
    assert done.returncode == 1 and problem in ' '.join(refusals), done.stdout


def test_empty_field_prevents_submission_and_a_summarizer_crash_is_reported(tmp_path):
    """The summarizer expects numbers and crashes on an empty env.json, but both commands
    succeed."""
    done = build(write_five(tmp_path / 'runs', env={}), tmp_path)
    first, _, *lines = lines_of(done.stdout)
    assert done.returncode == 0 and first == f'{tmp_path}/out/us: box, v4.0, {OPEN}'
    text = '\n'.join(lines)
    assert "error systems/box.json: host_processors_per_node is ''" in text
    assert 'result_summarizer crashed: ValueError: invalid literal for int()' in text
    again = call('package', '--check', tmp_path / 'out/us').stdout
    assert again.startswith(f'{tmp_path}/out/us: v4.0, {OPEN}\n')


def test_hanging_checker_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr('mlperf_rn50.mllog.check.official._MAX_S', 0.01)
    done = build(DIGITS, tmp_path)
    assert done.returncode == 1 and 'package_checker crashed: no answer after 0.01 s' in done.stdout


@pytest.mark.parametrize(
    'scored, findings, is_shown',
    [
        (0.48, (), True),
        (0.4401, (), False),
        (None, (), False),
        (0.48, [('scaling', '1.1 for box')], False),
    ],
)
def test_differing_scores_are_reported(tmp_path, scored, findings, is_shown):
    tree = submission.Package(tmp_path, findings=findings, official_score_minutes=0.44)
    *_, last = lines_of(render_text(submission.package_answer(tree, 'x', scored)))
    text = 'warning the scores differ: 0.44 min from result_summarizer, 0.48 min from report;'
    assert last.startswith(text) == is_shown


def test_missing_mlperf_logging_is_a_one_line_error(tmp_path, monkeypatch):
    hide_package(monkeypatch, 'mlperf_logging')
    for done in (build(DIGITS, tmp_path), call('check', DIGITS)):
        assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
        assert "needs mlperf-logging: pip install '.[check]' in the checkout" in done.stderr
    assert not (tmp_path / 'out').exists()
    assert call('check', DIGITS, '--ruleset', 'v0.5').returncode == 0  # works without


@pytest.mark.parametrize('name', ['config_2.yaml', 'env_2.json'])
@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir], ids=['pipe', 'folder'])
def test_configuration_that_is_no_file_is_refused(tmp_path, name, make):
    path = shutil.copytree(DIGITS, tmp_path / 'set') / name
    path.unlink()
    make(path)
    done = build(path.parent, tmp_path)
    assert done.returncode == 1 and not (tmp_path / 'out').exists()
    assert f'{name}: got no regular file, expected a file; replace it' in done.stdout


def test_file_in_place_of_a_folder_of_the_tree_is_refused_before_anything_is_written(tmp_path):
    write_files(tmp_path, {'out/us/benchmarks': 'mine'})
    with pytest.raises(UserError, match='us/benchmarks exists already and is not replaced'):
        make_package(DIGITS, order(tmp_path))
    assert [p.name for p in (tmp_path / 'out/us').rglob('*')] == ['benchmarks']
