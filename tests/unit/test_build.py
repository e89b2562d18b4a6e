"""Build of a run: notes about its device, and its known peak."""

from dataclasses import replace

import msgspec
import pytest

from mlperf_rn50.config import Config
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.runfolder.records import NetworkRecord
from mlperf_rn50.train.build import DETERMINISM, device_notes, known_peak
from mlperf_rn50.train.options import TrainConfig

ENFORCED, AUTOTUNE = DETERMINISM
GPU = Config(model=ModelConfig(layout='NCHW'), train=TrainConfig(local_batch_size=4, device='gpu'))


@pytest.mark.parametrize(
    'environ, missing',
    [
        ({}, f'{ENFORCED}=1 and {AUTOTUNE}=0'),
        ({ENFORCED: '1', AUTOTUNE: '1'}, f'{AUTOTUNE}=0'),
        (DETERMINISM, None),
    ],
)
def test_gpu_note_on_reproducibility_depends_on_environment(environ, missing):
    fused, *note = device_notes(GPU, environ)
    assert fused == 'layout NCHW; fused operators: none'
    expected = 'results are not reproducible to the bit; on a GPU this requires'
    assert note == ([f'{expected} {missing}'] if missing else [])
    [layers] = device_notes(replace(GPU, train=TrainConfig(local_batch_size=4)), environ)
    assert 'float32: layout NCHW; fused operators: ' in layers


def test_peak_is_known_after_a_start_by_the_same_launcher_with_as_many_ranks(tmp_path):
    metrics = tmp_path / 'metrics.jsonl'
    assert known_peak(metrics, '7-ab-1', 4) is None
    records = [NetworkRecord(4, 1e9, 8, 1, peak, job) for peak, job in ((1e9, '7-ab-1'), (2e9, ''))]
    metrics.write_bytes(b''.join(msgspec.json.encode(r) + b'\n' for r in records))
    assert known_peak(metrics, '7-ab-2', 4) == 1e9
    assert known_peak(metrics, '8-ab-2', 4) is None
    assert known_peak(metrics, '7-ab-2', 8) is None
    assert known_peak(metrics, '', 4) is None
