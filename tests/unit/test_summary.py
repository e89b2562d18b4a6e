"""Sentences of the report: the best series, the losses, prices, refused systems, and their log
lines."""

from dataclasses import replace

import pytest
from lines import write_set
from made_systems import refused, studies_of, study_of

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


def test_largest_series_is_first_and_series_are_compared_at_the_nodes_that_several_have(tmp_path):
    write_series(tmp_path / 'a', 0.9, nodes=(1, 2, 32))
    write_series(tmp_path / 'b', 0.8)
    write_series(tmp_path / 'c', 0.7)
    write_series(tmp_path / 'd', 1.0, nodes=(4, 8))
    first, second, *_ = texts_of(studies_of(tmp_path))
    assert first.startswith(
        'On 32 nodes, a/32x4 takes 0.03 minutes, 28.80 times as fast as a/1x4 on 1 node: '
        'efficiency 90.0 % = images/s per accelerator 90.0 % x epochs 100.0 % x rest 100'
    )
    assert second == (
        'From 1 to 2 nodes, the series of a/2x4 becomes 1.80 times as fast (efficiency 90.0 %), '
        'that of '
        'b/2x4 1.60 times (80.0 %) and that of c/2x4 1.40 times (70.0 %).'
    )


def test_sentence_on_a_series_has_the_name_of_the_set_with_its_number(tmp_path):
    # Two machines with one accelerator model on one node; the fastest of them is the baseline.
    for name, nodes, epoch_s in (
        ('hyperplane', 1, 62.0),
        ('workstation', 1, 60.0),
        ('both_hyperplanes', 2, 40.0),
    ):
        write_set(
            tmp_path / name,
            1,
            nodes=nodes,
            ranks=4 * nodes,
            epoch_s=epoch_s,
            eval_s=0.0,
            seed=lambda _, name=name: len(name),
        )
    assert texts_of(studies_of(tmp_path))[0].startswith(
        'On 2 nodes, both_hyperplanes takes 1.33 minutes, 1.50 times as fast as workstation on 1 '
        'node: '
    )


def test_epochs_of_a_sentence_are_those_of_the_table_or_of_named_runs(tmp_path):
    # Two runs take an epoch more. The scored runs exclude the fastest and the slowest one.
    write_set(tmp_path / '1x4', accuracies=lambda k: (0.5,) * (1 + (k > 2)) + (0.8,), first_s=0.0)
    write_set(tmp_path / '2x4', nodes=2, ranks=8, epoch_s=4.0, seed=lambda k: 9 + k)
    study = study_of(tmp_path)
    first, fastest, *_ = texts_of([study])
    assert (
        '(2.0 instead of 2.3 in the scored runs)' in first and ' and 2.0 epochs, before' in fastest
    )
    (table,) = tables_of(study)[:1]
    assert [row[table.head.index('epochs')].text for row in table.rows] == ['2.4', '2.0']
    assert 'Statistics compares the epochs of the scored runs.' in table.note
    assert texts_of([study_of(tmp_path / '1x4')])[0].endswith(
        '(MLPerf score) and 2.3 epochs of the three scored runs.'
    )
    alone = study_of(tmp_path / '2x4')
    assert texts_of([alone])[0].endswith(' and 2.0 epochs.')
    assert not any('scored runs.' in table.note for table in tables_of(alone))


@pytest.mark.parametrize('spread_s, is_near', [(0.0, False), (0.1, False), (3.0, True)])
def test_difference_within_the_spread_of_the_runs_is_hedged(tmp_path, spread_s, is_near):
    write_series(tmp_path / 'a', 0.9, spread_s)
    write_series(tmp_path / 'b', 0.85, spread_s)
    assert (
        texts_of(studies_of(tmp_path))[1].endswith('times (85.0 %) (equal within the spread).')
        == is_near
    )


