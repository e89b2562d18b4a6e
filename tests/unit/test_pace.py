"""Parts of the step time from given clock readings; stragglers and diverging ranks."""
import mxnet as mx
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.train.comm.rank_checks import describe_divergence, find_stragglers
from mlperf_rn50.train.step_timer import StepTimer


def test_parts_of_a_step():
    timer = StepTimer()
    timer._thread.last_end = 10.0
    timer._thread.add(data_at=10.5, computed_at=12.0, exchanged_at=12.25)  # images arrived late
    timer._thread.add(data_at=11.0, computed_at=13.25, exchanged_at=15.25)  # images arrived during the previous step
    times = timer.take()
    assert times.num_steps == 2
    assert (times.data_s, times.compute_s, times.wait_s) == (0.5, 1.5 + 1.0, 0.25 + 2.0)
    assert timer.take().num_steps == 0


def test_timer_counts_steps_and_not_passes():
    timer = StepTimer()
    timer.start()
    for _ in range(3):
        timer.mark_data()
        first = timer._data_at
        timer.mark_data()  # a second pass
        assert timer._data_at == first
        timer.mark_step(mx.nd.ones((2,)).copy(), mx.nd.ones((2,)).copy())
    assert timer.take().num_steps == 3


def test_failed_step_raises():
    timer = StepTimer()
    timer.mark_data()
    failing = mx.nd.random.normal(0, -1, shape=(2, 2))  # fails when it is computed
    timer.mark_step(failing, mx.nd.ones((1,)))
    with pytest.raises(mx.MXNetError):
        timer.take()
    with pytest.raises(mx.MXNetError):
        timer.check()


def test_thread_ends_with_the_timer():
    timer = StepTimer()
    thread = timer._thread
    assert thread.is_alive()
    del timer
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()


def times(*seconds):
    return [{'rank': r, 'host': f'h{r}', 'cores': '0-3', 'num_steps': 10, 'data_s': 0.05, 'compute_s': s, 'wait_s': 1.2}
            for r, s in enumerate(seconds)]


def test_diverging_rank_of_three_is_named_with_the_first_array():
    good = {'model/a': 1, 'model/b': 2, 'optimizer/a': 3}
    message = describe_divergence([good, good, {**good, 'model/b': 7, 'optimizer/a': 8}], 4)
    assert 'after epoch 5: rank 2 of 3, first in model/b (2 of 3 arrays differ)' in message
    # With two ranks, it is unknown which one diverged.
    assert 'rank 0, 1 of 2, first in a (1 of 1' in describe_divergence([{'a': 1}, {'a': 2}], 0)


def test_rank_slower_than_the_median_is_a_straggler():
    assert find_stragglers(times(1, 1.14, 1, 1)) == []
    [straggler] = find_stragglers(times(1, 1, 1.25, 1))
    assert straggler.startswith('rank 2 on h2 (cores 0-3) is slow: it computes for 125 ms per step (median 100 ms)')
    assert 'lose 10% of each step' in straggler


@pytest.mark.parametrize('seconds, slow', [((1, 2, 1, 3, 1), ['3', '1']), ((1, 1.2), ['1']), ((5,), [])])
def test_slowest_straggler_comes_first_and_a_single_rank_is_never_slow(seconds, slow):
    assert [s.split()[1] for s in find_stragglers(times(*seconds))] == slow
