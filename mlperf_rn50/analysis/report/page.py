"""Render the report as a self-contained HTML page whose numbers link to their log lines."""
import os
from collections.abc import Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from urllib.parse import quote

import mlperf_rn50
from mlperf_rn50.analysis.page import page_template
from mlperf_rn50.analysis.progress import track
from mlperf_rn50.analysis.report import plots
from mlperf_rn50.analysis.report.data import render_csv, render_evaluations_csv, render_json
from mlperf_rn50.analysis.report.picture import Picture, dump_picture, figure_of
from mlperf_rn50.analysis.report.refs import study_command, study_heading
from mlperf_rn50.analysis.report.tables import finding_lines, is_large, overview_table, tables_of
from mlperf_rn50.analysis.report.text import MARKDOWN, render_table
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.files import numbered_lines, write_atomically, writing_folder
from mlperf_rn50.table import Cell, Ref, Table
from mlperf_rn50.text import printable

_MAX_QUOTE = 200  # maximum characters quoted per log line
_MAX_LINES = 24  # maximum log lines per source entry; five runs have fewer
_Sources = dict[tuple[Ref, ...], str]  # ids of source entries, one for each distinct group of log lines


def _quotes(sources: _Sources, folder: Path) -> list[tuple[str, list[dict], int]]:
    """Return (id, first lines with links relative to folder, number of omitted lines) for each entry."""
    numbers: dict[Path, set[int]] = {}
    for path, line in (ref for refs in sources for ref in refs[:_MAX_LINES]):
        numbers.setdefault(path, set()).add(line)
    logs = {path: ('/'.join(path.parts[-3:] if path.parent.name == 'resnet' else path.parts[-2:]),
                   quote(os.fsencode(os.path.relpath(path.absolute(), folder.absolute()))),  # may not be UTF-8
                   _read_lines(path, lines)) for path, lines in numbers.items()}
    return [(anchor, [{'name': name, 'href': href, 'line': line, 'text': texts.get(line, '')}
                      for path, line in refs[:_MAX_LINES] for name, href, texts in (logs[path],)],
             max(0, len(refs) - _MAX_LINES)) for refs, anchor in sources.items()]


def _read_lines(path: Path, numbers: set[int]) -> dict[int, str]:
    """Return the truncated text of the lines with these numbers, by number."""
    texts = {}
    for number, line in islice(numbered_lines(path), max(numbers)):
        if number in numbers:
            text = printable(line.decode('utf-8', 'replace').strip())
            texts[number] = text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + ' ...'
    return texts


def _cell(cell: Cell, sources: _Sources | None) -> dict:
    """Return a cell with its link target and its sort key, which is empty for a missing number."""
    href = f'study-{cell.study}' if cell.study else None if sources is None or not cell.refs else sources.setdefault(
        cell.refs, f'source-{len(sources) + 1}')
    is_number = cell.value is not None or cell.text == '-'
    return {'text': cell.text, 'href': href, 'span': cell.span, 'is_number': is_number,
            'key': '' if cell.value is None else cell.value, 'is_short': cell.span == 1 and len(cell.text) < 30}


def _table(table: Table, name: str, sources: _Sources | None) -> dict:
    whole = table.whole_rows
    columns = [{'head': head, 'is_minor': head in table.minor, 'is_number': is_number}
               for head, is_number in zip(table.head, table.are_numbers)]
    choices = [(i, head, [x for _, x in sorted({(row[i].value or 0, row[i].text) for row in whole}) if x != '-'])
               for i, head in enumerate(table.head) if head in table.choices]
    return {'id': name, 'title': table.title, 'note': table.note, 'columns': columns,
            'has_minor': any(c['is_minor'] for c in columns), 'choices': [x for x in choices if len(x[2]) > 1],
            'rows': [[_cell(c, sources) for c in row] for row in table.rows]}


def _pictures(pictures: Sequence[Picture], prefix: str) -> list[dict]:
    return [figure_of(p, f'{prefix}-{k}-') for k, p in enumerate(pictures)]


def _section(number: int, study: Study, pictures: Sequence[Picture], sources: _Sources | None) -> dict:
    name, count = f'study-{number}', len(study.series)
    drawn, is_brief = _pictures(pictures, f'p{number}'), sources is None
    shown = tables_of(study)[:count + bool(study.others) if is_brief else None]
    tables = [_table(t, f'{name}-table-{k}', sources) for k, t in enumerate(shown, start=1)]
    series = list(zip_longest(tables[:count], drawn[:count]))
    return {'id': name, 'title': study_heading(study), 'findings': finding_lines(study, more='see all findings'),
            'all_findings': [] if is_brief else finding_lines(study, True), 'series': series,
            'command': f'{study_command(study)} --out DIR' if is_brief else None,
            'pictures': drawn[count:], 'tables': tables[count:], 'has_others': bool(study.others),
            'num_systems': len(study.run_sets)}


def render_html(studies: Sequence[Study], drawn: Sequence[list[Picture]], folder: Path) -> str:
    """Return the page with the plots of draw_report. Links are relative to folder, where the page will be written."""
    sources: _Sources | None = None if is_large(studies) else {}
    overview = overview_table(studies)
    title = study_heading(studies[0]) if len(studies) == 1 else (
        f'ResNet-50 in MLPerf logs: {sum(len(s.run_sets) for s in studies)} systems in {len(studies)} studies')
    return page_template('report/page.html').render(
        title=title, overview=_table(overview, 'systems', sources) if overview else None,
        sections=[_section(i, s, p, sources) for i, (s, p) in enumerate(zip(studies, drawn[1:]), start=1)],
        pictures=_pictures(drawn[0], 'p0'), quotes=None if sources is None else _quotes(sources, folder),
        version=mlperf_rn50.__version__)


def dump_report(studies: Sequence[Study], folder: Path, has_all_findings: bool = False) -> Path:
    """Write the plots, and the report in all formats. Return the page's path. Raise ConfigError if writing fails."""
    with writing_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, render in (('.json', render_json), ('.csv', render_csv),
                             ('_evaluations.csv', render_evaluations_csv),
                             ('.md', partial(render_table, style=MARKDOWN, has_all_findings=has_all_findings))):
            write_atomically(folder / f'report{name}', render(studies) + '\n')
        drawn = []
        for i, pictures in enumerate(track(plots.draw_report(studies), 1 + len(studies), 'draw plots')):
            drawn.append(pictures)
            for picture in pictures:  # written now to free the memory of the figures
                dump_picture(picture, folder, f'study{i}_' if i and len(studies) > 1 else '')
        write_atomically(folder / 'report.html', render_html(studies, drawn, folder) + '\n')
    return folder / 'report.html'
