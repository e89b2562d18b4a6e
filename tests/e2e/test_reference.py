"""Comparison of a run with reference runs and published recipes, and the stop of a run that is
behind."""

import json

import pytest
from e2e.training import metrics, train
from helpers import call
from lines import write_set

from mlperf_rn50.analysis.recipe import differences
from mlperf_rn50.runfolder.names import list_checkpoints

pytestmark = pytest.mark.slow


def reference(folder, *accuracies):
    return write_set(
        folder,
        3,
        accuracies=lambda k: [a + k / 1000 for a in accuracies],
        train_samples=150,
        eval_samples=50,
        target=accuracies[-1],
        dataset='tiny-digits',
    )


def test_run_far_behind_stops_with_checkpoint_and_can_resume(tiny, tmp_path, monkeypatch):
    # ImageNet is not available to the tests
    monkeypatch.setattr(differences, 'is_imagenet', lambda config: True)
    known, run_dir = reference(tmp_path / 'known', 0.97, 0.98, 0.985, 0.99), tmp_path / 'run'
    options = '--run.stop_when_behind=true --checkpoint.period_epochs=0'
    done = train(run_dir, tiny, f'--run.reference={known} {options}')
    assert done.returncode == 1, done.stderr
    found = [(r['epoch'], r['below'], r['behind']) for r in metrics(run_dir, 'course')]
    assert found == [(1, True, False), (2, True, True)]
    assert [m['status'] for m in metrics(run_dir, 'end')] == ['aborted']
    assert done.stderr.count('behind: ') == 1 and 'aborted' in done.stdout
    [line] = [x for x in done.stderr.splitlines() if 'published lars set' in x]
    assert 'got 32;' in line and line in (run_dir / 'train.log').read_text().splitlines()
    [checkpoint] = list_checkpoints(run_dir / 'checkpoints')
    assert json.loads((checkpoint / 'state.json').read_text())
    assert (run_dir / 'weights' / 'best.npz').exists()
    options = '--run.stop_when_behind=false', '--train.max_epochs=3'
    again = call('train', '--resume', run_dir, *options)
    assert again.returncode == 1, again.stderr
    found = [(r['epoch'], r['behind']) for r in metrics(run_dir, 'course')]
    assert found == [(1, False), (2, True), (3, True)]
