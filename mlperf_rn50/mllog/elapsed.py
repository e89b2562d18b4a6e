"""Time to train of a resumed run by what became of it: preserved, lost, paused, or between a fault
and the resume.

All times are seconds since run_start. Pure functions, used by the run itself and by the readers of
its log.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# tolerated difference between clocks of nodes and processes; milliseconds in published logs
SKEW_S = 2.0
# a requested stop that follows its checkpoint at most this much later loses no training
_STOPPING_S = 2.0


class Resume(NamedTuple):
    """A resume from a checkpoint; checkpoint_s and clock_s are None if the log does not give them
    consistently."""

    resumed_s: float  # end of the interval without training
    stopped_s: float  # last sign of life of the attempt before
    checkpoint_s: float | None  # when the checkpoint was taken
    clock_s: float | None  # training preserved before the checkpoint
    is_pause: bool  # whether a stop was requested; otherwise a fault ended the attempt
    stalled_s: float = 0.0  # without progress before stopped_s; known only to the run itself


class ElapsedParts(NamedTuple):
    """Time since run_start by what became of it. The parts add up to the time to train."""

    training_preserved_s: float  # training and evaluations that the result is made of
    # training after the checkpoints from which the run resumed, which it repeated
    training_lost_s: float
    paused_s: float  # between a requested stop and the resume
    fault_to_resume_s: float  # between a fault and the resume

    @property
    def text(self) -> str:
        names = ('training preserved', 'lost', 'paused', 'between fault and resume')
        return ', '.join(f'{name} {seconds:.1f} s' for name, seconds in zip(names, self))


def checkpoint_time_s(before: Sequence[Resume], clock_s: float) -> float | None:
    """Return when a checkpoint was taken that covers clock_s of training, in the newest attempt
    that can have it."""
    starts = [(0.0, 0.0)]
    for resume in before:
        if resume.clock_s is None:
            return None
        starts.append((resume.resumed_s, resume.clock_s))
    times = (at_s + clock_s - base_s for at_s, base_s in reversed(starts) if base_s <= clock_s)
    return next(times, None)


def clock_fault(
    before: Sequence[Resume], clock_s: float | None, covered_s: float, resumed_s: float
) -> str | None:
    """Return the kind of finding if the logged clock_s of a resume contradicts other lines, or is
    missing; else None.

    covered_s: time of the last line that the checkpoint certainly covers.
    """
    checkpoint_s = None if clock_s is None else checkpoint_time_s(before, clock_s)
    if checkpoint_s is None:
        return 'resume_without_clock'
    if checkpoint_s < covered_s - SKEW_S:
        return 'resume_clock_low'
    return 'resume_clock_high' if checkpoint_s > resumed_s + SKEW_S else None


def make_resume(
    before: Sequence[Resume],
    clock_s: float | None,
    *,
    resumed_s: float,
    stopped_s: float,
    is_pause: bool,
) -> Resume:
    """Return the next resume of a run. stopped_s: time of the last sign of life, which the resume
    cannot precede."""
    earliest_s = before[-1].resumed_s if before else 0.0
    resumed_s = max(resumed_s, earliest_s)
    stopped_s = min(max(stopped_s, earliest_s), resumed_s)
    resume = Resume(resumed_s, stopped_s, checkpoint_s=None, clock_s=None, is_pause=is_pause)
    checkpoint_s = None if clock_s is None else checkpoint_time_s(before, clock_s)
    if checkpoint_s is None:
        return resume
    checkpoint_s = min(checkpoint_s, resumed_s)
    if checkpoint_s > stopped_s or is_pause and stopped_s - checkpoint_s <= _STOPPING_S:
        stopped_s = checkpoint_s
    return resume._replace(stopped_s=stopped_s, checkpoint_s=checkpoint_s, clock_s=clock_s)


def gaps_of(resumes: Sequence[Resume]) -> list[tuple[float, float]]:
    """Return the intervals that the result does not depend on, in order and without overlaps."""
    gaps: list[tuple[float, float]] = []
    for resume in reversed(resumes):
        start_s = resume.stopped_s if resume.checkpoint_s is None else resume.checkpoint_s
        stop_s = min(resume.resumed_s, gaps[0][0]) if gaps else resume.resumed_s
        if start_s < stop_s:
            gaps.insert(0, (start_s, stop_s))
    return gaps


def outside_s(gaps: Sequence[tuple[float, float]], start_s: float, stop_s: float) -> float:
    """Return the length of the part of an interval that is in none of the gaps."""
    return stop_s - start_s - sum(max(0.0, min(b, stop_s) - max(a, start_s)) for a, b in gaps)


def union_s(
    intervals: Iterable[tuple[float, float]], gaps: Sequence[tuple[float, float]] = ()
) -> float:
    """Return the length of the union of intervals outside the gaps; overlapping parts count
    once."""
    total, last = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(0.0, outside_s(gaps, max(start, last), stop))
        last = max(last, stop)
    return total


def until(resumes: Sequence[Resume], end_s: float) -> list[Resume]:
    """Return resumes without their times after the end, as clocks may differ by SKEW_S."""
    return [
        r._replace(
            resumed_s=min(r.resumed_s, end_s),
            stopped_s=min(r.stopped_s, end_s),
            checkpoint_s=None if r.checkpoint_s is None else min(r.checkpoint_s, end_s),
        )
        for r in resumes
    ]


def elapsed_parts(resumes: Sequence[Resume], total_s: float | None) -> ElapsedParts | None:
    """Return the parts of total_s, or None for a run without a resume, or if a checkpoint's time is
    unknown."""
    if not resumes or total_s is None or any(r.checkpoint_s is None for r in resumes):
        return None
    resumes = until(resumes, total_s)
    without_s = sum(b - a for a, b in gaps_of(resumes))
    paused_s, fault_s = (
        sum(r.resumed_s - r.stopped_s for r in resumes if r.is_pause == is_pause)
        for is_pause in (True, False)
    )
    return ElapsedParts(
        total_s - without_s, max(0.0, without_s - paused_s - fault_s), paused_s, fault_s
    )


def render_parts(parts: ElapsedParts | None) -> dict[str, float]:
    """Return the parts by name, rounded to milliseconds, as logged; {} if there are none."""
    return {name: round(seconds, 3) for name, seconds in parts._asdict().items()} if parts else {}
