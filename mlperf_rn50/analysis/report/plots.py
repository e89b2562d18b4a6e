"""All plots of a study. A system has the same colour in each of them."""
import matplotlib

from mlperf_rn50.analysis.report import bars, curves
from mlperf_rn50.analysis.report.picture import STYLE, Picture
from mlperf_rn50.analysis.report.scene import make_scene
from mlperf_rn50.analysis.sets.scaling import Study


def draw_study(study: Study) -> list[Picture]:
    """Return the plots for which the study has data, those of its series first."""
    scene = make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(STYLE):
        drawn = [draw(scene) for draw in (
            bars.draw_time_to_train, bars.draw_epochs, bars.draw_speedup, curves.draw_accuracy_over_time,
            curves.draw_accuracy_over_epochs, bars.draw_throughput, bars.draw_time_parts, curves.draw_learning_rate)]
        series = [bars.draw_series(scene, x, f'series_{k}') for k, x in enumerate(study.series, start=1)]
        return [p for p in (*series, *drawn, *curves.draw_all_telemetry(scene)) if p]
