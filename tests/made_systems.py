"""Studies of folders, run sets from a recipe and curves, and run sets with changed facts."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from helpers import git, write_files
from lines import write_set

from mlperf_rn50.analysis.report.sections import make_page, page_texts
from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.run_set import RunSet
from mlperf_rn50.analysis.sets.scaling import Study, make_studies
from mlperf_rn50.analysis.sets.settings import Recipe
from mlperf_rn50.analysis.sets.time_parts import RunTimes
from mlperf_rn50.analysis.show.page import render_html
from mlperf_rn50.answer import Answer
from mlperf_rn50.mllog.logged_run import Evaluation, Run


def studies_of(*paths: Path, baseline: str | None = None) -> list[Study]:
    """Return the studies of the logs under some paths."""
    return make_studies(load_run_sets(paths), baseline)


def study_of(*paths: Path, baseline: str | None = None) -> Study:
    """Return the only study of the logs under some paths."""
    (study,) = studies_of(*paths, baseline=baseline)
    return study


def load_set(folder: Path) -> RunSet:
    """Return the only run set of a folder."""
    (run_set,) = load_run_sets([folder])
    return run_set


def written_set(folder: Path, *arguments, **keys) -> RunSet:
    """Write the logs of a run set and return it."""
    return load_set(write_set(folder, *arguments, **keys))


def write_layouts(folder: Path, epochs_s: Mapping[str, object], num_runs: int = 1, **keys) -> Path:
    """Write a set for each layout, such as 2x4 for 2 nodes of 4 ranks, given its epoch times."""
    for name, epoch_s in epochs_s.items():
        nodes, per_node = map(int, name.split('x'))
        ranks = nodes * per_node
        write_set(folder / name, num_runs, nodes=nodes, ranks=ranks, epoch_s=epoch_s, **keys)
    return folder


def kinds_of(run_set: RunSet, kind: str) -> list[str]:
    """Return the texts of the findings of a kind about a run set."""
    return [f.text for f in set_findings(run_set) if f.kind == kind]


def _without_plots(answer: Answer) -> Answer:
    parts = [_without_plots(part) for part in answer.parts]
    return replace(answer, figures=tuple, parts=parts)


def page_of(studies: Sequence[Study], folder: Path = Path('.'), has_plots: bool = False) -> str:
    """Return the page of studies for a folder. Plots take the longest to draw."""
    page = make_page(studies)
    return render_html(
        page if has_plots else _without_plots(page), folder=folder, **page_texts(studies)
    )


def made_set(
    name: str,
    recipe: Recipe,
    runs: Sequence[tuple[str, float, Sequence[tuple[int, float]]]],
    times: RunTimes | None = None,
    **facts,
) -> RunSet:
    """Return a set of runs with status, seconds and curve (epochs trained, Top-1 as a fraction)."""
    facts = {
        'round': 'v0.7',
        'org': 'us',
        'train_samples': 1000,
        'global_batch_size': recipe.global_batch_size,
    } | facts
    return RunSet(
        name,
        Path('/runs', name),
        Path('/runs'),
        tuple(
            Run(
                Path(f'result_{k}.txt'),
                status=status,
                time_to_train_s=time_s,
                epochs_to_converge=curve[-1][0] if status == 'converged' else None,
                evaluations=[
                    Evaluation(epoch, accuracy, 0, None, None, None) for epoch, accuracy in curve
                ],
                is_imagenet='dataset' not in facts,
                **facts,
            )
            for k, (status, time_s, curve) in enumerate(runs)
        ),
        unlogged=vars(recipe),
        given_times=times,
    )


def changed(system: RunSet, **facts) -> RunSet:
    """Return a system with changed facts in all runs."""
    return replace(system, runs=tuple(replace(r, **facts) for r in system.runs))


def refused(system: RunSet, reason: str) -> RunSet:
    """Return a system whose runs are refused as a set."""
    return replace(
        changed(system, status='failed', epochs_to_converge=None, time_to_train_s=None),
        refusal=reason,
    )


def hide_package(monkeypatch, name: str) -> None:
    """Make imports of a package fail, as if it were not installed."""
    for module in [m for m in sys.modules if m.startswith(f'{name}.')]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)


_CALLED = 'setup.cfg launch/setup.sh launch/requirements.lock launch/local.sh launch/mpirun.sh'


def commit_program(home: Path, *runs: Path, **keys: str) -> str:
    """Commit a program that accepts the configurations of run folders, and name its commit in their
    env.json. keys: further keys of data, and their types. Return the commit."""
    sections: dict[str, set[str]] = {'data': set(keys)}
    for path in (p for folder in runs for p in folder.glob('config*.yaml') if p.is_file()):
        for section, values in yaml.safe_load(path.read_text()).items():
            sections.setdefault(section, set()).update(values)
    fields = {
        name: [f'    {key}: str' for key in sorted(known)] for name, known in sections.items()
    }
    fields[''] = [f'    {name}: {name}Config' for name in sections]
    parts = ['\n'.join([f'class {name}Config:', *lines]) for name, lines in fields.items()]
    write_files(home, dict.fromkeys(_CALLED.split(), 'printf "%s\\n" "$@"'), mode=0o755)
    write_files(home, {'mlperf_rn50/__main__.py': '', 'mlperf_rn50/config.py': '\n'.join(parts)})
    for words in ('init -q', 'add -A', 'commit -qm x --allow-empty'):
        git(home, *words.split())
    commit = git(home, 'rev-parse', 'HEAD')
    for path in (p for folder in runs for p in folder.glob('env*.json') if p.is_file()):
        path.write_text(json.dumps(json.loads(path.read_text()) | {'git_commit': commit}))
    return commit
