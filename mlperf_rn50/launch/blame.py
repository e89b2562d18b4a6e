"""Whose fault was it? What an attempt that failed says of the hosts, and which of them are left out of the next."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlperf_rn50.launch.attempts import whole_lines
from mlperf_rn50.train.failures import FAILURES, Failure

# Failures of a host, in attempts in a row that gained nothing, after which --elastic leaves it out.
MAX_FAILURES = 2


def read_failures(folder: Path) -> list[Failure]:
    """All failures of a run folder, the oldest first."""
    return [Failure(*(str(v.get(key, '')) for key in ('job', 'host', 'cause')))
            for v in whole_lines(folder / FAILURES)]


def count_failures(failures: Sequence[Failure]) -> dict[tuple[str, str], int]:
    """How often each host failed for each cause."""
    return dict(Counter((f.host, f.cause) for f in failures))


def bad_hosts(failures: Sequence[Failure], stuck_jobs: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """The hosts that failed too often in the attempts that gained nothing, with their last cause.

    Args:
        failures: of the run folder.
        stuck_jobs: names of the attempts since the last one that gained something.
        hosts: those in use; one is always left.
    """
    by_host: Mapping[str, set[str]] = {h: {f.job for f in failures if f.host == h and f.job in stuck_jobs}
                                       for h in hosts}
    bad = [h for h in hosts if len(by_host[h]) >= MAX_FAILURES]
    if len(bad) == len(hosts):
        return {}
    return {h: next(f.cause for f in reversed(failures) if f.host == h) for h in bad}


def ranks_of(host: str, hosts: Sequence[str], ranks_per_node: int) -> str:
    """The ranks of a host, by its place in the list."""
    first = hosts.index(host) * ranks_per_node
    return ', '.join(str(rank) for rank in range(first, first + ranks_per_node))
