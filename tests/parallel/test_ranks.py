"""Real Horovod ranks: what they exchange, and that a step does not depend on how many share it."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import run, under_ranks

WORKERS = Path(__file__).parent / 'workers.py'


def on_ranks(tmp_path, num_ranks, name, *arguments, compression='none'):
    """Results of a worker function, one per rank; num_ranks 0 starts it without a launcher."""
    out = tmp_path / f'{name}_{num_ranks}_{len(list(tmp_path.iterdir()))}'
    out.mkdir()
    done = run(under_ranks(num_ranks, [sys.executable, WORKERS, name, out, compression, *arguments]))
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f'{r}.json').read_text()) for r in range(max(1, num_ranks))]


@pytest.mark.parametrize('num_ranks', [0, 1, 2, 3])
def test_collectives(tmp_path, num_ranks):
    results, n = on_ranks(tmp_path, num_ranks, 'collectives'), max(1, num_ranks)
    special = [np.array([-0.0, 0.0, np.inf, 1e-40, 1.5], t).tobytes().hex() for t in (np.float32, np.float16)]
    for r, got in enumerate(results):
        assert got == {
            'rank': r, 'world_size': n, 'local': [r, n], 'broadcast': [[10.0, 10.0], [0.0, 0.0, 0.0]],
            'special': special, 'number': 2**40,
            'grads': [[sum(range(1, n + 1))] * 4, [10.0 * sum(range(1, n + 1))] * 4],
            'mean': [(n - 1) / 2] * 2, 'pulse': [sum(range(n)), n], 'kept': [r, 1.0],
            'counts': [sum(range(n)), n * 2**40, 1], 'gather': [[k, -k] for k in range(n)]}


def test_several_sums_may_be_under_way_at_once(tmp_path):
    assert on_ranks(tmp_path, 2, 'background') == [[[1.0, 2.0 * k] for k in range(8)]] * 2


@pytest.mark.parametrize('optimizer', ['sgd', 'lars'])
@pytest.mark.parametrize('first_step', [0, 28], ids=['whole', 'padded'])
def test_two_ranks_take_the_step_of_one_rank_with_twice_the_batch(tmp_path, digits, optimizer, first_step):
    [one] = on_ranks(tmp_path, 0, 'steps', digits, optimizer, 1, first_step)
    for num_ranks, micro in [(2, 1), (3, 1), (0, 4), (2, 2)]:
        for got in on_ranks(tmp_path, num_ranks, 'steps', digits, optimizer, micro, first_step):
            for name, expected in one.items():
                scale = np.abs(expected).max()
                np.testing.assert_allclose(got[name], expected, rtol=1e-3, atol=2e-4 * scale,
                                           err_msg=f'{name}, {num_ranks} ranks, {micro} passes')


def test_compressed_gradients_are_nearly_the_same(tmp_path, digits):
    exact = on_ranks(tmp_path, 2, 'steps', digits, 'sgd', 1, 0)[0]
    small = on_ranks(tmp_path, 2, 'steps', digits, 'sgd', 1, 0, compression='fp16')
    assert small[0] == small[1]
    np.testing.assert_allclose(small[0]['losses'], exact['losses'], rtol=5e-2)
    assert small[0]['fc1_weight'] != exact['fc1_weight']


@pytest.mark.parametrize('num_ranks', [2, 3])
def test_running_statistics_are_averaged_and_survive_a_snapshot(tmp_path, digits, num_ranks):
    results = on_ranks(tmp_path, num_ranks, 'statistics', digits)
    own = np.array([r['own'] for r in results])
    assert (own[0] != own[1]).any()
    for r in results:
        assert r['untouched'] == r['restored'] == r['own']
        np.testing.assert_allclose(r['averaged'], own.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(r['in_snapshot'], own.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert all(r['averaged'] == results[0]['averaged'] for r in results)


@pytest.mark.parametrize('before, now', [(3, 2), (2, 0), (0, 2)])
def test_a_snapshot_is_restored_by_another_number_of_ranks(tmp_path, digits, before, now):
    path = tmp_path / 'snapshot.npz'
    on_ranks(tmp_path, before, 'save_snapshot', digits, path)
    for got in on_ranks(tmp_path, now, 'restored', digits, path):
        for name, (live, saved) in got.items():
            assert live == saved, name


def test_an_evaluation_counts_every_image_once_for_any_ranks_and_batch(tmp_path, digits):
    counts = []
    for num_ranks, batch_size in [(0, 360), (0, 7), (2, 50), (3, 7)]:
        for got in on_ranks(tmp_path, num_ranks, 'evaluation', digits, batch_size):
            counts.extend(got['counts'])
    assert all(c == counts[0] for c in counts)
    assert counts[0][2] == 360 and 0 < counts[0][0] < counts[0][1] < 360


@pytest.mark.parametrize('num_ranks', [2, 3])
def test_an_epoch_of_all_ranks_is_the_data_set(tmp_path, digits, num_ranks):
    [whole] = on_ranks(tmp_path, 0, 'shards', digits)
    for got in on_ranks(tmp_path, num_ranks, 'shards', digits):
        assert got == whole
    assert sum(whole['counts']) == 1437
