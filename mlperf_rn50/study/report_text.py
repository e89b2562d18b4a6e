"""The report as text tables for people: in a terminal, or as Markdown in a document."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.report_tables import Cell, Table, heading, notes_of, overview_table, tables_of
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


def _texts(row: Sequence[Cell]) -> list[str]:
    """The cells of a row; what takes several columns is said below the table."""
    return [text for cell in row for text in ([cell.text] if cell.span == 1 else ['-'] * cell.span)]


def _render_table(table: Table, style: _Style, title: Callable[[str], str]) -> str:
    rows = [[style.status(style.clean(text)) if name == 'status' else style.clean(text)
             for name, text in zip(table.head, _texts(row))] for row in table.rows]
    head = [style.clean(h) for h in table.head]
    sides = ['right' if is_number else 'left' for is_number in table.are_numbers]
    text = tabulate(rows, head, style.table_format, disable_numparse=True, colalign=sides)
    notes = [f'{row[0].text}: {cell.text}' for row in table.rows for cell in row if cell.span > 1] + [table.note]
    return title(style.clean(table.title)) + ''.join([text, *(f'{style.gap}{style.clean(n)}' for n in notes if n)])


def _render(studies: Sequence[Study], style: _Style) -> str:
    overview = overview_table(studies)
    parts = [_render_table(overview, style, lambda title: style.study(title) + '\n\n')] if overview else []
    for study in studies:
        parts.append(style.study(style.clean(heading(study))))
        if study.cautions:
            parts.append('\n'.join(f'- {style.clean(c)}' for c in study.cautions))
        parts += [_render_table(t, style, style.section) for t in tables_of(study)]
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
