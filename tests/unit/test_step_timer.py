"""Parts of the step time from given clock readings; stragglers and diverging ranks."""

import threading
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S, ROOT

from mlperf_rn50.train.comm import step_timer
from mlperf_rn50.train.comm.device import wait_for
from mlperf_rn50.train.comm.rank_checks import describe_divergence, device_digests, find_stragglers
from mlperf_rn50.train.comm.step_timer import Marks, StepTimer


def add_step(
    timer, asked_at=0.0, arrived_at=0.0, ends=(), read_s=0.0, decode_s=0.0, buckets=(), ready=()
):
    timer._thread.add(
        Marks(asked_at, arrived_at, read_s, decode_s, None, None, ready, ()), *ends, list(buckets)
    )


def test_parts_of_a_step():
    """Columns: python, data, compute, wait, update, read, decode, hidden."""
    timer = StepTimer()
    timer._thread.last_end = 10.0
    add_step(
        timer, asked_at=10.5, arrived_at=11.5, ends=(12.0, 12.25, 12.5), read_s=0.5, decode_s=0.25
    )
    # The loop asked before the step before ended, so the device saw only half of the wait.
    add_step(timer, asked_at=12.25, arrived_at=12.75, ends=(13.0, 15.0, 15.0), read_s=0.25)
    # The images arrived in the step before, and the clock was read late after the backward pass.
    add_step(timer, asked_at=13.0, arrived_at=14.0, ends=(17.5, 17.0, 18.0), read_s=0.5)
    assert timer.take().tolist() == [
        [0.5, 1.0, 0.5, 0.25, 0.25, 0.5, 0.25, 0.0],
        [0.0, 0.25, 0.25, 2.0, 0.0, 0.125, 0.0, 0.0],
        [0.0, 0.0, 2.5, 0.0, 0.5, 0.0, 0.0, 0.0],
    ]
    assert timer.take().shape == (0, 8)


def test_hidden_exchange_is_the_union_of_buckets_before_the_end_of_backward():
    timer = StepTimer()
    timer._thread.last_end = 10.0
    buckets = [(10.5, 11.0), (10.75, 11.5), (12.0, 12.25), (13.5, 15.0), (14.5, 15.0)]
    add_step(timer, ends=(14.0, 15.0, 15.0), buckets=buckets)
    add_step(timer, ends=(16.0, 16.0, 16.0), ready=None)  # not sampled
    times = timer.take()
    assert times[0, -1] == 1.0 + 0.25 + 0.5 and np.isnan(times[1, -1])


def test_timer_samples_the_buckets_of_some_steps_after_the_first():
    timer = StepTimer()
    assert (
        push_steps(timer, 20) == [1, 17] == np.flatnonzero(~np.isnan(timer.take()[:, -1])).tolist()
    )


def test_bucket_whose_operation_failed_has_no_times(monkeypatch):
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=partial(next, count(3)))
    monkeypatch.setattr(step_timer, 'time', clock)
    thread = step_timer._TimerThread(None, None)
    thread.stamp(None, 1)
    thread.stamp(None, 2)
    assert thread.take_stamps([1, 3]) == [] and thread.take_stamps([2, 1]) == [5, 4]


def test_asynchronous_engine_gives_no_times_of_buckets(monkeypatch):
    monkeypatch.setenv('MXNET_ASYNC_GPU_ENGINE', '1')
    assert push_steps(StepTimer(), 20) == []


def push_steps(timer, number):
    """Push steps with two buckets, which are marked if the timer samples them; return which ones it
    samples."""
    sampled = []
    for step in range(number):
        is_sampled, one = timer.is_sampling, mx.nd.ones((1,))
        ready, done = (
            [timer.stamp(one), timer.stamp(one + 1)] if is_sampled else [] for _ in range(2)
        )
        timer.mark_exchange(one, timer.mark(one), ready if is_sampled else None, done)
        timer.mark_update(one)
        sampled += [step] * is_sampled
    timer.drain()
    return sampled


def test_operations_on_separated_arrays_start_when_all_of_them_are_written():
    timer, is_free, done = StepTimer(), threading.Event(), []
    slow, fast = mx.nd.zeros((1,)), mx.nd.zeros((1,))
    stamp = timer._thread.stamp

    def note(handle, number):
        if number == 1:
            is_free.wait(HANG_LIMIT_S)
        stamp(handle, number)
        done.append(number)

    timer._thread.function = step_timer._Function(note)
    numbers = [timer._push_stamp([], [slow]), timer.separate([fast, slow]), timer.stamp(fast)]
    threading.Timer(0.1, is_free.set).start()
    mx.nd.waitall()
    assert done == numbers and len(timer._thread.take_stamps(numbers)) == 3


def test_trace_contains_the_buckets_of_every_step_and_ends_with_the_last():
    seen = []
    timer = StepTimer(on_step=seen.append)
    timer.start(40)
    timer.start_trace(3, 44)
    push_steps(timer, 5)
    assert timer.take_trace() == []
    assert push_steps(timer, 5) == [0]
    spans = timer.take_trace()
    assert [(s.step, len(s.buckets)) for s in spans] == [
        (44, 2),
        (45, 2),
        (46, 2),
    ] and spans == seen[3:6]
    assert (
        all(a.updated_s == b.start_s for a, b in pairwise(spans))
        and timer.take_trace(is_end=True) == []
    )


def test_trace_of_the_next_steps_is_incomplete_at_the_end_of_a_run():
    timer = StepTimer()
    timer.start(40)
    push_steps(timer, 2)
    timer.start_trace(9)
    push_steps(timer, 2)
    assert timer.take_trace() == [] and [s.step for s in timer.take_trace(is_end=True)] == [43, 44]


