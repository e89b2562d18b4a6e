"""Verdicts on sets and trees of logs."""

import json
import os
import re
import shutil

import pytest
from helpers import call, json_table
from lines import write_lines
from sample_log import LARS, SGD, closed, write_five, write_run

ENOUGH = (0.5,) * 16 + (0.7595,)  # 34 epochs at batch 1632, for which the reference has 35


@pytest.fixture
def scaled(tmp_path):
    """Five runs in the closed division of v2.0, one of which missed the target."""
    return write_five(
        tmp_path / 'v2.0/us', closed(LARS), ends=['aborted'], accuracies=ENOUGH, batch=1632
    )


def first_line(*words):
    done = call('check', *words)
    assert done.stderr == ''
    return done.returncode, done.stdout.partition('\n')[0]


def test_set_with_one_miss_is_valid_for_the_round_of_its_folder_with_its_scaled_score(scaled):
    code, verdict = first_line(scaled)
    m = re.fullmatch(
        r'valid for v2\.0 closed: yes\. Set of 5: score (.+) min, scaled by .* (.+) '
        r'\(one may fail: result_0.txt, aborted\)',
        verdict,
    )
    assert code == 0 and float(m[2]) == pytest.approx(float(m[1]) * 35 / 34, abs=0.02)
    assert first_line(scaled, '--ruleset', '1.0')[1].startswith('valid for v1.0 closed: yes.')


@pytest.mark.parametrize(
    'change, verdict',
    json_table("""
{"ends": ["aborted", "aborted"]} | "no (got 2 failed runs, expected at most one: "
{"seeds": [1, 1, 2, 3, 4]}       | "no (some runs have the same seed"
{"accuracies": [0.7595]} | "no (epochs to converge: fails: mean 2.00 epochs at batch 1632, at"
{"num": 3} | "format passes: v0.5, v0.7 to v4.0; can be submitted: no (3 runs, expected 5"
{"num": 1, "ends": ["aborted"], "division": "open"} | "can be submitted: no (aborted)"
"""),
)
def test_set_is_judged_by_the_rules_for_sets(tmp_path, change, verdict):
    config = SGD if change.pop('division', '') else closed(LARS)
    accuracies = tuple(change.pop('accuracies', ENOUGH))
    five = write_five(tmp_path / 'v2.0/us', config, accuracies=accuracies, batch=1632, **change)
    code, line = first_line(five)
    assert verdict in line and code == ('format passes' not in line)


def test_set_with_too_few_epochs_passes_no_round_with_reference_points(tmp_path):
    five = write_five(tmp_path / 'v2.0/us', closed(LARS), accuracies=(0.7595,), batch=1632)
    assert ' to v4.0 no (epochs to converge: fails' in call('check', five).stdout
    [found] = json.loads(call('check', five, '--format', 'json').stdout)['sets']
    assert not {'v2.0', 'v4.0'} & {*found['passed_rounds']}


@pytest.mark.parametrize('is_contradictory', [False, True])
def test_run_that_crashed_before_its_clock_is_the_one_that_may_fail(tmp_path, is_contradictory):
    five = write_five(tmp_path / 'v2.0/us', closed(LARS), accuracies=ENOUGH, batch=1632)
    path = five / 'result_0.txt'
    lines = path.read_text().splitlines()
    first = next(k for k, line in enumerate(lines) if '"run_start"' in line)
    stop = [line for line in lines if '"run_stop"' in line]
    write_lines(path, lines[:first] + stop * is_contradictory)
    os.utime(path, (0, 0))
    code, verdict = first_line(five)
    assert code == is_contradictory
    assert (': no (' if is_contradictory else '(one may fail: result_0.txt') in verdict


def test_tree_has_a_line_per_set_and_folds_equal_results_of_logs(scaled, tmp_path):
    missing = 'gradient_accumulation_steps'
    for k in range(3):
        folder = tmp_path / f'v3.0/{k}'
        folder.mkdir(parents=True)
        path = write_run(folder / 'result_0.txt', closed(LARS))
        write_lines(path, [x for x in path.read_text().splitlines() if missing not in x])
    shutil.copytree(scaled, tmp_path / 'v2.0/them')
    done = call('check', tmp_path, '--format', 'text')
    first, *sets = done.stdout.splitlines()[:6]
    assert done.returncode == 1 and first == 'valid for their rounds: 2 of 5 sets (13 logs)'
    text = f': valid for v3.0 closed: no ({missing} is missing)'
    assert sum(text in line for line in sets) == 3
    assert f'v1.0 to v2.1, v3.1 to v4.0 no (3 logs: {missing} is missing)\n' in done.stdout
