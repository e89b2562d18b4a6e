"""The alarm on published runs, and on faults put into them, each system compared with the others."""
import sys

import pytest
from helpers import PUBLISHED, ROOT

from mlperf_rn50.study.known import known_of, load_published
from mlperf_rn50.study.systems import load_systems

sys.path.insert(0, str(ROOT / 'benchmarks'))
from replay import Tally, replay, with_recipe  # noqa: E402


def shares(tally: Tally) -> dict[str, float]:
    return {name: tally.flagged[name] / tally.runs for name in ('good', 'stuck', '3 points low', '2 points low')}


def assert_goals(tally: Tally) -> None:
    found = shares(tally)
    assert found['good'] <= 0.05
    assert found['stuck'] == 1.0
    assert found['3 points low'] >= 0.95 and found['2 points low'] >= 0.7


@pytest.fixture(scope='module')
def packaged():
    return replay(load_published(), load_published())


@pytest.mark.parametrize('how, num_sets, num_runs', [('same', 24, 118), ('like', 5, 24), ('own', 6, 30)])
def test_the_alarm_is_rarely_false_and_finds_faults(packaged, how, num_sets, num_runs):
    assert (packaged[how].sets, packaged[how].runs) == (num_sets, num_runs)
    assert_goals(packaged[how])


def test_a_rate_that_drops_in_steps_hides_what_is_stuck_between_them(packaged):
    found = shares(packaged['own, step'])
    assert found['good'] <= 0.05 and found['3 points low'] >= 0.9 and found['stuck'] < 0.5  # as docs/training.md says


@pytest.mark.needs_published
def test_every_curve_of_the_published_logs():
    sets = [with_recipe(known, load_published()) for known in map(known_of, load_systems([PUBLISHED])) if known]
    found = replay(sets, load_published())
    assert sum(t.runs for t in found.values()) == 30
    for how in ('same', 'own'):
        assert_goals(found[how])
    assert found['own, step'].flagged['good'] == 0 and found['own, step'].flagged['3 points low'] == 10
