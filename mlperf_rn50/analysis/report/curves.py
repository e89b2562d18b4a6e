"""Plots of accuracy, learning rate and telemetry over time or epochs."""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from math import isnan, nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mlperf_rn50.analysis.report.headings import study_heading
from mlperf_rn50.analysis.report.scene import (
    MAX_NAME,
    Scene,
    SystemStyle,
    by_mark,
    explain_colours,
    explain_marks,
)
from mlperf_rn50.analysis.show.figure import (
    GRID,
    INK,
    WIDTH_IN,
    Plot,
    differ_tenfold,
    key,
    legend,
    scale_up,
)
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.sidecar.metrics import read_learning_rates
from mlperf_rn50.mllog.sidecar.node_telemetry import NodeTelemetry, read_telemetry
from mlperf_rn50.runfolder.names import find_telemetry
from mlperf_rn50.text import data_name, percent, printable, short, thin

# styles of telemetry.KINDS
_DEVICES = (('#a0764a', '-', 2.4), (INK, ':', 1.2), ('#5f8299', '-', 2.4), (INK, '--', 1))
_MINUTES = 'minutes since run_start'
_MAX_CURVES, _MAX_MARKS = 60, 1000  # maximum per plot
_MAX_POINTS = 200  # maximum learning rates per curve, and epochs marked in a telemetry plot
# maximum plots, nodes per plot, samples per node
_MAX_TELEMETRY, _MAX_NODES, _MAX_SAMPLES = 6, 8, 1000
_Points = Sequence[tuple[float, float, str]]  # (x, y, tooltip text)


def _draw_system(
    plot: Plot,
    axes: Axes,
    shown: SystemStyle,
    curves: Sequence[tuple[Run, _Points]],
    has_all_marks: bool,
) -> None:
    """Draw a system's curves, one artist per status, with marks at all points or only at each
    curve's last point."""
    for mark, places in by_mark([run for run, _ in curves]).items():
        groups = [curves[k][1] for k in places]
        rows = [row for points in groups for row in (*points, (nan, nan, ''))]  # NaN ends a curve
        ends = [stop - 2 for stop in accumulate(len(points) + 1 for points in groups)]
        (line,) = axes.plot(
            [x for x, _, _ in rows],
            [y for _, y, _ in rows],
            color=shown.colour,
            linewidth=0.8,
            marker=mark,
            markersize=3,
            markevery=None if has_all_marks else ends,
        )
        plot.tip(
            line,
            *(text for k in places for _, _, text in curves[k][1][0 if has_all_marks else -1 :]),
        )


def _draw_target(scene: Scene, axes: Axes) -> list[Line2D]:
    """Label the accuracy axis. Draw the target, if there is one, and return its line."""
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_ylabel(
        f'Top-1, {short(printable(data_name(scene.study.baseline.other_dataset)), MAX_NAME)}'
    )
    target = scene.study.baseline.target_accuracy
    if target is None:
        return []
    return [
        axes.axhline(
            target, color=INK, linewidth=1, linestyle=':', label=f'target {100 * target:.4g} %'
        )
    ]


def _draw_curves(
    scene: Scene,
    plot: Plot,
    axes: Axes,
    points_of: Callable[[Run], _Points],
    x_name: str,
    lines: Sequence[Line2D] = (),
) -> Sequence[tuple[Run, _Points]]:
    """Draw a curve per run, and a legend that includes the given lines. Return all curves that have
    points."""
    run_sets = [
        [
            (r, [(x, y, f'{s.run_name(r)}: {text}') for x, y, text in points])
            for r in runs
            if (points := points_of(r))
        ]
        for s, runs in zip(scene.shown, scene.sample_runs(plot, _MAX_CURVES))
    ]
    whole = [c for group in run_sets for c in group]
    is_log = x_name == _MINUTES and differ_tenfold([points[-1][0] for _, points in whole])
    if is_log:  # 0 has no logarithm
        run_sets = [
            [(run, later) for run, points in group if (later := [p for p in points if p[0] > 0])]
            for group in run_sets
        ]
    drawn = [c for group in run_sets for c in group]
    has_all_marks = sum(len(points) for _, points in drawn) <= _MAX_MARKS
    if not has_all_marks:
        plot.notes.append('Only the last point of each curve is marked')
    for shown, group in zip(scene.shown, run_sets):
        _draw_system(plot, axes, shown, curves=group, has_all_marks=has_all_marks)
    legend(
        plot,
        [
            *explain_colours([s for s, group in zip(scene.shown, run_sets) if group]),
            *lines,
            *explain_marks([run for run, _ in drawn]),
        ],
    )
    if is_log:
        scale_up(axes.xaxis, x_name, [points[i][0] for _, points in drawn for i in (0, -1)])
    else:
        axes.set_xlabel(x_name)
    return whole


def _accuracies_at_minutes(run: Run) -> _Points:
    """Return a point per evaluation, or no points if times are missing because run_start was not
    logged."""
    points = [
        (
            e.time_s / 60,
            e.accuracy,
            f'{percent(e.accuracy)} after {e.time_s / 60:.2f} min, {e.epoch} epochs',
        )
        for e in run.evaluations
        if e.time_s is not None
    ]
    return points if len(points) == len(run.evaluations) else []


