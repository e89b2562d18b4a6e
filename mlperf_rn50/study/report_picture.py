"""One drawing and what each of its points says when it is pointed at; as SVG for a page, as PNG for a document."""
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mlperf_rn50.mlperf.events import printable

INK, GRID = '#1b1e23', '#c9ced6'  # text and lines; a page in the dark has its own
STYLE = {'svg.fonttype': 'none', 'font.family': 'sans-serif', 'font.size': 9, 'text.color': INK,
          'axes.edgecolor': GRID, 'axes.labelcolor': INK,
          'xtick.color': INK, 'ytick.color': INK, 'axes.grid': True, 'grid.color': GRID,
          'grid.linewidth': 0.5, 'axes.axisbelow': True, 'axes.spines.top': False, 'axes.spines.right': False,
          'legend.frameon': False, 'figure.facecolor': 'none', 'axes.facecolor': 'none', 'axes.titlesize': 10,
          'text.parse_math': False}  # what a log says is no formula


@dataclass
class Picture:
    """A drawing.

    Args:
        name: of its files.
        title: what it shows.
        figure: the drawing.
        tips: by the id of a group of the SVG, what its points (or the whole of it) say.
    """

    name: str
    title: str
    figure: Figure
    tips: dict[str, Sequence[str]] = field(default_factory=dict)

    def tip(self, artist, *texts: str) -> None:
        """What the points of an artist say."""
        gid = f'tip{len(self.tips)}'
        artist.set_gid(gid)
        self.tips[gid] = texts


def render_svg(picture: Picture) -> str:
    """A picture as SVG, the same every time; its points have titles."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, 'svg.hashsalt': picture.name}):
        picture.figure.savefig(out, format='svg', metadata={'Date': None, 'Creator': None})
    picture.figure.set_layout_engine('none')  # it is laid out now
    text = re.sub(r'<metadata>.*?</metadata>', '', out.getvalue(), flags=re.DOTALL)
    for gid, texts in picture.tips.items():
        text = _add_titles(text, gid, texts)
    return text


def _add_titles(svg: str, gid: str, texts: Sequence[str]) -> str:
    """Gives the marks of a group their titles, one each, or the whole group the first."""
    start = svg.index(f'<g id="{gid}">')
    end = svg.find('<g id="', start + 1)
    group = svg[start:end if end >= 0 else None]
    marks = re.findall(r'<use [^>]*/>', group)
    titles = iter([f'<title>{escape(printable(t))}</title>' for t in texts])
    if len(marks) == len(texts):
        new = re.sub(r'<use ([^>]*)/>', lambda m: f'<use {m[1]}>{next(titles)}</use>', group)
    else:
        new = group.replace(f'<g id="{gid}">', f'<g id="{gid}">{next(titles)}', 1)
    return svg[:start] + new + svg[start + len(group):]


def dump_picture(picture: Picture, folder: Path, prefix: str) -> None:
    """Writes a picture as SVG and PNG."""
    (folder / f'{prefix}{picture.name}.svg').write_text(render_svg(picture))
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(folder / f'{prefix}{picture.name}.png', dpi=150, facecolor='white',
                               metadata={'Software': None})
