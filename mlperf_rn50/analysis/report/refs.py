"""The log lines behind a number of the report, and the cells that several tables share."""
import math
from collections.abc import Sequence
from itertools import islice

from mlperf_rn50.analysis.sets import rcp
from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.analysis.sets.scaling import Study
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.table import Ref
from mlperf_rn50.text import data_name


def minutes_text(seconds: float | None) -> str:
    return '-' if seconds is None else f'{seconds / 60:.2f}'


def listed(values: Sequence[str]) -> str:
    """Values one after another; '63 x5' where all are the same."""
    if len(values) > 2 and len(set(values)) == 1:
        return f'{values[0]} x{len(values)}'
    return ', '.join(values) or '-'


def line_refs(run: Run, *names: str) -> tuple[Ref, ...]:
    return tuple((run.path, run.lines[n]) for n in names if n in run.lines)


def fact_refs(systems_runs: Sequence[Run], field: str) -> tuple[Ref, ...]:
    """The line of the first run that a fact of the system is from."""
    refs = ((s.path or r.path, s.line) for r in systems_runs if (s := r.sources.get(field)) and s.line is not None)
    return tuple(islice(refs, 1))


def evaluation_refs(run: Run) -> tuple[Ref, ...]:
    return ((run.path, run.evaluations[-1].line),) if run.evaluations else ()


def clock_refs(run: Run) -> tuple[Ref, ...]:
    return line_refs(run, keys.RUN_START, keys.RUN_STOP)


def time_refs(*systems: System | None) -> tuple[Ref, ...]:
    """Where the times of systems come from."""
    return tuple(ref for s in systems if s for r in s.scored for ref in clock_refs(r))


def training_refs(*systems: System | None) -> tuple[Ref, ...]:
    """Where the training times of systems come from."""
    return tuple(ref for s in systems if s for ref in s.training_lines)


def unit_name(study: Study) -> str:
    """What the systems are counted in."""
    return 'accelerators' if any(s.num_accelerators for s in study.systems) else 'ranks'


def heading(study: Study) -> str:
    """What a study is about."""
    target = study.baseline.target_accuracy
    goal = f'Top-1 {100 * target:.2f} %' if target is not None else 'a target that is not logged'
    return f'{study.name}: {goal} on {data_name(study.baseline.other_dataset)}'


def official_minutes(system: System) -> float | None:
    """The official score where it is another than the unscaled one."""
    official, score = rcp.official_score_minutes(system), system.score_minutes
    return official if official is not None and score is not None and not math.isclose(official, score) else None
