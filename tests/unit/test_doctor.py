"""Doctor checks with made-up facts."""

import copy
import errno
import os
from dataclasses import asdict
from unittest.mock import Mock

import pytest

from mlperf_rn50.doctor.checks import check_facts, has_failed, render_checks
from mlperf_rn50.doctor.gpu_stack import environment_facts
from mlperf_rn50.doctor.machine import limit_facts
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system import mpi_session
from mlperf_rn50.system.cgroup import GroupLimits
from mlperf_rn50.system.mpi_session import check_session

EPYC = {
    'name': 'EPYC',
    'vendor': 'AuthenticAMD',
    'family': 25,
    'model': 17,
    'has': 'AVX-512 BF16',
    'uses': 'AVX-512 BF16',
    'limit': '',
}
ULIMITS = {'open_files': 1024, 'address_space_bytes': None, 'locked_bytes': 8 << 20}
PACKAGES = {'mxnet': '1.9.1', 'horovod': '0.28.1', 'numpy': '1.23.5'}
DATA = {
    'problem': '',
    'dataset': 'digits',
    'num_probed': 128,
    'has_checksums': True,
    'manifest': 'mmmm',
    'num_images': 1797,
}


def facts(rank, host, **changes):
    row = {
        'rank': rank,
        'host': host,
        'local_rank': rank % 2,
        'local_size': 2,
        'python': '3.11.7',
        'code': 'aaaa',
        'processor': EPYC,
        'layers': 'fused',
        'config': 'cccc',
        'packages': PACKAGES,
        'dali': '2.4.0',
        'mxnet': {'kind': 'cpu', 'release': '', 'libraries': {}, 'compatibility': ''},
        'cuda_libraries': {},
        'gpus': [],
        'visible': None,
        'device': None,
        'device_problem': '',
        'trial': None,
        'gpu_environment': environment_facts({}, False),
        'horovod': {
            'controllers': ['MPI', 'Gloo'],
            'operations': ['MPI', 'Gloo'],
            'in_use': 'Gloo controller',
            'has_gloo': True,
        },
        'data': DATA,
        'energy': {'cpu': 2, 'gpu': 8},
        'disk_free_bytes': 10**12,
        'memory_available_bytes': 10**11,
        'omp_num_threads': '4',
        'run_folder_problem': '',
        'cpus': [4 * (rank % 2) + i for i in range(4)],
        'num_machine_cpus': 16,
        'cgroup': asdict(GroupLimits()),
        'shared_memory_free_bytes': 10**10,
        'tmp_dir': '/tmp',
        'tmp_dir_problem': '',
        'ulimits': ULIMITS,
        'free_processes': None,
        'use': {
            'cores': f'{rank % 2}',
            'num_cores': 1,
            'wall_s': 1.0,
            'cpu_s': 0.1,
            'cores_s': 0.2,
            'load': 0.5,
            'machine': host,
        },
        'clock_offset_s': 0.001,
        'all_reduce_s': 0.01,
        'all_reduce_bytes': 10**8,
    }
    return copy.deepcopy({**row, **changes})


def rows(h1_changes=None, **h2_changes):
    """Return facts of two ranks on each of two hosts, with changes per host."""
    return [
        *(facts(r, 'h1', **h1_changes or {}) for r in (0, 1)),
        *(facts(r, 'h2', **h2_changes) for r in (2, 3)),
    ]


def check(name, gathered, **requested):
    return next(c for c in check_facts(gathered, **requested) if c.name == name)


def cgroup(**allowed):
    return {'cgroup': asdict(GroupLimits(**allowed))}


def ulimit(**changed):
    return {'ulimits': {**ULIMITS, **changed}}


def processor(uses):
    return {'processor': {**EPYC, 'has': uses, 'uses': uses}}


def test_suitable_hosts_pass():
    checks = check_facts(rows(), 'cpu', 'bfloat16', 2, 2, 10**9)
    assert not has_failed(checks)
    assert render_checks(checks, is_quiet=True) == 'doctor: 25 checks passed, 0 failed, 0 warnings'
    assert '100 MB in 10 ms: 10.00 GB/s, bus 15.00 GB/s' in render_checks(checks, is_quiet=False)


