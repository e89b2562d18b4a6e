"""Comparison of a run with reference runs: selection, band, standing, and alarms on published
runs."""

import sys
from dataclasses import replace

import pytest
from helpers import ROOT, json_table
from made_systems import made_set
from pytest import approx

from mlperf_rn50.analysis.recipe.band import band, band_at, standing_of, target_epochs
from mlperf_rn50.analysis.recipe.reference import (
    Reference,
    dataset_of,
    find_named,
    find_published,
    has_same_recipe,
    introduce,
    recipe_of,
    typical_spreads,
)
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.train.options import OptimizerConfig, ScheduleConfig, TrainConfig

sys.path.insert(0, str(ROOT / 'benchmarks'))
from replay import FAULTS, replay  # noqa: E402

RECIPE = Recipe('lars', 1664, 7.4, 2.0, 'poly', 40.0, 1e-4, 2.0, None, 1e-4, 0.9, 0.1, 0.75, 4, 4)
STEPS = replace(RECIPE, decay='step', step_epochs=(30.0, 60.0), decay_epochs=None)
CURVE = ((10, 0.4), (20, 0.6), (30, 0.7), (40, 0.76))


def known(*curves, recipe=RECIPE, status='converged', name='s', **facts):
    return made_set(name, recipe, [(status, 60.0, c) for c in curves], **facts)


def shifted(offset):
    return tuple((e, a + offset) for e, a in CURVE)


def reference(*curves, recipe=RECIPE, **keys):
    return Reference('same', recipe, (known(*curves, recipe=recipe),), **keys)


@pytest.mark.parametrize(
    'key, value, how',
    json_table("""
"global_batch_size" | 1664     | "same"
"global_batch_size" | 1632     | "same"
"global_batch_size" | 2064     | "like"
"global_batch_size" | 3328     | null
"base_lr"           | 7.5      | "like"
"base_lr"           | 1.5      | null
"base_lr"           | null     | null
"opt_name"          | "sgd"    | null
"decay"             | "cosine" | null
"decay"             | null     | "same"
"decay_epochs"      | 40.4     | "same"
"decay_epochs"      | 42.0     | "like"
"decay_epochs"      | 60.0     | null
"decay_epochs"      | null     | "same"
"weight_decay"      | 5e-5     | "like"
"weight_decay"      | null     | "same"
"""),
)
def test_same_recipe_precedes_a_similar_one(key, value, how):
    other = replace(RECIPE, **{key: value})
    assert has_same_recipe(RECIPE, other) is has_same_recipe(other, RECIPE) is (how == 'same')
    # similar to 40 and 42
    nearly = known(CURVE, recipe=replace(RECIPE, decay_epochs=43.0), name='like')
    references = find_published(RECIPE, [nearly, known(CURVE, recipe=other, name='other')])
    expected = {'same': ['other'], 'like': ['like', 'other'], None: ['like']}
    assert (references.how, [s.name for s in references.sets]) == (how or 'like', expected[how])


def test_recipes_without_an_optimizer_or_with_other_drops_are_not_the_same():
    assert not has_same_recipe(replace(RECIPE, opt_name=None), replace(RECIPE, opt_name=None))
    assert not has_same_recipe(STEPS, replace(STEPS, step_epochs=(30.0, 80.0)))


@pytest.mark.parametrize(
    'curves, keys, spread',
    [
        ((shifted(-0.01), CURVE, shifted(0.01)), {}, 0.01),
        # the spread is at least the published or the random spread
        ((CURVE,) * 3, {'spreads': {5: 0.02}}, 0.02),
        ((CURVE,) * 3, {'eval_samples': 400}, (0.6 * 0.4 / 400) ** 0.5),
    ],
)
def test_band_is_the_mean_and_three_spreads_of_one_more_run(curves, keys, spread):
    middle = band_at(reference(*curves, **keys), 20)
    assert (middle.point, len(middle.values)) == (0.5, 3)
    reach = 3 * spread * (1 + 1 / 3) ** 0.5
    assert (middle.low, middle.mean, middle.high) == approx((0.6 - reach, 0.6, 0.6 + reach))


def test_reference_is_interpolated_between_evaluations_unless_the_rate_drops():
    runs = reference(CURVE, shifted(0.01))
    means = [band_at(runs, epoch).mean for epoch in (10, 25, 40)]
    assert means == approx([0.405, 0.655, 0.765])
    assert band_at(runs, 9) is band_at(runs, 41) is None
    curve = ((28, 0.45), (32, 0.68), (36, 0.69))
    runs = reference(curve, curve, recipe=STEPS)
    assert band_at(runs, 30) is None
    assert band_at(runs, 32).mean == 0.68 < band_at(runs, 34).mean


def test_schedules_of_different_lengths_are_compared_at_the_same_fraction():
    references = Reference('like', replace(RECIPE, decay_epochs=44.0), (known(CURVE, CURVE),))
    middle = band_at(references, 22)
    assert (middle.mean, middle.point) == (approx(0.6), 0.5)
    assert target_epochs(references) == [44, 44]


def test_spreads_are_pooled_by_fraction_of_the_schedule():
    sets = [known(CURVE, shifted(0.02)), known(CURVE, shifted(0.04), shifted(0.08))]
    assert typical_spreads(sets)[5] == approx(((0.0002 + 2 * 0.0016) / 3) ** 0.5)
    curves = ((28, 0.4), (32, 0.6)), ((28, 0.5), (32, 0.61))
    by_drop = typical_spreads([known(*curves, recipe=STEPS)])
    assert by_drop == {-1: approx(0.1 / 2**0.5), -2: approx(0.01 / 2**0.5)}


