"""Prediction model: hand calculations, published systems, recipes, doubts, tables and plots."""
import json
import math
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from helpers import PUBLISHED
from made_systems import changed, made_set
from matplotlib.image import imread

from mlperf_rn50.analysis.predict.answer import (
    Answer,
    PredictionRequest,
    make_answer,
    measured_epochs,
    published_recipe,
    source_recipe,
)
from mlperf_rn50.analysis.predict.model import base_for, base_of, predict_layout
from mlperf_rn50.analysis.predict.plot import draw_prediction, dump_prediction
from mlperf_rn50.analysis.predict.prediction import NO_OVERHEADS, Base, Epochs, Layout, Link, Prediction
from mlperf_rn50.analysis.predict.source import Power, Source, load_source
from mlperf_rn50.analysis.predict.tables import render_json, render_tables, verdicts
from mlperf_rn50.analysis.predict.validation import render_validation, validate, validate_systems
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.recipe import Recipe
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.errors import UserError

SLOW = Link(1.0, 100_000_000, False, 'measured')
FAST = replace(SLOW, gbit_s=100.0)
SETS = {s.name: s for s in load_published()}
DGX = SETS['dgxa100_ngc20.06_mxnet']
RECIPE = replace(DGX.recipe, global_batch_size=400, decay_epochs=10.0, eval_period=2, first_eval_epoch=1)
ENDLESS = replace(RECIPE, decay_epochs=None)
BASE = Base('one', 'made up', 1, 4, True, 400, 0.1, 0.0, 8.0, 5.0, 40_000, None)
RANKS = replace(BASE, has_accelerators=False)
TWO_NODES = replace(BASE, num_nodes=2, num_units=8)
ONE, TWO, FOUR = (Layout(n, 4, RECIPE) for n in (1, 2, 4))


@pytest.mark.parametrize('base, layout, link, other_s, parts', [  # parts of the step: compute, exchange, hidden, other
    (BASE, TWO, FAST, 0.006, (0.05, 0.014, 0, 0.006)),  # half the images per accelerator, over a ring of 8
    (BASE, TWO, replace(SLOW, gbit_s=1000.0, is_hidden=True), 0.0, (0.05, 0.0014, 0.0014, 0)),
    (RANKS, TWO, replace(SLOW, is_hidden=True), 0.0, (0.05, 1.4, 2 / 3 * 0.05, 0)),  # only behind the backward pass
    (TWO_NODES, ONE, FAST, 0.004, (2 * (0.1 - 0.014 - 0.004), 0, 0, 0)),  # a single node does not use the link
    (replace(TWO_NODES, exchange_s=0.03, has_accelerators=False), TWO, SLOW, 0.0, (0.07, 0.03, 0, 0)),  # as measured
    (replace(TWO_NODES, exchange_s=0.03, has_accelerators=False), FOUR, SLOW, 0.0, (0.035, 1.5, 0, 0))])
def test_step_parts_match_hand_calculation(base, layout, link, other_s, parts):
    p = predict_layout(base, layout, link, replace(NO_OVERHEADS, step_s=other_s))
    assert (p.compute_s, p.exchange_s, p.hidden_s, p.other_s) == pytest.approx(parts)
    assert p.step_s == pytest.approx(parts[0] + parts[1] - parts[2] + parts[3])
    assert p.images_per_s == pytest.approx(400 / p.step_s)


def test_minutes_match_hand_calculation():
    p = predict_layout(BASE, TWO, FAST, replace(NO_OVERHEADS, step_s=0.006))
    assert p.epochs.mean == 9  # evaluations after epochs 1, 3, ... and 9; the schedule ends after 10
    assert p.minutes == pytest.approx((9 * 100 * 0.07 + 5 * 8.0 / 2 + 5.0) / 60)


@pytest.mark.parametrize('wide', [{'epochs_low': 0.8}, {'step_spread_s': 0.002},
                                  {'outside_low_s': 1.0, 'outside_high_s': 60.0}])
