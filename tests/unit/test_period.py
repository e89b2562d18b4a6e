"""Period of checkpoints that is chosen from their cost and the faults so far."""

import math

import numpy as np
import pytest

from mlperf_rn50.train.checkpoint.period import (
    FIRST_S,
    PRIOR_S,
    AutoPeriod,
    best_period_s,
    between_faults_s,
)


def expected_time(period_s, cost_s, between_s):
    """Return the time per second of work with faults at random times. Source: Daly 2006, without
    the time of a restart, which does not change the minimum."""
    return between_s * np.expm1((period_s + cost_s) / between_s) / period_s


@pytest.mark.parametrize('cost_s, between_s', [(0.5, 60), (0.5, 600), (5, 60), (30, 60), (2, 1e7)])
def test_period_is_that_of_the_least_expected_time(cost_s, between_s):
    found = best_period_s(cost_s, between_s)
    best = expected_time(np.geomspace(found / 10, 10 * found, 10_000), cost_s, between_s).min()
    assert expected_time(found, cost_s, between_s) == pytest.approx(best, rel=1e-3)


def test_period_approaches_the_rule_of_young_if_faults_are_rare():
    assert best_period_s(0.5, 1e8) == pytest.approx(math.sqrt(2 * 0.5 * 1e8), rel=1e-3)


def test_cost_above_twice_the_time_between_faults_gives_that_time():
    assert best_period_s(30.0, 10.0) == 10.0


def test_time_between_faults_is_that_of_the_run_or_without_faults_of_the_prior():
    assert between_faults_s(600.0, num_faults=2, num_ranks=8) == 300.0
    assert between_faults_s(600.0, num_faults=0, num_ranks=8) == PRIOR_S / 8
    assert PRIOR_S / 3600 == pytest.approx(50_676, rel=1e-4)


def test_first_checkpoint_measures_the_cost_and_the_mean_cost_counts():
    period = AutoPeriod(num_ranks=4, num_faults=1, down_s=20.0)
    assert period.period_s(120.0) == FIRST_S
    period.costs_s += [0.25, 0.75]
    assert period.period_s(120.0) == best_period_s(0.5, 100.0)


@pytest.mark.parametrize('num_ranks', [1, 4])
def test_rare_faults_still_leave_a_thousandth_of_the_time_to_checkpoints(num_ranks):
    period = AutoPeriod(num_ranks, num_faults=0, down_s=0.0, costs_s=[0.07])
    assert period.period_s(100.0) == pytest.approx(70.0)


def test_period_is_reported_once_until_it_changes():
    period = AutoPeriod(num_ranks=4, num_faults=1, down_s=0.0)
    assert period.news(100.0) == ''  # the cost is unknown
    period.costs_s.append(0.5)
    assert 'every 10 s' in period.news(100.0) and '1 fault' in period.news(900.0)
    assert period.news(1000.0) == ''


def test_report_without_faults_names_the_prior():
    period = AutoPeriod(num_ranks=4, num_faults=0, down_s=0.0, costs_s=[0.5])
    assert 'no fault' in (text := period.news(100.0)) and '12,669 h' in text
