"""What the clock does not see and what must leave no trace: warm-up, ranks that are slow, kept scalars."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from e2e.training import STEPS_PER_EPOCH, arguments, command, metrics
from helpers import call, run, skip_for, under_ranks

from mlperf_rn50.data import records
from mlperf_rn50.train.checkpoint import list_checkpoints, load

EPOCH = '--train.max_epochs=1'


def log_of(run_dir):
    """The events of a log, without times and the lines of code that wrote them."""
    lines = [line for line in (run_dir / 'result_0.txt').read_text().splitlines() if line.startswith(':::MLLOG')]
    events = [json.loads(line.removeprefix(':::MLLOG ')) for line in lines]
    return [(e['key'], e['value'], {k: v for k, v in e['metadata'].items() if k not in ('file', 'lineno')})
            for e in events if e['key'] != 'tracked_stats']


@pytest.mark.parametrize('options', [
    [], pytest.param(['--optimizer.name=sgd', '--train.gradient_accumulation_steps=2', '--comm.num_buckets=1'],
                     marks=pytest.mark.slow),
    pytest.param(['--model.name=googlenet', '--optimizer.name=sgd', '--data.image_size=64', '--data.resize_shorter=64'],
                 marks=pytest.mark.slow)], ids=['lars', 'accumulate', 'dropout'])
def test_a_warm_up_leaves_no_trace(tiny, tmp_path, options):
    ends = []
    for num_steps in (0, 3):
        run_dir = tmp_path / str(num_steps)
        done = call(*arguments(run_dir, tiny, EPOCH, f'--train.num_warmup_steps={num_steps}', *options))
        assert done.returncode == 1, done.stderr
        ends.append((load(list_checkpoints(run_dir / 'checkpoints')[-1])[1], metrics(run_dir), log_of(run_dir)))
    (arrays, told, log), (arrays_warm, told_warm, log_warm) = ends
    assert set(arrays) == set(arrays_warm)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, arrays_warm[name], err_msg=name)
    assert told == told_warm
    assert log == log_warm


def test_no_image_is_touched_before_the_clock_runs(tiny, tmp_path, monkeypatch):
    seen, read = [], records.RecordFile.read

    def reading(self, position):
        seen.append('"run_start"' in (tmp_path / 'result_0.txt').read_text())
        return read(self, position)
    monkeypatch.setattr(records.RecordFile, 'read', reading)
    assert call(*arguments(tmp_path, tiny, EPOCH, '--train.num_warmup_steps=2')).returncode == 1
    assert len(seen) >= STEPS_PER_EPOCH * 32 and all(seen)


@pytest.mark.slow
def test_a_rank_whose_core_is_busy_is_named(tiny, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    skip_for('' if len(cores) > 1 else 'one core: every rank is as slow as the other')
    keys = ['--train.max_epochs=2', '--train.global_batch_size=64', '--data.image_size=64', '--data.resize_shorter=64']
    # It gives way to those beside it: else rank 0 would be as slow where much else runs on its core.
    script = (f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec nice -n 5 taskset -c {cores[1]} "$@"; '
              f'exec taskset -c {cores[0]} "$@"')
    spin = ['taskset', '-c', str(cores[1]), sys.executable, '-c', 'while True: pass']
    busy = [subprocess.Popen(spin) for _ in range(3)]
    try:
        done = run(under_ranks(2, ['bash', '-c', script, 'bash', *command(tmp_path, tiny, *keys)]),
                   env={**os.environ, 'MLPERF_RN50_BIND': 'off'})
    finally:
        for process in busy:
            process.kill()
    assert done.returncode == 1, done.stderr
    assert re.search(rf'rank 1 on \S+ \(cores {cores[1]}\) is slow: \d+ ms a step to compute', done.stderr), done.stderr
    told = metrics(tmp_path, 'ranks')
    assert [len(m['ranks']) for m in told] == [2, 2] and any('rank 1 on' in s for m in told for s in m['stragglers'])
    assert 'is slow' in call('report', tmp_path).stdout


def test_tensorboard_gets_what_metrics_get(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    assert call(*arguments(tmp_path, tiny, EPOCH, '--run.tensorboard=true')).returncode == 1
    kept = EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    steps = metrics(tmp_path, 'train')
    scalars = kept.Scalars('train/loss')
    assert [s.step for s in scalars] == [m['step'] for m in steps]
    np.testing.assert_allclose([s.value for s in scalars], [m['loss'] for m in steps], rtol=1e-5)
    tags = set(kept.Tags()['scalars'])
    assert {'train/learning_rate', 'train/gradient_norm', 'lars_ratio/conv0_weight', 'accuracy/top1_tiny-digits',
            'speed/images_per_s_of_epoch'} < tags
    assert any(t.startswith('compute_ms_per_step/rank_0_') for t in tags)
    assert all(s.value > 0 for s in kept.Scalars('lars_ratio/conv0_weight') + kept.Scalars('train/gradient_norm'))
