"""The window of five of more than five runs."""

import math
from pathlib import Path

import pytest

from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.windows import (
    Window,
    median_window,
    render_windows,
    split_windows,
)


def runs_at(*starts_s, last_s=None):
    return [
        Run(Path(f'result_{k}.txt'), 'v4.0', 'converged', start_s=start_s, last_s=last_s)
        for k, start_s in enumerate(starts_s)
    ]


def numbers(runs):
    return [int(r.path.stem[-1]) for r in runs]


def test_windows_are_consecutive_in_order_of_the_starts():
    runs = runs_at(30, 10, 20, 60, 40, 50)
    assert [numbers(part) for part in split_windows(runs, 5)] == [[1, 2, 0, 4, 5], [2, 0, 4, 5, 3]]


def test_run_that_failed_before_its_start_has_the_time_of_its_last_line():
    runs = runs_at(10, None, 30, last_s=20)
    assert [numbers(part) for part in split_windows(runs, 3)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    'minutes, median',
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([1.0, 2.0], 2.0),
        ([4.0, 1.0, 3.0, 2.0], 3.0),
        ([1.0, math.inf, 2.0], 2.0),
        ([1.0, math.inf], math.inf),
        ([math.inf, 1.0, math.inf], math.inf),
    ],
)
def test_median_of_an_even_number_is_the_slower_and_invalid_windows_are_infinite(minutes, median):
    windows = [Window(runs_at(0), score) for score in minutes]
    assert median_window(windows).minutes == median


def test_scores_of_all_windows_are_shown_and_the_chosen_one_is_marked():
    one, two = (Window(runs_at(0, 1), score) for score in (1.5, math.inf))
    first, second = render_windows([one, two], one)
    assert 'result_0.txt to result_1.txt: 1.50 min' in first and 'median' in first
    assert second.endswith('no valid result')
