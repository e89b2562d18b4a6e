"""A plot with a tooltip for each mark, written as SVG for pages and as PNG for documents."""

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from mlperf_rn50.files import write_atomically
from mlperf_rn50.text import printable

# Based on Matplotlib's own values, because a matplotlibrc of the user or of the current folder may
# set any other.
_RC = matplotlib.rc_params_from_file(Path(__file__).with_name('figure.mplstyle'))
STYLE = {name: value for name, value in _RC.items() if name != 'backend'}
# Pages replace INK by their text colour. GRID is also used for ideal lines.
INK, GRID = STYLE['text.color'], STYLE['grid.color']
# Palette by Okabe and Ito for the colour-blind, adapted to a contrast of 3:1. All further systems
# use INK.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#c4649b', '#a67c00', '#7a6fd0')
WIDTH_IN = 4.6  # keeps text larger than 9 CSS px on a phone, where plots are 360 px wide
# text above a plot: inches per line, characters per inch, maximum lines
_LINE_IN, _PER_IN, _MAX_LINES = 0.17, 12.7, 8


@dataclass
class Plot:
    """A plot. Its files include heading and caption. On a page, it has only the caption."""

    name: str
    title: str
    heading: str
    figure: Figure
    notes: list[str] = field(default_factory=list)  # explanations and omissions
    # by id of the SVG group: one per mark or one for all
    tips: dict[str, Sequence[str]] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        return '. '.join([self.title, *self.notes])

    def tip(self, artist, *texts: str) -> None:
        """Set the tooltips of an artist's marks."""
        gid = f'tip{len(self.tips)}'
        artist.set_gid(gid)
        self.tips[gid] = texts

    @property
    def above(self) -> list[str]:
        return [
            line
            for text in (self.heading, self.caption)
            for line in textwrap.wrap(printable(text), int(_PER_IN * self.figure.get_figwidth()))
        ][:_MAX_LINES]

    @property
    def above_in(self) -> float:
        """Height of the text above the plot, in inches."""
        return _LINE_IN * (len(self.above) + 0.5)

    @cached_property
    def svg(self) -> str:
        """Reproducible SVG with tooltips."""
        out = io.StringIO()
        width, height = self.figure.get_size_inches()
        whole = height + self.above_in
        with matplotlib.rc_context({**STYLE, 'svg.hashsalt': self.name}):
            self.figure.set_size_inches(width, whole)
            self.figure.set_layout_engine('constrained', rect=(0, 0, 1, height / whole))
            self.figure.text(
                0.02, 1 - 0.3 * _LINE_IN / whole, '\n'.join(self.above), va='top', gid='title'
            )
            self.figure.patch.set_gid('paper')
            self.figure.savefig(out, format='svg', metadata={'Date': None, 'Creator': None})
        self.figure.set_layout_engine('none')  # keep this layout
        text = re.sub(r'<metadata>.*?</metadata>', '', out.getvalue(), flags=re.DOTALL)
        # Each part except the first begins with a group id.
        return '<g id="'.join(_add_titles(part, self.tips) for part in text.split('<g id="'))


def make_plot(
    name: str, title: str, heading: str, height_in: float, notes: Sequence[str] = ()
) -> tuple[Plot, Axes]:
    """Return a plot with one pair of axes."""
    figure = Figure(figsize=(WIDTH_IN, height_in))
    return Plot(name, title, heading, figure, notes=list(notes)), figure.add_subplot()


def _add_titles(part: str, tips: dict[str, Sequence[str]]) -> str:
    """Add a title to each mark of a group. If the numbers of marks and titles differ, add one title
    to the group."""
    gid, quote, rest = part.partition('"')
    if gid not in tips:
        return part
    titles = [f'<title>{escape(printable(t))}</title>' for t in tips[gid]]
    if rest.count('<use ') == len(titles):
        ordered = iter(titles)
        return (
            gid
            + quote
            + re.sub(r'<use ([^>]*)/>', lambda m: f'<use {m[1]}>{next(ordered)}</use>', rest)
        )
    return f'{gid}{quote}{rest[0]}{titles[0]}{rest[1:]}'


