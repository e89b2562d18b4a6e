"""What may be compared: other accelerators, rules and lone systems have no ratio, or are said before one."""
import json

import pytest
from helpers import PUBLISHED
from lines import write_set

from mlperf_rn50.study.report_data import render_json
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


def study_of(folder, baseline=None):
    study, = make_studies(load_systems([folder]), baseline)
    return study


def systems_of(*studies):
    """As the JSON of the report has them, by name."""
    return {s['system']: s for s in json.loads(render_json(studies))['systems']}


def submission(home, models, **keys):
    """Systems of 1, 2, 4, ... nodes of 4 accelerators, each twice as fast as the one before."""
    (home / 'systems').mkdir(parents=True)
    for nodes, model in models.items():
        write_set(home / f'results/{nodes}n/resnet', **{
            'nodes': nodes, 'ranks': 4 * nodes, 'epoch_s': 20.0 / nodes, 'eval_s': 0.0, **keys})
        (home / f'systems/{nodes}n.json').write_text(json.dumps({'accelerator_model_name': model}))
    return home


CAUTION = '2n: A100, not V100 as in 1n: the speed-up is of other hardware, and there is no efficiency'


@pytest.mark.parametrize('models, efficiency, cautions', [
    (('V100', 'A100'), None, [CAUTION]), (('A100', 'A100'), 1, []), (('A100', ''), 1, []), (('', ''), 1, [])])
def test_accelerators_of_another_model_have_no_efficiency(tmp_path, models, efficiency, cautions):
    study = study_of(submission(tmp_path / 'v1.0/us', dict(zip((1, 2), models))))
    last = study.comparisons[1]
    assert last.speedup == pytest.approx(2) and last.efficiency == last.hardware_efficiency == (
        efficiency and pytest.approx(efficiency))
    assert (study.rates[1] is None) == (efficiency is None) and list(study.cautions) == cautions
    text = render_table([study])
    assert not cautions or text.index(CAUTION) < text.index('speed-up    efficiency')
    assert [w for w in systems_of(study)['2n']['warnings'] if 'A100, not' in w] == cautions


def test_node_splits_are_of_the_same_accelerators_on_other_nodes(tmp_path):
    study = study_of(submission(tmp_path / 'v1.0/us', {1: 'V100', 2: 'V100', 4: 'A100'}, ranks=16))
    assert [(x.faster.name, x.slower.name) for x in study.splits] == [('2n', '1n')]


def test_other_rules_are_said_before_the_ratio(tmp_path):
    write_set(tmp_path / 'v1.0/us/results/a/resnet', 1)
    write_set(tmp_path / 'v2.0/us/results/b/resnet', 1, nodes=2, ranks=8, division='open', target=0.759)
    study = study_of(tmp_path, 'a')
    assert study.cautions == ('b: rules of v2.0, not v1.0 as in a', 'b: open division, not closed as a')
    assert study.comparisons[1].speedup == pytest.approx(1)


def test_a_study_of_one_system_has_no_speedup(tmp_path):
    write_set(tmp_path / '1n', 5)
    write_set(tmp_path / '2n', 5, nodes=2, ranks=8, status='aborted')
    study = study_of(tmp_path)
    assert study.comparisons == (None, None)
    assert {(s['baseline'], s['speedup'], s['efficiency']) for s in systems_of(study).values()} == {(None, None, None)}
    head = next(line for line in render_table([study]).splitlines() if line.startswith('system'))
    assert 'speed-up' not in head and 'efficiency' not in head


@pytest.mark.needs_published
def test_the_speedups_and_the_traps_of_the_published_rounds():
    """test_known compares the figures of each system."""
    systems = systems_of(*make_studies(load_systems([PUBLISHED])))
    assert len(systems) == 6
    n2 = systems['dgxa100_n2_ngc20.06_mxnet']
    assert n2['baseline'] == 'dgxa100_ngc20.06_mxnet' and n2['speedup'] == pytest.approx(39.78 / 23.75, abs=1e-3)
    assert n2['efficiency'] == pytest.approx(n2['speedup'] / 2) and not systems[n2['baseline']]['warnings']
    for system in systems.values():
        product = system['throughput_gain'] * system['epoch_ratio'] * system['share_ratio']
        assert product == pytest.approx(system['speedup'])
    # A description of 36 nodes, and logs of 32. The batch of a v0.5 log is that of one accelerator.
    multi = systems['dgx2h_multi_ngc18.11_mxnet']
    assert any('entry.json says 36 nodes, the 32 lines that clear a cache 32' in w for w in multi['warnings'])
    assert all(any('36 nodes' in w for w in r['warnings']) for r in multi['runs'])
    assert multi['runs'][0]['sources']['global_batch_size'].startswith('implied: input_batch_size x num_accelerators')
