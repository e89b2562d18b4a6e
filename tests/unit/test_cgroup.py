"""Control groups: limits on made-up trees of both versions, and explanations of out-of-memory
errors."""

import os
import re
import signal

import pytest
from helpers import write_files

from mlperf_rn50.system import cgroup
from mlperf_rn50.system import out_of_memory as oom
from mlperf_rn50.system.cgroup import GroupLimits, find_limits, memory_cgroup
from mlperf_rn50.system.out_of_memory import MemorySample, explain_error, explain_kill

GB = 10**9
V2 = '30 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n'
V1 = (
    '31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n'
    '32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n'
    '33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n'
    '34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n'
    '35 31 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n'
)


@pytest.fixture
def tree(tmp_path):
    """Function that writes /proc/self/cgroup, mountinfo and files in /sys/fs/cgroup; returns their
    limits."""

    def make(groups, mounts, files):
        write_files(
            tmp_path,
            {
                'proc/self/cgroup': groups,
                'proc/self/mountinfo': mounts,
                **{f'sys/fs/cgroup/{k}': v for k, v in files.items()},
            },
        )
        return find_limits(tmp_path)

    return make


def test_missing_groups_set_no_limits(tree, tmp_path):
    assert find_limits(tmp_path) == GroupLimits()  # not even /proc
    assert tree('0::/\n', V2, {}) == GroupLimits()
    assert (
        tree(
            '0::/job\n',
            V2,
            {
                'job/memory.max': 'max\n',
                'job/memory.current': '5\n',
                'job/cpu.max': 'max 100000\n',
                'job/cpuset.cpus.effective': '\n',
            },
        )
        == GroupLimits()
    )


def test_tightest_of_nested_groups_applies(tree):
    limits = tree(
        '0::/job/step/task\n',
        V2,
        {
            # other processes of the job leave the least memory
            'job/memory.max': 8 * GB,
            'job/memory.current': 7 * GB,
            'job/step/memory.max': 4 * GB,
            'job/step/memory.current': GB,
            'job/step/task/memory.max': 'max',
            'job/step/task/memory.current': GB,
            'job/cpu.max': '150000 100000',
            'job/step/cpu.max': '800000 100000',
            'job/step/task/cpu.max': 'max 100000',
            'cpuset.cpus.effective': '0-63',
            'job/cpuset.cpus.effective': '0-7,16',
            'job/step/cpuset.cpus.effective': '4-9',
        },
    )
    assert limits == GroupLimits(8 * GB, 7 * GB, 1.5, (4, 5, 6, 7))
    limits = tree(
        '0::/job\n',
        V2,
        {
            'job/memory.max': 8 * GB,
            'job/memory.current': 8 * GB,
            'job/memory.stat': f'anon {GB}\nfile {7 * GB}\ninactive_file {6 * GB}\n',
        },
    )
    assert limits.memory_used_bytes == 2 * GB  # reclaimable page cache does not count as used


def test_version_1_with_a_group_in_each_hierarchy(tree):
    limits = tree(
        '4:memory:/slurm/job\n3:cpuset:/slurm\n2:cpu,cpuacct:/slurm/job\n1:name=systemd:/\n0::/\n',
        V1,
        {
            'memory/memory.limit_in_bytes': 9223372036854771712,
            'memory/slurm/memory.limit_in_bytes': 6 * GB,
            'memory/slurm/memory.usage_in_bytes': 3 * GB,
            'memory/slurm/job/memory.limit_in_bytes': 4 * GB,
            'memory/slurm/job/memory.usage_in_bytes': 3 * GB,
            'memory/slurm/job/memory.stat': f'inactive_file 1\ntotal_inactive_file {GB}\n',
            'cpu,cpuacct/slurm/cpu.cfs_quota_us': 250000,
            'cpu,cpuacct/slurm/cpu.cfs_period_us': 100000,
            'cpu,cpuacct/slurm/job/cpu.cfs_quota_us': -1,
            'cpu,cpuacct/slurm/job/cpu.cfs_period_us': 100000,
            'cpuset/cpuset.cpus': '0-7',
            'cpuset/slurm/cpuset.cpus': '2-3',
            'cpuset/slurm/cpuset.effective_cpus': '2',
        },
    )
    assert limits == GroupLimits(4 * GB, 2 * GB, 2.5, (2,))
    no_limit = {'memory/job/memory.limit_in_bytes': 9223372036854771712}  # as in version 1
    assert tree('4:memory:/job\n', V1, no_limit) == GroupLimits()


