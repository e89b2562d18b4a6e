"""Series: one machine on several numbers of nodes. Pure functions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.text import grouped

UNNAMED = 'unnamed'  # the default of run.submission_platform


@dataclass(frozen=True)
class Series:
    """Sets of one machine on at least two different numbers of nodes, sorted by number of nodes,
    then by time."""

    run_sets: tuple[RunSet, ...]

    @property
    def baseline(self) -> RunSet:
        """The set on the fewest nodes, and of several such sets the fastest."""
        return self.run_sets[0]

    @property
    def title(self) -> str:
        base, per_node = self.baseline, self.baseline.units_per_node
        nodes = ', '.join(dict.fromkeys(f'{s.num_nodes:,}' for s in self.run_sets))
        unit = 'accelerator' if base.num_accelerators else 'rank'
        units = (
            f'{per_node:g} {base.accelerator}'
            if base.accelerator and base.num_accelerators
            else (f'{per_node:g} {unit}{"" if per_node == 1 else "s"}')
        )
        return f'{base.name} on {nodes} nodes, {units} per node'


def machine(run_set: RunSet) -> str:
    """Return the platform without a leading number of nodes, such as 2x in 2xDGX-1, or '' if
    unknown."""
    platform = run_set.platform or UNNAMED
    return '' if platform == UNNAMED else re.sub(r'^\d+ *x *', '', platform).casefold()


def _kind(run_set: RunSet) -> tuple:
    """Return what all sets of a series share. Submissions differ in the case and spacing of
    framework names."""
    framework = ''.join((run_set.framework or '').casefold().split())
    return (
        run_set.study,
        run_set.round,
        run_set.org,
        run_set.accelerator,
        bool(run_set.num_accelerators),
        run_set.units_per_node,
        framework,
        run_set.division,
    )


def find_series(run_sets: Sequence[RunSet]) -> list[Series]:
    """Return the series among sets with the same data set and target. Sets without a time are in
    none.

    Platform names are compared only if two sets have the same number of nodes, because some contain
    this number.
    """
    timed = [s for s in run_sets if s.time_s and s.num_nodes and s.num_units and not s.is_duplicate]
    found = []
    for group in grouped(timed, _kind).values():
        parts = (
            [group]
            if len({s.num_nodes for s in group}) == len(group)
            else grouped(group, machine).values()
        )
        found += [
            Series(tuple(sorted(part, key=lambda s: (s.num_nodes or 0, s.time_s or 0.0))))
            for part in parts
            if len({s.num_nodes for s in part}) > 1
        ]
    return found
