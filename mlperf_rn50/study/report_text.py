"""The report as text tables for people: in a terminal, or as Markdown in a document."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.report_tables import Table, heading, notes_of, tables_of
from mlperf_rn50.study.scaling import Study


def _markdown(text: str) -> str:
    """Text of a log in Markdown, where it must be neither a cell's border nor HTML."""
    return printable(text).replace('\\', '\\\\').replace('|', '\\|').replace('<', '&lt;').replace('`', "'")


@dataclass(frozen=True)
class _Style:
    """A way to write text: what a text of a log is made to be, tabulate's name, headings of two levels, a gap.

    Args:
        status: what the word is made to be that says how a run ended.
    """

    clean: Callable[[str], str]
    table_format: str
    study: Callable[[str], str]
    section: Callable[[str], str]
    gap: str
    status: Callable[[str], str] = str


_MARKDOWN = _Style(_markdown, 'github', lambda text: f'## {text}', lambda text: f'### {text}\n\n', '\n\n')


def _render_table(table: Table, style: _Style) -> str:
    rows = [[style.status(style.clean(cell.text)) if name == 'status' else style.clean(cell.text)
             for name, cell in zip(table.head, row)] for row in table.rows]
    sides = ['right' if all(row[i].value is not None or row[i].text == '-' for row in table.rows) else 'left'
             for i in range(len(table.head))]
    head = [style.clean(h) for h in table.head]
    text = tabulate(rows, head, style.table_format, disable_numparse=True, colalign=sides)
    note = f'{style.gap}{style.clean(table.note)}' if table.note else ''
    return f'{style.section(style.clean(table.title))}{text}{note}'


def _render(studies: Sequence[Study], style: _Style) -> str:
    parts = []
    for study in studies:
        parts.append(style.study(style.clean(heading(study))))
        parts += [_render_table(t, style) for t in tables_of(study)]
        if notes := notes_of(study):
            parts.append(style.section('Mind') + '\n'.join(f'- {style.clean(n)}' for n in notes))
    return '\n\n'.join(parts)


def render_table(studies: Sequence[Study], title: Callable[[str], str] = str,
                 status: Callable[[str], str] = str) -> str:
    """The tables of every study for a terminal; title and status colour headings and how runs ended."""
    return _render(studies, _Style(printable, 'simple', lambda text: f'{title(text)}\n{"=" * len(text)}',
                                   lambda text: f'{title(text)}\n', '\n', status))


def render_markdown(studies: Sequence[Study]) -> str:
    """The same as Markdown."""
    return _render(studies, _MARKDOWN)
