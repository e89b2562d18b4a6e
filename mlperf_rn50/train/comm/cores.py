"""Use of a rank's cores, by its threads and by all programs, and waits of its threads for a core.

A thread that polls, as those of MPI do, is always ready. So each kind of thread has its own values.
Source: Linux Documentation/scheduler/sched-stats.rst (schedstat), proc(5) (/proc/stat, comm).
"""

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.system.cgroup import parse_cpu_list, read_small, render_cpu_list, throttled_s
from mlperf_rn50.system.power import BOOT_ID
from mlperf_rn50.system.processor import omp_threads
from mlperf_rn50.text import grouped

TASKS = Path('/proc/self/task')
_STAT = Path('/proc/stat')
_TICK_S = 1 / os.sysconf('SC_CLK_TCK')
# By thread: kind, seconds on a core, seconds of waiting for one.
_Times = dict[str, tuple[str, float, float]]


def thread_ids() -> list[str]:
    """Return the numbers of this process's threads."""
    return os.listdir(TASKS)


def read_threads(exchanging: Collection[str]) -> _Times:
    """Return the times of this process's threads; empty if the kernel does not count them."""
    times = {}
    for thread in thread_ids():
        words = read_small(TASKS / thread / 'schedstat').split()
        if len(words) == 3:
            kind = 'compute'
            if thread in exchanging:
                kind = 'exchange'
            elif read_small(TASKS / thread / 'comm').startswith('[DALI]'):
                kind = 'input'
            times[thread] = kind, 1e-9 * int(words[0]), 1e-9 * int(words[1])
    return times


def read_cores(cpus: Collection[int], stat: Path = _STAT) -> tuple[float, float] | None:
    """Return the seconds in which any program used these cores, and in which they were stolen.

    The host of a virtual machine steals them.
    """
    rows = [line.split() for line in read_small(stat).splitlines()]
    names = {f'cpu{cpu}' for cpu in cpus}
    own = [list(map(int, row[1:9])) for row in rows if row[0] in names]
    if len(own) < len(cpus):  # a container may number its cores differently
        return None
    # Columns: user, nice, system, idle, iowait, irq, softirq, steal
    used = sum(sum(row[:3] + row[5:7]) for row in own)
    stolen = sum(row[7] for row in own)
    return _TICK_S * used, _TICK_S * stolen


def longest_waits(before: _Times, now: _Times) -> dict[str, tuple[float, float]]:
    """Return, by kind of thread, the seconds on a core and of waiting for one.

    They are those of the thread that waited most, among the busy ones.
    """
    spent: dict[str, list[tuple[float, float]]] = {}
    for thread, (kind, on_core_s, waited_s) in now.items():
        _, on_core_before_s, waited_before_s = before.get(thread, ('', 0.0, 0.0))
        if on_core_s < on_core_before_s:  # a new thread with the number of one that has ended
            on_core_before_s = waited_before_s = 0.0
        spent.setdefault(kind, []).append(
            (on_core_s - on_core_before_s, waited_s - waited_before_s)
        )
    longest = {}
    for kind, times in spent.items():
        # Threads that wait for others between short pieces of work do not delay a step.
        most_s = max(map(sum, times))
        busy = [t for t in times if 2 * sum(t) >= most_s]
        longest[kind] = max(busy, key=lambda t: t[1])
    return longest


class _Reading(NamedTuple):
    """Times of this rank in seconds: on the clock, on its cores, and throttled; and those of its
    cores and threads."""

    wall_s: float
    cpu_s: float
    throttled_s: float
    cpus: set[int]
    cores_s: tuple[float, float] | None
    threads: _Times


class CoreMeter:
    """Meter of the use of this rank's cores; exchanging: threads that exchange gradients."""

    def __init__(self, exchanging: Collection[str] = ()):
        self._exchanging = exchanging
        self.start()

    def start(self) -> None:
        cpus = os.sched_getaffinity(0)  # a user may change them during a run
        self._reading = _Reading(
            wall_s=time.monotonic(),
            cpu_s=time.process_time(),
            throttled_s=throttled_s(),
            cpus=cpus,
            cores_s=read_cores(cpus),
            threads=read_threads(self._exchanging),
        )

    def take(self) -> dict[str, Any]:
        """Return the values of RankSteps since the last call or start()."""
        before = self._reading
        self.start()
        now = self._reading
        known = {}
        if before.cpus == now.cpus and before.cores_s and now.cores_s:
            spent = (max(0.0, b - a) for a, b in zip(before.cores_s, now.cores_s))
            known = dict(zip(('cores_s', 'steal_s'), spent))
        return {
            'cores': render_cpu_list(now.cpus),
            'num_cores': len(now.cpus),
            'wall_s': max(0.0, now.wall_s - before.wall_s),
            'cpu_s': max(0.0, now.cpu_s - before.cpu_s),
            'throttled_s': max(0.0, now.throttled_s - before.throttled_s),
            'num_threads': omp_threads(os.environ.get('OMP_NUM_THREADS', '')),
            'ready_s': longest_waits(before.threads, now.threads),
            'machine': read_small(BOOT_ID),
            'load': os.getloadavg()[0],
            **known,
        }


def count_others(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of all ranks, with those that follow from ranks on the same cores.

    Hosts in containers may be one machine, so its boot is compared.
    """
    pairs = [(rank, set(parse_cpu_list(rank['cores']))) for rank in ranks]
    machines, results = grouped(pairs, lambda pair: pair[0]['machine']), []
    for rank, own in pairs:
        sharing = [r for r, cpus in machines[rank['machine']] if own & cpus]
        kept = {key: value for key, value in rank.items() if key not in ('machine', 'cores_s')}
        if 'cores_s' in rank:
            kept['others_s'] = max(0.0, rank['cores_s'] - sum(r['cpu_s'] for r in sharing))
        results.append({**kept, 'num_sharing': len(sharing)})
    return results
