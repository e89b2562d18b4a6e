"""What control groups allow this process, in version 1, 2 or both at once: memory, CPU time, and which CPUs.

A group is held to its own limits and to those of all groups around it, so the tightest counts. Groups outside a
container cannot be seen from inside.
Source: Linux Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/{memory,cpusets}.rst, scheduler/sched-bwc.rst;
proc(5) for /proc/self/cgroup and mountinfo.
"""
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path('/')
# Version 1 writes 'no limit' as the largest whole number of pages; no machine has so much memory.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Limits:
    """What the groups of a process allow; None where they leave it open.

    The memory limit is that of the group with the least room left, and what it uses is without reclaimable page cache.
    A quota of 1.5 CPUs is 1.5 s of CPU time per second.
    """

    memory_limit_bytes: int | None = None
    memory_used_bytes: int = 0
    quota_cpus: float | None = None
    cpuset: tuple[int, ...] | None = None


def parse_cpu_list(text: str) -> list[int]:
    """The numbers of '0-3,8', Linux' notation of CPU lists."""
    parts = [p.partition('-') for p in text.strip().split(',') if p]
    return [cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)]


def render_cpu_list(cpus: Sequence[int]) -> str:
    """The notation that parse_cpu_list reads."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)


def read_small(path: Path) -> str:
    """A small file without the white space around it; '' where there is none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError, MemoryError):
        return ''


def _number(text: str) -> int | None:
    """A number of bytes or microseconds; None for 'max', -1 and what is none."""
    return int(text) if text.isdecimal() else None


def _unescape(path: str) -> str:
    r"""A path of mountinfo, where a space is \040."""
    return re.sub(r'\\([0-7]{3})', lambda m: chr(int(m[1], 8)), path)


def _mounts(text: str) -> Iterator[tuple[set[str], str, str]]:
    """(controllers, root, mount point) of every mounted hierarchy; version 2 has the controller ''."""
    for line in text.splitlines():
        before, _, after = line.partition(' - ')
        fields, system = before.split(), after.split()
        if len(fields) > 4 and len(system) > 2 and system[0] in ('cgroup', 'cgroup2'):
            controllers = {''} if system[0] == 'cgroup2' else set(system[2].split(','))
            yield controllers, _unescape(fields[3]), _unescape(fields[4])


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the groups of this process, in every hierarchy, from its own up to the outermost it can see."""
    mounts = list(_mounts(read_small(root / 'proc/self/mountinfo')))
    for line in read_small(root / 'proc/self/cgroup').splitlines():
        names, _, group = line.partition(':')[2].partition(':')
        point = next(((at, point) for found, at, point in mounts if set(names.split(',')) <= found), None)
        if point is None:
            continue
        outermost = root / point[1].lstrip('/')
        path, above = PurePosixPath(group), PurePosixPath(point[0])
        # A group that is not below what is mounted (a container without a namespace of its own): the mount is its own.
        inside = path.relative_to(above) if path.is_relative_to(above) and '..' not in path.parts else PurePosixPath()
        yield from (outermost / p for p in (inside, *inside.parents))


def _memory(folder: Path) -> tuple[int, int] | None:
    """(limit, used) of a group, in bytes; None without a limit."""
    for limit, used, cache in (('memory.max', 'memory.current', 'inactive_file'),
                               ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file')):
        limit_bytes = _number(read_small(folder / limit))
        if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
            given_up = re.search(rf'^{cache} (\d+)$', read_small(folder / 'memory.stat'), re.MULTILINE)
            used_bytes = _number(read_small(folder / used)) or 0
            return limit_bytes, max(0, used_bytes - int(given_up[1] if given_up else 0))
    return None


def memory_cgroup(root: Path = ROOT) -> Path | None:
    """The innermost group of this process that counts how many processes the kernel has killed for want of memory."""
    return next((f for f in _folders(root)
                 if any((f / name).exists() for name in ('memory.events', 'memory.oom_control'))), None)


def _quota(folder: Path) -> float | None:
    """CPU time per time of a group; None without a quota."""
    words = read_small(folder / 'cpu.max').split() or [read_small(folder / 'cpu.cfs_quota_us'),
                                                  read_small(folder / 'cpu.cfs_period_us')]
    quota, period = (_number(w) for w in (*words, '')[:2])
    return quota / period if quota and period else None


def _cpuset(folder: Path) -> set[int] | None:
    """Logical CPUs of a group; None where it names none."""
    for name in ('cpuset.cpus.effective', 'cpuset.effective_cpus', 'cpuset.cpus'):
        try:
            if cpus := parse_cpu_list(read_small(folder / name)):
                return set(cpus)
        except ValueError:
            continue
    return None


def find_limits(root: Path = ROOT) -> Limits:
    """The limits of this process; root is '/', or a folder with copies of its files in proc and of its mounts."""
    folders = list(_folders(root))
    limit_bytes, used_bytes = min((m for f in folders if (m := _memory(f))), key=lambda m: m[0] - m[1],
                                  default=(None, 0))
    cpusets = [c for f in folders if (c := _cpuset(f))]
    return Limits(limit_bytes, used_bytes, min((q for f in folders if (q := _quota(f))), default=None),
                  tuple(sorted(set.intersection(*cpusets))) if cpusets else None)
