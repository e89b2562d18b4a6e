"""Render a live run as a self-contained HTML page, which reloads itself until the run is over."""

import math
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import matplotlib
from matplotlib.ticker import PercentFormatter

import mlperf_rn50
from mlperf_rn50.analysis.show.figure import (
    COLOURS,
    GRID,
    INK,
    STYLE,
    Plot,
    make_plot,
)
from mlperf_rn50.analysis.show.page import render_html
from mlperf_rn50.analysis.watch.run_facts import answer_of
from mlperf_rn50.analysis.watch.run_state import LiveRun
from mlperf_rn50.files import read_bytes, refuse_existing, write_atomically
from mlperf_rn50.text import percent, thin

NAME = 'watch.html'
_MARK = b' - mlperf-rn50 watch</title>'  # in show/page.html
_MAX_MARKS, _MAX_BARS, _BAR_IN, _HEIGHT_IN = 200, 16, 0.21, 2.9
# phases of a step and colours of their bars
_PARTS = (('data', '#a67c00'), ('compute', COLOURS[0]), ('wait', GRID))


def _draw_accuracy(run: LiveRun) -> Plot | None:
    """Draw Top-1 with the reference band and the target."""
    right = max([run.max_epochs or 0] + [e.epoch for e in run.evaluations]) or 1
    points = [b for b in run.band if b.epoch <= right]
    band = [(b.epoch, b.low, b.high) for b in points if b.low is not None and b.high is not None]
    if not run.evaluations and not band:
        return None
    notes = []
    if band:
        notes = [
            f'shaded area: band of {run.num_reference} reference runs; dashed line: their mean'
        ]
    plot, axes = make_plot('accuracy', 'Top-1', '', _HEIGHT_IN, notes)
    if band:
        axes.fill_between(*zip(*band), color=GRID, alpha=0.3, linewidth=0)  # type: ignore[arg-type]
    if means := [(b.epoch, b.mean) for b in points if b.mean is not None]:
        axes.plot(*zip(*means), '--', color=GRID, linewidth=1.2)
    shown = thin(run.evaluations, _MAX_MARKS)
    (line,) = axes.plot(
        [e.epoch for e in shown],
        [e.accuracy for e in shown],
        color=COLOURS[0],
        linewidth=1.6,
        marker='o',
        markersize=4,
    )
    plot.tip(line, *(f'{percent(e.accuracy)} at epoch {e.epoch}' for e in shown))
    if run.target is not None:
        axes.axhline(run.target, color=INK, linewidth=1, linestyle=':')
        text = f'target {percent(run.target)}'
        axes.annotate(text, (0, run.target), (4, 3), textcoords='offset points')
    highest = max(
        run.target or 0.0, *(e.accuracy for e in run.evaluations), *(high for *_, high in band)
    )
    top = min(1.0, (math.floor(10 * highest) + 1) / 10)
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set(xlabel='epoch', xlim=(0, right), ylim=(0, top))
    return plot


def _draw_throughput(run: LiveRun) -> Plot | None:
    if len(run.speeds) < 2:
        return None
    unit_s, unit = 60.0, 'minutes'
    if run.speeds[-1][0] >= 10_000:
        unit_s, unit = 3600.0, 'hours'
    notes = ['each value is the average since the start of its epoch']
    plot, axes = make_plot('throughput', 'Throughput', '', _HEIGHT_IN, notes)
    times_s, speeds = zip(*thin(run.speeds, _MAX_MARKS))
    axes.plot([time_s / unit_s for time_s in times_s], speeds, color=COLOURS[0], linewidth=1.6)
    axes.set(xlabel=f'time since the start, {unit}', ylabel='images/s')
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * max(speeds) or 1.0)
    return plot


def _draw_ranks(run: LiveRun) -> Plot | None:
    """Draw the time that the slowest ranks take for each phase of a step."""
    if len(run.ranks) < 2:
        return None
    slowest = sorted(run.ranks, key=lambda r: (-r.own_s, r.rank))[:_MAX_BARS]
    notes = [
        'from left to right: waiting for data; computing; exchanging gradients, including waits '
        'for other ranks'
    ]
    if len(run.ranks) > len(slowest):
        notes.append(f'the {len(slowest)} slowest of {len(run.ranks)} ranks')
    height_in = 0.8 + _BAR_IN * len(slowest)
    plot, axes = make_plot('ranks', 'Step time by rank', '', height_in, notes)
    for row, rank in enumerate(slowest):
        left, host = 0.0, f' on {rank.host}' if rank.host else ''
        for part, colour in _PARTS:
            part_ms = 1e3 * getattr(rank, f'{part}_s')
            bar = axes.barh(row, part_ms, 0.75, left, color=colour)[0]
            plot.tip(bar, f'rank {rank.rank}{host}: {part} {part_ms:.1f} ms per step')
            left += part_ms
    axes.set_yticks(range(len(slowest)), [str(r.rank) for r in slowest])
    axes.set(xlabel='milliseconds', ylabel='rank', ylim=(len(slowest) - 0.5, -0.5))
    return plot


def _draw_all(run: LiveRun) -> list[Plot]:
    with matplotlib.rc_context(STYLE):
        drawn = [draw(run) for draw in (_draw_accuracy, _draw_throughput, _draw_ranks)]
    return [plot for plot in drawn if plot]


def render_page(run: LiveRun, written: datetime, every_s: float, price: float | None = None) -> str:
    reload_s = None if run.is_over else max(1, math.ceil(every_s))
    rest = 'The run is over and this page is final.'
    if reload_s:
        rest = (
            f'The page reloads every {reload_s} s and is updated while mlperf-rn50 watch --html '
            'runs.'
        )
    when = f'Written {written:%Y-%m-%d %H:%M:%S} UTC by mlperf-rn50 {mlperf_rn50.__version__}.'
    return render_html(
        replace(answer_of(run, price), figures=lambda: _draw_all(run)),
        command='watch',
        footer=f'{when} {rest}',
        reload_s=reload_s,
    )


def dump_page(run: LiveRun, folder: Path, every_s: float, price: float | None = None) -> None:
    """Write watch.html into a run folder if this folder exists.

    Raise OSError on failure, and ConfigError if there is another file of this name.
    """
    path = folder / NAME
    if folder.is_dir():
        if path.is_symlink() or not path.is_file() or _MARK not in read_bytes(path):
            refuse_existing([path], '--html')
        write_atomically(path, render_page(run, datetime.now(timezone.utc), every_s, price) + '\n')
