"""Cores that the ranks of a run lacked, because of other programs, of each other, or of a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.runfolder.records import RanksRecord, RankSteps
from mlperf_rn50.text import grouped

_LEAST_USE, _FULL = 0.1, 0.9  # of the cores, by others and by all programs


@dataclass(frozen=True)
class Shortage:
    """A rank that lacked its cores. The fractions are of the time of its cores, except `waited`."""

    name: str  # busy, stolen, crowded or quota
    rank: RankSteps
    own: float
    others: float
    stolen: float
    waited: float  # part of the time in which the rank was ready to compute


def _shortage_of(intervals: Sequence[RankSteps]) -> Shortage | None:
    """Return what a rank lacked in several intervals."""
    last = intervals[-1]
    num_threads = last.num_threads or 1
    core_s = sum(r.num_cores * r.wall_s for r in intervals)

    # Who used the cores, and how long the threads of the rank waited for them.
    own = min(sum(r.cpu_s for r in intervals) / core_s, 1.0)
    others = min(sum(r.others_s or 0.0 for r in intervals) / core_s, 1.0)
    stolen = min(sum(r.steal_s for r in intervals) / core_s, 1.0)
    throttled_s = sum(r.throttled_s for r in intervals)
    computing = [r.ready_s.get('compute', (0.0, 0.0)) for r in intervals]
    on_core_s, queued_s = map(sum, zip(*computing))
    exchanging_s = sum(r.ready_s.get('exchange', (0.0, 0.0))[0] for r in intervals)
    is_crowded = last.num_sharing * num_threads > last.num_cores
    if on_core_s + queued_s:
        waited = queued_s / (on_core_s + queued_s)
    else:  # some kernels do not count the time of waiting
        waited = others if own * last.num_sharing + others + stolen > _FULL else 0.0

    # The threads that compute also wait for the other threads of the ranks on these cores, except
    # those that exchange gradients, which run after them.
    own_s = on_core_s * min(num_threads, last.num_cores) + exchanging_s
    beside = max(0.0, own * last.num_sharing - own_s / core_s)
    by_others = 1 - (1 - waited * others / max(others + beside, 1e-9)) * (1 - stolen)
    # others may have used the cores meanwhile
    if throttled_s > max(_LEAST_USE * core_s, queued_s / 2):
        name = 'quota'
    elif others + stolen > _LEAST_USE and (by_others > waited / 2 or not is_crowded):
        name = 'busy' if others > stolen else 'stolen'
        waited = by_others
    elif is_crowded:
        name = 'crowded'
    else:
        return None
    return Shortage(name, last, own, others=others, stolen=stolen, waited=waited)


def find_shortage(records: Sequence[RanksRecord]) -> Shortage | None:
    """Return the largest shortage of a rank; None if there is none, or none was recorded."""
    measured = (
        r
        for record in records
        for r in record.ranks
        if r.wall_s and r.num_cores and r.others_s is not None
    )
    by_rank = grouped(measured, lambda r: r.rank)
    return max(
        filter(None, map(_shortage_of, by_rank.values())), key=lambda s: s.waited, default=None
    )
