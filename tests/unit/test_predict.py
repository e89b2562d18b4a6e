"""The model of predictions: its parts by hand, its refusals, and its errors on the published systems."""
import math
from dataclasses import replace

import pytest

from mlperf_rn50.study import predict
from mlperf_rn50.study.known import load_published
from mlperf_rn50.study.predict import (
    Base,
    Costs,
    Epochs,
    Layout,
    Link,
    base_for,
    costs_without,
    predict_layout,
    ring_s,
)
from mlperf_rn50.study.predict_validation import render_validation, validate

NOTHING = Costs(0.0, 0.0, None, 0.0, 0.0, 1.0, 'none')
SLOW = Link(1.0, 100_000_000, False, 'measured')


def published(name):
    return next(s for s in load_published() if s.name == name)


DGX = published('dgxa100_ngc20.06_mxnet')
RECIPE = replace(DGX.recipe, global_batch_size=400, decay_epochs=10.0, eval_period=2, first_eval_epoch=1)
BASE = Base('one', 'made up', 1, 4, True, 400, 0.1, 0.0, 8.0, 5.0, 40_000, None)


def test_a_ring_carries_a_message_nearly_twice():
    assert ring_s(100_000_000, 2, 1.0) == pytest.approx(0.8)
    assert ring_s(100_000_000, 8, 1.0) == pytest.approx(1.4)
    assert ring_s(100_000_000, 1, 1.0) == 0


def test_the_parts_of_a_step_and_the_minutes_by_hand():
    p = predict_layout(BASE, Layout(2, 4, RECIPE), replace(SLOW, gbit_s=100.0), replace(NOTHING, step_s=0.006))
    assert p.compute_s == pytest.approx(0.05)  # half the images per accelerator
    assert p.exchange_s == pytest.approx(2 * 7 / 8 * 0.008) and p.hidden_s == 0 and p.other_s == 0.006
    assert p.step_s == pytest.approx(0.05 + 0.014 + 0.006) and p.images_per_s == pytest.approx(400 / 0.07)
    assert p.epochs.mean == 9  # evaluations after epochs 1, 3, ... and 9; the schedule ends after 10
    assert p.minutes == pytest.approx((9 * 100 * 0.07 + 5 * 8.0 / 2 + 5.0) / 60)


def test_what_is_hidden_is_hidden_behind_the_backward_pass_only():
    layout = Layout(2, 4, RECIPE)
    p = predict_layout(BASE, layout, replace(SLOW, gbit_s=1000.0, is_hidden=True), NOTHING)
    assert p.hidden_s == p.exchange_s and p.step_s == pytest.approx(0.05)
    other = replace(BASE, has_accelerators=False)
    p = predict_layout(other, layout, replace(SLOW, is_hidden=True), NOTHING)
    assert p.hidden_s == pytest.approx(2 / 3 * 0.05) and p.step_s == pytest.approx(0.05 / 3 + 1.4)


def test_one_node_exchanges_nothing_over_the_link():
    base = replace(BASE, num_nodes=2, num_units=8)
    costs, link = replace(NOTHING, step_s=0.004, step_spread_s=0.001), replace(SLOW, gbit_s=100.0)
    p = predict_layout(base, Layout(1, 4, RECIPE), link, costs)
    assert (p.exchange_s, p.other_s) == (0, 0) and p.step_s == pytest.approx(2 * (0.1 - 0.014 - 0.004))
    assert p.low_minutes < p.minutes < p.high_minutes  # what the nodes cost is taken off, and not known exactly


def test_a_measured_exchange_is_that_of_its_own_layout():
    base = replace(BASE, num_nodes=2, num_units=8, exchange_s=0.03, has_accelerators=False)
    assert predict_layout(base, Layout(2, 4, RECIPE), SLOW, NOTHING).step_s == pytest.approx(0.1)
    assert predict_layout(base, Layout(4, 4, RECIPE), SLOW, NOTHING).exchange_s == pytest.approx(1.5)