def test_uncertain_overheads_widen_the_interval(wide):
    overheads = replace(NO_OVERHEADS, step_s=0.001, outside_s=5.0, outside_low_s=5.0, outside_high_s=5.0)
    p, q = (predict_layout(BASE, TWO, FAST, c) for c in (overheads, replace(overheads, **wide)))
    assert p.low_minutes == pytest.approx(p.minutes) and p.high_minutes == pytest.approx(p.minutes)
    assert q.minutes == p.minutes and q.low_minutes < p.low_minutes
    assert (q.high_minutes > p.high_minutes) == ('epochs_low' not in wide)  # the schedule limits the epochs
    if 'step_spread_s' in wide:  # the overheads subtracted from the base are uncertain
        p = predict_layout(TWO_NODES, ONE, FAST, replace(overheads, **wide))
        assert p.low_minutes < p.minutes < p.high_minutes


def test_spread_of_the_runs_of_the_base_widens_the_interval():
    rates = 9.0, 10.0, 11.0, 10.0, 10.0
    runs = tuple(replace(r, time_to_train_s=r.epochs_to_converge * s) for r, s in zip(DGX.runs, rates))
    p = predict_layout(replace(BASE, run_set=replace(DGX, runs=runs)), ONE, SLOW, NO_OVERHEADS)
    share = 1.533 * math.sqrt(0.5) / 10  # Student's t with four degrees of freedom
    assert (p.low_minutes, p.high_minutes) == pytest.approx((p.minutes * (1 - share), p.minutes * (1 + share)))


@pytest.mark.parametrize('base, layout, link, message', [
    (BASE, replace(TWO, recipe=ENDLESS), FAST, 'no schedule'), (BASE, TWO, SLOW, 'overhead are 97 % of a step'),
    (replace(BASE, num_nodes=2), FOUR, SLOW, 'exceed the measured step'),
    (replace(BASE, train_samples=399), TWO, FAST, 'batch 400 exceeds the 399 training images'),
    (replace(BASE, outside_s=-1e6), ONE, FAST, 'the predicted time is not positive')])
def test_unpredictable_layouts_are_refused(base, layout, link, message):
    p = predict_layout(base, layout, link, NO_OVERHEADS)
    assert message in p.refusal and p.minutes is None


def test_base_has_the_same_vendor_round_and_accelerator():
    many = SETS['dgxa100_n96_ngc20.06_mxnet']
    assert base_for(many, load_published()).run_set is DGX
    near = changed(DGX, global_batch_size=400)  # 50 images per accelerator, near the 45
    assert base_for(many, [DGX, near]).run_set is near
    assert base_for(SETS['l40s_n2_ngc24.04_mxnet'], load_published()) is None
    assert base_for(many, [changed(DGX, round='v1.0')]) is base_for(many, [changed(DGX, org='Dell')]) is None
    many, unnamed = changed(many, accelerator=None), changed(DGX, accelerator=None)
    assert base_for(many, [unnamed]).run_set is unnamed
    assert base_for(changed(many, num_accelerators=96 * 16), [unnamed]) is None


@pytest.mark.needs_published
def test_duplicates_count_once(tmp_path):
    for org in ('NVIDIA', 'Other'):
        shutil.copytree(PUBLISHED / 'v0.7' / 'NVIDIA', tmp_path / org)
    validation = validate_systems(load_run_sets([tmp_path]))
    [judged] = validation.predicted
    assert judged.target.round == 'v0.7+' and 'v0.6, v1.0' in judged.overheads.source  # the folder names lack the round
    text = render_validation(validation)
    assert len(re.findall('left out: all logs duplicate logs of a different system', text)) == 2


def test_markdown_in_names_is_escaped():
    odd = [replace(s, name=f'<b>|![x](y)\x1b[2J{s.name}') for s in load_published() if s.round == 'v0.7']
    text = render_validation(validate(odd), is_markdown=True)
    assert '<b>' not in text and '![x]' not in text and '&lt;b>\\|!\\[x](y)?\\[2J' in text
    assert '\x1b' not in text + render_validation(validate(odd))


