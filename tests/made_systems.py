"""Systems as logs would make them, with facts that the logs of the tests do not have."""
from dataclasses import replace

from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study.convergence import System


class Scaled(System):
    """A system whose official score is given."""

    official_score_minutes = None


def changed(system: System, *, name=None, official=None, **facts) -> System:
    """A system with some facts of its runs changed, and with another name or official score."""
    made = Scaled(name or system.name, system.folder, system.study, tuple(replace(r, **facts) for r in system.runs))
    object.__setattr__(made, 'official_score_minutes', official)
    return made


def refused(system: System, reason: str) -> System:
    """A system whose runs are no set."""
    return replace(system, runs=tuple(replace(r, status='failed', epochs_to_converge=None, time_to_train_s=None)
                                      for r in system.runs), refusal=reason)


def with_age(run: Run, age_s: float) -> None:
    """Says when a log was written last."""
    object.__setattr__(run, 'age_s', age_s)
