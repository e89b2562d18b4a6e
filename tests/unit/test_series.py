"""Series of one machine on several numbers of nodes."""

import pytest
from lines import write_set
from made_systems import changed, made_set, study_of

from mlperf_rn50.analysis.report.tables import answer_table, series_table
from mlperf_rn50.analysis.sets.scaling import find_series
from mlperf_rn50.analysis.sets.settings import Recipe

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
    for folder, nodes, ranks, epoch_s in (
        ('1x4', 1, 4, 40.0),
        ('2x4', 2, 8, 25.0),
        ('2x8', 2, 16, 10.0),
        ('4x8', 4, 32, 5.0),
        ('1x2', 1, 2, 80.0),
    ):
        write_set(
            tmp_path / folder, 1, nodes=nodes, ranks=ranks, epoch_s=epoch_s, eval_s=0.0, seed=ranks
        )
    study = study_of(tmp_path)
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


def test_efficiency_is_hardware_times_statistics_times_rest(tmp_path):
    write_set(tmp_path / '1x4', 1, epoch_s=100.0, eval_s=5.0)
    write_set(
        tmp_path / '2x4', 1, nodes=2, ranks=8, epoch_s=60.0, eval_s=5.0, accuracies=(0.5, 0.6, 0.76)
    )
    c = study_of(tmp_path).comparisons[1]
    assert c.efficiency == pytest.approx(210 / 195 / 2)
    assert (c.hardware_efficiency, c.epoch_ratio) == (
        pytest.approx(100 / 60 / 2),
        pytest.approx(2 / 3),
    )
    assert c.hardware_efficiency * c.epoch_ratio * c.rest == pytest.approx(c.efficiency)
