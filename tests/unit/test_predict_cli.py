"""predict as a command: options, mistakes, exit codes, and files."""
import json
import re
import shlex

import pytest
from benches import bench_allreduce, bench_train
from helpers import PUBLISHED, ROOT, call
from lines import write_set

A100 = 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet'
PAGE = (ROOT / 'docs/predict.md').read_text()
SHOWN = re.findall(r'```bash\nmlperf-rn50 (predict [^\n]*?)(?: +#[^\n]*)?\n```\n\n```text\n(.*?)\n```', PAGE, re.DOTALL)
assert len(SHOWN) == 2, 'docs/predict.md shows a prediction and the errors'


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """1 and 2 nodes of two ranks, 64 images a step of each."""
    folder = tmp_path_factory.mktemp('study')
    for nodes in (1, 2):
        write_set(folder / f'{nodes}x2', 2, nodes=nodes, ranks=2 * nodes, batch=128 * nodes, accelerators=False,
                  train_samples=6400, dataset='digits', target=0.75)
    return folder


def rows(*words):
    done = call('predict', *words, '--format', 'json')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)['predictions']


def test_the_options_reach_the_prediction(study):
    assert [r['global_batch_size'] for r in rows(study, '--layouts', '1x2 1x4')] == [128, 256]
    assert [r['global_batch_size'] for r in rows(study, '--layouts', '1x2 1x4', '--strong')] == [128, 128]
    assert rows(study, '--layouts', '1x2', '--local-batch-size', 8)[0]['global_batch_size'] == 16
    assert rows(study, '--layouts', '1x2', '--global-batch-size', 64)[0]['minutes'] is None
    assert rows(study, '--layouts', '1x2', '--target', 0.9)[0]['epochs'] is None  # no run trained that far
    assert rows(study, '--layouts', '1x2', '--optimizer', 'lars')[0]['epochs'] is None
    slow, fast = (rows(study, '--layouts', '2x2', '--link-gbit-s', x)[0]['exchange_s'] for x in (1, 10))
    assert slow == pytest.approx(10 * fast)
    assert rows(study, '--layouts', '1x2', '--system', '2x2', '--link-gbit-s', 10)[0]['measured_minutes'] is not None


def test_benches_are_predicted_from(tmp_path):
    step, exchange = tmp_path / 'step.json', tmp_path / 'exchange.json'
    step.write_text(json.dumps(bench_train({'image_size': 32, 'local_batch_size': 16})))
    exchange.write_text(json.dumps(bench_allreduce(4, 4)))
    [row] = rows(step, exchange, '--layouts', '4x1', '--local-batch-size', 16)
    assert row['minutes'] is None
    assert (row['compute_s'], row['exchange_s'], row['step_s']) == pytest.approx((0.3, 0.8, 1.1))
    step.write_text(json.dumps(bench_train({'local_batch_size': 26}, gpus=['A100'])))
    [row] = rows(step, '--layouts', '8x8', '--optimizer', 'lars')  # 1,664 images of ImageNet
    assert row['recipe']['opt_name'] == 'lars' and row['minutes'] > 0 and row['epochs_source']


@pytest.mark.needs_published
def test_a_tree_of_published_logs_is_predicted_and_judged():
    done = call('predict', '--validate', PUBLISHED)
    assert done.returncode == 0 and '1 predicted: ' in done.stdout and done.stdout.count(': not predicted: ') == 2


@pytest.mark.parametrize('words, said', [
    ([], 'SOURCE, --layouts NxM'), ([A100, '--layouts', '0x8'], '0x8'), ([A100, '--layouts', '1x' + '9' * 5000], '1x9'),
    ([A100, '--layouts', '999999x9'], '--layouts'), ([A100, '--layouts', '1x8', '--weak', '--strong'], '--strong'),
    ([A100, '--layouts', ' '.join(f'{i}x1' for i in range(1, 1002))], '--layouts: got 1,001, expected at most 1,000'),
    ([A100, '--layouts', '1x8', '--global-batch-size', '0'], '10000000'),
    ([A100, '--layouts', '1x8', '--out', ''], '--out'), ([A100, '--layouts', '1x8', '--link-gbit-s', 'nan'], 'nan'),
    ([A100, '--layouts', '1x8', '--link-gbit-s', '0'], 'got 0'),
    (['--validate', ''], '--validate'), (['--validate', '--layouts', '1x2'], '--layouts')])
def test_a_mistake_is_one_line_and_ends_with_2(words, said):
    done = call('predict', *words)
    assert (done.returncode, done.stdout) == (2, '') and said in done.stderr
    assert done.stderr.startswith('mlperf-rn50: ') and done.stderr.count('\n') == 1 and len(done.stderr) < 400


def test_the_exit_code_tells_whether_anything_is_predicted_and_the_files_have_it_all(study, tmp_path):
    done = call('predict', study, '--layouts', '2x2', '--out', tmp_path, '--format', 'markdown')
    assert done.returncode == 1 and done.stderr == f'mlperf-rn50: wrote {tmp_path}\n'
    assert (tmp_path / 'prediction.md').read_text() == done.stdout
    assert json.loads((tmp_path / 'prediction.json').read_text())['format'] == 'mlperf-rn50 predict 1'
    assert call('predict', study, '--layouts', '1x2 2x2').returncode == 0
    assert call('predict', '--validate', study).returncode == 1


@pytest.mark.parametrize('command, text', SHOWN, ids=[c[:40] for c, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(command, text):
    assert call(*shlex.split(command)).stdout.rstrip() == text, f'copy what mlperf-rn50 {command} prints'
