"""One drawing and what each of its points says when it is pointed at; as SVG for a page, as PNG for a document."""
import io
import logging
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from mlperf_rn50.mllog.events import printable

# Text and lines; a page in the dark has its own. Grid, ideal lines and outlines have 3:1 on white and on dark paper.
INK, GRID = '#1b1e23', '#808893'
# After Okabe and Ito, whose colours the colour-blind tell apart; each has 3:1 on white and on dark paper. Systems
# beyond these are drawn in ink.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#c4649b', '#a67c00', '#7a6fd0')
WIDTH_IN = 4.6  # on a phone, where a page shows it 360 CSS px wide, text is larger than 9 of them
STYLE = {'svg.fonttype': 'none', 'font.family': 'sans-serif', 'font.size': 9.5, 'text.color': INK,
         'axes.edgecolor': GRID, 'axes.labelcolor': INK, 'axes.labelsize': 9.5, 'hatch.linewidth': 0.6,
         'xtick.color': GRID, 'ytick.color': GRID, 'xtick.labelcolor': INK, 'ytick.labelcolor': INK,
         'xtick.labelsize': 9.5, 'ytick.labelsize': 9.5, 'legend.fontsize': 9.5, 'axes.titlesize': 9.5,
         'axes.grid': True, 'grid.color': GRID, 'grid.linewidth': 0.4, 'axes.axisbelow': True,
         'axes.spines.top': False, 'axes.spines.right': False,
         'legend.frameon': False, 'figure.facecolor': 'white', 'axes.facecolor': 'none',
         'text.parse_math': False}  # what a log says is no formula
# The first use on a machine makes a list of its fonts, and says so after 5 s: nothing that is wrong with a report.
logging.getLogger('matplotlib.font_manager').setLevel(logging.ERROR)
_LINE_IN, _LINE_LENGTH, _MAX_LINES = 0.17, 58, 8  # of what stands above a drawing


@dataclass
class Picture:
    """A drawing. Its files say above it what it is; a page has a caption for that."""

    name: str
    title: str
    heading: str
    figure: Figure
    notes: list[str] = field(default_factory=list)  # what of it is not drawn, and other things to know
    tips: dict[str, Sequence[str]] = field(default_factory=dict)  # of the points, or the whole, of a group of the SVG

    @property
    def caption(self) -> str:
        """What it shows, and what it does not."""
        return '. '.join([self.title, *self.notes])

    def tip(self, artist, *texts: str) -> None:
        """What the points of an artist say."""
        gid = f'tip{len(self.tips)}'
        artist.set_gid(gid)
        self.tips[gid] = texts

    @property
    def above(self) -> list[str]:
        """The lines that stand above the drawing."""
        return [line for text in (self.heading, self.caption)
                for line in textwrap.wrap(printable(text), _LINE_LENGTH)][:_MAX_LINES]

    @property
    def above_in(self) -> float:
        """Their height."""
        return _LINE_IN * (len(self.above) + 0.5)

    @cached_property
    def svg(self) -> str:
        """It as SVG, the same every time; its points have titles."""
        out = io.StringIO()
        width, height = self.figure.get_size_inches()
        whole = height + self.above_in
        with matplotlib.rc_context({**STYLE, 'svg.hashsalt': self.name}):
            self.figure.set_size_inches(width, whole)
            self.figure.set_layout_engine('constrained', rect=(0, 0, 1, height / whole))
            self.figure.text(0.02, 1 - 0.3 * _LINE_IN / whole, '\n'.join(self.above), va='top', gid='title')
            self.figure.patch.set_gid('paper')
            self.figure.savefig(out, format='svg', metadata={'Date': None, 'Creator': None})
        self.figure.set_layout_engine('none')  # it is laid out now
        text = re.sub(r'<metadata>.*?</metadata>', '', out.getvalue(), flags=re.DOTALL)
        # Each part begins with the id of a group, the first with what stands before all of them.
        return '<g id="'.join(_add_titles(part, self.tips) for part in text.split('<g id="'))


