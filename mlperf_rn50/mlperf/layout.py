"""How many nodes, ranks and accelerators trained, with which batch: what a log contains counts before its description,
and that before lines that are counted."""
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mlperf import events, keys
from mlperf_rn50.mlperf.collect import INPUT_BATCH_SIZE, Found, integer
from mlperf_rn50.mlperf.description import Description
from mlperf_rn50.mlperf.run import Source

# v0.5 logs an accelerator's batch, some organisations the global one; no accelerator of that round held so many.
_NOT_LOCAL = 1024


@dataclass(frozen=True)
class _Value:
    """A number, and where it comes from."""

    number: int
    source: Source


@dataclass(frozen=True)
class _Described:
    """Numbers of a description, which v0.6 logs hold as a line and others have beside them."""

    nodes: _Value | None = None
    accelerators: _Value | None = None  # of all nodes


def _value(number: int | None, source: Source) -> _Value | None:
    return None if number is None else _Value(number, source)


def _in_log(found: Found) -> _Described:
    """Return the description that a v0.6 log holds as text."""
    text = found.value(keys.SUBMISSION_ENTRY)
    source = Source('described', keys.SUBMISSION_ENTRY, found.line(keys.SUBMISSION_ENTRY))

    def number(name: str) -> int | None:
        m = re.search(rf"'{name}': \\?'(\d{{1,9}})", text[:1000]) if isinstance(text, str) else None
        return int(m[1]) if m else None
    nodes, per_node = integer(number('num_nodes'), 1), number('num_accelerators')
    total = nodes * per_node if nodes and per_node is not None else None
    return _Described(_value(nodes, source), _value(total, source))


def _beside(d: Description | None) -> _Described:
    """Return the description beside a log."""
    if d is None:
        return _Described()
    return _Described(_value(integer(d.num_nodes, 1), Source('described', d.path.name, d.nodes_line, d.path)),
                      _value(d.num_accelerators, Source('described', d.path.name, d.accelerators_line, d.path)))


class Layout:
    """The numbers of a run, each None where it is unknown, and their sources.

    Args:
        found: takes in what contradicts the numbers that count.
    """

    def __init__(self, found: Found, description: Description | None):
        self._found = found
        self.sources: dict[str, Source] = {}
        self._descriptions = [_in_log(found), _beside(description)]
        # v0.5 has no init_start; of later rounds some have a seed of the run, some of each rank.
        self._key, self._lines = ((keys.SEED, 'lines of seeds') if found.format == 'MLPv0.5.0' else
                                  (keys.INIT_START, 'lines of init_start'))
        self._ranks = self._counted(self._key, self._lines)
        self._cleared = self._counted(keys.CACHE_CLEAR, 'lines that clear a cache')
        # Two counts that fit together are right where a description is of another submission (v0.5, NVIDIA, DGX-2H).
        self._is_confirmed = any(d.nodes and d.accelerators and self._fits(d.accelerators.number / d.nodes.number)
                                 for d in self._descriptions)
        self.num_nodes = self._nodes()
        self.num_accelerators = self._accelerators()
        self.num_ranks = self._settle('num_ranks', 'ranks', self._logged(events.NUM_RANKS), self._ranks)
        self.global_batch_size = self._settle(keys.GLOBAL_BATCH_SIZE, 'images a step',
                                              self._logged(keys.GLOBAL_BATCH_SIZE), self._implied_batch())

    def _logged(self, key: str) -> _Value | None:
        return _value(integer(self._found.value(key), 1), Source('logged', key, self._found.line(key)))

    def _counted(self, key: str, name: str) -> _Value | None:
        count, line = self._found.counts[key], self._found.first_lines.get(key)
        return _Value(count, Source('implied', f'the {count} {name}', line)) if count > 1 else None

    def _fits(self, per_node: float) -> bool:
        return bool(self._cleared and self._ranks and self._ranks.number == self._cleared.number * per_node)

    def _settle(self, name: str, unit: str, *values: _Value | None) -> int | None:
        """Return the first number, and note which others contradict it.

        A resumed run may have gone on with other ranks: its last resume counts alone.
        """
        found, known = self._found, [v for v in values if v]
        if found.resumes:
            key = {'num_nodes': events.NUM_NODES, 'num_ranks': events.NUM_RANKS}.get(name, name)
            mark, event = found.resumes[-1]
            resumed = _value(integer(event.metadata.get(key), 1), Source('logged', events.RUN_RESUMED, mark.line))
            known = [resumed] if resumed else known[:1]
        if not known:
            return None
        chosen = known[0]
        self.sources[name] = chosen.source
        for v in known[1:]:
            if v.number != chosen.number:
                found.contradict(None if v.source.path else v.source.line,
                                 f'{v.source.text} says {v.number} {unit}, {chosen.source.text} {chosen.number}; '
                                 f'{chosen.number} counts')
        return chosen.number

    def _nodes(self) -> int | None:
        platform = self._found.value(keys.SUBMISSION_PLATFORM)
        times = re.match(r'(\d{1,6})x(?=\D)', platform[:1000]) if isinstance(platform, str) else None
        named = _value(integer(int(times[1]), 1) if times else None,
                       Source('implied', keys.SUBMISSION_PLATFORM, self._found.line(keys.SUBMISSION_PLATFORM)))
        return self._settle('num_nodes', 'nodes', self._logged(events.NUM_NODES),
                            *self._in_order([d.nodes for d in self._descriptions], self._cleared), named)

    def _in_order(self, described: Sequence[_Value | None], counted: _Value | None) -> list[_Value | None]:
        return [counted, *described] if self._is_confirmed else [*described, counted]

    def _accelerators(self) -> int | None:
        """Return the accelerators of all nodes; a rank drives one where nothing else is known."""
        found = self._found
        per_node = integer(found.value(events.ACCELERATORS_PER_NODE))
        logged = _value(per_node * self.num_nodes if per_node is not None and self.num_nodes else None,
                        Source('logged', events.ACCELERATORS_PER_NODE, found.line(events.ACCELERATORS_PER_NODE)))
        counted = self._ranks if events.NUM_RANKS not in found.single else None
        return self._settle('num_accelerators', 'accelerators', logged,
                            *self._in_order([d.accelerators for d in self._descriptions], counted))

    def _implied_batch(self) -> _Value | None:
        """Return the batch by what v0.5 logs: that of one accelerator, unless it is too large for one."""
        logged = self._logged(INPUT_BATCH_SIZE)
        if logged is None or logged.number >= _NOT_LOCAL:
            text = 'input_batch_size, too large for one accelerator'
            return logged and _Value(logged.number, Source('implied', text, logged.source.line))
        return _value(logged.number * (self.num_accelerators or 0) or None,
                      Source('implied', 'input_batch_size x num_accelerators', logged.source.line))
