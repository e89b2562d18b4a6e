"""Which pictures does a study have? Draws them with matplotlib, for whoever reads the page or shows a slide.

A colour is a system's, the same in all pictures of a study; what parts, rates and devices are has palettes of its own.
A picture shows as many systems and runs as an eye can tell apart, and says which.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.metrics import read_learning_rates
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.telemetry import NodeTelemetry, find_telemetry, read_telemetry
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.report_picture import (
    COLOURS,
    GRID,
    INK,
    STYLE,
    WIDTH_IN,
    Picture,
    differ_tenfold,
    legend,
    mark_of,
    plain,
    scale_up,
    ticks,
)
from mlperf_rn50.study.report_tables import heading, unit_name
from mlperf_rn50.study.scaling import Study
from mlperf_rn50.study.text import data_name, percent, plural, short, some, thin

_PARTS = (('initialisation, before the clock', 'init_s', 'none', '////'), ('first epoch', 'first_s', '#4a5f78', ''),
          ('later epochs', 'training_s', '#b4c4d4', ''), ('evaluation', 'evaluation_s', '#9c5563', ''),
          ('other', 'other_s', '#e3dcb4', ''))
_DEVICES = (('#a0764a', '-', 2.4), (INK, ':', 1.2), ('#5f8299', '-', 2.4), (INK, '--', 1))  # as in telemetry.KINDS
_MARKS = {'converged': 'o', 'running': '>'}  # of a run; any other ended short of the target
_MEANINGS = {'o': 'converged', 'x': 'did not converge', '>': 'still running'}  # of marks
_MINUTES = 'minutes since run_start'
_MAX_SYSTEMS, _MAX_RUNS, _MAX_CURVES, _MAX_MARKS, _MAX_POINTS = 24, 240, 60, 1000, 200
_MAX_TELEMETRY, _MAX_NODES, _MAX_SAMPLES = 6, 8, 1000
_MAX_NAME, _MAX_NAMES = 44, 5
_ROW_IN = 0.46
_IDEAL: dict[str, Any] = {'fill': False, 'edgecolor': GRID, 'linestyle': '--'}  # the style of a bar


@dataclass(frozen=True)
class _Shown:
    """What pictures show of a system: its name and colour."""

    place: int  # in the study
    system: System
    label: str
    colour: str


@dataclass(frozen=True)
class _Scene:
    """What pictures show of a study, and what they do not."""

    study: Study
    shown: tuple[_Shown, ...]
    notes: tuple[str, ...]

    @property
    def base_label(self) -> str:
        """The name of the system that others are compared with."""
        return next((s.label for s in self.shown if s.system is self.study.baseline), self.study.baseline.name)

    def picture(self, name: str, title: str, height_in: float) -> tuple[Picture, Axes]:
        """An empty drawing."""
        figure = Figure(figsize=(WIDTH_IN, height_in))
        return Picture(name, title, heading(self.study), figure, list(self.notes)), figure.add_subplot()

    def rows(self, name: str, title: str) -> tuple[Picture, Axes]:
        """A drawing with a row for each system, its name above it."""
        picture, axes = self.picture(name, title, _ROW_IN * len(self.shown) + 0.9)
        for row, s in enumerate(self.shown):
            axes.text(0, row - 0.3, s.label, transform=axes.get_yaxis_transform(), va='bottom')
        axes.set_ylim(len(self.shown) - 0.5, -0.75)
        axes.set_yticks([])
        return picture, axes


def _labels(study: Study) -> list[str]:
    """A short name of each system: its number of nodes where that tells them apart."""
    nodes = {s.num_nodes: None for s in study.systems if s.num_nodes is not None}
    return [plural(n, 'node') for n in nodes] if len(nodes) == len(study.systems) else [
        printable(s.name) for s in study.systems]


def _make_scene(study: Study) -> _Scene:
    """The systems that are sets: all of them, or the baseline and the fastest of very many."""
    names, notes = _labels(study), []
    places = [i for i, s in enumerate(study.systems) if s.refusal is None]
    if refused := [names[i] for i, s in enumerate(study.systems) if s.refusal is not None]:
        notes.append(f'Not drawn, since their runs are no set: {some(refused, _MAX_NAMES)}')
    shown = _spread(study, places, _MAX_SYSTEMS)
    if len(shown) < len(places):
        notes.append(f'Drawn are {len(shown)} of {len(places)} systems, evenly from the fastest to the slowest')
    colours = dict(zip(_spread(study, shown, len(COLOURS)), COLOURS))
    return _Scene(study, tuple(_Shown(i, study.systems[i], short(names[i], _MAX_NAME), colours.get(i, INK))
                               for i in shown), tuple(notes))


def _spread(study: Study, places: Sequence[int], most: int) -> list[int]:
    """At most so many of some systems of a study, evenly from the fastest to the slowest, the baseline among them."""
    if len(places) <= most:
        return list(places)
    base = [i for i in places if study.systems[i] is study.baseline]
    others = sorted((i for i in places if i not in base), key=lambda i: study.systems[i].time_s or inf)
    return sorted([*base, *thin(others, most - len(base))])


def _sampled(picture: Picture, scene: _Scene, most: int) -> list[Sequence[Run]]:
    """The runs of each system that a picture with room for so many shows; says where they are not all."""
    each = max(most // max(len(scene.shown), 1), 2)
    if any(len(s.system.runs) > each for s in scene.shown):
        picture.notes.append(f'Of each system at most {each} runs are drawn, evenly from the fastest to the slowest')
    return [thin(sorted(s.system.runs, key=lambda r: inf if r.time_to_train_s is None else r.time_to_train_s)
                 if len(s.system.runs) > each else s.system.runs, each) for s in scene.shown]


def _name(system: System, run: Run) -> str:
    return f'{short(system.name, 100)}/{short(run.path.name, _MAX_NAME)}'


def _explain_marks(runs: Sequence[Run]) -> list[Line2D]:
    """What the marks of runs mean, where there is more than one kind."""
    found = _by_mark(runs)
    return [mark_of(mark, text) for mark, text in _MEANINGS.items() if mark in found] if found.keys() - {'o'} else []


def _by_mark(runs: Sequence[Run]) -> dict[str, list[int]]:
    """The places of runs, by the marks of how they ended."""
    found: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        found.setdefault(_MARKS.get(run.status, 'x'), []).append(k)
    return found


def _filled(colour: str) -> dict[str, Any]:
    """The style of a bar of what was measured."""
    return {'facecolor': (colour, 0.3), 'edgecolor': colour}


def _bar(picture: Picture, axes: Axes, row: float, value: float, text: str, height: float = 0.5, left: float = 0.0,
         **style) -> None:
    picture.tip(axes.barh(row, value, height, left, **style)[0], text)


def _end(picture: Picture, axes: Axes, row: float, value: float, text: str, size: float, colour: str) -> None:
    """Draw the end of a bar: on a logarithmic axis a bar has no foot."""
    picture.tip(axes.plot(value, row, '|', color=colour, markersize=size, markeredgewidth=2.5)[0], text)


def _draw_values(scene: _Scene, name: str, title: str, unit: str, total: Callable[[System], float | None],
                 of_run: Callable[[Run], float | None]) -> Picture:
    """The value of each system as a bar, of each run as a point."""
    picture, axes = scene.rows(name, title)
    sampled = _sampled(picture, scene, _MAX_RUNS)
    sizes = [total(s.system) for s in scene.shown]
    points = [[(r, v) for r in runs if (v := of_run(r)) is not None] for runs in sampled]
    values = [v for v in (*sizes, *(v for pairs in points for _, v in pairs)) if v is not None]
    is_log = differ_tenfold(values)
    for row, (s, size, pairs) in enumerate(zip(scene.shown, sizes, points)):
        if size is not None:
            text = f'{s.label}: {size:.2f} {unit}'
            if is_log:
                _end(picture, axes, row, size, text, 26, s.colour)
            else:
                _bar(picture, axes, row, size, text, **_filled(s.colour))
        for mark, places in _by_mark([r for r, _ in pairs]).items():
            drawn, = axes.plot([pairs[k][1] for k in places],
                               [row + 0.38 * ((k + 0.5) / len(pairs) - 0.5) for k in places], mark, color=s.colour,
                               markersize=4.5 if len(pairs) <= 40 else 2.5)
            picture.tip(drawn, *(f'{_name(s.system, r)}: {v:.2f} {unit}, {r.status}'
                                 for r, v in (pairs[k] for k in places)))
    if is_log:
        scale_up(axes.xaxis, unit, values)
    else:
        axes.set(xlabel=unit, xlim=(0, max(values, default=0.0) * 1.04 or 1.0))
    marks = _explain_marks([r for pairs in points for r, _ in pairs])
    legend(picture, [mark_of('|', 'system', 12, 2.5), *marks] if is_log else marks)
    return picture


def draw_time_to_train(scene: _Scene) -> Picture:
    """Time to train of every system and run."""
    return _draw_values(scene, 'time_to_train', 'Time to train', 'minutes',
                        lambda s: s.time_s / 60 if s.time_s else None,
                        lambda r: r.time_to_train_s / 60 if r.time_to_train_s is not None else None)


def draw_epochs(scene: _Scene) -> Picture:
    """Epochs to converge of every system and run."""
    return _draw_values(scene, 'epochs', 'Epochs to converge', 'epochs', lambda s: s.epochs_mean,
                        lambda r: r.evaluations[-1].epoch if r.evaluations else None)


def draw_speedup(scene: _Scene) -> Picture | None:
    """Speed-up against accelerators, with the ideal line; None with nothing to compare."""
    study = scene.study
    known = [(s, s.system.num_units, c) for s in scene.shown
             if (c := study.comparisons[s.place]) and s.system.num_units]
    base = study.baseline.num_units
    if len(known) < 2 or not base:
        return None
    picture, axes = scene.picture('speedup', 'Speed-up', 3.2)
    units = sorted({u for _, u, _ in known} | {base})
    axes.plot(units, [u / base for u in units], '--', color=GRID, linewidth=1.2)
    for s, u, c in known:
        share = f', efficiency {100 * c.efficiency:.0f} %' if c.efficiency is not None else ''
        units_of = unit_name(study) if u > 1 else unit_name(study)[:-1]
        picture.tip(axes.plot(u, c.speedup, 'o', color=s.colour, markersize=6)[0],
                    f'{s.label}: {c.speedup:.2f} times as fast on {u} {units_of}{share}')
        if len(known) <= len(COLOURS):
            axes.annotate(f'{c.speedup:.1f}', (u, c.speedup), xytext=(6, -3), textcoords='offset points', va='top')
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
    axes.minorticks_off()
    axes.set_xticks(ticks(units), [f'{u:,}' for u in ticks(units)])
    axes.margins(x=0.1, y=0.1)
    axes.set(xlabel=f'{unit_name(study)} (logarithmic)',
             ylabel=f'times as fast as {short(scene.base_label, 24)}')
    legend(picture, [Line2D([], [], color=GRID, linestyle='--', label='ideal'),
                     *_explain_colours([s for s, _, _ in known])])
    return picture


def _explain_colours(shown: Sequence[_Shown]) -> list[Line2D]:
    """Which colour is which system's."""
    names = dict.fromkeys((s.colour, s.label if s.colour != INK else 'other systems') for s in shown)
    return [Line2D([], [], color=colour, marker='o', markersize=4.5, linewidth=1, label=label)
            for colour, label in sorted(names, key=lambda pair: pair[0] == INK)]


