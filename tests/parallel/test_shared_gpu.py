"""Real ranks that share a stand-in for a GPU: they sum among themselves first, then their leaders among each other."""
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, run, under_ranks

WORKER = Path(__file__).parent / 'sharers.py'
# Ranks, those on a GPU, and what they talk through.
TWO_GPUS, ONE_GPU, GLOO = (4, 2, 'mpi'), (2, 2, 'mpi'), (3, 2, 'gloo')
WORLDS = [TWO_GPUS, pytest.param(ONE_GPU, marks=pytest.mark.slow), pytest.param(GLOO, marks=pytest.mark.slow)]
EACH = pytest.mark.parametrize('world', WORLDS, ids=lambda w: f'{w[0]} ranks, {w[1]} a GPU, {w[2]}')


@pytest.fixture(scope='module')
def results(tmp_path_factory, digits):
    """What the ranks of a world found, started when it is first asked for: a list by rank."""
    @cache
    def results(world):
        num_ranks, num_sharing, control = world
        out = tmp_path_factory.mktemp('sharers')
        command = [sys.executable, WORKER, out, digits if world == TWO_GPUS else 'none', num_sharing]
        done = run(under_ranks(num_ranks, command) if control == 'mpi' else
                   [ROOT / 'launch/engines/horovodrun.sh', f'localhost:{num_ranks}', *command])
        assert done.returncode == 0, done.stderr
        return [json.loads((out / f'{r}.json').read_text()) for r in range(num_ranks)]
    return results


def exchanged(found):
    """The results of every number of ranks in a world, on arrays of the host and of the device."""
    for name in ('host', 'device'):
        yield [rank[name] for rank in found]
        if 'of three' in found[0][name]:
            yield [rank[name]['of three'] for rank in found[:3]]


@EACH
def test_the_sum_is_the_sum_and_the_same_on_every_rank(results, world):
    for ranks in exchanged(results(world)):
        for key, tolerance in (('sum', 2e-6), ('again', 2e-6), ('compressed', 2e-2)):
            assert all(r[key] == ranks[0][key] for r in ranks) and ranks[0][key]['error'] < tolerance
        assert ranks[0]['sum']['crc'] == ranks[0]['again']['crc'] != ranks[0]['compressed']['crc']


@EACH
def test_a_float16_that_overflows_does_so_for_all(results, world):
    for ranks in exchanged(results(world)):
        n = len(ranks)
        assert [r['halves'] for r in ranks] == [['inf', str(float(sum(range(1, n + 1)))), str(0.5 * n)]] * n


@EACH
def test_a_broadcast_is_exact_to_the_bit(results, world):
    for ranks in exchanged(results(world)):
        assert [r['broadcast'] for r in ranks] == [[True, True]] * len(ranks)


@EACH
def test_sums_in_the_background_and_averages(results, world):
    for ranks in exchanged(results(world)):
        n = len(ranks)
        assert [r['background'] for r in ranks] == [[[sum(range(n)), n * k] for k in range(8)]] * n
        assert [r['mean'] for r in ranks] == [[(n - 1) / 2] * 2] * n


@EACH
def test_nobody_waits_for_a_rank_that_comes_late(results, world):
    for rank in results(world):
        assert [rank[name]['after the last'] for name in ('host', 'device')] == [[world[0]] * 4] * 2


def test_what_does_not_live_on_a_gpu_is_exchanged_by_all(results):
    found = results(TWO_GPUS)
    assert [r['ranks'] for r in found] == [[0, 1, 2, 3]] * 4
    assert [r['host']['of three']['counts'] for r in found[:3]] == [[3]] * 3


def test_bare_ranks_share_gpus_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv('MLPERF_RN50_RANKS_PER_DEVICE', '2')
    monkeypatch.delenv('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', raising=False)
    done = run(under_ranks(1, ['printenv', 'MLPERF_RN50_RANKS_PER_DEVICE', 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE']))
    assert done.stdout.splitlines()[-2:] == ['2', '100'], done.stderr


def test_training_agrees_with_that_of_ranks_that_exchange_alike(results):
    found = results(TWO_GPUS)
    assert all(r['trained'] == found[0]['trained'] for r in found)
    for name in ('fc1', 'conv0'):
        flat = np.array(found[0]['flat'][name])
        np.testing.assert_allclose(found[0]['trained'][name], flat, rtol=1e-4, atol=1e-5 * np.abs(flat).max())
