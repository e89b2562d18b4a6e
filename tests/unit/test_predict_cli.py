"""predict as a command: what it takes, what it refuses and with which exit code, and what it writes."""
import json

import pytest
from benches import bench_allreduce, bench_train
from helpers import PUBLISHED, call
from lines import write_set

A100 = 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet'


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """1 and 2 nodes of two ranks, 64 images a step of each."""
    folder = tmp_path_factory.mktemp('study')
    for nodes in (1, 2):
        write_set(folder / f'{nodes}x2', 2, nodes=nodes, ranks=2 * nodes, batch=128 * nodes, accelerators=False,
                  train_samples=6400, dataset='digits', target=0.75)
    return folder


@pytest.mark.parametrize('words, said', [
    ([], 'SOURCE, --layouts NxM: missing'), (['--layouts', '1x2'], 'SOURCE: missing'),
    ([A100], '--layouts NxM: missing'),
    ([A100, '--layouts', '1y8'], '--layouts: got 1y8, expected nodes x ranks, such as 2x4'),
    ([A100, '--layouts', '1x8 1x8'], '--layouts: 1x8 is named twice'),
    ([A100, '--layouts', ' '], '--layouts: got nothing, expected nodes x ranks'),
    ([A100, '--layouts', '0x8'], '--layouts: got 0x8'),
    ([A100, '--layouts', '1x' + '9' * 5000], '--layouts: got 1x9999999999999…, expected nodes x ranks'),
    ([A100, '--layouts', '999999x9'], '--layouts: got 999999x9, expected at most 1,000,000 accelerators'),
    ([A100, '--layouts', '1x8', '--weak', '--strong'], 'argument --strong: not allowed with argument --weak'),
    ([A100, '--layouts', '1x8', '--strong', '--global-batch-size', '8'], 'not allowed with argument'),
    ([A100, '--layouts', '1x8', '--global-batch-size', '0'], 'got 0, expected a whole number from 1 to 10000000'),
    ([A100, '--layouts', '1x8', '--local-batch-size', '1e3'], 'got 1e3, expected a whole number from 1 to 10000000'),
    ([A100, '--layouts', '1x8', '--link-gbit-s', 'nan'], "invalid number above 0.001, up to 1e+06, value: 'nan'"),
    ([A100, '--layouts', '1x8', '--link-gbit-s', '5e-324'], "above 0.001, up to 1e+06, value: '5e-324'"),
    ([A100, '--layouts', '1x8', '--target', '74.9'], 'got 74.9, expected a fraction such as 0.759, not per cent'),
    ([A100, '--layouts', '1x8', '--price-per-node-hour', '-1'], 'argument --price-per-node-hour: got -1, expected'),
    ([A100, '--layouts', '1x8', '--optimizer', 'adam'], "invalid choice: 'adam'"),
    ([A100, '--layouts', '1x8', '--system', 'x'], '--system: got x, expected a SOURCE that is a folder'),
    (['v0.7/NVIDIA/dgxa100', '--layouts', '1x8'], 'v0.7/NVIDIA/dgxa100: neither a file or folder nor a published'),
    (['--validate', '--layouts', '1x2'], '--validate: got --layouts beside it, expected a TREE or nothing'),
    (['--validate', 'x', '--format', 'json'], '--validate: got --format json beside it'),
    (['--validate', '/nonexistent'], '/nonexistent: no such folder')])
def test_a_mistake_is_one_line_and_ends_with_2(words, said):
    done = call('predict', *words)
    assert (done.returncode, done.stdout) == (2, '') and said in done.stderr
    assert done.stderr.startswith('mlperf-rn50: ') and done.stderr.count('\n') == 1 and len(done.stderr) < 400


def test_a_published_system_by_its_name():
    done = call('predict', A100, '--layouts', '1x8', '2x8', '--strong', '--price-per-node-hour', 20)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'Top-1 75.90 % on ImageNet' in done.stdout and '- Knee: ' in done.stdout
    [line] = [x for x in done.stdout.splitlines() if x.startswith('2x8 ') and ' min' not in x][:1]
    assert line.split()[:4] == ['2x8', '16', '3,264', '41']


