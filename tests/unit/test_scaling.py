"""Speed-up and efficiency: factors, node splits, and comparability of systems."""

import json

import pytest
from helpers import json_table, write_files
from lines import write_set
from made_systems import changed, made_set, studies_of, study_of, write_layouts
from pytest import approx

from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.report.tables import answer_table, series_table
from mlperf_rn50.analysis.sets import scaling
from mlperf_rn50.analysis.sets.scaling import find_series
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.findings import make_finding

# Epochs and speed-ups of study 1 with 4 V100 per node, from which all times follow if the time of
# one node is given.
STUDY_1 = {1: (61, 1.0), 2: (62, 1.8), 4: (65, 3.3), 8: (81, 4.9)}


def test_study_1_epochs_and_speedups(tmp_path):
    keys = {'accuracies': (0.749,), 'target': 0.749, 'eval_s': 0.0}
    for nodes, (epochs, factor) in STUDY_1.items():
        times = {f'{nodes}x4': 6000.0 / factor / epochs}
        write_layouts(tmp_path, times, period=epochs, batch=256 * nodes, **keys)
    study = study_of(tmp_path)
    found = zip(study.run_sets, study.comparisons)
    assert [(s.epochs_mean, round(c.speedup, 3)) for s, c in found] == [*STUDY_1.values()]
    # 8 nodes are 4.9 times as fast. A quarter is lost because of 81 instead of 61 epochs, the rest
    # to hardware.
    last = study.comparisons[-1]
    assert last.epoch_ratio == approx(61 / 81)
    assert last.efficiency == approx(4.9 / 8, rel=1e-3)
    assert last.throughput_gain == approx(4.9 * 81 / 61, rel=1e-3)


def splits_of(study):
    return [(x.faster.name, x.slower.name) for x in study.splits]


def test_node_splits_of_the_same_accelerators(tmp_path):
    times = {'1x16': 10.0, '2x8': 10.85, '4x4': 12.0}
    study = study_of(write_layouts(tmp_path, times, eval_s=0.0))
    assert splits_of(study) == [('1x16', '2x8'), ('1x16', '4x4'), ('2x8', '4x4')]
    first = study.splits[0]
    assert (first.difference, first.time_difference) == approx((0.085, 0.085 / 1.085))
    assert '8.5 %' in render_text(make_report([study]))


def test_difference_below_the_evaluation_period_is_weak(tmp_path):
    curves = lambda k: (0.5, 0.76) if k else (0.5, 0.6, 0.76)  # noqa: E731
    for layout, accuracies in (('1x4', (0.5, 0.76)), ('2x4', curves)):
        write_layouts(tmp_path, {layout: 10.0}, 3, accuracies=accuracies, period=4)
    study = study_of(tmp_path)
    expected = make_finding('evidence_weak', None, '1x4', 4 / 3, '4 epochs').text
    assert expected in [f.text for f in study.findings[study.run_sets[1]]]


def test_different_targets_and_data_are_different_studies(tmp_path):
    for keys in ({}, {'target': 0.749}, {'train_samples': 1437}):
        write_set(tmp_path / f'{len(keys)}{sum(keys.values())}', 1, **keys)
    assert len(studies_of(tmp_path)) == 3


def test_baseline_is_the_smallest_converged_or_the_named_system(tmp_path):
    write_set(tmp_path / 's/1x4', 2, status='aborted')
    study = study_of(write_layouts(tmp_path / 's', {'2x4': 6.0, '4x4': 3.0}, 2))
    assert study.baseline.name == '2x4' and study.comparisons[0] is None
    assert study.comparisons[2].speedup == approx(14 / 8)
    named = study_of(tmp_path, baseline='4x4')
    assert named.comparisons[1].speedup == approx(8 / 14)
    write_layouts(tmp_path / 't', {'4x4': 10.0})
    for name, text in (
        ('1x4', '--baseline: 1x4 has no time, expected one with a converged run'),
        ('4x4', '4x4, which matches 2 systems'),
        ('3x4', '--baseline: got 3x4, expected one of: 1x4, 2x4, 4x4$'),  # no duplicates
    ):
        with pytest.raises(UserError, match=text):
            studies_of(tmp_path, baseline=name)