def test_largest_loss_is_first_and_epochs_are_named(tmp_path):
    write_series(tmp_path, 0.9, nodes=(1,))
    write_set(
        tmp_path / '2x4',
        5,
        nodes=2,
        ranks=8,
        first_s=0.0,
        eval_s=0.0,
        epoch_s=lambda k: 30.0 + k / 500 - 0.004,
        accuracies=(0.1, 0.2, 0.3, 0.8),
    )
    assert texts_of(studies_of(tmp_path))[0].endswith(
        'efficiency 33.3 % = epochs 50.0 % (4.0 instead of 2.0) x rest 66.7 % x images/s per '
        'accelerator 100.0 %.'
    )


def test_systems_without_series_are_sorted_by_time(tmp_path):
    for name, epoch_s in (('a', 60.0), ('b', 30.0), ('c', 90.0)):
        write_set(tmp_path / name, 1, epoch_s=epoch_s, first_s=0.0, eval_s=0.0, seed=ord(name[0]))
    assert texts_of(studies_of(tmp_path)) == [
        'b is the fastest of 3 systems: 0.50 minutes (mean of 1) and 2.0 epochs, before a 1.00 '
        'and c 1.50.',
        '3 of 3 runs of 3 systems converged.',
    ]
    assert texts_of(studies_of(tmp_path / 'a')) == [
        'a takes 1.00 minutes (mean of 1) and 2.0 epochs.',
        '1 of 1 run of 1 system converged.',
    ]


def test_prices_compare_only_systems_with_the_same_target(tmp_path):
    write_series(tmp_path / 'a', 0.9)
    write_set(tmp_path / 'other/box', 1, target=0.749, epoch_s=1.0)
    studies = [replace(s, price_per_node_hour=60.0) for s in studies_of(tmp_path)]
    assert (
        'At 60 per node-hour, a run to 75.90 % on ImageNet costs least on a/1x4, 1.00 (1 node of 4 '
        'accelerators, 1.00 minutes); the fastest is a/2x4, 1.11 (2 nodes of 4 accelerators, 0.56 '
        'minutes).'
    ) in texts_of(studies)
    assert 'per node-hour' not in ''.join(texts_of(studies_of(tmp_path)))


def test_refused_and_unconverged_systems_are_named(tmp_path):
    for name in 'abcde':
        write_set(
            tmp_path / name,
            2,
            seed=lambda k, name=name: 9 * ord(name) + k,
            status='aborted',
            accuracies=(0.1,),
        )
    studies = make_studies([refused(s, f'{"long " * 40}reason') for s in load_run_sets([tmp_path])])
    second, first = texts_of(studies)
    assert first == '0 of 10 runs of 5 systems converged.' and second.startswith(
        'Refused: 5 of 5 systems: a (long'
    )
    assert second.endswith(' and 2 more.') and 'reason' not in second


def test_numbers_have_the_lines_of_the_logs(tmp_path):
    write_series(tmp_path, 0.9)
    first = summarise(studies_of(tmp_path))[0]
    assert [c.text for c in first if c.refs] == [
        '0.56',
        '1.80',
        '90.0 %',
        '90.0 %',
        '100.0 %',
        '100.0 %',
    ]
    assert {path.parent.name for c in first for path, _ in c.refs} == {'1x4', '2x4'}


def test_open_division_is_marked_and_not_ranked_among_closed_sets(tmp_path):
    for name, division, epoch_s in (
        ('a', 'closed', 60.0),
        ('b', 'open', 30.0),
        ('c', 'closed', 90.0),
    ):
        write_set(
            tmp_path / name,
            1,
            division=division,
            target=0.759,
            epoch_s=epoch_s,
            eval_s=0.0,
            seed=ord(name),
        )
    (study,) = studies_of(tmp_path)
    assert texts_of([study])[0] == (
        'a is the fastest of 2 systems in the closed division: 2.00 minutes (mean of 1) '
        'and 2.0 epochs, before c 3.00.'
    )
    table = answer_table(study)
    place = table.head.index('division')
    assert [row[place].text for row in table.rows] == ['closed', 'open', 'closed']
    assert 'division' not in answer_table(study_of(tmp_path / 'b')).head
    assert list(labels_of(study.run_sets).values()) == ['a', 'b (open)', 'c']
