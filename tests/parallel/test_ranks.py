"""Horovod ranks: collectives, and steps that do not depend on the number of ranks.

A start takes seconds, so the tests share the results of one start for each number of ranks.
"""

import json
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, run, slow, under_ranks

WORKERS = Path(__file__).parent / 'workers.py'
OPTIMIZERS, FIRST_STEPS = ['sgd', 'lars'], {'whole': 0, 'padded': 28}
# Optimizer, first step and passes per step, for each number of ranks; 0 starts one process without
# a launcher.
ONE_PASS = [(*case, 1) for case in product(OPTIMIZERS, FIRST_STEPS)]
STEPS = {
    0: [*ONE_PASS, ('lars', 'padded', 4)],
    1: [],
    2: [*ONE_PASS, ('sgd', 'padded', 2)],
    3: ONE_PASS,
}
THREE = slow(3)


@pytest.fixture(scope='module')
def on_ranks(tmp_path_factory, digits):
    """Function that calls worker functions on ranks; returns the results of each rank by call."""

    def on_ranks(num_ranks, calls, num_sharing=1, has_mpi=True):
        out = tmp_path_factory.mktemp(f'{num_ranks}_ranks')
        command = [sys.executable, WORKERS, out, digits, num_sharing, *calls]
        horovodrun = ROOT / 'launch/engines/horovodrun.sh', f'localhost:{num_ranks}'
        done = run(under_ranks(num_ranks, command) if has_mpi else [*horovodrun, *command])
        assert done.returncode == 0, done.stderr
        return [json.loads((out / f'{r}.json').read_text()) for r in range(max(1, num_ranks))]

    return on_ranks


def steps_call(optimizer, first, num_passes):
    return f'steps {optimizer} {num_passes} {FIRST_STEPS[first]}'


@pytest.fixture(scope='module')
def results(on_ranks):
    """Function that starts a number of ranks on first use; returns the results of each rank by
    call."""

    @cache
    def results(num_ranks):
        calls = ['collectives', 'statistics', *(steps_call(*case) for case in STEPS[num_ranks])]
        if num_ranks == 2:
            calls += ['background', 'buckets', 'compressed_steps', 'times 1', 'times 2']
        if num_ranks > 1:
            calls.append('divergence')
        return on_ranks(num_ranks, calls)

    return results


def collectives_of(r, n):
    """Return the expected results of rank r of n on a host."""
    special = np.array([-0.0, 0.0, np.inf, 1e-40, 1.5])
    total = sum(range(1, n + 1)) / n
    arrays = [[0.0] * 3, [10.0] * 2, [total] * 4, [10.0 * total] * 4]
    arrays += [[60000.0 * min(n, 2) / n, total], [(n - 1) / 2] * 2, [sum(range(n)), n], [r, 1.0]]
    return {
        'place': [r, n, r, n],
        'special': [special.astype(t).tobytes().hex() for t in ('float32', 'float16')],
        'gathered': [{'rank': k, 'text': 'ü' * k} for k in range(n)],
        'arrays': [pytest.approx(values, rel=1e-3) for values in arrays],
        'counts': [sum(range(n)), n * 2**40, 1],
        'minimum': [0.0, 2.0**-40 - n + 1],
    }


@pytest.mark.parametrize('num_ranks', [0, slow(1), 2, THREE])
def test_collectives(results, num_ranks):
    n = max(1, num_ranks)
    for r, got in enumerate(results(num_ranks)):
        assert got['collectives'] == collectives_of(r, n)


@pytest.mark.parametrize(
    'num_ranks, num_sharing, has_mpi',
    [
        (4, 2, True),
        slow(2, 2, True),
        slow(3, 2, False),
    ],
)
def test_collectives_of_ranks_that_share_a_gpu(on_ranks, num_ranks, num_sharing, has_mpi):
    calls = ['collectives', 'late_rank', *['three_ranks'] * (num_ranks == 4)]
    for r, got in enumerate(on_ranks(num_ranks, calls, num_sharing, has_mpi)):
        assert got['collectives'] == collectives_of(r, num_ranks)
        assert got['late_rank'] == [1.0] * 4
        if num_ranks == 4:
            assert got['three_ranks'] == (collectives_of(r, 3) if r < 3 else None)


