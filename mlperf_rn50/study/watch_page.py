"""A run that goes on, as an HTML page beside it that loads itself again until the run is over; no network."""
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.files import write_atomically
from mlperf_rn50.study.live import Evaluation, LiveRun, RankTime
from mlperf_rn50.study.page import page_template
from mlperf_rn50.study.text import percent, thin
from mlperf_rn50.study.watch_facts import facts_of, heading, level_of, status_word

NAME = 'watch.html'
# As the report's pictures: on a phone, where one is shown 360 CSS px wide, text of 9.5 is larger than 9 of them.
WIDTH, HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 331, 208, 40, 10, 20, 34
_MAX_MARKS, _MAX_BARS, _MAX_ROWS, _BAR = 200, 16, 400, 15


def _ticks(high: float, most: int = 6) -> list[float]:
    """Round values from 0 to at most high."""
    if high <= 0:
        return [0.0]
    size = 10.0 ** math.floor(math.log10(high / most))
    step = next(s * size for s in (1, 2, 5, 10, 20) if high / (s * size) <= most)
    return [k * step for k in range(int(high / step + 1e-9) + 1)]


def _plain(value: float) -> str:
    return f'{value:,.0f}' if value >= 1000 else f'{value:g}'


class _Axes:
    """Where values lie in a picture: x and y from 0 to their upper ends."""

    def __init__(self, right: float, top: float):
        self.right, self.top = right or 1.0, top or 1.0

    def x(self, value: float) -> float:
        return round(_LEFT + value / self.right * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / self.top * (HEIGHT - _BOTTOM - _TOP), 1)

    def points(self, pairs: Sequence[tuple[float, float]]) -> str:
        """A line through some values."""
        return ' '.join(f'{self.x(x)},{self.y(y)}' for x, y in pairs)

    def frame(self, x_label: str, y_label: str, factor: float = 1.0) -> dict[str, Any]:
        """The axes as the template draws them; factor: from values to what is written beside the y axis."""
        return {'x_label': x_label, 'y_label': y_label, 'height': HEIGHT, 'bars': [],
                'x_ticks': [(self.x(v), _plain(v)) for v in _ticks(self.right)],
                'y_ticks': [(self.y(v / factor), _plain(v)) for v in _ticks(self.top * factor, 5)]}


def _accuracy(run: LiveRun) -> dict[str, Any] | None:
    """Top-1 against epochs, with the band of the reference runs and the target."""
    band = [(b.epoch, b.low, b.high) for b in run.band if b.low is not None and b.high is not None]
    if not run.evaluations and not band:
        return None
    values = [e.accuracy for e in run.evaluations] + [h for _, _, h in band] + [run.target or 0.0]
    right = max([run.max_epochs or 0] + [e.epoch for e in run.evaluations])
    axes = _Axes(right, min(1.0, (math.floor(10 * max(values)) + 1) / 10))
    inside = [b for b in band if b[0] <= axes.right]
    means = [(b.epoch, b.mean) for b in run.band if b.mean is not None and b.epoch <= axes.right]
    shown = thin(run.evaluations, _MAX_MARKS)
    notes = [f'area and dashes: {run.num_reference} reference runs and their mean'] if inside else []
    return {'id': 'accuracy', 'title': 'Top-1', 'notes': notes,
            **axes.frame('epoch', 'Top-1, %', 100.0),
            'area': axes.points([(e, h) for e, _, h in inside] + [(e, low) for e, low, _ in reversed(inside)]),
            'dashes': axes.points(means), 'line': axes.points([(e.epoch, e.accuracy) for e in shown]),
            'marks': [(axes.x(e.epoch), axes.y(e.accuracy), f'{percent(e.accuracy)} at epoch {e.epoch}')
                      for e in shown],
            'target': None if run.target is None else (axes.y(run.target), f'target {percent(run.target)}')}


