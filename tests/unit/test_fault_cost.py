"""What the doctor measures and states about checkpoints and faults."""

import shutil
from pathlib import Path

import mxnet as mx
import pytest
from rank_facts import assert_reads, rank_facts

from mlperf_rn50.config import Config
from mlperf_rn50.doctor.fault_cost import (
    STARTED,
    check_fault_cost,
    checkpoint_bytes,
    start_s,
    try_writing,
)
from mlperf_rn50.doctor.result import WriteTrial
from mlperf_rn50.model.zoo import build_model, count_parameters
from mlperf_rn50.train.options import CheckpointConfig, TrainConfig

WHOLE = WriteTrial(200_000_000, 200_000_000, 0.4, '')


def check(trial=WHOLE, start_s=None, **options):
    return check_fault_cost(rank_facts(start_s=start_s), trial, CheckpointConfig(**options), 8)


@pytest.mark.parametrize(
    'expected, found',
    [
        (
            'a checkpoint of 200 MB takes 0.4 s on this disk (500 MB/s); a fault costs at most 600 '
            'seconds of repeated training (checkpoint.period_s)',
            check(),
        ),
        ('... (checkpoint.period_s) and about 7 s to start the ranks', check(start_s=7.4)),
        (
            '250 of the 2000 MB of a checkpoint take 0.5 s',
            check(WriteTrial(2_000_000_000, 250_000_000, 0.5, '')),
        ),
        # 1,000 times the time of the whole checkpoint
        (
            '...at most 4,000 seconds of repeated training (checkpoint.period_s: auto',
            check(WriteTrial(2_000_000_000, 250_000_000, 0.5, ''), period_s='auto'),
        ),
        ('...at most 50 steps of', check(period_s=0, period_steps=50)),
        ('...at most 3 epochs of', check(period_s=0, period_epochs=3)),
        ('...all training so far', check(period_s=0, period_epochs=0)),
    ],
)
def test_cost_of_a_fault(expected, found):
    assert_reads(found, f'ok: {expected}')


@pytest.mark.parametrize(
    'precision, ema, num_bytes', [('float32', None, 8), ('float16', None, 10), ('float16', 0.9, 14)]
)
def test_checkpoint_has_all_copies_of_a_weight(thin_resnets, precision, ema, num_bytes):
    train = TrainConfig(precision=precision, ema=ema, device='gpu', local_batch_size=8)
    config = Config(train=train)
    num_parameters = count_parameters(build_model(config, mx.cpu(), None))
    assert checkpoint_bytes(config) == num_bytes * num_parameters


def test_start_is_not_stated_if_it_was_not_measured():
    assert 'start the ranks' not in check().found


def test_unwritable_folder_fails(tmp_path):
    trial = try_writing(tmp_path / 'missing', 1000)
    assert_reads(check(trial), 'failed: a file of 0 MB ... on h1: No such file ... run.dir')


def test_written_file_leaves_half_of_the_free_space_to_others(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1500)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
    trial = try_writing(tmp_path, 1000)
    assert (trial.num_bytes, trial.written_bytes, trial.problem) == (1000, 750, '')
    assert 'is free' in try_writing(tmp_path, 2000).problem


def test_written_file_is_limited_and_removed(tmp_path):
    trial = try_writing(tmp_path, 3000, max_bytes=1000)
    assert (trial.num_bytes, trial.written_bytes, trial.problem) == (3000, 1000, '')
    assert trial.seconds > 0 and not list(tmp_path.iterdir())


def test_nothing_is_written_without_space(tmp_path):
    assert 'is free' in try_writing(tmp_path, 1 << 60, max_bytes=1 << 60).problem


def test_start_is_measured_on_the_host_of_the_launcher_only(monkeypatch):
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    up_s = float(Path('/proc/uptime').read_text().split()[0])
    monkeypatch.setenv(STARTED, f'{boot} {up_s - 100:.2f}')
    measured = start_s()
    assert measured and measured >= 99.9
    monkeypatch.setenv(STARTED, f'other {up_s:.2f}')
    assert start_s() is None
    monkeypatch.delenv(STARTED)
    assert start_s() is None
