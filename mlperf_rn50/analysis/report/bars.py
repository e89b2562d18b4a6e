"""Plots that compare systems by one or two values each, mostly as bars."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from mlperf_rn50.analysis.report.headings import labels_of, report_heading, study_heading
from mlperf_rn50.analysis.report.scene import MAX_NAME, Scene, by_mark, explain_marks
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Series, Study
from mlperf_rn50.analysis.show import figure as drawing
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.text import cut_names, plural, printable, short

_PARTS = (
    ('initialisation, before the clock', 'init_s', 'none', '////'),
    ('first epoch', 'first_s', '#4a5f78', ''),
    ('later epochs', 'training_s', '#b4c4d4', ''),
    ('evaluation', 'evaluation_s', '#9c5563', ''),
    ('other', 'other_s', '#e3dcb4', ''),
)
VALUES: tuple[
    tuple[str, str, str, Callable[[RunSet], float | None], Callable[[Run], float | None]], ...
] = (
    (
        'time_to_train',
        'Time to train',
        'minutes',
        lambda s: s.minutes,
        lambda r: None if r.time_to_train_s is None else r.time_to_train_s / 60,
    ),
    (
        'epochs',
        'Epochs to converge',
        'epochs',
        lambda s: s.epochs_mean,
        lambda r: r.evaluations[-1].epoch if r.evaluations else None,
    ),
    ('throughput', 'Training throughput', 'images/s', lambda s: s.images_per_s, lambda r: None),
)
_MAX_RUNS = 240  # maximum number of runs drawn in a plot
_BAR_HEIGHT = 0.5


def draw_values(
    scene: Scene,
    name: str,
    title: str,
    unit: str,
    system_value: Callable[[RunSet], float | None],
    run_value: Callable[[Run], float | None],
) -> drawing.Plot | None:
    """Draw a bar for the value of each system and a point for the value of each run; None if there
    are no values."""
    plot, axes = scene.rows(name, title)
    sampled = scene.sample_runs(plot, _MAX_RUNS)
    sizes = [system_value(s.run_set) for s in scene.shown]
    points = [[(r, v) for r in runs if (v := run_value(r)) is not None] for runs in sampled]
    values = [v for v in (*sizes, *(v for pairs in points for _, v in pairs)) if v is not None]
    if not values:
        return None
    # a bar on a logarithmic axis has no meaningful start; its end is marked
    is_log = drawing.differ_tenfold(values)
    for row, (s, size, pairs) in enumerate(zip(scene.shown, sizes, points)):
        if size is not None:
            if is_log:
                [drawn] = axes.plot(
                    size, row, '|', color=s.colour, markersize=18, markeredgewidth=2.5
                )
            else:
                [drawn] = axes.barh(
                    row, size, _BAR_HEIGHT, facecolor=(s.colour, 0.3), edgecolor=s.colour
                )
            plot.tip(drawn, f'{s.label}: {size:,.2f} {unit}')
        for mark, places in by_mark([r for r, _ in pairs]).items():
            (line,) = axes.plot(
                [pairs[k][1] for k in places],
                [row + 0.38 * ((k + 0.5) / len(pairs) - 0.5) for k in places],
                mark,
                color=s.colour,
                markersize=4.5 if len(pairs) <= 40 else 2.5,
            )
            plot.tip(
                line,
                *(
                    f'{s.run_name(r)}: {v:.2f} {unit}, {r.status}'
                    for r, v in (pairs[k] for k in places)
                ),
            )
    if is_log:
        drawing.scale_up(axes.xaxis, unit, values)
    else:
        axes.set(xlabel=unit, xlim=(0, max(values) * 1.04 or 1.0))
    marks = explain_marks([r for pairs in points for r, _ in pairs])
    drawing.legend(plot, [drawing.mark_of('|', 'system', 12, 2.5), *marks] if is_log else marks)
    return plot


def _label_panel(axes: Axes, nodes: Sequence[int], ylabel: str) -> None:
    axes.set_xscale('log', base=2)
    axes.minorticks_off()
    axes.set_xticks(drawing.ticks(nodes), [f'{n:,}' for n in drawing.ticks(nodes)])
    axes.margins(x=0.1)
    axes.set(xlabel='nodes', ylabel=ylabel)


def _draw_ideal_efficiency(axes: Axes, efficiencies: Sequence[float]) -> None:
    axes.axhline(1, color=drawing.GRID, linestyle='--', linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_ylim(0, 1.1 * max([1.0, *efficiencies]))


def draw_series(scene: Scene, series: Series) -> drawing.Plot:
    """Draw time, efficiency and epochs of a series over its nodes, with the ideal time and
    efficiency."""
    figure = Figure(figsize=(drawing.WIDTH_IN, 4.2))
    panels = figure.subplot_mosaic([['time', 'time'], ['efficiency', 'epochs']])
    time, efficiency, epochs = panels['time'], panels['efficiency'], panels['epochs']
    name = drawing.file_stem(scene.study.name, series.baseline.name)
    plot = drawing.Plot(name, series.title, study_heading(scene.study), figure)
    pairs = [(s, c) for s in series.run_sets if (c := scene.study.comparison_of.get(s))]
    nodes = sorted({s.num_nodes or 0 for s in series.run_sets})
    ideal = [
        (s.num_nodes or 0, s.minutes * c.efficiency) for s, c in pairs if s.minutes and c.efficiency
    ]
    time.plot([n for n, _ in ideal], [m for _, m in ideal], '--', color=drawing.GRID, linewidth=1.2)
    for axes, style, text, values in (
        (time, 'o-', '{:.2f} min', [s.minutes for s, _ in pairs]),
        (efficiency, 's:', 'hardware {:.1%}', [c.hardware_efficiency for _, c in pairs]),
        (efficiency, 'o-', 'efficiency {:.1%}', [c.efficiency for _, c in pairs]),
        (epochs, 'o-', '{:.1f} epochs', [s.epochs_mean for s, _ in pairs]),
    ):
        rows = [(s, value) for (s, _), value in zip(pairs, values) if value is not None]
        [line] = axes.plot(
            [s.num_nodes or 0 for s, _ in rows],
            [value for _, value in rows],
            style,
            color=drawing.INK,
            markersize=5,
            linewidth=1,
            markerfacecolor=drawing.INK if style == 'o-' else 'none',
        )
        plot.tip(line, *(f'{short(s.name, MAX_NAME)}: {text.format(v)}' for s, v in rows))
    for axes, ylabel in ((time, ''), (efficiency, 'efficiency'), (epochs, 'mean epochs')):
        _label_panel(axes, nodes, ylabel)
    drawing.scale_up(time.yaxis, 'minutes', [m for s, _ in pairs if (m := s.minutes)] or [1.0])
    _draw_ideal_efficiency(efficiency, [c.efficiency for _, c in pairs if c.efficiency])
    epochs.set_ylim(0, 1.1 * max((s.epochs_mean or 1.0 for s, _ in pairs), default=1.0))
    mark = {'color': drawing.INK, 'markersize': 5}
    drawing.legend(
        plot,
        [
            drawing.key('ideal', color=drawing.GRID, linestyle='--'),
            drawing.key('measured', marker='o', **mark),
            drawing.key('images/s only', marker='s', linestyle=':', markerfacecolor='none', **mark),
        ],
    )
    return plot


def draw_all_series(studies: Sequence[Study]) -> list[drawing.Plot]:
    """Draw the efficiency of two or more series over nodes, those with the largest ratio of nodes
    in colour."""
    names = labels_of([x.baseline for study in studies for x in study.series])
    prefixes = [f'{study.name}/' if len(studies) > 1 else '' for study in studies]
    curves = [
        (
            printable(f'{prefix}{names[x.baseline]}'),
            [
                (s.num_nodes or 0, c.efficiency)
                for s in x.run_sets
                if (c := study.comparison_of.get(s)) and c.efficiency
            ],
        )
        for study, prefix in zip(studies, prefixes)
        for x in study.series
    ]
    curves = sorted((c for c in curves if len(c[1]) > 1), key=lambda c: -c[1][-1][0] / c[1][0][0])
    if len(curves) < 2:
        return []
    plot, axes = drawing.make_plot(
        'series', 'Efficiency of all series', heading=report_heading(studies), height_in=3.4
    )
    _draw_ideal_efficiency(axes, [value for _, points in curves for _, value in points])
    labels = [
        *cut_names([name for name, _ in curves[: len(drawing.COLOURS)]], MAX_NAME),
        'other series',
    ]
    colours = [*drawing.COLOURS[: len(labels) - 1], drawing.GRID]
    for k, (name, points) in reversed([*enumerate(curves)]):  # the widest on top
        k = min(k, len(colours) - 1)
        (line,) = axes.plot(*zip(*points), 'o-', color=colours[k], markersize=4, linewidth=1)
        plot.tip(
            line, *(f'{name}: {plural(n, "node")}, efficiency {value:.1%}' for n, value in points)
        )
    _label_panel(axes, sorted({n for _, points in curves for n, _ in points}), 'efficiency')
    drawing.legend(
        plot,
        [
            drawing.key(label, color=colour, marker='o', markersize=4, linewidth=1)
            for colour, label in list(zip(colours, labels))[: len(curves)]
        ],
    )
    return [plot]


def draw_time_parts(scene: Scene) -> drawing.Plot | None:
    if not any(s.run_set.parts for s in scene.shown):
        return None
    plot, axes = scene.rows('time_parts', 'Time by phase')
    for row, s in enumerate(scene.shown):
        if (parts := s.run_set.parts) is None:
            continue
        seconds = [max(getattr(parts, name) or 0.0, 0.0) for _, name, _, _ in _PARTS]
        left = 0.0
        for (kind, name, colour, hatch), part in zip(_PARTS, seconds):
            share = part / (sum(seconds) or 1.0)
            if getattr(parts, name) is not None:  # None means not logged; 0 s is drawn
                (bar,) = axes.barh(
                    row,
                    share,
                    _BAR_HEIGHT,
                    left,
                    facecolor=colour,
                    edgecolor=drawing.GRID,
                    hatch=hatch,
                )
                plot.tip(bar, f'{s.label}: {kind} {part:,.1f} s, {100 * share:.1f} %')
            left += share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_xlabel('share of initialisation plus time to train')
    drawing.legend(
        plot,
        [
            Patch(facecolor=colour, edgecolor=drawing.GRID, hatch=hatch, label=kind)
            for kind, _, colour, hatch in _PARTS
        ],
    )
    return plot
