"""Whether a process was ended for want of memory, by which limit, and what would fit."""
import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.system.cgroup import find_limits, read_small

_PROC = Path('/proc')
_FAILED_ALLOCATION = re.compile(r'bad_alloc|Memory allocation failed|Failed to allocate CPU Memory|'
                                r'Cannot allocate memory|failed to map segment|start new thread', re.IGNORECASE)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of 'name number' (memory.events, vmstat) and the bytes of 'Name:  number kB' (status, meminfo)."""
    lines = re.findall(r'^(\w+):?\s+(\d+)( kB)?$', read_small(path), re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}


def oom_kills(folder: Path) -> int | None:
    """How many processes of a cgroup the kernel has killed for want of memory; None where it does not tell."""
    return (_numbers(folder / 'memory.events') or _numbers(folder / 'memory.oom_control')).get('oom_kill')


@dataclass(frozen=True)
class MemorySample:
    """Most bytes that were resident and mapped in a process, 0 where they are not known, and the number of
    out-of-memory kills in its cgroup; on the host where no cgroup counts them."""

    peak: int = 0
    peak_address_space: int = 0
    num_kills: int = 0


def take_sample(pid: int, cgroup: Path | None, before: MemorySample = MemorySample()) -> MemorySample:
    """A sample of a process; what one that has ended no longer tells stays as it was."""
    sizes = _numbers(_PROC / str(pid) / 'status')
    num_kills = oom_kills(cgroup) if cgroup else None
    if num_kills is None:
        num_kills = _numbers(_PROC / 'vmstat').get('oom_kill', 0)
    return MemorySample(sizes.get('VmHWM', before.peak), sizes.get('VmPeak', before.peak_address_space), num_kills)


def gigabytes(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f'{num_bytes / 1e9:.1f} GB'


def explain_kill(before: MemorySample, after: MemorySample, limit: int | None, host_total: int, num_ranks: int) -> str:
    """Why a process that SIGKILL ended had no memory; '' if the kernel did not end it for that.

    before is a sample of the running process; limit, of its cgroup, and host_total are in bytes.
    """
    if after.num_kills <= before.num_kills:
        return ''
    what, total = f'the host has {gigabytes(host_total)} and ran out of it', host_total
    if limit is not None and limit < host_total:
        what, total = f'the memory limit of its cgroup is {gigabytes(limit)}', limit
    used = f'this rank used {gigabytes(before.peak)}' if num_ranks == 1 else \
        f'its {num_ranks} ranks used about {gigabytes(num_ranks * before.peak)} together, {gigabytes(before.peak)} each'
    num_fit = int(total // before.peak) if before.peak else 0
    fix = 'lower train.local_batch_size'
    if 0 < num_fit < num_ranks:
        fix = f'{num_fit} of this size fit: start at most {num_fit} on a host, or {fix}'
    elif num_ranks > 1:
        fix += ', or start fewer ranks on a host'
    return f'out of memory: {what}, {used}; {fix}'


def explain_abort(peak_address_space: int, limit: int | None) -> str:
    """Why a process that aborted had no memory: it used its address space up; nothing if it did not."""
    if limit is None or peak_address_space < 0.8 * limit:
        return ''
    return _address_space_is_full('its address space', limit, peak_address_space)


def _address_space_is_full(whose: str, limit: int, used: int) -> str:
    return (f'out of memory: {whose} is limited to {gigabytes(limit)} (ulimit -v), of which it used {gigabytes(used)}; '
            'raise the limit (ulimit -v unlimited), or lower train.local_batch_size')


def soft_limit(kind: int) -> int | None:
    """A limit of this process and its children, in bytes where it is one of memory; None for none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_death(number: int, before: MemorySample, after: MemorySample, num_ranks: int) -> str:
    """Why a process that a signal ended had no memory; nothing where memory was not the reason."""
    if number == signal.SIGKILL:
        host_total = _numbers(_PROC / 'meminfo').get('MemTotal', 0)
        return explain_kill(before, after, find_limits().memory_limit_bytes, host_total, num_ranks)
    if number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
        return explain_abort(before.peak_address_space, soft_limit(resource.RLIMIT_AS))
    return ''


def explain_error(error: BaseException) -> str:
    """What an exception means that says that there was no memory; nothing for any other."""
    text = str(error)
    if not isinstance(error, MemoryError) and not _FAILED_ALLOCATION.search(text):
        return ''
    limit = soft_limit(resource.RLIMIT_AS)
    if limit is None and 'start new thread' in text:  # of another limit
        return ''
    used = _numbers(_PROC / 'self/status')
    if limit is not None:
        # Where not even that can be read, it is all in use.
        return _address_space_is_full('the address space of this process', limit, used.get('VmPeak', limit))
    host = _numbers(_PROC / 'meminfo')
    return (f'out of memory: an allocation failed ({" ".join(text.split())[:120] or type(error).__name__}); this '
            f'process used {gigabytes(used.get("VmHWM", 0))}, the host has {gigabytes(host.get("MemAvailable", 0))} of '
            f'{gigabytes(host.get("MemTotal", 0))} left; lower train.local_batch_size, or start fewer ranks on a host')