def _accuracies_at_epochs(run: Run) -> _Points:
    return [
        (
            e.epoch,
            e.accuracy,
            f'{percent(e.accuracy)} after {e.epoch} epochs'
            + (f', {e.time_s / 60:.2f} min' if e.time_s is not None else ''),
        )
        for e in run.evaluations
    ]


def _learning_rates(run: Run) -> _Points:
    rates = read_learning_rates(run)
    if len(rates) < 2:
        return []
    return [
        (t / 60, lr, f'learning rate {lr:.4g} after {t / 60:.2f} min')
        for t, lr in thin(rates, _MAX_POINTS)
    ]


def draw_accuracy(scene: Scene, is_over_time: bool) -> Plot | None:
    """Draw the accuracy over time, or over epochs."""
    name = 'time' if is_over_time else 'epochs'
    plot, axes = scene.plot(f'accuracy_{name}', f'Accuracy against {name}', 3.4)
    target = _draw_target(scene, axes)
    if is_over_time:
        curves = _draw_curves(scene, plot, axes, _accuracies_at_minutes, _MINUTES, target)
    else:
        curves = _draw_curves(scene, plot, axes, _accuracies_at_epochs, name, target)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return plot if curves else None


def draw_learning_rate(scene: Scene) -> Plot | None:
    """Draw the learning rate over time. Return None if it was not logged."""
    plot, axes = scene.plot('learning_rate', 'Applied learning rate', 3.0)
    curves = _draw_curves(scene, plot, axes, points_of=_learning_rates, x_name=_MINUTES)
    peaks = [max(y for _, y, _ in points) for _, points in curves]
    if differ_tenfold(peaks):
        scale_up(axes.yaxis, 'learning rate', peaks)
        axes.set_ylim(bottom=min(peaks) / 30)
    else:
        axes.set_ylabel('learning rate')
    return plot if peaks else None


def _draw_node(plot: Plot, axes: Axes, run: Run, node: NodeTelemetry) -> None:
    """Draw a node's disk and network rates during a run, and mark its epochs and evaluations."""
    times = thin(node.times_s, _MAX_SAMPLES)
    for (colour, style, width), (label, rates) in zip(_DEVICES, node.rates.items()):
        if known := [r for r in rates if not isnan(r)]:
            (line,) = axes.plot(
                times,
                [r / 1e6 for r in thin(rates, _MAX_SAMPLES)],
                style,
                color=colour,
                linewidth=width,
            )
            plot.tip(
                line,
                f'{short(printable(node.host), MAX_NAME)}: {label}, at most '
                f'{max(known) / 1e6:,.1f} MB/s',
            )
    if len(run.segments) <= _MAX_POINTS:
        axes.vlines(
            [s.start_s for s in run.segments],
            0,
            1,
            colors=GRID,
            linestyles=(0, (1, 2)),
            linewidth=0.8,
            transform=axes.get_xaxis_transform(),
        )
    for e in run.evaluations:
        if e.start_s is not None and e.stop_s is not None:
            axes.axvspan(e.start_s, e.stop_s, color=GRID, alpha=0.35, linewidth=0)
    axes.set(title=short(printable(node.host), MAX_NAME), ylabel='MB/s')
    axes.set_ylim(bottom=0)


def draw_telemetry(scene: Scene, shown: SystemStyle) -> Plot | None:
    """Draw disk and network rates of the first run with telemetry, one panel per node. Return None
    if there is none."""
    files = find_telemetry(shown.run_set.folder)
    runs = shown.run_set.runs if files else ()
    run, nodes = next(((r, nodes) for r in runs if (nodes := read_telemetry(r, files))), (None, []))
    if run is None:
        return None
    drawn = nodes[:_MAX_NODES]
    figure = Figure(figsize=(WIDTH_IN, 1.2 + 1.7 * len(drawn)))
    plot = Plot(
        f'telemetry_{shown.place}',
        f'Disk and network of every node, {shown.run_name(run)}',
        study_heading(scene.study),
        figure,
    )
    if len(drawn) < len(nodes):
        plot.notes.append(f'The first {len(drawn)} of {len(nodes)} nodes are drawn')
    panels = figure.subplots(len(drawn), 1, squeeze=False, sharex=True)[:, 0]
    for axes, node in zip(panels, drawn):
        _draw_node(plot, axes, run, node)
    panels[-1].set_xlabel('seconds since run_start')
    legend(
        plot,
        [
            *(
                key(label, color=colour, linestyle=style, linewidth=width)
                for (colour, style, width), label in zip(_DEVICES, drawn[0].rates)
            ),
            key('start of an epoch', color=GRID, linestyle=(0, (1, 2))),
            Patch(color=GRID, alpha=0.35, linewidth=0, label='evaluation'),
        ],
    )
    return plot


def draw_all_telemetry(scene: Scene) -> list[Plot]:
    """Draw the telemetry of the first _MAX_TELEMETRY systems that have any."""
    drawn = list(
        islice(
            filter(None, (draw_telemetry(scene, shown) for shown in scene.shown)), _MAX_TELEMETRY
        )
    )
    if len(drawn) == _MAX_TELEMETRY:
        drawn[-1].notes.append(f'This plot is drawn for at most {_MAX_TELEMETRY} systems')
    return drawn
