"""Real Horovod ranks: what they exchange, and that a step does not depend on how many share it.

Each number of ranks is started once, as a start takes seconds, runs everything, and is looked at by many tests.
"""
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import run, under_ranks

WORKERS = Path(__file__).parent / 'workers.py'
OPTIMIZERS, FIRST_STEPS = ['sgd', 'lars'], {'whole': 0, 'padded': 28}
# Passes a step, for each number of ranks; 0 starts one process without a launcher.
PASSES = {0: [1, 4], 2: [1, 2], 3: [1]}
EVAL_BATCHES = {0: [360, 7], 2: [50], 3: [7]}


def on_ranks(folder, num_ranks, calls, compression='none'):
    """Results by key of some calls of worker functions, [key, function, arguments], one dict per rank."""
    out = folder / f'{num_ranks}_{len(list(folder.iterdir()))}'
    out.mkdir()
    words = json.dumps([[key, name, [str(a) for a in arguments]] for key, name, arguments in calls])
    done = run(under_ranks(num_ranks, [sys.executable, WORKERS, out, compression, words]))
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f'{r}.json').read_text()) for r in range(max(1, num_ranks))]


def step_key(optimizer, first, num_passes):
    return f'steps {optimizer} {first} {num_passes}'


def calls_of(num_ranks, data, snapshots):
    """Everything that a number of ranks is asked to do; snapshots are in the order of the starts: 3, 2, 0."""
    calls = [['collectives', 'collectives', []], ['statistics', 'statistics', [data]], ['shards', 'shards', [data]],
             ['save', 'save_snapshot', [data, snapshots / f'{num_ranks}.npz']]]
    calls += [[step_key(o, first, n), 'steps', [data, o, n, FIRST_STEPS[first]]]
              for o, first, n in product(OPTIMIZERS, FIRST_STEPS, PASSES[num_ranks])]
    calls += [[f'evaluation {n}', 'evaluation', [data, n]] for n in EVAL_BATCHES[num_ranks]]
    if num_ranks == 2:
        calls.append(['background', 'background', []])
    if before := {2: 3, 0: 2}.get(num_ranks):
        calls.append([f'restored {before}', 'restored', [data, snapshots / f'{before}.npz']])
    return calls


@pytest.fixture(scope='module')
def results(tmp_path_factory, digits):
    """What 3, 2 and no ranks found, each a list by rank of results by key."""
    folder, snapshots = tmp_path_factory.mktemp('ranks'), tmp_path_factory.mktemp('snapshots')
    found = {n: on_ranks(folder, n, calls_of(n, digits, snapshots)) for n in (3, 2, 0)}
    # With two ranks again: what the single process left, and gradients that travel in 16 bits.
    found['compressed'] = on_ranks(folder, 2, [['restored 0', 'restored', [digits, snapshots / '0.npz']],
                                               ['steps', 'steps', [digits, 'sgd', 1, 0]]], 'fp16')
    found[1] = on_ranks(folder, 1, [['collectives', 'collectives', []]])
    return found


@pytest.mark.parametrize('num_ranks', [0, 1, 2, 3])
def test_collectives(results, num_ranks):
    n = max(1, num_ranks)
    special = [np.array([-0.0, 0.0, np.inf, 1e-40, 1.5], t).tobytes().hex() for t in (np.float32, np.float16)]
    for r, got in enumerate(results[num_ranks]):
        assert got['collectives'] == {
            'rank': r, 'world_size': n, 'local': [r, n], 'broadcast': [[10.0, 10.0], [0.0, 0.0, 0.0]],
            'special': special, 'number': 2**40,
            'grads': [[sum(range(1, n + 1))] * 4, [10.0 * sum(range(1, n + 1))] * 4],
            'mean': [(n - 1) / 2] * 2, 'pulse': [sum(range(n)), n], 'kept': [r, 1.0],
            'counts': [sum(range(n)), n * 2**40, 1], 'gather': [[k, -k] for k in range(n)]}


def test_several_sums_may_be_under_way_at_once(results):
    assert [r['background'] for r in results[2]] == [[[1.0, 2.0 * k] for k in range(8)]] * 2


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('first', FIRST_STEPS)
def test_two_ranks_take_the_step_of_one_rank_with_twice_the_batch(results, optimizer, first):
    one = results[0][0][step_key(optimizer, first, 1)]
    for num_ranks, num_passes in [(2, 1), (3, 1), (0, 4), (2, 2)]:
        for got in results[num_ranks]:
            for name, expected in one.items():
                scale = np.abs(expected).max()
                np.testing.assert_allclose(got[step_key(optimizer, first, num_passes)][name], expected, rtol=1e-3,
                                           atol=2e-4 * scale, err_msg=f'{name}, {num_ranks} ranks, {num_passes} passes')


def test_compressed_gradients_are_nearly_the_same(results):
    exact, small = results[2][0][step_key('sgd', 'whole', 1)], [r['steps'] for r in results['compressed']]
    assert small[0] == small[1]
    np.testing.assert_allclose(small[0]['losses'], exact['losses'], rtol=5e-2)
    assert small[0]['fc1_weight'] != exact['fc1_weight']


@pytest.mark.parametrize('num_ranks', [2, 3])
def test_running_statistics_are_averaged_and_survive_a_snapshot(results, num_ranks):
    found = [r['statistics'] for r in results[num_ranks]]
    own = np.array([r['own'] for r in found])
    assert (own[0] != own[1]).any()
    for r in found:
        assert r['untouched'] == r['restored'] == r['own']
        np.testing.assert_allclose(r['averaged'], own.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(r['in_snapshot'], own.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert all(r['averaged'] == found[0]['averaged'] for r in found)


@pytest.mark.parametrize('before, now', [(3, 2), (2, 0), (0, 'compressed')], ids=['3 to 2', '2 to 1', '1 to 2'])
def test_a_snapshot_is_restored_by_another_number_of_ranks(results, before, now):
    for got in results[now]:
        for name, (live, saved) in got[f'restored {before}'].items():
            assert live == saved, name


def test_an_evaluation_counts_every_image_once_for_any_ranks_and_batch(results):
    counts = [c for num_ranks, sizes in EVAL_BATCHES.items() for got in results[num_ranks] for n in sizes
              for c in got[f'evaluation {n}']['counts']]
    assert len(counts) == 14 and all(c == counts[0] for c in counts)
    assert counts[0][2] == 360 and 0 < counts[0][0] < counts[0][1] < 360


@pytest.mark.parametrize('num_ranks', [2, 3])
def test_an_epoch_of_all_ranks_is_the_data_set(results, num_ranks):
    whole = results[0][0]['shards']
    assert all(got['shards'] == whole for got in results[num_ranks]) and sum(whole['counts']) == 1437
