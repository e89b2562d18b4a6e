"""Predictions: hand calculations, published systems, recipes, doubts, tables, plots and options."""

import json
import math
import re
import shlex
import statistics
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from helpers import ROOT, call, json_table
from lines import mllog, write_set
from made_systems import changed, made_set

from mlperf_rn50.analysis.predict.anchors import base_of
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.layouts import (
    PredictionRequest,
    Predictions,
    choose_batch,
    find_batches,
    predict_layouts,
)
from mlperf_rn50.analysis.predict.model import EVALUATION_S, predict_layout
from mlperf_rn50.analysis.predict.plot import draw_prediction, dump_prediction
from mlperf_rn50.analysis.predict.prediction import Base, Costs, Epochs, Layout, Link, Prediction
from mlperf_rn50.analysis.predict.prediction_answer import prediction_answer
from mlperf_rn50.analysis.predict.source import Source, load_source, parse_what_if
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.sets.time_parts import RunTimes

approx = pytest.approx
SLOW = Link(1.0, 100_000_000, 'measured')
FAST = replace(SLOW, gbit_s=1000.0)
DGX = next(s for s in load_published() if s.name == 'dgxa100_ngc20.06_mxnet')
RECIPE = replace(
    DGX.recipe, global_batch_size=400, decay_epochs=10.0, eval_period=2, first_eval_epoch=1
)
BASE = Base('one', 'made up', 1, 4, True, 400, 0.1, 8.0, 5.0, 40_000, None, generation='A100')
TWO_NODES = replace(BASE, num_nodes=2, num_units=8)
TWO, FOUR = (Layout(n, 4, RECIPE, Epochs(9, 9, 9, '')) for n in (2, 4))
COSTS = Costs(latency_s={'A100': 0.006}, other_latency_s=0.004)


# parts of the step: compute, exchange, hidden, other
# base, layout and link: what differs from BASE, TWO and FAST. parts of the step: compute, exchange,
# hidden, other; a ring of 8 over TCP takes 4.96 ms for its hops
@pytest.mark.parametrize(
    'base, layout, link, parts',
    json_table("""
# half the images per accelerator, over a ring of 8
{} | {} | {} | [0.05, 0.0014, 0, 0.006]
{"generation": ""} | {} | {} | [0.05, 0.0014, 0, 0.004]
{} | {} | {"gbit_s": 100} | [0.05, 0.014, 0.00904, 0.006]  # not slower than over TCP
{} | {} | {"gbit_s": 100, "is_tcp": true} | [0.05, 0.014, 0.014, 0.01096]
# the backward pass
{} | {} | {"gbit_s": 1, "is_tcp": true} | [0.05, 1.4, 0.0333333333, 0.01096]
# measured
{} | {} | {"gbit_s": 100, "overlap": 0.5, "extra_s": 0.001} | [0.05, 0.014, 0.007, 0.001]
{} | {} | {"gbit_s": 1, "overlap": 1.0, "extra_s": 0.0} | [0.05, 1.4, 0.05, 0]
# a ring of 2 nodes
{} | {} | {"is_hierarchical": true} | [0.05, 0.0008, 0, 0.018]
# a single node does not use the link
{"num_nodes": 2, "num_units": 8} | {"num_nodes": 1} | {"gbit_s": 100} | [0.16, 0, 0, 0]
# as measured
{"num_nodes": 2, "num_units": 8} | {} | {"gbit_s": 100} | [0.08, 0.014, 0, 0.006]
# nothing within nodes
{} | {"units_per_node": 1} | {"is_hierarchical": true} | [0.2, 0.0008, 0, 0.006]
# on the line through two batches
{"steps": {"50": 0.06}}  | {} | {} | [0.06, 0.0014, 0, 0.006]
{"steps": {"200": 0.18}} | {} | {} | [0.06, 0.0014, 0, 0.006]
# noise: a line does not fall
{"steps": {"50": 0.11}}  | {} | {} | [0.1, 0.0014, 0, 0.006]
"""),
)
def test_step_parts_match_hand_calculation(base, layout, link, parts):
    is_measured = 'num_nodes' in base or 'extra_s' in link
    steps = {int(batch): step_s for batch, step_s in base.get('steps', {}).items()}
    base = replace(BASE, **base | {'steps': steps})
    layout, link = replace(TWO, **layout), replace(FAST, **link)
    p = predict_layout(base, layout, link, COSTS)
    assert (p.compute_s, p.exchange_s, p.hidden_s, p.other_s) == approx(parts)
    assert p.step_s == approx(parts[0] + parts[1] - parts[2] + parts[3])
    assert p.images_per_s == approx(400 / p.step_s)
    assert p.measured_share == approx(1 if is_measured else parts[0] / p.step_s)


