"""Which pictures does a study have? Draws them with matplotlib, for whoever reads the page or shows a slide."""
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.metrics import read_learning_rates
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.telemetry import read_telemetry
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.report_picture import GRID, INK, STYLE, Picture
from mlperf_rn50.study.report_tables import data_name, heading, unit_name
from mlperf_rn50.study.scaling import Study

# Okabe and Ito's colours, which the colour-blind tell apart, on white and on black.
_COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8a8f98')


def _picture(study: Study, name: str, title: str, num_axes: int) -> tuple[Picture, Sequence[Axes]]:
    """A drawing that says by itself what it is about."""
    figure = Figure(figsize=(8.4 if num_axes == 2 else 6.8, 3.6), layout='constrained')
    figure.suptitle(printable(heading(study)), fontsize=9)
    return Picture(name, title, figure), figure.subplots(1, num_axes, squeeze=False)[0]


def labels(study: Study) -> list[str]:
    """A short name of each system: its number of nodes where that tells them apart."""
    nodes = [s.num_nodes for s in study.systems]
    if None in nodes or len(set(nodes)) < len(nodes):
        return [printable(s.name) for s in study.systems]
    return [f'{n} node{"" if n == 1 else "s"}' for n in nodes]


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _name(run: Run) -> str:
    return printable(f'{run.path.parent.name}/{run.path.name}')


def _categories(axes: Axes, study: Study) -> None:
    names = labels(study)
    long = max(map(len, names)) > 10
    axes.set_xticks(range(len(names)), names, rotation=20 if long else 0, ha='right' if long else 'center')
    axes.grid(axis='x', visible=False)
    axes.set_xlim(-0.6, len(names) - 0.4)


def _bars_and_runs(picture: Picture, axes: Axes, study: Study, total: Callable[[System], float | None],
                   of_run: Callable[[Run], float | None], unit: str) -> None:
    """A bar per system, and every run as a point: filled where it converged, a cross where it did not."""
    for i, (system, label) in enumerate(zip(study.systems, labels(study))):
        if (height := total(system)) is not None:
            bar = axes.bar(i, height, 0.6, color=_colour(i), alpha=0.45)[0]
            picture.tip(bar, f'{label}: {height:.2f} {unit}')
        for k, run in enumerate(system.runs):
            value = of_run(run)
            if value is None:
                continue
            is_done = run.status == 'converged'
            x = i + 0.4 * ((k + 0.5) / len(system.runs) - 0.5)
            points = axes.scatter([x], [value], s=22, color=_colour(i), marker='o' if is_done else 'x')
            picture.tip(points, f'{_name(run)}: {value:.2f} {unit}, {run.status}')
    _categories(axes, study)
    axes.set_ylim(bottom=0)


def _last_epoch(run: Run) -> float | None:
    return run.evaluations[-1].epoch if run.evaluations else None


def draw_time_and_epochs(study: Study) -> Picture:
    """Time to train and epochs to converge per system."""
    picture, (left, right) = _picture(study, 'time_and_epochs', 'Time to train and epochs to converge', 2)
    _bars_and_runs(picture, left, study, lambda s: s.time_s / 60 if s.time_s else None,
                   lambda r: r.time_to_train_s / 60 if r.time_to_train_s is not None else None, 'min')
    left.set(title='Time to train', ylabel='minutes')
    _bars_and_runs(picture, right, study, lambda s: s.epochs_mean, _last_epoch, 'epochs')
    right.set(title='Epochs to converge', ylabel='epochs')
    return picture


def draw_speedup(study: Study) -> Picture | None:
    """Speed-up against accelerators, with the ideal line; None with nothing to compare."""
    known = [(c.system.num_units, c.speedup, c, i) for i, c in enumerate(study.comparisons) if c and c.system.num_units]
    base = study.baseline.num_units
    if len(known) < 2 or not base:
        return None
    picture, (axes,) = _picture(study, 'speedup', 'Speed-up', 1)
    units = sorted({k[0] for k in known} | {base})
    axes.plot(units, [u / base for u in units], '--', color=GRID, label='ideal')
    axes.plot([k[0] for k in known], [k[1] for k in known], color=_colour(0), linewidth=1)
    for u, value, c, i in known:
        points = axes.scatter([u], [value], s=34, color=_colour(i), zorder=3)
        share = f', efficiency {100 * c.efficiency:.0f} %' if c.efficiency is not None else ''
        units_of = unit_name(study) if u > 1 else unit_name(study)[:-1]
        picture.tip(points, f'{labels(study)[i]}: {value:.2f} times as fast on {u} {units_of}{share}')
        axes.annotate(f'{value:.1f}', (u, value), xytext=(5, 5), textcoords='offset points')
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
    axes.minorticks_off()
    axes.set_xticks(units, [str(u) for u in units])
    axes.set(title=f'Speed-up against {printable(study.baseline.name)}', xlabel=unit_name(study),
             ylabel='times as fast')
    axes.legend()
    return picture


