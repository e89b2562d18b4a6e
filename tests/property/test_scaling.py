"""Speed-up for any durations: product of its factors, and bounds of its parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lines import write_set
from made_systems import study_of
from pytest import approx

from mlperf_rn50.analysis.sets.time_parts import parts_of


def runs(more_s):
    """Return a strategy for run sets with times in tenths of seconds plus more_s."""
    seconds = st.integers(1, 5000).map(lambda n: n / 10 + more_s)
    return st.fixed_dictionaries(
        {
            'epoch_s': seconds,
            'first_s': seconds,
            'eval_s': seconds,
            'num_runs': st.integers(1, 5),
            'period': st.integers(1, 4),
            'accuracies': st.integers(1, 5).map(lambda n: (0.5,) * (n - 1) + (0.76,)),
        }
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('study')


# The offsets differ, because sets with equal times count as copies and are not compared.
@given(small=runs(0.0), large=runs(0.037))
def test_speedup_is_product_of_throughput_epochs_and_share(folder, small, large):
    for path in folder.rglob('*.txt'):
        path.unlink()
    write_set(folder / 'a', **small)
    # the first run has one more evaluation
    curves = {'accuracies': lambda k: (0.4,) * (k == 0) + large['accuracies']}
    write_set(folder / 'b', nodes=2, ranks=8, batch=128, **large | curves)
    study = study_of(folder)
    (first, second), (base, c) = study.run_sets, study.comparisons
    assert base.speedup == base.efficiency == base.throughput_gain == 1
    assert base.epoch_ratio == base.share_ratio == 1
    assert c.throughput_gain * c.epoch_ratio * c.share_ratio == approx(c.speedup, rel=1e-6)
    assert c.hardware_efficiency * c.epoch_ratio * c.rest == approx(c.efficiency, rel=1e-6)
    assert c.speedup == approx(first.time_s / second.time_s)
    assert (c.efficiency, c.hardware_efficiency) == approx((c.speedup / 2, c.throughput_gain / 2))
    for run in (*first.runs, *second.runs):
        parts = parts_of(run)
        assert parts.on_clock_s == approx(run.time_to_train_s, abs=0.01)
        assert min(parts.first_s, parts.training_s, parts.evaluation_s) >= 0
        assert parts.other_s > -0.01
