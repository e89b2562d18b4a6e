"""Plot of where the time of a run goes: traced steps of its ranks above the whole run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlperf_rn50.analysis.show import figure as drawing
from mlperf_rn50.analysis.why.limit import INPUT, OUTSIDE, times_of
from mlperf_rn50.analysis.why.load import WhyRun
from mlperf_rn50.analysis.why.text import explain_time
from mlperf_rn50.analysis.why.trace import HOW_TO_TRACE, PHASES, Steps, host_names, read_traces
from mlperf_rn50.runfolder.names import RunFolder
from mlperf_rn50.runfolder.outputs import new_files
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


def _draw_steps(picture: drawing.Plot, axes: Axes, steps: Steps, hosts: dict[int, str]) -> None:
    """Draw the last steps of a choice of ranks: a row of phases, and below it the exchanges of
    buckets."""
    ranks = choose_ranks(steps)
    first = max(steps[rank][-1].step for rank in ranks) - _MAX_STEPS + 1
    zero = min(s.times[0] for rank in ranks for s in steps[rank] if s.step >= first)
    ends = {ranks[0]: ', fastest', ranks[-1]: ', slowest'} if len(ranks) > 1 else {}
    labels = {
        rank: f'rank {rank}, {hosts.get(rank, "unknown host")}{ends.get(rank, "")}'
        for rank in sorted(ranks)
    }
    for row, (rank, label) in enumerate(labels.items()):
        drawn = [s for s in steps[rank] if s.step >= first]
        for place, blocks in (
            ((row - 0.45, 0.5), [b for s in drawn for b in zip(PHASES, pairwise(s.times))]),
            (
                (row + 0.1, 0.25),
                [b for s in drawn for t in s.buckets for b in zip(PHASES[3:5], pairwise(t))],
            ),
        ):
            for name, own in grouped(blocks, lambda block: block[0]).items():
                spans = [(1e3 * (start - zero), 1e3 * (end - start)) for _, (start, end) in own]
                picture.tip(
                    axes.broken_barh(spans, place, **_LOOKS[name]),
                    f'{label}: {name} {sum(ms for _, ms in spans) / len(drawn):,.2f} ms per step',
                )
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.set(
        ylim=(len(labels) - 0.5, -0.6), xlabel=f'ms since the start of step {first}', xmargin=0
    )
    axes.grid(axis='y', visible=False)


def draw_times(
    run: RunFolder, records: Sequence[RanksRecord], bar: Mapping[str, float], sentence: str
) -> drawing.Plot:
    """Draw the traced steps, if any, and the whole run. The sentence states what limits the run."""
    steps, error_s, note = read_traces(run)
    rows_in, left, total_s = 0.36 * min(len(steps), _MAX_ROWS) + 0.4, 0.0, sum(bar.values()) or 1.0
    with matplotlib.rc_context(drawing.STYLE):
        figure = Figure(figsize=(8.5, 0.9 + rows_in * bool(steps)))  # 1,275 pixels wide as PNG
        *above, below = figure.subplots(
            1 + bool(steps), height_ratios=[rows_in, 0.5][not steps :], squeeze=False
        )[:, 0]
        picture = drawing.Plot(
            'why',
            sentence.rstrip('.'),
            f'{run.dir.name}/{run.result.name}',
            figure,
            [
                f'Above, {min(len(steps), _MAX_ROWS)} of {plural(len(steps), "traced rank")}, '
                'clocks aligned within '
                f'{1e3 * error_s:.2f} ms, with the buckets of gradients under each{note}'
                if steps
                else f'No steps are traced; {HOW_TO_TRACE}',
                'Below, the whole run along its critical path',
            ],
        )
        for axes in above:
            _draw_steps(picture, axes, steps, host_names(records))
        for name, part_s in bar.items():
            share = part_s / total_s
            picture.tip(
                below.broken_barh(
                    [(100 * left, 100 * share)], (-0.4, 0.8), label=name, **_LOOKS[name]
                ),
                f'{name}: {part_s:,.1f} s, {percent(share)}',
            )
            if share >= _MIN_LABELLED:
                below.text(
                    100 * (left + share / 2), 0, percent(share, '.0f'), ha='center', va='center'
                )
            left += share
        below.set(xlim=(0, 100), yticks=[], xlabel=f'% of {duration(total_s)} since the start')
        drawing.legend(picture, below.collections)
    return picture


def dump_times(run: WhyRun, folder: Path) -> None:
    """Write the picture of a run to a folder. Raise ConfigError as new_files does."""
    bar, sentence = bar_of(times_of(run).parts), explain_time(run).sentence
    with new_files(folder) as place:
        drawing.dump_plot(draw_times(run.folder, run.all(RanksRecord), bar, sentence), place, 'why')