def test_group_of_a_container_is_the_outermost(tree):
    # With a cgroup namespace, and without one, so that the path is the host's and the mount begins
    # at the group.
    limits = {'memory.max': 4 * GB, 'memory.current': GB}
    assert tree('0::/\n', V2, limits).memory_limit_bytes == 4 * GB
    v1 = '33 31 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n'
    files = {'memory/memory.limit_in_bytes': 2 * GB, 'memory/memory.usage_in_bytes': GB}
    assert tree('4:memory:/docker/abc\n', v1, files).memory_limit_bytes == 2 * GB
    assert (
        tree(
            '4:memory:/docker/abc/below\n',
            v1,
            {
                **files,
                'memory/below/memory.limit_in_bytes': GB,
                'memory/below/memory.usage_in_bytes': 0,
                'memory/memory.usage_in_bytes': 0,
            },
        ).memory_limit_bytes
        == GB
    )
    assert tree('4:memory:/elsewhere\n', v1, files).memory_limit_bytes == 2 * GB
    assert (
        tree('0::/../other\n', V2, {'../other/memory.max': GB, **limits}).memory_limit_bytes
        == 4 * GB
    )


@pytest.mark.parametrize('text', ['nonsense', '-5', '5 0', '3-1'])
def test_invalid_text_sets_no_limit(tree, text):
    names = ('memory.max', 'cpu.max', 'cpuset.cpus.effective')
    limits = tree(
        '0::/job\nnonsense\n1:\n', 'nonsense\n - \n' + V2, {f'job/{n}': text for n in names}
    )
    assert (limits.quota_cpus, limits.memory_limit_bytes) == (None, None)


@pytest.mark.parametrize(
    'groups, mounts, files, expected',
    [
        ('0::/job/rank\n', V2, ['job/memory.events', 'job/rank/memory.events'], 'job/rank'),
        (
            '9:name=systemd:/\n4:memory:/job\n0::/\n',
            V1,
            ['memory/job/memory.oom_control'],
            'memory/job',
        ),
        ('0::/docker/81af\n', V2, ['memory.events'], '.'),
        ('0::/\n', V2, ['memory.max'], None),
    ],
)
def test_group_with_the_kill_counter(tree, tmp_path, groups, mounts, files, expected):
    tree(groups, mounts, dict.fromkeys(files, 'oom_kill 0'))
    assert memory_cgroup(tmp_path) == (
        None if expected is None else tmp_path / 'sys/fs/cgroup' / expected
    )


