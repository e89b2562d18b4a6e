"""Names and headings of units, systems and studies, for tables and plots."""

import shlex
from collections.abc import Collection, Sequence

from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog import keys
from mlperf_rn50.text import data_name


def has_other_epochs(*run_sets: RunSet) -> bool:
    """Return whether the mean epochs of the scored runs differ from those of all converged runs, as
    in tables."""
    return any(s.scored_epochs_mean not in (None, s.epochs_mean) for s in run_sets)


def mixes_divisions(run_sets: Collection[RunSet]) -> bool:
    return len({s.division == keys.OPEN for s in run_sets}) > 1


def labels_of(run_sets: Collection[RunSet]) -> dict[RunSet, str]:
    """Return the names of sets, with a mark on those of the open division if others are not."""
    mark = ' (open)' if mixes_divisions(run_sets) else ''
    return {s: f'{s.name}{mark}' if s.division == keys.OPEN else s.name for s in run_sets}


def marks_of(run_set: RunSet) -> list[str]:
    """Return the marks of times and ratios of refused sets and resumed runs."""
    marks = ['refused'] if run_set.reasons else []
    return [*marks, 'resumed'] if run_set.is_resumed else marks


def mean_text(run_set: RunSet) -> str:
    """Return over how many runs the time of a set is averaged, with its marks."""
    num_runs = len(run_set.scored)
    runs = 'one run' if num_runs == 1 else f'mean of {num_runs} runs'
    return ', '.join([runs, *marks_of(run_set)])


def unit_name(study: Study) -> str:
    return 'accelerators' if any(s.num_accelerators for s in study.run_sets) else 'ranks'


def study_command(study: Study) -> str:
    home = study.baseline.study
    if study.baseline.is_submission:
        home = home.parent
    return shlex.join(['mlperf-rn50', 'report', str(home)])


def study_heading(study: Study) -> str:
    targets = {
        f'{100 * r.target_accuracy:.2f} %'
        for r in study.baseline.runs
        if r.target_accuracy is not None
    }
    goal = f'time to {" or ".join(sorted(targets))} Top-1' if targets else 'target not logged,'
    return f'{study.name}: {goal} on {data_name(study.baseline.other_dataset)}'


def report_heading(studies: Sequence[Study]) -> str:
    if len(studies) == 1:
        return study_heading(studies[0])
    return (
        f'ResNet-50 in MLPerf logs: {sum(len(s.run_sets) for s in studies):,} systems in '
        f'{len(studies)} studies'
    )
