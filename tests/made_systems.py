"""Studies of folders, and systems as logs would make them, with facts that the logs of the tests do not have."""
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study.convergence import System
from mlperf_rn50.study.scaling import Study, make_studies
from mlperf_rn50.study.systems import load_systems


def studies_of(*paths: Path, baseline: str | None = None) -> list[Study]:
    """The studies of the logs under some paths."""
    return make_studies(load_systems(paths), baseline)


def study_of(*paths: Path, baseline: str | None = None) -> Study:
    """The only study of the logs under some paths."""
    study, = studies_of(*paths, baseline=baseline)
    return study


def changed(system: System, **facts) -> System:
    """A system with some facts of its runs changed."""
    return replace(system, runs=tuple(replace(r, **facts) for r in system.runs))


def refused(system: System, reason: str) -> System:
    """A system whose runs are no set."""
    return replace(changed(system, status='failed', epochs_to_converge=None, time_to_train_s=None), refusal=reason)


def with_age(run: Run, age_s: float) -> None:
    """Says when a log was written last."""
    object.__setattr__(run, 'age_s', age_s)