DIGITS = Recipe('sgd', 64, 0.02, 1.0, 'poly', 12.0, target_accuracy=0.75, eval_period=1, first_eval_epoch=1)
LINK = Link(1.0, 1_000_000, False, 'measured')  # a ring of 2 takes 8 ms
A100 = 'dgxa100_ngc20.06_mxnet'


def known(nodes=1, batch=64, step_s=0.1, epochs=(3, 4)):
    """Set with two ranks per node, 6,400 images per epoch, evaluations of 1 s, and 2 s outside."""
    runs = [('converged' if e else 'aborted', 20.0 * (e or 9), ((e or 9, 0.8),)) for e in epochs]
    return made_set(f'{nodes}x2', replace(DIGITS, global_batch_size=batch), runs,
                    RunTimes(step_s * 6400 / batch, 1.0, 2.0), num_nodes=nodes, num_accelerators=0, num_ranks=2 * nodes,
                    dataset='digits', train_samples=6400)


def source_of(*sets, link=LINK):
    return Source(base_of(sets[0]), link, sets)


def answer_of(source, *splits, **options):
    return make_answer(PredictionRequest(splits, **options), source)


def test_source_batch_must_be_divisible_by_the_ranks():
    with pytest.raises(UserError, match='source batch 401 is not divisible by 4 ranks'):
        PredictionRequest(()).batch(replace(RANKS, global_batch_size=401), 2)


def test_recipe_of_other_data_comes_only_from_the_source_batch():
    assert measured_epochs(known(epochs=(3, 4, None))) == Epochs(3.5, 3, 4, '3 to 4, measured in 2 runs of 1x2')
    source = source_of(known(), known(2, 128, epochs=(5,)), known(4, 256, epochs=(None,)))
    assert source_recipe(source, 64, None, None).epochs.mean == 3.5
    assert source_recipe(source, 128, 'sgd', 0.75).epochs.mean == 5
    for batch, optimizer, target in ((256, None, None), (512, None, None), (64, 'lars', None), (64, None, 0.9)):
        chosen = source_recipe(source, batch, optimizer, target)
        assert chosen.epochs is None and chosen.recipe.last_eval_epoch is None, batch
        assert chosen.recipe.global_batch_size == batch and 'not epochs or minutes' in chosen.doubts[0]


def test_recipe_of_imagenet_comes_from_the_source_or_published_sets():
    source = load_source([A100])
    assert source_recipe(source, 3264, None, 0.759).epochs == Epochs(41, 41, 41, f'41, measured in 5 runs of {A100}')
    assert source_recipe(source, 34560, None, None).epochs.mean == 59  # from dgxa100_n96, in the same source
    assert source_recipe(source, 6528, None, None) is None and source_recipe(source, 3264, 'lars', None) is None
    chosen, between = published_recipe(3264, 'lars', 0.759), published_recipe(6528, None, 0.759)
    assert chosen.recipe.opt_name == 'lars' and not chosen.doubts and chosen.epochs.mean == 35
    assert 'between two' in between.doubts[0]
    assert between.epochs.low <= between.epochs.mean <= between.epochs.high <= between.recipe.last_eval_epoch
    with pytest.raises(UserError, match='no recipe for batch 400,000 .*expected a batch in the range of'):
        published_recipe(400_000, None, 0.759)


def test_base_is_predicted_as_measured_and_layout_without_a_recipe_has_only_a_step():
    row, other = answer_of(source_of(known()), (1, 2), (2, 2)).rows
    assert row.step_s == pytest.approx(0.1) and row.step_error == pytest.approx(0)
    assert row.efficiency == pytest.approx(1) and row.measured_minutes == pytest.approx(70 / 60)
    assert row.minutes == pytest.approx((3.5 * 100 * 0.1 + 3.5 + 2) / 60)
    assert row.error == pytest.approx(row.minutes / (70 / 60) - 1) and row.node_hours == pytest.approx(row.minutes / 60)
    assert other.step_s == pytest.approx(0.1 + 2 * 3 / 4 * 0.008) and other.minutes is other.node_hours is None
    assert other.efficiency == pytest.approx(0.1 / 0.112) and other.doubts
    [row] = answer_of(source_of(known()), (2, 2), is_strong=True).rows
    assert row.minutes and row.compute_s == pytest.approx(0.05)


