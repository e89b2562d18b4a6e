"""The official score is result_summarizer's: scaled by the reference convergence points where it scales."""
import json
import shutil
import sys

import pytest
from helpers import PUBLISHED, call
from made_systems import changed
from sample_log import ENV, LARS, closed, write_five

from mlperf_rn50.mlperf.describe_system import describe_system
from mlperf_rn50.mlperf.official import _summarize
from mlperf_rn50.mlperf.run import TARGET
from mlperf_rn50.study.rcp import check_rcp, is_applicable, official_score_minutes
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


def summarize(home, system, ruleset):
    """The score after a first run of the tool, which works out the factor as the package checker does, and with it."""
    return [_summarize(home, ruleset, home.parent / 'summary.csv')[0].get(system) for _ in range(2)]


@pytest.fixture
def tree_of(tmp_path):
    """A function that writes a submission of 34 epochs at a batch of 1632, where the reference takes 35."""
    def make(round_name, division='closed'):
        home = tmp_path / round_name / 'us'
        config = closed(LARS) if division == 'closed' else LARS
        write_five(home / 'results/box/resnet', config, pace_ms=50, accuracies=(0.5,) * 16 + (0.7595,), batch=1632)
        system, = load_systems([home])
        (home / 'systems').mkdir()
        (home / 'systems/box.json').write_text(json.dumps(
            describe_system(system.runs, ENV, 'us', 'box', round_name, None)))
        return home, system
    return make


@pytest.mark.parametrize('round_name, division, factor', [
    ('v4.0', 'closed', 35 / 34), ('v0.7', 'closed', 1),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('v1.0', 'closed', 35 / 34), ('v2.1', 'closed', 35 / 34), ('v4.0', 'open', 1)])])
def test_it_is_that_of_the_official_summarizer(tree_of, round_name, division, factor):
    home, system = tree_of(round_name, division)
    unscaled, official = summarize(home, 'box', f'{round_name[1:]}.0')
    assert system.score_minutes == pytest.approx(unscaled, rel=1e-4)
    assert official_score_minutes(system) == pytest.approx(official, rel=1e-4)
    assert official / unscaled == pytest.approx(factor) == official_score_minutes(system) / system.score_minutes


@pytest.mark.needs_published
def test_it_is_that_of_the_official_summarizer_on_published_logs(tmp_path):
    home = shutil.copytree(PUBLISHED / 'v0.7/NVIDIA', tmp_path / 'v0.7/NVIDIA')
    systems = load_systems([home])
    assert len(systems) == 2
    for system in systems:
        assert [official_score_minutes(system), system.score_minutes] == pytest.approx(
            summarize(home, system.name, '0.7.0'))


def test_it_is_shown_beside_the_score(tree_of):
    home, system = tree_of('v4.0')
    score, official = system.score_minutes, official_score_minutes(system)
    done = call('report', home)
    assert 'official' in done.stdout and 'the score is scaled by 1.0294' in done.stdout
    said = f'box: the official score is {official:.2f} min, {score:.2f} x 1.0294: it took fewer epochs than'
    assert said in done.stdout
    found = json.loads(call('report', home, '--format', 'json').stdout)['systems'][0]
    assert (found['score_minutes'], found['official_score_minutes']) == (score, official)
    assert any(w.startswith(said) for w in found['warnings'])
    assert 'official_score_minutes' in call('report', home, '--format', 'csv').stdout


def test_where_nothing_is_scaled_it_is_said_what_would_be(tree_of):
    system = changed(tree_of('v0.7')[1], target_accuracy=TARGET)
    verdict = check_rcp(system)
    assert (verdict.scaling, 'the score would be scaled by 1.0294' in verdict.text) == (1, True)
    assert not make_studies([system])[0].notes


def test_without_mlperf_logging_it_is_the_score_and_a_note_says_so(tree_of, monkeypatch):
    from mlperf_rn50.study import rcp
    home, system = tree_of('v4.0')
    for cached in (rcp._verdict, rcp._checker):
        cached.cache_clear()
    for name in [n for n in sys.modules if n.startswith('mlperf_logging')]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, 'mlperf_logging', None)
    assert is_applicable(system) and check_rcp(system) is None
    assert official_score_minutes(system) == system.score_minutes
    done = call('report', home)
    note = "reference convergence points were not checked: pip install 'mlperf-rn50[check]'"
    assert done.returncode == 0 and done.stdout.count(note) == 1 and 'Epochs against the reference' not in done.stdout
