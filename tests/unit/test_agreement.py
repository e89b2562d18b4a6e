"""Ranks that differ from the others, and ranks that are slow."""
import pytest

from mlperf_rn50.train.agreement import describe_divergence, find_stragglers


def times(*seconds):
    return [{'rank': r, 'host': f'h{r}', 'cores': '0-3', 'num_steps': 10, 'data_s': 0.05, 'compute_s': s, 'wait_s': 1.2}
            for r, s in enumerate(seconds)]


def test_of_three_ranks_the_one_that_differs_is_named_with_its_first_array():
    good = {'model/a': 1, 'model/b': 2, 'optimizer/a': 3}
    said = describe_divergence([good, good, {**good, 'model/b': 7, 'optimizer/a': 8}], 4)
    assert 'after epoch 5: rank 2 of 3, first in model/b (2 of 3 arrays differ)' in said


def test_of_two_ranks_nobody_can_tell_which():
    assert 'rank 0, 1 of 2, first in a (1 of 1' in describe_divergence([{'a': 1}, {'a': 2}], 0)


def test_a_rank_that_computes_longer_than_the_median_is_named():
    assert find_stragglers(times(1, 1.14, 1, 1)) == []
    [said] = find_stragglers(times(1, 1, 1.25, 1))
    assert said.startswith('rank 2 on h2 (cores 0-3) is slow: 125 ms a step to compute, the median is 100')
    assert '10% of each step is lost' in said


@pytest.mark.parametrize('seconds, slow', [((1, 2, 1, 3, 1), ['3', '1']), ((1, 1.2), ['1']), ((5,), [])])
def test_the_slowest_comes_first_of_two_the_faster_is_the_measure_and_one_rank_is_never_slow(seconds, slow):
    assert [s.split()[1] for s in find_stragglers(times(*seconds))] == slow
