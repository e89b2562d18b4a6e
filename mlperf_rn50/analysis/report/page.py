"""Render the report as a self-contained HTML page whose numbers link to their log lines."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from urllib.parse import quote

import mlperf_rn50
from mlperf_rn50.analysis.page import page_template
from mlperf_rn50.analysis.progress import track
from mlperf_rn50.analysis.report import plots
from mlperf_rn50.analysis.report.data import evaluations_csv, report_data, runs_csv
from mlperf_rn50.analysis.report.refs import report_heading, study_command, study_heading
from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.report.summary import summarise
from mlperf_rn50.analysis.report.tables import (
    finding_lines,
    is_large,
    overview_table,
    series_matrix,
    tables_of,
)
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.figure import Plot, dump_plot, figure_of
from mlperf_rn50.analysis.show.text import MARKDOWN, render_text
from mlperf_rn50.answer import Cell, Ref, Table
from mlperf_rn50.files import numbered_lines, replacing, write_atomically
from mlperf_rn50.runfolder.outputs import new_files
from mlperf_rn50.text import cut_names, printable

_MAX_QUOTE = 200  # maximum characters quoted per log line
_MAX_LINES = 24  # maximum log lines per source entry; five runs have fewer
_MAX_NAME = 16  # characters of a name in the first column of a table on a phone
# ids of source entries, one for each distinct group of log lines
_Sources = dict[tuple[Ref, ...], str]


def _quotes(sources: _Sources, folder: Path) -> list[tuple[str, list[dict], int]]:
    """Return (id, first lines with links relative to folder, number of omitted lines) for each
    entry."""
    numbers: dict[Path, set[int]] = {}
    for path, line in (ref for refs in sources for ref in refs[:_MAX_LINES]):
        numbers.setdefault(path, set()).add(line)
    logs = {
        path: (
            '/'.join(path.parts[-3:] if path.parent.name == 'resnet' else path.parts[-2:]),
            # may not be UTF-8
            quote(os.fsencode(os.path.relpath(path.absolute(), folder.absolute()))),
            _read_lines(path, lines),
        )
        for path, lines in numbers.items()
    }
    return [
        (
            anchor,
            [
                {'name': name, 'href': href, 'line': line, 'text': texts.get(line, '')}
                for path, line in refs[:_MAX_LINES]
                for name, href, texts in (logs[path],)
            ],
            max(0, len(refs) - _MAX_LINES),
        )
        for refs, anchor in sources.items()
    ]


def _read_lines(path: Path, numbers: set[int]) -> dict[int, str]:
    """Return the truncated text of the lines with these numbers, by number."""
    texts = {}
    for number, line in islice(numbered_lines(path), max(numbers)):
        if number in numbers:
            text = printable(line.decode('utf-8', 'replace').strip())
            texts[number] = text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + ' ...'
    return texts


def _link(cell: Cell, sources: _Sources | None) -> str | None:
    """Return the target of a cell's link: a study, or an entry with the log lines of a number."""
    if cell.study:
        return f'study-{cell.study}'
    return (
        sources.setdefault(cell.refs, f'source-{len(sources) + 1}')
        if sources is not None and cell.refs
        else None
    )


def _cell(cell: Cell, sources: _Sources | None) -> dict:
    """Return a cell with its link and its sort key, which is empty for a missing number."""
    return {
        'text': cell.text,
        'href': _link(cell, sources),
        'span': cell.span,
        'share': cell.share,
        'more': cell.more,
        'is_number': cell.value is not None or cell.text == '-',
        'key': '' if cell.value is None else cell.value,
    }


def _table(table: Table, html_id: str, sources: _Sources | None) -> dict:
    whole, names = table.whole_rows, cut_names([row[0].text for row in table.rows], _MAX_NAME)
    texts = [{row[i].text for row in whole} for i in range(len(table.head))]
    same = {i: each.pop() for i, each in enumerate(texts) if i and len(each) == 1 < len(whole)}
    columns = [
        {
            'head': head,
            'is_minor': head in table.minor,
            'is_number': is_number,
            'is_same': i in same,
        }
        for i, (head, is_number) in enumerate(zip(table.head, table.are_numbers))
    ]
    choices = [
        (
            i,
            head,
            [x for _, x in sorted({(row[i].value or 0, row[i].text) for row in whole}) if x != '-'],
        )
        for i, head in enumerate(table.head)
        if head in table.choices
    ]
    return {
        'id': html_id,
        'title': table.title,
        'note': table.note,
        'columns': columns,
        'same': ', '.join(f'{table.head[i]} {text}' for i, text in same.items()),
        'has_minor': any(c['is_minor'] for c in columns),
        'choices': [x for x in choices if len(x[2]) > 1],
        'rows': [
            [
                {**_cell(c, sources), 'cut': None if k or name == row[0].text else name}
                for k, c in enumerate(row)
            ]
            for name, row in zip(names, table.rows)
        ],
    }


