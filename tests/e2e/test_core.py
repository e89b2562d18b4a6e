"""Warm-up without side effects, data access after run_start, and TensorBoard scalars."""

import os
from pathlib import Path

import numpy as np
import pytest
from e2e.training import assert_aborted, log_events, metrics, train
from helpers import slow

from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

pytestmark = pytest.mark.usefixtures('thin')
EPOCH = '--train.max_epochs=1'


def comparable_events(run_dir):
    """Return the events of a log without times and source lines."""
    logged = [e for e in log_events(run_dir) if e['key'] != 'tracked_stats']
    for event in logged:
        for key in ('time_ms', 'metadata'):
            value = event.pop(key)
            if key == 'metadata':
                event |= {**value, 'file': '', 'lineno': 0}
    return logged


ACCUMULATE = '--optimizer.name=sgd --train.gradient_accumulation_steps=2 --comm.num_buckets=1'
DROPOUT = (
    '--optimizer.name=sgd --model.name=googlenet --data.image_size=64 --data.resize_shorter=64'
)


@pytest.mark.parametrize(
    'options',
    [
        '',
        slow(ACCUMULATE),
        slow(DROPOUT),
    ],
    ids=['lars', 'accumulate', 'dropout'],
)
def test_warm_up_has_no_side_effects(tiny, tmp_path, options):
    cold, warm = tmp_path / '0', tmp_path / '3'
    for run_dir in (cold, warm):
        words = f'{EPOCH} --train.num_warmup_steps={run_dir.name} {options}'
        assert_aborted(train(run_dir, tiny, words))
    ends = [list_checkpoints(run_dir / 'checkpoints')[-1] for run_dir in (cold, warm)]
    arrays, arrays_warm = (load(end)[1].arrays for end in ends)
    assert set(arrays) == set(arrays_warm)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, arrays_warm[name], err_msg=name)
    assert metrics(cold) == metrics(warm) and comparable_events(cold) == comparable_events(warm)
    (logged,) = (e['value'] for e in log_events(cold) if e['key'] == 'submission_benchmark')
    assert logged == ('googlenet' if options == DROPOUT else 'resnet')


def test_no_data_file_is_opened_before_run_start(tiny, tmp_path, monkeypatch):
    opened, open_file = {}, os.open

    def opening(path, *args, **keys):
        if str(path).endswith(('.rec', '.idx', '.index.npy')):
            log = (tmp_path / 'result_0.txt').read_text()
            opened.setdefault(Path(path).name, '"run_start"' in log)
        return open_file(path, *args, **keys)

    monkeypatch.setattr(os, 'open', opening)
    assert_aborted(train(tmp_path, tiny, f'{EPOCH} --train.num_warmup_steps=2'))
    assert opened.keys() >= {'train.rec', 'validation.rec'} and len(opened) >= 4
    assert all(opened.values())


def test_tensorboard_contains_metrics(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert_aborted(train(tmp_path, tiny, f'{EPOCH} --run.tensorboard=true'))
    kept = EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    steps = metrics(tmp_path, 'train')
    scalars = kept.Scalars('train/loss')
    assert [s.step for s in scalars] == [m['step'] for m in steps]
    np.testing.assert_allclose([s.value for s in scalars], [m['loss'] for m in steps], rtol=1e-5)
    tags = set(kept.Tags()['scalars'])
    norms = 'train/gradient_norm', 'lars_ratio/conv0_weight'
    others = {'train/learning_rate', 'speed/images_per_s_of_epoch'}
    accuracies = {f'accuracy/top{k}_tiny-digits' for k in (1, 5)}
    assert {*norms, *others, *accuracies} < tags
    assert all(t.endswith('_weight') for t in tags if t.startswith('lars_ratio/'))
    assert any(t.startswith('compute_ms_per_step/rank_0_') for t in tags)
    assert all(s.value > 0 for name in norms for s in kept.Scalars(name))