@pytest.mark.parametrize(
    'name, text',
    [
        ('memory.events', 'oom 3\noom_kill 2\noom_group_kill 0\n'),
        ('memory.oom_control', 'oom_kill_disable 0\nunder_oom 0\noom_kill 2\n'),
    ],
)
def test_kills_are_counted_in_both_versions(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert oom.oom_kills(tmp_path) == 2 and oom.oom_kills(tmp_path / 'none') is None


BEFORE, AFTER = MemorySample(int(1.5 * GB), 0, 1), MemorySample(int(1.5 * GB), 0, 2)


@pytest.mark.parametrize(
    'after, limit, num_ranks, expected',
    [
        (BEFORE, 4 * GB, 4, ''),
        (
            AFTER,
            4 * GB,
            4,
            'out of memory: the memory limit of the cgroup is 4.0 GB, 4 ranks used about 6.0 GB '
            'together, 1.5 GB each; start at most 2 ranks of this size on a host, or lower '
            'train.local_batch_size',
        ),
        (
            AFTER,
            1 * GB,
            1,
            'out of memory: the memory limit of the cgroup is 1.0 GB, this rank used 1.5 GB; lower '
            'train.local_batch_size',
        ),
        (
            AFTER,
            None,
            50,
            'out of memory: the 64.0 GB of the host are exhausted, 50 ranks used about 75.0 GB '
            'together, 1.5 GB each; start at most 42 ranks of this size on a host, or lower '
            'train.local_batch_size',
        ),
        (
            AFTER,
            64 * GB,
            2,
            'out of memory: the 64.0 GB of the host are exhausted, 2 ranks used about 3.0 GB '
            'together, 1.5 GB each; lower train.local_batch_size, or start fewer ranks on a host',
        ),
    ],
)
def test_explanation_of_a_kill(after, limit, num_ranks, expected):
    assert explain_kill(BEFORE, after, limit, 64 * GB, num_ranks) == expected


def test_explanation_of_an_abort(monkeypatch):
    def explain(used: int, limit: int | None, number: int = signal.SIGABRT) -> str:
        monkeypatch.setattr(oom, 'soft_limit', lambda kind: limit)
        return oom.explain_death(number, MemorySample(0, used, 1), AFTER, 1)

    assert (
        explain(int(3.9 * GB), None) == explain(GB, 4 * GB) == explain(GB, GB, signal.SIGTERM) == ''
    )
    assert explain(int(3.9 * GB), 4 * GB).startswith(
        'out of memory: the address space of the process is limited to 4.0 GB (ulimit -v), 3.9 GB '
        'used; raise'
    )


@pytest.mark.parametrize(
    'error',
    [
        MemoryError(),
        RuntimeError('std::bad_alloc'),
        OSError(12, 'Cannot allocate memory'),
        RuntimeError('[x] src/storage: Failed to allocate CPU Memory'),
    ],
)
def test_explanation_of_out_of_memory_errors(error):
    assert explain_error(error).startswith('out of memory: ')
    assert explain_error(ValueError('no such memory cell')) == ''


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(11, 'Resource temporarily unavailable'),
        RuntimeError('Error in DALI: Resource temporarily unavailable'),
    ],
)
def test_explanation_of_too_few_processes(monkeypatch, error):
    monkeypatch.setattr(oom, 'free_processes', lambda: (3, 'ulimit -u is 40'))
    assert re.search(
        'no process or thread can be started .*; ulimit -u is 40; raise the limit',
        explain_error(error),
    )


def test_exit_code_of_a_library_is_explained(monkeypatch):
    monkeypatch.setattr(oom, 'soft_limit', lambda kind: None)
    assert [oom.explain_exit(code) for code in (0, 1, 2, 75, 130, 137)] == [''] * 6
    assert 'of a library' in oom.explain_exit(17) and 'memory' not in oom.explain_exit(5)
    monkeypatch.setattr(oom, 'soft_limit', lambda kind: 3 * GB)
    assert 'probably out of memory, as ulimit -v is 3.0 GB' in oom.explain_exit(17)


def test_processes_left_by_the_tightest_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup.resource, 'getrlimit', lambda _: (100, 100))
    monkeypatch.setattr(cgroup.os, 'geteuid', lambda: 0)
    assert cgroup.free_processes(tmp_path) is None
    uid = os.getuid()
    write_files(
        tmp_path,
        {
            'proc/7/status': f'Uid:\t{uid}\t{uid}\nThreads:\t30',
            'proc/8/status': 'Uid:\t4711\t1\nThreads:\t9',
            'proc/self/cgroup': '0::/job',
            'sys/fs/cgroup/job/pids.max': '64',
            'proc/self/mountinfo': '1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw',
            'sys/fs/cgroup/job/pids.current': '14',
        },
    )
    assert cgroup.free_processes(tmp_path) == (50, 'the pids limit of the cgroup is 64')
    monkeypatch.setattr(cgroup.os, 'geteuid', lambda: 1000)
    assert cgroup.free_processes(tmp_path) == (50, 'the pids limit of the cgroup is 64')
    (tmp_path / 'proc/7/status').write_text(f'Uid:\t{uid}\t{uid}\nThreads:\t90')
    assert cgroup.free_processes(tmp_path) == (10, 'ulimit -u is 100')


def test_sample_of_a_dead_process_keeps_earlier_values(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, 'PROC', tmp_path)
    status = 'Name:\tx\nVmPeak:\t 2000 kB\nVmHWM:\t 1000 kB\n'
    write_files(tmp_path, {'7/status': status, 'vmstat': 'pgfault 9\noom_kill 3\n'})
    sample = oom.take_sample(7, None)
    assert sample == MemorySample(1024000, 2048000, 3)
    (tmp_path / '7/status').write_text('Name:\tx\nState:\tZ (zombie)\n')
    assert oom.take_sample(7, None, sample) == sample
