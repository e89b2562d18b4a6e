"""The report as text tables for people: in a terminal, or as Markdown in a document."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.analysis.report.refs import heading
from mlperf_rn50.analysis.report.tables import notes_of, overview_table, tables_of
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.table import Cell, Table


def markdown_text(text: str) -> str:
    """Text of a log in Markdown, where it must be neither a cell's border nor HTML, nor a link or picture."""
    text = printable(text).replace('\\', '\\\\').replace('|', '\\|').replace('[', '\\[')
    return text.replace('<', '&lt;').replace('`', "'")


@dataclass(frozen=True)
class Style:
    """A way to write text."""

    clean: Callable[[str], str]  # of any text of a log
    table_format: str  # as tabulate names it
    study: Callable[[str], str]  # a heading
    section: Callable[[str], str]  # a heading below it
    gap: str  # between a table and its notes
    status: Callable[[str], str] = str  # of the word that says how a run ended


def terminal_style(title: Callable[[str], str] = str, status: Callable[[str], str] = str) -> Style:
    """The style of a terminal; title and status colour headings and how runs ended."""
    return Style(printable, 'simple', lambda text: f'{title(text)}\n{"=" * len(text)}',
                 lambda text: f'{title(text)}\n', '\n', status)


TERMINAL = terminal_style()
MARKDOWN = Style(markdown_text, 'github', lambda text: f'## {text}', lambda text: f'### {text}\n\n', '\n\n')


def _texts(row: Sequence[Cell]) -> list[str]:
    """The cells of a row; what takes several columns is said below the table."""
    return [text for cell in row for text in ([cell.text] if cell.span == 1 else ['-'] * cell.span)]


def _render_table(table: Table, style: Style, title: Callable[[str], str]) -> str:
    rows = [[style.status(style.clean(text)) if name == 'status' else style.clean(text)
             for name, text in zip(table.head, _texts(row))] for row in table.rows]
    head = [style.clean(h) for h in table.head]
    sides = ['right' if is_number else 'left' for is_number in table.are_numbers]
    text = tabulate(rows, head, style.table_format, disable_numparse=True, colalign=sides)
    notes = [f'{row[0].text}: {cell.text}' for row in table.rows for cell in row if cell.span > 1] + [table.note]
    return title(style.clean(table.title)) + ''.join([text, *(f'{style.gap}{style.clean(n)}' for n in notes if n)])


def render_section(title: str, points: Sequence[str], tables: Sequence[Table], notes: Sequence[str],
                   style: Style) -> str:
    """Tables with what stands above them, and notes below."""
    parts = [style.study(style.clean(title))]
    if points:
        parts.append('\n'.join(f'- {style.clean(p)}' for p in points))
    parts += [_render_table(t, style, style.section) for t in tables]
    if notes:
        parts.append(style.section('Mind') + '\n'.join(f'- {style.clean(n)}' for n in notes))
    return '\n\n'.join(parts)


def render_table(studies: Sequence[Study], style: Style = TERMINAL) -> str:
    """The tables of every study."""
    overview = overview_table(studies)
    parts = [_render_table(overview, style, lambda title: style.study(title) + '\n\n')] if overview else []
    parts += [render_section(heading(s), s.cautions, tables_of(s), notes_of(s), style) for s in studies]
    return '\n\n'.join(parts)


def render_markdown(studies: Sequence[Study]) -> str:
    """The same as Markdown."""
    return render_table(studies, MARKDOWN)