# Check, changes of h2, values of the configuration, status, finding and advice.
CASES = [
    (
        'program',
        {'code': 'bbbb'},
        {},
        'failed',
        'code bbbb on h2, but code aaaa on h1',
        'the same commit on h2',
    ),
    (
        'packages',
        {'packages': {**PACKAGES, 'numpy': '1.22.0'}},
        {},
        'failed',
        'numpy 1.22.0 on h2, but numpy 1.23.5 on h1',
        'launch/setup.sh on h2',
    ),
    (
        'packages',
        {'packages': {'mxnet': '1.9.1', 'horovod': '0.28.1'}},
        {},
        'failed',
        'numpy missing on h2',
        '',
    ),
    (
        'data set',
        {'data': {**DATA, 'manifest': 'xxxx', 'num_images': 9}},
        {},
        'failed',
        'manifest xxxx with 9 images on h2, but manifest mmmm with 1797 images on h1',
        'to h2 again',
    ),
    ('.idx and .rec', {}, {}, 'ok', '128 records checked on each rank, with their checksums', ''),
    (
        'data set',
        {'data': {'problem': 'train.rec: no such file'}},
        {},
        'failed',
        'on h2: train.rec: no',
        'prepare',
    ),
    (
        'clocks',
        {'clock_offset_s': -3.2},
        {},
        'failed',
        'at most 3200 ms apart (h2 and h1)',
        'clock of h2',
    ),
    (
        'ranks and nodes',
        {'local_size': 1},
        {'ranks_per_node': 2},
        'failed',
        '2 nodes (h1: 2, h2: 1)',
        'h2 has 1',
    ),
    ('ranks and nodes', {}, {'num_nodes': 4}, 'failed', '4 ranks on 2 nodes', 'run.num_nodes is 4'),
    (
        'disk',
        {'disk_free_bytes': 10},
        {'needed_disk_bytes': 10**9},
        'failed',
        '0.0 GB free for the run folder on h2, 1.0 GB needed',
        'free space',
    ),
    (
        'TMPDIR',
        {'tmp_dir': '/scratch', 'tmp_dir_problem': 'No space left on device'},
        {},
        'failed',
        '/scratch on h2: No space left on device; expected a folder with 10 MB free',
        'set TMPDIR',
    ),
    ('Horovod', {}, {'device': 'gpu'}, 'failed', 'operations MPI+Gloo', 'built with NCCL'),
    (
        'processor',
        processor('AVX2'),
        {'precision': 'bfloat16'},
        'failed',
        'EPYC, AVX2 on h2',
        'use float32',
    ),
    ('layers', {'layers': 'plain'}, {}, 'ok', 'fused on h1; plain on h2', ''),
    (
        'processor',
        processor('AVX2'),
        {},
        'warning',
        'EPYC, AVX2 on h2, but EPYC, AVX-512 BF16 on h1',
        'slowest',
    ),
    (
        'threads',
        {'omp_num_threads': '5'},
        {},
        'warning',
        '10 threads on the 8 CPUs available to the ranks of h2',
        'fewer ranks',
    ),
    (
        'threads',
        {'omp_num_threads': ''},
        {},
        'warning',
        'OMP_NUM_THREADS is not set on h2',
        'launch/',
    ),
    (
        'threads',
        cgroup(quota_cpus=6.5),
        {},
        'warning',
        '8 threads on the 6.5 CPUs available to the ranks of h2',
        '',
    ),
    # A rank has at least one thread, so the CPU check warns instead.
    ('threads', {**cgroup(quota_cpus=1.5), 'omp_num_threads': '1'}, {}, 'ok', '4 per rank', ''),
    ('CPUs', {}, {}, 'ok', '2 ranks may use 8 of the 16 CPUs of h1', ''),
    # taskset
    (
        'CPUs',
        {'cpus': [3]},
        {},
        'warning',
        '2 ranks may use 1 of the 16 CPUs of h2',
        'at most 1 there',
    ),
    (
        'CPUs',
        cgroup(quota_cpus=1.5),
        {},
        'warning',
        '1.5 of the 16 CPUs of h2, the quota of their',
        'at most 1 there',
    ),
    (
        'memory',
        {'memory_available_bytes': 3 << 30},
        {},
        'warning',
        '1.6 GB available per rank on h2',
        'fewer ranks',
    ),
    (
        'memory',
        cgroup(memory_limit_bytes=8 * 10**9, memory_used_bytes=10**9),
        {},
        'ok',
        '3.5 GB available per rank on h2; their control group allows 8.0 GB, 1.0 GB of it in use',
        'raise the limit',
    ),
    (
        'memory',
        cgroup(memory_limit_bytes=10**9, memory_used_bytes=2 * 10**9),
        {},
        'warning',
        '0.0 GB available',
        '',
    ),
    (
        'shared memory',
        {'shared_memory_free_bytes': 8 << 20},
        {},
        'warning',
        '8 MB free in /dev/shm on h2, 8 MB needed',
        '--shm-size=1g',
    ),
    ('shared memory', {'shared_memory_free_bytes': None}, {}, 'warning', 'no /dev/shm on h2', ''),
    (
        'shared memory',
        {'shared_memory_free_bytes': 64 << 20},
        {'device': 'gpu'},
        'warning',
        '1,074 MB needed',
        '',
    ),
    (
        'processes',
        {'free_processes': [31, 'ulimit -u is 40']},
        {},
        'warning',
        '31 more can start on h2 (ulimit -u is 40)',
        'raise ulimit -u',
    ),
    ('open files', ulimit(open_files=138), {}, 'ok', '138 for a rank on h2, up to 138 needed', ''),
    (
        'open files',
        ulimit(open_files=137),
        {},
        'warning',
        '137 for a rank on h2, up to 138 needed',
        'ulimit -n 138',
    ),
    ('open files', ulimit(open_files=None), {}, 'ok', '1,024 for a rank on h1', ''),
    (
        'address space',
        ulimit(address_space_bytes=4 * 10**9),
        {},
        'warning',
        '4,000.0 MB for a rank on h2',
        'ulimit -v',
    ),
    (
        'locked memory',
        {},
        {'device': 'gpu'},
        'warning',
        '8.4 MB for a rank on h1, h2, expected unlimited',
        'ulimit -l',
    ),
    ('locked memory', {}, {}, 'not needed', '', ''),
    (
        'energy',
        {},
        {},
        'ok',
        '4 CPU packages can be measured; 16 GPUs can be measured (run.telemetry)',
        '',
    ),
    (
        'energy',
        {'energy': {'cpu': 0, 'gpu': 8}},
        {},
        'ok',
        '2 CPU packages can be measured, none on h2, so there',
        '',
    ),
    ('run folder', {}, {}, 'ok', 'visible on all 2 hosts', ''),
    (
        'run folder',
        {'run_folder_problem': 'no /run/.doctor-1'},
        {},
        'warning',
        'files of h1 are not visible on h2 (no /run/.doctor-1)',
        '',
    ),
]


