"""Submission trees: builds from five logs, refusals, and checks of finished trees."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from helpers import argv, call, shipped_logs, write_files
from lines import mllog
from made_systems import commit_program, hide_package
from sample_log import LARS, SGD, closed, write_five

from mlperf_rn50.analysis.sets.judgement import judge_set
from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.check.official_tree import TreeVerdict
from mlperf_rn50.mllog.package import submission, tree_verdict
from mlperf_rn50.mllog.rulesets import ROUNDS

DIGITS = shipped_logs() / 'digits_five'  # five real runs
SYSTEMS = 'benchmarks/resnet/implementations'


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
    assert {
        'logs box: 5 of 5 pass the rules of v4.0',
        'system description passed',
        'package_checker found no errors (v4.0)',
        'repo_checker found no errors',
        f'result_summarizer box: {score:.2f} min',
        f'report score {score:.2f} min',
    } <= {*lines_of(render_text(answer))}
    report = answer.data
    assert report['tree'] == str(home) and report['score_minutes'] == score
    [label] = [n for n in report['notes'] if n.startswith('Trained on digits, not ImageNet;')]
    assert json.loads((home / 'systems/box.json').read_text())['sw_notes'] == label
    assert label in (home / SYSTEMS / 'box/README.md').read_text()
    for k in range(5):
        assert result(home / 'results/box/resnet', k).read_bytes() == result(DIGITS, k).read_bytes()


def test_data_other_than_imagenet_empty_fields_and_placeholders_are_things_to_edit(good):
    answer = submission.package_answer(good, 'heading', None)
    assert re.fullmatch(r'ready for v4.0: no, \d+ things to edit', answer.sentences[0])
    missing = {(fault['file'], fault['key']) for fault in answer.data['missing']}
    assert missing >= {
        ('results/box/resnet', 'dataset'),
        ('systems/box.json', 'cooling'),
        ('all 5 logs', 'submission_org'),
    }
    assert answer.exit_code == 1 and not answer.data['ready'] and not answer.data['refusals']


def test_published_files_name_no_host_and_no_folder(good):
    folder = good.home / SYSTEMS / 'box'
    files = [*folder.glob('env_*.json'), *folder.glob('config_*.yaml')]
    hosts = [json.loads(p.read_text())['nodes'][0]['hostname'] for p in files[:5]]
    assert len(files) == 10 and set(hosts) == {'node1'}


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
        (
            {'config': closed(LARS)},
            None,
            ['epochs to converge: fails: mean 4.00 epochs at batch 64, at'],
        ),
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
        return tree_verdict.refusals_of(judge_set(replace(run_set, runs=runs)).judgement, runs)

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
    assert tree_verdict.refusals_of(run_set.judgement, run_set.runs) == []
    (grade, text), *remarks = tree_verdict.find_remarks(run_set.runs, run_set.judgement)
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
    assert ('scaling', text) in tree.verdict.results


def contents(tree):
    return {p: p.read_bytes() for p in tree.rglob('*') if p.is_file()}


def test_second_system_is_added_and_nothing_is_overwritten(tmp_path, tree):
    before = contents(tree)
    with pytest.raises(UserError, match='exists and is not overwritten'):
        make_package(DIGITS, order(tmp_path))
    assert make_package(DIGITS, order(tmp_path, system='box2', round='v1.0')).refusals == ()
    assert (tree / SYSTEMS / 'box2/run_and_time.sh').is_file()
    assert contents(tree) == contents(tree) | before
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {tree.name, '.mlperf_rn50.sha256'}


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
    assert done.returncode == 1 and contents(tree) == before
    first, *rows = lines_of(done.stdout)
    assert first.startswith('ready for v4.0: no, ')
    assert 'logs box: 5 of 5 pass the rules of v4.0' in rows
    assert any(row.startswith('result_summarizer box: ') for row in rows)


def change(**fields):
    """Return a function that changes fields of a system description, or removes those of ..."""

    def write(tree):
        path = tree / 'systems/box.json'
        content = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return write


def move_out(tree):
    """Replace the logs by a link to them; an archive would have no log."""
    folder, place = tree / 'results/box/resnet', tree.parent / 'elsewhere'
    folder.rename(place)
    folder.symlink_to(place)


@pytest.mark.parametrize(
    'damage, problem',
    [
        (change(host_processors_per_node='1' * 10), "host_processors_per_node: got '1111"),
        (change(division='closed'), "division: got 'closed', but"),
        (change(cooling=...), "['Missing field cooling']"),
        (
            lambda t: (t / 'systems/box.json').write_text('{'),
            'systems/box.json: Expecting property name',
        ),
        (
            lambda t: append(result(t / 'results/box/resnet', 3), mllog('opt_name', 0, '../../x')),
            "result_3.txt: opt_name: got '../../x'",
        ),
        (lambda t: (t / SYSTEMS / 'box/setup.sh').unlink(), 'box: lacks setup.sh'),
        (move_out, 'results/box/resnet: is a link out of the tree'),
    ],
)
def test_errors_in_a_finished_tree_are_reported(tree, damage, problem):
    damage(tree)
    done = call('package', '--check', tree, '--format', 'json')
    flaws = json.loads(done.stdout)['flaws']
    assert done.returncode == 1 and problem in ' '.join(flaws), done.stdout


def test_hanging_checker_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr('mlperf_rn50.mllog.check.official_tree._MAX_S', 0.01)
    done = build(DIGITS, tmp_path)
    assert done.returncode == 1 and 'crashed: no answer after 0.01 s' in done.stdout


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
    judged = TreeVerdict(results=findings, scores={'box': 0.44})
    tree = submission.Package('v4.0', tmp_path, verdict=judged)
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