# starts: sets as [number of nodes, start time, number of such sets]
@pytest.mark.parametrize(
    'nodes, starts, start_s',
    json_table("""
2   | [[2, 7.0, 1], [2, 3.0, 1], [2, 1.0, 1]] | 3.0
# from sets with similar numbers of nodes
2   | [[64, 1.0, 15], [2, 9.0, 15]] | 9.0
5   | [[64, 1.0, 15], [2, 9.0, 15]] | 9.0
100 | [[64, 1.0, 15], [2, 9.0, 15]] | 1.0
2   | [[2, -9.0, 1]] | 0.0
2   | [] | 5.0
"""),
)
def test_minutes_match_hand_calculation(nodes, starts, start_s):
    costs = replace(COSTS, starts=tuple((n, s) for n, s, k in starts for _ in range(k)))
    p = predict_layout(BASE, replace(TWO, num_nodes=nodes), FAST, costs)
    # Evaluations after epochs 1, 3, ... and 9.
    evaluations_s = 5 * (8.0 / nodes + EVALUATION_S)
    assert 60 * p.minutes == approx(9 * 100 * p.step_s + evaluations_s + start_s)


# efficiency in %, github.com/horovod/horovod/pull/542
@pytest.mark.parametrize(
    'gpus, flat, hierarchical',
    json_table("""
16  | 98 | 95
32  | 98 | 95
64  | 83 | 94
128 | 84 | 93
256 | 66 | 91
"""),
)
def test_published_efficiency_of_horovod_over_tcp_is_reproduced(gpus, flat, hierarchical):
    """Float32 ResNet-50 on nodes of eight V100 with 25 Gbit/s; 8 GPUs: 3,072 images/s, 128 images
    per GPU assumed."""
    base = Base(
        'p3', '', 1, 8, True, 1024, 1024 / 3072, None, None, 1_281_167, None, generation='V100'
    )
    layout = Layout(gpus // 8, 8, Recipe(None, 128 * gpus))
    for is_hierarchical, expected in ((False, flat), (True, hierarchical)):
        link = Link(25.0, 102_228_128, '', is_tcp=True, is_hierarchical=is_hierarchical)
        p = predict_layout(base, layout, link, costs_without(None))
        assert 100 * p.hardware_efficiency == approx(expected, abs=6)


def test_interval_of_the_measured_layout_is_that_of_one_more_run(tmp_path):
    """Student's t with 4 degrees of freedom: 1.533 standard deviations, times sqrt(1 + 1/5)."""
    pace = (10.1, 11.2, 9.3, 12.4, 10.5)  # seconds per epoch
    keys = {**SMALL, 'num_runs': 5, 'epoch_s': lambda k: pace[k]}
    keys['accuracies'] = lambda k: (0.5,) * (k + 4) + (0.76,)
    write_set(tmp_path / 'box', ranks=1, **keys)
    done = call('predict', tmp_path / 'box', '--layouts', '1x1', '--format', 'json')
    (found,) = json.loads(done.stdout)['predictions']
    times = [r.time_to_train_s for r in load_run_sets([tmp_path])[0].runs]
    share = 1.533 * math.sqrt(1 + 1 / 5) * statistics.stdev(times) / statistics.fmean(times)
    assert found['interval'][1] / found['minutes'] == approx(1 + share, rel=0.02)


def test_interval_is_that_of_the_knowledge_and_wider_for_unknown_ports_and_epochs():
    costs = replace(COSTS, errors={'two': 0.05, 'own': 0.1, 'other': 0.2})
    spread = replace(TWO, epochs=Epochs(9, 8, 10, ''))
    own = predict_layout(BASE, TWO, FAST, costs)
    for layout, knowledge, error in (
        (TWO, 'own', 0.1),
        (TWO, 'other', 0.2),
        (spread, 'own', math.hypot(0.1, math.log(10 / 9))),
    ):
        p = predict_layout(BASE, layout, FAST, costs, knowledge)
        assert p.minutes == own.minutes and p.interval[1] == approx(p.minutes * math.exp(error))
    assert own.interval[0] == approx(own.minutes * math.exp(-0.1))
    unknown = predict_layout(BASE, TWO, replace(FAST, gbit_s=None), costs)
    low, high = (bound / unknown.minutes for bound in unknown.interval)
    assert low < math.exp(-0.1) < math.exp(0.1) < high


@pytest.mark.parametrize(
    'base, layout, message',
    [
        (TWO_NODES, FOUR, 'exceed the measured step'),
        (replace(BASE, train_samples=399), TWO, 'batch 400 exceeds the 399 training images'),
    ],
)
def test_unpredictable_layouts_are_refused(base, layout, message):
    p = predict_layout(base, layout, SLOW, COSTS)
    assert message in p.refusal and p.minutes is None


# accelerators without sets on several nodes: those of H100, L40S, A100, V100, and of none
SIMILAR = {
    'H100': ('H200', 'GH200', 'B200'),
    'L40S': ('L40', 'NVIDIA L4'),
    'A100': ('A30', 'NVIDIA RTX A5000', 'T4'),
    'V100': ('V100S', 'P100'),
    '': ('MI300X', ''),
}


@pytest.mark.parametrize('similar', SIMILAR)
def test_accelerator_without_sets_on_several_nodes_has_the_latency_of_the_nearest_generation(
    similar,
):
    source, costs = load_source(['v4.0/NVIDIA/h200_ngc24.04_mxnet']), costs_without(None)
    layout = Layout(16, 8, source.base.layout.recipe, Epochs(35, 35, 35, ''))
    known, *others = (
        predict_layout(replace(source.base, generation=name), layout, source.link, costs)
        for name in ('H100', *SIMILAR[similar])
    )
    for p in others:
        assert p.other_s == costs.latency_s.get(similar, costs.other_latency_s)
        assert (p.knowledge, known.knowledge) == ('other', 'own')
        assert known.interval[1] / known.minutes < p.interval[1] / p.minutes


DIGITS = Recipe(
    'sgd', 64, 0.02, 1.0, 'poly', 12.0, target_accuracy=0.75, eval_period=1, first_eval_epoch=1
)
UNKNOWN = Link(None, 1_000_000, 'unknown')
LINK = Link(1.0, 1_000_000, 'measured')  # a ring of 2 takes 8 ms
A100 = 'dgxa100_ngc20.06_mxnet'


def known(nodes=1, batch=64, step_s=0.1, epochs=(3, 4)):
    """Set with two ranks per node, 6,400 images per epoch, evaluations of 1 s, and 2 s outside."""
    runs = [('converged' if e else 'aborted', 20.0 * (e or 9), ((e or 9, 0.8),)) for e in epochs]
    return made_set(
        f'{nodes}x2',
        replace(DIGITS, global_batch_size=batch),
        runs,
        RunTimes(step_s * 6400 / batch, 1.0, 2.0),
        num_nodes=nodes,
        num_accelerators=0,
        num_ranks=2 * nodes,
        dataset='digits',
        train_samples=6400,
    )


def source_of(*sets, link=LINK):
    if isinstance(sets[0], str):
        return load_source(list(sets))
    return Source(base_of(sets[0]), link, sets)


def answer_of(source, *splits, **options):
    return predict_layouts(PredictionRequest(splits, **options), source)


def sentences(found):
    return list(prediction_answer(found).sentences)


def test_base_is_predicted_as_measured_and_layout_without_a_recipe_has_only_a_step():
    row, other = answer_of(source_of(known()), (1, 2), (2, 2), local_batch_size=32).rows
    assert (row.step_s, row.measured_step_s, row.hardware_efficiency) == approx((0.1, 0.1, 1))
    minutes = (3.5 * 100 * 0.1 + 3.5 + 2) / 60
    assert (row.measured_minutes, row.minutes, row.node_hours) == approx(
        (70 / 60, minutes, minutes / 60)
    )
    assert other.exchange_s == approx(2 * 3 / 4 * 0.008) and other.doubts
    assert other.minutes is other.node_hours is other.speedup is other.efficiency is None
    assert other.hardware_efficiency == approx(0.1 / other.step_s)
    [row] = answer_of(source_of(known()), (2, 2), global_batch_size=64).rows
    assert row.minutes and row.compute_s == approx(0.05)


def gpu_set(nodes, step_s):
    recipe = replace(DIGITS, global_batch_size=400 * nodes)
    runs = [('converged', 20.0, ((3, 0.8),))]
    facts = {'num_accelerators': 4 * nodes, 'accelerator': 'A100', 'dataset': 'digits'}
    times = RunTimes(step_s * 16 / nodes, 1.0, 2.0)
    return made_set(
        f'{nodes}x4', recipe, runs, times, num_nodes=nodes, **facts | {'train_samples': 6400}
    )


@pytest.mark.parametrize('what_if', [None, parse_what_if('link=100')])
def test_second_set_that_confirms_the_given_link_changes_no_step(what_if):
    one = gpu_set(1, 0.1)
    source = source_of(one, link=SLOW)
    [two] = answer_of(source, (2, 4), local_batch_size=100).rows
    both = replace(source, sets=(one, gpu_set(2, two.step_s)))
    alone, found = (
        answer_of(s, (4, 4), local_batch_size=100, what_if=what_if).rows[0] for s in (source, both)
    )
    assert (alone.knowledge, found.knowledge) == ('own', 'two')
    assert found.step_s == approx(alone.step_s)


def test_run_on_changing_numbers_of_nodes_is_no_base():
    assert base_of(known(2)) and not base_of(changed(known(2), has_changed_nodes=True))


def answer_with_times(*minutes):
    """Return an answer with the minutes on 1, 2, 4, ... nodes."""
    rows = tuple(
        Prediction(
            Layout(2**k, 2, RECIPE, TWO.epochs),
            step_s=0.1,
            minutes=m,
            interval=m and (m, m),
            node_hours=m and 2**k * m / 60,
        )
        for k, m in enumerate(minutes)
    )
    return Predictions(PredictionRequest(()), source_of(known()), Costs(), rows)


@pytest.mark.parametrize(
    'minutes, knee',
    json_table("""
[100.0, 52.0, 28.0, 22.0, null] | 4
[100.0, 51.0, 26.0]             | null  # the largest layout has the smallest product
[100.0, 99.0, 98.0]             | null  # the smallest one has
"""),
)
def test_knee_is_last_layout_that_saves_more_time_than_it_costs_but_not_at_the_edge(minutes, knee):
    best = answer_with_times(*minutes).best
    assert (best['knee'].layout.num_nodes if 'knee' in best else None) == knee


def test_answer_is_in_the_first_lines():
    fastest, cheapest, knee = sentences(answer_with_times(100.0, 52.0, 28.0, 22.0, None))
    # a layout without minutes may be faster
    end = 'min (22.00 to 22.00) at batch 400, 9 epochs, 2.93 node-hours'
    assert fastest == f'Fastest layout with a time: 8x2, 22.00 {end}'
    assert cheapest.startswith('Cheapest layout with a time: 1x2, 100.00 min')
    assert knee.startswith('Knee layout with a time: 4x2, 28.00 min')
    assert sentences(answer_with_times(2.0, 1.0))[0].startswith('Fastest: 2x2, 1.00 min')
    assert sentences(answer_with_times(None)) == ['1x2, 100.0 ms per step, minutes unknown']


def candidate(batch, minutes, kind='published', measured=None):
    layout = Layout(1, 1, replace(RECIPE, global_batch_size=batch), Epochs(9, 9, 9, '', kind))
    return Prediction(layout, minutes=minutes, measured_minutes=measured)


@pytest.mark.parametrize(
    'rows, batch',
    json_table("""
[[100, 5.0], [400, 4.9, "interpolated"]] | 400  # the least time
# equal times: the source's recipe
[[400, 5.0], [100, 4.96, "source"]]      | 100
[[400, 5.0, "interpolated"], [100, 5.04]] | 100  # a published one
[[200, 5.0], [300, 5.01], [900, 5.02]]   | 300  # near to the measured 400 images
# measured times count
[[100, 5.0], [400, 6.0, "published", 4.0]] | 400
[[100, 5.0], [400, 4.0, "published", 6.0]] | 100
"""),
)
def test_batch_with_the_least_time_is_chosen(rows, batch):
    rows = [candidate(*row) for row in rows]
    for order in (rows, rows[::-1]):
        assert choose_batch(order, 400).layout.recipe.global_batch_size == batch


def test_batches_to_choose_from_are_multiples_that_fit_the_accelerator():
    # 408 images per accelerator; the most on such accelerators in any published set
    found = {*find_batches(source_of(A100), 128, None, 0.759)}
    assert {3328, 4096, 8192, 13_056, 34_560} <= found and not {3264, 4080, 8064} & found
    assert all(b % 128 == 0 and b <= 408 * 128 for b in found)
    assert max(find_batches(source_of(A100), 8, None, 0.759)) == 3264
    digits = source_of(known(), known(2, 128), known(4, 512))
    expected = {2: [64, 64, 128], 4: [64, 128, 128], 8: [64, 128, 256, 512], 6: [192]}
    assert {n: find_batches(digits, n, None, None) for n in expected} == expected


def test_without_a_link_only_several_nodes_are_refused(tmp_path):
    measured, _ = answer_of(source_of(known(2, 128), link=UNKNOWN), (2, 2), (4, 2)).rows
    assert measured.step_s == approx(0.1)
    [fewer] = answer_of(source_of(known(2, 128), link=UNKNOWN), (1, 2)).rows
    assert fewer.refusal.startswith('interconnect unknown')  # what the exchange took is not known
    found = answer_of(source_of(known(), link=UNKNOWN), (1, 2), (2, 2), (2, 3))
    report = prediction_answer(found).data
    one, two, _ = report['predictions']
    assert report['link']['gbit_s'] is report['validation'] is one['refusal'] is None
    assert one['minutes'] and two['minutes'] is two['step_s'] is None
    assert two['refusal'].startswith('interconnect unknown; pass --link-gbit-s')
    assert (report['fastest'], report['cheapest'], report['knee']) == ('1x2', '1x2', None)
    refused = prediction_answer(replace(found, rows=found.rows[1:]))
    assert refused.exit_code == 1
    dump_prediction(refused, tmp_path / 'a/b')
    names = {p.name for p in (tmp_path / 'a/b').glob('[!.]*')}
    assert names == {'prediction.json', 'prediction.md'}  # nothing to plot


def titles_of(found):
    svg = ElementTree.fromstring(draw_prediction(found, 'x').svg)
    return [t.text for t in svg.iter('{http://www.w3.org/2000/svg}title')]


def test_plot_shows_measured_and_predicted_values():
    source = source_of(known(), known(2, 128), known(64, 4096))
    titles = titles_of(answer_of(source, (1, 2), (2, 2), (4, 2), local_batch_size=32))
    assert '2x2: 0.36 minutes predicted, 80 % interval 0.29 to 0.44' in titles
    assert '2x2: 1.17 minutes measured' in titles
    # 4x2 has no minutes, 64x2 is not predicted
    assert not any(t.startswith(('4x2', '64x2')) for t in titles)
    titles = titles_of(answer_of(source_of(known()), (2, 2), (4, 2), local_batch_size=32))
    assert {'2x2: 102.48 ms per step predicted', '4x2: 104.96 ms per step predicted'} <= {*titles}


SMALL = {
    'num_runs': 1,
    'is_complete': True,
    'accelerators': False,
    'division': 'open',
    'dataset': 'digits',
    'train_samples': 1000,
    'target': 0.7,
    'eval_s': 0.5,
    'accuracies': (0.1, 0.3, 0.5, 0.72),
}


def test_layouts_are_ranked_by_measured_times(tmp_path):
    """The model takes two nodes for faster than one, but they were measured at another batch, and
    are slower."""
    write_set(tmp_path / 'one', ranks=1, batch=100, **SMALL)
    write_set(tmp_path / 'two', ranks=2, nodes=2, batch=200, epoch_s=20.0, **SMALL)
    source = load_source([str(tmp_path)], 'one', gbit_s=1000.0)
    answer = answer_of(source, (1, 1), (2, 1), (4, 1), global_batch_size=100)
    one, two, four = answer.rows
    assert two.minutes < one.minutes < two.best_measured_minutes
    assert (two.measured_minutes, two.best_measured_batch_size) == (None, 200)
    assert (answer.best['fastest'], answer.best['cheapest']) == (four, one)
    fewer = sentences(replace(answer, rows=(one, two)))
    assert fewer[0].startswith('Fastest: 1x1, measured 0.70 min')


def test_measurement_is_that_of_the_source_among_sets_of_one_layout(tmp_path):
    for name, epoch_s in (('a', 30.0), ('b', 10.0)):
        write_set(tmp_path / name, ranks=1, batch=100, epoch_s=epoch_s, **SMALL)
    [found] = answer_of(load_source([str(tmp_path)], 'b'), (1, 1)).rows
    assert found.measured_step_s == approx(found.step_s)


@pytest.mark.parametrize('first_s', [1.0, 5.0, 9.9, 10.0, 30.0])
def test_no_part_of_a_run_is_negative(tmp_path, first_s):
    """A first epoch that is shorter than the others is chance, so it makes no layout faster than
    its own steps."""
    folder = write_set(tmp_path / 'one', ranks=2, batch=80, first_s=first_s, **SMALL)
    source = load_source([str(folder)], gbit_s=10.0)
    base, noise = source.base, max(0.0, (10.0 - first_s) / 4 / 10.0)
    assert (base.outside_s, base.noise) == (max(0.0, first_s - 10.0), approx(noise))
    # 12.5 steps per epoch
    assert base.step_s == approx(min(10.0, (3 * 10.0 + first_s) / 4) / 12.5)
    rows = answer_of(source, (1, 2), (2, 2), (4, 2)).rows
    for row in rows:
        steps = row.layout.epochs.mean * 1000 / row.layout.recipe.global_batch_size
        assert row.minutes * 60 >= steps * row.step_s and row.efficiency <= 1.0005
        assert row.interval[1] >= row.minutes * (1 + noise)
        assert any('first epoch' in doubt for doubt in row.doubts) == (noise >= 0.005)
    assert rows[0].minutes == approx(source.sets[0].minutes)


def test_fewer_epochs_may_make_nodes_more_than_proportionally_faster(tmp_path):
    for nodes, curve in ((1, (0.1, 0.2, 0.3, 0.4, 0.5, 0.72)), (2, (0.1, 0.72))):
        keys = SMALL | {'accuracies': curve, 'batch': 100 * nodes}
        write_set(tmp_path / f'{nodes}', ranks=nodes, nodes=nodes, **keys)
    source = load_source([str(tmp_path)], gbit_s=1000.0)
    _, row = answer_of(source, (1, 1), (2, 1), global_batch_size=200).rows
    assert row.efficiency > 1 and not [d for d in row.doubts if 'proportional' in d]


def test_resumed_runs_are_named_in_the_first_lines(tmp_path):
    log = write_set(tmp_path / 'run', ranks=2, batch=100, **SMALL) / 'result_0.txt'
    before, later = re.split('(?=.*"epoch_start".*num": 3)', log.read_text(), maxsplit=1)
    resume = mllog('run_resumed', 21, 20, epoch_num=3, clock_s=21.0, submittable=False)
    log.write_text(f'{before}{resume}\n{later}')
    lines = call('predict', log.parent, '--layouts', '1').stdout.splitlines()
    assert lines[1].startswith('Resumed runs: run;')


@pytest.mark.filterwarnings('error')
def test_exit_code_depends_on_predicted_layouts_and_files_are_complete(tmp_path):
    study = ROOT / 'logs/digits_sweep'
    done = call('predict', study, '--layouts', '2x1', '--out', tmp_path, '--format', 'markdown')
    assert done.returncode == 1 and done.stderr == f'mlperf-rn50: wrote {tmp_path}\n'
    assert (tmp_path / 'prediction.md').read_text() == done.stdout
    words = f'1x1 1x2 2x1 --price-per-node-hour 2.5 --out {tmp_path}'
    assert call('predict', study, '--layouts', *words.split()).returncode == 0
    report = json.loads((tmp_path / 'prediction.json').read_text())
    assert report['format'] == 'mlperf-rn50 predict 3' and len(report['predictions']) == 3
    assert (tmp_path / 'prediction.svg').read_text().count('<title>') == 3
    assert (tmp_path / 'prediction.png').exists()
    done = call('predict', '--validate', study, '--format', 'json')
    assert done.returncode == 1
    assert json.loads(done.stdout)['predictions'] == []


SHOWN = re.findall(
    r'```bash\nmlperf-rn50 (predict [^\n]*?)(?: +#[^\n]*)?\n```\n\n```text\n(.*?)\n```',
    (ROOT / 'docs/predict.md').read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize('command, text', SHOWN, ids=[c[:40] for c, _ in SHOWN])
def test_page_shows_the_output_of_the_command(command, text):
    assert len(SHOWN) == 2, 'the page shows a prediction and the errors'
    lines = call(*shlex.split(command)).stdout.splitlines()
    shown = [line for line in text.splitlines() if line != '...']
    assert len(shown) > 4 and set(shown) <= set(lines), f'copy the output of mlperf-rn50 {command}'
