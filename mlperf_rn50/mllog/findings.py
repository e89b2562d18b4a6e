"""Findings: errors, warnings and notes about logs, run sets and comparisons. findings.ini defines
their kinds."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlperf_rn50.files import load_ini

MAX_FINDINGS = 50  # maximum number of findings of each grade in a log
Grade = Literal['error', 'warning', 'note']
GRADES: tuple[Grade, ...] = ('error', 'warning', 'note')
_TEXTS = load_ini(Path(__file__).with_name('findings.ini'))
_GRADE_OF = {kind: grade for grade in GRADES for kind in _TEXTS[grade]}


class Finding(NamedTuple):
    """An error, a warning or a note about a line, a log, a run set or a comparison."""

    kind: str  # id in findings.ini
    line: int | None  # None for the whole file
    text: str
    summary: str  # text for several such lines
    grade: Grade
    file: Path | None = None  # None for several logs


def make_finding(
    kind: str,
    line: int | None = None,
    *values: Any,
    file: Path | None = None,
    grade: Grade | None = None,
) -> Finding:
    """Return the finding of a kind, with the values in its text. Grade None means the grade in
    findings.ini."""
    text, _, summary = _TEXTS[_GRADE_OF[kind]][kind].partition(' | ')
    return Finding(
        kind,
        line,
        text=text.format(*values),
        summary=(summary or text).format(*values),
        grade=grade or _GRADE_OF[kind],
        file=file,
    )


def most_severe(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors, then warnings, then notes, each in the given order."""
    return sorted(findings, key=lambda f: GRADES.index(f.grade))


class Findings:
    """Collects the first finding of each grade and summary, and counts the others, to use little
    memory for any log."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Grade, str], Finding] = {}  # the first finding by grade and summary
        self._counts: Counter[tuple[Grade, str]] = Counter()

    def add(self, finding: Finding) -> None:
        """Add a finding, or count it if its grade and summary are known, or omit it after
        MAX_FINDINGS of its grade."""
        grade, kind = finding.grade, (finding.grade, finding.summary)
        if kind not in self._kept and sum(key[0] == grade for key in self._kept) >= MAX_FINDINGS:
            omitted = make_finding('omitted', finding.line, f'{grade}s', grade=grade)
            self._kept.setdefault((grade, ''), omitted)
            return
        self._kept.setdefault(kind, finding)
        self._counts[kind] += 1

    def flag(self, kind: str, line: int | None, *values: Any, grade: Grade | None = None) -> None:
        """Add the finding of a kind, with the values in its text."""
        self.add(make_finding(kind, line, *values, grade=grade))

    def include(self, other: 'Findings') -> None:
        """Insert the findings of another collector before those of this one."""
        self._kept, self._counts = {**other._kept, **self._kept}, other._counts + self._counts

    def in_file(self, path: Path) -> tuple[Finding, ...]:
        """Return all findings, the most severe first, with `path` as their file."""
        found = []
        for kind, f in self._kept.items():
            count, text = self._counts[kind], f.text
            if count > 1:
                text = f'{count} lines from line {f.line} on: {f.summary}'
            found.append(f._replace(file=path, text=text))
        return tuple(most_severe(found))
