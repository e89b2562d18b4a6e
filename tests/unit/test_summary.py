"""Sentences of the report: the best series, the losses, prices, refused systems, and their log
lines."""

from dataclasses import replace

import pytest
from helpers import call
from lines import write_set
from made_systems import refused, studies_of, study_of, write_layouts

from mlperf_rn50.analysis.report.headings import labels_of
from mlperf_rn50.analysis.report.summary import summarise
from mlperf_rn50.analysis.report.tables import answer_table, tables_of
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.scaling import make_studies


def texts_of(studies):
    return [''.join(c.text for c in sentence) for sentence in summarise(studies)]


def write_series(folder, efficiency, spread_s=0.0, nodes=(1, 2)):
    """Write a series without evaluation times: epochs of 60 s on the first nodes, and the rest by
    the efficiency."""
    for n in nodes:
        share = 1.0 if n == nodes[0] else efficiency
        write_set(
            folder / f'{n}x4',
            5,
            nodes=n,
            ranks=4 * n,
            first_s=0.0,
            eval_s=0.0,
            seed=lambda k, n=n: 9 * n + k,
            epoch_s=lambda k, n=n, share=share: (60.0 + spread_s * k) * nodes[0] / n / share,
        )


def write_one(folder, seed, **keys):
    """Write a system of one run, whose time has no other parts than its epochs."""
    write_set(folder, 1, eval_s=0.0, seed=seed, **keys)


def test_sentence_on_a_series_has_the_name_of_the_set_with_its_number(tmp_path):
    # Two machines with one accelerator model on one node; the fastest of them is the baseline.
    write_one(tmp_path / 'hyperplane', 1, epoch_s=62.0)
    write_one(tmp_path / 'workstation', 2, epoch_s=60.0)
    write_one(tmp_path / 'both_hyperplanes', 3, epoch_s=40.0, nodes=2, ranks=8)
    assert texts_of(studies_of(tmp_path))[0].startswith(
        'On 2 nodes, both_hyperplanes takes 1.33 minutes, 1.50 times as fast as workstation on 1 '
    )


def test_epochs_of_a_sentence_are_those_of_the_table_or_of_named_runs(tmp_path):
    # Two runs take an epoch more. The scored runs exclude the fastest and the slowest one.
    write_set(tmp_path / '1x4', accuracies=lambda k: (0.5,) * (1 + (k > 2)) + (0.8,), first_s=0.0)
    write_set(tmp_path / '2x4', nodes=2, ranks=8, epoch_s=4.0, seed=lambda k: 9 + k)
    study = study_of(tmp_path)
    first, fastest, *_ = texts_of([study])
    assert '(2.0 instead of 2.3 in the scored runs)' in first
    assert ' and 2.0 epochs, before' in fastest
    table = tables_of(study)[0]
    place = table.head.index('epochs')
    assert [row[place].text for row in table.rows] == ['2.4', '2.0']
    assert 'epochs of the scored runs' in table.note
    for name, end in (
        ('1x4', '(MLPerf score) and 2.3 epochs of the three scored runs.'),
        ('2x4', ' and 2.0 epochs.'),
    ):
        alone = study_of(tmp_path / name)
        assert texts_of([alone])[0].endswith(end)
    assert not any('scored runs.' in table.note for table in tables_of(alone))


@pytest.mark.parametrize('spread_s, is_near', [(0.0, False), (0.1, False), (3.0, True)])
def test_difference_within_the_spread_of_the_runs_is_hedged(tmp_path, spread_s, is_near):
    write_series(tmp_path / 'a', 0.9, spread_s)
    write_series(tmp_path / 'b', 0.85, spread_s)
    text = texts_of(studies_of(tmp_path))[1]
    assert text.endswith('times (85.0 %) (equal within the spread).') == is_near


def test_largest_loss_is_first_and_epochs_are_named(tmp_path):
    write_series(tmp_path, 0.9, nodes=(1,))
    curve, times = (0.1, 0.2, 0.3, 0.8), {'2x4': lambda k: 30.0 + k / 500 - 0.004}
    write_layouts(tmp_path, times, 5, first_s=0.0, eval_s=0.0, accuracies=curve)
    assert texts_of(studies_of(tmp_path))[0].endswith(
        'efficiency 33.3 % = epochs 50.0 % (4.0 instead of 2.0) x rest 66.7 % x images/s per '
        'accelerator 100.0 %.'
    )


def test_systems_without_series_are_sorted_by_time(tmp_path):
    for seed, (name, epoch_s) in enumerate((('a', 30.0), ('b', 15.0), ('c', 45.0))):
        write_one(tmp_path / name, seed, epoch_s=epoch_s)
    assert texts_of(studies_of(tmp_path)) == [
        'b is the fastest of 3 systems: 0.50 minutes (one run) and 2.0 epochs, before a 1.00 '
        'and c 1.50.',
        '3 of 3 runs of 3 systems converged.',
    ]
    assert texts_of(studies_of(tmp_path / 'a')) == [
        'a takes 1.00 minutes (one run) and 2.0 epochs.',
        '1 of 1 run of 1 system converged.',
    ]