def test_exchange_is_timed_before_the_loop_pushes_the_update():
    ended = threading.Event()
    timer = StepTimer(lambda is_exchanging: None if is_exchanging else ended.set())
    timer.mark_exchange(mx.nd.ones((1,)), mx.nd.ones((1,)), None, ())
    assert ended.wait(HANG_LIMIT_S)
    timer.mark_update(mx.nd.ones((1,)))
    assert len(timer.take()) == 1


@pytest.mark.parametrize('place', [0, 1, 4])
def test_failed_step_raises(place):
    timer = StepTimer()
    timer.mark_data(0.0)
    marks = [mx.nd.ones((1,)), mx.nd.ones((1,)), None, (), mx.nd.ones((1,))]
    marks[place] = mx.nd.random.normal(0, -1, shape=(2, 2))  # fails when it is computed
    timer.mark_exchange(*marks[:4])
    timer.mark_update(marks[4])
    with pytest.raises(mx.MXNetError):
        timer.take()
    with pytest.raises(mx.MXNetError):
        timer.check()


def test_waiting_for_a_gpu_copies_an_element():
    """With the asynchronous engine, wait_to_read() returns after the launch of the operator that
    writes the array."""
    read, values = [], mx.nd.arange(6)

    class OnGpu:
        context = mx.gpu()

        def reshape(self, shape):
            return self

        def __getitem__(self, key):
            return SimpleNamespace(asnumpy=lambda: read.append(values[key].asnumpy().tolist()))

    wait_for(OnGpu())
    assert read == [[0.0]]
    wait_for(values)


def test_no_module_waits_only_for_the_launch():
    users = [
        p.name for p in (ROOT / 'mlperf_rn50').rglob('*.py') if '.wait_to_read' in p.read_text()
    ]
    assert users == ['device.py']


def test_digests_are_read_while_their_memory_is_held(monkeypatch):
    """MXNet does not know that a digest reads the memory of joined arrays, and could give it to
    other operators."""
    plain, read = mx.nd.NDArray.asscalar, []
    monkeypatch.setattr(
        mx.nd.NDArray, 'asscalar', lambda self: read.append(plain(self)) or read[-1]
    )
    digests = device_digests({f'w{i}': mx.nd.ones((i + 1, 3)) for i in range(20)})
    assert list(digests.values()) == read and len(read) == 5


def test_thread_ends_with_the_timer():
    timer = StepTimer()
    thread = timer._thread
    assert thread.is_alive()
    del timer
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()


def times(*seconds):
    return [
        {
            'rank': r,
            'host': f'h{r}',
            'cores': '0-3',
            'num_steps': 10,
            'data_s': 0.05,
            'compute_s': s,
            'wait_s': 1.2,
        }
        for r, s in enumerate(seconds)
    ]


def test_diverging_rank_of_three_is_named_with_the_first_array():
    good = {'model/a': 1, 'model/b': 2, 'optimizer/a': 3}
    message = describe_divergence([good, good, {**good, 'model/b': 7, 'optimizer/a': 8}], 4)
    assert 'after epoch 5: rank 2 of 3, first in model/b (2 of 3 arrays differ)' in message
    # With two ranks, it is unknown which one diverged.
    assert 'rank 0, 1 of 2, first in a (1 of 1' in describe_divergence([{'a': 1}, {'a': 2}], 0)


def test_rank_slower_than_the_median_is_a_straggler():
    assert find_stragglers(times(1, 1.14, 1, 1)) == []
    [straggler] = find_stragglers(times(1, 1, 1.25, 1))
    assert straggler.startswith(
        'rank 2 on h2 (cores 0-3) is slow: it computes for 125 ms per step (median 100 ms)'
    )
    assert 'lose 10% of each step' in straggler


@pytest.mark.parametrize(
    'seconds, slow', [((1, 2, 1, 3, 1), ['3', '1']), ((1, 1.2), ['1']), ((5,), [])]
)
def test_slowest_straggler_comes_first_and_a_single_rank_is_never_slow(seconds, slow):
    assert [s.split()[1] for s in find_stragglers(times(*seconds))] == slow


@pytest.mark.parametrize('dtype, bits', [('float32', np.uint32), ('float16', np.uint16)])
def test_device_digest_depends_on_each_bit_and_position(dtype, bits):
    values = np.array([0.0, 1e-45, -3e-8, 1.5, 2.5, 0.1], np.float32).astype(dtype)

    def digest(values):
        arrays = {
            'a': mx.nd.array(values[:4].reshape(2, 2), dtype=dtype),
            'b': mx.nd.array(values[4:], dtype=dtype),
        }
        return device_digests(arrays)['a to b']

    flipped = [
        (values.view(bits) ^ bits(1 << b) * (np.arange(6) == i)).astype(bits).view(dtype)
        for i in range(6)
        for b in range(8 * values.itemsize)
    ]
    # a conversion to float32 may change a NaN's bits
    numbers = [v for v in flipped if not np.isnan(v).any()]
    zeros = values * 0
    different = [
        values,
        values[::-1],
        values[[0, 1, 2, 4, 3, 5]],
        abs(zeros),
        -abs(zeros),
        values * np.nan,
        *numbers,
    ]
    digests = [digest(v) for v in different]
    assert len(set(digests)) == len(digests) and digest(values.copy()) == digests[0]


def test_device_digests_name_the_group_with_the_difference():
    arrays = {f'w{i}': mx.nd.ones((i + 1, 3)) for i in range(20)}
    before = device_digests(arrays)
    arrays['w9'][0, 1] = np.nextafter(np.float32(1), np.float32(2))
    after = device_digests(arrays)
    assert list(before) == ['w0 to w3', 'w4 to w7', 'w8 to w11', 'w12 to w15', 'w16 to w19']
    assert [n for n in before if before[n] != after[n]] == ['w8 to w11']
