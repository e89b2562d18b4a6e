"""launch/sweep.sh with local ranks: what is complete is skipped, what fails is shown, and the table says all of it."""
import re

import pytest
from e2e.training import pack_tiny
from helpers import HANG_LIMIT_S, ROOT, run

from mlperf_rn50.mlperf.reader import read_run


@pytest.fixture
def sweep(tmp_path):
    """Runs a sweep of two layouts in a folder of its own."""
    pack_tiny(tmp_path / 'data', 60)
    (tmp_path / 'tiny.yaml').write_text(
        'data: {dir: data, dataset: tiny-digits, num_train: 60, num_val: 50, num_classes: 10, image_size: 32,\n'
        '       resize_shorter: 32, crop: none, num_threads: 1}\n'
        'model: {name: resnet18}\nschedule: {base_lr: 0.02, warmup_epochs: 1, decay_epochs: 9}\n'
        'train: {global_batch_size: 20, eval_period: 1, target_accuracy: 0.01}\n')

    (tmp_path / 'wild.yaml').write_text((tmp_path / 'tiny.yaml').read_text().replace('base_lr: 0.02', 'base_lr: 1e30'))

    def run_sweep(name, *options, study='tiny'):
        return run([ROOT / 'launch/sweep.sh', '--study', study, '--layouts', '1x1 2x1', '--config', name, '--weak',
                    '--no-doctor', *options], cwd=tmp_path, timeout=HANG_LIMIT_S)
    return run_sweep


def row(output, name):
    return next(line.split() for line in output.splitlines() if line.startswith(name))


@pytest.mark.slow
def test_a_sweep(sweep, tmp_path):
    failed = sweep('wild.yaml', '--train.target_accuracy', '1', study='wild')
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count('this run did not converge') == 2  # the second layout ran all the same
    assert row(failed.stdout, '1x1')[1:8] == ['1', '1', '20', '0', '/', '1', '-']
    assert '1x1, 2x1: 1 of 1 runs did not converge' in failed.stdout

    done = sweep('tiny.yaml', '--seeds', 2)
    assert done.returncode == 0, done.stderr
    assert row(done.stdout, '1x1')[1:7] == ['1', '1', '20', '2', '/', '2']
    assert row(done.stdout, '2x1')[1:7] == ['1', '2', '40', '2', '/', '2']  # one host, as the log says
    runs = [read_run(tmp_path / f'logs/tiny/2x1/result_{k}.txt') for k in (0, 1)]
    assert len({r.seed for r in runs}) == 2
    assert [r.optimizer['sgd_opt_base_learning_rate'] for r in runs] == [pytest.approx(0.04)] * 2
    assert all(re.match('2 nodes of 1 ranks, simulated by local ranks of ', r.platform) for r in runs)

    before = sorted(tmp_path.rglob('result_*'))
    again = sweep('tiny.yaml', '--seeds', 2)
    assert again.returncode == 0 and again.stderr.count('complete, skipped') == 2
    assert sorted(tmp_path.rglob('result_*')) == before