def _throughput(run: LiveRun) -> dict[str, Any] | None:
    """Images per second on the run's clock."""
    if len(run.speeds) < 2:
        return None
    unit_s, unit = (3600.0, 'hours') if run.speeds[-1][0] >= 10_000 else (60.0, 'minutes')
    pairs = [(t / unit_s, v) for t, v in thin(run.speeds, _MAX_MARKS)]
    axes = _Axes(max(t for t, _ in pairs), 1.1 * max(v for _, v in pairs))
    return {'id': 'throughput', 'title': 'Throughput', 'notes': ['since each epoch began'],
            **axes.frame(f'{unit} on the clock', 'images/s'), 'area': '', 'dashes': '', 'line': axes.points(pairs),
            'marks': [], 'target': None}


def _ranks(run: LiveRun) -> dict[str, Any] | None:
    """What a step takes the slowest ranks."""
    if len(run.ranks) < 2:
        return None
    slowest = sorted(run.ranks, key=lambda r: (-r.own_s, r.rank))[:_MAX_BARS]
    longest = max(r.own_s + r.wait_s for r in slowest)
    axes = _Axes(1e3 * longest, 1.0)
    notes = ['from the left: waiting for data, computing, exchanging gradients and waiting for other ranks']
    if len(run.ranks) > len(slowest):
        notes.append(f'the {len(slowest)} slowest of {len(run.ranks)}')
    height = _TOP + _BAR * len(slowest) + _BOTTOM
    return {'id': 'ranks', 'title': 'A step of each rank', 'notes': notes, 'height': height, 'x_label': 'milliseconds',
            'y_label': 'rank', 'y_ticks': [], 'x_ticks': [(axes.x(v), _plain(v)) for v in _ticks(axes.right)],
            'bars': [_bar(axes, r, _TOP + _BAR * k) for k, r in enumerate(slowest)]}


def _bar(axes: _Axes, rank: RankTime, y: float) -> dict[str, Any]:
    """The bar of a rank: its parts as place, width and what they are."""
    parts, at, who = [], 0.0, f'rank {rank.rank}{f" on {rank.host}" if rank.host else ""}'
    for name, seconds in (('data', rank.data_s), ('compute', rank.compute_s), ('wait', rank.wait_s)):
        parts.append((name, axes.x(at), round(axes.x(at + 1e3 * seconds) - axes.x(at), 1),
                      f'{who}: {name} {1e3 * seconds:.1f} ms a step'))
        at += 1e3 * seconds
    return {'y': y, 'height': _BAR - 4, 'label': str(rank.rank), 'parts': parts}


def _rows(run: LiveRun) -> list[dict[str, str]]:
    """The evaluations, the newest first, each beside what the reference runs had there."""
    band = {b.epoch: b for b in run.band}

    def row(e: Evaluation) -> dict[str, str]:
        b = band.get(e.epoch)
        has_ends = b is not None and b.low is not None and b.high is not None
        return {'epoch': str(e.epoch), 'accuracy': percent(e.accuracy),
                'mean': percent(b.mean) if b and b.mean is not None else '-',
                'band': f'{100 * b.low:.2f} to {100 * b.high:.2f}' if has_ends else '-',  # type: ignore[union-attr, operator]
                'time': '-' if e.time_s is None else f'{e.time_s / 60:.1f}'}
    return [row(e) for e in reversed(run.evaluations[-_MAX_ROWS:])]


def render_page(run: LiveRun, written: datetime, every_s: float, price: float | None = None) -> str:
    """The page of a run.

    Args:
        written: when, for its foot.
        every_s: after which it loads itself again while the run is not over.
    """
    figures = [f for f in (_accuracy(run), _throughput(run), _ranks(run)) if f]
    return page_template('watch_page.html').render(
        title=heading(run), word=status_word(run), level=level_of(run), facts=facts_of(run, price),
        warnings=run.warnings, figures=figures, rows=_rows(run), width=WIDTH, has_band=bool(run.band),
        reload_s=None if run.is_over else max(1, math.ceil(every_s)), written=f'{written:%Y-%m-%d %H:%M:%S} UTC',
        version=mlperf_rn50.__version__)


def dump_page(run: LiveRun, folder: Path, every_s: float, price: float | None = None) -> None:
    """Writes watch.html into a run's folder; nothing where there is no such folder yet.

    Raises:
        OSError: it cannot be written.
    """
    if folder.is_dir():
        write_atomically(folder / NAME, render_page(run, datetime.now(timezone.utc), every_s, price) + '\n')
