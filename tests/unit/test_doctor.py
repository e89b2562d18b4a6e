"""The checks of the doctor, on made-up facts."""
import copy
import errno
import os
import resource
from dataclasses import asdict

import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import limits as limits_module
from mlperf_rn50.system.cgroup import Limits
from mlperf_rn50.system.doctor import Expected, check_facts, has_failed, render_checks
from mlperf_rn50.system.gpu_environment import environment_facts
from mlperf_rn50.system.limits import check_session, limit_facts, session_problem

EXPECTED = Expected()
EPYC = {'name': 'EPYC', 'vendor': 'AuthenticAMD', 'family': 25, 'model': 17, 'has': 'AVX-512 BF16',
        'uses': 'AVX-512 BF16', 'limit': ''}


def facts(rank, host, **changes):
    row = {'rank': rank, 'host': host, 'local_rank': rank % 2, 'local_size': 2, 'python': '3.11.7', 'code': 'aaaa',
           'processor': EPYC,
           'config': 'cccc', 'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.23.5'}, 'dali': '2.4.0',
           'mxnet': {'kind': 'cpu', 'release': '', 'libraries': {}, 'compatibility': ''}, 'cuda_libraries': {},
           'gpus': [], 'visible': None, 'device': None, 'device_problem': '', 'trial': None,
           'gpu_environment': environment_facts({}),
           'horovod': {'controllers': ['MPI', 'Gloo'], 'operations': ['MPI', 'Gloo'], 'in_use': 'MPI controller'},
           'data': {'problem': '', 'dataset': 'digits', 'num_probed': 128, 'has_checksums': True, 'manifest': 'mmmm',
                    'num_images': 1797},
           'energy': {'cpu': 0, 'gpu': 0},
           'disk_free_bytes': 10**12, 'memory_available_bytes': 10**11, 'omp_num_threads': '4',
           'run_folder_problem': '',
           'cpus': [4 * (rank % 2) + i for i in range(4)], 'num_machine_cpus': 16, 'cgroup': asdict(Limits()),
           'shared_memory_free_bytes': 10**10, 'tmp_dir': '/tmp', 'tmp_dir_problem': '',
           'ulimits': {'open_files': 1024, 'address_space_bytes': None, 'locked_bytes': 8 << 20},
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
    assert render_checks(checks, is_quiet=True) == 'doctor: 21 checks passed, 0 failed, 0 warnings'
    assert '100 MB in 10 ms: 10.00 GB/s, bus 15.00 GB/s' in render_checks(checks, is_quiet=False)


def energy(first, second):
    """What is said of the energy of two nodes, of (packages, GPUs) each."""
    return check('energy', [facts(rank, host, energy=dict(zip(('cpu', 'gpu'), counts)))
                            for rank, host, counts in ((0, 'h1', first), (1, 'h1', first), (2, 'h2', second))])


def test_energy_is_a_note_and_never_a_warning():
    assert energy((2, 8), (2, 8)).found == '4 CPU packages can be measured; 16 GPUs can be measured (run.telemetry)'
    assert energy((2, 0), (0, 0)).found == '2 CPU packages can be measured, not on h2: no sum of them (run.telemetry)'
    assert energy((2, 0), (0, 0)).status == 'ok' and energy((0, 0), (0, 0)).status == 'not needed'


@pytest.mark.parametrize('name, changes, found, fix', [
    ('program', {'code': 'bbbb'}, 'code bbbb on h2, but code aaaa on h1', 'the checkout on h2'),
    ('configuration', {'config': 'dddd'}, 'digest dddd on h2, but digest cccc on h1', 'file to h2'),
    ('Python', {'python': '3.11.2'}, '3.11.2 on h2, but 3.11.7 on h1', 'launch/setup.sh on h2'),
    ('packages', {'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.22.0'}},
     'numpy 1.22.0 on h2, but numpy 1.23.5 on h1', 'launch/setup.sh on h2'),
    ('packages', {'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1'}}, 'numpy missing on h2', 'launch/setup.sh on h2'),
    ('data set', {'data': {'problem': '', 'dataset': 'digits', 'num_probed': 1, 'has_checksums': False,
                           'manifest': 'xxxx', 'num_images': 9}},
     'manifest xxxx with 9 images on h2, but manifest mmmm with 1797 images on h1', 'to h2 again'),
    ('data set', {'data': {'problem': 'train.rec: no such file'}}, 'on h2: train.rec: no such file', 'prepare'),
    ('clocks', {'clock_offset_s': -3.2}, '3200 ms apart at most (h2 and h1)', 'clock of h2'),
    ('ranks and nodes', {'local_size': 1}, '4 ranks on 2 nodes (h1: 2, h2: 1)', 'h2 has 1'),
    ('disk', {'disk_free_bytes': 10}, '0.0 GB free for the run folder on h2, 1.0 GB needed', 'make room'),
    ('TMPDIR', {'tmp_dir': '/scratch', 'tmp_dir_problem': 'No space left on device'},
     '/scratch on h2: No space left on device; expected a folder with 10 MB free', 'set TMPDIR'),
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


def limits(**allowed):
    return asdict(Limits(**allowed))


@pytest.mark.parametrize('changes, status, found', [
    ({}, 'ok', '2 ranks may use 8 of the 16 CPUs of h1'),
    ({'cpus': [3]}, 'warning', '2 ranks may use 1 of the 16 CPUs of h2'),  # taskset -c 3 launch/local.sh
    ({'cgroup': limits(quota_cpus=1.5)}, 'warning',
     'may use 1.5 of the 16 CPUs of h2, the quota of their control group'),
    ({'cgroup': limits(quota_cpus=2.0)}, 'ok', 'may use 2 of the 16 CPUs of h2, the quota')])
