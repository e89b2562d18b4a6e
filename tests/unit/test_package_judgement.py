"""Building a tree and looking at it again: one judgement; and what v0.5 has its descriptions checked for."""
import json
import shutil

import pytest
from helpers import call
from mlperf_logging.result_summarizer import result_summarizer
from submissions import ENV, write_five

from mlperf_rn50.mlperf.package import Order, Package, make_package, package_as_json, render_package
from mlperf_rn50.study.systems import load_systems

OPEN = 'NOT yet to be handed in'


def package(tmp_path, round_name, **keys):
    folder = write_five(tmp_path / 'runs', **keys)
    return call('package', folder, '--org', 'us', '--system', 'box', '--out', tmp_path / 'out', '--round', round_name)


def again(tmp_path, round_name):
    return call('package', '--check', tmp_path / 'out/us', '--round', round_name)


def test_an_empty_field_is_said_of_a_new_tree_as_of_a_finished_one(tmp_path):
    made = package(tmp_path, 'v0.7', env={k: v for k, v in ENV.items() if k != 'host'})
    flaw = "  - systems/box.json: host_processors_per_node is '', expected a whole number"
    assert made.returncode == 0 and made.stdout.startswith(f'{tmp_path}/out/us: box, v0.7, {OPEN}\n'), made.stdout
    assert flaw in made.stdout.splitlines()
    checked = again(tmp_path, 'v0.7')
    assert checked.returncode == 1 and checked.stdout.startswith(f'{tmp_path}/out/us: v0.7, {OPEN}\n')
    assert flaw in checked.stdout.splitlines()


def test_a_crash_of_the_summarizer_fails_neither(tmp_path, monkeypatch):
    def crash():
        raise RuntimeError('of its own')
    monkeypatch.setattr(result_summarizer, 'main', crash)
    for done in (package(tmp_path, 'v0.7'), again(tmp_path, 'v0.7')):
        assert done.returncode == 0 and OPEN not in done.stdout, done.stdout
        assert '  result_summarizer   crashed: RuntimeError: of its own' in done.stdout.splitlines()


@pytest.mark.parametrize('official, scored, is_said', [
    (0.44, 0.48, True), (0.44, 0.4401, False), (None, 0.48, False), (0.44, None, False)])
def test_scores_that_differ_are_said(tmp_path, official, scored, is_said):
    made = Package(tmp_path, oddities=('result_0.txt: x',), official_score_minutes=official)
    text = ('the scores differ: result_summarizer gives 0.44 min, the logs as they are read here 0.48 min; a round '
            'takes that of result_summarizer; what is said of the logs above tells why')
    assert (f'  mind: {text}' in render_package(made, 'x', scored).splitlines()) == is_said
    assert (text in package_as_json(made, scored)['notes']) == is_said
    scaled = Package(tmp_path, findings=(('scaling', '1.1 for box'),), official_score_minutes=official)
    assert 'differ' not in render_package(scaled, 'x', scored)


@pytest.fixture(scope='module')
def good_tree(tmp_path_factory):
    place = tmp_path_factory.mktemp('good')
    runs = load_systems([write_five(place / 'runs')])[0].runs
    made = make_package(runs, Order('us', 'box', 'v0.5', place / 'out'))
    assert made.flaws == ()
    return made.home


ENTRY, SUBMISSION = 'results/box/entry.json', 'submission.json'


@pytest.mark.parametrize('file, text, flaws', [
    (ENTRY, {'nodes': 'x'}, ["nodes is 'x', expected a list of objects"]),
    (ENTRY, {'nodes': []}, ['nodes is [], expected a list of objects']),
    (ENTRY, {'nodes': [None, 1]}, ['nodes[0] is None, expected an object', 'nodes[1] is 1, expected an object']),
    (ENTRY, {'num_nodes': -1}, ['nodes[0].num_nodes is -1, expected a whole number above 0']),
    (ENTRY, {'num_nodes': 0}, ['nodes[0].num_nodes is 0, expected a whole number above 0']),
    (ENTRY, {'num_nodes': True}, ['nodes[0].num_nodes is True, expected a whole number above 0']),
    (ENTRY, {'num_nodes': float('inf')}, ['nodes[0].num_nodes is inf, expected a whole number above 0']),
    (ENTRY, {'num_accelerators': '-8'}, ["nodes[0].num_accelerators is '-8', expected a whole number"]),
    (ENTRY, {'num_cores': '٣'}, ["nodes[0].num_cores is '٣', expected a whole number"]),
    (ENTRY, {'num_accelerators': '8'}, []),
    (SUBMISSION, '[' * 100_000, ['is nested too deeply']),
    (SUBMISSION, '[]', ['is no JSON object']),
    (SUBMISSION, None, ['is missing']),
    (SUBMISSION, '{"org": 5}', ['org is 5, expected the name of who submits']),
    (SUBMISSION, '{"org": "us", "poc_email": []}', ['poc_email is [], expected an address'])])
def test_descriptions_of_v05(tmp_path, good_tree, file, text, flaws):
    tree = shutil.copytree(good_tree, tmp_path / 'us')
    path = tree / file
    if isinstance(text, dict):
        entry = json.loads(path.read_text())
        nodes = [{**entry['nodes'][0], **text}]
        text = json.dumps({**entry, 'nodes': nodes, **{k: v for k, v in text.items() if k == 'nodes'}})
    path.unlink() if text is None else path.write_text(text)
    done = call('package', '--check', tree, '--round', 'v0.5', '--format', 'json')
    assert json.loads(done.stdout)['refusals'] == [f'{file}: {flaw}' for flaw in flaws]
    assert done.returncode == (1 if flaws else 0)
