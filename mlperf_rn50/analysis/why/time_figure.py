"""Plot of where the time of a run goes: traced steps of its ranks above the whole run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.show import figure as drawing
from mlperf_rn50.analysis.why.bottleneck import INPUT, OUTSIDE, times_of
from mlperf_rn50.analysis.why.time_answer import bottleneck_sentence
from mlperf_rn50.analysis.why.trace import HOW_TO_TRACE, PHASES, Steps, host_names, read_traces
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.records import RanksRecord
from mlperf_rn50.text import duration, grouped, percent, plural, thin

# ranks; steps of a rank; share of the run of a part with a label
_MAX_ROWS, _MAX_STEPS, _MIN_LABELLED = 16, 8, 0.05
# Style of the blocks of each part. Those outside steps have only hatches, which light and dark
# pages show.
_LOOKS = {
    name: {
        'facecolor': face,
        'hatch': hatch,
        'edgecolor': drawing.INK if hatch else drawing.GRID,
        'linewidth': 0.3,
    }
    for name, face, hatch in (
        *((name, drawing.COLOURS[k], '') for name, k in zip(PHASES, (5, 0, 2, 1, 3, 4))),
        ('evaluation', 'none', '////'),
        ('checkpoints', 'none', 'xxxx'),
        ('rest', 'none', ''),
    )
}


def bar_of(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part of the bar, given Times.parts; the three parts of input are
    one."""
    names = (
        ('python',),
        INPUT,
        ('compute',),
        (),
        ('exchange',),
        ('update',),
        *((name,) for name in OUTSIDE),
    )
    return {shown: sum(parts[name] for name in own) for shown, own in zip(_LOOKS, names)}


def choose_ranks(steps: Steps) -> Sequence[int]:
    """Return at most 16 ranks from the fastest to the slowest, by their mean time outside
    exchanges."""
    return thin(
        sorted(steps, key=lambda rank: fmean(t[3] - t[0] + t[6] - t[5] for _, t, _ in steps[rank])),
        _MAX_ROWS,
    )


def _draw_steps(plot: drawing.Plot, axes: Axes, steps: Steps, hosts: dict[int, str]) -> None:
    """Draw the last steps of a choice of ranks: a row of phases, and below it the exchanges of
    buckets."""
    ranks = choose_ranks(steps)
    first = max(steps[rank][-1].step for rank in ranks) - _MAX_STEPS + 1
    drawn = {rank: [s for s in steps[rank] if s.step >= first] for rank in sorted(ranks)}
    zero = min(s.times[0] for spans in drawn.values() for s in spans)
    ends = {ranks[0]: ', fastest', ranks[-1]: ', slowest'} if len(ranks) > 1 else {}
    labels = []
    for row, (rank, spans) in enumerate(drawn.items()):
        label = f'rank {rank}, {hosts.get(rank, "unknown host")}{ends.get(rank, "")}'
        labels.append(label)
        phases = [b for s in spans for b in zip(PHASES, pairwise(s.times))]
        exchanges = [b for s in spans for t in s.buckets for b in zip(PHASES[3:5], pairwise(t))]
        for place, blocks in (((row - 0.45, 0.5), phases), ((row + 0.1, 0.25), exchanges)):
            for name, own in grouped(blocks, lambda block: block[0]).items():
                bars = [(1e3 * (start - zero), 1e3 * (end - start)) for _, (start, end) in own]
                mean_ms = sum(ms for _, ms in bars) / len(spans)
                artist = axes.broken_barh(bars, place, **_LOOKS[name])
                plot.tip(artist, f'{label}: {name} {mean_ms:,.2f} ms per step')
    axes.set_yticks(range(len(labels)), labels)
    axes.set(
        ylim=(len(labels) - 0.5, -0.6), xlabel=f'ms since the start of step {first}', xmargin=0
    )
    axes.grid(axis='y', visible=False)


def _draw_run(plot: drawing.Plot, axes: Axes, bar: Mapping[str, float]) -> None:
    """Draw the parts of the whole run as one bar."""
    total_s = sum(bar.values()) or 1.0
    left = 0.0
    for name, part_s in bar.items():
        share = part_s / total_s
        block = [(100 * left, 100 * share)]
        artist = axes.broken_barh(block, (-0.4, 0.8), label=name, **_LOOKS[name])
        plot.tip(artist, f'{name}: {part_s:,.1f} s, {percent(share)}')
        if share >= _MIN_LABELLED:
            middle = 100 * (left + share / 2)
            axes.text(middle, 0, percent(share, '.0f'), ha='center', va='center')
        left += share
    axes.set(xlim=(0, 100), yticks=[], xlabel=f'% of {duration(total_s)} since the start')
    drawing.legend(plot, axes.collections)  # type: ignore[arg-type]


def draw_times(
    run: RunFolder, records: Sequence[RanksRecord], bar: Mapping[str, float], sentence: str
) -> drawing.Plot:
    """Draw the traced steps, if any, and the whole run. The sentence states what limits the run."""
    steps, error_s, note = read_traces(run)
    num_rows = min(len(steps), _MAX_ROWS)
    above = f'No steps are traced; {HOW_TO_TRACE}'
    heights = [0.5]
    if steps:
        above = (
            f'Above, {num_rows} of {plural(len(steps), "traced rank")}, clocks aligned within '
            f'{1e3 * error_s:.2f} ms, with the buckets of gradients under each{note}'
        )
        heights = [0.36 * num_rows + 0.4, 0.5]
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(8.5, 0.4 + sum(heights)))  # 1,275 pixels wide as PNG
        axes = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        plot = drawing.Plot(
            name='why',
            title=sentence.rstrip('.'),
            heading=f'{run.dir.name}/{run.result.name}',
            figure=figure,
            notes=[above, 'Below, the whole run along its critical path'],
        )
        if steps:
            _draw_steps(plot, axes[0], steps, host_names(records))
        _draw_run(plot, axes[-1], bar)
    return plot


def plot_of(run: RunData) -> drawing.Plot:
    bar = bar_of(times_of(run).parts)
    return draw_times(run.folder, run.all(RanksRecord), bar, bottleneck_sentence(run))
