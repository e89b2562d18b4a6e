"""What an attempt at a run added to its folder, and what follows: the end, or another attempt.

An attempt is one start of the ranks. It is judged by what it wrote itself: what an earlier part left proves nothing.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_rn50.errors import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USAGE
from mlperf_rn50.files import no_link
from mlperf_rn50.train.checkpoint import newest_step
from mlperf_rn50.train.run_folder import RunFolder, run_numbers

# Attempts in a row that leave no newer checkpoint, after which nothing is started any more.
MAX_STUCK = 3
_MAX_PAUSE_S = 60.0
_PHASES = {'eval_start': 'evaluation', 'epoch_start': 'training', 'eval_stop': 'training'}
_OVER = ('converged', 'aborted', 'failed')  # by the run's own account: nothing is stuck
_ENDS = {'converged': EXIT_OK, 'aborted': EXIT_FAILED, 'failed': EXIT_FAILED, 'interrupted': EXIT_RESUMABLE}


@dataclass(frozen=True)
class Mark:
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
class Verdict:
    """What follows an attempt: the end with an exit code, or another attempt after a pause."""

    what: Literal['end', 'again']
    exit_code: int = 0
    pause_s: float = 0.0
    reason: str = ''


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; none where there is no such file."""
    return list(whole_lines(run.metrics))


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, without lines that a kill or a full disk has torn."""
    try:
        text = path.read_text(errors='replace')
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def newest_run(folder: Path) -> RunFolder | None:
    """The newest run of a folder."""
    numbers = run_numbers(folder)
    return RunFolder(folder, max(numbers)) if numbers else None


def end_of(lines: Sequence[dict[str, Any]]) -> str | None:
    """How a run ended, by its last line; None where that is none of an end."""
    last = lines[-1] if lines else {}
    status = last.get('status')
    return status if last.get('event') == 'end' and status in _ENDS else None


def mark(folder: Path) -> Mark:
    """How far a run folder is now."""
    run = newest_run(folder)
    return Mark(run.index, len(read_metrics(run)), newest_step(run.checkpoints)) if run else Mark(-1, 0, -1)


def look(folder: Path, before: Mark, exit_code: int, is_resumed: bool) -> Attempt:
    """Return what an attempt added; is_resumed if it continued the newest run, and did not begin one."""
    run = newest_run(folder)
    if run is None or not is_resumed and run.index == before.newest:
        return Attempt(None, exit_code, None, False, False)
    lines = read_metrics(run)[before.lines if run.index == before.newest else 0:]
    step = newest_step(run.checkpoints)
    began = next((m['step'] for m in lines if m.get('event') == 'resumed' and isinstance(m.get('step'), int)),
                 before.step if run.index == before.newest else -1)
    return Attempt(run.index, exit_code, end_of(lines), step > began, step >= 0)


def judge(attempt: Attempt, is_asked: bool, restarts_left: int, num_stuck: int) -> Verdict:
    """Return what follows an attempt; num_stuck counts attempts in a row, this one included, that gained nothing."""
    if attempt.end is not None:
        return Verdict('end', _ENDS[attempt.end])
    if is_asked:
        return Verdict('end', EXIT_RESUMABLE if attempt.can_resume else EXIT_FAILED)
    if attempt.exit_code == EXIT_USAGE:
        return Verdict('end', EXIT_USAGE)
    if restarts_left < 1:
        return Verdict('end', EXIT_FAILED)
    if num_stuck >= MAX_STUCK:
        return Verdict('end', EXIT_FAILED, reason=stuck_text(num_stuck))
    return Verdict('again', pause_s=pause_s(num_stuck))


def stuck_text(num_stuck: int) -> str:
    """Why nothing is started any more."""
    return f'{num_stuck} attempts in a row left no newer checkpoint; not started again'


def pause_s(num_stuck: int) -> float:
    """Seconds before the next attempt: none where steps were gained, else 5 s and twice as long each time."""
    return min(_MAX_PAUSE_S, 5.0 * 2 ** (num_stuck - 1)) if num_stuck else 0.0


def place_of(run: RunFolder) -> str:
    """How far a run says it is: its last step, and the phase it is in."""
    steps = [m['step'] for m in read_metrics(run) if isinstance(m.get('step'), int)]
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
    if not folder.is_dir():
        return
    try:
        with open(folder / ATTEMPTS, 'a', opener=no_link) as f:
            f.write(json.dumps({'job': job, **asdict(attempt)}) + '\n')
    except OSError:
        pass  # a full disk is said by the run itself


def stuck_attempts(folder: Path, job: str) -> int:
    """How many attempts of a job, the last ones in a row, gained nothing."""
    own = [a for a in whole_lines(folder / ATTEMPTS) if a.get('job') == job]
    return next((i for i, a in enumerate(reversed(own)) if a.get('gained') or a.get('end') in _OVER), len(own))
