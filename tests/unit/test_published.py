"""The reader and the report on logs that MLCommons published: the figures of the table beside them."""
import json

import pytest
from helpers import CLI, PUBLISHED, run

pytestmark = pytest.mark.needs_published

# round, system: nodes, accelerators, global batch, target, epochs of each run, minutes of each run, score in minutes
EXPECTED = {
    ('v0.5', 'dgx1_ngc18.11_mxnet'): (1, 8, 1664, 0.749, [63] * 5, [134.97, 135.13, 134.01, 133.70, 134.70], 134.56),
    ('v0.5', 'dgx2h_multi_ngc18.11_mxnet'): (32, 512, 16384, 0.749, [82, 82, 82, 78, 78],
                                             [7.57, 7.55, 7.53, 7.19, 7.22], 7.44),
    ('v0.6', 'dgx1_ngc19.05_mxnet'): (1, 8, 1664, 0.759, [60, 60, 56, 60, 60],
                                      [115.34, 115.17, 108.14, 115.16, 115.58], 115.22),
    ('v0.6', 'dgx2h_n96_ngc19.05_mxnet'): (96, 1536, 59904, 0.759, [90] * 5, [1.33] * 5, 1.332),
    ('v0.7', 'dgxa100_ngc20.06_mxnet'): (1, 8, 3264, 0.759, [41] * 5, [39.44, 39.42, 39.33, 40.57, 40.47], 39.78),
    ('v0.7', 'dgxa100_n2_ngc20.06_mxnet'): (2, 16, 3264, 0.759, [41] * 5, [23.75, 23.77, 23.72, 23.75, 23.77], 23.75)}


@pytest.fixture(scope='module')
def systems():
    done = run([*CLI, 'report', PUBLISHED, '--format', 'json'])
    assert (done.returncode, done.stderr) == (0, '')
    return {(s['round'], s['system']): s for s in json.loads(done.stdout)['systems']}


def test_every_set_is_found(systems):
    assert set(systems) == set(EXPECTED)


@pytest.mark.parametrize('name', EXPECTED, ids='/'.join)
def test_a_set_has_the_published_figures(systems, name):
    nodes, accelerators, batch, target, epochs, minutes, score = EXPECTED[name]
    found = systems[name]
    assert found['org'] == 'NVIDIA'
    assert (found['num_nodes'], found['num_accelerators'], found['global_batch_size']) == (nodes, accelerators, batch)
    assert (found['target_accuracy'], found['num_runs'], found['num_converged']) == (target, 5, 5)
    assert [r['epochs_to_converge'] for r in found['runs']] == epochs
    assert found['epochs_to_converge_mean'] == pytest.approx(sum(epochs) / 5)
    assert [r['time_to_train_s'] / 60 for r in found['runs']] == pytest.approx(minutes, abs=0.01)
    assert found['score_minutes'] == pytest.approx(score, abs=0.005)
    assert all(r['final_accuracy'] >= target and r['status'] == 'converged' for r in found['runs'])


def test_the_known_traps_are_flagged(systems):
    # A description of 36 nodes, and logs of 32.
    multi = systems['v0.5', 'dgx2h_multi_ngc18.11_mxnet']
    assert any('entry.json says 36 nodes, the 32 lines that clear a cache 32' in w for w in multi['warnings'])
    assert all(any('36 nodes' in w for w in r['warnings']) for r in multi['runs'])
    # The batch of a v0.5 log is that of one accelerator.
    assert multi['runs'][0]['sources']['global_batch_size'].startswith('implied: input_batch_size x num_accelerators')
    assert not systems['v0.7', 'dgxa100_ngc20.06_mxnet']['warnings']


def test_speedups_of_the_rounds(systems):
    n2 = systems['v0.7', 'dgxa100_n2_ngc20.06_mxnet']
    assert n2['baseline'] == 'dgxa100_ngc20.06_mxnet' and n2['speedup'] == pytest.approx(39.78 / 23.75, abs=1e-3)
    assert n2['efficiency'] == pytest.approx(n2['speedup'] / 2)
    for system in systems.values():
        product = system['throughput_gain'] * system['epoch_ratio'] * system['share_ratio']
        assert product == pytest.approx(system['speedup'])
