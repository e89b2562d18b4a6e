"""Speed-up and efficiency: factors, node splits, and comparability of systems."""

import json

import pytest
from lines import write_lines, write_set
from made_systems import changed, made_set, studies_of, study_of, write_layouts

from mlperf_rn50.analysis.report.data import report_data
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.report.tables import answer_table, series_table
from mlperf_rn50.analysis.sets import scaling
from mlperf_rn50.analysis.sets.scaling import find_series
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.text import render_text
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.findings import make_finding

# Epochs and speed-ups of study 1 with 4 V100 per node, from which all times follow if the time of
# one node is given.
STUDY_1 = {1: (61, 1.0), 2: (62, 1.8), 4: (65, 3.3), 8: (81, 4.9)}


def test_study_1_epochs_and_speedups(tmp_path):
    for nodes, (epochs, factor) in STUDY_1.items():
        epoch_s = 6000.0 / factor / epochs
        write_set(
            tmp_path / f'{nodes}x4',
            1,
            nodes=nodes,
            ranks=4 * nodes,
            accuracies=(0.749,),
            period=epochs,
            epoch_s=epoch_s,
            eval_s=0.0,
            batch=256 * nodes,
            target=0.749,
        )
    study = study_of(tmp_path)
    assert [
        (s.epochs_mean, round(c.speedup, 3)) for s, c in zip(study.run_sets, study.comparisons)
    ] == [*STUDY_1.values()]
    # 8 nodes are 4.9 times as fast. A quarter is lost because of 81 instead of 61 epochs, the rest
    # to hardware.
    last = study.comparisons[-1]
    assert last.epoch_ratio == pytest.approx(61 / 81) and last.efficiency == pytest.approx(
        4.9 / 8, rel=1e-3
    )
    assert last.throughput_gain == pytest.approx(4.9 * 81 / 61, rel=1e-3)


def test_node_splits_of_the_same_accelerators(tmp_path):
    for nodes, epoch_s in ((1, 10.0), (2, 10.85), (4, 12.0)):
        write_set(tmp_path / f'{nodes}n', 1, nodes=nodes, ranks=16, epoch_s=epoch_s, eval_s=0.0)
    study = study_of(tmp_path)
    assert [(x.faster.name, x.slower.name) for x in study.splits] == [
        ('1n', '2n'),
        ('1n', '4n'),
        ('2n', '4n'),
    ]
    first = study.splits[0]
    assert (first.difference, first.time_difference) == pytest.approx((0.085, 0.085))
    assert '8.5 %' in render_text(make_report([study]))


def test_difference_below_the_evaluation_period_is_weak(tmp_path):
    write_set(tmp_path / 'a', 3, accuracies=(0.5, 0.76), period=4)
    write_set(
        tmp_path / 'b',
        3,
        accuracies=lambda k: (0.5, 0.76) if k else (0.5, 0.6, 0.76),
        period=4,
        nodes=2,
        ranks=8,
    )
    study = study_of(tmp_path)
    assert make_finding('evidence_weak', None, 'a', 4 / 3, '4 epochs').text in [
        f.text for f in study.findings[study.run_sets[1]]
    ]


def test_different_targets_and_data_are_different_studies(tmp_path):
    write_set(tmp_path / 'a', 1)
    write_set(tmp_path / 'b', 1, target=0.749)
    write_set(tmp_path / 'c', 1, train_samples=1437)
    assert len(studies_of(tmp_path)) == 3


