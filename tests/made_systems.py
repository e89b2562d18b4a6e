"""Systems as logs would make them, with facts that the logs of the tests do not have."""
from dataclasses import replace

from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.study.convergence import System


def changed(system: System, **facts) -> System:
    """A system with some facts of its runs changed."""
    return replace(system, runs=tuple(replace(r, **facts) for r in system.runs))


def refused(system: System, reason: str) -> System:
    """A system whose runs are no set."""
    return replace(changed(system, status='failed', epochs_to_converge=None, time_to_train_s=None), refusal=reason)


def with_age(run: Run, age_s: float) -> None:
    """Says when a log was written last."""
    object.__setattr__(run, 'age_s', age_s)
