"""Limits on memory, CPU time, CPUs and processes, mostly from this process's control groups.

Groups may be of version 1, version 2 or both.

A group is subject to the limits of all its ancestors, so the tightest limit applies. Groups outside
a container are not visible from inside. Source: Linux Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/{memory,cpusets}.rst, scheduler/sched-bwc.rst; proc(5) for /proc/self/cgroup and
mountinfo.
"""

import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mlperf_rn50.text import grouped

ROOT = Path('/')
_NUM_PROCESSES = 32  # of a rank with few cores, 29 of which were measured
_NUM_OF_MPI = 16  # of Open MPI on a node
_NO_LIMIT_BYTES = 1 << 60  # without a limit, version 1 reports almost 1 << 63


@dataclass(frozen=True)
class GroupLimits:
    """Limits that control groups set for a process. None means no limit."""

    memory_limit_bytes: int | None = None  # limit of the group with the least memory left
    memory_used_bytes: int = 0  # used by that group, without reclaimable page cache
    quota_cpus: float | None = None  # 1.5 means 1.5 s of CPU time per second
    cpuset: tuple[int, ...] | None = None


def parse_cpu_list(text: str) -> list[int]:
    """Parse a CPU list in Linux notation, such as '0-3,8'."""
    parts = [p.partition('-') for p in text.strip().split(',') if p]
    return [cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)]


def render_cpu_list(cpus: Iterable[int]) -> str:
    """Render a CPU list in Linux notation."""
    # Consecutive CPUs have the same distance from their place in the list.
    ranges = grouped(enumerate(sorted(cpus)), lambda placed: placed[1] - placed[0]).values()
    return ','.join(str(r[0][1]) if len(r) == 1 else f'{r[0][1]}-{r[-1][1]}' for r in ranges)


def read_small(path: Path) -> str:
    """Read a small file and strip white space. Return '' if it is unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError, MemoryError):
        return ''


def _number(text: str) -> int | None:
    """Parse a number of bytes or microseconds. Return None for 'max', -1 and other text."""
    return int(text) if text.isdecimal() else None


def _numbers(pattern: str, path: Path) -> list[int]:
    """Return the numbers in the lines of a small file that match a pattern."""
    return [int(n) for n in re.findall(pattern, read_small(path), re.MULTILINE)]


def _mounts(text: str) -> Iterator[tuple[set[str], str, str]]:
    """Yield (controllers, root, mount point) of every mounted hierarchy. For version 2, controllers
    is {''}."""
    for line in text.splitlines():
        before, _, after = line.partition(' - ')
        fields = before.split()
        system = after.split()
        if len(fields) > 4 and len(system) > 2 and system[0] in ('cgroup', 'cgroup2'):
            controllers = {''} if system[0] == 'cgroup2' else set(system[2].split(','))
            # mountinfo writes a space in a path as \040.
            paths = [re.sub(r'\\([0-7]{3})', lambda m: chr(int(m[1], 8)), f) for f in fields[3:5]]
            yield controllers, paths[0], paths[1]


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups in every hierarchy, innermost first."""
    mounts = list(_mounts(read_small(root / 'proc/self/mountinfo')))
    for line in read_small(root / 'proc/self/cgroup').splitlines():
        names, _, group = line.partition(':')[2].partition(':')
        path = PurePosixPath(group)
        for known, top, point in mounts:
            if set(names.split(',')) <= known:
                # In a container without a cgroup namespace, the group's path is outside the mount,
                # whose top is then the group.
                inside = PurePosixPath()
                if path.is_relative_to(top) and '..' not in path.parts:
                    inside = path.relative_to(top)
                yield from (root / point.lstrip('/') / p for p in (inside, *inside.parents))
                break


def _memory(folder: Path) -> tuple[int, int] | None:
    """Return (limit, used) of a group in bytes, or None if there is no limit."""
    for limit, used, cache in (
        ('memory.max', 'memory.current', 'inactive_file'),
        ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
    ):
        limit_bytes = _number(read_small(folder / limit))
        if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
            used_bytes = _number(read_small(folder / used)) or 0
            reclaimable = sum(_numbers(rf'^{cache} (\d+)$', folder / 'memory.stat'))
            return limit_bytes, max(0, used_bytes - reclaimable)
    return None


def memory_cgroup(root: Path = ROOT) -> Path | None:
    """Return the folder of this process's innermost group that counts out-of-memory kills, or
    None."""
    for folder in _folders(root):
        if (folder / 'memory.events').exists() or (folder / 'memory.oom_control').exists():
            return folder
    return None


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of a group in CPUs, or None if there is no quota."""
    words = read_small(folder / 'cpu.max').split()
    if not words:
        words = [read_small(folder / f'cpu.cfs_{name}_us') for name in ('quota', 'period')]
    quota, period = (_number(w) for w in (*words, '')[:2])
    return quota / period if quota and period else None


def throttled_s() -> float:
    """Return the seconds in which CPU quotas stopped a group of this process; each CPU counts."""
    seconds = [0.0]
    for folder in _folders(ROOT):
        for name, unit_s in (('throttled_usec', 1e-6), ('throttled_time', 1e-9)):
            seconds += [n * unit_s for n in _numbers(rf'^{name} (\d+)$', folder / 'cpu.stat')]
    return max(seconds)


def processes_needed(num_ranks: int) -> int:
    """Return the least number of processes and threads for the ranks of a node."""
    return _NUM_OF_MPI + _NUM_PROCESSES * num_ranks


def free_processes(root: Path = ROOT) -> tuple[int, str] | None:
    """Return the number of processes and threads that may still be started, and their limit; None
    without a limit."""
    limits = []
    for folder in _folders(root):
        limit = _number(read_small(folder / 'pids.max'))
        if limit is not None:
            used = _number(read_small(folder / 'pids.current')) or 0
            limits.append((limit - used, f'the pids limit of the cgroup is {limit}'))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and most != resource.RLIM_INFINITY:  # root has no limit
        used = 0
        for path in (root / 'proc').glob('[0-9]*/status'):
            if _numbers(rf'^Uid:\t({os.getuid()})\t', path):
                used += sum(_numbers(r'^Threads:\t(\d+)', path))
        limits.append((most - used, f'ulimit -u is {most}'))
    return min(limits, default=None)


def _cpuset(folder: Path) -> set[int] | None:
    """Return the logical CPUs of a group, or None if it lists none."""
    for name in ('cpuset.cpus.effective', 'cpuset.effective_cpus', 'cpuset.cpus'):
        try:
            if cpus := parse_cpu_list(read_small(folder / name)):
                return set(cpus)
        except ValueError:
            continue
    return None


def find_limits(root: Path = ROOT) -> GroupLimits:
    """Return the limits of this process. root may be a folder with copies of /proc and the
    mounts."""
    folders = list(_folders(root))
    memory = [m for f in folders if (m := _memory(f))]
    limit_bytes, used_bytes = min(memory, key=lambda m: m[0] - m[1], default=(None, 0))
    cpusets = [c for f in folders if (c := _cpuset(f))]
    return GroupLimits(
        memory_limit_bytes=limit_bytes,
        memory_used_bytes=used_bytes,
        quota_cpus=min((q for f in folders if (q := _quota(f))), default=None),
        cpuset=tuple(sorted(set.intersection(*cpusets))) if cpusets else None,
    )
