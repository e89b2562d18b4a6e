"""Horovod ranks: collectives, and steps that do not depend on the number of ranks.

A start takes seconds, so the tests share the results of one start for each number of ranks.
"""

import json
import os
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, run, under_ranks

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
THREE = pytest.param(3, marks=pytest.mark.slow)


def on_ranks(folder, num_ranks, calls, num_sharing=1, has_mpi=True):
    """Run worker functions, [key, function, arguments], on ranks; return the results of each rank
    by key."""
    out = folder / f'{num_ranks}_{len(list(folder.iterdir()))}'
    out.mkdir()
    words = json.dumps([[key, name, [str(a) for a in arguments]] for key, name, arguments in calls])
    command = [sys.executable, WORKERS, out, num_sharing, words]
    if has_mpi:
        done = run(under_ranks(num_ranks, command))
    else:
        engine = [ROOT / 'launch/engines/horovodrun.sh', f'localhost:{num_ranks}']
        job = {'MLPERF_RN50_JOB': 'test', 'TMPDIR': str(folder)}
        done = run([*engine, *command], env={**os.environ, **job})
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f'{r}.json').read_text()) for r in range(max(1, num_ranks))]


def step_key(optimizer, first, num_passes):
    return f'steps {optimizer} {first} {num_passes}'


def calls_of(num_ranks, data):
    """Return the worker calls for a start."""
    calls = [['collectives', 'collectives', []], ['statistics', 'statistics', [data]]]
    calls += [
        [step_key(*case), 'steps', [data, case[0], case[2], FIRST_STEPS[case[1]]]]
        for case in STEPS[num_ranks]
    ]
    if num_ranks == 2:
        calls += [[name, name, []] for name in ('background', 'float16_start')]
        calls += [[name, name, [data]] for name in ('buckets', 'compressed_steps')]
        calls += [[f'times {passes}', 'times', [data, passes]] for passes in (1, 2)]
    if num_ranks > 1:
        calls.append(['divergence', 'divergence', [data]])
    return calls


@pytest.fixture(scope='module')
def results(tmp_path_factory, digits):
    """Function that starts a number of ranks on first use; returns the results of each rank by
    key."""
    folder = tmp_path_factory.mktemp('ranks')
    return cache(lambda num_ranks: on_ranks(folder, num_ranks, calls_of(num_ranks, digits)))


def collectives_of(r, n, size):
    """Return the expected results of rank r of n, with `size` ranks on its host."""
    special = [
        np.array([-0.0, 0.0, np.inf, 1e-40, 1.5], t).tobytes().hex()
        for t in (np.float32, np.float16)
    ]
    total = sum(range(1, n + 1))
    return {
        'rank': r,
        'world_size': n,
        'local': [r, size],
        'broadcast': [[10.0, 10.0], [0.0, 0.0, 0.0]],
        'special': special,
        'gathered': [{'rank': k, 'text': 'ü' * k} for k in range(n)],
        'grads': [pytest.approx([total / n] * 4), pytest.approx([10.0 * total / n] * 4)],
        'halves': pytest.approx([60000.0 * min(n, 2) / n, total / n], rel=1e-3),
        'mean': [(n - 1) / 2] * 2,
        'pulse': [sum(range(n)), n],
        'kept': [r, 1.0],
        'counts': [sum(range(n)), n * 2**40, 1],
        'minimum': [0.0, 2.0**-40 - n + 1],
    }


@pytest.mark.parametrize('num_ranks', [0, pytest.param(1, marks=pytest.mark.slow), 2, THREE])
def test_collectives(results, num_ranks):
    n = max(1, num_ranks)
    assert [got['collectives'] for got in results(num_ranks)] == [
        collectives_of(r, n, n) for r in range(n)
    ]


def test_ranks_start_float16_training_with_the_arrays_of_rank_0(results):
    """Horovod never ends an exchange of several views of one array, such as the velocities of
    float16 training."""
    first, second = (r['float16_start'] for r in results(2))
    assert first == second and set(first['a_weight']) == {1.0} and {7.0} in map(set, first.values())


@pytest.mark.parametrize(
    'num_ranks, num_sharing, has_mpi',
    [
        (4, 2, True),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
        pytest.param(3, 2, False, marks=pytest.mark.slow),
    ],
)
def test_collectives_of_ranks_that_share_a_gpu(tmp_path, num_ranks, num_sharing, has_mpi):
    calls = [
        [name, name, []]
        for name in ('collectives', 'late_rank', *(['three_ranks'] if num_ranks == 4 else []))
    ]
    results = on_ranks(tmp_path, num_ranks, calls, num_sharing=num_sharing, has_mpi=has_mpi)
    assert [r['collectives'] for r in results] == [
        collectives_of(r, num_ranks, num_ranks) for r in range(num_ranks)
    ]
    assert [r['late_rank'] for r in results] == [[1.0] * 4] * num_ranks
    if num_ranks == 4:
        assert [r['three_ranks'] for r in results] == [
            *(collectives_of(r, 3, 3) for r in range(3)),
            None,
        ]


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
        single = results(0)[0][step_key(*case[:2], 1)]
        for name, expected in single.items():
            atol, place = 2e-4 * np.abs(expected).max(), f'{name} of {case}'
            np.testing.assert_allclose(
                got[step_key(*case)][name], expected, rtol=1e-3, atol=atol, err_msg=place
            )


@pytest.mark.parametrize('num_passes', [1, 2])
def test_phases_add_up_to_the_time_of_the_steps(results, num_passes):
    for rank in results(2):
        for whole, phases, hidden, traced in rank[f'times {num_passes}']:
            assert whole == phases
            assert np.isnan(hidden).tolist() == [False, False, True]
            assert all(0 <= h < whole for h in hidden[:2]) and len(traced) == 2
            for buckets in traced:
                # stamps that are late are cut to the end of the step
                assert len(buckets) > 1 and all(a <= b for a, b in buckets)
                assert any(a < b for a, b in buckets)


def test_compressed_gradients_are_nearly_the_same(results):
    exact = results(2)[0][step_key('sgd', 'whole', 1)]
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
    assert all(
        r['once'] == statistics[0]['once'] and r['middle'] == statistics[0]['middle']
        for r in statistics
    )


def test_number_of_buckets_does_not_change_bits(results):
    """With more than two ranks, the order of a sum may depend on the place of a gradient in the
    exchange."""
    for rank in results(2):
        sgd_one, sgd_five, lars_one, lars_five = rank['buckets']['ends']
        assert [n for n, _ in rank['buckets']['ends']] == [1, 5, 1, 5]
        assert sgd_one[1] == sgd_five[1] != lars_one[1] == lars_five[1]


@pytest.mark.parametrize(
    'num_ranks, blamed',
    [(2, 'rank 0, 1 of 2'), pytest.param(3, 'rank 1 of 3', marks=pytest.mark.slow)],
)
def test_flipped_bit_is_found_and_named(results, num_ranks, blamed):
    for rank in results(num_ranks):
        before, after = rank['divergence']['errors']
        assert (
            before == ''
            and f'after epoch 4: {blamed}, first in model/stage2_unit1_conv1_weight (1 of ' in after
        )
