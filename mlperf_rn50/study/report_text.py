"""The report as text tables for people: in a terminal, or as Markdown in a document."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.report_tables import heading, notes_of, overview_table, tables_of
from mlperf_rn50.study.scaling import Study
from mlperf_rn50.study.table import Cell, Table


def markdown_text(text: str) -> str:
    """Text of a log in Markdown, where it must be neither a cell's border nor HTML, nor a link or picture."""
    text = printable(text).replace('\\', '\\\\').replace('|', '\\|').replace('[', '\\[')
    return text.replace('<', '&lt;').replace('`', "'")


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


_MARKDOWN = _Style(markdown_text, 'github', lambda text: f'## {text}', lambda text: f'### {text}\n\n', '\n\n')


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
    parts += [_render_section(heading(s), s.cautions, tables_of(s), notes_of(s), style) for s in studies]
    return '\n\n'.join(parts)


def _render_section(title: str, points: Sequence[str], tables: Sequence[Table], notes: Sequence[str],
                    style: _Style) -> str:
    parts = [style.study(style.clean(title))]
    if points:
        parts.append('\n'.join(f'- {style.clean(p)}' for p in points))
    parts += [_render_table(t, style, style.section) for t in tables]
    if notes:
        parts.append(style.section('Mind') + '\n'.join(f'- {style.clean(n)}' for n in notes))
    return '\n\n'.join(parts)


def _terminal(title: Callable[[str], str], status: Callable[[str], str]) -> _Style:
    return _Style(printable, 'simple', lambda text: f'{title(text)}\n{"=" * len(text)}',
                  lambda text: f'{title(text)}\n', '\n', status)


def render_section(heading: str, points: Sequence[str], tables: Sequence[Table], notes: Sequence[str],
                   is_markdown: bool = False, title: Callable[[str], str] = str) -> str:
    """Tables with what stands above them, and notes below, as the report has them; title colours headings."""
    return _render_section(heading, points, tables, notes, _MARKDOWN if is_markdown else _terminal(title, str))


def render_table(studies: Sequence[Study], title: Callable[[str], str] = str,
                 status: Callable[[str], str] = str) -> str:
    """The tables of every study for a terminal; title and status colour headings and how runs ended."""
    return _render(studies, _terminal(title, status))


def render_markdown(studies: Sequence[Study]) -> str:
    """The same as Markdown."""
    return _render(studies, _MARKDOWN)
