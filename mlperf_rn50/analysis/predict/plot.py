"""Plot measured and predicted time against the number of nodes, and write a prediction to a
folder."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mlperf_rn50.analysis.predict.answer import Predictions
from mlperf_rn50.analysis.predict.tables import (
    answer_heading,
    render_prediction,
    render_prediction_json,
)
from mlperf_rn50.analysis.show import figure as drawing
from mlperf_rn50.analysis.show.figure import COLOURS, INK, STYLE, Plot
from mlperf_rn50.analysis.show.text import MARKDOWN
from mlperf_rn50.files import write_atomically
from mlperf_rn50.runfolder.outputs import new_files
from mlperf_rn50.text import printable


def draw_prediction(answer: Predictions) -> Plot | None:
    """Plot the minutes or, without them, the time of a step against nodes. Return None if all are
    refused."""
    timed = [r for r in answer.rows if r.minutes]
    rows = sorted(timed or answer.predicted, key=lambda r: r.layout.num_nodes)
    if not rows:
        return None
    unit, refused = (
        'minutes' if timed else 'ms per step',
        [r.layout.name for r in answer.rows if r.refusal],
    )
    points = [
        (r, r.minutes or 0.0, r.measured_minutes or r.best_measured_minutes or 0.0)
        if timed
        else (r, 1e3 * (r.step_s or 0.0), 1e3 * (r.measured_step_s or 0.0))
        for r in rows
    ]
    measured = [(r, m) for r, _, m in points if m]
    shown = [m for _, m in measured]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(drawing.WIDTH_IN, 3.2))
        axes = figure.subplots()
        picture = Plot(
            'prediction',
            f'Predicted {unit} against nodes',
            printable(answer_heading(answer)),
            figure,
            [
                *['Bars: 80 % interval'] * bool(timed),
                *[f'Refused: {", ".join(refused)}'] * bool(refused),
            ],
        )
        axes.set_xscale('log', base=2)
        for k, per_node in enumerate(dict.fromkeys(r.layout.units_per_node for r in rows)):
            alike = [
                (r, v, *(r.interval or (v, v)))
                for r, v, _ in points
                if r.layout.units_per_node == per_node
            ]
            line = axes.errorbar(
                [r.layout.num_nodes for r, *_ in alike],
                [v for _, v, *_ in alike],
                [[v - low for _, v, low, _ in alike], [high - v for _, v, _, high in alike]],
                fmt='o-',
                linewidth=1,
                markersize=5,
                elinewidth=1.6,
                capsize=5,
                color=COLOURS[k] if k < len(COLOURS) else INK,
                label=f'predicted, {per_node} per node',
            )[0]
            picture.tip(
                line,
                *(
                    f'{r.layout.name}: {v:,.2f} {unit} predicted'
                    + (f', 80 % interval {low:,.2f} to {high:,.2f}' if low < high else '')
                    for r, v, low, high in alike
                ),
            )
            shown += [x for _, *values in alike for x in values]
        if measured:
            (line,) = axes.plot(
                [r.layout.num_nodes for r, _ in measured],
                [m for _, m in measured],
                'x',
                color=INK,
                markersize=7,
                markeredgewidth=1.6,
                label='measured',
            )
            picture.tip(
                line,
                *(
                    f'{r.layout.name}: {v:,.2f} {unit} measured'
                    + (
                        f' at batch {r.best_measured_batch_size:,}'
                        if v == r.best_measured_minutes
                        else ''
                    )
                    for r, v in measured
                ),
            )
        ticks = drawing.ticks(sorted({r.layout.num_nodes for r in rows}))
        axes.minorticks_off()
        axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
        axes.set_xlabel('nodes (logarithmic)')
        if drawing.differ_tenfold(shown):
            drawing.scale_up(axes.yaxis, unit, shown)
        else:
            axes.set(ylabel=unit, ylim=(0, 1.1 * max(shown)))
        drawing.legend(picture, axes.get_legend_handles_labels()[0])  # type: ignore[arg-type]
    return picture


def dump_prediction(answer: Predictions, folder: Path) -> Path:
    """Write prediction.json, prediction.md and the plot, if any. Return the folder. Raise
    ConfigError as new_files."""
    with new_files(folder) as place:
        write_atomically(place / 'prediction.json', render_prediction_json(answer) + '\n')
        write_atomically(place / 'prediction.md', render_prediction(answer, MARKDOWN) + '\n')
        if picture := draw_prediction(answer):
            drawing.dump_plot(picture, place, 'prediction')
    return folder
