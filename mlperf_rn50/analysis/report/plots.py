"""Which pictures does a study have? Draws them with matplotlib, for whoever reads the page or shows a slide.

A colour is a system's, the same in all pictures of a study; what parts, rates and devices are has palettes of its own.
A picture shows as many systems and runs as an eye can tell apart, and says which.
"""

import matplotlib

from mlperf_rn50.analysis.report.bars import (
    draw_efficiency,
    draw_epochs,
    draw_speedup,
    draw_throughput,
    draw_time_parts,
    draw_time_to_train,
)
from mlperf_rn50.analysis.report.curves import (
    draw_accuracy_over_epochs,
    draw_accuracy_over_time,
    draw_all_telemetry,
    draw_learning_rate,
)
from mlperf_rn50.analysis.report.picture import STYLE, Picture
from mlperf_rn50.analysis.report.scene import make_scene
from mlperf_rn50.analysis.sets.scaling import Study


def draw_study(study: Study) -> list[Picture]:
    """All pictures that a study has something to show in."""
    scene = make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(STYLE):
        drawn = [draw(scene) for draw in (
            draw_time_to_train, draw_epochs, draw_speedup, draw_accuracy_over_time, draw_accuracy_over_epochs,
            draw_throughput, draw_efficiency, draw_time_parts, draw_learning_rate)]
        return [p for p in (*drawn, *draw_all_telemetry(scene)) if p]
