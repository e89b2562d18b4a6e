"""Logs that are made, or happen, to mislead the reader: layouts, epochs and clocks that only seem so."""
import pytest
from lines import mllog, run_lines, v05_run_lines, write_lines

from mlperf_rn50.mlperf.reader import read_run


@pytest.fixture
def read(tmp_path):
    return lambda lines: read_run(write_lines(tmp_path / 'result_0.txt', lines))


def texts(run):
    return [w.text for w in run.warnings]


def ranks_that_log(num_ranks, num_equal):
    """Each rank writes its initialisation; some of them the ends of it in the same millisecond."""
    keys = 'init_start', 'init_stop', 'run_start'
    lines = [line for line in run_lines() if not any(f'"{k}"' in line for k in keys)]
    own = [max(0, k - num_equal + 1) / 1000 for k in range(num_ranks)]
    return [*(mllog('init_start', -5 + k / 100) for k in range(num_ranks)), *(mllog('init_stop', -1 + s) for s in own),
            *(mllog('run_start', s) for s in own), *lines]


@pytest.mark.parametrize('num_ranks, num_equal', [(4, 2), (8, 2), (8, 4), (16, 4)])
def test_ranks_that_share_a_millisecond_are_no_doubled_log(read, num_ranks, num_equal):
    run = read(ranks_that_log(num_ranks, num_equal))
    assert run.num_accelerators == num_ranks and not any('written' in t for t in texts(run))
    same = [mllog('init_start', -5) if '"init_start"' in line else line
            for line in ranks_that_log(num_ranks, num_equal)]
    assert read(same).num_accelerators == num_ranks


@pytest.mark.parametrize('make', [run_lines, lambda: v05_run_lines(nodes=2, ranks=4)])
def test_a_doubled_log_counts_once_and_this_is_said(read, make):
    run = read([line for line in make() for _ in range(2)])
    assert run.num_accelerators == 4 and run.status == 'converged'
    assert any(t.startswith('the whole log was written 2 times') for t in texts(run))
    assert not any('written' in t for t in texts(read(make())))


def asynchronous(trained_from, evaluated_from, *, late_s, bare=False, has_starts=True):
    """Eight epochs of 100 s, each evaluated while the next one is trained."""
    events = []
    for k in range(8):
        events.append((100.0 * k, 'epoch_start', None, k + trained_from))
        if not bare:
            events.append((100.0 * k + 99.9, 'epoch_stop', None, k + trained_from))
        if has_starts:
            events.append((100.0 * k + 99.95, 'eval_start', None, k + evaluated_from))
        events.append((100.0 * (k + 1) + late_s, 'eval_accuracy', 0.1 + k / 10 if k < 7 else 0.76, k + evaluated_from))
    head = [line for line in run_lines(()) if '"run_stop"' not in line]
    lines = [mllog(key, s, value, epoch_num=epoch) for s, key, value, epoch in sorted(events, key=lambda e: e[0])]
    return [*head, *lines, mllog('run_stop', 801 + late_s, status='success')]


@pytest.mark.parametrize('late_s', [-0.03, 30.0, 130.0])
@pytest.mark.parametrize('kind', [{}, {'bare': True}, {'has_starts': False}, {'bare': True, 'has_starts': False}])
@pytest.mark.parametrize('evaluated_from', [0, 1])
def test_epochs_from_0_with_evaluations_beside_the_training(read, evaluated_from, kind, late_s):
    run = read(asynchronous(0, evaluated_from, late_s=late_s, **kind))
    assert (run.epochs_to_converge, run.last_epoch) == (8, 8)
    assert [e.epoch for e in run.evaluations] == list(range(1, 9))


@pytest.mark.parametrize('clock, time_s, word', [
    ({'clock_s': 22.0}, 27.0, ''), ({}, None, 'no clock_s'), ({'clock_s': 'x'}, None, 'no clock_s'),
    ({'clock_s': 1.0}, None, 'before the 22.0 s'), ({'clock_s': 5000.0}, None, 'after the start')])
def test_a_resume_must_say_where_the_clock_goes_on(read, clock, time_s, word):
    lines = run_lines((0.1, 0.2, 0.76))[:-1]
    run = read([*lines, mllog('run_resumed', 1000, 9, epoch_num=3, **clock), mllog('run_stop', 1005, status='success')])
    assert run.time_to_train_s == time_s and any(word in t for t in texts(run))
    assert (run.status == 'converged') == (time_s is not None)


def test_logs_of_two_ranks_one_after_another_are_one_run(read):
    own = run_lines(ranks=1)
    other = [mllog('init_start', -4.9), mllog('run_start', 1.5), *own[-5:]]
    assert read([*own, *other]).status == 'converged' and read([*own, *other]).num_ranks == 2