_Points = Sequence[tuple[float, float, str]]  # x, y and text


@dataclass(frozen=True)
class _Curve:
    """A curve of a run."""

    run: Run
    points: _Points


def _draw_system(picture: Picture, axes: Axes, shown: _Shown, curves: Sequence[_Curve], has_all_marks: bool) -> None:
    """The curves of a system, one artist for those with the same mark; marks at every point or at the last ones."""
    for mark, places in _by_mark([c.run for c in curves]).items():
        xs: list[float] = []
        ys: list[float] = []
        ends = []
        for points in (curves[k].points for k in places):
            xs += [*(x for x, _, _ in points), nan]
            ys += [*(y for _, y, _ in points), nan]
            ends.append(len(xs) - 2)
        line, = axes.plot(xs, ys, color=shown.colour, linewidth=0.8, marker=mark, markersize=3,
                          markevery=None if has_all_marks else ends)
        picture.tip(line, *(text for k in places for _, _, text in curves[k].points[0 if has_all_marks else -1:]))


def _draw_target(scene: _Scene, axes: Axes) -> list[Line2D]:
    """Names the accuracy, and draws the target, where there is one; returns its line."""
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_ylabel(f'Top-1, {short(printable(data_name(scene.study.baseline.other_dataset)), _MAX_NAME)}')
    target = scene.study.baseline.target_accuracy
    if target is None:
        return []
    return [axes.axhline(target, color=INK, linewidth=1, linestyle=':', label=f'target {100 * target:.4g} %')]


