"""Warm-up without side effects, data access after run_start, and TensorBoard scalars."""

import os
from pathlib import Path

import numpy as np
import pytest
from e2e.training import STEPS_PER_EPOCH, arguments, assert_aborted, log_events, metrics
from helpers import assert_near, call

from mlperf_rn50.data import records
from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train.checkpoint.checkpoint import load

pytestmark = pytest.mark.usefixtures('thin')
EPOCH = '--train.max_epochs=1'


def comparable_events(run_dir):
    """Return the events of a log without times and source lines."""
    events = [e for e in log_events(run_dir) if e['key'] != 'tracked_stats']
    for event in events:
        for name in ('file', 'lineno'):
            del event['metadata'][name]
    return [(e['key'], e['value'], e['metadata']) for e in events]


ACCUMULATING = '--optimizer.name=sgd --train.gradient_accumulation_steps=2 --comm.num_buckets=1'
WITH_DROPOUT = (
    '--model.name=googlenet --optimizer.name=sgd --data.image_size=64 --data.resize_shorter=64'
)


@pytest.mark.parametrize(
    'options, benchmark',
    [
        ('', 'resnet'),
        pytest.param(ACCUMULATING, 'resnet', marks=pytest.mark.slow),
        pytest.param(WITH_DROPOUT, 'googlenet', marks=pytest.mark.slow),
    ],
    ids=['lars', 'accumulate', 'dropout'],
)
def test_warm_up_has_no_side_effects(tiny, tmp_path, options, benchmark):
    cold, warm = tmp_path / '0', tmp_path / '3'
    for run_dir in (cold, warm):
        steps = f'--train.num_warmup_steps={run_dir.name}'
        assert_aborted(call(*arguments(run_dir, tiny, EPOCH, steps, *options.split())))
    arrays, arrays_warm = (
        load(list_checkpoints(run_dir / 'checkpoints')[-1])[1].arrays for run_dir in (cold, warm)
    )
    assert_near(arrays_warm, arrays, rtol=0, share=0)
    events = comparable_events(cold)
    assert metrics(cold) == metrics(warm) and events == comparable_events(warm)
    assert [value for key, value, _ in events if key == 'submission_benchmark'] == [benchmark]


def test_no_data_file_is_opened_or_read_before_run_start(tiny, tmp_path, monkeypatch):
    opened, read_after, open_file, read = [], [], os.open, records.RecordFile.read

    def is_started():
        return '"run_start"' in (tmp_path / 'result_0.txt').read_text()

    def opening(path, *args, **keys):
        if str(path).endswith(('.rec', '.idx', '.index.npy')):
            opened.append((Path(path).name, is_started()))
        return open_file(path, *args, **keys)

    def reading(self, position):
        read_after.append(is_started())
        return read(self, position)

    monkeypatch.setattr(os, 'open', opening)
    monkeypatch.setattr(records.RecordFile, 'read', reading)
    assert_aborted(call(*arguments(tmp_path, tiny, EPOCH, '--train.num_warmup_steps=2')))
    assert {name for name, _ in opened} >= {'train.rec', 'validation.rec'} and len(opened) >= 4
    assert all(after for _, after in opened)
    assert len(read_after) >= STEPS_PER_EPOCH * 32 and all(read_after)


def test_tensorboard_contains_metrics(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert_aborted(call(*arguments(tmp_path, tiny, EPOCH, '--run.tensorboard=true')))
    kept = EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    steps = metrics(tmp_path, 'train')
    scalars = kept.Scalars('train/loss')
    assert [s.step for s in scalars] == [m['step'] for m in steps]
    np.testing.assert_allclose([s.value for s in scalars], [m['loss'] for m in steps], rtol=1e-5)
    tags = set(kept.Tags()['scalars'])
    assert {
        'train/learning_rate',
        'accuracy/top1_tiny-digits',
        'speed/images_per_s_of_epoch',
    } < tags
    assert all(t.endswith('_weight') for t in tags if t.startswith('lars_ratio/'))
    assert any(t.startswith('compute_ms_per_step/rank_0_') for t in tags)
    for tag in ('lars_ratio/conv0_weight', 'train/gradient_norm'):
        assert all(s.value > 0 for s in kept.Scalars(tag))
