"""How many nodes, ranks and accelerators trained, with which batch: weighed from a log and what lies beside it."""
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mlperf import events, keys
from mlperf_rn50.mlperf.collect import INPUT_BATCH_SIZE, Found, integer
from mlperf_rn50.mlperf.description import Description
from mlperf_rn50.mlperf.evidence import Statement, contradictions, lost_lines, weigh
from mlperf_rn50.mlperf.run import Source

# v0.5 logs an accelerator's batch, some organisations the global one; no accelerator of that round held so many.
_NOT_LOCAL = 1024


@dataclass(frozen=True)
class _Described:
    """What a description says, which v0.6 logs hold as a line and others have beside them."""

    nodes: Statement | None = None
    total: Statement | None = None  # accelerators of all nodes
    of_a_node: Statement | None = None


def _statement(value: int | None, source: Source) -> Statement | None:
    return None if value is None else Statement(value, source)


def _known(*statements: Statement | None) -> list[Statement]:
    return [s for s in statements if s]


def _in_log(found: Found) -> _Described:
    """The description that a v0.6 log holds as text."""
    text = found.value(keys.SUBMISSION_ENTRY)
    source = Source('described', keys.SUBMISSION_ENTRY, found.line(keys.SUBMISSION_ENTRY))

    def number(name: str) -> int | None:
        m = re.search(rf"'{name}': \\?'(\d{{1,9}})", text[:1000]) if isinstance(text, str) else None
        return int(m[1]) if m else None
    nodes, per_node = integer(number('num_nodes'), 1), number('num_accelerators')
    total = nodes * per_node if nodes and per_node is not None else None
    return _Described(_statement(nodes, source), _statement(total, source), _statement(per_node, source))


def _beside(description: Description | None) -> _Described:
    """The description beside a log."""
    d = description
    if d is None:
        return _Described()
    nodes, count = integer(d.num_nodes, 1), d.num_accelerators
    source = Source('described', d.path.name, d.accelerators_line, d.path)
    at_nodes = _statement(nodes, Source('described', d.path.name, d.nodes_line, d.path))
    if d.is_of_one_node or count is None:
        return _Described(at_nodes, None, _statement(count, source))
    is_even = nodes is not None and count % nodes == 0
    of_a_node = count // nodes if nodes and is_even else None
    return _Described(at_nodes, Statement(count, source), _statement(of_a_node, source))


