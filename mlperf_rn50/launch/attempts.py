"""Results of attempts (starts of the ranks) from the files in the run folder, and the decision on the next attempt."""
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.runfolder.jsonl import append, read_lines
from mlperf_rn50.runfolder.names import RunFolder, newest_step, run_numbers

MAX_STUCK = 3  # failed attempts without a newer checkpoint, after which the launcher gives up
# After this many failures of a host in such attempts, --elastic excludes it. Only values below MAX_STUCK matter.
MAX_FAILURES = 2
_FIRST_PAUSE_S = 5.0  # before the restart after the first such attempt; doubled after each further one
_ATTEMPTS = 'attempts.jsonl'
_PHASES = {'eval_start': 'evaluation', 'epoch_start': 'training', 'eval_stop': 'training'}
OVER = ('converged', 'aborted', 'failed')  # statuses of a finished run
_ENDS = {'converged': EXIT_OK, 'aborted': EXIT_FAILED, 'failed': EXIT_FAILED, 'interrupted': EXIT_RESUMABLE}


@dataclass(frozen=True)
class RunProgress:
    """Newest run of a folder: its number, line count of metrics.jsonl, and step of newest checkpoint; -1 if none."""

    newest: int
    lines: int
    step: int


@dataclass(frozen=True)
class Attempt:
    """Result of an attempt, which is one start of the ranks; a line in attempts.jsonl."""

    run: int | None  # number of the run; None if no run began
    exit_code: int
    end: str | None  # converged, aborted, failed or interrupted; None if metrics.jsonl has no end event
    gained: bool  # whether the attempt wrote a newer checkpoint
    can_resume: bool
    has_stepped: bool = False  # whether the attempt recorded a step
    place: str = 'before a run began'  # or the last recorded step and phase
    cause: str = ''  # of the end; '' in files of earlier versions
    origin: str = ''  # of the cause: outside or program; '' if unknown
    job: str = ''  # the same for all starts of a requeued job


@dataclass(frozen=True)
class Line:
    """Relevant fields of a line in metrics.jsonl."""

    event: str = ''
    step: int | None = None
    status: str = ''


def read_metrics(run: RunFolder) -> list[Line]:
    """Return the complete lines of metrics.jsonl; skip those truncated by a kill or a full disk."""
    return [line for _, line in read_lines(run.metrics, Line)]


def newest_run(folder: Path) -> RunFolder | None:
    """Return the newest run in a folder."""
    numbers = run_numbers(folder)
    return RunFolder(folder, max(numbers)) if numbers else None


def end_of(lines: Sequence[Line]) -> str | None:
    """Return the final status of a run from its last line; None if that line is not an end event."""
    last = lines[-1] if lines else Line()
    return last.status if last.event == 'end' and last.status in _ENDS else None


def read_progress(folder: Path) -> RunProgress:
    """Return the current progress in a run folder."""
    run = newest_run(folder)
    if run is None:
        return RunProgress(-1, 0, -1)
    return RunProgress(run.index, len(read_metrics(run)), newest_step(run.checkpoints))


def read_attempt(folder: Path, before: RunProgress, exit_code: int, is_resumed: bool) -> Attempt:
    """Return the result of an attempt; is_resumed: whether it resumed the newest run instead of beginning one."""
    run = newest_run(folder)
    if run is None or not is_resumed and run.index == before.newest:
        return Attempt(None, exit_code, None, False, False)
    lines = read_metrics(run)[before.lines if run.index == before.newest else 0:]
    step = newest_step(run.checkpoints)
    began = next((m.step for m in lines if m.event == 'resumed' and m.step is not None),
                 before.step if run.index == before.newest else -1)
    return Attempt(run.index, exit_code, end_of(lines), step > began, step >= 0,
                   any(m.event in ('train', 'eval') for m in lines), place_of(run), end_of(lines) or '')


def judge(attempt: Attempt, is_stop_requested: bool, restarts_left: int, past: Sequence[Attempt],
          can_exclude: bool = False) -> tuple[int | None, str]:
    """Return the exit code after an attempt, None for a restart, and the reason for no restart if the run gives up.

    past: all attempts, can_exclude: whether a failing host can be excluded.
    """
    if attempt.end is not None:
        return _ENDS[attempt.end], ''
    if is_stop_requested:
        return EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED, ''
    if attempt.exit_code == EXIT_USAGE or restarts_left < 1:
        return EXIT_USAGE if attempt.exit_code == EXIT_USAGE else EXIT_FAILED, ''
    reason = '' if can_exclude else give_up_reason(past)
    return EXIT_FAILED if reason else None, reason


def count_stuck(attempts: Sequence[Attempt]) -> int:
    """Count the failed attempts since the newest checkpoint, except those that outside causes ended before a step."""
    recent = takewhile(lambda a: not (a.gained or a.end in OVER), reversed(attempts))
    return sum(a.has_stepped or a.origin != 'outside' for a in recent)


def give_up_reason(attempts: Sequence[Attempt]) -> str:
    """Return why the run is not restarted after these attempts; '' if it is restarted."""
    places = [(a.place, re.sub(r'\d+', '', a.cause)) for a in attempts[-2:] if a.origin == 'program']
    if len(places) == 2 and places[0] == places[1]:
        return f'two attempts in a row ended with the same failure ({places[0][0]}); not restarted'
    num = count_stuck(attempts)
    return f'{num} consecutive attempts wrote no newer checkpoint; not restarted' if num >= MAX_STUCK else ''


def pause_s(num_stuck: int) -> float:
    """Return the pause before the next attempt; 0 after an attempt that wrote a newer checkpoint."""
    return _FIRST_PAUSE_S * 2 ** (num_stuck - 1) if num_stuck else 0.0


def place_of(run: RunFolder) -> str:
    """Describe the last step and phase in a run's logs."""
    steps = [m.step for m in read_metrics(run) if m.step is not None]
    try:
        log = run.result.read_text(errors='replace')
    except OSError:
        log = ''
    keys = re.findall(r'"(init_start|run_start|run_resumed|epoch_start|eval_start|eval_stop)"', log)
    return f'step {steps[-1] if steps else 0}, {_PHASES.get(keys[-1] if keys else "", "start-up")}'


def note_attempt(folder: Path, job: str, attempt: Attempt) -> None:
    """Append an attempt to attempts.jsonl for later launchers; write nothing if there is no run folder."""
    append(folder / _ATTEMPTS, replace(attempt, job=job))


def read_attempts(folder: Path, job: str) -> list[Attempt]:
    """Return the attempts of a job, which may have been requeued."""
    return [a for _, a in read_lines(folder / _ATTEMPTS, Attempt) if a.job == job]