def _draw_curves(scene: _Scene, picture: Picture, axes: Axes, points_of: Callable[[Run], _Points], x_name: str,
                 lines: Sequence[Line2D] = ()) -> list[_Curve]:
    """The curves of each system's runs, with a legend that names other lines, too; minutes may need a log scale."""
    systems = [[_Curve(r, [(x, y, f'{_name(s.system, r)}: {text}') for x, y, text in points])
                for r in runs if (points := points_of(r))]
               for s, runs in zip(scene.shown, _sampled(picture, scene, _MAX_CURVES))]
    whole = [c for of_system in systems for c in of_system]
    if is_log := x_name == _MINUTES and differ_tenfold([c.points[-1][0] for c in whole]):  # which cannot show 0
        later = [[_Curve(c.run, [p for p in c.points if p[0] > 0]) for c in of_system] for of_system in systems]
        systems = [[c for c in of_system if c.points] for of_system in later]
    drawn = [c for of_system in systems for c in of_system]
    has_all_marks = sum(len(c.points) for c in drawn) <= _MAX_MARKS
    if not has_all_marks:
        picture.notes.append('Marked is the last point of each curve')
    for shown, of_system in zip(scene.shown, systems):
        _draw_system(picture, axes, shown, of_system, has_all_marks)
    legend(picture, [*_explain_colours([s for s, of_system in zip(scene.shown, systems) if of_system]), *lines,
                     *_explain_marks([c.run for c in drawn])])
    if is_log:
        scale_up(axes.xaxis, x_name, [c.points[i][0] for c in drawn for i in (0, -1)])
    else:
        axes.set_xlabel(x_name)
    return whole


