"""Systems, labels, colours and marks shared by the plots of a study."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mlperf_rn50.analysis.report.headings import labels_of, study_heading
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.analysis.show.figure import COLOURS, INK, Plot, key, make_plot, mark_of
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.text import cut_names, grouped, plural, printable, short, some, thin

_MARKS = {'converged': 'o', 'running': '>'}  # plot marks by status; 'x' for any other status
_MEANINGS = {'o': 'converged', 'x': 'did not converge', '>': 'still running'}
_MAX_SYSTEMS, _MAX_NAMES = 24, 5  # maximum systems in a plot, maximum names in a note
# maximum characters of a name in a plot and in a legend of all systems
MAX_NAME, _MAX_LEGEND = 44, 22
_ROW_IN = 0.46


@dataclass(frozen=True)
class SystemStyle:
    """A system with its label and colour."""

    place: int  # index in the study
    run_set: RunSet
    label: str
    colour: str

    def run_name(self, run: Run) -> str:
        return f'{short(self.run_set.name, 100)}/{short(run.path.name, MAX_NAME)}'


@dataclass(frozen=True)
class Scene:
    """A study with the systems to draw and notes on omitted systems."""

    study: Study
    shown: Sequence[SystemStyle]
    notes: Sequence[str]

    def plot(self, name: str, title: str, height_in: float) -> tuple[Plot, Axes]:
        return make_plot(
            name, title, heading=study_heading(self.study), height_in=height_in, notes=self.notes
        )

    def rows(self, name: str, title: str) -> tuple[Plot, Axes]:
        """Return a plot with a labelled row for each system."""
        plot, axes = self.plot(name, title, _ROW_IN * len(self.shown) + 0.9)
        for row, s in enumerate(self.shown):
            axes.text(
                0,
                row - 0.3,
                s.label,
                transform=axes.get_yaxis_transform(),
                va='bottom',
                bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5},
            )
        axes.set_ylim(len(self.shown) - 0.5, -0.75)
        axes.set_yticks([])
        axes.spines['left'].set_visible(False)  # the names would interrupt it
        return plot, axes

    def sample_runs(self, plot: Plot, most: int) -> list[Sequence[Run]]:
        """Return the runs to draw for each system, at most `most` in total. Add a note if any are
        omitted."""
        each = max(most // max(len(self.shown), 1), 2)
        of_systems = [s.run_set.runs for s in self.shown]
        if any(len(runs) > each for runs in of_systems):
            plot.notes.append(
                f'At most {each} runs of each system are drawn, evenly spaced from fastest to '
                'slowest'
            )
        return [
            thin(sorted(runs, key=_duration_s), each) if len(runs) > each else runs
            for runs in of_systems
        ]


def _duration_s(run: Run) -> float:
    return inf if run.time_to_train_s is None else run.time_to_train_s


def make_scene(study: Study) -> Scene:
    """Return the scene with all systems that are not refused or, if these are too many, with a
    sample of them."""
    nodes = {s.num_nodes: None for s in study.run_sets if s.num_nodes is not None}
    has_unique_nodes = len(nodes) == len(study.run_sets)
    names = [printable(name) for name in labels_of(study.run_sets).values()]
    if has_unique_nodes:
        names = [plural(n, 'node') for n in nodes]
    notes = []
    places = [i for i, s in enumerate(study.run_sets) if s.refusal is None]
    if refused := [names[i] for i, s in enumerate(study.run_sets) if s.refusal is not None]:
        notes.append(f'Not drawn because they are refused: {some(refused, _MAX_NAMES)}')
    shown = _spread(study, places, _MAX_SYSTEMS)
    if len(shown) < len(places):
        notes.append(
            f'{len(shown)} of {len(places)} systems are drawn, evenly spaced from fastest to '
            'slowest'
        )
    colours = dict(zip(_spread(study, shown, len(COLOURS)), COLOURS))
    labels = dict(zip(shown, cut_names([names[i] for i in shown], MAX_NAME)))
    return Scene(
        study,
        [SystemStyle(i, study.run_sets[i], labels[i], colours.get(i, INK)) for i in shown],
        notes,
    )


def _spread(study: Study, places: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` places, evenly spaced from the fastest to the slowest system, including
    the baseline."""
    if len(places) <= most:
        return list(places)
    base = [i for i in places if study.run_sets[i] is study.baseline]
    others = sorted(
        (i for i in places if i not in base), key=lambda i: study.run_sets[i].time_s or inf
    )
    return sorted([*base, *thin(others, most - len(base))])


def explain_marks(runs: Sequence[Run]) -> list[Line2D]:
    """Return legend entries for the marks of runs, or none if all runs converged."""
    marks = by_mark(runs)
    if not marks.keys() - {'o'}:
        return []
    return [mark_of(mark, text) for mark, text in _MEANINGS.items() if mark in marks]


def by_mark(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Return the indices of runs, grouped by the mark that shows their status."""
    return grouped(range(len(runs)), lambda k: _MARKS.get(runs[k].status, 'x'))


def explain_colours(shown: Sequence[SystemStyle]) -> list[Line2D]:
    """Return legend entries for the colours of systems, in names so short that two fit side by
    side."""
    labels = cut_names([s.label for s in shown], _MAX_LEGEND)
    names = dict.fromkeys(
        (s.colour, label if s.colour != INK else 'other systems') for s, label in zip(shown, labels)
    )
    return [
        key(label, color=colour, marker='o', markersize=4.5, linewidth=1)
        for colour, label in sorted(names, key=lambda pair: pair[0] == INK)
    ]