def test_where_all_is_refused_it_ends_with_1_and_where_some_is_with_0(study):
    refused = call('predict', study, '--layouts', '2x2')
    assert refused.returncode == 1 and '2x2       refused: what joins the nodes is not known' in refused.stdout
    some = call('predict', study, '--layouts', '1x2 2x2')
    assert some.returncode == 0 and '2x2: refused: ' in some.stdout and 'digits (not ImageNet)' in some.stdout


def test_the_options_reach_the_prediction(study):
    def rows(*words):
        done = call('predict', study, '--format', 'json', *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)['predictions']
    assert [r['global_batch_size'] for r in rows('--layouts', '1x2 1x4')] == [128, 256]
    assert [r['global_batch_size'] for r in rows('--layouts', '1x2 1x4', '--strong')] == [128, 128]
    assert rows('--layouts', '1x2', '--local-batch-size', 8)[0]['global_batch_size'] == 16
    assert rows('--layouts', '1x2', '--global-batch-size', 64)[0]['minutes'] is None
    assert rows('--layouts', '1x2', '--target', 0.9)[0]['epochs'] is None  # nobody trained that far
    assert rows('--layouts', '1x2', '--optimizer', 'lars')[0]['epochs'] is None
    slow, fast = (rows('--layouts', '2x2', '--link-gbit-s', x)[0]['exchange_s'] for x in (1, 10))
    assert slow == pytest.approx(10 * fast)
    assert rows('--layouts', '1x2', '--system', '2x2', '--link-gbit-s', 10)[0]['measured_minutes'] is not None


def test_what_benches_measured_is_predicted_from(tmp_path):
    step, exchange = tmp_path / 'step.json', tmp_path / 'exchange.json'
    step.write_text(json.dumps(bench_train({'image_size': 32, 'local_batch_size': 16})))
    exchange.write_text(json.dumps(bench_allreduce(4, 4)))
    done = call('predict', step, exchange, '--layouts', '4x1', '--local-batch-size', 16, '--format', 'json')
    [row] = json.loads(done.stdout)['predictions']
    assert done.returncode == 0 and row['minutes'] is None
    assert (row['compute_s'], row['exchange_s'], row['step_s']) == pytest.approx((0.3, 0.8, 1.1))
    step.write_text(json.dumps(bench_train({'local_batch_size': 26}, gpus=['A100'])))
    done = call('predict', step, '--layouts', '8x8', '--optimizer', 'lars', '--format', 'json')
    [row] = json.loads(done.stdout)['predictions']  # 1,664 images of ImageNet
    assert row['recipe']['opt_name'] == 'lars' and row['minutes'] > 0 and row['epochs_source']


def test_a_file_of_a_bench_that_nobody_may_trust_is_one_line(tmp_path):
    (tmp_path / 'a.json').write_text('{"format": 1e999}')
    done = call('predict', tmp_path / 'a.json', '--layouts', '1x1')
    assert done.returncode == 2 and 'format: got Infinity, expected a text' in done.stderr


def test_everything_is_written_to_a_folder(study, tmp_path):
    done = call('predict', study, '--layouts', '1x2 2x2', '--link-gbit-s', 10, '--out', tmp_path / 'out', '--format',
                'markdown')
    assert done.returncode == 0 and done.stderr == f'mlperf-rn50: wrote {tmp_path / "out"}\n'
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {
        'prediction.json', 'prediction.md', 'prediction.svg', 'prediction_dark.svg', 'prediction.png',
        'prediction_dark.png'}
    assert (tmp_path / 'out/prediction.md').read_text() == done.stdout
    assert json.loads((tmp_path / 'out/prediction.json').read_text())['format'] == 'mlperf-rn50 predict 1'


def test_the_packaged_table_is_predicted_and_judged():
    done = call('predict', '--validate')
    assert done.returncode == 0 and '7 predicted: absolute error ' in done.stdout
    assert 'v0.5 dgx2h_multi_ngc18.11_mxnet: not predicted: ' in done.stdout
    assert '| v0.7 ' in call('predict', '--validate', '--format', 'markdown').stdout.replace('    ', ' ')


@pytest.mark.needs_published
def test_a_tree_of_published_logs_is_predicted_and_judged():
    done = call('predict', '--validate', PUBLISHED)
    assert done.returncode == 0 and '1 predicted: ' in done.stdout and done.stdout.count(': not predicted: ') == 2


def test_a_tree_without_a_pair_fails(study):
    done = call('predict', '--validate', study)
    assert done.returncode == 1
