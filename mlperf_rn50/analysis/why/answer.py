"""Answer about a run: one sentence, its evidence and the next thing to try."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlperf_rn50.analysis.show.text import fit_columns
from mlperf_rn50.text import printable, wrap_line


@dataclass(frozen=True)
class Answer:
    """Answer to why a run takes its time or misses its accuracy."""

    sentence: str  # the cause, its size and the largest possible gain
    head: tuple[str, ...] = ()  # columns of the evidence
    evidence: tuple[tuple[str, ...], ...] = ()
    next_step: str = ''  # what to try, with the option or the command
    notes: tuple[str, ...] = ()  # such as what the run does not record
    # further keys of the JSON output, such as verdict
    values: Mapping[str, Any] = field(default_factory=dict)


def render_answer(answer: Answer, width: int | None = None) -> str:
    """Return an answer as text that fits a width; texts from the run are made printable."""
    rows = [[printable(text) for text in row] for row in answer.evidence]
    table = fit_columns(answer.head, rows, width, sides=['left'] * len(answer.head)) if rows else ''
    lines = [
        wrap_line(printable(text), width)
        for text in (
            answer.sentence,
            f'Next: {answer.next_step}' if answer.next_step else '',
            *answer.notes,
        )
    ]
    return '\n\n'.join(filter(None, (lines[0], table, *lines[1:])))


def answer_object(answer: Answer) -> dict[str, Any]:
    """Return an answer as a JSON object."""
    return {
        **answer.values,
        'sentence': answer.sentence,
        'next_step': answer.next_step,
        'notes': list(answer.notes),
        'evidence': [dict(zip(answer.head, row)) for row in answer.evidence],
    }