@pytest.mark.parametrize(
    'name, changes, requested, status, found, fix',
    CASES,
    ids=[f'{number} {case[0]}' for number, case in enumerate(CASES)],
)
def test_differences_between_hosts_are_reported(name, changes, requested, status, found, fix):
    c = check(name, rows(**changes), **requested)
    assert (c.status, found in c.found, fix in c.fix) == (status, True, True), c


def test_problems_of_rank_0_and_of_single_ranks():
    unsealed = {'data': {**DATA, 'has_checksums': False}}
    assert (
        ', without checksums, because an earlier version'
        in check('.idx and .rec', rows(unsealed)).found
    )
    read_only = {'run_folder_problem': '/run: Read-only file system'}
    assert check('run folder', rows(read_only)).status == 'failed'
    assert check('run folder', rows({'run_folder_problem': None})).status == 'not needed'
    assert check(
        'open files', rows(ulimit(open_files=None), **ulimit(open_files=None))
    ).found.startswith('unlimited')
    with_mpi = {'horovod': {**rows()[0]['horovod'], 'has_gloo': False}}
    many = [facts(rank, f'h{rank // 8}', **with_mpi) for rank in range(3584)]
    assert (check('open files', many).status, check('open files', many).found[-16:]) == (
        'ok',
        'up to 128 needed',
    )
    single_ranks = [
        facts(r, f'h{r}', local_rank=0, local_size=1, shared_memory_free_bytes=0) for r in range(2)
    ]
    assert check('shared memory', single_ranks).status == 'not needed'


def test_limits_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    limits = limit_facts()
    assert (limits['tmp_dir'], limits['tmp_dir_problem']) == (str(tmp_path), '')
    assert (
        limits['cpus'] == sorted(os.sched_getaffinity(0)) and limits['memory_available_bytes'] > 0
    )
    assert limits['ulimits']['open_files'] > 0 and not list(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, 'posix_fallocate', Mock(side_effect=full))
    assert limit_facts()['tmp_dir_problem'] == 'No space left on device'
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'none'))
    assert limit_facts()['tmp_dir_problem'] == 'No such file or directory'


def test_ranks_refuse_a_full_session_folder_of_open_mpi(monkeypatch, tmp_path):
    base = tmp_path / 'mlperf_rn50-1-a'
    base.mkdir()
    monkeypatch.setattr(
        mpi_session, 'free_bytes', lambda folder: 9 << 20 if folder == tmp_path else None
    )
    env = {'OMPI_MCA_orte_tmpdir_base': str(base)}
    with pytest.raises(ConfigError, match='has 9.4 MB free, expected 10 MB for files of Open MPI'):
        check_session(env)
    check_session({})  # horovodrun and srun do not use this folder
    (base / 'segment').write_bytes(bytes(2 << 20))
    check_session(env)  # the files already exist


def test_other_programs_on_the_cpus_of_a_rank_are_a_warning():
    usual, busy = rows(), rows()
    busy[3]['use'] |= {'cores_s': 0.9, 'load': 8.2}
    assert check('other programs', usual).status == 'ok'
    found = check('other programs', busy)
    assert found.status == 'warning'
    assert found.found == 'they use 80 % of the CPUs 1 of rank 3 on h2 (load average 8.2)'
    for row in busy:
        del row['use']['cores_s']  # unknown in some containers
    assert check('other programs', busy).status == 'not needed'