def render_svg(plot: Plot) -> str:
    """Return the SVG for a page, without heading, caption and background."""
    # neither group contains another one
    svg = re.sub(r'<g id="(?:title|paper)">.*?</g>', '', plot.svg, flags=re.DOTALL)
    top = plot.above_in * 72
    svg = svg.replace(
        '<g id="figure_1">', f'<g id="figure_1" transform="translate(0 {-top:g})">', 1
    )
    return re.sub(
        r'viewBox="0 0 ([\d.]+) ([\d.]+)"',
        lambda m: f'viewBox="0 0 {m[1]} {float(m[2]) - top:g}"',
        svg,
        count=1,
    )


def figure_of(plot: Plot, prefix: str) -> dict[str, Any]:
    """Return a plot for a page's template, with prefixed ids and the page's colours."""
    svg = render_svg(plot)
    svg = svg[svg.index('<svg') :]
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf'\g<1>{prefix}', svg)
    svg = (
        svg.replace(INK, 'currentColor')
        .replace(GRID, 'var(--grid)')
        .replace('#ffffff', 'var(--paper)')
    )
    svg = re.sub(
        r'<svg [^>]*(viewBox="[^"]*")[^>]*>',
        rf'<svg \1 role="img" aria-labelledby="{prefix}title" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
        count=1,
    )
    return {'id': prefix, 'title': plot.title, 'notes': plot.notes, 'svg': svg}


def file_stem(*names: str) -> str:
    """Return the names as a file name without suffix, in which all unusual characters are
    replaced."""
    return re.sub(r'[^\w.+-]+', '_', '_'.join(names), flags=re.ASCII).strip('._-')[:100] or 'plot'


def dump_plot(plot: Plot, folder: Path, stem: str) -> None:
    png = io.BytesIO()
    # before the PNG, as the SVG sets the layout
    write_atomically(folder / f'{stem}.svg', plot.svg)
    with matplotlib.rc_context(STYLE):
        plot.figure.savefig(png, format='png', dpi=150, metadata={'Software': None})
    write_atomically(folder / f'{stem}.png', png.getvalue())
    plot.figure.clear()  # free the memory


def differ_tenfold(values: Sequence[float]) -> bool:
    """Return whether all values are above 0 and the largest is at least ten times the smallest."""
    return bool(values) and min(values) > 0 and max(values) >= 10 * min(values)


def plain(value: float, _: float = 0) -> str:
    for size, letter in ((1e6, ' M'), (1e3, ' k')):
        if abs(value) >= max(size, 1e4):
            return f'{value / size:,.10g}{letter}'
    return f'{value:,.10g}'


def scale_up(axis: Axis, name: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with plain tick labels and a name."""
    if axis is axis.axes.xaxis:
        axis.axes.set_xscale('log')
    else:
        axis.axes.set_yscale('log')
    axis.set_major_locator(LogLocator(10, (1,) if max(values) > 500 * min(values) else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(plain)
    axis.set_label_text(f'{name} (logarithmic)')


def legend(plot: Plot, handles: Sequence[Line2D | Patch]) -> None:
    if not handles:
        return
    width, height = plot.figure.get_size_inches()
    longest = max(len(str(h.get_label())) for h in handles)
    num_columns = max(1, min(len(handles), int(_PER_IN * width) // (longest + 7)))
    plot.figure.set_size_inches(width, height + 0.1 + 0.19 * -(-len(handles) // num_columns))
    plot.figure.legend(
        handles=handles,
        loc='outside lower center',
        ncols=num_columns,
        columnspacing=1.2,
        handlelength=1.8,
    )


def key(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend, with the properties of a line."""
    return Line2D([], [], label=label, **style)


def mark_of(marker: str, label: str, size: float = 4.5, width: float = 1.0) -> Line2D:
    return key(
        label,
        color=INK,
        marker=marker,
        markersize=size,
        markeredgewidth=width,
        linestyle='',
    )


def ticks(values: Sequence[int]) -> list[int]:
    """Choose from increasing numbers those whose labels do not overlap on a logarithmic axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value >= kept[-1] * max(1.3, (values[-1] / values[0]) ** 0.12):
            kept.append(value)
    return kept