def _add_titles(part: str, tips: dict[str, Sequence[str]]) -> str:
    """Gives the marks of a group their titles, one each, or the whole group the first."""
    gid, quote, rest = part.partition('"')
    if gid not in tips:
        return part
    titles = [f'<title>{escape(printable(t))}</title>' for t in tips[gid]]
    if rest.count('<use ') == len(titles):
        ordered = iter(titles)
        return gid + quote + re.sub(r'<use ([^>]*)/>', lambda m: f'<use {m[1]}>{next(ordered)}</use>', rest)
    return f'{gid}{quote}{rest[0]}{titles[0]}{rest[1:]}'


def _without(svg: str, gid: str) -> str:
    """An SVG without one of its groups."""
    start, depth = svg.index(f'<g id="{gid}">'), 0
    for mark in re.finditer(r'<g\b|</g>', svg[start:]):
        depth += 1 if mark[0] == '<g' else -1
        if not depth:
            return svg[:start] + svg[start + mark.end():]
    return svg


def render_svg(picture: Picture) -> str:
    """A picture as SVG for a page, which has a caption for it and a paper of its own."""
    svg = _without(_without(picture.svg, 'title'), 'paper')
    top = picture.above_in * 72
    svg = svg.replace('<g id="figure_1">', f'<g id="figure_1" transform="translate(0 {-top:g})">', 1)
    return re.sub(r'viewBox="0 0 ([\d.]+) ([\d.]+)"',
                  lambda m: f'viewBox="0 0 {m[1]} {float(m[2]) - top:g}"', svg, count=1)


def inline_svg(picture: Picture, prefix: str) -> str:
    """A picture for the page: ids of its own, colours that follow the page's."""
    svg = render_svg(picture)
    svg = svg[svg.index('<svg'):]
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf'\g<1>{prefix}', svg)
    svg = svg.replace(INK, 'currentColor').replace(GRID, 'var(--grid)')
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    return re.sub(r'<svg [^>]*>', f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{prefix}title" '
                                  'xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1)


def dump_picture(picture: Picture, folder: Path, prefix: str) -> None:
    """Writes a picture as SVG and PNG."""
    (folder / f'{prefix}{picture.name}.svg').write_text(picture.svg)  # first: it is laid out then
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(folder / f'{prefix}{picture.name}.png', dpi=150, metadata={'Software': None})
    picture.figure.clear()  # what it weighs is not needed any more


def differ_tenfold(values: Sequence[float]) -> bool:
    """Whether there are values of which one is ten times another; all are above 0."""
    return bool(values) and min(values) > 0 and max(values) >= 10 * min(values)


def plain(value: float, _: float = 0) -> str:
    """A number beside an axis."""
    for size, letter in ((1e6, ' M'), (1e3, ' k')):
        if abs(value) >= max(size, 1e4):
            return f'{value / size:,.10g}{letter}'
    return f'{value:,.10g}'


def scale_up(axis: Axis, name: str, values: Sequence[float]) -> None:
    """Makes an axis a logarithmic one with numbers that can be read, and says so."""
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)('log')
    axis.set_major_locator(LogLocator(10, (1,) if max(values) > 500 * min(values) else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(plain)
    axis.set_label_text(f'{name} (logarithmic)')


def legend(picture: Picture, handles: Sequence[Line2D | Patch]) -> None:
    """What marks and colours mean, below the drawing."""
    if not handles:
        return
    num_columns = max(1, min(len(handles), 58 // (max(len(str(h.get_label())) for h in handles) + 7)))
    width, height = picture.figure.get_size_inches()
    picture.figure.set_size_inches(width, height + 0.1 + 0.19 * -(-len(handles) // num_columns))
    picture.figure.legend(handles=handles, loc='outside lower center', ncols=num_columns, columnspacing=1.2,
                          handlelength=1.8)


def mark_of(marker: str, label: str, size: float = 4.5, width: float = 1.0, colour: str = INK) -> Line2D:
    """A mark for a legend."""
    return Line2D([], [], color=colour, marker=marker, markersize=size, markeredgewidth=width, linestyle='',
                  label=label)


def ticks(values: Sequence[int]) -> list[int]:
    """Those of some rising numbers that have room beside each other on a logarithmic axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value >= kept[-1] * max(1.3, (values[-1] / values[0]) ** 0.12):
            kept.append(value)
    return kept