def test_prices_compare_only_systems_with_the_same_target(tmp_path):
    write_series(tmp_path / 'a', 0.9)
    write_set(tmp_path / 'other/box', 1, target=0.749, epoch_s=1.0)
    studies = studies_of(tmp_path)
    assert 'per node-hour' not in ''.join(texts_of(studies))
    text = ''.join(texts_of([replace(s, price_per_node_hour=60.0) for s in studies]))
    assert 'At 60 per node-hour, a run to 75.90 % on ImageNet costs least on a/1x4, 1.00 (1' in text
    assert 'the fastest is a/2x4, 1.11 (2 nodes of 4 accelerators, 0.56 minutes).' in text


def test_series_to_different_targets_are_not_compared(tmp_path):
    for name, target in (('a', 0.759), ('b', 0.749)):
        layouts = {'1x4': 10.0, '2x4': 6.0}
        write_layouts(tmp_path / name, layouts, target=target, accuracies=(0.3, 0.8))
    texts = texts_of(studies_of(tmp_path))
    assert not [text for text in texts if 'b/' in text and 'a/' in text], texts


def test_speed_up_over_a_given_baseline_is_not_that_of_another_series(tmp_path):
    for name, epoch_s in (('a1', 60.0), ('a2', 35.0), ('b1', 70.0), ('b2', 36.0)):
        nodes = int(name[1])
        facts = {'platform': f'{nodes}x{name[0]}', 'epoch_s': epoch_s}
        write_one(tmp_path / name, ord(name[0]) + nodes, nodes=nodes, ranks=4 * nodes, **facts)
    text = 'From 1 to 2 nodes, the series of'
    assert text in ''.join(texts_of(studies_of(tmp_path)))
    assert text not in ''.join(texts_of(studies_of(tmp_path, baseline='a1')))


def test_refused_and_unconverged_systems_are_named(tmp_path):
    for seed, name in enumerate('abcde'):
        write_one(tmp_path / name, seed, status='aborted', accuracies=(0.1,))
    studies = make_studies([refused(s, f'{"long " * 40}reason') for s in load_run_sets([tmp_path])])
    second, first = texts_of(studies)
    assert first == '0 of 5 runs of 5 systems converged.'
    assert second.startswith('Refused: 5 of 5 systems: a (long')
    assert second.endswith(' and 2 more.') and 'reason' not in second


def test_time_of_a_refused_set_is_marked_in_each_sentence(tmp_path):
    write_series(tmp_path, 0.9)
    sets = load_run_sets([tmp_path])
    broken = [replace(s.judgement, violations=('reason',) * (s.num_nodes == 2)) for s in sets]
    texts = texts_of(make_studies([replace(s, judgement=j) for s, j in zip(sets, broken)]))
    assert texts[0].startswith('On 2 nodes, 2x4 takes 0.56 minutes (refused), ')


def test_open_division_is_marked_and_not_ranked_among_closed_sets(tmp_path):
    for seed, name in enumerate('abc'):
        division = 'open' if name == 'b' else 'closed'
        epoch_s = {'a': 60.0, 'b': 30.0, 'c': 90.0}[name]
        write_one(tmp_path / name, seed, division=division, target=0.759, epoch_s=epoch_s)
    study = study_of(tmp_path)
    text = texts_of([study])[0]
    assert text.startswith('a is the fastest of 2 systems in the closed division: 2.00 minutes')
    assert text.endswith(' and 2.0 epochs, before c 3.00.')
    table = answer_table(study)
    place = table.head.index('division')
    assert [row[place].text for row in table.rows] == ['closed', 'open', 'closed']
    assert 'division' not in answer_table(study_of(tmp_path / 'b')).head
    assert [*labels_of(study.run_sets).values()] == ['a', 'b (open)', 'c']


def test_fastest_system_without_a_cost_is_named():
    """Its number of nodes is unknown."""
    done = call('report', 'published/v0.5/google', '--price-per-node-hour', '10')
    first, second = [line for line in done.stdout.splitlines() if line.startswith('- ')][:2]
    assert first.startswith('- resnet-tpuv3-512 is the fastest')
    assert second.endswith('; the cost on resnet-tpuv3-512, the fastest, is unknown.')


@pytest.mark.parametrize(
    'platforms, is_shown', [(('box', 'box'), True), (('1xbox', '2xbox'), False)]
)
def test_one_platform_of_all_numbers_of_nodes_is_named(tmp_path, platforms, is_shown):
    """It may be a machine that simulates the nodes."""
    for nodes, platform in enumerate(platforms, 1):
        layout = {f'{nodes}x4': 10.0}
        write_layouts(tmp_path / 's', layout, platform=platform, number_of_nodes=nodes)
    assert texts_of([study_of(tmp_path)])[-1].endswith(', all on box.') == is_shown
