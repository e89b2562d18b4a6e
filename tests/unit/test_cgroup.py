"""Control groups: limits on made-up trees of both versions."""

import os

import pytest
from helpers import write_files

from mlperf_rn50.system import cgroup
from mlperf_rn50.system.cgroup import GroupLimits, find_limits, memory_cgroup

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
    """Function that writes /proc/self/cgroup, mountinfo and files in /sys/fs/cgroup, given as lines
    with name and content; returns their limits."""

    def make(groups, mounts, files=''):
        files = dict(
            line.replace('\\n', '\n').split(': ') for line in files.strip('\n').splitlines()
        )
        write_files(tmp_path, {'proc/self/cgroup': groups, 'proc/self/mountinfo': mounts})
        write_files(tmp_path / 'sys/fs/cgroup', files)
        return find_limits(tmp_path)

    return make


def test_missing_groups_set_no_limits(tree, tmp_path):
    assert find_limits(tmp_path) == GroupLimits()  # not even /proc
    assert tree('0::/\n', V2) == GroupLimits()
    files = """
job/memory.max: max
job/memory.current: 5
job/cpu.max: max 100000
job/cpuset.cpus.effective: """
    assert tree('0::/job\n', V2, files) == GroupLimits()


NESTED = """
job/memory.max: 8000000000
job/memory.current: 7000000000
job/step/memory.max: 4000000000
job/step/memory.current: 1000000000
job/step/task/memory.max: max
job/step/task/memory.current: 1000000000
job/cpu.max: 150000 100000
job/step/cpu.max: 800000 100000
job/step/task/cpu.max: max 100000
cpuset.cpus.effective: 0-63
job/cpuset.cpus.effective: 0-7,16
job/step/cpuset.cpus.effective: 4-9
"""
NESTED_V1 = """
memory/memory.limit_in_bytes: 9223372036854771712
memory/slurm/memory.limit_in_bytes: 6000000000
memory/slurm/memory.usage_in_bytes: 3000000000
memory/slurm/job/memory.limit_in_bytes: 4000000000
memory/slurm/job/memory.usage_in_bytes: 3000000000
memory/slurm/job/memory.stat: inactive_file 1\\ntotal_inactive_file 1000000000
cpu,cpuacct/slurm/cpu.cfs_quota_us: 250000
cpu,cpuacct/slurm/cpu.cfs_period_us: 100000
cpu,cpuacct/slurm/job/cpu.cfs_quota_us: -1
cpu,cpuacct/slurm/job/cpu.cfs_period_us: 100000
cpuset/cpuset.cpus: 0-7
cpuset/slurm/cpuset.cpus: 2-3
cpuset/slurm/cpuset.effective_cpus: 2
"""


def test_tightest_of_nested_groups_applies(tree):
    # Other processes of the job leave the least memory.
    limits = tree('0::/job/step/task\n', V2, NESTED)
    assert limits == GroupLimits(8 * GB, 7 * GB, 1.5, (4, 5, 6, 7))
    files = """
job/memory.max: 8000000000
job/memory.current: 8000000000
job/memory.stat: anon 1\\nfile 7000000000\\ninactive_file 6000000000
"""
    # Reclaimable page cache does not count as used.
    assert tree('0::/job\n', V2, files).memory_used_bytes == 2 * GB


def test_version_1_with_a_group_in_each_hierarchy(tree):
    groups = (
        '4:memory:/slurm/job\n3:cpuset:/slurm\n2:cpu,cpuacct:/slurm/job\n1:name=systemd:/\n0::/\n'
    )
    assert tree(groups, V1, NESTED_V1) == GroupLimits(4 * GB, 2 * GB, 2.5, (2,))
    no_limit = 'memory/job/memory.limit_in_bytes: 9223372036854771712'  # as in version 1
    assert tree('4:memory:/job\n', V1, no_limit) == GroupLimits()


def test_group_of_a_container_is_the_outermost(tree):
    # With a cgroup namespace, and without one, so that the path is the host's and the mount begins
    # at the group.
    limits = 'memory.max: 4000000000\nmemory.current: 1000000000'
    assert tree('0::/\n', V2, limits).memory_limit_bytes == 4 * GB
    mount = '33 31 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n'
    files = 'memory/memory.limit_in_bytes: 2000000000\nmemory/memory.usage_in_bytes: 0'
    assert tree('4:memory:/docker/abc\n', mount, files).memory_limit_bytes == 2 * GB
    assert tree('4:memory:/elsewhere\n', mount, files).memory_limit_bytes == 2 * GB
    below = """
memory/below/memory.limit_in_bytes: 1000000000
memory/below/memory.usage_in_bytes: 0
"""
    assert tree('4:memory:/docker/abc/below\n', mount, below).memory_limit_bytes == GB
    outside = '../other/memory.max: 1000000000'
    assert tree('0::/../other\n', V2, outside).memory_limit_bytes == 4 * GB


@pytest.mark.parametrize('text', ['nonsense', '-5', '5 0', '3-1'])
def test_invalid_text_sets_no_limit(tree, text):
    names = ('memory.max', 'cpu.max', 'cpuset.cpus.effective')
    files = '\n'.join(f'job/{name}: {text}' for name in names)
    limits = tree('0::/job\nnonsense\n1:\n', 'nonsense\n - \n' + V2, files)
    assert (limits.quota_cpus, limits.memory_limit_bytes) == (None, None)


@pytest.mark.parametrize(
    'groups, mounts, files, expected',
    [
        ('0::/job/rank\n', V2, 'job/memory.events job/rank/memory.events', 'job/rank'),
        (
            '9:name=systemd:/\n4:memory:/job\n0::/\n',
            V1,
            'memory/job/memory.oom_control',
            'memory/job',
        ),
        ('0::/docker/81af\n', V2, 'memory.events', '.'),
        ('0::/\n', V2, 'memory.max', None),
    ],
)
def test_group_with_the_kill_counter(tree, tmp_path, groups, mounts, files, expected):
    tree(groups, mounts, '\n'.join(f'{name}: oom_kill 0' for name in files.split()))
    found = memory_cgroup(tmp_path)
    assert found == (tmp_path / 'sys/fs/cgroup' / expected if expected else None)


def test_processes_left_by_the_tightest_limit(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup.resource, 'getrlimit', lambda _: (100, 100))
    monkeypatch.setattr(cgroup.os, 'geteuid', lambda: 0)
    assert cgroup.free_processes(tmp_path) is None
    uid = os.getuid()
    mine = {'proc/7/status': f'Uid:\t{uid}\t{uid}\nThreads:\t30'}
    write_files(tmp_path, {**mine, 'proc/8/status': 'Uid:\t4711\t1\nThreads:\t9'})
    tree('0::/job', V2, 'job/pids.max: 64\njob/pids.current: 14')
    assert cgroup.free_processes(tmp_path) == (50, 'the pids limit of the cgroup is 64')
    monkeypatch.setattr(cgroup.os, 'geteuid', lambda: 1000)
    assert cgroup.free_processes(tmp_path) == (50, 'the pids limit of the cgroup is 64')
    (tmp_path / 'proc/7/status').write_text(f'Uid:\t{uid}\t{uid}\nThreads:\t90')
    assert cgroup.free_processes(tmp_path) == (10, 'ulimit -u is 100')
