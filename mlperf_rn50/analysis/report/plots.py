"""All plots of a study. A system has the same colour in each of them."""
from collections.abc import Iterator, Sequence

import matplotlib

from mlperf_rn50.analysis.report import bars, curves
from mlperf_rn50.analysis.report.overview import draw_overview
from mlperf_rn50.analysis.report.picture import STYLE, Picture
from mlperf_rn50.analysis.report.scene import make_scene
from mlperf_rn50.analysis.report.tables import is_large
from mlperf_rn50.analysis.sets.scaling import Study


def draw_report(studies: Sequence[Study]) -> Iterator[list[Picture]]:
    """Yield the plots of all systems, then those of each study."""
    yield draw_overview([s for study in studies for s in study.run_sets])
    for study in studies:
        yield draw_study(study, is_large(studies))


def draw_study(study: Study, is_brief: bool = False) -> list[Picture]:
    """Return the plots for which the study has data, those of its series first. A brief report has no others."""
    scene = make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(STYLE):
        series = [bars.draw_series(scene, x, f'series_{k}') for k, x in enumerate(study.series, start=1)]
        drawn = [] if is_brief else [draw(scene) for draw in (
            bars.draw_time_to_train, bars.draw_epochs, bars.draw_speedup, curves.draw_accuracy_over_time,
            curves.draw_accuracy_over_epochs, bars.draw_throughput, bars.draw_time_parts, curves.draw_learning_rate)]
        return [p for p in (*series, *drawn, *(() if is_brief else curves.draw_all_telemetry(scene))) if p]