def standing_after(curve, references=None):
    references = references or reference(
        CURVE, shifted(0.004), shifted(0.002), spreads=dict.fromkeys(range(11), 0.005)
    )
    return standing_of(references, band(references, range(60)), curve, 1000.0)


@pytest.mark.parametrize(
    'first, last, below, behind, texts',
    json_table("""
0.4 | 0.6  | false | false | ["on course: 3 of 3", "within 0.4 points", "epoch 40, 17 min"]
0.4 | 0.55 | true  | false | ["outlier: 5.2 points below", "3 sigma (1.7 points), once"]
0.3 | 0.55 | true  | true  | ["behind: 5.2 points below", "at 2 evaluations in a row; all"]
"""),
)
def test_standing_on_course_below_and_behind(first, last, below, behind, texts):
    standing = standing_after([(10, first), (20, last)])
    assert all(text in standing.text for text in texts)
    assert (standing.below, standing.behind) == (below, behind)
    assert standing.seconds_left == (1000.0, 1000.0)


def test_standing_with_one_reference_run_or_different_target():
    standing = standing_after([(10, 0.0), (20, 0.58)], reference(CURVE, spreads={5: 0.001}))
    assert standing.low is None and not standing.behind
    text = '2.0 points below the only reference run; an alarm needs 2 runs; all'
    assert standing.text.startswith(text)
    for target, text in (
        (0.763, '1 of 2 reached 76.30 % at epoch 40'),
        (0.9, 'none reached 90.00 %'),
    ):
        runs = reference(CURVE, shifted(0.004), recipe=replace(RECIPE, target_accuracy=target))
        assert text in standing_after([(20, 0.6)], runs).text


def test_only_converged_runs_are_references():
    failed = known(shifted(-0.3), status='aborted')
    assert find_published(RECIPE, [failed]) is None
    assert find_published(replace(RECIPE, base_lr=1.0), [known(CURVE)]) is None
    both = replace(failed, runs=(*known(CURVE).runs, *failed.runs))
    mixed = find_published(RECIPE, [failed, both])
    assert mixed.num_runs == len(mixed.sets) == len(band_at(mixed, 20).values) == 1


def test_named_runs_of_different_recipe_are_accepted():
    slow = replace(RECIPE, base_lr=1.5, target_accuracy=0.75)
    sets = [known(CURVE, dataset='digits'), known(CURVE)]
    found = find_named(slow, 'digits', 360, sets, load_published())
    assert (found.how, found.num_runs, found.eval_samples, found.spreads) == ('named', 1, 360, {})
    text = 'reference: 1 run of 1 set (/runs/s), a different recipe (lars, batch 1664, learning'
    assert introduce(found).startswith(text)
    unknown = known(CURVE, recipe=replace(RECIPE, base_lr=None), dataset='digits')
    assert find_named(RECIPE, 'digits', 360, [unknown], []).how == 'named'


def test_reference_of_a_part_of_imagenet_has_the_same_name():
    part = Config(data=DataConfig(num_train=1_281_160))
    assert (dataset_of(part), dataset_of(Config())) == ('imagenet', None)
    named = [known(CURVE, dataset='imagenet')]
    assert find_named(RECIPE, 'imagenet', 50_000, named, []).num_runs == 1
    with pytest.raises(UserError, match='got runs on all of ImageNet, expected'):
        find_named(RECIPE, 'imagenet', 50_000, [known(CURVE)], [])


@pytest.mark.parametrize(
    'named, words',
    [
        ([{'dataset': 'cifar10'}], 'got runs on cifar10, expected converged runs on digits'),
        ([{'status': 'aborted'}], 'got no converged run, expected converged runs on digits'),
        (
            [{'recipe': replace(RECIPE, base_lr=b)} for b in (20.0, 30.0)],
            'got 2 sets with different recipes, expected one recipe or recipes similar to',
        ),
    ],
)
def test_unsuitable_named_sets_are_refused(named, words):
    sets = [known(CURVE, **{'dataset': 'digits', **keys}) for keys in named]
    with pytest.raises(UserError, match=words):
        find_named(RECIPE, 'digits', 360, sets, [])


def test_recipe_of_a_configuration_matches_its_published_set():
    v07 = Config(
        train=TrainConfig(global_batch_size=1664, label_smoothing=0.1, target_accuracy=0.759),
        schedule=ScheduleConfig(7.4, 2, 'poly', 37),
        optimizer=OptimizerConfig('lars', weight_decay=1e-4),
    )
    references = find_published(recipe_of(v07, 1664), load_published())
    assert references.how == 'same'
    assert {s.org for s in references.sets} == {'DellEMC', 'Fujitsu', 'NVIDIA'}
    assert dataset_of(v07) is None
    assert dataset_of(replace(v07, data=DataConfig(synthetic=True))) == 'imagenet'


def test_alarm_detects_faults_with_few_false_alarms_in_published_runs():
    """Compare each system with the others; only faults hidden by a rate drop raise no alarm."""
    counts = {
        how: (len(t.systems), t.runs, *(t.flagged[name] for name in ('good', *FAULTS)))
        for how, t in replay(load_published()).items()
    }
    assert counts == {
        'same': (155, 834, 1, 824, 832, 826),
        'like': (38, 202, 16, 202, 202, 200),
        'own': (8, 40, 0, 40, 40, 40),
        'own, step': (1, 5, 0, 0, 4, 0),
    }
