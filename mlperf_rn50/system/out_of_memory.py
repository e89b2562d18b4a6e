"""Diagnosis of out-of-memory failures: the limit, the memory used, and how many ranks would fit."""

import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.errors import EXIT_CODES, EXIT_USAGE
from mlperf_rn50.system.cgroup import find_limits, free_processes, read_small
from mlperf_rn50.text import plural

PROC = Path('/proc')
_FAILED_ALLOCATION = re.compile(
    r'bad_alloc|Memory allocation failed|Failed to allocate CPU Memory|'
    r'Cannot allocate memory|failed to map segment|start new thread',
    re.IGNORECASE,
)

# fork() and clone() fail with EAGAIN
_FAILED_START = re.compile('Resource temporarily unavailable|start new thread')


def read_numbers(path: Path) -> dict[str, int]:
    """Return the numbers in lines 'name number' (memory.events, vmstat), 'name: number' (io) and
    'Name: number kB'.

    The latter (status, meminfo) are converted to bytes. Return {} for an unreadable file.
    """
    lines = re.findall(r'^(\w+):?\s+(\d+)( kB)?$', read_small(path), re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}


def oom_kills(folder: Path) -> int | None:
    """Return the number of out-of-memory kills in a cgroup, or None if the kernel does not count
    them."""
    return (
        read_numbers(folder / 'memory.events') or read_numbers(folder / 'memory.oom_control')
    ).get('oom_kill')


@dataclass(frozen=True)
class MemorySample:
    """Peak memory and address space of a process in bytes (0: unknown), out-of-memory kills in its
    cgroup or host."""

    peak: int = 0
    peak_address_space: int = 0
    num_kills: int = 0


def take_sample(
    pid: int, cgroup: Path | None, before: MemorySample = MemorySample()
) -> MemorySample:
    """Sample a process. Values missing after its end come from the previous sample."""
    sizes = read_numbers(PROC / str(pid) / 'status')
    num_kills = oom_kills(cgroup) if cgroup else None
    if num_kills is None:
        num_kills = read_numbers(PROC / 'vmstat').get('oom_kill', 0)
    return MemorySample(
        sizes.get('VmHWM', before.peak), sizes.get('VmPeak', before.peak_address_space), num_kills
    )


def gigabytes(num_bytes: int) -> str:
    return f'{num_bytes / 1e9:.1f} GB'


def explain_kill(
    before: MemorySample, after: MemorySample, limit: int | None, host_total: int, num_ranks: int
) -> str:
    """Explain the SIGKILL of a process. Return '' if memory was not the reason. limit: of the
    cgroup, in bytes."""
    if after.num_kills <= before.num_kills:
        return ''
    total = host_total
    cause = f'the {gigabytes(host_total)} of the host are exhausted'
    if limit is not None and limit < host_total:
        total = limit
        cause = f'the memory limit of the cgroup is {gigabytes(limit)}'
    each = gigabytes(before.peak)
    used = f'this rank used {each}'
    if num_ranks > 1:
        together = gigabytes(num_ranks * before.peak)
        used = f'{num_ranks} ranks used about {together} together, {each} each'
    num_fit = total // before.peak if before.peak else 0
    fix = 'lower train.local_batch_size'
    if 0 < num_fit < num_ranks:
        fix = f'start at most {plural(num_fit, "rank")} of this size on a host, or {fix}'
    elif num_ranks > 1:
        fix += ', or start fewer ranks on a host'
    return f'out of memory: {cause}, {used}; {fix}'


def _address_space_message(name: str, limit: int, used: int, fix: str = '') -> str:
    return (
        f'out of memory: {name} is limited to {gigabytes(limit)} (ulimit -v), {gigabytes(used)} '
        f'used; raise the limit (ulimit -v unlimited), or {fix or "lower train.local_batch_size"}'
    )


def soft_limit(kind: int) -> int | None:
    """Return a soft limit of this process and its children (memory limits in bytes), or None if
    unlimited."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_death(number: int, before: MemorySample, after: MemorySample, num_ranks: int) -> str:
    """Explain the end of a process by a signal. Return '' if memory was not the reason."""
    if number == signal.SIGKILL:
        host_total = read_numbers(PROC / 'meminfo').get('MemTotal', 0)
        return explain_kill(before, after, find_limits().memory_limit_bytes, host_total, num_ranks)
    used, limit = before.peak_address_space, soft_limit(resource.RLIMIT_AS)
    if (
        number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        and limit is not None
        and used >= 0.8 * limit
    ):
        return _address_space_message('the address space of the process', limit, used)
    return ''


def explain_exit(code: int) -> str:
    """Return an addition to an exit code with which a library, such as MPI, ended a rank; '' for
    this program's."""
    if code >= 128 or code in (*EXIT_CODES.values(), EXIT_USAGE):
        return ''
    limit = soft_limit(resource.RLIMIT_AS)
    memory = ''
    if limit is not None:
        memory = f', probably out of memory, as ulimit -v is {gigabytes(limit)}'
    return (
        f' of a library, such as MPI or Horovod{memory}; see its lines above, and run '
        'mlperf-rn50 doctor'
    )


def explain_error(error: BaseException, fix: str = '') -> str:
    """Explain an exception that reports a failed allocation or start of a process; return '' for
    any other one.

    fix: what to do, by default about the ranks of a run.
    """
    text = str(error)
    shown = ' '.join(text.split())[:120]
    limit = soft_limit(resource.RLIMIT_AS)
    if limit is None and _FAILED_START.search(text):
        free = free_processes()
        known = f'; {free[1]}' if free else ''
        return (
            f'no process or thread can be started ({shown}){known}; raise the limit of processes '
            f'(ulimit -u, pids of the container), or {fix or "start fewer ranks on a host"}'
        )
    if not isinstance(error, MemoryError) and not _FAILED_ALLOCATION.search(text):
        return ''
    used = read_numbers(PROC / 'self/status')
    if limit is not None:
        # A process that cannot even read its status has used all of its address space.
        return _address_space_message(
            'the address space of this process', limit, used.get('VmPeak', limit), fix
        )
    host = read_numbers(PROC / 'meminfo')
    peak = gigabytes(used.get('VmHWM', 0))
    left = gigabytes(host.get('MemAvailable', 0))
    total = gigabytes(host.get('MemTotal', 0))
    return (
        f'out of memory: an allocation failed ({shown or type(error).__name__}); this process used '
        f'{peak}, the host has {left} of {total} left; '
        + (fix or 'lower train.local_batch_size, or start fewer ranks on a host')
    )


def lack_of(error: Exception, fix: str) -> str:
    """Return what a library such as Pillow or DALI lacked when it failed, with the fix; '' for
    other failures."""
    return explain_error(error, fix) if isinstance(error, RuntimeError | MemoryError) else ''
