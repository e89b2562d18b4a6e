"""All plots: of the systems of several rounds, and of a study, where each system keeps its colour
in all plots."""

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes

from mlperf_rn50.analysis.recipe.choose import families, frontier, group
from mlperf_rn50.analysis.report import bars, curves
from mlperf_rn50.analysis.report.scene import make_scene
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.analysis.show import figure as drawing
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.logged_run import TARGET

CARDS = ('V100', 'A100', 'H100')  # published systems have one to thousands of each
_COLOURS = {**dict(zip(CARDS, drawing.COLOURS)), 'other': drawing.GRID}


def card_of(run_set: RunSet) -> str:
    return next((name for name in CARDS if name in (run_set.accelerator or '')), 'other')


def _draw(
    name: str, title: str, points: dict[RunSet, tuple[float, float]], labels: tuple[str, str]
) -> tuple[drawing.Plot, Axes]:
    """Draw a mark for each system, coloured by accelerator."""
    rounds = sorted(s.round for s in points)
    plot, axes = drawing.make_plot(
        name,
        title,
        'ResNet-50 in MLPerf Training',
        3.4,
        [
            f'{len(points)} closed-division systems of {rounds[0]} to {rounds[-1]} with '
            f'{100 * TARGET:g} % as target'
        ],
    )
    axes.set_ylabel(labels[1])
    for card, colour in _COLOURS.items():
        if own := [s for s in points if card_of(s) == card]:
            (line,) = axes.plot(
                *zip(*map(points.get, own)),
                'o',
                color=colour,
                markersize=4,
                alpha=0.7,
                markeredgewidth=0,
                label=card,
            )
            plot.tip(
                line,
                *(
                    f'{s.org or "unnamed"} {s.name}, {s.round}: {points[s][1]:.2f} {labels[1]}, '
                    f'{points[s][0]:,} {labels[0]}'
                    for s in own
                ),
            )
    drawing.scale_up(axes.xaxis, labels[0], [x for x, _ in points.values()])
    return plot, axes


def draw_overview(run_sets: Sequence[RunSet]) -> list[drawing.Plot]:
    """Return plots of minutes and epochs of comparable systems, or none if these are from fewer
    than two rounds."""
    shown = [
        s
        for s in run_sets
        if s.is_imagenet
        and s.target_accuracy == TARGET
        and s.division != keys.OPEN
        and s.minutes
        and s.num_accelerators
        and s.global_batch_size
        and not s.is_duplicate
    ]
    if len({s.round for s in shown}) < 2:
        return []
    minutes: dict[RunSet, tuple[float, float]] = {
        s: (s.num_accelerators or 0, s.minutes or 0.0) for s in shown
    }
    epochs: dict[RunSet, tuple[float, float]] = {
        s: (s.global_batch_size or 0, s.epochs_mean or 0.0) for s in shown
    }
    with matplotlib.rc_context(drawing.STYLE):
        times, time_axes = _draw(
            'minutes_over_accelerators',
            'Time to train over accelerators',
            minutes,
            ('accelerators', 'minutes'),
        )
        drawing.scale_up(time_axes.yaxis, 'minutes', [y for _, y in minutes.values()])
        drawing.legend(times, time_axes.lines)
        plot, axes = _draw(
            'epochs_over_batch',
            'Epochs to converge over the global batch',
            epochs,
            ('images per batch', 'mean epochs'),
        )
        if best := next(filter(None, map(frontier, families(group(shown, target=TARGET)))), []):
            axes.plot(
                [p.recipe.global_batch_size for p in best],
                [p.mean_epochs for p in best],
                color=drawing.INK,
                linewidth=1,
                label='fewest epochs',
            )
        if points := rcp.reference_points():
            (line,) = axes.plot(
                *zip(*points),
                'D',
                color=drawing.INK,
                markersize=5,
                markerfacecolor='none',
                label='reference convergence',
            )
            plot.tip(
                line,
                *(
                    f'reference convergence: {y:.2f} epochs, {x:,} images per batch'
                    for x, y in points
                ),
            )
        drawing.legend(plot, axes.lines)
    return [times, plot]


def draw_all(studies: Sequence[Study]) -> list[drawing.Plot]:
    """Return the plots of all systems."""
    with matplotlib.rc_context(drawing.STYLE):
        series = bars.draw_all_series(studies)
    return [*series, *draw_overview([s for study in studies for s in study.run_sets])]


def draw_study(study: Study, is_brief: bool = False, is_only: bool = True) -> list[drawing.Plot]:
    """Return the plots for which the study has data, those of its series first.

    Args:
        is_brief: only those of its series.
        is_only: whether the report has no other study, whose plots would have equal names.
    """
    scene = make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(drawing.STYLE):
        series = [bars.draw_series(scene, x) for x in study.series]
        if is_brief:
            return series
        drawn = [
            *(bars.draw_values(scene, *value) for value in bars.VALUES),
            bars.draw_time_parts(scene),
            *(curves.draw_accuracy(scene, is_over_time) for is_over_time in (True, False)),
            curves.draw_learning_rate(scene),
            *curves.draw_all_telemetry(scene),
        ]
    plots = [plot for plot in drawn if plot]
    if not is_only:
        for plot in plots:
            plot.name = drawing.file_stem(study.name, plot.name)
    return [*series, *plots]
