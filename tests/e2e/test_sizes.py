"""A run with sizes by epoch, a moving average and mirrored evaluations, killed and resumed in each
phase."""

import signal

import numpy as np
import pytest
from e2e.training import THIN, arguments, assert_aborted, metrics
from helpers import call, run

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

OPTIONS = (
    '--data.sizes=[16, 24, 32]',
    '--data.eval_size=24',
    '--data.eval_flip=true',
    '--train.ema=0.9',
    '--optimizer.last_layer_lr_factor=0.5',
    '--checkpoint.period_steps=1',
)


@pytest.fixture(scope='module')
def whole(tiny, tmp_path_factory):
    """Folder of the uninterrupted run: five steps of 16, five of 24 and ten of 32 pixels."""
    run_dir = tmp_path_factory.mktemp('whole_sizes')
    assert_aborted(run([*THIN, *arguments(run_dir, tiny, *OPTIONS)]))
    return run_dir


@pytest.mark.parametrize('num_batches', [3, 8, 14])
def test_run_killed_in_each_phase_of_its_sizes_resumes_to_the_bit(
    whole, tiny, tmp_path, num_batches
):
    killed = run([*THIN, f'--die={num_batches}', *arguments(tmp_path, tiny, *OPTIONS)])
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), killed.stderr
    first = load(list_checkpoints(tmp_path / 'checkpoints')[-1])[0].step
    assert num_batches - 1 <= first <= num_batches
    assert_aborted(run([*THIN, 'train', '--resume', tmp_path]))
    assert metrics(tmp_path, 'resumed')[0]['step'] == first
    for stem in ('checkpoints/step_00000020/arrays', 'weights/best', 'weights/last'):
        paths = [d / f'{stem}.npz' for d in (tmp_path, whole)]
        assert paths[0].exists() == paths[1].exists()
        got, expected = (dict(np.load(p)) if p.exists() else {} for p in paths)
        assert got.keys() == expected.keys() and (got or stem.endswith('last'))
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert {m['epoch']: m for m in metrics(tmp_path, 'eval')} == {
        m['epoch']: m for m in metrics(whole, 'eval')
    }


def test_saved_network_is_evaluated_as_in_the_run(thin, whole):
    """The weights are averaged, and their description has the size of evaluations and the mirror
    images."""
    done = call('evaluate', whole, '--which', 'last')
    assert done.returncode == 0 and 'the same' in done.stdout, done.stdout + done.stderr
