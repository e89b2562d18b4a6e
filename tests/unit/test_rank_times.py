"""Sums, spreads and histograms of given times of steps; requests and files of traces. Columns:
step_timer.COLUMNS."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import wait_for

from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.comm.rank_times import (
    RankTimes,
    count_bins,
    spread_updates,
    sum_times,
    write_trace,
)


def test_critical_path_has_the_steps_in_which_the_other_ranks_waited_for_this_one():
    times = np.array([[1, 2, 4, 0.5, 1, 1, 0.5, np.nan], [0, 0, 4, 3, 1, 0, 0, 0.5]])
    assert sum_times(times, np.array([0.5, 2]))['critical_s'] == {
        'python': 1,
        'data': 2,
        'compute': 4,
        'wait': 0.5,
        'update': 1,
        'read': 1,
        'decode': 0.5,
    }


def test_summary_of_steps():
    times = np.array(
        [
            [0, 1, 4, 2, 1, 0.5, 0.25, 0.5],
            [0, 0, 4, 3, 1, 0, 0, np.nan],
            [0, 0, 4, 4, 1, 0, 0, np.nan],
        ]
    )
    summary = sum_times(times, np.array([1.5, 2, 1]))
    spread, critical = summary.pop('spread_s'), summary.pop('critical_s')
    assert critical == {
        'python': 0,
        'data': 0,
        'compute': 0,
        'wait': 0,
        'update': 0,
        'read': 0,
        'decode': 0,
    }
    assert summary == {
        'num_steps': 3,
        'python_s': 0,
        'data_s': 1,
        'compute_s': 12,
        'wait_s': 9,
        'update_s': 3,
        'read_s': 0.5,
        'decode_s': 0.25,
        'hidden_s': 1.5,
        'slow_rank_s': 4.5,
    }
    assert (
        spread['wait'] == [3, 3.98, 4]
        and spread['hidden'] == [0.5] * 3
        and spread['slow_rank'][0] == 1
    )
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
    ],
)
def test_file_requests_a_trace_once(tmp_path, make, expected):
    make(tmp_path / 'trace')
    times = RankTimes(Comm(), None, {}, RunFolder(tmp_path, 0), None)
    times.find_request()
    assert times.request == expected and (tmp_path / 'trace').exists() != expected


def test_folder_without_the_file_requests_no_trace(tmp_path):
    times = RankTimes(Comm(), None, {}, RunFolder(tmp_path, 0), None)
    times.find_request()
    assert not times.request


def test_trace_has_the_start_of_its_attempt(tmp_path):
    timer = SimpleNamespace(take_trace=lambda is_end: [StepSpans(7, 1, 2, 3, 4, 5, 6)])
    comm = SimpleNamespace(rank=1, threads=[], from_rank_0=lambda make: 200.0)
    times = RankTimes(comm, timer, {}, RunFolder(tmp_path, 0), None)
    times.trace(is_end=True)
    path = tmp_path / 'trace_0_1.jsonl'
    wait_for(path.exists, lambda: True, lambda: 'no trace')
    assert [s.attempt_s for _, s in read_lines(path, StepSpans)] == [200.0]


def test_trace_is_read_back(tmp_path):
    path, spans = (
        tmp_path / 'new' / 'trace_0_1.jsonl',
        [StepSpans(s, 1, 2, 3, 4, 5, 6, [(2.5, 3)]) for s in (7, 8)],
    )
    write_trace(path, spans[:1])
    write_trace(path, spans)
    assert [s for _, s in read_lines(path, StepSpans)] == spans


def test_trace_that_cannot_be_written_is_reported_on_one_line(tmp_path, capsys):
    (tmp_path / 'file').touch()
    write_trace(tmp_path / 'file' / 'trace_0_0.jsonl', [])
    assert capsys.readouterr().err.endswith('File exists; the trace is not written\n')


def test_steps_of_a_single_rank_get_the_updates_that_sampled_steps_have_after_the_backward_pass():
    times = np.array(
        [[0, 0, 8, 0, 1, 0, 0, np.nan], [0, 0, 6, 0, 3, 0, 0, 0], [0, 0, 2, 0, 1, 0, 0, np.nan]]
    )
    spread = spread_updates(times)
    assert spread[:, :5].tolist() == [[0, 0, 6, 0, 3], [0, 0, 6, 0, 3], [0, 0, 2, 0, 1]]
    assert spread_updates(times[::2])[:, 4].tolist() == [1, 1]  # no step was sampled
