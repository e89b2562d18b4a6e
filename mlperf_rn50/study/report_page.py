"""The report as one HTML page that needs nothing else, for a browser: every number leads to its log line."""
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined

import mlperf_rn50
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.report_picture import GRID, INK, Picture, render_svg
from mlperf_rn50.study.report_tables import Ref, heading, notes_of, tables_of
from mlperf_rn50.study.scaling import Comparison, Study

_MAX_QUOTE = 240


@dataclass(frozen=True)
class Quote:
    """A line of a log that a number comes from."""

    name: str
    href: str
    line: int
    text: str


class _Sources:
    """The places that the numbers of a page come from, each group of them once."""

    def __init__(self) -> None:
        self.groups: dict[tuple[Ref, ...], str] = {}

    def anchor(self, refs: tuple[Ref, ...]) -> str:
        """The id of the entry for some lines."""
        return self.groups.setdefault(refs, f'source-{len(self.groups) + 1}')

    def quotes(self, folder: Path) -> list[tuple[str, list[Quote]]]:
        """Every entry with its lines, links relative to the page's folder."""
        wanted: dict[Path, set[int]] = {}
        for path, line in (ref for refs in self.groups for ref in refs):
            wanted.setdefault(path, set()).add(line)
        texts = {path: _read_lines(path, lines) for path, lines in wanted.items()}
        return [(anchor, [Quote(_short_name(path), _href(path, folder), line, texts[path].get(line, ''))
                          for path, line in refs]) for refs, anchor in self.groups.items()]


def _read_lines(path: Path, wanted: set[int]) -> dict[int, str]:
    """Lines of a file, cut to what can be read."""
    found = {}
    with open(path, 'rb') as f:
        number = 0
        while number < max(wanted) and (line := f.readline(1 << 20)):
            number += 1
            if number in wanted:
                text = printable(line.decode('utf-8', 'replace').strip())
                found[number] = text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + ' ...'
            while line and not line.endswith(b'\n'):
                line = f.readline(1 << 20)
    return found


def _short_name(path: Path) -> str:
    return '/'.join(path.parts[-3:] if path.parent.name == 'resnet' else path.parts[-2:])


def _href(path: Path, folder: Path) -> str:
    return quote(os.path.relpath(path.absolute(), folder.absolute()))


def _answer(study: Study) -> list[str]:
    """The answer in a sentence per system."""
    return [_answer_of(study, s, c) for s, c in zip(study.systems, study.comparisons)]


def _answer_of(study: Study, system: System, comparison: Comparison | None) -> str:
    name = system.name
    nodes = '' if system.num_nodes is None else f' ({system.num_nodes} node{"s" if system.num_nodes > 1 else ""})'
    if system.refusal:
        return f'{name}: no set: {system.refusal}'
    if system.time_s is None or system.epochs_mean is None:
        return f'{name}{nodes}: none of {len(system.runs)} runs reached the target'
    what = 'MLPerf score' if system.score_minutes is not None else f'mean of {len(system.converged)} runs'
    text = f'{name}{nodes}: {system.epochs_mean:.1f} epochs, {system.time_s / 60:.2f} min ({what})'
    if comparison and system is not study.baseline:
        text += f', {comparison.speedup:.1f} times as fast as {study.baseline.name}'
        if comparison.efficiency is not None:
            text += f', efficiency {100 * comparison.efficiency:.0f} %'
    return text


def _inline_svg(picture: Picture, prefix: str) -> str:
    """A picture for the page: ids of its own, colours that follow the page's."""
    svg = render_svg(picture)
    svg = svg[svg.index('<svg'):]
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf'\g<1>{prefix}', svg)
    svg = svg.replace(INK, 'currentColor').replace(GRID, 'var(--grid)')
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    return re.sub(r'<svg [^>]*>', f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{prefix}title" '
                                  'xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1)


def _sections(studies: Sequence[Study], drawn: Sequence[list[Picture]], sources: _Sources) -> list[dict]:
    return [{'id': f'study-{i}', 'title': heading(study), 'answer': _answer(study),
             'notes': [*study.cautions, *notes_of(study)],
             'pictures': [{'id': f'p{i}-{k}-', 'title': p.title, 'svg': _inline_svg(p, f'p{i}-{k}-')}
                          for k, p in enumerate(pictures)],
             'tables': [{'title': t.title, 'note': t.note, 'head': t.head,
                         'rows': [[(c, sources.anchor(c.refs) if c.refs else None) for c in row] for row in t.rows]}
                        for t in tables_of(study)]}
            for i, (study, pictures) in enumerate(zip(studies, drawn), start=1)]


def render_html(studies: Sequence[Study], drawn: Sequence[list[Picture]], folder: Path) -> str:
    """The report as a page with the pictures of each study; its links are relative to the folder it will lie in."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              finalize=lambda v: printable(v) if type(v) is str else v)
    template = environment.from_string(resources.files('mlperf_rn50.study').joinpath('report_page.html').read_text())
    sources = _Sources()
    sections = _sections(studies, drawn, sources)
    return template.render(sections=sections, quotes=sources.quotes(folder), version=mlperf_rn50.__version__)
