"""Build of a run: notes about its device."""

from dataclasses import replace

import pytest

from mlperf_rn50.config import Config
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train.build import DETERMINISM, device_notes
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
