"""Times of steps, from given clock readings and from MXNet's engine."""

import threading
from itertools import pairwise

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S, table, values

from mlperf_rn50.train.comm.step_timer import Marks, StampFunction, StepTimer, time_step


def marks_of(asked_at=0.0, arrived_at=0.0, read_s=0.0, decode_s=0.0, ready=()):
    return Marks(asked_at, arrived_at, read_s, decode_s, None, None, ready, ())


@pytest.mark.parametrize(
    'start, marks, ends, expected',
    table("""
10.0 | asked_at=10.5 arrived_at=11.5 read_s=0.5 decode_s=0.25 | 12 12.25 12.5 | 0.5 1 0.5 0.25 \
0.25 0.5 0.25 0
12.5 | asked_at=12.25 arrived_at=12.75 read_s=0.25 | 13 15 15 | 0 0.25 0.25 2 0 0.125 0 0
15.0 | asked_at=13.0 arrived_at=14.0 read_s=0.5 | 17.5 17 18 | 0 0 2.5 0 0.5 0 0 0
"""),
)
def test_parts_of_a_step(start, marks, ends, expected):
    """Columns: python, data, compute, wait, update, read, decode, hidden.

    In the second step, the loop asked before the step before ended, so the device saw only half of
    the wait. In the third, the images arrived in the step before, and the clock was read late after
    the backward pass.
    """
    ends, expected = ([float(x) for x in text.split()] for text in (ends, expected))
    spans, row = time_step(7, float(start), marks_of(**values(marks)), ends, [])
    assert row == expected and (spans.step, spans.updated_s) == (7, ends[-1])


def test_hidden_exchange_is_the_union_of_buckets_before_the_end_of_backward():
    buckets = [(10.5, 11.0), (10.75, 11.5), (12.0, 12.25), (13.5, 15.0), (14.5, 16.0)]
    spans, row = time_step(1, 10.0, marks_of(), (14.0, 15.0, 15.0), buckets)
    assert row[-1] == 1.0 + 0.25 + 0.5 and spans.buckets[-1] == (14.5, 15.0)
    assert np.isnan(time_step(1, 10.0, marks_of(ready=None), (16.0, 16.0, 16.0), [])[1][-1])


ONE = mx.nd.ones((1,))


def push_steps(timer, number):
    """Push steps with two buckets, which are marked if the timer samples them; return which ones it
    samples."""
    sampled = []
    for step in range(number):
        ready, done = None, []
        if timer.is_sampling:
            sampled.append(step)
            ready, done = ([timer.stamp(ONE), timer.stamp(ONE + 1)] for _ in range(2))
        timer.mark_exchange(ONE, timer.mark(ONE), ready, done)
        timer.mark_update(ONE)
    timer.drain()
    return sampled


def test_timer_samples_the_buckets_of_some_steps_after_the_first():
    timer = StepTimer()
    assert push_steps(timer, 20) == [1, 17]
    assert np.flatnonzero(~np.isnan(timer.take()[:, -1])).tolist() == [1, 17]
    assert timer.take().shape == (0, 8)


def test_bucket_whose_operation_failed_has_no_times():
    timer = StepTimer()
    timer.mark_exchange(ONE, ONE, [timer.stamp(ONE), 99], [timer.stamp(ONE), timer.stamp(ONE)])
    timer.mark_update(ONE)
    assert timer.take()[0, -1] == 0


def test_asynchronous_engine_gives_no_times_of_buckets(monkeypatch):
    monkeypatch.setenv('MXNET_ASYNC_GPU_ENGINE', '1')
    assert push_steps(StepTimer(), 20) == []


def test_operations_on_separated_arrays_start_when_all_of_them_are_written():
    timer, is_free, done = StepTimer(), threading.Event(), []
    slow, fast = mx.nd.zeros((1,)), mx.nd.zeros((1,))
    stamp = timer.thread.stamp

    def note(handle, number):
        if number == 1:
            is_free.wait(HANG_LIMIT_S)
        stamp(handle, number)
        done.append(number)

    timer.thread.function = StampFunction(note)
    numbers = [timer.separate([slow]), timer.separate([fast, slow]), timer.stamp(fast)]
    threading.Timer(0.1, is_free.set).start()
    mx.nd.waitall()
    assert done == numbers and len(timer.thread.take_stamps(numbers)) == 3


def test_trace_contains_the_buckets_of_every_step_and_ends_with_the_last():
    seen = []
    timer = StepTimer(on_step=seen.append)
    timer.start(40)
    timer.start_trace(3, 44)
    push_steps(timer, 5)
    assert timer.take_trace() == []
    assert push_steps(timer, 5) == [0]
    spans = timer.take_trace()
    assert [(s.step, len(s.buckets)) for s in spans] == [(44, 2), (45, 2), (46, 2)]
    assert spans == seen[3:6] and all(a.updated_s == b.start_s for a, b in pairwise(spans))
    assert timer.take_trace(is_end=True) == []


def test_trace_of_the_next_steps_is_incomplete_at_the_end_of_a_run():
    timer = StepTimer()
    timer.start(40)
    push_steps(timer, 2)
    timer.start_trace(9)
    push_steps(timer, 2)
    assert timer.take_trace() == [] and [s.step for s in timer.take_trace(is_end=True)] == [43, 44]


@pytest.mark.parametrize(
    'num_planned, first, num_requested, rest',
    [(2, 8, 2, [8, 9]), (6, 3, 4, [5, 6, 7, 8])],
    ids=['apart', 'overlapping'],
)
def test_configured_steps_are_traced_after_those_of_a_request(
    num_planned, first, num_requested, rest
):
    timer = StepTimer()
    timer.start(0)
    timer.start_trace(num_planned, first)
    timer.start_trace(num_requested)
    push_steps(timer, 4)
    assert [s.step for s in timer.take_trace()] == [*range(1, num_requested + 1)]
    push_steps(timer, 6)
    assert [s.step for s in timer.take_trace()] == rest


def test_request_within_configured_steps_keeps_and_extends_them():
    timer = StepTimer()
    timer.start(0)
    timer.start_trace(6, 1)
    push_steps(timer, 2)
    timer.start_trace(2)  # these are traced already
    push_steps(timer, 4)
    assert [s.step for s in timer.take_trace()] == [1, 2, 3, 4, 5, 6]
    timer.start_trace(2, 7)
    push_steps(timer, 1)
    timer.start_trace(2)  # the second one is a further step
    push_steps(timer, 2)
    assert [s.step for s in timer.take_trace()] == [7, 8, 9]


def test_exchange_is_timed_before_the_loop_pushes_the_update():
    ended = threading.Event()
    timer = StepTimer(lambda is_exchanging: None if is_exchanging else ended.set())
    timer.mark_exchange(ONE, ONE, None, ())
    assert ended.wait(HANG_LIMIT_S)
    timer.mark_update(ONE)
    assert len(timer.take()) == 1


@pytest.mark.parametrize('place', [0, 1, 4])
def test_failed_step_raises(place):
    timer = StepTimer()
    timer.mark_data(0.0)
    marks = [ONE, ONE, None, (), ONE]
    marks[place] = mx.nd.random.normal(0, -1, shape=(2, 2))  # fails when it is computed
    timer.mark_exchange(*marks[:4])
    timer.mark_update(marks[4])
    for ask in (timer.take, timer.check):
        with pytest.raises(mx.MXNetError):
            ask()


def test_thread_ends_with_the_timer():
    timer = StepTimer()
    thread = timer.thread
    assert thread.is_alive()
    del timer
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()
