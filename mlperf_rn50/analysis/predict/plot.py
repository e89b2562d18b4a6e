"""Plot measured and predicted time against the number of nodes, and write a prediction to a folder."""
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mlperf_rn50.analysis.predict.answer import Answer
from mlperf_rn50.analysis.predict.prediction import Prediction
from mlperf_rn50.analysis.predict.tables import heading, render_json, render_tables
from mlperf_rn50.analysis.report import picture as drawing
from mlperf_rn50.analysis.report.picture import COLOURS, INK, STYLE, Picture
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.files import write_atomically, writing_folder
from mlperf_rn50.mllog.events import printable


def draw_prediction(answer: Answer) -> Picture | None:
    """Plot the minutes or, if none are predicted, the time of a step against nodes; None if all are refused."""
    rows = sorted(answer.timed or answer.predicted, key=lambda r: r.layout.num_nodes)
    if not rows:
        return None
    unit = 'minutes' if answer.timed else 'ms per step'

    def value(x: Prediction | RunSet) -> float:
        return (x.minutes if answer.timed else 1e3 * (x.step_s or 0.0)) or 0.0
    sets = [s for s in answer.source.sets if value(s) and (s.num_nodes or 0) <= rows[-1].layout.num_nodes
            and not answer.request.what_if]
    refused = ', '.join(r.layout.name for r in answer.rows if r.refusal)
    shown = [value(s) for s in sets]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(drawing.WIDTH_IN, 3.2))
        axes = figure.subplots()
        picture = Picture('prediction', f'Predicted {unit} against nodes', printable(heading(answer)), figure, [
            *['Bars: 80 % interval'] * bool(answer.timed), *[f'Refused: {refused}'] * bool(refused)])
        axes.set_xscale('log', base=2)
        for k, per_node in enumerate(dict.fromkeys(r.layout.units_per_node for r in rows)):
            points = [(r, value(r), *(r.interval or (value(r), value(r)))) for r in rows
                      if r.layout.units_per_node == per_node]
            line = axes.errorbar([r.layout.num_nodes for r, *_ in points], [v for _, v, *_ in points],
                                 [[v - low for _, v, low, _ in points], [high - v for _, v, _, high in points]],
                                 fmt='o-', linewidth=1, markersize=5, elinewidth=1.6, capsize=5,
                                 color=COLOURS[k] if k < len(COLOURS) else INK,
                                 label=f'predicted, {per_node} per node')[0]
            picture.tip(line, *(f'{r.layout.name}: {v:,.2f} {unit} predicted' + (
                f', 80 % interval {low:,.2f} to {high:,.2f}' if low < high else '') for r, v, low, high in points))
            shown += [x for _, *values in points for x in values]
        if sets:
            line, = axes.plot([s.num_nodes or 1 for s in sets], [value(s) for s in sets], 'x', color=INK, markersize=7,
                              markeredgewidth=1.6, label='measured')
            picture.tip(line, *(f'{s.name}: {value(s):,.2f} {unit} measured, batch {s.recipe.global_batch_size:,}'
                                for s in sets))
        ticks = drawing.ticks(sorted({r.layout.num_nodes for r in rows} | {s.num_nodes or 1 for s in sets}))
        axes.minorticks_off()
        axes.set_xticks(ticks, [f'{n:,}' for n in ticks])
        axes.set_xlabel('nodes (logarithmic)')
        if drawing.differ_tenfold(shown):
            drawing.scale_up(axes.yaxis, unit, shown)
        else:
            axes.set(ylabel=unit, ylim=(0, None))
        drawing.legend(picture, axes.get_legend_handles_labels()[0])  # type: ignore[arg-type]
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
