"""The model of predictions: its parts by hand, its refusals, and its errors on the published systems."""
import math
import re
import shutil
from dataclasses import replace

import pytest
from helpers import PUBLISHED

from mlperf_rn50.study import predict
from mlperf_rn50.study.known import load_published
from mlperf_rn50.study.predict import NO_COSTS, Base, Layout, Link, base_for, costs_without, predict_layout
from mlperf_rn50.study.predict_validation import render_validation, validate, validate_systems
from mlperf_rn50.study.systems import load_systems

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


@pytest.mark.parametrize('base, layout, link, other_s, parts', [  # compute, exchange, hidden, other; of the step
    (BASE, TWO, FAST, 0.006, (0.05, 0.014, 0, 0.006)),  # half the images per accelerator, over a ring of 8
    (BASE, TWO, replace(SLOW, gbit_s=1000.0, is_hidden=True), 0.0, (0.05, 0.0014, 0.0014, 0)),
    (RANKS, TWO, replace(SLOW, is_hidden=True), 0.0, (0.05, 1.4, 2 / 3 * 0.05, 0)),  # behind the backward pass only
    (TWO_NODES, ONE, FAST, 0.004, (2 * (0.1 - 0.014 - 0.004), 0, 0, 0)),  # one node exchanges nothing over the link
    (replace(TWO_NODES, exchange_s=0.03, has_accelerators=False), TWO, SLOW, 0.0, (0.07, 0.03, 0, 0)),  # as measured
    (replace(TWO_NODES, exchange_s=0.03, has_accelerators=False), FOUR, SLOW, 0.0, (0.035, 1.5, 0, 0))])
def test_the_parts_of_a_step_by_hand(base, layout, link, other_s, parts):
    p = predict_layout(base, layout, link, replace(NO_COSTS, step_s=other_s))
    assert (p.compute_s, p.exchange_s, p.hidden_s, p.other_s) == pytest.approx(parts)
    assert p.step_s == pytest.approx(parts[0] + parts[1] - parts[2] + parts[3])
    assert p.images_per_s == pytest.approx(400 / p.step_s)


def test_the_minutes_by_hand():
    p = predict_layout(BASE, TWO, FAST, replace(NO_COSTS, step_s=0.006))
    assert p.epochs.mean == 9  # evaluations after epochs 1, 3, ... and 9; the schedule ends after 10
    assert p.minutes == pytest.approx((9 * 100 * 0.07 + 5 * 8.0 / 2 + 5.0) / 60)


@pytest.mark.parametrize('wide', [{'epochs_low': 0.8}, {'step_spread_s': 0.002},
                                  {'outside_low_s': 1.0, 'outside_high_s': 60.0}])
def test_each_doubt_widens_the_interval(wide):
    costs = replace(NO_COSTS, step_s=0.001, outside_s=5.0, outside_low_s=5.0, outside_high_s=5.0)
    p, q = (predict_layout(BASE, TWO, FAST, c) for c in (costs, replace(costs, **wide)))
    assert p.low_minutes == pytest.approx(p.minutes) and p.high_minutes == pytest.approx(p.minutes)
    assert q.minutes == p.minutes and q.low_minutes < p.low_minutes
    assert (q.high_minutes > p.high_minutes) == ('epochs_low' not in wide)  # a schedule ends when it ends
    if 'step_spread_s' in wide:  # what the nodes of the base cost is taken off, and not known exactly
        p = predict_layout(TWO_NODES, ONE, FAST, replace(costs, **wide))
        assert p.low_minutes < p.minutes < p.high_minutes


def test_the_spread_of_the_runs_of_the_base_counts():
    runs = tuple(replace(r, time_s=r.epochs * s) for r, s in zip(DGX.runs, (9.0, 10.0, 11.0, 10.0, 10.0)))
    p = predict_layout(replace(BASE, known=replace(DGX, runs=runs)), ONE, SLOW, NO_COSTS)
    share = 1.533 * math.sqrt(0.5) / 10  # Student's t of four degrees of freedom
    assert (p.low_minutes, p.high_minutes) == pytest.approx((p.minutes * (1 - share), p.minutes * (1 + share)))


@pytest.mark.parametrize('base, layout, link, said', [
    (BASE, replace(TWO, recipe=ENDLESS), FAST, 'no schedule'), (BASE, TWO, SLOW, 'fixed costs rule'),
    (replace(BASE, num_nodes=2), FOUR, SLOW, 'more than the step that was measured'),
    (replace(BASE, train_samples=399), TWO, FAST, 'a batch of 400 is more than the data has images, 399'),
    (replace(BASE, outside_s=-1e6), ONE, FAST, 'say nothing of so short a run')])
def test_what_is_not_known_is_refused(base, layout, link, said):
    p = predict_layout(base, layout, link, NO_COSTS)
    assert said in p.refusal and p.minutes is None


def test_no_round_is_judged_by_itself(monkeypatch):
    old = SETS['dgx2h_ngc19.05_mxnet']
    own, others = costs_without(DGX), costs_without(old)
    changed = [replace(s, times=replace(s.times, epoch_s=2 * s.times.epoch_s)) if s.round == 'v0.7' else s
               for s in load_published()]
    monkeypatch.setattr(predict, 'load_published', lambda: changed)
    assert costs_without(DGX) == own and costs_without(old) != others


def test_pairs_are_of_one_maker_round_and_kind():
    many = SETS['dgxa100_n96_ngc20.06_mxnet']
    assert base_for(many, load_published()).known is DGX
    assert base_for(SETS['2xXE8545x4A100-SXM-80GB'], load_published()) is None
    assert base_for(many, [replace(DGX, round='v1.0')]) is base_for(many, [replace(DGX, org='Dell')]) is None
    many, unnamed = replace(many, accelerator=None), replace(DGX, accelerator=None)
    assert base_for(many, [unnamed]).known is unnamed
    assert base_for(replace(many, num_accelerators=96 * 16), [unnamed]) is None


@pytest.mark.needs_published
def test_copies_count_once(tmp_path):
    for org in ('NVIDIA', 'Other'):
        shutil.copytree(PUBLISHED / 'v0.7' / 'NVIDIA', tmp_path / org)
    validation = validate_systems(load_systems([tmp_path]))
    [judged] = validation.predicted
    assert judged.target.round == 'v0.7+' and 'v0.6, v1.0' in judged.costs.source  # no folder says more
    said = render_validation(validation)
    assert len(re.findall('left out: all of its logs are copies of those of another system', said)) == 2


def test_names_are_neither_cells_nor_links_of_markdown():
    odd = [replace(s, name=f'<b>|![x](y)\x1b[2J{s.name}') for s in load_published() if s.round == 'v0.7']
    said = render_validation(validate(odd), is_markdown=True)
    assert '<b>' not in said and '![x]' not in said and '&lt;b>\\|!\\[x](y)?\\[2J' in said
    assert '\x1b' not in said + render_validation(validate(odd))