@pytest.mark.parametrize(
    'names, kinds',
    json_table("""
["unnamed", "unnamed"]   | ["accelerator_unknown"]
["box", "box"]           | ["platform_equal"]
["1xbox", "2xbox"]       | []
["2xDGX-1", "12xDGX-2H"] | ["accelerator_unknown"]
"""),
)
def test_efficiency_of_unknown_accelerators_has_a_warning(tmp_path, names, kinds):
    for n, name in zip((1, 2), names):
        write_layouts(tmp_path / 's', {f'{n}x4': 10.0}, platform=name, number_of_nodes=n)
    study = study_of(tmp_path)
    assert [s.num_nodes for s in study.run_sets] == [1, 2] and study.comparisons[1].efficiency
    assert [f.kind for f in study.findings[study.baseline]] == kinds


def test_cpu_ranks_of_an_old_log_are_not_compared_with_accelerators():
    """Old logs do not say that they have no accelerators."""
    recipe, runs = Recipe('sgd', 64), [('converged', 20.0, ((1, 0.8),))]
    gpu = made_set('gpu', recipe, runs, num_nodes=1, num_accelerators=1)
    cpu = made_set('cpu', recipe, runs, num_nodes=1, num_ranks=2)
    comparison = scaling.compare(cpu, gpu)
    assert (comparison.speedup, comparison.efficiency) == (1, None)


