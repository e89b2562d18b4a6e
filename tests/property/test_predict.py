"""Predictions from any log or bench file, which are plausible or refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.analysis.predict.anchors import base_of, link_of
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.layouts import PredictionRequest, predict_layouts
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import KNOWLEDGE, Base, Costs, Epochs, Layout, Link
from mlperf_rn50.analysis.predict.source import Source
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.settings import Recipe, make_recipe

SECONDS = st.floats(1e-6, 1e6)
LINKS = st.builds(
    Link,
    st.floats(1e-3, 1e6),
    st.integers(1, 10**12),
    st.just('any'),
    st.floats(0, 1),
    st.none() | SECONDS,
    st.booleans(),
    st.booleans(),
)
FITTED = costs_without(None)
COSTS = st.sampled_from([Costs(), FITTED])


def counts(most):
    return st.integers(1, most)


@st.composite
def recipes(draw, batch):
    return Recipe(
        'sgd',
        batch,
        decay='poly',
        decay_epochs=draw(st.none() | st.floats(1, 200)),
        eval_period=draw(counts(10)),
        first_eval_epoch=draw(st.integers(0, 10)),
    )


@st.composite
def bases(draw):
    nodes, per_node, local = draw(st.tuples(counts(8), counts(16), counts(4096)))
    return Base(
        'any',
        'any',
        num_nodes=nodes,
        num_units=nodes * per_node,
        has_accelerators=draw(st.booleans()),
        global_batch_size=nodes * per_node * local,
        step_s=draw(SECONDS),
        evaluation_s=draw(st.none() | st.just(0.0) | SECONDS),
        outside_s=draw(st.floats(0, 1e6)),
        train_samples=draw(counts(10**9)),
        dataset=draw(st.sampled_from([None, 'digits'])),
    )


@st.composite
def layouts(draw):
    nodes, per_node, local = draw(st.tuples(counts(1000), counts(64), counts(4096)))
    recipe, epochs = draw(recipes(nodes * per_node * local)), draw(st.none() | st.floats(1, 200))
    if epochs is None:
        return Layout(nodes, per_node, recipe)
    low, more = draw(st.tuples(st.floats(0, epochs), st.floats(0, 100)))
    return Layout(nodes, per_node, recipe, Epochs(epochs, low, epochs + more, 'any'))


@given(bases(), layouts(), LINKS, COSTS, st.floats(1, 100), st.sampled_from(KNOWLEDGE[:2]))
def test_predictions_are_plausible_and_more_ports_are_never_slower(
    base, layout, link, costs, times, knowledge
):
    faster = replace(link, gbit_s=times * link.gbit_s)
    p, q = (predict_layout(base, layout, k, costs, knowledge) for k in (link, faster))
    if p.refusal:
        return
    assert (
        p.compute_s > 0 and p.exchange_s >= 0 and 0 <= p.hidden_s <= p.exchange_s and p.other_s >= 0
    )
    assert 0 < p.step_s < math.inf and 0 < p.images_per_s < math.inf and 0 < p.measured_share <= 1
    if p.minutes is not None:
        assert (
            0 < p.minutes < math.inf and 0 <= p.interval[0] <= p.minutes <= p.interval[1] < math.inf
        )
    if base.num_nodes == 1:  # else a faster link implies more compute time
        assert not q.refusal and q.step_s <= p.step_s * (1 + 1e-9)
        assert (p.minutes is None) == (q.minutes is None)
        assert p.minutes is None or q.minutes <= p.minutes * (1 + 1e-9)


@given(bases(), LINKS, st.integers(2, 500), st.integers(1, 500), st.integers(1, 4096))
def test_more_nodes_never_lower_the_images_per_second(base, link, nodes, more, local):
    base = replace(base, num_nodes=1)
    per_node = base.num_units
    p, q = (
        predict_layout(base, Layout(n, per_node, Recipe('sgd', n * per_node * local)), link, FITTED)
        for n in (nodes, nodes + more)
    )
    assert p.refusal or q.refusal or q.images_per_s >= p.images_per_s * (1 - 1e-9)


@given(bases(), layouts(), LINKS)
def test_less_knowledge_never_narrows_the_interval(base, layout, link):
    base = replace(base, dataset=None, evaluation_s=1.0, outside_s=1.0)
    less = [
        predict_layout(base, layout, k, FITTED, knowledge)
        for k, knowledge in ((link, 'own'), (link, 'other'), (replace(link, gbit_s=None), 'other'))
    ]
    widths = [p.interval[1] / p.interval[0] for p in less if p.interval and p.interval[0]]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(widths, widths[1:]))


VALUES = (
    st.none()
    | st.booleans()
    | st.text(max_size=3)
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.lists(st.floats() | st.none(), max_size=3)
)
KEYS = """opt_name sgd_opt_base_learning_rate opt_learning_rate_warmup_epochs opt_momentum
    sgd_opt_learning_rate_decay_steps opt_learning_rate_decay_boundary_epochs
    label_smoothing""".split()
CURVES = st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.just(0.5)), max_size=4), max_size=2)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES),
    st.integers(1, 10**12),
    st.none() | st.integers(0, 10**12),
    CURVES,
)
def test_recipe_of_any_log_has_valid_numbers_or_none(optimizer, batch, samples, curves):
    r = make_recipe(optimizer, batch, samples, 0.759, curves)
    numbers = [r.base_lr, r.warmup_epochs, r.decay_epochs, r.momentum, r.label_smoothing]
    numbers += r.step_epochs or ()
    assert all(n is None or type(n) in (int, float) and 0 <= n < math.inf for n in numbers)
    assert r.opt_name is None or isinstance(r.opt_name, str)
    if r.last_eval_epoch is not None:
        assert r.first_eval_epoch <= r.last_eval_epoch <= r.decay_epochs + 0.1
        assert (r.last_eval_epoch - r.first_eval_epoch) % r.eval_period == 0


PUBLISHED_BASES = [(k, b) for k in load_published() if (b := base_of(k))]
SPLITS = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 16)), min_size=1, max_size=5, unique=True
)


@given(st.sampled_from(PUBLISHED_BASES), SPLITS, st.none() | st.integers(1, 100_000), st.booleans())
def test_any_layout_of_a_published_system_has_an_answer(start, splits, batch, is_strong):
    known, base = start
    request = PredictionRequest(tuple(splits), base.global_batch_size if is_strong else batch)
    answer = predict_layouts(request, Source(base, link_of(known), (known,)))
    assert all(row.refusal or row.step_s > 0 for row in answer.rows)
    for row in answer.timed:
        assert answer.best['fastest'].known_minutes <= row.known_minutes
        if not row.refusal:
            assert row.hardware_efficiency > 0 and row.interval[0] <= row.minutes <= row.interval[1]
            assert row.node_hours == pytest.approx(row.minutes / 60 * row.layout.num_nodes)
            epochs, recipe = row.layout.epochs, row.layout.recipe
            steps = epochs.mean * base.train_samples / recipe.global_batch_size
            # start and evaluations take no negative time
            assert 60 * row.minutes >= 0.999 * steps * row.step_s
