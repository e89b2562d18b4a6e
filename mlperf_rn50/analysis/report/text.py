"""Render the report as text tables, for a terminal or in Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlperf_rn50.analysis.report import tables as report
from mlperf_rn50.analysis.report.refs import report_heading, study_command, study_heading
from mlperf_rn50.analysis.report.summary import summarise
from mlperf_rn50.analysis.sets.findings import render_finding
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.table import Table, fit_columns, wrap_line
from mlperf_rn50.text import plural, printable


def markdown_text(text: str) -> str:
    """Escape text for Markdown, so that it cannot become a cell border, HTML, a link or an
    image."""
    text = printable(text).replace('\\', '\\\\').replace('|', '\\|').replace('[', '\\[')
    return text.replace('<', '&lt;').replace('`', "'")


@dataclass(frozen=True)
class Style:
    """Formatting of text output."""

    clean: Callable[[str], str]  # escapes text from logs
    table_format: str  # name of a tabulate format
    study: Callable[[str], str]  # formats the heading of a study
    section: Callable[[str], str]  # formats the heading of a table, of findings or of warnings
    gap: str  # text between a table and its notes
    status: Callable[[str], str] = str  # formats the status of a run
    width: int | None = None  # columns of the terminal, None for no limit

    def line(self, text: str, indent: str = '') -> str:
        """Return a clean line, wrapped to the width. indent begins further lines."""
        return wrap_line(self.clean(text), self.width, indent)

    def points(self, texts: Sequence[str]) -> str:
        return '\n'.join(self.line(f'- {text}', '  ') for text in texts)


def terminal_style(
    title: Callable[[str], str] = str, status: Callable[[str], str] = str, width: int | None = None
) -> Style:
    """Return the style of a terminal. title and status add colours to headings and statuses."""
    return Style(
        printable,
        'simple',
        lambda text: f'{title(text)}\n{"=" * min(len(text), width or len(text))}',
        lambda text: f'{title(text)}\n',
        '\n',
        status,
        width,
    )


TERMINAL = terminal_style()
MARKDOWN = Style(
    markdown_text, 'github', lambda text: f'## {text}', lambda text: f'### {text}\n\n', '\n\n'
)


def _render_table(table: Table, style: Style, title: Callable[[str], str]) -> str:
    # A cell that spans several columns becomes a note below the table.
    texts = [
        [t for c in row for t in ([c.text] if c.span == 1 else ['-'] * c.span)]
        for row in table.rows
    ]
    rows = [
        [
            style.status(style.clean(text)) if name == 'status' else style.clean(text)
            for name, text in zip(table.head, row)
        ]
        for row in texts
    ]
    head, minor = (tuple(map(style.clean, names)) for names in (table.head, table.minor))
    sides = ['right' if is_number else 'left' for is_number in table.are_numbers]
    text = fit_columns(head, rows, style.width, minor, sides, style.table_format)
    notes = [
        f'{row[0].text}: {cell.text}' for row in table.rows for cell in row if cell.span > 1
    ] + [table.note]
    return title(style.line(table.title)) + ''.join(
        [text, *(style.gap + style.line(n) for n in notes if n)]
    )


def render_section(
    title: str,
    points: Sequence[str],
    tables: Sequence[Table],
    notes: Sequence[str],
    style: Style,
    notes_title: str = 'Warnings',
) -> str:
    """Return a section: heading, points, tables, and warnings or findings."""
    parts = [style.study(style.clean(title))]
    if points:
        parts.append(style.points(points))
    parts += [_render_table(t, style, style.section) for t in tables]
    if notes:
        parts.append(style.section(notes_title) + style.points(notes))
    return '\n\n'.join(parts)


def render_table(
    studies: Sequence[Study], style: Style = TERMINAL, has_all_findings: bool = False
) -> str:
    """Return the report as text. A report on many studies (is_large) has no section per study."""
    is_brief, parts = report.is_large(studies), []
    points = [''.join(c.text for c in sentence) for sentence in summarise(studies)]
    each = (
        [(s, f) for x in studies for s in x.run_sets for f in report.findings_of(x, s)]
        if is_brief
        else []
    )
    if is_brief:
        counts = (
            plural(sum(f.grade == g for _, f in each), g) for g in ('error', 'warning', 'note')
        )
        largest = max(studies, key=lambda s: len(s.run_sets))
        points += [
            f'{", ".join(counts)}: --findings',
            f'all tables: a report on fewer folders, such as {study_command(largest)}',
        ]
    if overview := report.overview_table(studies):
        lines = (
            [f'{s.study_name}/{s.name}: {render_finding(f)}' for s, f in each]
            if has_all_findings
            else []
        )
        parts.append(
            render_section(report_heading(studies), points, [overview], lines, style, 'Findings')
        )
        points = []
    parts += [
        render_section(
            study_heading(s),
            points,
            report.tables_of(s),
            report.finding_lines(s, has_all_findings),
            style,
            'Findings',
        )
        for s in ([] if is_brief else studies)
    ]
    return '\n\n'.join(parts)