class Layout:
    """The numbers of a run, each None where nothing says it, and where they come from.

    Args:
        found: what the log says; takes in what contradicts it.
        description: what lies beside it.
        arguments: batch sizes that stand between the events of a v0.5 log, each with its line.
    """

    def __init__(self, found: Found, description: Description | None, arguments: list[tuple[int, int]]):
        self._found, self._arguments = found, arguments
        self.sources: dict[str, Source] = {}
        self._descriptions = [_in_log(found), _beside(description)]
        self._of_a_node = next((d.of_a_node for d in self._descriptions if d.of_a_node), None)
        # v0.5 has no init_start; of later rounds some have a seed of the run, some of each rank.
        self._key, self._lines = ((keys.SEED, 'lines of seeds') if found.format == 'MLPv0.5.0' else
                                  (keys.INIT_START, 'lines of init_start'))
        self._count = found.count(self._key) if found.count(self._key) > 1 else None
        self.num_nodes = self._nodes()
        self.num_accelerators = self._accelerators()
        self.num_ranks = self._ranks()
        self.global_batch_size = self._batch()

    def _logged(self, value: int | None, key: str) -> Statement | None:
        return _statement(value, Source('logged', key, self._found.line(key)))

    def _counted(self, key: str, name: str) -> Source:
        found = self._found
        return Source('implied', f'the {found.count(key)} {name}', found.first_lines.get(key))

    def _settle(self, name: str, unit: str, chosen: Statement | None, said: Sequence[Statement]) -> int | None:
        """Takes what counts for a number, and notes what contradicts it.

        A resumed run may have gone on with other ranks: what its last resume says counts alone.
        """
        found = self._found
        if found.resumes:
            key = {'num_nodes': events.NUM_NODES, 'num_ranks': events.NUM_RANKS}.get(name, name)
            resumed = integer(found.resumes[-1][1].metadata.get(key), 1)
            chosen = _statement(resumed, Source('logged', events.RUN_RESUMED, found.resumes[-1][0].line)) or chosen
        if chosen is None:
            return None
        self.sources[name] = chosen.source
        for line, text in contradictions(chosen, said, unit) if not found.resumes else []:
            found.contradict(line, text)
        return chosen.value

    def _nodes(self) -> int | None:
        found = self._found
        platform = found.value(keys.SUBMISSION_PLATFORM)
        times = re.match(r'(\d{1,6})x(?=\D)', platform[:1000]) if isinstance(platform, str) else None
        clears = found.count(keys.CACHE_CLEAR)
        logged = self._logged(integer(found.value(events.NUM_NODES), 1), events.NUM_NODES)
        cleared = _statement(clears if clears > 1 else None,
                             self._counted(keys.CACHE_CLEAR, 'lines that clear a cache'))
        named = _statement(integer(int(times[1]), 1) if times else None,
                           Source('implied', keys.SUBMISSION_PLATFORM, found.line(keys.SUBMISSION_PLATFORM)))
        said = _known(logged, cleared, *(d.nodes for d in self._descriptions), named)
        # Lines that fill some nodes to the last accelerator say more than a description of nodes over which they cannot
        # be spread; others only bear one out.
        filled = self._filled_nodes()
        is_full = (filled is not None and self._of_a_node is not None and self._count is not None and filled.value > 1
                   and self._count == filled.value * self._of_a_node.value
                   and all(self._count % d.nodes.value for d in self._descriptions if d.nodes))
        first = _known(logged, cleared, filled) if is_full else _known(logged, cleared)
        weighed = [*first, *(s for s in said if s not in first), *(_known(filled) if not is_full else [])]
        chosen = weigh(weighed)
        return self._settle('num_nodes', 'nodes',
                            next((s for s in said if chosen and s.value == chosen.value), chosen), said)

    def _filled_nodes(self) -> Statement | None:
        """The nodes that the lines of ranks fill, the last one perhaps in part, at a rank an accelerator."""
        of_a_node = self._of_a_node.value if self._of_a_node else 0
        if not self._count or not of_a_node or events.NUM_RANKS in self._found.single:
            return None
        return Statement(math.ceil(self._count / of_a_node),
                         self._counted(self._key, f'{self._lines}, {of_a_node} a node'))

    def _accelerators(self) -> int | None:
        """Accelerators of all nodes.

        A rank drives an accelerator in most published logs; ours says it itself.
        """
        per_node = integer(self._found.value(events.ACCELERATORS_PER_NODE))
        logged = self._logged(per_node * self.num_nodes if per_node is not None and self.num_nodes else None,
                              events.ACCELERATORS_PER_NODE)
        is_counted = events.NUM_RANKS not in self._found.single and self._count
        expected = self._expected() or (self._evened() if is_counted else None)
        if expected and expected.value == 0:
            is_counted = False  # the ranks train on CPUs
        counted = _statement(self._count if is_counted else None, self._counted(self._key, self._lines))
        told = self._told(_known(counted, expected))
        chosen = logged or self._choose(counted, expected, told)
        self._say_lines(counted, chosen)
        more = counted if counted and chosen and counted.value > chosen.value else None
        totals = _known(*(d.total for d in self._descriptions)) or _known(expected)
        return self._settle('num_accelerators', 'accelerators', chosen, _known(logged, more, *totals, told))

    def _expected(self) -> Statement | None:
        """Nodes x accelerators of each, as described."""
        nodes, each = self.num_nodes, self._of_a_node
        totals = _known(*(d.total for d in self._descriptions))
        if each is None or nodes is None:
            return next(iter(totals), each)
        total, source = nodes * each.value, self.sources['num_nodes']
        exact = next((t for t in totals if t.value == total), None)
        return exact or Statement(total, Source('implied', f'{nodes} nodes x {each.value} accelerators', source.line,
                                                source.path))

    def _evened(self) -> Statement | None:
        """The ranks, where a few lines more are the same number on each node."""
        missing = lost_lines(self._count, self.num_nodes) if self._count and self.num_nodes else 0
        if not missing or not self._count or not self.num_nodes:
            return None
        total, source = self._count + missing, self.sources['num_nodes']
        return Statement(total, Source('implied', f'{self.num_nodes} nodes x {total // self.num_nodes} ranks',
                                       source.line, source.path))

    def _told(self, others: Sequence[Statement]) -> Statement | None:
        """The accelerators that the arguments of a v0.5 run tell: its batch over that of one; the number that others
        say, too, if there is one."""
        local = integer(self._found.value(INPUT_BATCH_SIZE), 1)
        told = [Statement(whole // local, Source('implied', f'batch_size={whole} / input_batch_size', line))
                for whole, line in self._arguments if local and whole > local and whole % local == 0]
        return next((t for t in told if t.value in [s.value for s in others]), next(iter(told), None))

    def _choose(self, counted: Statement | None, expected: Statement | None, told: Statement | None
                ) -> Statement | None:
        """What two of three agree on; else the count, unless it is one of lost lines, or of ranks with several each."""
        said = _known(counted, expected, told)
        is_agreed = len({s.value for s in said}) < len(said)
        if counted and expected and not is_agreed and self._can_be_fewer(counted.value, expected.value):
            return expected
        return weigh(said)

    def _can_be_fewer(self, count: int, expected: int) -> bool:
        """Whether so many lines can be those of more accelerators: some are lost, or each rank drives several."""
        nodes = self.num_nodes or 1
        is_even = count % nodes == 0 and expected % count == 0
        return count < expected and (2 * count > expected or is_even)

    def _say_lines(self, counted: Statement | None, chosen: Statement | None) -> None:
        """Says what became of lines of ranks that are fewer than the accelerators."""
        if not counted or not chosen or counted.value >= chosen.value:
            return
        count, total, line = counted.value, chosen.value, counted.source.line
        if self._is_lost(total):
            self._found.contradict(line, f'{total - count} of {total} {self._lines} are missing, {count} are there, by '
                                         f'{chosen.source.text}; {total} accelerators count')
        else:
            self._found.warn(line, f'{count} {self._lines} for the {total} accelerators of {chosen.source.text}: each '
                                   f'rank drives several, or lines are missing; {total} counts')

    def _is_lost(self, total: int | None) -> bool:
        """Whether lines are missing: a rank that drives more than one accelerator leaves half of them at most."""
        return total is not None and self._count is not None and self._count < total < 2 * self._count

    def _ranks(self) -> int | None:
        counted = _statement(self._count, self._counted(self._key, self._lines))
        logged = self._logged(integer(self._found.value(events.NUM_RANKS), 1), events.NUM_RANKS)
        if counted and not logged and self._is_lost(self.num_accelerators):
            counted = _statement(self.num_accelerators, self.sources['num_accelerators'])
        return self._settle('num_ranks', 'ranks', logged or counted, _known(logged, counted))

    def _batch(self) -> int | None:
        name = keys.GLOBAL_BATCH_SIZE
        logged = self._logged(integer(self._found.value(name), 1), name)
        implied = self._implied_batch()
        said = [Statement(whole, Source('implied', 'batch_size among the arguments', line))
                for whole, line in self._arguments[:1] if implied and not logged and not self._fits(implied.value)]
        return self._settle(name, 'images a step', logged or implied, _known(logged, implied, *said))

    def _fits(self, batch: int) -> bool:
        """Whether the arguments name a batch, or that of one accelerator."""
        local = batch // self.num_accelerators if self.num_accelerators else None
        return any(value in (batch, local) for value, _ in self._arguments)

    def _implied_batch(self) -> Statement | None:
        """From the batch that v0.5 logs: of one accelerator, unless the arguments or its size tell another thing."""
        logged, line = integer(self._found.value(INPUT_BATCH_SIZE), 1), self._found.line(INPUT_BATCH_SIZE)
        if logged is None:
            return None
        accelerators, told = self.num_accelerators or 0, [value for value, _ in self._arguments]
        if accelerators > 1 and any(value * accelerators == logged for value in told):
            return Statement(logged, Source('implied', 'input_batch_size, num_accelerators x the batch_size of the '
                                            'arguments', line))
        if logged >= _NOT_LOCAL and logged * accelerators not in told:
            return Statement(logged, Source('implied', 'input_batch_size, too large for one accelerator', line))
        return _statement(logged * accelerators or None,
                          Source('implied', 'input_batch_size x num_accelerators', line))
