"""The official score is result_summarizer's: scaled by the reference convergence points where it scales."""
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
from helpers import PUBLISHED, call
from made_systems import changed
from sample_log import LARS, SGD, write_run

from mlperf_rn50.mlperf.check_tree import _summarize
from mlperf_rn50.mlperf.run import TARGET
from mlperf_rn50.study.rcp import check_rcp, is_applicable, official_score_minutes
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems

DESCRIBED = {'submitter': 'us', 'status': 'onprem', 'system_name': 'box', 'number_of_nodes': '1',
             'host_processors_per_node': '2', 'host_processor_model_name': 'x', 'host_processor_core_count': '8',
             'accelerator_model_name': 'x', 'accelerators_per_node': '0', 'framework': 'x', 'hw_notes': '',
             'sw_notes': ''}


def summarize(home, system, ruleset):
    return _summarize(home, ruleset, home.parent / 'summary.csv')[0].get(system)


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """A log of 34 epochs at a batch of 1632, where the reference takes 35, for each division."""
    place = tmp_path_factory.mktemp('logs')
    configs = {d: replace(LARS, run=replace(SGD.run, submission_division=d)) for d in ('closed', 'open')}
    return {division: write_run(place / division, config, accuracies=(0.5,) * 16 + (0.7595,), batch=1632,
                                seed=4_242_424_242).read_text() for division, config in configs.items()}


def stretched(log, factor):
    """A log whose run took so many times as long."""
    start = float(re.search(r':::MLPv0.5.0 \w+ ([\d.]+)', log)[1])
    log = re.sub(r'"time_ms": (\d+)', lambda m: f'"time_ms": {round(1e3 * start + factor * (int(m[1]) - 1e3 * start))}',
                 log)
    return re.sub(r'(:::MLPv0.5.0 \w+) ([\d.]+)', lambda m: f'{m[1]} {start + factor * (float(m[2]) - start):.9f}', log)


def tree_of(folder, round_name, division, log):
    """A submission of five runs, and its system."""
    home = folder / round_name / 'us'
    results = home / 'results/box/resnet'
    results.mkdir(parents=True)
    for k in range(5):
        (results / f'result_{k}.txt').write_text(stretched(log.replace('4242424242', str(k + 1)), 200 + 10 * k))
    (home / 'systems').mkdir()
    (home / 'systems/box.json').write_text(json.dumps({**DESCRIBED, 'division': division}))
    system, = load_systems([home])
    return home, system


@pytest.mark.parametrize('round_name, division, factor', [
    ('v0.7', 'closed', 1), ('v1.0', 'closed', 35 / 34), ('v2.1', 'closed', 35 / 34), ('v4.0', 'closed', 35 / 34),
    ('v4.0', 'open', 1)])
def test_it_is_that_of_the_official_summarizer(tmp_path, logs, round_name, division, factor):
    home, system = tree_of(tmp_path, round_name, division, logs[division])
    # The first run of the tool works out the factor, as the package checker does before it; the next one applies it.
    unscaled, official = (summarize(home, 'box', f'{round_name[1:]}.0') for _ in range(2))
    assert system.score_minutes == pytest.approx(unscaled, rel=1e-4)
    assert official_score_minutes(system) == pytest.approx(official, rel=1e-4)
    assert official / unscaled == pytest.approx(factor) == official_score_minutes(system) / system.score_minutes


@pytest.mark.needs_published
def test_it_is_that_of_the_official_summarizer_on_published_logs(tmp_path):
    home = shutil.copytree(PUBLISHED / 'v0.7/NVIDIA', tmp_path / 'v0.7/NVIDIA')
    systems = load_systems([home])
    assert len(systems) == 2
    for system in systems:
        for _ in range(2):
            official = summarize(home, system.name, '0.7.0')
            assert official_score_minutes(system) == system.score_minutes == pytest.approx(official)


def test_it_is_shown_beside_the_score(tmp_path, logs):
    home, system = tree_of(tmp_path, 'v4.0', 'closed', logs['closed'])
    score, official = system.score_minutes, official_score_minutes(system)
    done = call('report', home)
    assert 'official' in done.stdout and 'the score is scaled by 1.0294' in done.stdout
    said = f'box: the official score is {official:.2f} min, {score:.2f} x 1.0294: it took fewer epochs than'
    assert said in done.stdout
    found = json.loads(call('report', home, '--format', 'json').stdout)['systems'][0]
    assert (found['score_minutes'], found['official_score_minutes']) == (score, official)
    assert any(w.startswith(said) for w in found['warnings'])
    assert 'official_score_minutes' in call('report', home, '--format', 'csv').stdout


def test_where_nothing_is_scaled_it_is_said_what_would_be(tmp_path, logs):
    system = changed(tree_of(tmp_path, 'v0.7', 'closed', logs['closed'])[1], target_accuracy=TARGET)
    verdict = check_rcp(system)
    assert (verdict.scaling, 'the score would be scaled by 1.0294' in verdict.text) == (1, True)
    assert not make_studies([system])[0].notes


def test_without_mlperf_logging_it_is_the_score_and_a_note_says_so(tmp_path, logs, monkeypatch):
    from mlperf_rn50.study import rcp
    home, system = tree_of(tmp_path, 'v4.0', 'closed', logs['closed'])
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
