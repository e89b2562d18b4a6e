"""Facts and checks about a machine's limits for its ranks: CPUs, memory, shared memory, TMPDIR and
ulimits."""

import os
import resource
import time
from collections.abc import Sequence
from typing import Any

import psutil

from mlperf_rn50.doctor.result import Check, RankFacts, Status, by_node, hosts_of
from mlperf_rn50.system.cgroup import find_limits, free_processes, processes_needed
from mlperf_rn50.system.launcher_env import launched_local
from mlperf_rn50.system.mpi_session import (
    SESSION_BYTES,
    SHARED_MEMORY,
    free_bytes,
    session_base,
    session_problem,
)
from mlperf_rn50.system.out_of_memory import soft_limit
from mlperf_rn50.system.processor import omp_threads
from mlperf_rn50.text import percent, plural
from mlperf_rn50.train.comm.cores import CoreMeter, count_others

_SEGMENT_BYTES = (4 << 20) + 4096  # per rank: Open MPI's btl_vader_segment_size and a page
# Source: docker run --shm-size=1g --ulimit memlock=-1 in the troubleshooting part of NVIDIA's NCCL
# user guide.
_NCCL_SHARED_BYTES = 1 << 30
_MIN_MEMORY_BYTES = 2 << 30
# time without work of the ranks, and use of their CPUs by other programs in it
_MEASURED_S = 1.0
_BUSY = 0.25
# per rank, without connections; 31 were measured with 2 ranks, and CUDA opens dozens more
_NUM_OPEN_FILES = 128
_ULIMITS = {
    'open_files': resource.RLIMIT_NOFILE,
    'address_space_bytes': resource.RLIMIT_AS,
    'locked_bytes': resource.RLIMIT_MEMLOCK,
}


def limit_facts() -> dict[str, Any]:
    """Return the facts of RankFacts about limits of this process and its machine."""
    folder = session_base()
    is_first = launched_local()[0] == 0  # one rank of a node examines what all share
    return {
        'cpus': sorted(os.sched_getaffinity(0)),
        'num_machine_cpus': os.cpu_count() or 1,
        'omp_num_threads': os.environ.get('OMP_NUM_THREADS', ''),
        'cgroup': find_limits(),
        'memory_available_bytes': psutil.virtual_memory().available,
        'shared_memory_free_bytes': free_bytes(SHARED_MEMORY),
        'tmp_dir': str(folder),
        'tmp_dir_problem': session_problem(folder) if is_first else '',
        'free_processes': free_processes() if is_first else None,
        'ulimits': {name: soft_limit(kind) for name, kind in _ULIMITS.items()},
    }


def use_of_cores() -> dict[str, Any]:
    """Measure the use of this rank's CPUs while no rank works; all ranks must call this
    together."""
    meter = CoreMeter()
    time.sleep(_MEASURED_S)
    return meter.take()


def _status(is_good: bool) -> Status:
    return 'ok' if is_good else 'warning'


def _other_programs(rows: Sequence[RankFacts]) -> Check:
    name = 'other programs'
    uses = count_others([r.use for r in rows])
    shares = [
        (use['others_s'] / use['num_cores'] / use['wall_s'], rank)
        for rank, use in enumerate(uses)
        if 'others_s' in use
    ]
    if not shares:
        missing = 'not measured; the counters of these CPUs are not visible here'
        return Check(name, 'not needed', missing)
    share, rank = max(shares)
    use = uses[rank]
    return Check(
        name,
        _status(share <= _BUSY),
        f'they use {percent(share, ".0f")} of the CPUs {use["cores"]} of rank {rank} on '
        f'{rows[rank].host} (load average {use["load"]:.1f})',
        'all ranks would wait for these CPUs; stop the programs, which top lists, or choose other '
        'hosts',
    )


def _allowed_cpus(node: Sequence[RankFacts]) -> float:
    """Return the number of CPUs available to all ranks of a node together."""
    quotas = [r.cgroup.quota_cpus for r in node if r.cgroup.quota_cpus]
    return min([len({cpu for r in node for cpu in r.cpus}), *quotas])


