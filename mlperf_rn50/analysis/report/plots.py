"""All plots: of the systems of several rounds, and of a study, where each system keeps its colour
in all plots."""

from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes

from mlperf_rn50.analysis.recipe.choose import families, frontier, group
from mlperf_rn50.analysis.report import bars, curves
from mlperf_rn50.analysis.report import picture as drawing
from mlperf_rn50.analysis.report.scene import make_scene
from mlperf_rn50.analysis.report.tables import is_large
from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.logged_run import TARGET

CARDS = ('V100', 'A100', 'H100')  # published systems have one to thousands of each
_COLOURS = {**dict(zip(CARDS, drawing.COLOURS)), 'other': drawing.GRID}


def card_of(run_set: RunSet) -> str:
    return next((name for name in CARDS if name in (run_set.accelerator or '')), 'other')


def _draw(
    name: str, title: str, points: dict[RunSet, tuple[float, float]], labels: tuple[str, str]
) -> tuple[drawing.Picture, Axes]:
    """Draw a mark for each system, coloured by accelerator."""
    rounds = sorted(s.round for s in points)
    picture, axes = drawing.make_picture(
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
            picture.tip(
                line,
                *(
                    f'{s.org or "unnamed"} {s.name}, {s.round}: {points[s][1]:.2f} {labels[1]}, '
                    f'{points[s][0]:,} {labels[0]}'
                    for s in own
                ),
            )
    drawing.scale_up(axes.xaxis, labels[0], [x for x, _ in points.values()])
    return picture, axes


def draw_overview(run_sets: Sequence[RunSet]) -> list[drawing.Picture]:
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
        picture, axes = _draw(
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
            picture.tip(
                line,
                *(
                    f'reference convergence: {y:.2f} epochs, {x:,} images per batch'
                    for x, y in points
                ),
            )
        drawing.legend(picture, axes.lines)
    return [times, picture]


def draw_report(studies: Sequence[Study]) -> Iterator[list[drawing.Picture]]:
    """Yield the plots of all systems, then of each study. With several studies, plot names contain
    the study's name."""
    with matplotlib.rc_context(drawing.STYLE):
        series = bars.draw_all_series(studies)
    yield [*series, *draw_overview([s for study in studies for s in study.run_sets])]
    for study in studies:
        pictures = draw_study(study, is_large(studies))
        for picture in pictures[len(study.series) :] if len(studies) > 1 else ():
            picture.name = drawing.file_stem(study.name, picture.name)
        yield pictures


def draw_study(study: Study, is_brief: bool = False) -> list[drawing.Picture]:
    """Return the plots for which the study has data, those of its series first. A brief report has
    no others."""
    scene = make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(drawing.STYLE):
        series = [bars.draw_series(scene, x) for x in study.series]
        drawn = (
            []
            if is_brief
            else [
                *(bars.draw_values(scene, *value) for value in bars.VALUES),
                *(
                    draw(scene)
                    for draw in (
                        bars.draw_time_parts,
                        curves.draw_accuracy_over_time,
                        curves.draw_accuracy_over_epochs,
                        curves.draw_learning_rate,
                    )
                ),
                *curves.draw_all_telemetry(scene),
            ]
        )
        return [p for p in (*series, *drawn) if p]