def _accuracies_at_minutes(run: Run) -> _Points:
    """The evaluations of a run; none without run_start, where there is no time."""
    points = [(e.time_s / 60, e.accuracy, f'{percent(e.accuracy)} after {e.time_s / 60:.2f} min, {e.epoch} epochs')
              for e in run.evaluations if e.time_s is not None]
    return points if len(points) == len(run.evaluations) else []


def _accuracies_at_epochs(run: Run) -> _Points:
    return [(e.epoch, e.accuracy, f'{percent(e.accuracy)} after {e.epoch} epochs'
             + (f', {e.time_s / 60:.2f} min' if e.time_s is not None else '')) for e in run.evaluations]


def _learning_rates(run: Run) -> _Points:
    rates = read_learning_rates(run)
    return [(t / 60, lr, f'learning rate {lr:.4g} after {t / 60:.2f} min')
            for t, lr in thin(rates, _MAX_POINTS)] if len(rates) > 1 else []


def draw_accuracy_over_time(scene: _Scene) -> Picture | None:
    """Accuracy of every run against time."""
    picture, axes = scene.picture('accuracy_time', 'Accuracy against time', 3.4)
    curves = _draw_curves(scene, picture, axes, _accuracies_at_minutes, _MINUTES, _draw_target(scene, axes))
    return picture if curves else None


def draw_accuracy_over_epochs(scene: _Scene) -> Picture | None:
    """Accuracy of every run against epochs."""
    picture, axes = scene.picture('accuracy_epochs', 'Accuracy against epochs', 3.4)
    curves = _draw_curves(scene, picture, axes, _accuracies_at_epochs, 'epochs', _draw_target(scene, axes))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return picture if curves else None


