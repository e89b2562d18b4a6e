"""Render an answer as a self-contained HTML page whose numbers link to their log lines."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from itertools import chain, count, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined

from mlperf_rn50.analysis.show.bar import track
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.figure import Plot, dump_plot, figure_of
from mlperf_rn50.analysis.show.plain import MARKDOWN, render_text
from mlperf_rn50.answer import Answer, Cell, Refs, Sentence, Table
from mlperf_rn50.files import numbered_lines, replacing
from mlperf_rn50.runfolder.outputs import new_files
from mlperf_rn50.text import cut_names, printable

_MAX_QUOTE = 200  # maximum characters quoted per log line
_MAX_LINES = 24  # maximum log lines per source entry; five runs have fewer
_MAX_NAME = 16  # characters of a name in the first column of a table on a phone
_LONG = 40  # rows of a table that scrolls by itself


class _Page:
    """Values of the template. Tables, plots and sources are numbered over the whole page."""

    def __init__(self, has_sources: bool, keep: Callable[[Plot], None]) -> None:
        self.sources: dict[Refs, str] = {}  # ids of distinct groups of log lines
        self._has_sources = has_sources
        self._keep = keep
        self._tables, self._plots = count(1), count(1)

    def answer(self, answer: Answer, html_id: str = '', is_top: bool = True) -> dict[str, Any]:
        """Return an answer with its parts. Those of the whole page that have a title are linked
        as studies."""
        parts: Iterable[Answer] = answer.parts
        if is_top and len(answer.parts) > 1:
            parts = track(answer.parts, len(answer.parts), 'draw plots')
        titled = count(1)
        return {
            **vars(answer),
            'id': html_id,
            'sentences': [self._sentence(sentence) for sentence in answer.sentences],
            'tables': [self._table(table) for table in answer.tables if table.rows],
            'plots': [self._plot(plot) for plot in answer.figures()],
            'parts': [
                self.answer(
                    part, f'study-{next(titled)}' if is_top and part.title else '', is_top=False
                )
                for part in parts
            ],
        }

    def _plot(self, plot: Plot) -> dict[str, Any]:
        shown = figure_of(plot, f'plot-{next(self._plots)}-')
        self._keep(plot)
        return shown

    def _sentence(self, sentence: Sentence) -> dict[str, Any]:
        cells = [Cell(sentence)] if isinstance(sentence, str) else sentence
        return {
            'cells': [{'text': cell.text, 'href': self._link(cell)} for cell in cells],
            'level': next((cell.level for cell in cells if cell.level), ''),
        }

    def _link(self, cell: Cell) -> str | None:
        """Return the target of a cell's link: a study, or an entry with the log lines of a
        number."""
        if cell.study:
            return f'study-{cell.study}'
        if self._has_sources and cell.refs:
            return self.sources.setdefault(cell.refs, f'source-{len(self.sources) + 1}')
        return None

    def _table(self, table: Table) -> dict[str, Any]:
        if not table.head:
            return {'columns': [], 'rows': table.rows}
        whole = table.whole_rows
        texts = [{row[i].text for row in whole} for i in range(len(table.head))]
        same = {i: each.pop() for i, each in enumerate(texts) if i and len(each) == 1 < len(whole)}
        names = cut_names([row[0].text for row in table.rows], _MAX_NAME)
        return {
            **vars(table),
            'id': f'table-{next(self._tables)}',
            'is_long': len(table.rows) > _LONG,
            'columns': [
                {
                    'head': head,
                    'is_minor': head in table.minor,
                    'is_number': is_number,
                    'is_same': i in same,
                }
                for i, (head, is_number) in enumerate(zip(table.head, table.are_numbers))
            ],
            'same': ', '.join(f'{table.head[i]} {text}' for i, text in same.items()),
            'has_minor': not set(table.head).isdisjoint(table.minor),
            'has_filter': bool(table.choices) and len(table.rows) > 1,
            'choices': list(_choices(table)),
            'rows': [
                [
                    {
                        **vars(cell),
                        'href': self._link(cell),
                        'is_number': cell.value is not None or cell.text == '-',
                        # sort key
                        'key': '' if cell.value is None else cell.value,
                        'cut': name if k == 0 and name != cell.text else None,
                    }
                    for k, cell in enumerate(row)
                ]
                for name, row in zip(names, table.rows)
            ],
        }


def _choices(table: Table) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the number, name and sorted texts of each column with a filter."""
    for i, head in enumerate(table.head):
        texts = sorted({(row[i].value or 0, row[i].text) for row in table.whole_rows})
        known = [text for _, text in texts if text != '-']
        if head in table.choices and len(known) > 1:
            yield i, head, known


