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
        self._contradictions: dict[str, _Note] = {}
        self._others: dict[str, _Note] = {}

    def warn(self, line: int | None, text: str, many: str = '') -> None:
        """Notes what is odd; many says it of all lines of its kind, of which only the first is kept."""
        _add(self._others, _Note(line, text), many or text)

    def contradict(self, line: int | None, text: str, many: str = '') -> None:
        """Notes what cannot be true beside what counts."""
        _add(self._contradictions, _Note(line, text), many or text)

    def include(self, other: 'Notes') -> None:
        """Takes the notes of another in, before its own."""
        self._contradictions = {**other._contradictions, **self._contradictions}
        self._others = {**other._others, **self._others}

    def warnings(self) -> tuple[LogWarning, ...]:
        """Contradictions, then the rest, each in the order of the log."""
        return (*_rendered(self._contradictions, True), *_rendered(self._others, False))


def _add(where: dict[str, _Note], note: _Note, kind: str) -> None:
    if kind in where:
        where[kind].count += 1
    elif len(where) < MAX_WARNINGS:
        where[kind] = note
    else:
        where.setdefault('', _Note(note.line, 'more warnings follow; they are left out'))


def _rendered(notes: dict[str, _Note], is_contradiction: bool) -> list[LogWarning]:
    return [LogWarning(n.line, n.text if n.count == 1 else f'{n.count} lines: {kind}; first line {n.line}',
                       is_contradiction) for kind, n in notes.items()]