@pytest.mark.parametrize('optimizer, target, is_compared', [('sgd', None, True), ('lars', None, False),
                                                            ('sgd', 0.749, False)])
def test_times_of_different_recipes_and_targets_are_not_compared(optimizer, target, is_compared):
    source = load_source([A100])  # its set of two nodes was trained with SGD to 75.9 %
    [row] = answer_of(source, (2, 8), is_strong=True, optimizer=optimizer, target=target).rows
    assert (row.measured_minutes is not None) is (row.error is not None) is is_compared
    assert row.minutes and row.step_error == pytest.approx(-0.069, abs=0.001)


def test_logs_without_a_schedule_predict_only_one_node():
    single, two = answer_of(load_source(['dgx1_ngc18.11_mxnet']), (1, 8), (2, 8), is_strong=True).rows
    assert single.minutes and two.refusal.startswith('the source logs declare no schedule')


def test_knee_is_last_layout_that_saves_more_time_than_it_costs():
    pairs = (1, 100.0), (2, 52.0), (4, 28.0), (8, 22.0), (16, None)
    rows = tuple(Prediction(BASE, Layout(n, 2, RECIPE), minutes=m) for n, m in pairs)
    answer = Answer(20.0, source_of(known()), None, rows)
    assert answer.cost(answer.knee) == pytest.approx(20 * 4 * 28 / 60)
    assert [r.layout.num_nodes for r in (answer.fastest, answer.cheapest, answer.knee)] == [8, 1, 4]
    assert verdicts(answer)[0].startswith('Fastest predicted layout: 8x2')  # a layout without minutes may be faster
    assert verdicts(replace(answer, rows=tuple(answer.timed)))[0].startswith('Fastest: 8x2')


@pytest.mark.parametrize('source, splits, options, doubted', [
    (A100, ((2, 8), (4, 8)), {'is_strong': True}, [0, 1]),  # 102 images per accelerator, measured with 408
    ('v0.6/NVIDIA/dgx1_ngc19.05_mxnet', ((2, 4), (1, 8)), {}, [1, 0]),  # nodes of a different size
    ('dgxa100_n2_ngc20.06_mxnet', ((1, 8), (2, 8)), {'is_strong': True}, [1, 0]),  # extrapolated from two nodes to one
    (known(), ((1, 1), (1, 4)), {'is_strong': True}, [0, 1]),  # ranks that share a node
    (known(epochs=(3,)), ((1, 2),), {}, [1]), (known(epochs=(3, 3)), ((1, 2),), {}, [0])])  # single runs
def test_extrapolations_have_doubts(source, splits, options, doubted):
    source = load_source([source]) if isinstance(source, str) else source_of(source)
    assert [len(r.doubts) for r in answer_of(source, *splits, **options).rows] == doubted


def test_tables_of_ranks_on_other_data():
    """docs/predict.md shows all columns, notes and sources for ImageNet; test_predict_cli checks it."""
    answer = answer_of(source_of(known(), known(2, 128, 0.11)), (1, 2), (2, 2), (4, 2), price=3.0)
    [refused] = answer_of(answer.source, (2, 3), global_batch_size=64).rows
    lines = render_tables(replace(answer, rows=(*answer.rows, refused))).splitlines()
    assert {'- Epochs of 1x2 on digits (not ImageNet): 3 to 4, measured in 2 runs of 1x2',
            '- Overheads on several nodes: none assumed',
            '2x3: refused: batch 64 is not divisible by 6 ranks'} < set(lines)
    assert any(line.startswith('- Model error: unknown') for line in lines)
    assert [line.split()[:4] for line in lines if line.startswith('4x2  ')] == [
        ['4x2', '8', '256', '-'], ['4x2', '32', '100.0', '14.0'], ['4x2', '256', 'sgd', '-']]
    assert lines[-2:] == ['Warnings', '- 4x2: no recipe measured on digits at batch 256; the step is '
                                      'predicted, but not epochs or minutes']


