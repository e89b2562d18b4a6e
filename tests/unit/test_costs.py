"""Costs of several nodes: the sets that they are fitted to, and the errors of left-out sets."""

import re
import shutil
from dataclasses import replace

import pytest
from helpers import PUBLISHED
from made_systems import changed, made_set
from pytest import approx

from mlperf_rn50.analysis.predict.anchors import base_of, one_node_base, second_base
from mlperf_rn50.analysis.predict.costs import (
    MultiNodeCase,
    distinct,
    fit,
    make_costs,
    multi_node_cases,
    validate,
    validate_published,
)
from mlperf_rn50.analysis.predict.prediction import Base, Epochs, Layout
from mlperf_rn50.analysis.predict.prediction_answer import validation_answer
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published, load_table
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.analysis.show.plain import render_text

SETS = {s.name: s for s in load_published()}
CASES = multi_node_cases(distinct(load_table()))
DGX, TWO = SETS['dgxa100_ngc20.06_mxnet'], SETS['dgxa100_n2_ngc20.06_mxnet']


def test_own_base_is_of_the_same_machine():
    many = SETS['dgxa100_n96_ngc20.06_mxnet']
    near = changed(DGX, global_batch_size=400)  # 50 images per accelerator, near the 45
    unnamed, large = changed(many, accelerator=None), 96 * 16
    plain = changed(DGX, accelerator=None)
    for target, sets, expected in (
        (many, load_published(), DGX),
        (many, [DGX, near], near),
        # not dgx2
        (SETS['dgx2h_n32_ngc19.05_mxnet'], load_published(), SETS['dgx2h_ngc19.05_mxnet']),
        (SETS['l40s_n2_ngc24.04_mxnet'], load_published(), None),
        (many, [changed(DGX, round='v1.0')], None),
        (many, [changed(DGX, org='Dell')], None),
        (unnamed, [plain], plain),
        (changed(unnamed, num_accelerators=large), [plain], None),
    ):
        found = one_node_base(target, sets)
        assert (found and found.run_set) is expected


def test_other_base_has_the_same_generation_and_second_set_fewer_nodes():
    found = one_node_base(SETS['l40s_n2_ngc24.04_mxnet'], load_table(), is_own=False)
    assert found.generation == 'L40S' and found.run_set.num_nodes == 1
    sets = [DGX, TWO, changed(TWO, num_nodes=8, num_accelerators=64)]
    layouts = [Layout(n, 8, DGX.recipe) for n in (96, 8, 2)]
    found = [second_base(layout, base_of(DGX), sets, DGX) for layout in layouts]
    assert [s and s.num_nodes for s in found] == [8, 2, None]


def made_case(step_s, generation='A100'):
    """Return a set on two nodes with a base of 100 images per accelerator and 0.1 s."""
    recipe = replace(
        DGX.recipe, global_batch_size=400, decay_epochs=36.0, eval_period=4, first_eval_epoch=1
    )
    target = made_set(
        '2x4',
        recipe,
        [('converged', 600.0, ((36, 0.76),))] * 5,
        RunTimes(100 * step_s, 1.0, 2.0),
        round='v2.0',
        num_nodes=2,
        num_accelerators=8,
        num_ranks=8,
        train_samples=40_000,
    )
    base = Base('one', '', 1, 4, True, 400, 0.1, 8.0, 5.0, 40_000, None, generation=generation)
    layout = Layout(2, 4, target.recipe, Epochs(36, 36, 36, ''))
    return MultiNodeCase(target, layout, step_s, base, None, None)


def test_latency_is_fitted_by_generation_and_limits_outliers():
    fixed_s = 0.05 + 2 * 7 / 8 * 51e6 / 50e9  # half the images, and a ring over unknown ports
    costs = fit([made_case(fixed_s + 0.010)] * 50)
    assert costs.latency_s['A100'] == approx(0.010, abs=0.0005)
    assert costs.starts == ((2, 2.0),) * 50 and (costs.most_nodes, costs.least_local) == (2, 50)
    both = fit([*[made_case(fixed_s + 0.010)] * 50, *[made_case(fixed_s + 0.004, 'H100')] * 50])
    assert both.latency_s['H100'] == approx(0.004, abs=0.0005)
    assert 0.005 < both.other_latency_s < 0.009
    odd = fit([*[made_case(fixed_s + 0.010)] * 20, made_case(fixed_s + 1.0)])
    assert odd.latency_s['A100'] == approx(0.010, abs=0.002)
    assert fit([]).other_latency_s == approx(0.004)  # prior knowledge


def test_less_knowledge_never_has_a_narrower_interval_and_errors_are_of_left_out_groups():
    errors = make_costs(CASES, lambda s: s.round).errors
    assert 0.03 < errors['two'] <= errors['own'] <= errors['other'] < 0.3


def test_set_is_predicted_without_its_round_or_organisation_within_the_stated_errors():
    """The limits are those that docs/predict.md states, rounded up."""
    found = validate_published()
    for key, median, high in (
        (('own', 'round'), 0.05, 0.13),
        (('own', 'organisation'), 0.055, 0.15),
        (('two', 'round'), 0.05, 0.13),
    ):
        e = found.errors[key]
        assert e.median_error <= median and e.high_error <= high and e.worst_error <= 0.36, key
        assert 0.75 <= e.num_held / e.num_predicted <= 0.91
    assert found.errors['own', 'round'].num_predicted >= 58
    errors = {c.target.name: abs(p.minutes / c.target.minutes - 1) for c, p in found.pairs}
    for name in """dgxa100_n540_ngc21.09_mxnet dgxa100_n527_ngc22.04_mxnet
            coreweave_hgxh100_n448_ngc23.04_mxnet eos_n316_ngc24.04_mxnet""".split():
        assert errors[name] < 0.125
    assert {c.target for c, _ in found.pairs} == {c.target for c in CASES if c.own or c.other}


def test_data_of_the_validation_names_each_source_and_whether_the_measured_time_is_held():
    data = validation_answer(validate_published()).data
    rows = data['predictions']
    assert all(row['source'] for row in rows), 'also of a set whose own generation has no costs'
    for row in rows:
        low, high = row['interval']
        assert row['is_held'] is (low <= row['measured_minutes'] <= high), row['system']
    assert {e['left_out'] for e in data['errors']} == {'round', 'organisation'}


def test_sets_of_one_round_are_predicted_with_the_costs_of_known_sets():
    sets = [s for s in load_table() if s.round == 'v4.0']
    alone, known = (
        {c.target.name: p.interval for c, p in v.pairs if p.knowledge == 'own'}
        for v in (validate(sets), validate_published())
    )
    assert len(alone) == 4  # a copy of an earlier set is left out
    for name in alone.keys() & known.keys():
        assert alone[name] == approx(known[name], rel=0.005)


@pytest.mark.needs_published
def test_duplicates_count_once(tmp_path):
    for org in ('NVIDIA', 'Other'):
        shutil.copytree(PUBLISHED / 'v0.7' / 'NVIDIA', tmp_path / org)
    validation = validate(load_run_sets([tmp_path]))
    [(case, _)] = validation.pairs
    assert case.target.round == 'v0.7+'  # the folder names lack the round
    text = render_text(validation_answer(validation))
    assert len(re.findall('not predicted: all logs duplicate logs of a different', text)) == 2