def draw_learning_rate(scene: _Scene) -> Picture | None:
    """The learning rate over time, where it was written down."""
    picture, axes = scene.picture('learning_rate', 'Learning rate as it was applied', 3.0)
    peaks = [max(y for _, y, _ in c.points) for c in _draw_curves(scene, picture, axes, _learning_rates, _MINUTES)]
    if differ_tenfold(peaks):
        scale_up(axes.yaxis, 'learning rate', peaks)
        axes.set_ylim(bottom=min(peaks) / 30)
    else:
        axes.set_ylabel('learning rate')
    return picture if peaks else None


def draw_throughput(scene: _Scene) -> Picture | None:
    """Throughput of every system, with its ideal."""
    rates = [(row, s, r) for row, s in enumerate(scene.shown) if (r := scene.study.rates[s.place])]
    values = [v for _, _, r in rates for v in (r.ideal, r.real)]
    if not values:
        return None
    has_ideal, is_log = len(rates) > 1, differ_tenfold(values)
    picture, axes = scene.rows('throughput', 'Training throughput' + (' and its ideal' if has_ideal else ''))
    for row, s, rate in rates:
        share = f', {100 * rate.efficiency:.0f} % of the ideal' if has_ideal else ''
        ideal, real = f'{s.label}: ideal {rate.ideal:,.1f} images/s', f'{s.label}: {rate.real:,.1f} images/s{share}'
        if is_log:
            _end(picture, axes, row, rate.ideal, ideal, 18, GRID)
            picture.tip(axes.plot(rate.real, row, 'D', color=s.colour, markersize=6)[0], real)
        else:
            if has_ideal:
                _bar(picture, axes, row, rate.ideal, ideal, **_IDEAL)
            _bar(picture, axes, row, rate.real, real, **_filled(s.colour))
    if is_log:
        scale_up(axes.xaxis, 'images/s', values)
        legend(picture, [mark_of('|', 'ideal', 10, 2.5, GRID), mark_of('D', 'measured', 6)])
    else:
        axes.set_xlabel('images/s')
        axes.xaxis.set_major_formatter(plain)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        legend(picture, [Patch(label='ideal', **_IDEAL), Patch(label='measured', **_filled(INK))] if has_ideal else [])
    return picture


def draw_efficiency(scene: _Scene) -> Picture | None:
    """What becomes of the ideal throughput, and of the ideal speed-up."""
    rates = [scene.study.rates[s.place] for s in scene.shown]
    if sum(r is not None for r in rates) < 2:
        return None
    picture, axes = scene.rows('efficiency', 'Efficiency')
    for row, (s, rate) in enumerate(zip(scene.shown, rates)):
        comparison = scene.study.comparisons[s.place]
        if rate is not None:
            _bar(picture, axes, row - 0.13, rate.efficiency,
                 f'{s.label}: {100 * rate.efficiency:.1f} % of the ideal throughput', 0.24, **_filled(s.colour))
        if comparison and comparison.efficiency is not None:
            _bar(picture, axes, row + 0.13, comparison.efficiency,
                 f'{s.label}: {100 * comparison.efficiency:.1f} % of the ideal speed-up', 0.24, fill=False,
                 edgecolor=s.colour, hatch='/////')
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_xlabel(f'share of the ideal, against {short(scene.base_label, _MAX_NAME)}')
    legend(picture, [Patch(label='of the throughput', **_filled(INK)),
                     Patch(fill=False, edgecolor=INK, hatch='/////', label='of the time to train')])
    return picture


def draw_time_parts(scene: _Scene) -> Picture | None:
    """Where the time goes, per system."""
    if not any(s.system.parts for s in scene.shown):
        return None
    picture, axes = scene.rows('time_parts', 'Where the time goes')
    for row, s in enumerate(scene.shown):
        if (parts := s.system.parts) is None:
            continue
        seconds = [max(getattr(parts, name) or 0.0, 0.0) for _, name, _, _ in _PARTS]
        left = 0.0
        for (kind, name, colour, hatch), part in zip(_PARTS, seconds):
            if getattr(parts, name) is None:  # not logged, which is no 0 s
                continue
            share = part / (sum(seconds) or 1.0)
            _bar(picture, axes, row, share, f'{s.label}: {kind} {part:,.1f} s, {100 * share:.1f} %', left=left,
                 facecolor=colour, edgecolor=GRID, hatch=hatch)
            left += share
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0, ' %'))
    axes.set_xlabel('share of initialisation and time to train')
    legend(picture, [Patch(facecolor=colour, edgecolor=GRID, hatch=hatch, label=kind)
                     for kind, _, colour, hatch in _PARTS])
    return picture


