"""Plot measured and predicted time against the number of nodes, and write a prediction to a
folder."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mlperf_rn50.analysis.predict.layouts import Predictions
from mlperf_rn50.analysis.predict.prediction import Prediction
from mlperf_rn50.analysis.predict.prediction_answer import heading
from mlperf_rn50.analysis.show import figure
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.text import MARKDOWN, render_text
from mlperf_rn50.answer import Answer
from mlperf_rn50.files import write_atomically
from mlperf_rn50.runfolder.outputs import new_files
from mlperf_rn50.text import grouped, printable

_Points = Sequence[tuple[Prediction, float]]  # predictions with a value of each


def _draw_predicted(
    axes: Axes, points: _Points, colour: str, unit: str
) -> tuple[Line2D, list[str], list[float]]:
    """Draw the values of layouts with equal nodes, and their intervals. Return the line, a text for
    each mark, and all drawn values."""
    nodes = [row.layout.num_nodes for row, _ in points]
    values = [value for _, value in points]
    ends = [row.interval or (value, value) for row, value in points]
    line = axes.errorbar(
        nodes,
        values,
        [
            [value - low for value, (low, _) in zip(values, ends)],
            [high - value for value, (_, high) in zip(values, ends)],
        ],
        fmt='o-',
        linewidth=1,
        markersize=5,
        elinewidth=1.6,
        capsize=5,
        color=colour,
        label=f'predicted, {points[0][0].layout.units_per_node} per node',
    )[0]
    texts = []
    for (row, value), (low, high) in zip(points, ends):
        text = f'{row.layout.name}: {value:,.2f} {unit} predicted'
        texts.append(f'{text}, 80 % interval {low:,.2f} to {high:,.2f}' if low < high else text)
    return line, texts, [*values, *(end for pair in ends for end in pair)]


def _draw_measured(axes: Axes, points: _Points, unit: str) -> tuple[Line2D, list[str]]:
    """Draw measured values. Return the line, and a text for each mark."""
    (line,) = axes.plot(
        [row.layout.num_nodes for row, _ in points],
        [value for _, value in points],
        'x',
        color=figure.INK,
        markersize=7,
        markeredgewidth=1.6,
        label='measured',
    )
    texts = []
    for row, value in points:
        text = f'{row.layout.name}: {value:,.2f} {unit} measured'
        if value == row.best_measured_minutes:
            text += f' at batch {row.best_measured_batch_size:,}'
        texts.append(text)
    return line, texts


def draw_prediction(found: Predictions) -> figure.Plot | None:
    """Plot the minutes or, without them, the time of a step against nodes. Return None if all are
    refused."""
    timed = [r for r in found.rows if r.minutes]
    rows = sorted(timed or found.predicted, key=lambda r: r.layout.num_nodes)
    if not rows:
        return None
    unit, notes = 'ms per step', []
    values = [1e3 * (r.step_s or 0.0) for r in rows]
    measured = [(r, 1e3 * (r.measured_step_s or 0.0)) for r in rows]
    if timed:
        unit, notes = 'minutes', ['Bars: 80 % interval']
        values = [r.minutes or 0.0 for r in rows]
        measured = [(r, r.measured_minutes or r.best_measured_minutes or 0.0) for r in rows]
    measured = [(r, value) for r, value in measured if value]
    if refused := [r.layout.name for r in found.rows if r.refusal]:
        notes.append(f'Refused: {", ".join(refused)}')
    with matplotlib.rc_context(figure.STYLE):
        plot, axes = figure.make_plot(
            'prediction',
            f'Predicted {unit} against nodes',
            printable(heading(found)),
            height_in=3.2,
            notes=notes,
        )
        axes.set_xscale('log', base=2)
        shown = [value for _, value in measured]
        alike = grouped(zip(rows, values), lambda point: point[0].layout.units_per_node)
        for k, points in enumerate(alike.values()):
            colour = figure.COLOURS[k] if k < len(figure.COLOURS) else figure.INK
            line, texts, drawn = _draw_predicted(axes, points, colour, unit)
            plot.tip(line, *texts)
            shown += drawn
        if measured:
            line, texts = _draw_measured(axes, measured, unit)
            plot.tip(line, *texts)
        ticks = figure.ticks(sorted({r.layout.num_nodes for r in rows}))
        axes.minorticks_off()
        axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
        axes.set_xlabel('nodes (logarithmic)')
        if figure.differ_tenfold(shown):
            figure.scale_up(axes.yaxis, unit, shown)
        else:
            axes.set(ylabel=unit, ylim=(0, 1.1 * max(shown)))
        figure.legend(plot, axes.get_legend_handles_labels()[0])  # type: ignore[arg-type]
    return plot


def dump_prediction(answer: Answer, folder: Path) -> None:
    """Write prediction.json, prediction.md and the plot, if any. Raise ConfigError as new_files."""
    with new_files(folder) as place:
        write_atomically(place / 'prediction.json', ''.join(render_json(answer.data)) + '\n')
        write_atomically(place / 'prediction.md', render_text(answer, MARKDOWN) + '\n')
        for plot in answer.figures():
            figure.dump_plot(plot, place, 'prediction')
