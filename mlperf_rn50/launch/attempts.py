"""Results of attempts, and the decision on the next one.

An attempt is one start of the ranks. Its result is read from the files in the run folder: if
metrics.jsonl ends with an EndRecord, its status determines the exit code of the run, whatever code
the ranks ended with.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from mlperf_rn50.errors import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    ConfigError,
    StorageError,
    UserError,
)
from mlperf_rn50.files import PASSING_FAULTS, temporaries_in
from mlperf_rn50.mllog.goodput import read_goodput
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.runfolder import records
from mlperf_rn50.runfolder.locks import is_locked
from mlperf_rn50.runfolder.names import RunFolder, list_runs, newest_run, newest_step
from mlperf_rn50.runfolder.records import Attempt, Failure
from mlperf_rn50.system.launcher_env import resume_command
from mlperf_rn50.text import grouped, plural

MAX_STUCK = 3  # failed attempts without a newer checkpoint, after which the launcher gives up
# --elastic excludes a host that failed in this many attempts since the newest checkpoint.
MAX_FAILURES = 2
# before the restart after the first such attempt; doubled after each further one
_FIRST_PAUSE_S = 5.0
_STORAGE_LIMIT_S, _STORAGE_PAUSE_S = 60.0, 2.0
T = TypeVar('T')
_PHASES = {'eval_start': 'evaluation', 'epoch_start': 'training', 'eval_stop': 'training'}
OVER = ('converged', 'aborted', 'failed')  # statuses of a finished run
# The records that show the progress of a run; the others may be large, such as the times of all
# ranks.
ProgressRecord = (
    records.TrainRecord
    | records.LossScaleRecord
    | records.EvalRecord
    | records.ResumedRecord
    | records.EndRecord
)


@dataclass(frozen=True)
class RunProgress:
    """Run of a folder (-1: none), its number of ProgressRecords and its newest checkpoint's step
    (-1: none)."""

    run: int
    lines: int
    step: int
    chosen: RunFolder | None = None  # by the user; None: the newest run


def read_metrics(run: RunFolder, must_end: bool = False) -> list[ProgressRecord]:
    """Return the ProgressRecords of metrics.jsonl; skip other records, and lines truncated by a
    kill or a full disk. With must_end, raise OSError if storage fails."""
    kind: Any = ProgressRecord
    lines: Iterator[tuple[int, ProgressRecord]]
    lines = records.read_records(run.metrics, kind, must_end)
    return [line for _, line in lines]


def end_of(lines: Sequence[ProgressRecord]) -> str | None:
    """Return the final status of a run; None if its last record is not an EndRecord with a known
    status."""
    last = lines[-1] if lines else None
    if isinstance(last, records.EndRecord) and last.status in EXIT_CODES:
        return last.status
    return None


def describe_unfinished(folder: Path) -> str:
    """Return a message with the command that resumes the newest resumable run of a folder; '' if
    there is none."""
    for run in reversed(list_runs(folder)):
        step = newest_step(run.checkpoints)
        if step >= 0 and end_of(read_metrics(run)) not in OVER and not is_locked(run.lock):
            command = resume_command(run.checkpoints, is_newest=False)
            return (
                f'run {run.index} here was interrupted at step {step}; this command starts another '
                f'run; to resume run {run.index} instead: {command}'
            )
    return ''


def first_run_of(
    folder: Path,
    batch_job: str,
    is_resume: bool,
    is_requeued: bool,
    chosen: RunFolder | None = None,
) -> int:
    """Return the number of the first run of a Slurm job in a folder, and record it for the time
    after a requeue, when the job resumes only its own runs.

    is_resume: whether the user asks to resume a run, or chosen; is_requeued: whether this is a
    further start of a requeued job.
    """
    if is_requeued:
        start = records.read_batch_start(folder, batch_job)
        if start is not None:
            return start.first_run
        # The job has no run yet, or is of a version without this record.
        is_resume = is_resume or bool(records.read_attempts(folder, batch_job))
    newest = newest_run(folder)
    first_run = newest.index + 1 if newest and not is_resume else 0
    num_resumes = records.count_resumes(chosen.metrics) if chosen else 0
    records.note_batch_start(folder, records.BatchStart(batch_job, first_run, num_resumes))
    return first_run


def ends_of(folder: Path, first_run: int) -> list[str | None]:
    """Return the final status of each run of a folder from a number on."""
    runs = (run for run in list_runs(folder) if run.index >= first_run)
    return [end_of(read_metrics(run, must_end=True)) for run in runs]


def is_writing(run: RunFolder) -> bool:
    """Return whether a checkpoint or a network of a run is incomplete."""
    return any(temporaries_in(folder) for folder in (run.checkpoints, run.weights))


def patient(read: Callable[..., T]) -> Callable[..., T]:
    """Return a function that reads a folder, its first argument, again for a minute while storage
    fails, and then raises StorageError."""

    def read_again(folder: Path, *arguments: Any, **keys: Any) -> T:
        end = time.monotonic() + _STORAGE_LIMIT_S
        while True:
            try:
                return read(folder, *arguments, **keys)
            except OSError as e:
                if e.errno not in PASSING_FAULTS:
                    raise
                if time.monotonic() > end:
                    problem = f'cannot be read for {_STORAGE_LIMIT_S:.0f} s: {e.strerror}'
                    raise StorageError(f'{folder}: {problem}; resume when storage works') from e
            time.sleep(_STORAGE_PAUSE_S)

    return read_again


def read_progress(folder: Path, chosen: RunFolder | None = None) -> RunProgress:
    """Return the current progress of a run in a folder, by default of the newest one."""
    run = chosen or newest_run(folder)
    if run is None:
        return RunProgress(-1, 0, -1)
    num_lines = len(read_metrics(run, must_end=True))
    return RunProgress(run.index, num_lines, newest_step(run.checkpoints), chosen)


def read_attempt(folder: Path, before: RunProgress, exit_code: int, is_resumed: bool) -> Attempt:
    """Return the result of an attempt; is_resumed: whether the attempt resumed a run, not began
    one."""
    run = before.chosen or newest_run(folder)
    is_same = run is not None and run.index == before.run
    if run is None or (is_same and not is_resumed):
        return Attempt(run=None, exit_code=exit_code, end=None, gained=False, can_resume=False)
    # a line that is not read may be the end of the run
    lines = read_metrics(run, must_end=True)[before.lines if is_same else 0 :]
    step = newest_step(run.checkpoints)
    resumed_at = [m.step for m in lines if isinstance(m, records.ResumedRecord)]
    start = before.step if is_same else -1
    if resumed_at:
        start = resumed_at[0]
    end = end_of(lines)
    return Attempt(
        run=run.index,
        exit_code=exit_code,
        end=end,
        gained=step > start,
        can_resume=step >= 0,
        has_stepped=any(isinstance(m, (records.TrainRecord, records.EvalRecord)) for m in lines),
        place=place_of(run),
        cause=end or '',
    )


def end_of_job(folder: Path, first_run: int) -> str | None:
    """Return the status of the newest run from a number on, if it reached its target or gave up;
    a failed one may be tried again."""
    *_, end = [None, *ends_of(folder, first_run)]
    return end if end in ('converged', 'aborted') else None


def plan_runs(ends: Sequence[str | None], seeds: int, is_resume: bool) -> list[bool]:
    """Return for each run to make whether it resumes the newest run; with --resume, --seeds
    includes finished runs.

    ends: final statuses of the runs of the folder.
    """
    if not is_resume:
        return [False] * seeds
    if seeds == 1:
        return [True]
    num_left = seeds - sum(end in OVER for end in ends)
    if ends and ends[-1] not in OVER:
        return [True, *[False] * (num_left - 1)]
    return [False] * num_left


def has_gone_on(run: RunFolder, batch_job: str) -> bool:
    """Return whether a requeued Slurm job has already resumed a run."""
    start = records.read_batch_start(run.dir, batch_job)
    return start is not None and records.count_resumes(run.metrics) > start.num_resumes


def check_plan(runs: Sequence[bool], config: str | None) -> None:
    """Raise ConfigError if new runs of plan_runs lack a configuration."""
    if not (all(runs) or config):
        raise ConfigError(
            f'--seeds: got no --config, which the {plural(runs.count(False), "new run")} need; add '
            'it'
        )


def judge(
    attempt: Attempt,
    is_stop_requested: bool,
    restarts_left: int,
    past: Sequence[Attempt],
    can_exclude: bool = False,
    is_free: bool = False,
) -> tuple[int | None, str]:
    """Return the launcher's exit code after an attempt, or None to restart the ranks, and a reason
    to print, or ''.

    past: all attempts, this one included; can_exclude: whether a failing host can be excluded;
    is_free: result of is_free_restart.
    """
    if is_free:
        return None, ''
    reason = '' if attempt.gained else 'stopped; this start wrote no checkpoint'
    if attempt.end == 'interrupted' and attempt.exit_code == EXIT_USAGE:  # such as a full disk
        return EXIT_USAGE, reason
    if attempt.end == 'interrupted' and not attempt.can_resume:  # writing it may have failed
        return EXIT_FAILED, reason
    if attempt.end is not None:
        return EXIT_CODES[attempt.end], ''
    if is_stop_requested:
        return EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED, reason
    if attempt.exit_code == EXIT_USAGE:
        return EXIT_USAGE, ''
    if restarts_left < 1:
        return EXIT_FAILED, ''
    reason = '' if can_exclude else give_up_reason(past)
    return EXIT_FAILED if reason else None, reason


def is_free_restart(attempt: Attempt, returned: Collection[str], suspects: Collection[str]) -> bool:
    """Return whether the restart after an attempt is none of --restarts, because without returned
    hosts the run would have gone on.

    Args:
        returned: hosts for which the launcher stopped the ranks, to take them back.
        suspects: hosts that were taken back for this attempt and may be the cause of its failure.
    """
    if attempt.end == 'interrupted':
        return bool(returned)
    has_started = attempt.has_stepped or attempt.gained
    return bool(suspects) and attempt.end in (None, 'failed') and not has_started


def count_stuck(attempts: Sequence[Attempt]) -> int:
    """Count failed attempts since the newest checkpoint. Those ended before a step by an outside
    cause do not count."""
    recent = takewhile(lambda a: not (a.gained or a.end in OVER), reversed(attempts))
    return sum(a.has_stepped or a.origin != 'outside' for a in recent)


def drill_result(run: RunFolder, found: Sequence[Attempt]) -> str:
    """Return what the fault of a drill cost the run in whose attempts it was caused."""
    if not any(a.end in (None, 'failed') for a in found):
        return 'the fault did not happen in this run'
    lost = ''
    if found[0].run != run.index:
        lost = '; before it, the fault ended a run that had no checkpoint'
    goodput = None
    with suppress(UserError):
        goodput = read_goodput(read_run(run.result, is_own=True))
    return f'goodput {goodput.text if goodput else "unknown"}{lost}'


patient_progress = patient(read_progress)
attempt_after = patient(read_attempt)


def bad_hosts(failures: Sequence[Failure], hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts that failed in at least MAX_FAILURES attempts, with the last cause; none if
    all hosts did."""
    lost = defaultdict(set)
    for failure in failures:
        if failure.rank is None:
            lost[failure.job].add(failure.host)

    def is_of_launcher(failure: Failure) -> bool:
        """Return whether the launcher is at fault, because it lost all other hosts."""
        num_lost = len(lost[failure.job])
        return failure.rank is None and num_lost > 1 and num_lost >= len(hosts) - 1

    counted = grouped((f for f in failures if not is_of_launcher(f)), lambda f: f.host)
    bad = {}
    for host in hosts:
        of_host = counted.get(host, [])
        if len({f.job for f in of_host}) >= MAX_FAILURES:
            bad[host] = of_host[-1].cause
    return bad if len(bad) < len(hosts) else {}


