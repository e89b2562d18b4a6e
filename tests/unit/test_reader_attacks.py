"""Logs that are made, or happen, to mislead the reader: layouts, epochs and clocks that only seem so."""
import pytest
from lines import mllog, run_lines, v05, v05_run_lines, write_lines

from mlperf_rn50.mlperf.reader import read_run


@pytest.fixture
def read(tmp_path):
    return lambda lines: read_run(write_lines(tmp_path / 'result_0.txt', lines))


def texts(run):
    return [w.text for w in run.warnings]


def ranks_that_log(num_ranks, num_equal):
    """Each rank writes its initialisation; some of them the ends of it in the same millisecond."""
    lines = [line for line in run_lines() if not any(f'"{k}"' in line for k in ('init_start', 'init_stop', 'run_start'))]
    own = [max(0, k - num_equal + 1) / 1000 for k in range(num_ranks)]
    return [*(mllog('init_start', -5 + k / 100) for k in range(num_ranks)), *(mllog('init_stop', -1 + s) for s in own),
            *(mllog('run_start', s) for s in own), *lines]


@pytest.mark.parametrize('num_ranks, num_equal', [(4, 2), (8, 2), (8, 4), (16, 4)])
def test_ranks_that_share_a_millisecond_are_no_doubled_log(read, num_ranks, num_equal):
    run = read(ranks_that_log(num_ranks, num_equal))
    assert run.num_accelerators == num_ranks and not any('written' in t for t in texts(run))
    same = [mllog('init_start', -5) if '"init_start"' in line else line for line in ranks_that_log(num_ranks, num_equal)]
    assert read(same).num_accelerators == num_ranks


@pytest.mark.parametrize('make', [run_lines, lambda: v05_run_lines(nodes=2, ranks=4)])
def test_a_doubled_log_counts_once_and_this_is_said(read, make):
    run = read([line for line in make() for _ in range(2)])
    assert run.num_accelerators == 4 and run.status == 'converged'
    assert any(t.startswith('the whole log was written 2 times') for t in texts(run))
    assert not any('written' in t for t in texts(read(make())))