def _cpus(rows: Sequence[RankFacts]) -> Check:
    node = min(by_node(rows), key=lambda n: _allowed_cpus(n) / len(n))
    allowed = _allowed_cpus(node)
    first = node[0]
    quota = ', the quota of their control group' if first.cgroup.quota_cpus == allowed else ''
    return Check(
        'CPUs',
        _status(allowed >= len(node)),
        f'{plural(len(node), "rank")} may use {allowed:g} of the {first.num_machine_cpus} CPUs '
        f'of {first.host}{quota}',
        'ranks with less than one CPU each wait for each other; start at most '
        f'{max(1, int(allowed))} there, or allow more CPUs (taskset, --cpus-per-task of Slurm, '
        '--cpus of a container)',
    )


def _threads(rows: Sequence[RankFacts]) -> Check:
    name = 'threads'
    unset = [r for r in rows if omp_threads(r.omp_num_threads) is None]
    if unset:
        found = f'OMP_NUM_THREADS is not set on {hosts_of(unset)}'
        fix = 'start the ranks with the scripts in launch/, which set it'
        return Check(name, 'warning', found, fix)
    for node in by_node(rows):
        num_threads = sum(omp_threads(r.omp_num_threads) or 0 for r in node)
        allowed = _allowed_cpus(node)
        if num_threads > max(allowed, len(node)):
            available = f'{allowed:g} CPUs available to the ranks of {node[0].host}'
            fix = 'start fewer ranks there or lower OMP_NUM_THREADS'
            return Check(name, 'warning', f'{num_threads} threads on the {available}', fix)
    return Check(name, 'ok', f'{omp_threads(rows[0].omp_num_threads)} per rank')


def _available_bytes(row: RankFacts) -> int:
    """Return the memory that the machine and the control group leave to the ranks of a node
    together."""
    limit = row.cgroup.memory_limit_bytes
    if limit is None:
        return row.memory_available_bytes
    return max(0, min(row.memory_available_bytes, limit - row.cgroup.memory_used_bytes))


def _memory(rows: Sequence[RankFacts]) -> Check:
    row = min(rows, key=lambda r: _available_bytes(r) / r.local_size)
    share = _available_bytes(row) // row.local_size
    limit = row.cgroup.memory_limit_bytes
    found = f'{share / 1e9:.1f} GB available per rank on {row.host}'
    fix = f'expected at least {_MIN_MEMORY_BYTES / 1e9:.1f} GB per rank; start fewer ranks'
    if limit is not None and _available_bytes(row) < row.memory_available_bytes:
        found += (
            f'; their control group allows {limit / 1e9:.1f} GB, '
            f'{row.cgroup.memory_used_bytes / 1e9:.1f} GB of it in use'
        )
        fix += (
            ', or raise the limit (--mem of Slurm, --memory of a container); the kernel kills '
            'ranks that exceed it'
        )
    return Check('memory', _status(share >= _MIN_MEMORY_BYTES), found, fix)


def _shared_memory(rows: Sequence[RankFacts], device: str) -> Check:
    shared = [n for n in by_node(rows) if len(n) > 1]
    if not shared:
        return Check('shared memory', 'not needed', 'one rank on each node')

    def needed(node: Sequence[RankFacts]) -> int:
        return max(len(node) * _SEGMENT_BYTES, _NCCL_SHARED_BYTES if device == 'gpu' else 0)

    node = min(shared, key=lambda n: (n[0].shared_memory_free_bytes or 0) - needed(n))
    free = node[0].shared_memory_free_bytes
    found = (
        f'no {SHARED_MEMORY}' if free is None else f'{free / 1e6:,.0f} MB free in {SHARED_MEMORY}'
    )
    return Check(
        'shared memory',
        _status((free or 0) >= needed(node)),
        f'{found} on {node[0].host}, {needed(node) / 1e6:,.0f} MB needed',
        'with less, the ranks of a node use TCP, which is slower; remove the vader_segment.* '
        'files of killed runs, or allow more (for a container: --shm-size=1g or --ipc=host)',
    )


