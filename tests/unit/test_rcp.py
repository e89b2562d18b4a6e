"""Reference convergence points: verdicts match the official checker, scores match
result_summarizer."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers import PUBLISHED, call, write_files
from made_systems import changed, hide_package, written_set
from mlperf_logging.rcp_checker.rcp_checker import check_directory
from pytest import approx
from sample_log import ENV, LARS, closed, write_five

from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import sets_under
from mlperf_rn50.analysis.sets.rcp import check_rcp, official_score_minutes
from mlperf_rn50.analysis.sets.scaling import make_studies
from mlperf_rn50.mllog.check.official_tree import summarize_tree
from mlperf_rn50.mllog.findings import make_finding
from mlperf_rn50.mllog.logged_run import TARGET
from mlperf_rn50.mllog.package.system_desc import describe


def summarize(home, system, ruleset):
    """Return the scores of the summarizer's first run, which computes the factor, and second run,
    which applies it."""
    return [summarize_tree(home, ruleset, home.parent)[0].get(system) for _ in range(2)]


@pytest.fixture
def tree_of(tmp_path):
    """Function that writes a submission of 34 epochs at batch 1632, for which the reference has
    35."""

    def make(round_name, division='closed', num=17, batch=1632):
        home = tmp_path / round_name / 'us'
        config = closed(LARS) if division == 'closed' else LARS
        curve = (0.5,) * (num - 1) + (0.7595,)
        write_five(home / 'results/box/resnet', config, pace_ms=50, accuracies=curve, batch=batch)
        (system,) = load_run_sets([home])
        names = {'org': 'us', 'system': 'box', 'round_name': round_name}
        description = describe(system.runs, ENV, **names).fields
        write_files(home, {'systems/box.json': json.dumps(description)})
        return home, system

    return make


@pytest.mark.parametrize(
    'round_name, division, factor',
    [
        ('v4.0', 'closed', 35 / 34),
        ('v0.7', 'closed', 1),
        pytest.param('v1.0', 'closed', 35 / 34, marks=pytest.mark.slow),
        pytest.param('v4.0', 'open', 1, marks=pytest.mark.slow),
    ],
)
def test_score_matches_the_official_summarizer(tree_of, round_name, division, factor):
    home, system = tree_of(round_name, division)
    unscaled, official = summarize(home, 'box', f'{round_name[1:]}.0')
    scores = system.score_minutes, official_score_minutes(system)
    assert scores == approx((unscaled, official), rel=1e-4)
    assert official / unscaled == approx(factor) == scores[1] / scores[0]


def test_points_apply_to_logs_that_count_a_few_images_less(tree_of):
    home, system = tree_of('v4.0')
    for run in system.runs:
        text = run.path.read_text().replace('"value": 1281167', '"value": 1277952')
        run.path.write_text(re.sub('.*"key": "dataset".*\n', '', text))
    (fewer,) = load_run_sets([home])
    assert fewer.runs[0].train_samples == 1277952
    assert check_rcp(fewer) == check_rcp(system) is not None


def test_score_of_logs_that_count_epochs_from_0_matches_the_official_summarizer(tree_of):
    home, right = tree_of('v4.0', num=18, batch=3264)
    assert official_score_minutes(right) == right.score_minutes
    for path in home.glob('results/box/resnet/*.txt'):
        text = re.sub(r'(epoch_num": )(\d+)', lambda m: f'{m[1]}{int(m[2]) - 1}', path.read_text())
        path.write_text(text)
    (system,) = load_run_sets([home])
    unscaled, official = summarize(home, 'box', '4.0.0')
    assert official == approx(unscaled * 35.1538 / 35, rel=1e-4)
    assert system.epochs == right.epochs
    assert official_score_minutes(system) == approx(official, rel=1e-4)
    found = make_studies([system])[0].findings[system][-1]
    assert found.kind == 'score_scaled' and found.text.endswith('count from 0')


@pytest.mark.parametrize(
    'name, minutes',
    [
        ('1-node-8s-8380H-tensorflow', 948.12),
        ('2-nodes-16s-8376H-tensorflow', 593.65),
        ('8-nodes-64s-8376H-tensorflow', 213.92),
    ],
)
def test_score_of_published_sets_that_count_epochs_from_0_is_the_official_one(name, minutes):
    (system,) = sets_under(Path('published/v1.0/Intel', name))
    assert official_score_minutes(system) == approx(minutes, abs=0.005)


@pytest.mark.needs_published
def test_score_matches_the_official_summarizer_on_published_logs(tmp_path):
    home = shutil.copytree(PUBLISHED / 'v0.7/NVIDIA', tmp_path / 'v0.7/NVIDIA')
    one, two = load_run_sets([home])
    for system in (one, two):
        scores = [official_score_minutes(system), system.score_minutes]
        assert scores == approx(summarize(home, system.name, '0.7.0'))


def test_official_score_is_shown_with_the_score(tree_of):
    home, system = tree_of('v4.0')
    score, official = system.score_minutes, official_score_minutes(system)
    note = make_finding('score_scaled', None, official, score, official / score, '').text
    text = call('report', home, '--findings').stdout
    assert f'box: note: {note}' in text and 'the score is scaled by 1.0294' in text
    row = json.loads(call('report', home, '--format', 'json').stdout)['systems'][0]
    assert (row['score_minutes'], row['official_score_minutes']) == (score, official)
    assert note in [f['text'] for f in row['findings']]


def test_unscaled_round_reports_the_factor_that_would_apply(tree_of):
    system = changed(tree_of('v0.7')[1], target_accuracy=TARGET)
    verdict = check_rcp(system)
    assert (verdict.scaling, 'the score would be scaled by 1.0294' in verdict.text) == (1, True)
    assert not make_studies([system])[0].findings[system]


def test_without_mlperf_logging_the_score_is_unscaled_with_a_note(tree_of, monkeypatch):
    home, system = tree_of('v4.0')
    for cached in vars(rcp).values():
        getattr(cached, 'cache_clear', bool)()
    hide_package(monkeypatch, 'mlperf_logging')
    assert rcp.is_applicable(system) and check_rcp(system) is None
    assert official_score_minutes(system) == system.score_minutes
    done = call('report', home, '--findings')
    assert done.returncode == 0 and 'Epochs against the reference' not in done.stdout
    note = "reference convergence points were not checked; run pip install '.[check]'"
    assert done.stdout.count(note) == 1


def system_of(folder, batch, epochs, round_name='v4.0', **keys):
    facts = {'batch': batch, 'accuracies': (0.76,), 'period': lambda k: epochs[k], **keys}
    return written_set(folder / round_name / 'us/results/box/resnet', **facts)


@pytest.mark.parametrize('batch', [512, 1632, 3264, 4096, 5000, 13056, 60000, 67840, 80000])
@pytest.mark.parametrize(
    'epochs', [[33, 34, 34, 34, 35], [35] * 5, [40, 44, 45, 46, 60], [78, 78, 80, 80, 85], [90] * 5]
)
def test_verdict_matches_the_official_checker(tmp_path, batch, epochs):
    system = system_of(tmp_path, batch, epochs)
    verdict = check_rcp(system)
    passed, message, scale = check_directory(
        str(system.folder), 'training', '4.0.0', False, False, rcp_pass='pruned_rcps'
    )
    assert verdict.passed == passed, message
    assert not passed or scale == 1 or f'scaled by {scale:.4f}' in verdict.text
    assert ('must be submitted' in verdict.text) == ('please submit RCP' in message)


def test_points_of_the_round_are_preferred_and_an_unconverged_run_is_the_slowest(tmp_path):
    for round_name, ruleset in (('v1.0', '1.0.0'), ('v0.7', '4.0.0')):
        verdict = check_rcp(system_of(tmp_path, 3264, [35] * 5, round_name))
        assert (verdict.ruleset, verdict.is_of_round) == (ruleset, round_name == 'v1.0')
    status = lambda k: 'aborted' if k == 4 else 'success'  # noqa: E731
    system = system_of(tmp_path, 3264, [30, 35, 36, 37, 31], status=status)
    assert rcp.is_applicable(system) and check_rcp(system).epochs == 36


@pytest.mark.parametrize('keys', [{'target': 0.749}, {'train_samples': 1437}, {'num_runs': 4}])
def test_other_targets_data_sets_and_run_counts_have_no_points(tmp_path, keys):
    assert not rcp.is_applicable(written_set(tmp_path, accuracies=(0.76,), **keys))
