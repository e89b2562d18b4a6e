"""Whose fault was it? What an attempt that failed says of the hosts, and which of them are left out of the next."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.launch.attempts import whole_lines
from mlperf_rn50.train.failures import FAILURES, Failure

# Failures of a host, in attempts in a row that gained nothing, after which --elastic leaves it out.
MAX_FAILURES = 2


def read_failures(folder: Path) -> list[Failure]:
    """All failures of a run folder, the oldest first."""
    return [Failure(str(v.get('job', '')), str(v.get('host', '')), str(v.get('cause', '')),
                    v['rank'] if isinstance(v.get('rank'), int) else None) for v in whole_lines(folder / FAILURES)]


def count_failures(failures: Sequence[Failure]) -> dict[tuple[str, str], int]:
    """How often each host failed for each cause."""
    return dict(Counter((f.host, f.cause) for f in failures))


def name_of(failure: Failure, hosts: Sequence[str], ranks_per_node: int) -> str:
    """The host of a failure as it was named to the launcher, which may not be what it calls itself."""
    if failure.rank is None or failure.rank >= len(hosts) * ranks_per_node:
        return failure.host
    return hosts[failure.rank // ranks_per_node]


def bad_hosts(failures: Sequence[Failure], hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts in use that failed too often in attempts without gain, with their last cause; never all."""
    by_host = {h: {f.job for f in failures if f.host == h} for h in hosts}
    bad = [h for h in hosts if len(by_host[h]) >= MAX_FAILURES]
    if len(bad) == len(hosts):
        return {}
    return {h: next(f.cause for f in reversed(failures) if f.host == h) for h in bad}


def ranks_of(host: str, hosts: Sequence[str], ranks_per_node: int) -> str:
    """The ranks of a host, by its place in the list."""
    first = hosts.index(host) * ranks_per_node
    return ', '.join(str(rank) for rank in range(first, first + ranks_per_node))
