"""Environment variables of ranks on GPUs: which are set, kept and forwarded."""

import json
import os
import re
import sys

import pytest
from helpers import ROOT, run, under_ranks

from mlperf_rn50.system.gpu_env import (
    DEVICE_VARIABLE,
    NVIDIA_VARIABLE,
    SET_VARIABLE,
    SETTINGS,
    missing_settings,
    settings_of,
)

CYCLE = 'HOROVOD_CYCLE_TIME'


def added(**given):
    """Return the names of the variables that are added to those of a rank on a GPU."""
    return missing_settings({DEVICE_VARIABLE: 'gpu', **given}).keys()


def test_existing_settings_are_kept_and_cpu_runs_get_none():
    assert missing_settings({DEVICE_VARIABLE: 'gpu', 'PATH': '/bin'}) == {
        **SETTINGS,
        SET_VARIABLE: ','.join(SETTINGS),
    }
    empty = 'MXNET_CUDNN_AUTOTUNE_DEFAULT'
    assert SETTINGS.keys() - added(**{CYCLE: '1', empty: ''}) == {CYCLE, empty}
    once = {DEVICE_VARIABLE: 'gpu', CYCLE: '1'}
    once |= missing_settings(once)
    # launch/bind.sh and the program both call it
    assert missing_settings(once) == {SET_VARIABLE: once[SET_VARIABLE]}
    kept = 'MXNET_CUDNN_NHWC_BN_HEURISTIC_FWD'
    assert added(**{NVIDIA_VARIABLE: '24.06', kept: '0'}) == {*settings_of(True), SET_VARIABLE} - {
        kept
    }
    assert settings_of(True).keys() - SETTINGS.keys() == {
        kept,
        'MXNET_CUDNN_NHWC_BN_HEURISTIC_BWD',
        'MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_FWD',
        'MXNET_CUDNN_NHWC_BN_ADD_HEURISTIC_BWD',
        'MXNET_CUDNN_WARN_ON_IGNORED_FLAGS',
        'MXNET_ENABLE_CUDA_GRAPHS',
        'MXNET_ASYNC_GPU_ENGINE',
        'HOROVOD_ENABLE_ASYNC_COMPLETION',
    }
    assert missing_settings({}) == missing_settings({DEVICE_VARIABLE: 'cpu'}) == {}


def test_variables_are_forwarded_to_remote_ranks():
    lines = (ROOT / 'docs/launch.md').read_text().splitlines()
    [row] = [line for line in lines if line.startswith('| environment |')]
    promised = re.findall('`([A-Za-z0-9_]+)`', row)
    assert len(promised) >= 14
    names = {f'{name}X' if name.endswith('_') else name for name in promised}
    names |= {*settings_of(True), NVIDIA_VARIABLE, DEVICE_VARIABLE, SET_VARIABLE}
    names.add('CUDA_VISIBLE_DEVICES')
    env = {'PATH': os.environ['PATH'], **dict.fromkeys(names, 'x')}
    assert {*run([ROOT / 'launch/engines/variables.sh'], env=env).stdout.split()} == names


@pytest.mark.parametrize(
    'device, given',
    [('gpu', {CYCLE: '2'}), ('gpu', {'OMPI_MCA_btl': 'tcp,self,vader'}), ('cpu', {})],
)
def test_settings_reach_a_rank(monkeypatch, device, given):
    for name in list(os.environ):
        if name in SETTINGS or name.startswith(('MLPERF_RN50_', 'OMPI_')):
            monkeypatch.delenv(name)
    show = 'import json, os; print(json.dumps(dict(os.environ)))'
    words = under_ranks(1, [sys.executable, '-c', show])
    seen = json.loads(run(words, env={**os.environ, **given, DEVICE_VARIABLE: device}).stdout)
    expected = {**SETTINGS, **given} if device == 'gpu' else {}
    assert {name: seen[name] for name in SETTINGS if name in seen} == expected
    assert seen.get(SET_VARIABLE, '') == ','.join(n for n in expected if n not in given)
