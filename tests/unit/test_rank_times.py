"""Sums, spreads and histograms of given times of steps, and requests for a trace. Columns:
step_timer.COLUMNS."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_times import RankTimes, count_bins, spread_updates, sum_times
from mlperf_rn50.train.comm.step_timer import COLUMNS


def test_summary_of_steps():
    rows = [0, 1, 4, 2, 1, 0.5, 0.25, 0.5], [0, 0, 4, 3, 1, 0, 0, np.nan]
    times = np.array([*rows, [0, 0, 4, 4, 1, 0, 0, np.nan]])
    # the other ranks waited for this one only in the first step
    summary = sum_times(times, np.array([2, 2, 1]))
    spread, critical = summary.pop('spread_s'), summary.pop('critical_s')
    assert critical == dict(zip(COLUMNS[:-1], rows[0]))
    sums = zip((*COLUMNS, 'slow_rank'), [0, 1, 12, 9, 3, 0.5, 0.25, 1.5, 4])
    assert summary == {'num_steps': 3, **{f'{name}_s': value for name, value in sums}}
    assert spread['wait'] == [3, 3.98, 4] and spread['hidden'] == [0.5] * 3
    assert spread['slow_rank'][0] == 1
    assert 'hidden' not in sum_times(times[1:], times[1:, 3])['spread_s']


@pytest.mark.parametrize(
    'seconds, number', [(0.0, 0), (1.18e-5, 0), (1.19e-5, 1), (1.01e-5 * 2**5, 20), (1e4, 99)]
)
def test_bin_of_a_time(seconds, number):
    [[python, *others]] = [count_bins(np.array([[seconds, 1e-5, 1e-5, 1e-5, 1e-5, 7, 7, 7]]))]
    assert np.flatnonzero(python).tolist() == [number] and all(h[0] == 1 == h.sum() for h in others)


@pytest.mark.parametrize(
    'make, expected',
    [
        (Path.touch, True),
        (os.mkfifo, True),
        (os.mkdir, False),
        (lambda path: path.write_text('mine'), False),
        (lambda path: None, False),
    ],
)
def test_file_requests_a_trace_once(tmp_path, make, expected):
    file = tmp_path / 'trace'
    make(file)
    existed = file.exists()
    times = RankTimes(Comm(), None, {}, file, None)
    times.find_trace_request()
    assert times.is_trace_requested == expected and file.exists() == (existed and not expected)


def test_trace_has_the_start_of_its_attempt(tmp_path):
    timer = SimpleNamespace(take_trace=lambda is_end: [StepSpans(7, 1, 2, 3, 4, 5, 6)] * is_end)
    comm = SimpleNamespace(rank=1, threads=[], from_rank_0=lambda make: 200.0)
    times = RankTimes(comm, timer, {}, tmp_path, None)
    assert times.take_trace() == []
    assert [s.attempt_s for s in times.take_trace(is_end=True)] == [200.0]


def test_steps_of_a_single_rank_get_the_updates_that_sampled_steps_have_after_the_backward_pass():
    rows = [0, 0, 8, 0, 1, 0, 0, np.nan], [0, 0, 6, 0, 3, 0, 0, 0], [0, 0, 2, 0, 1, 0, 0, np.nan]
    times = np.array(rows)
    spread = spread_updates(times)
    assert spread[:, :5].tolist() == [[0, 0, 6, 0, 3], [0, 0, 6, 0, 3], [0, 0, 2, 0, 1]]
    assert spread_updates(times[::2])[:, 4].tolist() == [1, 1]  # no step was sampled