def _tmp_dir(rows: Sequence[RankFacts]) -> Check:
    bad = [r for r in rows if r.tmp_dir_problem]
    if not bad:
        return Check('TMPDIR', 'ok', f'{rows[0].tmp_dir} has enough space for Open MPI')
    return Check(
        'TMPDIR',
        'failed',
        f'{bad[0].tmp_dir} on {hosts_of(bad)}: {bad[0].tmp_dir_problem}; expected a '
        f'folder with {SESSION_BYTES / 1e6:.0f} MB free, without which Open MPI hangs',
        'free space there, or set TMPDIR to a folder on a local disk',
    )


def _open_files(rows: Sequence[RankFacts]) -> Check:
    # Gloo, if in use (Horovod 0.28.1, operations.cc), connects each rank to all others, again to
    # those on its node, and again to one rank on every node.
    needed = _NUM_OPEN_FILES + (2 * len(rows) + 2 if rows[0].horovod.has_gloo else 0)
    limited = _limited(rows, 'open_files')
    if not limited:
        return Check('open files', 'ok', f'unlimited on all ranks, up to {needed:,} needed')
    limit, row = limited[0]
    return Check(
        'open files',
        _status(limit >= needed),
        f'{limit:,} for a rank on {row.host}, up to {needed:,} needed',
        f'run ulimit -n {needed} before the launcher, or set nofile in /etc/security/limits.conf '
        f'of {row.host}',
    )


def _processes(rows: Sequence[RankFacts]) -> Check:
    limited = [(*r.free_processes, r) for r in rows if r.free_processes]
    if not limited:
        return Check('processes', 'ok', 'unlimited on all hosts')
    free, limit, row = min(limited, key=lambda x: x[0] - processes_needed(x[2].local_size))
    # The ranks of the doctor have started part of their threads.
    needed = processes_needed(row.local_size) // 2
    return Check(
        'processes',
        _status(free >= needed),
        f'{free:,} more can start on {row.host} ({limit}), up to {needed:,} needed',
        'raise ulimit -u, or the pids limit of the container or job',
    )


def _limited(rows: Sequence[RankFacts], key: str) -> list[tuple[int, RankFacts]]:
    """Return the ulimits of the ranks that have one, with the ranks, the lowest first."""
    limits = [(limit, r) for r in rows if (limit := r.ulimits[key]) is not None]
    return sorted(limits, key=lambda pair: pair[0])


def _unlimited(name: str, rows: Sequence[RankFacts], key: str, fix: str) -> Check:
    limited = _limited(rows, key)
    if not limited:
        return Check(name, 'ok', 'unlimited on all ranks')
    hosts = hosts_of([r for r in rows if r.ulimits[key] is not None])
    found = f'{limited[0][0] / 1e6:,.1f} MB for a rank on {hosts}, expected unlimited'
    return Check(name, 'warning', found, fix)


def _locked_memory(rows: Sequence[RankFacts], device: str) -> Check:
    if device != 'gpu':
        return Check('locked memory', 'not needed', 'train.device=cpu')
    fix = (
        'transfers between GPU and network lock memory; run ulimit -l unlimited before the '
        'launcher, set memlock in /etc/security/limits.conf, or start a container with --ulimit '
        'memlock=-1'
    )
    return _unlimited('locked memory', rows, 'locked_bytes', fix)


def check_limits(rows: Sequence[RankFacts], device: str) -> list[Check]:
    """Check the machine limits of all ranks. The first row is rank 0's, and device is
    train.device."""
    mapped = (
        'a rank maps several times the memory that it uses; run ulimit -v unlimited before the '
        'launcher'
    )
    return [
        _cpus(rows),
        _other_programs(rows),
        _threads(rows),
        _memory(rows),
        _shared_memory(rows, device),
        _tmp_dir(rows),
        _open_files(rows),
        _processes(rows),
        _unlimited('address space', rows, 'address_space_bytes', mapped),
        _locked_memory(rows, device),
    ]
