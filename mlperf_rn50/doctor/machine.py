"""Facts and checks about a machine's limits for its ranks: CPUs, memory, shared memory, TMPDIR and
ulimits."""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict

import psutil

from mlperf_rn50.doctor.result import Check, Facts, by_node, hosts_of
from mlperf_rn50.system.cgroup import find_limits, free_processes, processes_needed
from mlperf_rn50.system.launcher_env import launched_local
from mlperf_rn50.system.mpi_session import (
    SESSION_BYTES,
    SHARED_MEMORY,
    free_bytes,
    session_problem,
    tmp_dir,
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
_MEASURED_S, _BUSY = 1.0, 0.25
# per rank, without connections; 31 were measured with 2 ranks, and CUDA opens dozens more
_NUM_OPEN_FILES = 128
_ULIMITS = {
    'open_files': resource.RLIMIT_NOFILE,
    'address_space_bytes': resource.RLIMIT_AS,
    'locked_bytes': resource.RLIMIT_MEMLOCK,
}


def limit_facts() -> Facts:
    folder = tmp_dir()
    return {
        'cpus': sorted(os.sched_getaffinity(0)),
        'num_machine_cpus': os.cpu_count() or 1,
        'omp_num_threads': os.environ.get('OMP_NUM_THREADS', ''),
        'cgroup': asdict(find_limits()),
        'memory_available_bytes': psutil.virtual_memory().available,
        'shared_memory_free_bytes': free_bytes(SHARED_MEMORY),
        'tmp_dir': str(folder),
        'tmp_dir_problem': session_problem(folder) if launched_local()[0] == 0 else '',
        'free_processes': free_processes() if launched_local()[0] == 0 else None,
        'ulimits': {name: soft_limit(kind) for name, kind in _ULIMITS.items()},
    }


def use_of_cores() -> Facts:
    """Measure the use of this rank's CPUs while no rank works; all ranks must call this
    together."""
    meter = CoreMeter()
    time.sleep(_MEASURED_S)
    return meter.take()


def _other_programs(rows: Sequence[Facts]) -> Check:
    name, uses = 'other programs', count_others([r['use'] for r in rows])
    shares = [
        (use['others_s'] / use['num_cores'] / use['wall_s'], r['rank'])
        for use, r in zip(uses, rows)
        if 'others_s' in use
    ]
    if not shares:
        return Check(
            name, 'not needed', 'not measured; the counters of these CPUs are not visible here'
        )
    share, rank = max(shares)
    use = uses[rank]
    return Check(
        name,
        'ok' if share <= _BUSY else 'warning',
        f'they use {percent(share, ".0f")} of the CPUs {use["cores"]} of rank {rank} on '
        f'{rows[rank]["host"]} (load average {use["load"]:.1f})',
        'all ranks would wait for these CPUs; stop the programs, which top lists, or choose other '
        'hosts',
    )


def _allowed_cpus(node: Sequence[Facts]) -> float:
    """Return the number of CPUs available to all ranks of a node together."""
    cpus = {cpu for r in node for cpu in r['cpus']}
    return min([len(cpus), *(r['cgroup']['quota_cpus'] for r in node if r['cgroup']['quota_cpus'])])


def _cpus(rows: Sequence[Facts]) -> Check:
    node = min(by_node(rows), key=lambda n: _allowed_cpus(n) / len(n))
    allowed, first = _allowed_cpus(node), node[0]
    quota = first['cgroup']['quota_cpus']
    return Check(
        'CPUs',
        'ok' if allowed >= len(node) else 'warning',
        f'{plural(len(node), "rank")} may use {allowed:g} of the {first["num_machine_cpus"]} CPUs '
        f'of {first["host"]}' + (', the quota of their control group' if quota == allowed else ''),
        'ranks with less than one CPU each wait for each other; start at most '
        f'{max(1, int(allowed))} there, '
        'or allow more CPUs (taskset, --cpus-per-task of Slurm, --cpus of a container)',
    )


def _threads(rows: Sequence[Facts]) -> Check:
    threads = [omp_threads(r['omp_num_threads']) for r in rows]
    unset = [r for r, n in zip(rows, threads) if n is None]
    if unset:
        return Check(
            'threads',
            'warning',
            f'OMP_NUM_THREADS is not set on {hosts_of(unset)}',
            'start the ranks with the scripts in launch/, which set it',
        )
    for node in by_node(rows):
        num_threads, allowed = (
            sum(omp_threads(r['omp_num_threads']) or 0 for r in node),
            _allowed_cpus(node),
        )
        if num_threads > max(allowed, len(node)):
            return Check(
                'threads',
                'warning',
                f'{num_threads} threads on the {allowed:g} CPUs available to the ranks '
                f'of {node[0]["host"]}',
                'start fewer ranks there or lower OMP_NUM_THREADS',
            )
    return Check('threads', 'ok', f'{threads[0]} per rank')


def _available_bytes(row: Facts) -> int:
    """Return the memory that the machine and the control group leave to the ranks of a node
    together."""
    limit, available = row['cgroup']['memory_limit_bytes'], row['memory_available_bytes']
    return (
        available
        if limit is None
        else max(0, min(available, limit - row['cgroup']['memory_used_bytes']))
    )


def _memory(rows: Sequence[Facts]) -> Check:
    row = min(rows, key=lambda r: _available_bytes(r) / r['local_size'])
    share, limit = _available_bytes(row) // row['local_size'], row['cgroup']['memory_limit_bytes']
    text, fix = f'{share / 1e9:.1f} GB available per rank on {row["host"]}', 'start fewer ranks'
    if limit is not None and _available_bytes(row) < row['memory_available_bytes']:
        text += (
            f'; their control group allows {limit / 1e9:.1f} GB, '
            f'{row["cgroup"]["memory_used_bytes"] / 1e9:.1f} GB of it in use'
        )
        fix += (
            ', or raise the limit (--mem of Slurm, --memory of a container); the kernel kills '
            'ranks that exceed it'
        )
    return Check(
        'memory',
        'ok' if share >= _MIN_MEMORY_BYTES else 'warning',
        text,
        f'expected at least {_MIN_MEMORY_BYTES / 1e9:.1f} GB per rank; {fix}',
    )


def _shared_memory(rows: Sequence[Facts], device: str) -> Check:
    name, on_gpu = 'shared memory', device == 'gpu'
    shared = [n for n in by_node(rows) if len(n) > 1]
    if not shared:
        return Check(name, 'not needed', 'one rank on each node')

    def needed(node: Sequence[Facts]) -> int:
        return max(len(node) * _SEGMENT_BYTES, _NCCL_SHARED_BYTES if on_gpu else 0)

    node = min(shared, key=lambda n: (n[0]['shared_memory_free_bytes'] or 0) - needed(n))
    free, host = node[0]['shared_memory_free_bytes'], node[0]['host']
    text = (
        f'no {SHARED_MEMORY} on {host}'
        if free is None
        else f'{free / 1e6:,.0f} MB free in {SHARED_MEMORY} on {host}'
    ) + f', {needed(node) / 1e6:,.0f} MB needed'
    return Check(
        name,
        'ok' if (free or 0) >= needed(node) else 'warning',
        text,
        'with less, the ranks of a node use TCP, which is slower; remove the vader_segment.* files '
        'of killed runs, or allow more (for a container: --shm-size=1g or --ipc=host)',
    )


def _tmp_dir(rows: Sequence[Facts]) -> Check:
    bad = [r for r in rows if r['tmp_dir_problem']]
    if bad:
        return Check(
            'TMPDIR',
            'failed',
            f'{bad[0]["tmp_dir"]} on {hosts_of(bad)}: {bad[0]["tmp_dir_problem"]}; expected a '
            f'folder with {SESSION_BYTES / 1e6:.0f} MB free, without which Open MPI hangs',
            'free space there, or set TMPDIR to a folder on a local disk',
        )
    return Check('TMPDIR', 'ok', f'{rows[0]["tmp_dir"]} has enough space for Open MPI')


def _open_files(rows: Sequence[Facts]) -> Check:
    # Gloo, if in use (Horovod 0.28.1, operations.cc), connects each rank to all others, again to
    # those on its node, and again to one rank on every node.
    needed = _NUM_OPEN_FILES + (2 * len(rows) + 2 if rows[0]['horovod']['has_gloo'] else 0)
    limited = [r for r in rows if r['ulimits']['open_files'] is not None]
    if not limited:
        return Check('open files', 'ok', f'unlimited on all ranks, up to {needed:,} needed')
    row = min(limited, key=lambda r: r['ulimits']['open_files'])
    limit, host = row['ulimits']['open_files'], row['host']
    return Check(
        'open files',
        'ok' if limit >= needed else 'warning',
        f'{limit:,} for a rank on {host}, up to {needed:,} needed',
        f'run ulimit -n {needed} before the launcher, or set nofile in /etc/security/limits.conf '
        f'of {host}',
    )


def _processes(rows: Sequence[Facts]) -> Check:
    limited = [(*r['free_processes'], r) for r in rows if r['free_processes']]
    if not limited:
        return Check('processes', 'ok', 'unlimited on all hosts')
    free, limit, row = min(limited, key=lambda x: x[0] - processes_needed(x[2]['local_size']))
    # The ranks of the doctor have started part of their threads.
    needed = processes_needed(row['local_size']) // 2
    return Check(
        'processes',
        'ok' if free >= needed else 'warning',
        f'{free:,} more can start on {row["host"]} ({limit}), up to {needed:,} needed',
        'raise ulimit -u, or the pids limit of the container or job',
    )


def _unlimited(name: str, rows: Sequence[Facts], key: str, fix: str) -> Check:
    limited = [r for r in rows if r['ulimits'][key] is not None]
    if not limited:
        return Check(name, 'ok', 'unlimited on all ranks')
    least = min(r['ulimits'][key] for r in limited)
    return Check(
        name,
        'warning',
        f'{least / 1e6:,.1f} MB for a rank on {hosts_of(limited)}, expected unlimited',
        fix,
    )


def check_limits(rows: Sequence[Facts], device: str) -> list[Check]:
    """Check the machine limits of all ranks. The first row is rank 0's, and device is
    train.device."""
    locked_memory = (
        Check('locked memory', 'not needed', 'train.device=cpu')
        if device != 'gpu'
        else _unlimited(
            'locked memory',
            rows,
            'locked_bytes',
            'transfers between GPU and network lock memory; run ulimit -l unlimited '
            'before the launcher, set memlock in /etc/security/limits.conf, or start a container '
            'with --ulimit memlock=-1',
        )
    )
    address_space = _unlimited(
        'address space',
        rows,
        'address_space_bytes',
        'a rank maps several times the memory '
        'that it uses; run ulimit -v unlimited before the launcher',
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
        address_space,
        locked_memory,
    ]
