"""A run's numbers of nodes, ranks and accelerators, and its batch size: logged, described, or
implied by log lines."""

import re
from dataclasses import replace
from itertools import zip_longest

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.logged_run import FactSource
from mlperf_rn50.mllog.read.description import Count, SystemDescription, describe_entry, make_count
from mlperf_rn50.mllog.read.raw_log import INPUT_BATCH_SIZE, RawLog
from mlperf_rn50.mllog.read.values import integer

# In v0.5 logs, input_batch_size is per accelerator or, in some, global. No accelerator can hold
# this many images.
_NOT_LOCAL = 1024
# minimum share of lines kept if ranks write at the same time; a published log has 638 of 640
_MIN_KEPT = 0.95
# keys of each kind of node in a description
_OF_NODES = ('num_nodes', 'num_accelerators', 'accelerator')


def describe_in_log(log: RawLog) -> SystemDescription:
    """Return the system description in a v0.6 log, which is an object, or text in which quotes may
    be escaped."""
    text = str(log.value(keys.SUBMISSION_ENTRY))[:10_000]
    found = {
        name: [
            quoted or digits
            for quoted, digits in re.findall(
                rf"""["']{name}\\*["']: ?(?:\\*["']([^"'\\]*)|(\d+))""", text
            )
        ]
        for name in ('framework', *_OF_NODES)
    }
    source = FactSource('described', keys.SUBMISSION_ENTRY, log.line(keys.SUBMISSION_ENTRY))
    nodes = [
        dict(zip(_OF_NODES, values)) for values in zip_longest(*(found[name] for name in _OF_NODES))
    ]
    return describe_entry(
        {'framework': ''.join(found['framework'][:1]), 'nodes': nodes}, lambda _: source
    )


