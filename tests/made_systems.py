"""Studies loaded from folders, and systems with changed facts."""
from dataclasses import replace
from pathlib import Path

from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.analysis.sets.load import load_systems
from mlperf_rn50.analysis.sets.scaling import Study, make_studies


def studies_of(*paths: Path, baseline: str | None = None) -> list[Study]:
    """Return the studies of the logs under some paths."""
    return make_studies(load_systems(paths), baseline)


def study_of(*paths: Path, baseline: str | None = None) -> Study:
    """Return the only study of the logs under some paths."""
    study, = studies_of(*paths, baseline=baseline)
    return study


def changed(system: System, **facts) -> System:
    """Return a system with changed facts in all runs."""
    return replace(system, runs=tuple(replace(r, **facts) for r in system.runs))


def refused(system: System, reason: str) -> System:
    """Return the system as a refused set."""
    return replace(changed(system, status='failed', epochs_to_converge=None, time_to_train_s=None), refusal=reason)
