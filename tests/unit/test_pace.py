"""Where the time of steps goes, from clocks that are set by hand; ranks that are slow or differ from the others."""
import mxnet as mx
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.train.comm.rank_checks import describe_divergence, find_stragglers
from mlperf_rn50.train.step_timer import StepTimer


def test_parts_of_a_step():
    timer = StepTimer()
    timer._thread.last_end = 10.0
    timer._thread.add(data_at=10.5, computed_at=12.0, exchanged_at=12.25)  # the images came late
    timer._thread.add(data_at=11.0, computed_at=13.25, exchanged_at=15.25)  # they came during the step before
    times = timer.take()
    assert times.num_steps == 2
    assert (times.data_s, times.compute_s, times.wait_s) == (0.5, 1.5 + 1.0, 0.25 + 2.0)
    assert timer.take().num_steps == 0


def test_steps_are_counted_not_passes():
    timer = StepTimer()
    timer.start()
    for _ in range(3):
        timer.mark_data()
        first = timer._data_at
        timer.mark_data()  # a second pass
        assert timer._data_at == first
        timer.mark_step(mx.nd.ones((2,)).copy(), mx.nd.ones((2,)).copy())
    assert timer.take().num_steps == 3


def test_a_step_that_failed_is_told():
    timer = StepTimer()
    timer.mark_data()
    wrong = mx.nd.random.normal(0, -1, shape=(2, 2))  # fails when it is computed
    timer.mark_step(wrong, mx.nd.ones((1,)))
    with pytest.raises(mx.MXNetError):
        timer.take()
    with pytest.raises(mx.MXNetError):
        timer.check()


def test_its_thread_ends_with_it():
    timer = StepTimer()
    thread = timer._thread
    assert thread.is_alive()
    del timer
    thread.join(HANG_LIMIT_S)
    assert not thread.is_alive()


def times(*seconds):
    return [{'rank': r, 'host': f'h{r}', 'cores': '0-3', 'num_steps': 10, 'data_s': 0.05, 'compute_s': s, 'wait_s': 1.2}
            for r, s in enumerate(seconds)]


def test_of_three_ranks_the_one_that_differs_is_named_with_its_first_array():
    good = {'model/a': 1, 'model/b': 2, 'optimizer/a': 3}
    said = describe_divergence([good, good, {**good, 'model/b': 7, 'optimizer/a': 8}], 4)
    assert 'after epoch 5: rank 2 of 3, first in model/b (2 of 3 arrays differ)' in said
    # Of two ranks nobody can tell which.
    assert 'rank 0, 1 of 2, first in a (1 of 1' in describe_divergence([{'a': 1}, {'a': 2}], 0)


def test_a_rank_that_computes_longer_than_the_median_is_named():
    assert find_stragglers(times(1, 1.14, 1, 1)) == []
    [said] = find_stragglers(times(1, 1, 1.25, 1))
    assert said.startswith('rank 2 on h2 (cores 0-3) is slow: 125 ms a step to compute, the median is 100')
    assert '10% of each step is lost' in said


@pytest.mark.parametrize('seconds, slow', [((1, 2, 1, 3, 1), ['3', '1']), ((1, 1.2), ['1']), ((5,), [])])
def test_the_slowest_comes_first_of_two_the_faster_is_the_measure_and_one_rank_is_never_slow(seconds, slow):
    assert [s.split()[1] for s in find_stragglers(times(*seconds))] == slow
