"""The checks of the doctor, on made-up facts."""
import copy

import pytest

from mlperf_rn50.system.doctor import Expected, can_run, check_facts, has_failed, render_checks

EXPECTED = Expected()
EPYC = {'name': 'EPYC', 'vendor': 'AuthenticAMD', 'family': 25, 'model': 17, 'has': 'AVX-512 BF16',
        'uses': 'AVX-512 BF16', 'limit': ''}
V100 = {'name': 'Tesla V100-SXM2-16GB', 'compute_cap': '7.0', 'driver_version': '470.82.01'}


def facts(rank, host, **changes):
    row = {'rank': rank, 'host': host, 'local_rank': rank % 2, 'local_size': 2, 'python': '3.11.7', 'code': 'aaaa',
           'processor': EPYC,
           'config': 'cccc', 'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.23.5'}, 'dali': '2.4.0',
           'gpus': [], 'cuda_libraries': {'libcudart.so.11.0': '11080'}, 'mxnet_has_cuda': False,
           'horovod': {'controllers': ['MPI', 'Gloo'], 'operations': ['MPI', 'Gloo'], 'in_use': 'MPI controller'},
           'data': {'problem': '', 'dataset': 'digits', 'num_probed': 128, 'manifest': 'mmmm', 'num_images': 1797},
           'disk_free_bytes': 10**12, 'memory_available_bytes': 10**11, 'num_cpus': 8, 'omp_num_threads': '4',
           'clock_offset_s': 0.001, 'all_reduce_s': 0.01, 'all_reduce_bytes': 10**8}
    return copy.deepcopy({**row, **changes})


def rows(**changes_of_h2):
    """Two hosts of two ranks; the second host is different."""
    return [facts(0, 'h1'), facts(1, 'h1'), facts(2, 'h2', **changes_of_h2), facts(3, 'h2', **changes_of_h2)]


def check(name, made, expected=EXPECTED):
    return next(c for c in check_facts(made, expected) if c.name == name)


def test_good_machines_pass():
    checks = check_facts(rows(), Expected('cpu', 'bfloat16', 2, 2, 10**9))
    assert not has_failed(checks)
    assert render_checks(checks, is_quiet=True) == 'doctor: 15 checks passed, 0 failed, 0 warnings'
    assert '100 MB in 10 ms: 10.00 GB/s, bus 15.00 GB/s' in render_checks(checks, is_quiet=False)


@pytest.mark.parametrize('name, changes, found, fix', [
    ('program', {'code': 'bbbb'}, 'code bbbb on h2, but code aaaa on h1', 'the checkout on h2'),
    ('configuration', {'config': 'dddd'}, 'digest dddd on h2, but digest cccc on h1', 'file to h2'),
    ('Python', {'python': '3.11.2'}, '3.11.2 on h2, but 3.11.7 on h1', 'launch/setup.sh on h2'),
    ('packages', {'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.22.0'}},
     'numpy 1.22.0 on h2, but numpy 1.23.5 on h1', 'launch/setup.sh on h2'),
    ('packages', {'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1'}}, 'numpy missing on h2', 'launch/setup.sh on h2'),
    ('data set', {'data': {'problem': '', 'dataset': 'digits', 'num_probed': 1, 'manifest': 'xxxx', 'num_images': 9}},
     'manifest xxxx with 9 images on h2, but manifest mmmm with 1797 images on h1', 'to h2 again'),
    ('data set', {'data': {'problem': 'train.rec: no such file'}}, 'on h2: train.rec: no such file', 'prepare'),
    ('clocks', {'clock_offset_s': -3.2}, '3200 ms apart at most (h2 and h1)', 'clock of h2'),
    ('ranks and nodes', {'local_size': 1}, '4 ranks on 2 nodes (h1: 2, h2: 1)', 'h2 has 1'),
    ('disk', {'disk_free_bytes': 10}, '0.0 GB free for the run folder on h2, 1.0 GB needed', 'make room'),
])
def test_a_host_that_is_different_is_named(name, changes, found, fix):
    c = check(name, rows(**changes), Expected('cpu', 'bfloat16', 2, 2, 10**9))
    assert c.status == 'failed'
    assert found in c.found and fix in c.fix


@pytest.mark.parametrize('precision, uses, status, found', [
    ('bfloat16', 'AVX2', 'failed', 'EPYC, AVX2 on h2'),
    ('bfloat16', 'AVX-512', 'warning', 'EPYC, AVX-512 on h2, but EPYC, AVX-512 BF16 on h1'),
    ('float32', 'AVX2', 'warning', 'EPYC, AVX2 on h2, but EPYC, AVX-512 BF16 on h1'),
    ('float32', 'AVX-512 BF16', 'ok', 'EPYC, AVX-512 BF16 on all ranks')])
def test_the_slowest_processor_is_named(precision, uses, status, found):
    c = check('processor', rows(processor={**EPYC, 'has': uses, 'uses': uses}), Expected(precision=precision))
    assert c.status == status and found in c.found
    said = 'train.precision: got bfloat16, this processor has no AVX-512, only AVX2; use float32'
    assert status != 'failed' or c.fix == said


def test_the_wrong_number_of_nodes_fails():
    c = check('ranks and nodes', rows(), Expected(num_nodes=4))
    assert c.status == 'failed' and 'run.num_nodes is 4' in c.fix


@pytest.mark.parametrize('threads, status', [('4', 'ok'), ('5', 'warning'), ('', 'warning'), ('4,2', 'ok'),
                                             ('5,1', 'warning'), ('x', 'warning')])
def test_threads_against_cores(threads, status):
    assert check('threads', rows(omp_num_threads=threads)).status == status


def test_little_memory_is_a_warning():
    assert check('memory', rows(memory_available_bytes=3 << 30)).status == 'warning'


@pytest.mark.parametrize('capability, runs', [('5.0', True), ('5.2', True), ('6.1', True), ('7.0', True), ('7.5', True),
                                              ('8.0', True), ('8.6', True), ('8.9', True), ('9.0', False),
                                              ('10.0', False), ('3.5', False), ('', False)])
def test_compute_capabilities(capability, runs):
    assert can_run(capability) == runs


@pytest.mark.parametrize('changes, status, found', [
    ({}, 'failed', 'CPU build'),
    ({'mxnet_has_cuda': True}, 'failed', 'nvidia-smi finds none'),
    ({'mxnet_has_cuda': True, 'gpus': [V100]}, 'ok', 'Tesla V100'),
    ({'mxnet_has_cuda': True, 'gpus': [{**V100, 'name': 'NVIDIA H200', 'compute_cap': '9.0'}]}, 'failed',
     'the published mxnet-cu wheels hold code up to 8.6'),
    ({'mxnet_has_cuda': True, 'gpus': [{**V100, 'driver_version': '418.40'}]}, 'failed', 'driver 418.40'),
])
def test_gpus(changes, status, found):
    made = [facts(r, 'h1', **changes) for r in range(2)]
    c = check('GPU', made, Expected('gpu'))
    assert c.status == status and found in c.found


def test_a_gpu_run_needs_nccl_and_every_cuda_library():
    assert check('Horovod', rows(), Expected('gpu')).status == 'failed'
    missing = check('CUDA libraries', rows(cuda_libraries={'libcudnn.so.8': None}), Expected('gpu'))
    assert missing.status == 'failed' and 'h2: libcudnn.so.8' in missing.found