def _draw_node(picture: Picture, axes: Axes, run: Run, node: NodeTelemetry) -> None:
    """A node's rates over a run with its epochs and evaluations."""
    times = thin(node.times_s, _MAX_SAMPLES)
    for (colour, style, width), (label, rates) in zip(_DEVICES, node.rates.items()):
        known = [r for r in rates if not isnan(r)]
        if not known:  # no such device
            continue
        line, = axes.plot(times, [r / 1e6 for r in thin(rates, _MAX_SAMPLES)], style, color=colour, linewidth=width)
        picture.tip(line, f'{short(printable(node.host), _MAX_NAME)}: {label}, at most {max(known) / 1e6:,.1f} MB/s')
    if len(run.stretches) <= _MAX_POINTS:
        axes.vlines([s.start_s for s in run.stretches], 0, 1, GRID, (0, (1, 2)), linewidth=0.8,
                    transform=axes.get_xaxis_transform())
    for e in run.evaluations:
        if e.start_s is not None and e.stop_s is not None:
            axes.axvspan(e.start_s, e.stop_s, color=GRID, alpha=0.35, linewidth=0)
    axes.set(title=short(printable(node.host), _MAX_NAME), ylabel='MB/s')
    axes.set_ylim(bottom=0)


def draw_telemetry(scene: _Scene, shown: _Shown) -> Picture | None:
    """Disk and network of every node over a system's first run that has them, a panel each; epochs and evaluations."""
    files = find_telemetry(shown.system.folder)
    runs = shown.system.runs if files else ()
    run, nodes = next(((r, nodes) for r in runs if (nodes := read_telemetry(r, files))), (None, []))
    if run is None:
        return None
    some = nodes[:_MAX_NODES]
    figure = Figure(figsize=(WIDTH_IN, 1.2 + 1.7 * len(some)))
    picture = Picture(f'telemetry_{shown.place}', f'Disk and network of every node, {_name(shown.system, run)}',
                      heading(scene.study), figure)
    if len(some) < len(nodes):
        picture.notes.append(f'Drawn are the first {len(some)} of {len(nodes)} nodes')
    panels = figure.subplots(len(some), 1, squeeze=False, sharex=True)[:, 0]
    for axes, node in zip(panels, some):
        _draw_node(picture, axes, run, node)
    panels[-1].set_xlabel('seconds since run_start')
    legend(picture, [*(Line2D([], [], color=colour, linestyle=style, linewidth=width, label=label)
                        for (colour, style, width), label in zip(_DEVICES, some[0].rates)),
                      Line2D([], [], color=GRID, linestyle=(0, (1, 2)), label='an epoch begins'),
                      Patch(color=GRID, alpha=0.35, linewidth=0, label='evaluation')])
    return picture


def _draw_all_telemetry(scene: _Scene) -> list[Picture]:
    """The nodes of the systems that have telemetry, or of the first of them."""
    drawn = []
    for shown in scene.shown:
        if picture := draw_telemetry(scene, shown):
            drawn.append(picture)
        if len(drawn) == _MAX_TELEMETRY:
            drawn[-1].notes.append(f'Of other systems than the first {_MAX_TELEMETRY} there is no such picture')
            break
    return drawn


def draw_study(study: Study) -> list[Picture]:
    """All pictures that a study has something to show in."""
    scene = _make_scene(study)
    if not scene.shown:
        return []
    with matplotlib.rc_context(STYLE):
        drawn = [draw(scene) for draw in (
            draw_time_to_train, draw_epochs, draw_speedup, draw_accuracy_over_time, draw_accuracy_over_epochs,
            draw_throughput, draw_efficiency, draw_time_parts, draw_learning_rate)]
        return [p for p in (*drawn, *_draw_all_telemetry(scene)) if p]