def test_the_cpus_that_ranks_may_use(changes, status, found):
    c = check('CPUs', rows(**changes))
    assert c.status == status and found in c.found
    assert status == 'ok' or 'start 1 there' in c.fix


def test_threads_are_held_against_a_quota():
    c = check('threads', rows(cgroup=limits(quota_cpus=6.5)))
    assert c.status == 'warning' and '8 threads on the 6.5 CPUs that ranks of h2 may use' in c.found
    one_each = check('threads', rows(cgroup=limits(quota_cpus=1.5), omp_num_threads='1'))
    assert one_each.status == 'ok'  # fewer there cannot be; it is the check of CPUs that warns


@pytest.mark.parametrize('limit, used, status, found', [
    (8 * 10**9, 10**9, 'ok',
     '3.5 GB available per rank on h2; their control group allows 8.0 GB, 1.0 GB of it in use'),
    (4 * 10**9, 2 * 10**9, 'warning', '1.0 GB available per rank on h2; their control group allows 4.0 GB'),
    (10**9, 2 * 10**9, 'warning', '0.0 GB available per rank on h2; their control group'),
    (10**12, 0, 'ok', '50.0 GB available per rank on h1')])
def test_memory_is_what_the_control_group_leaves(limit, used, status, found):
    c = check('memory', rows(cgroup=limits(memory_limit_bytes=limit, memory_used_bytes=used)))
    assert c.status == status and c.found.startswith(found)
    assert ('raise the limit' in c.fix) == ('control group' in found)


@pytest.mark.parametrize('device, free, status, found', [
    ('cpu', 10**8, 'ok', '100 MB free in /dev/shm on h2, 8 MB needed'),
    ('cpu', 8 << 20, 'warning', '8 MB free in /dev/shm on h2, 8 MB needed'),
    ('cpu', None, 'warning', 'no /dev/shm on h2'),
    ('gpu', 64 << 20, 'warning', '67 MB free in /dev/shm on h2, 1,074 MB needed')])
def test_shared_memory(device, free, status, found):
    c = check('shared memory', rows(shared_memory_free_bytes=free), Expected(device))
    assert c.status == status and found in c.found and '--shm-size=1g' in c.fix


def test_ranks_alone_on_their_nodes_share_no_memory():
    made = [facts(r, f'h{r}', local_rank=0, local_size=1, shared_memory_free_bytes=0) for r in range(2)]
    assert check('shared memory', made).status == 'not needed'


@pytest.mark.parametrize('name, ulimit, value, device, status, found', [
    ('open files', 'open_files', 138, 'cpu', 'ok', '138 for a rank on h2, up to 138 needed'),
    ('open files', 'open_files', 137, 'cpu', 'warning', '137 for a rank on h2, up to 138 needed'),
    ('open files', 'open_files', None, 'cpu', 'ok', '1,024 for a rank on h1'),
    ('address space', 'address_space_bytes', 4 * 10**9, 'cpu', 'warning',
     '4,000.0 MB for a rank on h2, expected unlimited'),
    ('locked memory', 'locked_bytes', 65536, 'gpu', 'warning', '0.1 MB for a rank on h1, h2, expected unlimited'),
    ('locked memory', 'locked_bytes', 65536, 'cpu', 'not needed', '')])
def test_ulimits(name, ulimit, value, device, status, found):
    ulimits = {**facts(0, 'h1')['ulimits'], ulimit: value}
    c = check(name, rows(ulimits=ulimits), Expected(device))
    assert c.status == status and found in c.found
    assert status != 'warning' or 'ulimit -' in c.fix


@pytest.mark.parametrize('on_h1, on_h2, status, found', [
    ('', '', 'ok', 'the same on all 2 hosts'), (None, None, 'not needed', ''),
    ('', 'no /run/.doctor-1', 'warning', 'what h1 writes there is not seen on h2: no /run/.doctor-1'),
    ('/run: Read-only file system', '', 'failed', '/run: Read-only file system on h1')])
def test_the_run_folder(on_h1, on_h2, status, found):
    made = rows(run_folder_problem=on_h2)
    for row in made[:2]:
        row['run_folder_problem'] = on_h1
    c = check('run folder', made)
    assert c.status == status and found in c.found and (status == 'ok' or c.fix or on_h1 is None)


def test_the_limits_of_this_process_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    found = limit_facts()
    assert (found['tmp_dir'], found['tmp_dir_problem']) == (str(tmp_path), '')
    assert found['cpus'] == sorted(os.sched_getaffinity(0)) and found['memory_available_bytes'] > 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'none'))
    assert limit_facts()['tmp_dir_problem'] == 'No such file or directory'
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        assert limit_facts()['ulimits']['open_files'] == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_tmpdir_is_found(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, 'posix_fallocate', full)
    assert session_problem(tmp_path) == 'No space left on device'


def test_open_mpi_without_room_for_its_files_is_said_by_its_ranks(monkeypatch, tmp_path):
    base = tmp_path / 'mlperf_rn50-1-a'
    base.mkdir()
    free = 9 << 20
    monkeypatch.setattr(limits_module, '_free_bytes', lambda folder: free if folder == tmp_path else None)
    env = {'OMPI_MCA_orte_tmpdir_base': str(base)}
    with pytest.raises(ConfigError, match='has 9.4 MB free, expected 10 MB for files of Open MPI'):
        check_session(env)
    check_session({})  # horovodrun and srun need none
    (base / 'segment').write_bytes(bytes(2 << 20))
    check_session(env)  # it has room, and uses it


def test_little_memory_is_a_warning():
    assert check('memory', rows(memory_available_bytes=3 << 30)).status == 'warning'


def test_a_gpu_run_needs_nccl():
    assert check('Horovod', rows(), Expected('gpu')).status == 'failed'
