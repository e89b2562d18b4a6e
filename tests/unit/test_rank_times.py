"""Sums, spreads and histograms of given times of steps; requests and files of traces. Columns: step_timer.COLUMNS."""
import os

import numpy as np
import pytest

from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.records import StepSpans
from mlperf_rn50.train.comm.rank_times import count_bins, sum_times, take_request, write_trace


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


@pytest.mark.parametrize('text, number', [('', 20), ('5\n', 5), ('99999', 10_000), ('-3', 20), ('many', 20)])
def test_request_of_a_trace_is_taken_once(tmp_path, text, number):
    path = tmp_path / 'trace'
    path.write_text(text)
    assert (take_request(path), take_request(path)) == (number, 0)


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir, lambda p: p.write_bytes(b'1' * 101)])
def test_other_files_request_no_trace(tmp_path, make):
    make(tmp_path / 'trace')
    assert take_request(tmp_path / 'trace') == 0


def test_trace_is_read_back(tmp_path):
    path, spans = tmp_path / 'new' / 'trace_0_1.jsonl', [StepSpans(s, 1, 2, 3, 4, 5, 6, [(2.5, 3)]) for s in (7, 8)]
    write_trace(path, spans[:1])
    write_trace(path, spans)
    assert [s for _, s in read_lines(path, StepSpans)] == spans


def test_trace_that_cannot_be_written_is_reported_on_one_line(tmp_path, capsys):
    (tmp_path / 'file').touch()
    write_trace(tmp_path / 'file' / 'trace_0_0.jsonl', [])
    assert capsys.readouterr().err.endswith('File exists; the trace is not written\n')