def _pictures(pictures: Sequence[Plot], prefix: str) -> list[dict]:
    return [figure_of(p, f'{prefix}-{k}-') for k, p in enumerate(pictures)]


def _section(number: int, study: Study, pictures: Sequence[Plot], sources: _Sources | None) -> dict:
    name, is_brief = f'study-{number}', sources is None
    first = len(study.series) + bool(study.others)  # number of tables before the plots
    tables = [
        _table(t, f'{name}-table-{k}', sources)
        for k, t in enumerate(tables_of(study)[: first if is_brief else None], start=1)
    ]
    return {
        'id': name,
        'title': study_heading(study),
        'findings': finding_lines(study, more='see all findings'),
        'all_findings': [] if is_brief else finding_lines(study, True),
        'num_series': len(study.series),
        'command': f'{study_command(study)} --out DIR' if is_brief else None,
        'pictures': _pictures(pictures, f'p{number}'),
        'first': tables[:first],
        'tables': tables[first:],
        'num_systems': len(study.run_sets),
    }


def _dates(studies: Sequence[Study]) -> str:
    """Return the days on which the runs ended, in UTC, or the rounds of published sets."""
    days = {
        time.strftime('%Y-%m-%d', time.gmtime(r.last_s))
        for x in studies
        for s in x.run_sets
        for r in s.runs
        if r.last_s
    }
    known = sorted(days or {s.round for x in studies for s in x.run_sets})
    return 'runs of ' + ' to '.join(dict.fromkeys((known[0], known[-1])))


def render_html(
    studies: Sequence[Study],
    drawn: Sequence[list[Plot]],
    folder: Path,
    title: str | None = None,
    note: str | None = None,
    source: str | None = None,
    limit: str | None = None,
) -> str:
    """Return the page with the plots of draw_report. Links are relative to folder, where the page
    will be written."""
    sources: _Sources | None = None if is_large(studies) else {}
    overview, matrix = overview_table(studies), series_matrix(studies)
    sentences = [[(limit, None)]] * bool(limit) + [
        [(c.text, _link(c, sources)) for c in s] for s in summarise(studies)
    ]
    return page_template('report/page.html').render(
        title=title or report_heading(studies),
        note=note,
        origin=', '.join(filter(None, (source, _dates(studies)))),
        sentences=sentences,
        matrix=_table(matrix, 'series', sources) if matrix else None,
        overview=_table(overview, 'systems', sources) if overview else None,
        sections=[
            _section(i, s, p, sources) for i, (s, p) in enumerate(zip(studies, drawn[1:]), start=1)
        ],
        pictures=_pictures(drawn[0], 'p0'),
        quotes=None if sources is None else _quotes(sources, folder),
        version=mlperf_rn50.__version__,
        is_published=all(s.is_published for x in studies for s in x.run_sets),
    )


def dump_report(
    studies: Sequence[Study], folder: Path, has_all_findings: bool = False, **texts: str | None
) -> Path:
    """Write the plots, and the report in all formats. Return the page's path. Raise ConfigError as
    new_files does."""
    with new_files(folder) as place:
        for name, parts in (
            ('report.json', chain(render_json(report_data(studies)), '\n')),
            ('report.csv', runs_csv(studies)),
            ('report_evaluations.csv', evaluations_csv(studies)),
        ):
            with replacing(place / name) as f:
                f.writelines(part.encode() for part in parts)
        markdown = render_text(make_report(studies, has_all_findings), MARKDOWN)
        write_atomically(place / 'report.md', markdown + '\n')
        drawn, uses = [], Counter[str]()
        for pictures in track(plots.draw_report(studies), 1 + len(studies), 'draw plots'):
            drawn.append(pictures)
            for picture in pictures:  # written now to free the memory of the figures
                uses[picture.name] += 1
                again = f'_{uses[picture.name]}' * (uses[picture.name] > 1)
                dump_plot(picture, place, picture.name + again)
        write_atomically(place / 'report.html', render_html(studies, drawn, folder, **texts) + '\n')
    return folder / 'report.html'
