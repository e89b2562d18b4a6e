"""Metrics in the folder of a log: learning rates, bytes read by each node, stragglers."""

import json
from dataclasses import astuple

import pytest
from lines import mllog, run_lines, write_lines
from made_systems import page_of, studies_of, study_of

from mlperf_rn50.analysis.report.detail_tables import reads_table
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.sidecar.metrics import read_learning_rates, read_node_reads, read_stragglers


def epoch(number, new=None, **record_bytes):
    more = {} if new is None else {'new_record_bytes': new}
    return json.dumps({'event': 'epoch', 'epoch': number, 'record_bytes': record_bytes, **more})


def train(time_s, *rates):
    return json.dumps({'event': 'train', 'time_s': time_s, **dict(zip(['learning_rate'], rates))})


def ranks(*stragglers):
    return json.dumps({'event': 'ranks', 'epoch': 1, 'stragglers': stragglers})


@pytest.fixture
def run_of(tmp_path):
    """Function that writes a log and its metrics, and reads the log."""

    def make(*lines):
        (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
        return read_run(
            write_lines(
                tmp_path / 'result_0.txt',
                [*run_lines(), mllog('tracked_stats', 5, {'learning_rate': 0.5}, epoch_num=1)],
            )
        )

    return make


@pytest.mark.parametrize(
    'lines, expected',
    [
        (
            [
                '{"event": "train", "step": 20}',
                epoch(1, {'n1': 10, 'n2': 30}, n2=30, n1=10),
                epoch(2, {'n1': 4, 'n2': 0}, n1=20, n2=30),
                epoch(3, {'n1': 2, 'n2': 0}, n1=12, n2=30),
            ],
            [('n1', 10, 10, 16, 3, 2, 4), ('n2', 30, 30, 30, 0, 2, 4)],
        ),
        # epoch 2 was repeated
        ([epoch(2, n1=7), epoch(1, n1=5), epoch(2, n1=9)], [('n1', 5, None, 9, None, 2, 3)]),
        (
            [epoch(1, n1=5), epoch(2, {'n1': 3}, n1=5), epoch(3, n1=5)],
            [('n1', 5, None, 5, None, 1, 3)],
        ),
        (
            [
                *('not json', '[' * 100_000, '[]'),
                *(epoch(number, n1=5) for number in (0, 1.5, '1', 10**7)),
                *(epoch(1, n1=count) for count in (-1, 'many', 10**19)),
                '{"event": "epoch", "epoch": 1, "record_bytes": [1]}',
                '{"event": "eval", "epoch": 9, "record_bytes": {"n1": 3}}',
                epoch(1, n1=6),
            ],
            [('n1', 6, None, None, None, 13, 13)],
        ),
    ],
)
def test_reads_are_summed_by_node(run_of, lines, expected):
    found = map(astuple, read_node_reads(run_of(*lines)))
    assert [(host, *rest) for host, _, *rest in found] == expected


def test_learning_rates_come_from_the_metrics_or_else_the_log(run_of):
    run = run_of(train(1, 0.5), 'rubbish', train(2), train(3, 0))
    assert read_learning_rates(run) == ((1, 0.5), (3, 0))
    run.path.with_name('metrics.jsonl').unlink()
    assert read_learning_rates(run) == ((5, 0.5),)


def test_report_shows_the_reads_of_each_node(run_of, tmp_path):
    run_of('[]')
    study = study_of(tmp_path)
    assert not reads_table(study).rows and 'Training records' not in render_text(
        make_report([study])
    )
    read = {'n1': 2_000_000, 'n<2': 3_000_000}
    run_of(epoch(1, read, **read), epoch(2, {'n1': 500_000}, **read))
    assert [[c.text for c in row[1:]] for row in reads_table(study).rows] == [
        ['n1', '2.00', '100.0 %', '2.00', '25.0 %'],
        ['n<2', '3.00', '100.0 %', '3.00', '-'],
    ]
    assert 'Training records read by each node per epoch' in render_text(make_report([study]))
    page = page_of([study], tmp_path)
    assert 'n&lt;2' in page and 'metrics.jsonl' in page  # numbers link to the metrics


def test_stragglers_are_listed_once_with_their_frequency(run_of):
    invalid = [
        json.dumps({'event': 'ranks', 'stragglers': s})
        for s in (5, None, {'a': 1}, [5], ['x' * 5000], [None])
    ]
    run = run_of(
        *invalid,
        ranks(),
        ranks('rank 1 on h2 is slow: 9 ms'),
        ranks('rank 1 on h2 is slow: 8 ms', 'rank 0 on h1 is slow'),
    )
    assert [f.text for f in read_stragglers(run)] == [
        'rank 1 on h2 is slow: 8 ms (at 2 of 3 evaluations)',
        'rank 0 on h1 is slow (at 1 of 3 evaluations)',
    ]
    assert 'result_0.txt: rank 1 on h2 is slow: 8 ms (at 2 of 3' in render_text(
        make_report(studies_of(run.path))
    )