def _draw_curve(picture: Picture, axes: Axes, xs: list[float], run: Run, colour: str, label: str | None) -> None:
    """The accuracies of a run, a point each."""
    points = run.evaluations
    axes.plot(xs, [e.accuracy for e in points], color=colour, linewidth=0.8, alpha=0.7, label=label)
    marks = axes.scatter(xs, [e.accuracy for e in points], s=8, color=colour,
                         marker='o' if run.status == 'converged' else 'x')
    picture.tip(marks, *(f'{_name(run)}: {100 * e.accuracy:.2f} % after {e.epoch} epochs'
                         + (f', {e.time_s / 60:.2f} min' if e.time_s is not None else '') for e in points))


def draw_accuracy(study: Study) -> Picture | None:
    """Accuracy of every run against time and against epochs."""
    if not any(r.evaluations for s in study.systems for r in s.runs):
        return None
    picture, (left, right) = _picture(study, 'accuracy', f'Top-1 on {data_name(study.baseline)}, every run', 2)
    for i, (system, label) in enumerate(zip(study.systems, labels(study))):
        for k, run in enumerate(r for r in system.runs if r.evaluations):
            times = [e.time_s / 60 for e in run.evaluations if e.time_s is not None]
            if len(times) == len(run.evaluations):  # without run_start there is no time
                _draw_curve(picture, left, times, run, _colour(i), None)
            _draw_curve(picture, right, [float(e.epoch) for e in run.evaluations], run, _colour(i),
                        None if k else label)
    for axes, unit in ((left, 'minutes since run_start'), (right, 'epochs')):
        if study.baseline.target_accuracy is not None:
            axes.axhline(study.baseline.target_accuracy, color=INK, linewidth=0.8, linestyle=':')
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.set(xlabel=unit, ylabel=f'Top-1, {printable(data_name(study.baseline))}')
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(loc='lower right')
    return picture


def draw_throughput(study: Study) -> Picture | None:
    """Throughput with its ideal, and what becomes of it."""
    known = [(i, s, r) for i, (s, r) in enumerate(zip(study.systems, study.rates)) if r]
    if not known:
        return None
    picture, (left, right) = _picture(study, 'throughput', 'Throughput and efficiency', 2)
    names = labels(study)
    for i, _, rate in known:
        picture.tip(left.bar(i, rate.ideal, 0.6, fill=False, edgecolor=GRID, linestyle='--')[0],
                    f'{names[i]}: ideal {rate.ideal:,.1f} images/s')
        picture.tip(left.bar(i, rate.real, 0.6, color=_colour(i), alpha=0.7)[0],
                    f'{names[i]}: {rate.real:,.1f} images/s, {100 * rate.efficiency:.0f} % of the ideal')
        picture.tip(right.bar(i - 0.2, rate.efficiency, 0.38, color=_colour(0), alpha=0.7)[0],
                    f'{names[i]}: {100 * rate.efficiency:.1f} % of the ideal throughput')
        comparison = study.comparisons[i]
        if comparison and comparison.efficiency is not None:
            picture.tip(right.bar(i + 0.2, comparison.efficiency, 0.38, color=_colour(1), alpha=0.7)[0],
                        f'{names[i]}: {100 * comparison.efficiency:.1f} % of the ideal speed-up')
    left.set(title='Training throughput (dashed: ideal)', ylabel='images/s')
    left.yaxis.set_major_formatter(lambda value, _: f'{value:,.0f}')
    right.set(title='Efficiency')
    right.bar(0, 0, color=_colour(0), alpha=0.7, label='throughput')
    right.bar(0, 0, color=_colour(1), alpha=0.7, label='time to train')
    right.yaxis.set_major_formatter(PercentFormatter(1, 0))
    right.legend()
    for axes in (left, right):
        _categories(axes, study)
    return picture