class CountReader:
    """Determines the counts of a run (None if unknown), and adds their sources and warnings about
    differing values."""

    def __init__(self, log: RawLog, description: SystemDescription, sources: dict[str, FactSource]):
        self._log, self._described, self._sources = log, description, sources
        # v0.5 has no init_start. In later rounds, some logs have one seed for the run, others one
        # for each rank.
        self._ranks = self._count_lines(keys.SEED if log.format == 'MLPv0.5.0' else keys.INIT_START)
        self._cleared = self._count_lines(keys.CACHE_CLEAR)
        nodes, accelerators = self._order(
            self._ranks if events.NUM_RANKS not in log.single else None
        )
        self.num_nodes = self._nodes(nodes)
        self.num_accelerators = self._accelerators(accelerators)
        self.num_ranks = self._settle(
            'num_ranks', 'ranks', self._logged(events.NUM_RANKS), self._ranks
        )
        self.global_batch_size = self._settle(
            keys.GLOBAL_BATCH_SIZE,
            'images per step',
            self._logged(keys.GLOBAL_BATCH_SIZE),
            self._implied_batch(),
        )

    @property
    def has_changed_nodes(self) -> bool:
        """Whether the run states more than one number of nodes at its start and its resumes."""
        log = self._log
        stated = [log.value(events.NUM_NODES)]
        stated += [event.metadata.get(events.NUM_NODES) for event in log.resumed]
        return len({number for n in stated if (number := integer(n, 1)) is not None}) > 1

    def _logged(self, key: str) -> Count | None:
        return make_count(integer(self._log.value(key), 1), self._log.source(key))

    def _count_lines(self, key: str) -> Count | None:
        log = self._log
        lines, line = log.counts[key], log.first_lines.get(key)
        count = -(-lines // log.num_loggers)
        if lines > count:
            log.flag('lines_copied', line, lines, key, count, log.num_loggers)
        if count <= 1:
            return None
        return Count(count, FactSource('implied', f'{count} {key} lines', line))

    def _order(self, lines: Count | None) -> tuple[list[Count | None], list[Count | None]]:
        """Return numbers of nodes and of accelerators from the description and from lines, the
        preferred ones first.

        The lines are cache_clear, one per node, and `lines`, one per rank, of which a few may be
        lost. Descriptions are preferred, but some list more nodes than the run had. So `lines` are
        preferred if there are as many as cache_clear lines times described accelerators per node,
        but not as many as described accelerators. From v0.6 on, they are also preferred unless
        there is one per node, or the same number for each described accelerator.
        """
        nodes, total, cleared = self._described.nodes, self._described.accelerators, self._cleared
        in_order = [nodes, cleared], [total, lines]
        if not (nodes and total and lines and total.number >= nodes.number):
            return in_order
        per_node = total.number // nodes.number
        whole = cleared.number * per_node if cleared else 0
        if _MIN_KEPT * whole < lines.number <= whole != total.number:
            lines = Count(whole, lines.source)
        elif (
            self._log.is_v05
            or _MIN_KEPT * total.number < lines.number < total.number
            or lines.number % total.number == 0
            or lines.number in (nodes.number, cleared and cleared.number)
        ):
            return in_order
        return [cleared or Count(-(-lines.number // per_node), lines.source), nodes], [lines, total]

    def _settle(self, name: str, unit: str, *values: Count | None) -> int | None:
        """Return the first known number and warn if others differ; of a resumed run, return that of
        its last resume."""
        log, known = self._log, [v for v in values if v]
        if log.resumed:
            key = {'num_nodes': events.NUM_NODES, 'num_ranks': events.NUM_RANKS}.get(name, name)
            event = log.resumed[-1]
            source = FactSource('logged', events.RUN_RESUMED, event.line)
            last = make_count(integer(event.metadata.get(key), 1), source)
            known = [last] if last else known[:1]
        if not known:
            return None
        used = known[0]
        self._sources[name] = replace(used.source, numbers=tuple(v.number for v in known))
        for number, source in known[1:]:
            if number != used.number:
                line = None if source.path else source.line
                given, expected = (number, unit, source.text), (used.number, used.source.text)
                log.flag('counts_differ', line, *given, *expected)
        return used.number

    def _nodes(self, counts: list[Count | None]) -> int | None:
        key = keys.SUBMISSION_PLATFORM
        factor = re.match(r'(\d{1,6})x(?=\D)', str(self._log.value(key))[:1000])
        # in a platform such as 8xA100, the factor counts accelerators
        logged = self._logged(events.NUM_NODES)
        totals = self._described.accelerators, logged and self._logged_accelerators(logged.number)
        named = None
        if factor and int(factor[1]) not in [total.number for total in totals if total]:
            source = FactSource('implied', key, self._log.line(key))
            named = make_count(integer(int(factor[1]), 1), source)
        return self._settle('num_nodes', 'nodes', logged, *counts, named)

    def _logged_accelerators(self, num_nodes: int) -> Count | None:
        per_node = integer(self._log.value(events.ACCELERATORS_PER_NODE))
        total = None if per_node is None else per_node * num_nodes
        return make_count(total, self._log.source(events.ACCELERATORS_PER_NODE))

    def _accelerators(self, counts: list[Count | None]) -> int | None:
        """Return the number of accelerators on all nodes; one per rank if nothing else is known."""
        logged = self._logged_accelerators(self.num_nodes) if self.num_nodes else None
        return self._settle('num_accelerators', 'accelerators', logged, *counts)

    def _implied_batch(self) -> Count | None:
        """Return the global batch from the v0.5 batch: per accelerator or, if too large for one
        accelerator, global."""
        logged = self._logged(INPUT_BATCH_SIZE)
        if logged is None or logged.number >= _NOT_LOCAL:
            text = 'input_batch_size, too large for one accelerator'
            return logged and Count(logged.number, FactSource('implied', text, logged.source.line))
        return make_count(
            logged.number * (self.num_accelerators or 0) or None,
            FactSource('implied', 'input_batch_size x num_accelerators', logged.source.line),
        )
