"""Plot measured and predicted time and cost against the number of nodes."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from mlperf_rn50.analysis.sets.cost import cost
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.files import write_atomically, writing_folder
from mlperf_rn50.mllog.events import printable

# Colours of the report's page in dark mode.
_DARK_INK, _DARK_PAPER = '#e6e9ee', '#14171b'
_MAX_MEASURED, _MAX_REFUSED = 50, 5  # maximum measured sets drawn, maximum refused layouts named
_HEIGHT_IN = 5.0


@dataclass(frozen=True)
class _Panel:
    """Quantity shown in a panel, for predictions and measured sets."""

    unit: str
    of_row: Callable[[Prediction], float | None]
    of_set: Callable[[RunSet], float | None]
    form: str = '.2f'
    interval: Callable[[Prediction], tuple[float, float] | None] = lambda row: None


def _panels(answer: Answer) -> tuple[_Panel, _Panel]:
    """Return panels of time and cost or, if no minutes are predicted, of step time and throughput."""
    if not answer.timed:
        return (_Panel('ms per step', lambda r: 1e3 * (r.step_s or 0.0),
                       lambda k: 1e3 * k.step_s if k.step_s else None, '.1f'),
                _Panel('images/s', lambda r: r.images_per_s,
                       lambda k: k.recipe.global_batch_size / k.step_s if k.step_s else None, ',.1f'))
    price = 1.0 if answer.price is None else answer.price
    unit = 'node-hours' if answer.price is None else f'cost, {price:g} per node-hour'
    return (_Panel('minutes', lambda r: r.minutes, lambda k: k.minutes, interval=lambda r: r.interval),
            _Panel(unit, lambda r: None if r.node_hours is None else r.node_hours * price,
                   lambda k: cost(k.time_s, k.num_nodes, price) if k.time_s and k.num_nodes else None))


def _series(answer: Answer) -> list[tuple[str, int, list[Prediction]]]:
    """Return (colour, accelerators or ranks per node, layouts in order of nodes) for each series."""
    found: dict[int, list[Prediction]] = {}
    for row in sorted(answer.predicted, key=lambda r: r.layout.num_nodes):
        found.setdefault(row.layout.units_per_node, []).append(row)
    return [(COLOURS[i] if i < len(COLOURS) else INK, units, rows) for i, (units, rows) in enumerate(found.items())]


def _draw_rows(picture: Picture, axes: Axes, panel: _Panel, rows: Sequence[Prediction], colour: str) -> list[float]:
    """Draw the predictions of one series; return the drawn values and ends of intervals."""
    points = [(r, v) for r in rows if (v := panel.of_row(r)) is not None]
    spans = [(r.layout.num_nodes, *span) for r, _ in points if (span := panel.interval(r))]
    for nodes, low, high in spans:
        axes.errorbar(nodes, low, [[0.0], [high - low]], fmt='none', ecolor=colour, elinewidth=1.6, capsize=5)
    line, = axes.plot([r.layout.num_nodes for r, _ in points], [v for _, v in points], color=colour, linewidth=1,
                      marker='o', markersize=5)
    picture.tip(line, *(f'{r.layout.name}: {v:{panel.form}} {panel.unit} predicted' + (
        f', 80 % interval {s[0]:{panel.form}} to {s[1]:{panel.form}}' if (s := panel.interval(r)) else '')
        for r, v in points))
    return [v for _, v in points] + [end for _, *span in spans for end in span if end > 0]


def _draw_measured(picture: Picture, axes: Axes, panel: _Panel, sets: Sequence[RunSet]) -> list[float]:
    """Draw the measured sets; return the drawn values."""
    points = [(k, v) for k in sets if k.num_nodes and (v := panel.of_set(k)) is not None]
    if points:
        drawn, = axes.plot([k.num_nodes or 1 for k, _ in points], [v for _, v in points], 'x', color=INK, markersize=7,
                           markeredgewidth=1.6)
        picture.tip(drawn, *(f'{k.name}: {v:{panel.form}} {panel.unit} measured, batch '
                             f'{k.recipe.global_batch_size:,}' for k, v in points))
    return [v for _, v in points]


def _draw_panel(picture: Picture, axes: Axes, panel: _Panel, series: Sequence[tuple[str, int, list[Prediction]]],
                sets: Sequence[RunSet]) -> None:
    values = [v for colour, _, rows in series for v in _draw_rows(picture, axes, panel, rows, colour)]
    values += _draw_measured(picture, axes, panel, sets)
    nodes = sorted({r.layout.num_nodes for *_, rows in series for r in rows} | {k.num_nodes or 1 for k in sets})
    axes.set_xscale('log', base=2)
    axes.minorticks_off()
    ticks = drawing.ticks(nodes)
    axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
    if drawing.differ_tenfold(values):
        drawing.scale_up(axes.yaxis, panel.unit, values)
    else:
        axes.set_ylabel(panel.unit)
        axes.set_ylim(bottom=0)
    axes.margins(x=0.08)


def _notes(answer: Answer, sets: Sequence[RunSet]) -> list[str]:
    refused = [r.layout.name for r in answer.rows if r.refusal]
    batches = {(k.num_nodes, k.num_units): k.recipe.global_batch_size for k in sets}
    other = [r.layout.name for r in answer.rows if (not r.measured or r.minutes and not r.measured_minutes)
             and (r.layout.num_nodes, r.layout.num_units) in batches]
    others = ' and others' if refused[_MAX_REFUSED:] else ''
    return [*([f'Refused: {", ".join(refused[:_MAX_REFUSED])}{others}'] if refused else []),
            *([f'Measured with another batch or recipe: {", ".join(other)}'] if other else [])]


def draw_prediction(answer: Answer) -> Picture | None:
    """Return the picture; None if all layouts are refused."""
    if not answer.predicted:
        return None
    series, max_nodes = _series(answer), max(r.layout.num_nodes for r in answer.predicted)
    sets = [k for k in answer.source.sets if k.num_nodes and k.num_nodes <= max_nodes][:_MAX_MEASURED]
    with matplotlib.rc_context(STYLE):
        panels = _panels(answer)
        figure = Figure(figsize=(drawing.WIDTH_IN, _HEIGHT_IN))
        title = f'Predicted {panels[0].unit} and {panels[1].unit} against nodes'
        picture = Picture('prediction', title, printable(heading(answer)), figure, _notes(answer, sets))
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, panel in ((upper, panels[0]), (lower, panels[1])):
            _draw_panel(picture, axes, panel, series, sets)
        lower.set_xlabel('nodes (logarithmic)')
        has_interval = any(panels[0].interval(r) for r in answer.predicted)
        drawing.legend(picture, [
            *(Line2D([], [], color=colour, marker='o', markersize=5, linewidth=1, label=f'predicted, {units} per node')
              for colour, units, _ in series),
            *([drawing.mark_of('|', '80 % interval', 12, 1.6, drawing.GRID)] if has_interval else []),
            *([drawing.mark_of('x', 'measured', 7, 1.6)] if sets else [])])
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
