"""The answer of a command, which mlperf_rn50/analysis/show renders in every output format. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlperf_rn50.errors import EXIT_OK
from mlperf_rn50.table import Cell, Table

# The cells of a sentence can refer to their log lines, and give the sentence a colour.
Sentence = str | tuple[Cell, ...]


@dataclass(frozen=True)
class Answer:
    """Sentences that answer first, then their evidence, notes, and the answers about its parts."""

    title: str = ''
    sentences: Sequence[Sentence] = ()  # list items below a title, otherwise paragraphs
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()  # list items below their title, otherwise paragraphs
    notes_title: str = ''
    parts: Sequence[Answer] = ()  # such as one per study or run
    # draws the plots (show.figure.Plot) for a page or the folder of --out
    figures: Callable[[], Iterable[Any]] = tuple
    # object of --format json; iterators in it are written as lists, item by item
    data: Any = None
    exit_code: int = EXIT_OK


def sentence_text(sentence: Sentence) -> str:
    return sentence if isinstance(sentence, str) else ''.join(cell.text for cell in sentence)
