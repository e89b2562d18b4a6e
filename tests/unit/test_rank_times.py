"""Sums, spreads and histograms of given times of steps. Columns: those of step_timer.COLUMNS."""
import numpy as np
import pytest

from mlperf_rn50.train.comm.rank_times import count_bins, sum_times


def test_summary_of_steps():
    times = np.array([[0, 1, 4, 2, 1, 0.5, 0.25, 0.5], [0, 0, 4, 3, 1, 0, 0, np.nan], [0, 0, 4, 4, 1, 0, 0, np.nan]])
    summary = sum_times(times, np.array([1.5, 2, 1]))
    spread = summary.pop('spread_s')
    assert summary == {'num_steps': 3, 'python_s': 0, 'data_s': 1, 'compute_s': 12, 'wait_s': 9, 'update_s': 3,
                       'read_s': 0.5, 'decode_s': 0.25, 'hidden_s': 1.5, 'slow_rank_s': 4.5}
    assert spread['wait'] == [3, 3.98, 4] and spread['hidden'] == [0.5] * 3 and spread['slow_rank'][0] == 1
    assert 'hidden' not in sum_times(times[1:], times[1:, 3])['spread_s']


@pytest.mark.parametrize('seconds, number', [(0.0, 0), (1.18e-5, 0), (1.19e-5, 1), (1.01e-5 * 2**5, 20), (1e4, 99)])
def test_bin_of_a_time(seconds, number):
    [[python, *others]] = [count_bins(np.array([[seconds, 1e-5, 1e-5, 1e-5, 1e-5, 7, 7, 7]]))]
    assert np.flatnonzero(python).tolist() == [number] and all(h[0] == 1 == h.sum() for h in others)
