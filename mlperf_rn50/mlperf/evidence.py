"""What several witnesses say of one number, and which of them counts. Pure."""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mlperf.run import Source


@dataclass(frozen=True)
class Statement:
    """A number, and who says it."""

    value: int
    source: Source


def weigh(statements: Sequence[Statement]) -> Statement | None:
    """The statement that counts: what the log says outright, else the value that most agree on, the first of a tie."""
    outright = [s for s in statements if s.source.basis == 'logged']
    votes = Counter(s.value for s in statements)
    return max(outright[:1] or statements, key=lambda s: votes[s.value], default=None)


def contradictions(chosen: Statement, statements: Sequence[Statement], unit: str) -> list[tuple[int | None, str]]:
    """Who says another number than the one that counts; with the line of the log, None where it is not the log's."""
    return [(None if s.source.path else s.source.line,
             f'{s.source.text} says {s.value} {unit}, {chosen.source.text} {chosen.value}; {chosen.value} counts')
            for s in statements if s.value != chosen.value]


def lost_lines(count: int, num_nodes: int) -> int:
    """Lines that are missing where every node writes the same number; 0 where that is no better guess than another.

    A few may be lost, a twentieth at most; and where one node more, with a line of its own lost, explains the count
    better, nobody knows.
    """
    missing = -count % num_nodes
    total = count + missing
    others = [n - num_nodes + -count % n for n in range(num_nodes + 1, num_nodes + 2 + num_nodes // 20)]
    is_likely = total >= 8 and missing <= max(1, total // 20) and missing <= min(others)
    return missing if num_nodes > 1 and is_likely else 0