def draw_time_parts(study: Study) -> Picture | None:
    """Where the time goes, per system."""
    known = [(i, s.parts) for i, s in enumerate(study.systems) if s.parts]
    if not known:
        return None
    picture, (axes,) = _picture(study, 'time_parts', 'Where the time goes', 1)
    names = labels(study)
    kinds = [('initialisation, before the clock', 'init_s'), ('first epoch', 'first_s'), ('later epochs', 'training_s'),
             ('evaluation', 'evaluation_s'), ('other', 'other_s')]
    for i, parts in known:
        total, left = parts.on_clock_s + (parts.init_s or 0.0), 0.0
        for k, (kind, name) in enumerate(kinds):
            seconds = getattr(parts, name) or 0.0
            bar = axes.barh(i, seconds / total, 0.6, left, color=_colour((k + 4) % 5), alpha=0.75)[0]
            picture.tip(bar, f'{names[i]}: {kind} {seconds:,.1f} s, {100 * seconds / total:.1f} %')
            left += seconds / total
    for k, (kind, _) in enumerate(kinds):
        axes.barh(0, 0, color=_colour((k + 4) % 5), alpha=0.75, label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis='y', visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set(xlabel='share of initialisation and time to train')
    picture.figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    return picture


def draw_learning_rate(study: Study) -> Picture | None:
    """The learning rate over time, where it was written down."""
    curves = [(i, r, rates) for i, s in enumerate(study.systems) for r in s.runs
              if len(rates := read_learning_rates(r)) > 1]
    if not curves:
        return None
    picture, (axes,) = _picture(study, 'learning_rate', 'Learning rate as it was applied', 1)
    seen: set[int] = set()
    for i, run, rates in curves:
        xs, ys = [t / 60 for t, _ in rates], [lr for _, lr in rates]
        axes.plot(xs, ys, color=_colour(i), linewidth=0.8, label=None if i in seen else labels(study)[i])
        picture.tip(axes.scatter(xs, ys, s=5, color=_colour(i)),
                    *(f'{_name(run)}: learning rate {lr:.4g} after {x:.2f} min' for x, lr in zip(xs, ys)))
        seen.add(i)
    axes.set(xlabel='minutes since run_start', ylabel='learning rate')
    axes.legend()
    return picture


def draw_telemetry(study: Study, index: int) -> Picture | None:
    """Disk and network of every node over a system's first run that has them, a panel each; epochs and evaluations."""
    system = study.systems[index]
    run, nodes = next(((r, nodes) for r in system.runs if (nodes := read_telemetry(r))), (None, []))
    if run is None:
        return None
    figure = Figure(figsize=(6.8, 1.4 + 1.7 * len(nodes)), layout='constrained')
    figure.suptitle(printable(f'{_name(run)}, {data_name(system)}'), fontsize=9)
    picture = Picture(f'telemetry_{index}', f'Disk and network of every node, {printable(system.name)}', figure)
    panels = figure.subplots(len(nodes), 1, squeeze=False, sharex=True)[:, 0]
    for axes, node in zip(panels, nodes):
        for k, (label, rates) in enumerate(node.rates.items()):
            line, = axes.plot(node.times_s, [r / 1e6 for r in rates], color=_colour(k), linewidth=1, label=label)
            picture.tip(line, f'{printable(node.host)}: {label}, at most {max(rates) / 1e6:,.1f} MB/s')
        for stretch in run.stretches:
            axes.axvline(stretch.start_s, color=GRID, linewidth=0.8, linestyle='--')
        for e in run.evaluations:
            if e.start_s is not None and e.stop_s is not None:
                axes.axvspan(e.start_s, e.stop_s, color=GRID, alpha=0.4, linewidth=0)
        axes.set(title=printable(node.host), ylabel='MB/s')
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel('seconds since run_start (dashed: an epoch begins; grey: evaluation)')
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
    return picture


def draw_study(study: Study) -> list[Picture]:
    """All pictures that a study has something to show in."""
    with matplotlib.rc_context(STYLE):
        drawn = [draw(study) for draw in (draw_time_and_epochs, draw_speedup, draw_accuracy, draw_throughput,
                                          draw_time_parts, draw_learning_rate)]
        drawn += [draw_telemetry(study, i) for i in range(len(study.systems))]
    return [p for p in drawn if p]
