"""How many nodes, ranks and accelerators trained, with which batch: logged, else described, else counted lines."""
import re

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.read.description import Count, SystemDescription, counted
from mlperf_rn50.mllog.read.raw_log import INPUT_BATCH_SIZE, RawLog, integer
from mlperf_rn50.mllog.run import FactSource

# v0.5 logs an accelerator's batch, some organisations the global one; no accelerator of that round held so many.
_NOT_LOCAL = 1024


def _in_log(found: RawLog) -> SystemDescription | None:
    """Return the description that a v0.6 log holds as text."""
    text = str(found.value(keys.SUBMISSION_ENTRY))[:1000]
    matches = [re.search(rf"'{name}': \\?'(\d{{1,9}})", text) for name in ('num_nodes', 'num_accelerators')]
    nodes, per_node = (int(m[1]) if m else 0 for m in matches)
    source = FactSource('described', keys.SUBMISSION_ENTRY, found.line(keys.SUBMISSION_ENTRY))
    if not nodes or not matches[1]:
        return None
    return SystemDescription(None, Count(nodes, source), Count(nodes * per_node, source))


class LayoutReader:
    """The numbers of a run, each None where it is unknown; their sources, and what contradicts them, are noted."""

    def __init__(self, found: RawLog, description: SystemDescription, sources: dict[str, FactSource]):
        self._found, self._sources = found, sources
        self._described = _in_log(found) or description
        # v0.5 has no init_start; of later rounds some have a seed of the run, some of each rank.
        self._ranks = (self._count_lines(keys.SEED, 'lines of seeds') if found.format == 'MLPv0.5.0' else
                       self._count_lines(keys.INIT_START, 'lines of init_start'))
        self._cleared = self._count_lines(keys.CACHE_CLEAR, 'lines that clear a cache')
        self.num_nodes = self._nodes()
        self.num_accelerators = self._accelerators()
        self.num_ranks = self._settle('num_ranks', 'ranks', self._logged(events.NUM_RANKS), self._ranks)
        self.global_batch_size = self._settle(keys.GLOBAL_BATCH_SIZE, 'images a step',
                                              self._logged(keys.GLOBAL_BATCH_SIZE), self._implied_batch())

    def _logged(self, key: str) -> Count | None:
        return counted(integer(self._found.value(key), 1), FactSource('logged', key, self._found.line(key)))

    def _count_lines(self, key: str, name: str) -> Count | None:
        count, line = self._found.counts[key], self._found.first_lines.get(key)
        return Count(count, FactSource('implied', f'the {count} {name}', line)) if count > 1 else None

    def _in_order(self, described: Count | None, lines: Count | None) -> list[Count | None]:
        """Return what is described, then what is counted; first what is counted where two counts fit together.

        So they do where the description is of another submission (v0.5, NVIDIA, DGX-2H).
        """
        nodes, total = self._described.nodes, self._described.accelerators
        fits = (nodes and total and self._ranks and self._cleared
                and self._ranks.number * nodes.number == self._cleared.number * total.number)
        return [lines, described] if fits else [described, lines]

    def _settle(self, name: str, unit: str, *values: Count | None) -> int | None:
        """Return the first number, and note which others contradict it.

        A resumed run may have gone on with other ranks: its last resume counts alone.
        """
        found, known = self._found, [v for v in values if v]
        if found.resumes:
            key = {'num_nodes': events.NUM_NODES, 'num_ranks': events.NUM_RANKS}.get(name, name)
            mark, event = found.resumes[-1]
            resumed = counted(integer(event.metadata.get(key), 1), FactSource('logged', events.RUN_RESUMED, mark.line))
            known = [resumed] if resumed else known[:1]
        if not known:
            return None
        chosen = known[0]
        self._sources[name] = chosen.source
        for v in known[1:]:
            if v.number != chosen.number:
                found.contradict(None if v.source.path else v.source.line,
                                 f'{v.source.text} says {v.number} {unit}, {chosen.source.text} {chosen.number}; '
                                 f'{chosen.number} counts')
        return chosen.number

    def _nodes(self) -> int | None:
        platform = self._found.value(keys.SUBMISSION_PLATFORM)
        times = re.match(r'(\d{1,6})x(?=\D)', platform[:1000]) if isinstance(platform, str) else None
        named = counted(integer(int(times[1]), 1) if times else None,
                       FactSource('implied', keys.SUBMISSION_PLATFORM, self._found.line(keys.SUBMISSION_PLATFORM)))
        return self._settle('num_nodes', 'nodes', self._logged(events.NUM_NODES),
                            *self._in_order(self._described.nodes, self._cleared), named)

    def _accelerators(self) -> int | None:
        """Return the accelerators of all nodes; a rank drives one where nothing else is known."""
        found = self._found
        per_node = integer(found.value(events.ACCELERATORS_PER_NODE))
        logged = counted(per_node * self.num_nodes if per_node is not None and self.num_nodes else None,
                        FactSource('logged', events.ACCELERATORS_PER_NODE, found.line(events.ACCELERATORS_PER_NODE)))
        lines = self._ranks if events.NUM_RANKS not in found.single else None
        return self._settle('num_accelerators', 'accelerators', logged,
                            *self._in_order(self._described.accelerators, lines))

    def _implied_batch(self) -> Count | None:
        """Return the batch by what v0.5 logs: that of one accelerator, unless it is too large for one."""
        logged = self._logged(INPUT_BATCH_SIZE)
        if logged is None or logged.number >= _NOT_LOCAL:
            text = 'input_batch_size, too large for one accelerator'
            return logged and Count(logged.number, FactSource('implied', text, logged.source.line))
        return counted(logged.number * (self.num_accelerators or 0) or None,
                      FactSource('implied', 'input_batch_size x num_accelerators', logged.source.line))
