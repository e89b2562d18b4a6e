"""Where the time of steps goes, from clocks that are set by hand."""
import mxnet as mx
import pytest
from helpers import HANG_LIMIT_S

from mlperf_rn50.train.pace import Pace


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
    times = pace.take()
    assert times.num_steps == 3
    assert times.data_s >= 0 and times.compute_s >= 0 and times.wait_s >= 0


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
