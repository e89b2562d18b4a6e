"""What may be compared: other accelerators, rules and lone systems have no ratio, or are said before one."""
import json

import pytest
from lines import write_set

from mlperf_rn50.study.report_data import render_json
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


def study_of(folder, baseline=None):
    study, = make_studies(load_systems([folder]), baseline)
    return study


def pair(home, models, **keys):
    """Two systems of a submission, of 4 and 8 accelerators, the second twice as fast."""
    for k, model in enumerate(models):
        write_set(home / f'results/{k + 1}n/resnet', nodes=k + 1, ranks=4 * (k + 1), epoch_s=20.0 / (k + 1), eval_s=0.0,
                  **keys)
        (home / 'systems').mkdir(exist_ok=True)
        (home / f'systems/{k + 1}n.json').write_text(json.dumps({'accelerator_model_name': model}))
    return home


def test_accelerators_of_another_model_have_no_efficiency(tmp_path):
    study = study_of(pair(tmp_path / 'v1.0/us', ['V100', 'A100']))
    last = study.comparisons[1]
    assert last.speedup == pytest.approx(2) and (last.efficiency, last.hardware_efficiency) == (None, None)
    assert study.rates[1] is None
    caution = '2n: A100, not V100 as in 1n: the speed-up is of other hardware, and there is no efficiency'
    assert study.cautions == (caution,)
    text = render_table([study])
    assert text.index(caution) < text.index('speed-up    efficiency')
    assert caution in json.loads(render_json([study]))['systems'][1]['warnings']


@pytest.mark.parametrize('models', [['A100', 'A100'], ['A100', ''], ['', '']])
def test_those_of_the_same_or_an_unknown_model_do(tmp_path, models):
    study = study_of(pair(tmp_path / 'v1.0/us', models))
    assert study.comparisons[1].efficiency == pytest.approx(1) and not study.cautions and study.rates[1]


def test_node_splits_are_of_the_same_accelerators_on_other_nodes(tmp_path):
    home = tmp_path / 'v1.0/us'
    for name, nodes, model in (('1n', 1, 'V100'), ('2n', 2, 'V100'), ('4n', 4, 'A100'), ('4m', 4, 'A100')):
        write_set(home / f'results/{name}/resnet', 1, nodes=nodes, ranks=16, epoch_s=10.0 + nodes + (name == '4m'))
        (home / 'systems').mkdir(exist_ok=True)
        (home / f'systems/{name}.json').write_text(json.dumps({'accelerator_model_name': model}))
    assert [(x.faster.name, x.slower.name) for x in study_of(tmp_path).splits] == [('1n', '2n')]


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
    found = json.loads(render_json([study]))['systems']
    assert [(s['baseline'], s['speedup'], s['efficiency']) for s in found] == [(None, None, None)] * 2
    head = next(line for line in render_table([study]).splitlines() if line.startswith('system'))
    assert 'speed-up' not in head and 'efficiency' not in head
