"""Plot measured and predicted time and cost against the number of nodes, and write a prediction to a folder."""
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.prediction import Prediction
from mlperf_rn50.analysis.predict.tables import heading, render_json, render_tables
from mlperf_rn50.analysis.report import picture as drawing
from mlperf_rn50.analysis.report.picture import COLOURS, INK, STYLE, Picture
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.files import write_atomically, writing_folder
from mlperf_rn50.mllog.events import printable

_MAX_MEASURED = 50  # maximum measured sets drawn
_Panel = tuple[str, str, Callable[[Prediction | RunSet], float | None]]  # unit, format, and quantity shown


def _panels(answer: Answer) -> tuple[_Panel, _Panel]:
    """Return panels of time and cost or, if no minutes are predicted, of step time and throughput."""
    if not answer.timed:
        return ('ms per step', '.1f', lambda x: x.step_s and 1e3 * x.step_s), (
            'images/s', ',.1f', lambda x: x.images_per_s)
    price = answer.request.price
    return ('minutes', '.2f', lambda x: x.minutes), (
        'node-hours' if price is None else f'cost, {price:g} per node-hour', '.2f',
        lambda x: x.node_hours and x.node_hours * (price or 1.0))


def _draw_panel(picture: Picture, axes: Axes, panel: _Panel, answer: Answer, sets: Sequence[RunSet]) -> None:
    (unit, form, value), rows = panel, sorted(answer.predicted, key=lambda r: r.layout.num_nodes)
    shown: list[float] = []
    axes.set_xscale('log', base=2)
    for k, per_node in enumerate(dict.fromkeys(r.layout.units_per_node for r in rows)):
        points = [(r, v, (unit == 'minutes' and r.interval) or (v, v)) for r in rows
                  if r.layout.units_per_node == per_node and (v := value(r)) is not None]
        bars = [[v - low for _, v, (low, _) in points], [high - v for _, v, (_, high) in points]]
        line = axes.errorbar([r.layout.num_nodes for r, *_ in points], [v for _, v, _ in points],
                             bars if unit == 'minutes' else None, fmt='o-', linewidth=1, markersize=5, elinewidth=1.6,
                             color=COLOURS[k] if k < len(COLOURS) else INK, capsize=5,
                             label=f'predicted, {per_node} per node')[0]
        picture.tip(line, *(f'{r.layout.name}: {v:{form}} {unit} predicted' + (
            f', 80 % interval {low:{form}} to {high:{form}}' if low < high else '') for r, v, (low, high) in points))
        shown += [x for _, v, span in points for x in (v, *span) if x > 0]
    if measured := [(s, v) for s in sets if (v := value(s)) is not None]:
        line, = axes.plot([s.num_nodes or 1 for s, _ in measured], [v for _, v in measured], 'x', color=INK,
                          markersize=7, markeredgewidth=1.6, label='measured')
        picture.tip(line, *(f'{s.name}: {v:{form}} {unit} measured, batch {s.recipe.global_batch_size:,}'
                            for s, v in measured))
        shown += [v for _, v in measured]
    ticks = drawing.ticks(sorted({r.layout.num_nodes for r in rows} | {s.num_nodes or 1 for s in sets}))
    axes.minorticks_off()
    axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
    axes.margins(x=0.08)
    if drawing.differ_tenfold(shown):
        drawing.scale_up(axes.yaxis, unit, shown)
    else:
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)


def draw_prediction(answer: Answer) -> Picture | None:
    """Return the picture; None if all layouts are refused."""
    if not answer.predicted:
        return None
    max_nodes = max(r.layout.num_nodes for r in answer.predicted)
    sets = [] if answer.source.is_changed else [
        s for s in answer.source.sets if s.num_nodes and s.num_nodes <= max_nodes][:_MAX_MEASURED]
    refused, panels = [r.layout.name for r in answer.rows if r.refusal], _panels(answer)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(drawing.WIDTH_IN, 5.0))
        title = f'Predicted {panels[0][0]} and {panels[1][0]} against nodes. Bars: 80 % interval'
        picture = Picture('prediction', title, printable(heading(answer)), figure,
                          [f'Refused: {", ".join(refused)}'] if refused else [])
        both = figure.subplots(2, 1)
        for axes, panel in zip(both, panels):
            _draw_panel(picture, axes, panel, answer, sets)
        both[0].tick_params(labelbottom=False)
        both[1].set_xlabel('nodes (logarithmic)')
        drawing.legend(picture, both[0].get_legend_handles_labels()[0])
    return picture


def dump_prediction(answer: Answer, folder: Path) -> Path:
    """Write prediction.json, prediction.md and the plot, if any; return the folder; raise ConfigError on failure."""
    with writing_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / 'prediction.json', render_json(answer) + '\n')
        write_atomically(folder / 'prediction.md', render_tables(answer, is_markdown=True) + '\n')
        if picture := draw_prediction(answer):
            drawing.dump_picture(picture, folder, '')
    return folder
