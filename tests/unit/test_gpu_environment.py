"""The environment of ranks on GPUs: set by the launchers, seen by a rank, and told by the doctor."""
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from mlperf_rn50.launch.engines import environment
from mlperf_rn50.launch.options import make_parser, parse_options
from mlperf_rn50.system.gpu_environment import (
    DEVICE_VARIABLE,
    SET_VARIABLE,
    SETTINGS,
    check_environment,
    device_of_words,
    environment_facts,
    missing_settings,
)

GPU = {DEVICE_VARIABLE: 'gpu'}


def test_what_is_set_stays_and_cpus_get_nothing():
    assert missing_settings({**GPU, 'PATH': '/bin'}) == {**SETTINGS, SET_VARIABLE: ','.join(SETTINGS)}
    added = missing_settings({**GPU, 'HOROVOD_CYCLE_TIME': '1', 'MXNET_ENABLE_CUDA_GRAPHS': ''})
    assert added.keys() == SETTINGS.keys() - {'HOROVOD_CYCLE_TIME', 'MXNET_ENABLE_CUDA_GRAPHS'} | {SET_VARIABLE}
    assert missing_settings({**GPU, **SETTINGS}) == {SET_VARIABLE: ''}
    assert missing_settings({}) == missing_settings({DEVICE_VARIABLE: 'cpu'}) == {}


def test_the_launchers_say_the_device():
    options = parse_options(make_parser(ROOT / 'launch/local.sh', False, None), [])
    for device in ('cpu', 'gpu'):
        assert environment(options, {DEVICE_VARIABLE: 'of before'}, '7-ab', device)[DEVICE_VARIABLE] == device
    script = ROOT / 'launch/engines/variables.sh'
    given = dict.fromkeys([*SETTINGS, DEVICE_VARIABLE, SET_VARIABLE, 'CUDA_VISIBLE_DEVICES'], 'x')
    done = subprocess.run([script], env={'PATH': os.environ['PATH'], **given}, capture_output=True, text=True)
    assert set(done.stdout.split()) == given.keys()  # that which is handed on to ranks elsewhere


@pytest.mark.parametrize('words, device', [
    ('--config {gpu}', 'gpu'), ('--config={gpu} --train.device cpu', 'cpu'), ('', 'cpu'), ('--train.device', 'cpu'),
    ('--config /no/such/file', 'cpu'), ('--train.device gpu --train.device cpu', 'cpu'), ('--config {broken}', 'cpu'),
    ('--resume {folder}', 'gpu'), ('--resume={folder} --train.device=cpu', 'cpu')])
def test_the_device_in_the_words_of_a_program(tmp_path, words, device):
    (tmp_path / 'config.yaml').write_text('train: {device: gpu}')
    (tmp_path / 'broken.yaml').write_text('[' * 600)
    words = words.format(gpu=tmp_path / 'config.yaml', broken=tmp_path / 'broken.yaml', folder=tmp_path)
    assert device_of_words(['mlperf-rn50', 'train', *words.split()]) == device


@pytest.mark.parametrize('device, given, expected', [
    ('gpu', {'HOROVOD_NUM_NCCL_STREAMS': '2'}, {**SETTINGS, 'HOROVOD_NUM_NCCL_STREAMS': '2'}),
    ('cpu', {}, {'HOROVOD_CYCLE_TIME': '5'})])
def test_a_rank_sees_it(device, given, expected):
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS and not k.startswith(('MLPERF_RN50_', 'OMPI_'))}
    show = 'import json, os; print(json.dumps(dict(os.environ)))'
    done = subprocess.run([ROOT / 'launch/ranks.sh', '1', sys.executable, '-c', show, '--train.device', device],
                          env={**env, **given}, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert {name: seen[name] for name in SETTINGS if name in seen} == expected
    assert seen.get(SET_VARIABLE) == (','.join(n for n in SETTINGS if n not in given) if device == 'gpu' else None)


def rows(*envs):
    return [{'host': f'h{i}', 'gpu_environment': environment_facts(env)} for i, env in enumerate(envs)]


def test_the_doctor_says_what_is_set_by_whom_and_warns_of_what_is_not_and_of_unlike_hosts():
    env = {**GPU, 'HOROVOD_CYCLE_TIME': '0.5'}
    check = check_environment(rows({**env, **missing_settings(env)}))
    assert check.status == 'ok' and check.found.endswith('; set before it: HOROVOD_CYCLE_TIME=0.5')
    assert check.found.startswith('by the launcher: CUDA_DEVICE_ORDER=PCI_BUS_ID, MXNET_EXEC_BULK')
    missing = check_environment(rows(SETTINGS, {k: v for k, v in SETTINGS.items() if k != 'HOROVOD_CYCLE_TIME'}))
    assert (missing.status, missing.found) == ('warning', 'not set on h1: HOROVOD_CYCLE_TIME')
    assert 'launch/*.sh' in missing.fix and missing.fix.endswith('export HOROVOD_CYCLE_TIME=0.1')
    unlike = check_environment(rows(SETTINGS, {**SETTINGS, 'HOROVOD_CYCLE_TIME': '5'}))
    assert (unlike.status, unlike.found) == ('warning', 'HOROVOD_CYCLE_TIME=5 on h1, but 0.1 on h0')