def test_baseline_is_the_smallest_converged_or_the_named_system(tmp_path):
    write_set(tmp_path / 's/1x4', 2, status='aborted')
    study = study_of(write_layouts(tmp_path / 's', {'2x4': 6.0, '4x4': 3.0}, 2).parent)
    assert study.baseline.name == '2x4' and study.comparisons[0] is None
    assert study.comparisons[2].speedup == pytest.approx(14 / 8)
    named = study_of(tmp_path, baseline='4x4')
    assert named.comparisons[1].speedup == pytest.approx(8 / 14)
    write_layouts(tmp_path / 't', {'4x4': 10.0})
    # no duplicates
    for name, text in (
        ('4x4', '4x4, which matches 2 systems'),
        ('3x4', '--baseline: got 3x4, expected one of: 1x4, 2x4, 4x4$'),
    ):
        with pytest.raises(UserError, match=text):
            studies_of(tmp_path, baseline=name)


def test_system_without_a_log_is_shown_with_its_study(tmp_path):
    write_set(tmp_path / '1x4', 2)
    write_lines(tmp_path / '2x4/result_0.txt', ['killed before the first line of a log'])
    study = study_of(tmp_path)
    assert [s.name for s in study.run_sets] == ['1x4', '2x4'] and study.comparisons == (None, None)
    assert {(s['baseline'], s['speedup'], s['efficiency']) for s in systems_of(study).values()} == {
        (None, None, None)
    }
    text = render_text(make_report([study]))
    assert '2x4: error: 1 of 1 logs cannot be read and count as not converged' in text
    assert 'speed-up' not in next(line for line in text.splitlines() if line.startswith('system'))


@pytest.mark.parametrize(
    'names, is_alike, has_note',
    [
        (('unnamed', 'unnamed'), False, False),
        (('box', 'box'), True, True),
        (('1xbox', '2xbox'), True, False),
        (('2xDGX-1', '12xDGX-2H'), False, False),
    ],
)
def test_efficiency_of_unknown_accelerators_has_a_warning(tmp_path, names, is_alike, has_note):
    for nodes, name in zip((1, 2), names):
        write_set(
            tmp_path / f's/{nodes}n',
            1,
            nodes=nodes,
            ranks=4 * nodes,
            platform=name,
            number_of_nodes=nodes,
        )
    study = study_of(tmp_path)
    assert [s.num_nodes for s in study.run_sets] == [1, 2] and study.comparisons[1].efficiency
    assert study.findings[study.baseline] == [
        *([] if is_alike else [make_finding('accelerator_unknown', None, '1n, 2n')]),
        *([make_finding('platform_equal', None, 'box')] if has_note else []),
    ]


