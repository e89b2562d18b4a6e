"""Answer about a run: one sentence, its evidence and the next thing to try."""
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlperf_rn50.table import fit_columns, wrap_line
from mlperf_rn50.text import printable


@dataclass(frozen=True)
class Answer:
    """Answer to why a run takes its time or misses its accuracy.

    Args:
        sentence: the cause, its size and the largest possible gain.
        head: names of the columns of evidence.
        evidence: rows of a table, as texts; the first column names the quantity.
        next_step: what to try, with the option or the command.
        notes: such as what the run does not record.
        values: further keys of the JSON output, such as verdict and share.
    """

    sentence: str
    head: tuple[str, ...] = ()
    evidence: tuple[tuple[str, ...], ...] = ()
    next_step: str = ''
    notes: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def render_answer(answer: Answer, width: int | None = None) -> str:
    """Return an answer as text that fits a width; texts from the run are made printable."""
    rows = [[printable(text) for text in row] for row in answer.evidence]
    parts = [wrap_line(printable(answer.sentence), width),
             fit_columns(answer.head, rows, width, sides=['left'] * len(answer.head)) if rows else '',
             *(wrap_line(printable(text), width) for text in (
                 f'Next: {answer.next_step}' if answer.next_step else '', *answer.notes))]
    return '\n\n'.join(filter(None, parts))


def answer_object(answer: Answer) -> dict[str, Any]:
    """Return an answer as a JSON object."""
    return {**answer.values, 'sentence': answer.sentence, 'next_step': answer.next_step, 'notes': list(answer.notes),
            'evidence': [dict(zip(answer.head, row)) for row in answer.evidence]}
