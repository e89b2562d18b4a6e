"""What a run's metrics say beside its log: learning rates, and what each node read."""
import json

import pytest
from sample_log import write_run

from mlperf_rn50.mlperf.metrics import read_learning_rates, read_node_reads, read_stragglers
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.study.report_page import render_html
from mlperf_rn50.study.report_tables import reads_table
from mlperf_rn50.study.report_text import render_table
from mlperf_rn50.study.scaling import make_studies
from mlperf_rn50.study.systems import load_systems


def epoch(number, new=None, **record_bytes):
    more = {} if new is None else {'new_record_bytes': new}
    return json.dumps({'event': 'epoch', 'epoch': number, 'record_bytes': record_bytes, **more})


@pytest.fixture
def run_of(tmp_path):
    """A function that writes a log and metrics of some lines beside it, and reads the log."""
    def make(*lines):
        (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
        log = tmp_path / 'result_0.txt'
        return read_run(log if log.exists() else write_run(log))
    return make


def summary(node):
    return (node.host, node.first_bytes, node.first_new_bytes, node.later_bytes, node.later_new_bytes,
            node.first_line, node.last_line)


def test_reads_are_summed_up_by_node(run_of):
    run = run_of(json.dumps({'event': 'train', 'step': 20}),
                 epoch(1, {'n1': 10, 'n2': 30}, n2=30, n1=10), epoch(2, {'n1': 4, 'n2': 0}, n1=20, n2=30),
                 epoch(3, {'n1': 2, 'n2': 0}, n1=12, n2=30))
    assert [summary(n) for n in read_node_reads(run)] == [('n1', 10, 10, 16, 3, 2, 4), ('n2', 30, 30, 30, 0, 2, 4)]


def test_an_epoch_that_is_trained_again_counts_once(run_of):
    run = run_of(epoch(2, n1=7), epoch(1, n1=5), epoch(2, n1=9))
    assert [summary(n) for n in read_node_reads(run)] == [('n1', 5, None, 9, None, 2, 3)]


def test_a_single_epoch_has_no_later_ones(run_of):
    assert [summary(n) for n in read_node_reads(run_of(epoch(1, n1=5)))] == [('n1', 5, None, None, None, 1, 1)]


def test_rubbish_is_left_out(run_of):
    run = run_of('not json', '[' * 100_000, '[]',
                 epoch(0, n1=5), epoch(1.5, n1=5), epoch('1', n1=5), epoch(10**7, n1=5),
                 epoch(1, n1=-1, n2='many', n3=None, n4=True, n5=1e400, n6=0.5, n7=10**19),
                 json.dumps({'event': 'epoch', 'epoch': 1, 'record_bytes': [1]}),
                 json.dumps({'event': 'eval', 'epoch': 9, 'record_bytes': {'n1': 3}}),
                 epoch(1, ['no', 'object'], n1=6), epoch(2, {'n1': 'x'}, n1=6))
    assert [summary(n) for n in read_node_reads(run)] == [('n1', 6, None, 6, None, 11, 12)]


def test_no_more_nodes_than_a_cluster_has(run_of):
    run = run_of(epoch(1, **{f'n{i}': 1 for i in range(1000)}), epoch(2, **{f'm{i}': 1 for i in range(1000)}))
    assert len(read_node_reads(run)) == 256


def test_no_file_no_reads(tmp_path):
    assert read_node_reads(read_run(write_run(tmp_path / 'result_0.txt'))) == []


def test_learning_rates_are_those_of_the_metrics_else_of_the_log(run_of):
    run = run_of('{"time_s": 1, "learning_rate": 0.5}', 'rubbish', '{"time_s": 2}', '{"time_s": 3, "learning_rate": 0}')
    assert read_learning_rates(run) == ((1, 0.5), (3, 0))
    assert read_learning_rates(run_of('[]')) == run.learning_rates != ()


def test_the_report_shows_what_each_node_read(run_of, tmp_path):
    log = run_of('[]').path
    [study] = make_studies(load_systems([tmp_path]), None)
    assert not reads_table(study).rows and 'Training records' not in render_table([study])
    (log.parent / 'metrics.jsonl').write_text('\n'.join([
        epoch(1, {'n1': 2e6, 'n<2': 3e6}, **{'n1': 2e6, 'n<2': 3e6}),
        epoch(2, {'n1': 0.5e6, 'n<2': 0}, **{'n1': 2e6, 'n<2': 3e6})]) + '\n')
    table = reads_table(study)
    assert [[c.text for c in row[1:]] for row in table.rows] == [['n1', '2.00', '100.0 %', '2.00', '25.0 %'],
                                                                 ['n<2', '3.00', '100.0 %', '3.00', '0.0 %']]
    assert 'Training records that each node read, an epoch' in render_table([study])
    page = render_html([study], [[]], tmp_path)
    assert 'n&lt;2' in page and 'metrics.jsonl' in page  # its numbers lead to their lines


def test_a_report_of_metrics_without_new_ones(run_of, tmp_path):
    run_of(epoch(1, n1=2e6))
    [study] = make_studies(load_systems([tmp_path]), None)
    assert [c.text for c in reads_table(study).rows[0][1:]] == ['n1', '2.00', '-', '-', '-']


def ranks(*stragglers):
    return json.dumps({'event': 'ranks', 'epoch': 1, 'stragglers': list(stragglers)})


def test_slow_ranks_are_told_once_with_how_often(run_of):
    run = run_of(ranks(), ranks('rank 1 on h2 is slow: 9 ms'),
                 ranks('rank 1 on h2 is slow: 8 ms', 'rank 0 on h1 is slow'))
    assert read_stragglers(run) == ['rank 1 on h2 is slow: 8 ms (at 2 of 3 evaluations)',
                                    'rank 0 on h1 is slow (at 1 of 3 evaluations)']
    assert '- rank 1 on h2 is slow: 8 ms (at 2 of 3' in render_table(make_studies(load_systems([run.path]))).replace(
        f'{run.path.parent.name}: result_0.txt: ', '')


@pytest.mark.parametrize('wrong', [5, None, {'a': 1}, [5], ['x' * 1000], [None, ['rank']]])
def test_stragglers_of_any_shape_are_no_reason_to_fail(run_of, wrong):
    assert read_stragglers(run_of(json.dumps({'event': 'ranks', 'stragglers': wrong}))) == []
