"""Environment variables that MXNet, DALI, Horovod and OpenMP parse: corrected or refused before they are used."""
import os
import sys

import pytest
from helpers import CLI, ROOT, run, under_ranks

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.variables import settle_variables


def settled(**variables):
    starts_ranks = variables.pop('starts_ranks', False)
    settle_variables(variables, starts_ranks)
    return variables


@pytest.mark.parametrize('text, threads', [('2,1', '2'), ('4,3,2', '4'), (' 2', '2'), *(
    (wrong, None) for wrong in ('', ' ', '1.0', '2.0', '0', '-3', 'all', ',2', '100000', '99999999999'))])
def test_mxnet_gets_one_number_of_threads(text, threads):
    assert settled(OMP_NUM_THREADS=text).get('OMP_NUM_THREADS') == threads


@pytest.mark.parametrize('name, good, bad', [
    ('MXNET_CPU_WORKER_NTHREADS', ['1', ' 2 ', '16'], ['2.0', '0', '-1', 'abc', '0x2', '99999999999', '٣']),
    ('MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD', ['0', '999'], ['-1', '1.5', 'true']),
    ('MXNET_EXEC_BULK_EXEC_TRAIN', ['0', '1', 'true', 'False'], ['2', 'yes', 'on']),
    ('MXNET_CUDNN_AUTOTUNE_DEFAULT', ['0', '1', '2'], ['off']), ('MXNET_GPU_WORKER_NTHREADS', ['2'], ['two']),
    ('MXNET_ENGINE_TYPE', ['NaiveEngine', 'ThreadedEngine', 'ThreadedEnginePerDevice'], ['naive']),
    ('HOROVOD_CYCLE_TIME', ['5', '0.1', '.5', '5.'], ['5ms', 'nan', '-1', '1,5']),
    ('HOROVOD_FUSION_THRESHOLD', ['0', '134217728'], ['64M', '1e6']), ('HOROVOD_CACHE_CAPACITY', ['0'], ['none']),
    ('DALI_AFFINITY_MASK', ['0', '0,1, 2'], ['abc', '0-3', '0,']),
    ('DALI_MALLOC_POOL_THRESHOLD', ['4096', '64k'], ['big']),
    ('GOMP_CPU_AFFINITY', ['0 3 1-2', '0-7:2'], ['all', ','])])
def test_value_that_a_library_would_not_survive_is_refused(name, good, bad):
    assert [settled(**{name: text}) for text in good] == [{name: text.strip()} for text in good]
    assert settled(**{name: '  '}) == {}  # some libraries read an empty text as 0
    for text in bad:
        with pytest.raises(ConfigError, match=f'^{name}: got .* in the environment, expected .*; correct or unset it$'):
            settled(**{name: text})


def test_controller_of_horovod_is_that_of_the_program_that_started_the_rank():
    gloo = {'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo'}
    address = {'HOROVOD_GLOO_RENDEZVOUS_ADDR': '10.0.0.1'}
    assert settled(**gloo) == settled(HOROVOD_CONTROLLER='', HOROVOD_CPU_OPERATIONS='abc') == {}
    assert settled(**gloo, **address) == {**gloo, **address}
    assert not gloo.keys() & settled(**gloo, **address, OMPI_COMM_WORLD_RANK='1')
    assert settled(HOROVOD_CPU_OPERATIONS='CCL') == {'HOROVOD_CPU_OPERATIONS': 'CCL'}


def test_launcher_forgets_the_ranks_of_an_outer_job():
    kept = {'HOROVOD_CYCLE_TIME': '1', 'HOROVOD_GLOO_IFACE': 'ib0', 'OMPI_MCA_btl': 'tcp', 'PMIX_MCA_gds': 'hash'}
    outer = {'HOROVOD_RANK': '5', 'HOROVOD_SIZE': '8', 'HOROVOD_LOCAL_RANK': '1', 'HOROVOD_CROSS_SIZE': '2',
             'HOROVOD_GLOO_RENDEZVOUS_ADDR': 'x', 'HOROVOD_CONTROLLER': 'gloo', 'OMPI_COMM_WORLD_SIZE': '8',
             'OMPI_MCA_ess_base_jobid': '1', 'OMPI_MCA_orte_hnp_uri': 'x', 'PMI_RANK': '1', 'PMIX_NAMESPACE': 'x'}
    assert settled(**kept, **outer, starts_ranks=True) == kept
    assert settled(**outer) == outer


@pytest.mark.parametrize('command', [
    [*CLI, 'classify', 'missing', 'x.png'], [ROOT / 'launch/bind.sh', sys.executable, '-c', 'import mxnet']])
def test_documented_list_of_threads_reaches_no_import_of_mxnet(command):
    done = run(command, env={**os.environ, 'OMP_NUM_THREADS': '2,1'})
    assert done.returncode == (2 if 'classify' in command else 0) and 'Invalid' not in done.stderr, done.stderr


def test_wrong_variable_ends_commands_with_mxnet_before_they_start_anything():
    env = {**os.environ, 'MXNET_CPU_WORKER_NTHREADS': '2.0'}
    for command in ([*CLI, 'doctor'], [*CLI, 'train', '--config', 'x'], under_ranks(2, ['true']),
                    [ROOT / 'launch/local.sh', '--config', 'x'], [ROOT / 'launch/bind.sh', 'true']):
        done = run(command, env=env)
        assert done.returncode == 2 and done.stderr.count('\n') == 1
        assert "MXNET_CPU_WORKER_NTHREADS: got '2.0' in the environment" in done.stderr
    assert run([*CLI, 'report', '--help'], env=env).returncode == 0
    assert 'missing' in run([*CLI, 'check', 'missing'], env=env).stderr  # reads no variable of MXNet


def test_ranks_start_with_variables_of_another_job():
    code = 'import horovod.mxnet as hvd; hvd.init(); assert hvd.size() == 2'
    env = {'HOROVOD_CONTROLLER': 'gloo', 'HOROVOD_CPU_OPERATIONS': 'gloo', 'HOROVOD_RANK': '7', 'HOROVOD_SIZE': '9',
           'OMPI_COMM_WORLD_SIZE': '9', 'PMIX_RANK': '7', 'OMP_NUM_THREADS': '2,1'}
    done = run(under_ranks(2, [sys.executable, '-c', code]), env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