def test_without_a_link_only_several_nodes_are_refused(tmp_path):
    answer = answer_of(source_of(known(), link=None), (1, 2), (2, 2), (2, 3))
    report = json.loads(render_json(answer))
    one, two, _ = report['predictions']
    assert report['format'] == 'mlperf-rn50 predict 1' and report['link'] is report['validation'] is None
    assert (one['layout'], one['refusal'], one['epochs'], one['measured_minutes']) == ('1x2', None, 3.5, 70 / 60)
    assert one['step_s'] == pytest.approx(0.1) and one['recipe']['base_lr'] == 0.02 and one['minutes']
    assert two['minutes'] is two['recipe'] is None
    assert two['refusal'].startswith('interconnect unknown; pass --link-gbit-s or a bench')
    assert (report['fastest'], report['cheapest'], report['knee']) == ('1x2', '1x2', '1x2')
    refused = replace(answer, rows=answer.rows[1:])
    assert not refused.predicted and draw_prediction(refused) is None
    assert {p.name for p in dump_prediction(refused, tmp_path / 'a/b').iterdir()} == {
        'prediction.json', 'prediction.md'}


def test_energy_is_predicted_only_for_measured_nodes():
    source = replace(source_of(known(), known(2, 128)), power=Power(360.0, ('cpu', 'gpu')))
    answer = answer_of(source, (1, 2), (2, 2), (1, 4))
    one, two, other = answer.rows
    assert [answer.kwh(r) for r in (one, two)] == pytest.approx([0.006 * one.minutes, 0.012 * two.minutes])
    assert other.minutes and answer.kwh(other) is None  # no node of four ranks was measured
    text = render_tables(answer)
    assert 'Energy: 360 W per node, the mean power of its CPUs and GPUs in' in text and '  kWh\n' in text


def titles_of(picture):
    svg = ElementTree.fromstring(picture.svg)
    return [t.text for t in svg.iter('{http://www.w3.org/2000/svg}title')]


def test_plot_shows_measured_and_predicted_values():
    source = source_of(known(), known(2, 128), known(64, 4096))
    titles = titles_of(draw_prediction(answer_of(source, (1, 2), (2, 2), (4, 2))))
    assert '2x2: 0.39 minutes predicted, 80 % interval 0.34 to 0.44' in titles
    assert '2x2: 1.17 minutes measured, batch 128' in titles and '1x2: 0.01 node-hours predicted' in titles
    assert not any(t.startswith(('4x2', '64x2')) for t in titles)  # 4x2 has no minutes, 64x2 is not predicted
    assert titles.count('2x2: 0.04 node-hours measured, batch 128') == 1
    titles = titles_of(draw_prediction(answer_of(source_of(known()), (2, 2), (4, 2))))  # without minutes: steps
    assert '2x2: 112.0 ms per step predicted' in titles and '4x2: 2,245.6 images/s predicted' in titles


@pytest.mark.filterwarnings('error')
def test_plot_is_written_in_light_and_dark(tmp_path):
    source = source_of(known(), known(2, 128))
    dump_prediction(answer_of(source, (1, 2), (2, 2), (2, 3), local_batch_size=32, price=2.5), tmp_path)
    light, dark = ((tmp_path / f'prediction{name}.svg').read_text() for name in ('', '_dark'))
    assert '#1b1e23' in light and '#ffffff' in light and '#1b1e23' not in dark and '#ffffff' not in dark
    assert light.count('<title>') == dark.count('<title>') > 4
    paper = [imread(tmp_path / f'prediction{name}.png')[0, 0, :3].tolist() for name in ('', '_dark')]
    assert min(paper[0]) == 1 and max(paper[1]) < 0.2