def test_only_widest_of_many_splits_is_shown_with_a_note(tmp_path):
    def study_with(num_systems):
        for i in range(num_systems):
            write_set(
                tmp_path / f'{num_systems}/{i:02d}',
                1,
                nodes=1 + i % 2,
                ranks=16,
                epoch_s=10.0 + (i * 7) % 11,
            )
        return study_of(tmp_path / str(num_systems))

    most = scaling.MAX_OF_SPLITS
    assert len(study_with(most).splits) == (most // 2) ** 2
    many = study_with(2 * most)
    fastest = max(many.run_sets, key=lambda s: s.images_per_s)
    slowest = min(s.images_per_s for s in many.run_sets if s.num_nodes != fastest.num_nodes)
    assert [x.difference for x in many.splits] == [fastest.images_per_s / slowest - 1]
    assert (
        make_finding('splits_hidden', None, 16, '16 accelerators') in many.findings[many.baseline]
    )


def systems_of(*studies):
    """Return the systems of the JSON report by name."""
    return {
        s['system']: s for s in json.loads(''.join(render_json(report_data(studies))))['systems']
    }


def submission(home, models, **keys):
    """Write systems of 1, 2, 4, ... nodes of 4 accelerators, each twice as fast as the previous
    one."""
    (home / 'systems').mkdir(parents=True)
    for nodes, model in models.items():
        write_set(
            home / f'results/{nodes}n/resnet',
            **{'nodes': nodes, 'ranks': 4 * nodes, 'epoch_s': 20.0 / nodes, 'eval_s': 0.0, **keys},
        )
        (home / f'systems/{nodes}n.json').write_text(json.dumps({'accelerator_model_name': model}))
    return home


@pytest.mark.parametrize(
    'models, efficiency',
    [(('V100', 'A100'), None), (('A100', 'A100'), 1), (('A100', ''), 1), (('', ''), 1)],
)
def test_different_accelerator_models_have_no_efficiency(tmp_path, models, efficiency):
    study = study_of(submission(tmp_path / 'v1.0/us', dict(zip((1, 2), models))), baseline='1n')
    last = study.comparisons[1]
    assert last.speedup == pytest.approx(2) and last.efficiency == last.hardware_efficiency == (
        efficiency and pytest.approx(efficiency)
    )
    assert [f for f in study.findings[study.run_sets[1]] if f.kind == 'hardware_differs'] == (
        [] if efficiency else [make_finding('hardware_differs', None, 'A100', 'V100', '1n')]
    )


def test_node_splits_compare_the_same_accelerator_model(tmp_path):
    study = study_of(submission(tmp_path / 'v1.0/us', {1: 'V100', 2: 'V100', 4: 'A100'}, ranks=16))
    assert [(x.faster.name, x.slower.name) for x in study.splits] == [('2n', '1n')]


def test_different_rules_are_findings(tmp_path):
    write_set(tmp_path / 'v1.0/us/results/a/resnet', 1)
    write_set(
        tmp_path / 'v2.0/us/results/b/resnet', 1, nodes=2, ranks=8, division='open', target=0.759
    )
    study = study_of(tmp_path, baseline='a')
    assert study.findings[study.run_sets[1]] == [
        make_finding('rounds_differ', None, 'v2.0', 'v1.0', 'a'),
        make_finding('divisions_differ', None, 'open', 'closed', 'a'),
    ]
    assert study.comparisons[1].speedup == pytest.approx(1)


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
    frameworks = ('NGC MXNet 23.04, NGC Pytorch 23.04', 'NGC MXNet 23.04 , NGC PyTorch 23.04')
    assert names_of(
        *(system(f'{k}', k, framework=f) for k, f in enumerate(frameworks, start=1))
    ) == [['1', '2']]


def test_sets_without_time_and_equal_numbers_of_nodes_make_no_series():
    aborted = system('b', 2, status='aborted')
    assert names_of(system('a', 1), aborted) == names_of(system('a', 1), system('c', 1)) == []


def test_platform_separates_only_sets_with_equal_numbers_of_nodes():
    pods = [system(f'pod{n}', n, platform=f'pod{n}') for n in (1, 2)]
    assert names_of(*pods) == [['pod1', 'pod2']]
    boxes = [
        system(f'{n}x{box}', n, platform=f'{n}x{box}') for n in (1, 2) for box in ('box', 'crate')
    ]
    assert names_of(*boxes) == [['1xbox', '2xbox'], ['1xcrate', '2xcrate']]


def test_baseline_is_the_fastest_on_the_fewest_nodes():
    slow, fast, large = system('a', 2, 40.0), system('b', 2, 30.0), system('c', 4, 20.0)
    assert names_of(large, slow, fast) == [['b', 'a', 'c']]


def test_each_series_has_its_own_baseline_and_other_systems_follow(tmp_path):
    times = {'1x4': 40.0, '2x4': 25.0, '2x8': 10.0, '4x8': 5.0, '1x2': 80.0}
    study = study_of(write_layouts(tmp_path, times, eval_s=0.0))
    assert [
        [c.text for c in row[4:6]] for x in study.series for row in series_table(study, x).rows
    ] == [['1.00', '100.0 %'], ['1.60', '80.0 %'], ['1.00', '100.0 %'], ['2.00', '100.0 %']]
    assert [row[0].text for row in answer_table(study).rows] == ['1x2']
    chosen = study_of(tmp_path, baseline='1x2')
    assert [row[4].text for x in chosen.series for row in series_table(chosen, x).rows] == [
        '2.00',
        '3.20',
        '8.00',
        '16.00',
    ]
