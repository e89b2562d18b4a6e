"""What is odd about a log, as a reader of it is told: contradictions first, repeats as one sentence with a count."""
from dataclasses import dataclass

from mlperf_rn50.mlperf.run import LogWarning

MAX_WARNINGS = 50  # of each weight


@dataclass
class _Note:
    line: int | None
    text: str
    count: int = 1


class Notes:
    """Collects warnings in memory that does not grow with the log."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, str], _Note] = {}  # by whether it is a contradiction, and its kind

    def warn(self, line: int | None, text: str, many: str = '', is_contradiction: bool = False) -> None:
        """Note what is odd; many says it of all lines of its kind, of which only the first is kept."""
        kind = is_contradiction, many or text
        if kind in self._kept:
            self._kept[kind].count += 1
        elif sum(weight == is_contradiction for weight, _ in self._kept) < MAX_WARNINGS:
            self._kept[kind] = _Note(line, text)
        else:
            self._kept.setdefault((is_contradiction, ''), _Note(line, 'more warnings follow; they are left out'))

    def contradict(self, line: int | None, text: str, many: str = '') -> None:
        """Note what cannot be true beside what counts."""
        self.warn(line, text, many, True)

    def include(self, other: 'Notes') -> None:
        """Take the notes of another in, before its own."""
        self._kept = {**other._kept, **self._kept}

    def warnings(self) -> tuple[LogWarning, ...]:
        """Return contradictions, then the rest, each in the order of the log."""
        return tuple(LogWarning(n.line, n.text if n.count == 1 else f'{n.count} lines: {kind}; first line {n.line}',
                                weight) for (weight, kind), n in sorted(self._kept.items(), key=lambda i: not i[0][0]))