def give_up_reason(attempts: Sequence[Attempt]) -> str:
    """Return why the run is not restarted after these attempts; '' if it is restarted."""
    places = [
        (a.place, re.sub(r'\d+', '', a.cause)) for a in attempts[-2:] if a.origin == 'program'
    ]
    if len(places) == 2 and places[0] == places[1]:
        return f'two attempts in a row ended with the same failure ({places[0][0]}); not restarted'
    num_stuck = count_stuck(attempts)
    if num_stuck < MAX_STUCK:
        return ''
    return f'{num_stuck} consecutive attempts wrote no newer checkpoint; not restarted'


def pause_s(num_stuck: int) -> float:
    """Return the pause before the next attempt in seconds; num_stuck: result of count_stuck."""
    return _FIRST_PAUSE_S * 2 ** (num_stuck - 1) if num_stuck else 0.0


def place_of(run: RunFolder) -> str:
    """Describe the last step and phase in a run's logs."""
    steps = [step for m in read_metrics(run) if (step := getattr(m, 'step', None)) is not None]
    try:
        log = run.result.read_text(errors='replace')
    except OSError:
        log = ''
    keys = re.findall(r'"(init_start|run_start|run_resumed|epoch_start|eval_start|eval_stop)"', log)
    return f'step {steps[-1] if steps else 0}, {_PHASES.get(keys[-1] if keys else "", "start-up")}'
