"""Plot measured and predicted time and cost against the number of nodes, and write a prediction to a folder."""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.prediction import Prediction
from mlperf_rn50.analysis.predict.tables import heading, render_json, render_tables
from mlperf_rn50.analysis.report import picture as drawing
from mlperf_rn50.analysis.report.picture import COLOURS, INK, STYLE, Picture
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.files import write_atomically, writing_folder
from mlperf_rn50.mllog.events import printable

# Colours of the report's page in dark mode.
_DARK_INK, _DARK_PAPER = '#e6e9ee', '#14171b'
_MAX_MEASURED = 50  # maximum measured sets drawn


class _Panel(NamedTuple):
    """Quantity shown in a panel, of a prediction or a measured set."""

    unit: str
    form: str
    value: Callable[[Any], float | None]
    has_interval: bool = False


def _panels(answer: Answer) -> tuple[_Panel, _Panel]:
    """Return panels of time and cost or, if no minutes are predicted, of step time and throughput."""
    if not answer.timed:
        return (_Panel('ms per step', '.1f', lambda x: x.step_s and 1e3 * x.step_s),
                _Panel('images/s', ',.1f', lambda x: x.images_per_s))
    price = 1.0 if answer.price is None else answer.price
    unit = 'node-hours' if answer.price is None else f'cost, {price:g} per node-hour'
    return (_Panel('minutes', '.2f', lambda x: x.minutes, True),
            _Panel(unit, '.2f', lambda x: x.node_hours and x.node_hours * price))


def _draw_rows(picture: Picture, axes: Axes, panel: _Panel, rows: Sequence[Prediction], colour: str) -> list[float]:
    """Draw the predictions for one number of accelerators per node; return all values and ends of intervals."""
    points = [(r, v) for r in rows if (v := panel.value(r)) is not None]
    texts = [f'{r.layout.name}: {v:{panel.form}} {panel.unit} predicted' for r, v in points]
    ends: list[float] = []
    for k, (row, value) in enumerate(points):
        if panel.has_interval and (span := row.interval):
            axes.errorbar(row.layout.num_nodes, value, [[value - span[0]], [span[1] - value]], fmt='none',
                          ecolor=colour, elinewidth=1.6, capsize=5)
            texts[k] += f', 80 % interval {span[0]:{panel.form}} to {span[1]:{panel.form}}'
            ends += [end for end in span if end > 0]
    line, = axes.plot([r.layout.num_nodes for r, _ in points], [v for _, v in points], color=colour, linewidth=1,
                      marker='o', markersize=5, label=f'predicted, {rows[0].layout.units_per_node} per node')
    picture.tip(line, *texts)
    return [v for _, v in points] + ends


def _draw_panel(picture: Picture, axes: Axes, panel: _Panel, answer: Answer, sets: Sequence[RunSet]) -> None:
    values, rows = list[float](), sorted(answer.predicted, key=lambda r: r.layout.num_nodes)
    for k, units in enumerate(dict.fromkeys(r.layout.units_per_node for r in rows)):
        series = [r for r in rows if r.layout.units_per_node == units]
        values += _draw_rows(picture, axes, panel, series, COLOURS[k] if k < len(COLOURS) else INK)
    if measured := [(s, v) for s in sets if (v := panel.value(s)) is not None]:
        line, = axes.plot([s.num_nodes or 1 for s, _ in measured], [v for _, v in measured], 'x', color=INK,
                          markersize=7, markeredgewidth=1.6, label='measured')
        picture.tip(line, *(f'{s.name}: {v:{panel.form}} {panel.unit} measured, batch {s.recipe.global_batch_size:,}'
                            for s, v in measured))
        values += [v for _, v in measured]
    ticks = drawing.ticks(sorted({r.layout.num_nodes for r in rows} | {s.num_nodes or 1 for s in sets}))
    axes.set_xscale('log', base=2)
    axes.minorticks_off()
    axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
    axes.margins(x=0.08)
    if drawing.differ_tenfold(values):
        drawing.scale_up(axes.yaxis, panel.unit, values)
    else:
        axes.set_ylabel(panel.unit)
        axes.set_ylim(bottom=0)


def draw_prediction(answer: Answer) -> Picture | None:
    """Return the picture; None if all layouts are refused."""
    if not answer.predicted:
        return None
    max_nodes = max(r.layout.num_nodes for r in answer.predicted)
    sets = [s for s in answer.source.sets if s.num_nodes and s.num_nodes <= max_nodes][:_MAX_MEASURED]
    refused = [r.layout.name for r in answer.rows if r.refusal]
    panels = _panels(answer)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(drawing.WIDTH_IN, 5.0))
        title = f'Predicted {panels[0].unit} and {panels[1].unit} against nodes. Bars: 80 % interval'
        picture = Picture('prediction', title, printable(heading(answer)), figure,
                          [f'Refused: {", ".join(refused)}'] if refused else [])
        both = figure.subplots(2, 1, sharex=True)
        for axes, panel in zip(both, panels):
            _draw_panel(picture, axes, panel, answer, sets)
        both[1].set_xlabel('nodes (logarithmic)')
        drawing.legend(picture, both[0].get_legend_handles_labels()[0])
    return picture


def dump_picture_twice(picture: Picture, folder: Path) -> None:
    """Write a picture as SVG and PNG, for light and dark mode."""
    svg = picture.svg  # also lays out the figure, as savefig below requires
    write_atomically(folder / f'{picture.name}.svg', svg)
    write_atomically(folder / f'{picture.name}_dark.svg',
                     svg.replace(INK, _DARK_INK).replace('fill: #ffffff', f'fill: {_DARK_PAPER}'))
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(folder / f'{picture.name}.png', dpi=150, metadata={'Software': None})
        picture.figure.patch.set_facecolor(_DARK_PAPER)
        for artist in picture.figure.findobj():
            if isinstance(artist, (Line2D, Text)) and to_hex(artist.get_color()) == INK:
                artist.set_color(_DARK_INK)
        picture.figure.savefig(folder / f'{picture.name}_dark.png', dpi=150, metadata={'Software': None})


def dump_prediction(answer: Answer, folder: Path) -> Path:
    """Write prediction.json, prediction.md and the plot, if any; return the folder; raise ConfigError on failure."""
    with writing_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / 'prediction.json', render_json(answer) + '\n')
        write_atomically(folder / 'prediction.md', render_tables(answer, is_markdown=True) + '\n')
        if picture := draw_prediction(answer):
            dump_picture_twice(picture, folder)
    return folder