def _quotes(sources: Mapping[Refs, str], folder: Path) -> list[dict[str, Any]]:
    """Return each entry: its id, its first lines with links relative to folder, and the number of
    omitted lines."""
    numbers: dict[Path, set[int]] = {}
    for path, line in (ref for refs in sources for ref in refs[:_MAX_LINES]):
        numbers.setdefault(path, set()).add(line)
    logs = {path: _quoted_log(path, lines, folder) for path, lines in numbers.items()}
    return [
        {
            'id': html_id,
            'lines': [
                {**logs[path], 'line': line, 'text': logs[path]['texts'].get(line, '')}
                for path, line in refs[:_MAX_LINES]
            ],
            'num_omitted': max(0, len(refs) - _MAX_LINES),
        }
        for refs, html_id in sources.items()
    ]


def _quoted_log(path: Path, numbers: set[int], folder: Path) -> dict[str, Any]:
    """Return the name of a log, its link, and the truncated texts of the lines with these
    numbers."""
    texts = {}
    for number, line in islice(numbered_lines(path), max(numbers)):
        if number in numbers:
            text = printable(line.decode('utf-8', 'replace').strip())
            texts[number] = text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + ' ...'
    relative = os.path.relpath(path.absolute(), folder.absolute())
    return {
        'name': '/'.join(path.parts[-3 if path.parent.name == 'resnet' else -2 :]),
        'href': quote(os.fsencode(relative)),  # may not be UTF-8
        'texts': texts,
    }


def _drop(plot: Plot) -> None:
    """Free the memory of a plot."""
    plot.figure.clear()


def render_html(
    answer: Answer,
    *,
    command: str,
    footer: str,
    folder: Path | None = None,
    origin: str = '',
    note: str = '',
    reload_s: int | None = None,
    keep: Callable[[Plot], None] = _drop,
) -> str:
    """Return the page of an answer.

    Args:
        command: part of the title that names the command.
        folder: where the page will be written; links to logs are relative to it. None omits them.
        origin: small text below the heading.
        note: text below the heading.
        reload_s: seconds after which the page reloads itself, if any.
        keep: called with each plot after it is drawn.
    """
    page = _Page(folder is not None, keep)
    values = page.answer(answer)
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # control characters are replaced by '?'
        finalize=lambda value: printable(value) if type(value) is str else value,
        loader=FunctionLoader(lambda name: resources.files(__package__).joinpath(name).read_text()),
    )
    return environment.get_template('page.html').render(
        answer=values,
        command=command,
        footer=footer,
        origin=origin,
        note=note,
        reload_s=reload_s,
        quotes=_quotes(page.sources, folder) if folder else None,
    )


def dump_answer(
    answer: Answer,
    folder: Path,
    name: str,
    *,
    page: Answer | None = None,
    files: Mapping[str, Iterable[str]] | None = None,
    has_sources: bool = True,
    **texts: Any,
) -> Path:
    """Write an answer into a folder as page, JSON and Markdown, with its plots (SVG, PNG). Return
    the page's path.

    Args:
        name: of the files, without suffix.
        page: answer of the page, if it differs.
        files: parts of further files by name.
        has_sources: whether numbers link to their log lines.
        texts: command, footer, origin and note of the page.

    Raises:
        ConfigError: as new_files does.
    """
    uses = Counter[str]()

    def keep(plot: Plot) -> None:
        uses[plot.name] += 1
        again = f'_{uses[plot.name]}' if uses[plot.name] > 1 else ''
        dump_plot(plot, place, plot.name + again)

    with new_files(folder) as place:
        contents: dict[str, Iterable[str]] = {
            f'{name}.json': chain(render_json(answer.data), '\n'),
            f'{name}.md': [render_text(answer, MARKDOWN), '\n'],
            **(files or {}),
        }
        for file, parts in contents.items():
            with replacing(place / file) as f:
                f.writelines(part.encode() for part in parts)
        linked = folder if has_sources else None
        html = render_html(page or answer, folder=linked, keep=keep, **texts)
        with replacing(place / f'{name}.html') as f:
            f.write(f'{html}\n'.encode())
    return folder / f'{name}.html'
