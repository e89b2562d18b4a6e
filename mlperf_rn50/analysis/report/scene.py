"""What the pictures of a study share: its systems, their names and colours, marks of runs."""
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mlperf_rn50.analysis.report.picture import COLOURS, INK, WIDTH_IN, Picture, mark_of
from mlperf_rn50.analysis.report.refs import heading
from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.text import plural, short, some, thin

_MARKS = {'converged': 'o', 'running': '>'}  # of a run; any other ended short of the target
_MEANINGS = {'o': 'converged', 'x': 'did not converge', '>': 'still running'}  # of marks
_MAX_SYSTEMS = 24
MAX_NAME = 44
_MAX_NAMES = 5
_ROW_IN = 0.46


@dataclass(frozen=True)
class SystemStyle:
    """What pictures show of a system: its name and colour."""

    place: int  # in the study
    system: System
    label: str
    colour: str


@dataclass(frozen=True)
class Scene:
    """What pictures show of a study, and what they do not."""

    study: Study
    shown: tuple[SystemStyle, ...]
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


def make_scene(study: Study) -> Scene:
    """The systems that are sets: all of them, or the baseline and the fastest of very many."""
    names, notes = _labels(study), []
    places = [i for i, s in enumerate(study.systems) if s.refusal is None]
    if refused := [names[i] for i, s in enumerate(study.systems) if s.refusal is not None]:
        notes.append(f'Not drawn, since their runs are no set: {some(refused, _MAX_NAMES)}')
    shown = _spread(study, places, _MAX_SYSTEMS)
    if len(shown) < len(places):
        notes.append(f'Drawn are {len(shown)} of {len(places)} systems, evenly from the fastest to the slowest')
    colours = dict(zip(_spread(study, shown, len(COLOURS)), COLOURS))
    return Scene(study, tuple(SystemStyle(i, study.systems[i], short(names[i], MAX_NAME), colours.get(i, INK))
                               for i in shown), tuple(notes))


def _spread(study: Study, places: Sequence[int], most: int) -> list[int]:
    """At most so many of some systems of a study, evenly from the fastest to the slowest, the baseline among them."""
    if len(places) <= most:
        return list(places)
    base = [i for i in places if study.systems[i] is study.baseline]
    others = sorted((i for i in places if i not in base), key=lambda i: study.systems[i].time_s or inf)
    return sorted([*base, *thin(others, most - len(base))])


def sample_runs(picture: Picture, scene: Scene, most: int) -> list[Sequence[Run]]:
    """The runs of each system that a picture with room for so many shows; says where they are not all."""
    each = max(most // max(len(scene.shown), 1), 2)
    if any(len(s.system.runs) > each for s in scene.shown):
        picture.notes.append(f'Of each system at most {each} runs are drawn, evenly from the fastest to the slowest')
    return [thin(sorted(s.system.runs, key=lambda r: inf if r.time_to_train_s is None else r.time_to_train_s)
                 if len(s.system.runs) > each else s.system.runs, each) for s in scene.shown]


def run_name(system: System, run: Run) -> str:
    return f'{short(system.name, 100)}/{short(run.path.name, MAX_NAME)}'


def explain_marks(runs: Sequence[Run]) -> list[Line2D]:
    """What the marks of runs mean, where there is more than one kind."""
    found = by_mark(runs)
    return [mark_of(mark, text) for mark, text in _MEANINGS.items() if mark in found] if found.keys() - {'o'} else []


def by_mark(runs: Sequence[Run]) -> dict[str, list[int]]:
    """The places of runs, by the marks of how they ended."""
    found: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        found.setdefault(_MARKS.get(run.status, 'x'), []).append(k)
    return found


def filled(colour: str) -> dict[str, Any]:
    """The style of a bar of what was measured."""
    return {'facecolor': (colour, 0.3), 'edgecolor': colour}


def explain_colours(shown: Sequence[SystemStyle]) -> list[Line2D]:
    """Which colour is which system's."""
    names = dict.fromkeys((s.colour, s.label if s.colour != INK else 'other systems') for s in shown)
    return [Line2D([], [], color=colour, marker='o', markersize=4.5, linewidth=1, label=label)
            for colour, label in sorted(names, key=lambda pair: pair[0] == INK)]
