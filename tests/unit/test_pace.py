"""Where the time of steps goes, from clocks that are set by hand; ranks that are slow or differ from the others."""
import mxnet as mx
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.train.comm.rank_checks import describe_divergence, find_stragglers
from mlperf_rn50.train.step_timer import Pace


def test_parts_of_a_step():
    pace = Pace()
    pace._watch.last_end = 10.0
    pace._watch.add(data_at=10.5, computed_at=12.0, exchanged_at=12.25)  # the images came late
    pace._watch.add(data_at=11.0, computed_at=13.25, exchanged_at=15.25)  # they came while the step before was computed
    times = pace.take()
    assert times.num_steps == 2
    assert (times.data_s, times.compute_s, times.wait_s) == (0.5, 1.5 + 1.0, 0.25 + 2.0)
    assert pace.take().num_steps == 0


def test_steps_are_counted_not_passes():
    pace = Pace()
    pace.start()
    for _ in range(3):
        pace.has_data()
        first = pace._data_at
        pace.has_data()  # a second pass
        assert pace._data_at == first
        pace.stepped(mx.nd.ones((2,)).copy(), mx.nd.ones((2,)).copy())
    assert pace.take().num_steps == 3


def test_a_step_that_failed_is_told():
    pace = Pace()
    pace.has_data()
    wrong = mx.nd.random.normal(0, -1, shape=(2, 2))  # fails when it is computed
    pace.stepped(wrong, mx.nd.ones((1,)))
    with pytest.raises(mx.MXNetError):
        pace.take()
    with pytest.raises(mx.MXNetError):
        pace.check()


def test_its_thread_ends_with_it():
    pace = Pace()
    thread = pace._watch
    assert thread.is_alive()
    del pace
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
