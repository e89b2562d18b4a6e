"""Saved weights: contents, failures after run_stop, and a start from saved weights."""

import numpy as np
import pytest
from e2e.training import (
    NUM_VAL,
    arguments,
    assert_aborted,
    assert_one_line,
    log_events,
    metrics,
    thin_ranks,
)
from helpers import call, run

from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.model.weights import find_weights, load_weights
from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train import loop
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
from mlperf_rn50.train.checkpoint.checkpoint import load
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.run_events import Ended
from mlperf_rn50.train.sinks.metrics_file import Metrics

pytestmark = pytest.mark.usefixtures('thin')
CONVERGES = ['--train.target_accuracy=0.01', '--checkpoint.period_epochs=0']


def events_of(run_dir, key):
    return [e for e in log_events(run_dir) if e['key'] == key]


@pytest.fixture(scope='module')
def converged(thin, tiny, tmp_path_factory):
    """Folder of a converged run; tests must not modify it."""
    run_dir = tmp_path_factory.mktemp('converged') / 'run'
    assert call(*arguments(run_dir, tiny, *CONVERGES)).returncode == 0
    return run_dir


def test_converged_run_keeps_one_network_as_best_and_last(converged):
    assert {p.name for p in (converged / 'weights').iterdir()} == {'best.npz', 'best.json'}
    kept, _ = load_weights(converged)
    [evaluated] = metrics(converged, 'eval')
    assert (kept.is_best, kept.is_last, kept.epoch, kept.seed) == (True, True, 1, 3)
    assert (kept.num_top1, kept.num_top5, kept.num_images) == (
        evaluated['num_top1'],
        evaluated['num_top5'],
        NUM_VAL,
    )
    assert kept.classes == tuple('0123456789')


def test_aborted_run_keeps_best_and_last_network(tiny, tmp_path, monkeypatch):
    counts = iter([5, 9, 9, 7])
    monkeypatch.setattr(loop, 'evaluate', lambda *_: Accuracy(next(counts), 20, NUM_VAL))
    assert_aborted(call(*arguments(tmp_path, tiny)))
    best, best_arrays = load_weights(tmp_path)
    assert (best.epoch, best.num_top1, best.is_last) == (2, 9, False)
    last, arrays = load_weights(find_weights(tmp_path, 'last'))
    assert (last.epoch, last.is_last, last.is_best, last.num_top1) == (4, True, False, 7)
    checkpoint = load(list_checkpoints(tmp_path / 'checkpoints')[-1])[1].arrays
    for name, array in arrays.items():
        # A checkpoint has running variances in float64.
        tolerance = 2e-7 if name.endswith('running_var') else 0
        np.testing.assert_allclose(array, checkpoint[f'model/{name}'], tolerance, err_msg=name)
    assert any((array != best_arrays[name]).any() for name, array in arrays.items())


@pytest.mark.parametrize(
    'owner, name, message',
    [
        (BackgroundWriter, 'finish', 'the disk is full'),
        (Metrics, 'handle', 'the disk is full'),
        (Metrics, 'handle', 'cannot write the weights'),
    ],
    ids=['writer', 'metrics', 'weights'],
)
def test_run_stop_and_weights_survive_later_failures(
    tiny, tmp_path, monkeypatch, owner, name, message
):
    original, is_in_the_way = getattr(owner, name), 'weights' in message

    def fail(self, *event):
        if is_in_the_way:
            (tmp_path / 'weights').write_text('a file in the way')
        elif not event or isinstance(event[0], Ended):
            raise CheckpointError('the disk is full')
        original(self, *event)

    monkeypatch.setattr(owner, name, fail)
    done = call(*arguments(tmp_path, tiny, *CONVERGES))
    assert done.returncode == 2 and message in done.stderr
    assert [e['metadata']['status'] for e in events_of(tmp_path, 'run_stop')] == ['success']
    assert is_in_the_way or load_weights(tmp_path)[0].is_last


def test_run_starts_from_weights_of_earlier_run(converged, tiny, tmp_path):
    done = call(
        *arguments(
            tmp_path,
            tiny,
            '--train.max_epochs=1',
            f'--init-weights={converged}',
            '--schedule.base_lr=1e-9',
            '--optimizer.weight_decay=0',
        )
    )
    assert_aborted(done)
    assert f'starts from {converged}' in done.stderr
    [event] = events_of(tmp_path, 'initial_weights')
    assert (
        str(converged) in event['value']
        and 'SHA-256' in event['value']
        and event['metadata']['notes'] == []
    )
    (before, after) = (load_weights(p)[1] for p in (converged, tmp_path))
    for name, array in before.items():
        if 'running' not in name:
            np.testing.assert_allclose(after[name], array, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('num_ranks', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_different_number_of_classes_reinitialises_last_layer_on_every_rank(
    converged, tiny, tmp_path, num_ranks
):
    words = arguments(
        tmp_path,
        tiny,
        '--train.max_epochs=1',
        f'--init-weights={converged}',
        '--data.synthetic=true',
        '--data.num_classes=7',
    )
    done = run(thin_ranks(num_ranks, *words)) if num_ranks else call(*words)
    assert_aborted(done)
    note = (
        'the weights are for 10 classes, the data has 7; the last layer (fc1_weight, fc1_bias) is '
        'newly '
        'initialised'
    )
    assert note in done.stderr and events_of(tmp_path, 'initial_weights')[0]['metadata'][
        'notes'
    ] == [note]


@pytest.mark.parametrize(
    'options, message',
    [
        (['--init-weights=/nonexistent'], '/nonexistent: no such file or folder'),
        (['--model.name=resnet34'], 'expected the same model.name'),
        (
            ['--run.submission_division=closed', '--data.last_batch=wrap'],
            'in the closed division, expected null',
        ),
    ],
)
def test_unusable_weights_are_refused_in_one_line(converged, tiny, tmp_path, options, message):
    done = call(*arguments(tmp_path, tiny, f'--init-weights={converged}', *options))
    assert_one_line(done, 2, message)


def test_run_without_a_commit_states_the_reason(thin, tiny, tmp_path, monkeypatch):
    (tmp_path / 'bin').mkdir()
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))  # no git
    done = call(*arguments(tmp_path / 'run', tiny, '--train.max_epochs=1'))
    reason = 'git: No such file or directory'
    assert f'the commit of the program is unknown: {reason}; keep a copy of the code' in done.stderr
    assert (
        reason in (tmp_path / 'run/train.log').read_text()
        and reason in (tmp_path / 'run/env.json').read_text()
    )