@pytest.mark.parametrize('wide', ['epochs', 'step', 'outside'])
def test_each_doubt_widens_the_interval(wide):
    costs = replace(NOTHING, step_s=0.001, outside_s=5.0, outside_low_s=5.0, outside_high_s=5.0)
    more = {'epochs': replace(costs, epochs_low=0.8), 'step': replace(costs, step_spread_s=0.002),
            'outside': replace(costs, outside_low_s=1.0, outside_high_s=60.0)}[wide]
    fast = replace(SLOW, gbit_s=100.0)
    p, q = (predict_layout(BASE, Layout(2, 4, RECIPE), fast, c) for c in (costs, more))
    assert p.low_minutes == pytest.approx(p.minutes) and p.high_minutes == pytest.approx(p.minutes)
    assert q.minutes == p.minutes and q.low_minutes < p.low_minutes
    assert (q.high_minutes > p.high_minutes) == (wide != 'epochs')  # a schedule ends when it ends


def test_the_spread_of_the_runs_of_the_base_counts():
    runs = tuple(replace(r, time_s=r.epochs * s) for r, s in zip(DGX.runs, (9.0, 10.0, 11.0, 10.0, 10.0)))
    base = replace(BASE, known=replace(DGX, runs=runs))
    p = predict_layout(base, Layout(1, 4, RECIPE), SLOW, NOTHING)
    share = 1.533 * math.sqrt(0.5) / 10  # Student's t of four degrees of freedom
    assert p.low_minutes == pytest.approx(p.minutes * (1 - share)) and p.high_minutes == pytest.approx(
        p.minutes * (1 + share))


def test_what_is_not_known_is_refused():
    def why(base, layout, link):
        return predict_layout(base, layout, link, NOTHING).refusal
    fast = replace(SLOW, gbit_s=1000.0)
    assert 'no schedule' in why(BASE, Layout(2, 4, replace(RECIPE, decay_epochs=None)), fast)
    assert 'fixed costs rule' in why(BASE, Layout(2, 4, RECIPE), SLOW)
    assert 'more than the step that was measured' in why(replace(BASE, num_nodes=2), Layout(4, 4, RECIPE), SLOW)


def test_epochs_that_are_known_count_and_those_that_are_not_leave_the_step():
    base = replace(BASE, dataset='digits')
    recipe, fast = replace(RECIPE, decay_epochs=None), replace(SLOW, gbit_s=1000.0)
    p = predict_layout(base, Layout(2, 4, recipe), fast, NOTHING)
    assert p.refusal is None and p.minutes is None and p.step_s is not None
    p = predict_layout(base, Layout(2, 4, recipe, Epochs(5, 4, 6, 'three runs')), fast, NOTHING)
    assert p.low_minutes < p.minutes < p.high_minutes and p.epochs.source == 'three runs'


def test_no_round_is_judged_by_itself(monkeypatch):
    sets, old = load_published(), published('dgx2h_ngc19.05_mxnet')
    own, others = costs_without(DGX), costs_without(old)
    changed = [replace(s, times=replace(s.times, epoch_s=2 * s.times.epoch_s)) if s.round == 'v0.7' else s
               for s in sets]
    monkeypatch.setattr(predict, 'load_published', lambda: changed)
    assert costs_without(DGX) == own and costs_without(old) != others


def test_pairs_are_of_one_maker_round_and_kind():
    sets = load_published()
    assert base_for(published('dgxa100_n96_ngc20.06_mxnet'), sets).name == 'dgxa100_ngc20.06_mxnet'
    assert base_for(published('2xXE8545x4A100-SXM-80GB'), sets) is None
    many = replace(published('dgxa100_n96_ngc20.06_mxnet'), accelerator=None)
    unnamed = replace(DGX, accelerator=None)
    assert base_for(many, [unnamed]) is unnamed
    assert base_for(replace(many, num_accelerators=96 * 16), [unnamed]) is None


def test_the_published_systems_are_predicted_well():
    validation = validate(load_published())
    assert len(validation.predicted) == 7
    assert validation.median_error <= 0.05 and validation.high_error <= 0.12
    assert 0.70 <= validation.num_held / 7 <= 0.95
    reasons = {j.target.name: j.reason for j in validation.judged if j.reason}
    assert 'no schedule' in reasons.pop('dgx2h_multi_ngc18.11_mxnet')
    assert reasons.pop('2xXE8545x4A100-SXM-80GB').startswith('unpaired')
    assert not reasons
    text = render_validation(validation)
    assert '\nv0.6: 4.5 ± 2.1 ms a step, first epoch and gaps 2.5 s (1.7 to 4.9), as many epochs as a schedule' in text
    assert ', 83 to 100 % of the epochs of a schedule; from 4 pairs of published systems of v0.6, v1.0' in text
    assert 'held 5 of 7' in text and 'of each round from other rounds only:' in text
