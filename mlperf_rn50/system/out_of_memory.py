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


def parse_counts(text: str) -> dict[str, int]:
    """Lines of 'name number', as in memory.events, memory.oom_control and /proc/vmstat."""
    return {name: int(value) for name, value in re.findall(r'^(\w+) (\d+)$', text, re.MULTILINE)}


def parse_sizes(text: str) -> dict[str, int]:
    """Lines of 'Name:  number kB', as in /proc/PID/status and /proc/meminfo, in bytes."""
    return {name: int(value) * 1024 for name, value in re.findall(r'^(\w+):\s+(\d+) kB$', text, re.MULTILINE)}


def oom_kills(folder: Path) -> int | None:
    """How many processes of a cgroup the kernel has killed for want of memory; None where it does not tell."""
    text = read_small(folder / 'memory.events') or read_small(folder / 'memory.oom_control')
    return parse_counts(text).get('oom_kill')


@dataclass(frozen=True)
class Sample:
    """Most bytes that were resident and mapped in a process, 0 where they are not known, and the number of
    out-of-memory kills in its cgroup; on the host where no cgroup counts them."""

    peak: int = 0
    peak_address_space: int = 0
    num_kills: int = 0


def take_sample(pid: int, cgroup: Path | None, before: Sample = Sample()) -> Sample:
    """A sample of a process; what one that has ended no longer tells stays as it was."""
    sizes = parse_sizes(read_small(_PROC / str(pid) / 'status'))
    num_kills = oom_kills(cgroup) if cgroup else None
    if num_kills is None:
        num_kills = parse_counts(read_small(_PROC / 'vmstat')).get('oom_kill', 0)
    return Sample(sizes.get('VmHWM', before.peak), sizes.get('VmPeak', before.peak_address_space), num_kills)


def gigabytes(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f'{num_bytes / 1e9:.1f} GB'


def explain_kill(before: Sample, after: Sample, limit: int | None, host_total: int, num_ranks: int) -> str:
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
    return (f'out of memory: its address space is limited to {gigabytes(limit)} (ulimit -v), of which it used '
            f'{gigabytes(peak_address_space)}; raise the limit (ulimit -v unlimited), or lower '
            'train.local_batch_size')


def address_space_limit() -> int | None:
    """The limit of this process and its children, in bytes; None for none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_death(number: int, before: Sample, after: Sample, num_ranks: int) -> str:
    """Why a process that a signal ended had no memory; nothing where memory was not the reason."""
    if number == signal.SIGKILL:
        host_total = parse_sizes(read_small(_PROC / 'meminfo')).get('MemTotal', 0)
        return explain_kill(before, after, find_limits().memory_limit_bytes, host_total, num_ranks)
    if number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
        return explain_abort(before.peak_address_space, address_space_limit())
    return ''


def explain_error(error: BaseException) -> str:
    """What an exception means that says that there was no memory; nothing for any other."""
    text = str(error)
    if not isinstance(error, MemoryError) and not _FAILED_ALLOCATION.search(text):
        return ''
    limit = address_space_limit()
    if limit is None and 'start new thread' in text:  # of another limit
        return ''
    used = parse_sizes(read_small(_PROC / 'self' / 'status'))
    if limit is not None:
        # Where not even that can be read, it is all in use.
        return (f'out of memory: the address space of this process is limited to {gigabytes(limit)} (ulimit -v), of '
                f'which it used {gigabytes(used.get("VmPeak", limit))}; raise the limit (ulimit -v unlimited), or '
                'lower train.local_batch_size')
    host = parse_sizes(read_small(_PROC / 'meminfo'))
    return (f'out of memory: an allocation failed ({" ".join(text.split())[:120] or type(error).__name__}); this '
            f'process used {gigabytes(used.get("VmHWM", 0))}, the host has {gigabytes(host.get("MemAvailable", 0))} of '
            f'{gigabytes(host.get("MemTotal", 0))} left; lower train.local_batch_size, or start fewer ranks on a host')
