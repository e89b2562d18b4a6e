"""Plot measured and predicted time against the number of nodes, and write a prediction to a
folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from mlperf_rn50.analysis.predict.layouts import Predictions
from mlperf_rn50.analysis.predict.prediction import Prediction
from mlperf_rn50.analysis.show import figure
from mlperf_rn50.analysis.show.data import render_json
from mlperf_rn50.analysis.show.plain import MARKDOWN, render_text
from mlperf_rn50.answer import Answer
from mlperf_rn50.files import write_atomically
from mlperf_rn50.runfolder.outputs import new_files
from mlperf_rn50.text import grouped, printable


def _draw_values(
    plot: figure.Plot,
    axes: Axes,
    points: Sequence[tuple[Prediction, float]],
    text: str,
    **style: Any,
) -> list[float]:
    """Draw a value of each layout, with its interval unless it is measured, and return all numbers
    that are drawn. text describes a value in its tip."""
    is_measured, lows, highs, tips = 'measured' in text, [], [], []
    for row, value in points:
        low, high = (value, value) if is_measured else row.interval or (value, value)
        tip = f'{row.layout.name}: {value:,.2f} {text}'
        if low < high:
            tip += f', 80 % interval {low:,.2f} to {high:,.2f}'
        elif is_measured and value == row.best_measured_minutes:
            tip += f' at batch {row.best_measured_batch_size:,}'
        lows.append(low)
        highs.append(high)
        tips.append(tip)
    nodes = [row.layout.num_nodes for row, _ in points]
    values = [value for _, value in points]
    if is_measured:
        (line,) = axes.plot(nodes, values, 'x', markersize=7, markeredgewidth=1.6, **style)
    else:
        ends = np.subtract(values, lows), np.subtract(highs, values)
        line = axes.errorbar(
            nodes,
            values,
            ends,
            fmt='o-',
            linewidth=1,
            markersize=5,
            elinewidth=1.6,
            capsize=5,
            **style,
        )[0]
    plot.tip(line, *tips)
    return lows + highs


def draw_prediction(found: Predictions, heading: str) -> figure.Plot | None:
    """Plot the minutes or, without them, the time of a step against nodes. Return None if all are
    refused."""
    timed = [r for r in found.rows if r.minutes]
    rows = sorted(timed or found.predicted, key=lambda r: r.layout.num_nodes)
    if not rows:
        return None
    unit, notes = 'ms per step', []
    values = [(r, 1e3 * (r.step_s or 0.0), 1e3 * (r.measured_step_s or 0.0)) for r in rows]
    if timed:
        unit, notes = 'minutes', ['Bars: 80 % interval']
        values = [
            (r, r.minutes or 0.0, r.measured_minutes or r.best_measured_minutes or 0.0)
            for r in rows
        ]
    if refused := [r.layout.name for r in found.rows if r.refusal]:
        notes.append(f'Refused: {", ".join(refused)}')
    with matplotlib.rc_context(figure.STYLE):
        plot, axes = figure.make_plot(
            'prediction',
            f'Predicted {unit} against nodes',
            printable(heading),
            height_in=3.2,
            notes=notes,
        )
        axes.set_xscale('log', base=2)
        shown: list[float] = []
        alike = grouped(values, lambda value: value[0].layout.units_per_node)
        colours = [*figure.COLOURS, *[figure.INK] * len(alike)]
        for colour, (per_node, same) in zip(colours, alike.items()):
            points = [(r, predicted) for r, predicted, _ in same]
            label = f'predicted, {per_node} per node'
            shown += _draw_values(
                plot, axes, points, f'{unit} predicted', color=colour, label=label
            )
        if measured := [(r, value) for r, _, value in values if value]:
            shown += _draw_values(
                plot, axes, measured, f'{unit} measured', color=figure.INK, label='measured'
            )
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
