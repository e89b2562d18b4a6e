"""What an attempt at a run added to its folder, and what follows: the end, or another attempt.

An attempt is one start of the ranks. It is judged by what it wrote itself: what an earlier part left proves nothing.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.jsonl import read_lines
from mlperf_rn50.train.checkpoint.checkpoint import newest_step
from mlperf_rn50.train.checkpoint.run_folder import RunFolder, run_numbers
from mlperf_rn50.train.watchdog.host_failures import append_line

# Attempts in a row that leave no newer checkpoint, after which nothing is started any more.
MAX_STUCK = 3
_MAX_PAUSE_S = 60.0
_PHASES = {'eval_start': 'evaluation', 'epoch_start': 'training', 'eval_stop': 'training'}
OVER = ('converged', 'aborted', 'failed')  # by the run's own account: nothing is stuck
_ENDS = {'converged': EXIT_OK, 'aborted': EXIT_FAILED, 'failed': EXIT_FAILED, 'interrupted': EXIT_RESUMABLE}


@dataclass(frozen=True)
class RunProgress:
    """How far a run folder is before an attempt: newest run, its lines of metrics.jsonl, newest checkpoint; or -1."""

    newest: int
    lines: int
    step: int


@dataclass(frozen=True)
class Attempt:
    """What an attempt came to.

    Args:
        run: number of the run it worked on, None if it began none.
        end: how the run ended by its own account (converged, aborted, failed, interrupted), None if it was cut short.
        gained: whether it left a newer checkpoint than it began with.
    """

    run: int | None
    exit_code: int
    end: str | None
    gained: bool
    can_resume: bool


@dataclass(frozen=True)
class NextStep:
    """What follows an attempt: the end with an exit code, or another attempt after a pause."""

    what: Literal['end', 'again']
    exit_code: int = 0
    pause_s: float = 0.0
    reason: str = ''


@dataclass(frozen=True)
class Line:
    """What a launcher reads of a line of metrics.jsonl."""

    event: str = ''
    step: int | None = None
    status: str = ''


@dataclass(frozen=True)
class _Noted:
    """A line of attempts.jsonl, as far as it is read."""

    job: str
    end: str | None = None
    gained: bool = False


def read_metrics(run: RunFolder) -> list[Line]:
    """Return the whole lines of metrics.jsonl, without those that a kill or a full disk has torn."""
    return [line for _, line in read_lines(run.metrics, Line)]


def newest_run(folder: Path) -> RunFolder | None:
    """The newest run of a folder."""
    numbers = run_numbers(folder)
    return RunFolder(folder, max(numbers)) if numbers else None


def end_of(lines: Sequence[Line]) -> str | None:
    """Return how a run ended, by its last line; None where that is none of an end."""
    last = lines[-1] if lines else Line()
    return last.status if last.event == 'end' and last.status in _ENDS else None


def mark(folder: Path) -> RunProgress:
    """How far a run folder is now."""
    run = newest_run(folder)
    if run is None:
        return RunProgress(-1, 0, -1)
    return RunProgress(run.index, len(read_metrics(run)), newest_step(run.checkpoints))


def look(folder: Path, before: RunProgress, exit_code: int, is_resumed: bool) -> Attempt:
    """Return what an attempt added; is_resumed if it continued the newest run, and did not begin one."""
    run = newest_run(folder)
    if run is None or not is_resumed and run.index == before.newest:
        return Attempt(None, exit_code, None, False, False)
    lines = read_metrics(run)[before.lines if run.index == before.newest else 0:]
    step = newest_step(run.checkpoints)
    began = next((m.step for m in lines if m.event == 'resumed' and m.step is not None),
                 before.step if run.index == before.newest else -1)
    return Attempt(run.index, exit_code, end_of(lines), step > began, step >= 0)


def judge(attempt: Attempt, is_asked: bool, restarts_left: int, num_stuck: int) -> NextStep:
    """Return what follows an attempt; num_stuck counts attempts in a row, this one included, that gained nothing."""
    if attempt.end is not None:
        return NextStep('end', _ENDS[attempt.end])
    if is_asked:
        return NextStep('end', EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED)
    if attempt.exit_code == EXIT_USAGE:
        return NextStep('end', EXIT_USAGE)
    if restarts_left < 1:
        return NextStep('end', EXIT_FAILED)
    if num_stuck >= MAX_STUCK:
        return NextStep('end', EXIT_FAILED, reason=stuck_text(num_stuck))
    return NextStep('again', pause_s=pause_s(num_stuck))


def stuck_text(num_stuck: int) -> str:
    """Why nothing is started any more."""
    return f'{num_stuck} attempts in a row left no newer checkpoint; not started again'


def pause_s(num_stuck: int) -> float:
    """Seconds before the next attempt: none where steps were gained, else 5 s and twice as long each time."""
    return min(_MAX_PAUSE_S, 5.0 * 2 ** (num_stuck - 1)) if num_stuck else 0.0


def place_of(run: RunFolder) -> str:
    """How far a run says it is: its last step, and the phase it is in."""
    steps = [m.step for m in read_metrics(run) if m.step is not None]
    try:
        log = run.result.read_text(errors='replace')
    except OSError:
        log = ''
    keys = re.findall(r'"(init_start|run_start|run_resumed|epoch_start|eval_start|eval_stop)"', log)
    return f'step {steps[-1] if steps else 0}, {_PHASES.get(keys[-1] if keys else "", "start-up")}'


# --- the attempts of a run folder, kept for the next launcher --------------------------------------------

ATTEMPTS = 'attempts.jsonl'


def note_attempt(folder: Path, job: str, attempt: Attempt) -> None:
    """Adds an attempt to the run folder's list; a folder that nothing was written to stays as it is."""
    append_line(folder / ATTEMPTS, {'job': job, **asdict(attempt)})


def stuck_attempts(folder: Path, job: str) -> int:
    """How many attempts of a job, the last ones in a row, gained nothing."""
    own = [a for _, a in read_lines(folder / ATTEMPTS, _Noted) if a.job == job]
    return next((i for i, a in enumerate(reversed(own)) if a.gained or a.end in OVER), len(own))
