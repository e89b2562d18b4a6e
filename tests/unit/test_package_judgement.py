"""Building a tree and looking at it again: one judgement."""
import pytest
from helpers import call
from submissions import ENV, write_five

from mlperf_rn50.mlperf import check_tree
from mlperf_rn50.mlperf.package import Package, package_as_json, render_package

OPEN = 'NOT yet to be handed in'


def package(tmp_path, round_name, **keys):
    folder = write_five(tmp_path / 'runs', **keys)
    return call('package', folder, '--org', 'us', '--system', 'box', '--out', tmp_path / 'out', '--round', round_name)


def again(tmp_path, round_name):
    return call('package', '--check', tmp_path / 'out/us', '--round', round_name)


def test_an_empty_field_is_said_of_a_new_tree_as_of_a_finished_one(tmp_path):
    made = package(tmp_path, 'v1.0', env={k: v for k, v in ENV.items() if k != 'host'})
    flaw = "  - systems/box.json: host_processors_per_node is '', expected a whole number"
    assert made.returncode == 0 and made.stdout.startswith(f'{tmp_path}/out/us: box, v1.0, {OPEN}\n'), made.stdout
    assert flaw in made.stdout.splitlines()
    checked = again(tmp_path, 'v1.0')
    assert checked.returncode == 1 and checked.stdout.startswith(f'{tmp_path}/out/us: v1.0, {OPEN}\n')
    assert flaw in checked.stdout.splitlines()


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


def test_a_crash_of_the_official_tools_is_its_last_line(tmp_path):
    """The summarizer wants numbers, and crashes where env.json says nothing; it fails neither command."""
    made, checked = package(tmp_path, 'v4.0', env={}), again(tmp_path, 'v4.0')
    row = "  result_summarizer   crashed: ValueError: invalid literal for int() with base 10: ''"
    assert made.returncode == 0 and row in made.stdout.splitlines()
    assert checked.returncode == 1 and row not in checked.stdout


def test_a_tool_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(check_tree, '_MAX_S', 0.01)
    done = package(tmp_path, 'v4.0')
    assert done.returncode == 1 and 'package_checker crashed: no answer after 0.01 s' in done.stdout


@pytest.mark.parametrize('round_name', ['v0.5', '0.6.0', '0.7'])
def test_a_round_that_is_over_is_not_packaged(tmp_path, round_name):
    done = package(tmp_path, round_name)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
    assert f"--round: got '{round_name}', expected a round that is packaged: v1.0, v1.1, v2.0" in done.stderr
    assert not (tmp_path / 'out').exists()
