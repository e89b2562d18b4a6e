"""Render an answer as text for a terminal, which fits its width, or as Markdown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from mlperf_rn50.answer import Answer, Cell, Sentence, Table, sentence_text
from mlperf_rn50.text import cut_names, plural, printable, wrap_line

_LEAST_CUT = 12  # texts up to this length, such as the status of a run in colour, are never cut


def markdown_text(text: str) -> str:
    """Escape text for Markdown, so that it cannot become a cell border, HTML, a link or an
    image."""
    text = printable(text).replace('\\', '\\\\').replace('|', '\\|').replace('[', '\\[')
    return text.replace('<', '&lt;').replace('`', "'")


def _unpainted(text: str, level: str) -> str:
    return text


@dataclass(frozen=True)
class Style:
    """Formatting of text output."""

    clean: Callable[[str], str] = printable  # escapes text from logs
    paint: Callable[[str, str], str] = _unpainted  # colours text by a level of Cell, or 'bold'
    width: int | None = None  # columns of the terminal, None for no limit
    is_markdown: bool = False

    @property
    def gap(self) -> str:
        """Text between paragraphs that belong together."""
        return '\n\n' if self.is_markdown else '\n'

    def line(self, text: str, indent: str = '') -> str:
        """Return a clean line, wrapped to the width. indent begins further lines."""
        return wrap_line(self.clean(text), self.width, indent)

    def points(self, texts: Iterable[str]) -> str:
        return '\n'.join(self.line(f'- {text}', '  ') for text in texts)

    def title(self, text: str) -> str:
        """Return the title of an answer, with a rule below it on a terminal."""
        text = self.clean(text)
        if self.is_markdown:
            return f'## {text}'
        return f'{self.paint(text, "bold")}\n{"=" * min(len(text), self.width or len(text))}'

    def subtitle(self, text: str) -> str:
        """Return the title of a table or of notes."""
        if self.is_markdown:
            return f'### {self.line(text)}\n\n'
        return f'{self.paint(self.line(text), "bold")}\n'


TERMINAL = Style()
MARKDOWN = Style(clean=markdown_text, is_markdown=True)


def fit_columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    minor: Sequence[str] = (),
    sides: Sequence[str] = (),
    table_format: str = 'simple',
) -> str:
    """Return a table of texts as text that fits a terminal, with the number of omitted columns
    below it.

    Args:
        width: columns of the terminal; None omits nothing. Texts longer than a third of it are cut
            in the middle.
        minor: columns that are omitted first, the last first; then others are, from the right. The
            first two remain.
        sides: 'left' or 'right' for each column.
    """

    def render() -> str:
        shown, *body = zip(*(columns[i] for i in kept))
        return tabulate(
            body,
            shown,
            table_format,
            disable_numparse=True,
            colalign=[sides[i] for i in kept] if sides else None,
        )

    columns: list[Sequence[str]] = [*zip(head, *rows)]
    kept = list(range(len(head)))
    text = render()
    if width is not None and len(text.splitlines()[1]) > width:
        columns = [cut_names(texts, max(width // 3, _LEAST_CUT)) for texts in columns]
        names = [*(h for h in head if h not in minor), *minor]
        dropped = sorted(kept[2:], key=lambda i: (names.index(head[i]), i))
        while len((text := render()).splitlines()[1]) > width and dropped:
            kept.remove(dropped.pop())
    more = len(head) - len(kept)
    return text + (f'\n{plural(more, "more column")}: --wide' if more else '')


def _sentence(sentence: Sentence, style: Style) -> str:
    levels = () if isinstance(sentence, str) else (cell.level for cell in sentence)
    return style.paint(style.line(sentence_text(sentence)), next(filter(None, levels), ''))


def _facts(table: Table, style: Style) -> str:
    """Return a table of names and texts, which has no head, as a line or an item for each name."""
    if style.is_markdown:
        return style.points(f'{name.text}: {text.text}' for name, text in table.rows)
    wide = max(len(name.text) for name, _ in table.rows)
    indent = ' ' * (wide + 2)
    return '\n'.join(
        style.paint(style.line(f'{name.text:{wide}}  {text.text}', indent), text.level)
        for name, text in table.rows
    )


def _row(row: Sequence[Cell], style: Style) -> list[str]:
    """Return the texts of a row. A cell that spans several columns becomes a note below the
    table."""
    texts = []
    for cell in row:
        if cell.span > 1:
            texts += ['-'] * cell.span
        else:
            texts.append(style.paint(style.clean(cell.text), cell.level))
    return texts


def _table(table: Table, style: Style) -> str:
    if not table.head:
        return _facts(table, style)
    text = fit_columns(
        head=tuple(map(style.clean, table.head)),
        rows=[_row(row, style) for row in table.rows],
        width=style.width,
        minor=tuple(map(style.clean, table.minor)),
        sides=['right' if is_number else 'left' for is_number in table.are_numbers],
        table_format='github' if style.is_markdown else 'simple',
    )
    spanning = [
        f'{row[0].text}: {cell.text}' for row in table.rows for cell in row if cell.span > 1
    ]
    notes = [style.line(note) for note in (*spanning, table.note) if note]
    title = style.subtitle(table.title) if table.title else ''
    return title + style.gap.join([text, *notes])


def render_text(answer: Answer, style: Style = TERMINAL) -> str:
    """Return an answer as text: title, sentences, tables, notes, and its parts."""
    blocks = []
    if answer.title:
        blocks.append(style.title(answer.title))
        blocks.append(style.points(map(sentence_text, answer.sentences)))
    else:
        blocks.append(style.gap.join(_sentence(s, style) for s in answer.sentences))
    blocks += [_table(table, style) for table in answer.tables if table.rows]
    if answer.notes and answer.notes_title:
        blocks.append(style.subtitle(answer.notes_title) + style.points(answer.notes))
    else:
        blocks.append(style.gap.join(map(style.line, answer.notes)))
    blocks += [render_text(part, style) for part in answer.parts]
    return '\n\n'.join(filter(None, blocks))
