"""Metrics in the folder of a log: learning rates, bytes read by each node, stragglers."""

import json
from dataclasses import astuple

import pytest
from helpers import json_table
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


def reads_of(run):
    return [[host, *rest] for host, _, *rest in map(astuple, read_node_reads(run))]


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


# epochs: number, records read by each node, and those of them that were new
# expected: of a node, ending with the lines of the first and the last epoch
@pytest.mark.parametrize(
    'epochs, expected',
    json_table("""
[[1, {"b": 3, "a": 1}, {"a": 1, "b": 3}], [2, {"a": 2, "b": 3}, {"a": 4, "b": 0}], \
[3, {"a": 12, "b": 3}, {"a": 2, "b": 0}]] | [["a", 1, 1, 7, 3, 1, 3], ["b", 3, 3, 3, 0, 1, 3]]
# epoch 2 was repeated
[[2, {"n1": 7}], [1, {"n1": 5}], [2, {"n1": 9}]]            | [["n1", 5, null, 9, null, 2, 3]]
[[1, {"n1": 5}], [2, {"n1": 5}, {"n1": 3}], [3, {"n1": 5}]] | [["n1", 5, null, 5, null, 1, 3]]
"""),
)
def test_reads_are_summed_by_node(run_of, epochs, expected):
    lines = (epoch(number, *new, **read) for number, read, *new in epochs)
    assert reads_of(run_of(*lines)) == expected


def test_reads_of_an_epoch_that_was_resumed_within_are_left_out(run_of):
    def resumed(trained):
        return json.dumps({'event': 'resumed', 'step': 9, 'epoch': trained})

    lines = [epoch(1, n1=10), epoch(2, n1=8), resumed(2.5), epoch(3, n1=5), epoch(4, n1=12)]
    assert reads_of(run_of(*lines)) == [['n1', 10, None, 10, None, 1, 5]]
    assert reads_of(run_of(resumed(0.5), *lines[:2])) == []  # the first epoch differs from others
    assert len(reads_of(run_of(resumed(0.0), *lines[:2]))) == 1


def test_lines_that_are_no_reads_are_skipped(run_of):
    lines = [
        *('not json', '[' * 100_000, '[]', '{"event": "train", "step": 20}'),
        *(epoch(number, n1=5) for number in (0, 1.5, '1', 10**7)),
        *(epoch(1, n1=count) for count in (-1, 'many', 10**19)),
        '{"event": "epoch", "epoch": 1, "record_bytes": [1]}',
        '{"event": "eval", "epoch": 9, "record_bytes": {"n1": 3}}',
    ]
    assert reads_of(run_of(*lines, epoch(1, n1=6))) == [['n1', 6, None, None, None, 14, 14]]


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
