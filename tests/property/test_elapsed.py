"""Parts of the time to train of resumed runs, compared with the history from which the logs were
made."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import mllog, run_lines, write_lines

from mlperf_rn50.analysis.sets.time_parts import parts_of
from mlperf_rn50.mllog.elapsed import elapsed_parts, gaps_of, make_resume, outside_s
from mlperf_rn50.mllog.read.reader import read_run

TENTHS = st.integers(1, 500).map(lambda n: n / 10)
# Each attempt but the last: training to its last checkpoint, training after it, how it ended, and
# the time until the resume. A stop follows its checkpoint at once.
ENDS = st.sampled_from(['stop', 'stop after a lost host', 'kill'])
ATTEMPTS = st.lists(st.tuples(TENTHS, TENTHS, ENDS, TENTHS), max_size=5)


def history(attempts, last_s):
    """Return log lines of a run and the true parts of its time. Its only whole epoch begins and
    ends at its borders."""
    now, clock, lost, paused, down = 0.0, 0.0, 0.0, 0.0, 0.0
    lines = [mllog('run_start', 0), mllog('epoch_start', 0, epoch_num=1)]
    for kept_s, after_s, end, until_s in attempts:
        now, clock = now + kept_s, clock + kept_s
        after_fault = end != 'stop'
        if end == 'kill':
            now, lost = now + after_s, lost + after_s
            lines.append(mllog('eval_accuracy', now, 0.9, epoch_num=7))  # is lost
        else:
            lines.append(mllog('run_stop', now, status='aborted', reason='interrupted'))
        paused += 0 if after_fault else until_s
        down += until_s if after_fault else 0
        now += until_s
        known = {'after_fault': after_fault} if end != 'kill' else {}  # earlier versions: no key
        lines.append(mllog('run_resumed', now, 1, epoch_num=1, clock_s=clock, **known))
    now += last_s
    lines += [
        mllog('epoch_stop', now, epoch_num=1),
        mllog('eval_accuracy', now, 0.8, epoch_num=1),
        mllog('run_stop', now, status='success'),
    ]
    return lines, (clock + last_s, lost, paused, down), now


@settings(max_examples=100, deadline=None)
@given(attempts=ATTEMPTS, last_s=TENTHS)
def test_parts_are_those_of_the_history_and_add_up(attempts, last_s):
    lines, expected, total_s = history(attempts, last_s)
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(write_lines(Path(folder, 'result_0.txt'), lines))
    assert run.time_to_train_s == pytest.approx(total_s, abs=0.01)
    assert [e.epoch for e in run.evaluations] == [1] and run.status == 'converged'
    if not attempts:
        assert run.elapsed is None
        return
    assert run.elapsed == pytest.approx(expected, abs=0.02)
    assert sum(run.elapsed) == pytest.approx(run.time_to_train_s)
    # the epoch of all training
    assert parts_of(run).first_s == pytest.approx(expected[0], abs=0.02)


def test_resume_from_an_older_checkpoint_loses_all_later_training():
    first = make_resume([], 10.0, resumed_s=70.0, stopped_s=15.0, is_pause=False)
    second = make_resume([first], 4.0, resumed_s=100.0, stopped_s=90.0, is_pause=True)
    assert elapsed_parts([first, second], 130.0) == (34.0, 11.0 + 20.0, 10.0, 55.0)
    gaps = gaps_of([first, second])
    assert gaps == [(4.0, 100.0)] and outside_s(gaps, 2.0, 103.0) == 5.0


@pytest.fixture
def read(tmp_path):
    """Function that reads a log of two epochs with a resume at 100 s and its end at 110 s."""

    def read(resumed_s=100, last_accuracy=0.76, **resume):
        lines = run_lines((0.1, last_accuracy), status=None)
        lines.append(mllog('run_resumed', resumed_s, 5, **resume))
        status = 'success' if last_accuracy > 0.75 else 'aborted'
        lines.append(mllog('run_stop', 110, status=status))
        return read_run(write_lines(tmp_path / 'result_0.txt', lines))

    return read


@pytest.mark.parametrize(
    'stopped_s, lost_s, is_odd',
    [(40.0, 28.0, False), (1e6, 10.0, True), (3.0, 10.0, True), ('soon', 10.0, True)],
)
def test_sign_of_life_after_the_last_line_is_training_lost(read, stopped_s, lost_s, is_odd):
    """One outside the gap is ignored with a warning."""
    run = read(last_accuracy=0.2, epoch_num=2, clock_s=12.0, stopped_s=stopped_s)
    assert run.elapsed == pytest.approx((22.0, lost_s, 0.0, 88.0 - lost_s))
    assert ('resume_stop_odd' in [f.kind for f in run.findings]) == is_odd


@pytest.mark.parametrize(
    'events',
    [
        [('run_resumed', 72, {'clock_s': 0.0}), ('run_stop', 20, {'status': 'aborted'})],
        [('run_resumed', -1, {'clock_s': 0.0}), ('run_stop', 20, {'status': 'aborted'})],
        [('run_resumed', 10, {'clock_s': 9.0}), ('run_resumed', 2.5, {'clock_s': 2.4})],
    ],
)
def test_parts_of_resumes_at_impossible_times_add_up(events, tmp_path):
    lines = [mllog('run_start', 0), *(mllog(key, at, 1, **more) for key, at, more in events)]
    run = read_run(write_lines(tmp_path / 'result_0.txt', lines))
    assert run.elapsed is None or min(run.elapsed) >= 0
    if run.elapsed and run.seen_s is not None:
        assert sum(run.elapsed) == pytest.approx(run.seen_s)


def test_resume_before_the_line_before_is_an_error(read):
    run = read(resumed_s=5, epoch_num=1, clock_s=5.0)
    assert run.time_to_train_s is None and 'earlier than the line before' in ' '.join(run.errors)