def test_only_widest_of_many_splits_is_shown_with_a_note(tmp_path):
    def study_with(num_systems):
        folder = tmp_path / str(num_systems)
        for i in range(num_systems):
            epoch_s = 10.0 + (i * 7) % 11
            write_set(folder / f'{i:02d}', 1, nodes=1 + i % 2, ranks=16, epoch_s=epoch_s)
        return study_of(folder)

    most = scaling.MAX_OF_SPLITS
    assert len(study_with(most).splits) == (most // 2) ** 2
    many = study_with(2 * most)
    fastest = max(many.run_sets, key=lambda s: s.images_per_s)
    slowest = min(s.images_per_s for s in many.run_sets if s.num_nodes != fastest.num_nodes)
    assert [x.difference for x in many.splits] == [fastest.images_per_s / slowest - 1]
    assert 'splits_hidden' in [f.kind for f in many.findings[many.baseline]]


def submission(home, models, **keys):
    """Write systems of 1, 2, 4, ... nodes of 4 accelerators, each twice as fast as the previous
    one."""
    for k, model in enumerate(models):
        nodes = 2**k
        facts = {'nodes': nodes, 'ranks': 4 * nodes, 'epoch_s': 20.0 / nodes, 'eval_s': 0.0}
        write_set(home / f'results/{nodes}n/resnet', **facts | keys)
        description = json.dumps({'accelerator_model_name': model})
        write_files(home, {f'systems/{nodes}n.json': description})
    return home


@pytest.mark.parametrize(
    'models, efficiency',
    json_table("""
["V100", "A100"] | null
["A100", "A100"] | 1
["A100", ""]     | 1
["", ""]         | 1
"""),
)
def test_different_accelerator_models_have_no_efficiency(tmp_path, models, efficiency):
    study = study_of(submission(tmp_path / 'v1.0/us', models), baseline='1n')
    last = study.comparisons[1]
    assert last.speedup == approx(2) and last.efficiency == (efficiency and approx(efficiency))
    assert last.hardware_efficiency == last.efficiency
    found = [f for f in study.findings[study.run_sets[1]] if f.kind == 'hardware_differs']
    differs = make_finding('hardware_differs', None, 'A100', 'V100', '1n')
    assert found == [differs] * (not efficiency)


def test_node_splits_compare_the_same_accelerator_model(tmp_path):
    home = submission(tmp_path / 'v1.0/us', ('V100', 'V100', 'A100'), ranks=16)
    assert splits_of(study_of(home)) == [('2n', '1n')]


def test_different_rules_are_findings(tmp_path):
    write_set(tmp_path / 'v1.0/us/results/a/resnet', 1)
    keys = {'nodes': 2, 'ranks': 8, 'division': 'open', 'target': 0.759}
    write_set(tmp_path / 'v2.0/us/results/b/resnet', 1, **keys)
    study = study_of(tmp_path, baseline='a')
    assert study.findings[study.run_sets[1]] == [
        make_finding('rounds_differ', None, 'v2.0', 'v1.0', 'a'),
        make_finding('divisions_differ', None, 'open', 'closed', 'a'),
    ]
    assert study.comparisons[1].speedup == approx(1)


# Series of one machine on several numbers of nodes.
RECIPE = Recipe('sgd', 64)


def system(name, nodes, minutes=60.0, per_node=4, **facts):
    """Return a set of one run on some nodes."""
    plain = made_set(
        name,
        RECIPE,
        [('converged', 60 * minutes, [(2, 0.76)])],
        num_nodes=nodes,
        num_accelerators=nodes * per_node,
        accelerator='A100',
        framework='MXNet',
        division='closed',
    )
    return changed(plain, **facts)


def names_of(*systems):
    return [[s.name for s in x.run_sets] for x in find_series(systems)]


@pytest.mark.parametrize(
    'facts',
    [
        {'accelerator': 'V100'},
        {'num_accelerators': 16},
        {'framework': 'TensorFlow'},
        {'division': 'open'},
        {'org': 'them'},
        {'round': 'v1.0'},
    ],
)
def test_sets_that_differ_in_one_fact_are_in_no_series(facts):
    assert names_of(system('a', 1), system('b', 2)) == [['a', 'b']]
    assert names_of(system('a', 1), system('b', 2, **facts)) == []


def test_case_and_spaces_of_a_framework_do_not_matter():
    one = system('a', 1, framework='NGC MXNet 23.04, NGC Pytorch 23.04')
    two = system('b', 2, framework='NGC MXNet 23.04 , NGC PyTorch 23.04')
    assert names_of(one, two) == [['a', 'b']]


def test_sets_without_time_and_equal_numbers_of_nodes_make_no_series():
    aborted = system('b', 2, status='aborted')
    assert names_of(system('a', 1), aborted) == names_of(system('a', 1), system('c', 1)) == []


def test_baseline_is_the_fastest_on_the_fewest_nodes():
    slow, fast, large = system('a', 2, 40.0), system('b', 2, 30.0), system('c', 4, 20.0)
    assert names_of(large, slow, fast) == [['b', 'a', 'c']]


def test_system_outside_of_a_series_is_compared_with_the_first_of_its_accelerators():
    slow, fast = system('a', 1, 40.0), system('b', 1, 30.0)
    systems = [slow, fast, system('c', 2, 20.0), system('d', 1, 10.0, per_node=8)]
    [study] = scaling.make_studies(systems)
    assert [c and c.baseline.name for c in study.comparisons] == ['b', 'b', 'b', 'a']


def test_system_whose_nodes_changed_is_no_baseline():
    changed_one = system('a', 1, 40.0, per_node=2, has_changed_nodes=True)
    systems = [changed_one, system('b', 1, 30.0), system('d', 1, 10.0, per_node=8)]
    [study] = scaling.make_studies(systems)
    assert [c and c.baseline.name for c in study.comparisons] == ['b', 'b', 'b']


def test_each_series_has_its_own_baseline_and_other_systems_follow(tmp_path):
    def columns(study, end):
        rows = [row for x in study.series for row in series_table(study, x).rows]
        return ' '.join(c.text for row in rows for c in row[4:end])

    times = {'1x4': 40.0, '2x4': 25.0, '2x8': 10.0, '4x8': 5.0, '1x2': 80.0}
    study = study_of(write_layouts(tmp_path, times, eval_s=0.0))
    assert columns(study, 6) == '1.00 100.0 % 1.60 80.0 % 1.00 100.0 % 2.00 100.0 %'
    assert [row[0].text for row in answer_table(study).rows] == ['1x2']
    assert columns(study_of(tmp_path, baseline='1x2'), 5) == '2.00 3.20 8.00 16.00'