def test_ranks_without_launcher_share_gpus_by_environment(monkeypatch):
    monkeypatch.setenv('MLPERF_RN50_RANKS_PER_DEVICE', '2')
    monkeypatch.delenv('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', raising=False)
    names = 'MLPERF_RN50_RANKS_PER_DEVICE', 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'
    done = run(under_ranks(1, ['printenv', *names]))
    assert done.stdout.splitlines()[-2:] == ['2', '100'], done.stderr


def test_concurrent_background_sums(results):
    assert [r['background'] for r in results(2)] == [[[1.0, 2.0 * k] for k in range(8)]] * 2


@pytest.mark.parametrize('num_ranks', [0, 2, THREE])
def test_step_does_not_depend_on_number_of_ranks(results, num_ranks):
    for case, got in product(STEPS[num_ranks], results(num_ranks)):
        single = results(0)[0][steps_call(*case[:2], 1)]
        for name, expected in single.items():
            atol, place = 2e-4 * np.abs(expected).max(), f'{name} of {case}'
            np.testing.assert_allclose(
                got[steps_call(*case)][name], expected, rtol=1e-3, atol=atol, err_msg=place
            )


@pytest.mark.parametrize('num_passes', [1, 2])
def test_phases_add_up_to_the_time_of_the_steps(results, num_passes):
    for rank in results(2):
        for whole, phases, hidden, traced in rank[f'times {num_passes}']:
            assert whole == phases
            assert np.isnan(hidden).tolist() == [False, False, True]
            assert all(0 <= h < whole for h in hidden[:2]) and len(traced) == 2
            for buckets in traced:
                assert len(buckets) > 1 and all(a < b for a, b in buckets)


def test_compressed_gradients_are_nearly_the_same(results):
    exact = results(2)[0][steps_call('sgd', 'whole', 1)]
    small = [r['compressed_steps'] for r in results(2)]
    assert small[0] == small[1]
    np.testing.assert_allclose(small[0]['losses'], exact['losses'], rtol=5e-2)
    weight, expected = small[0]['fc1_weight'], exact['fc1_weight']
    assert weight != expected
    np.testing.assert_allclose(weight, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize('num_ranks', [2, THREE])
def test_averaging_statistics_midway_does_not_change_the_result(results, num_ranks):
    statistics = [r['statistics'] for r in results(num_ranks)]
    local = np.array([r['local'] for r in statistics])
    assert (local[0] != local[1]).any()
    for r in statistics:
        np.testing.assert_allclose(r['middle'], local.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(r['twice'], r['once'], rtol=1e-5, atol=1e-6)
        assert r['is_learning_the_same'] and r['is_restored']
        assert [r['once'], r['middle']] == [statistics[0]['once'], statistics[0]['middle']]


def test_number_of_buckets_does_not_change_bits(results):
    """With more than two ranks, the order of a sum may depend on the place of a gradient in the
    exchange."""
    for rank in results(2):
        numbers, (sgd_one, sgd_five, lars_one, lars_five) = zip(*rank['buckets'])
        assert numbers == (1, 5, 1, 5)
        assert sgd_one == sgd_five != lars_one == lars_five


@pytest.mark.parametrize(
    'num_ranks, blamed',
    [(2, 'rank 0, 1 of 2'), slow(3, 'rank 1 of 3')],
)
def test_flipped_bit_is_found_and_named(results, num_ranks, blamed):
    for rank in results(num_ranks):
        before, after = rank['divergence']
        where = f'after epoch 4: {blamed}, first in model/stage2_unit1_conv1_weight (1 of '
        assert before == '' and where in after
