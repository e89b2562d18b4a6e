"""Duplicate logs, whatever seed or date they contain. Pure.

Runs are duplicates if all times since run_start are equal to the millisecond, and at least four of them, over a second
or more, are not whole seconds, as coarse clocks write. With whole seconds, equal accuracies are required too.
"""
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.run import Run

_MIN_TIMES, _MIN_MS = 4, 1000  # fewer equal times, or those of a shorter run, may be coincidence
_MIN_ACCURACIES = 4  # different ones


@dataclass(frozen=True)
class Copy:
    """A run that duplicates an earlier one, and a message about both."""

    run: Run
    original: Run
    text: str


def _times_ms(run: Run) -> tuple[int | None, ...]:
    """Return the starts and ends of epochs and evaluations since run_start."""
    times = [t for e in run.evaluations for t in (e.start_s, e.time_s, e.stop_s)]
    times += [t for s in run.stretches for t in (s.start_s, s.stop_s)]
    return tuple(None if t is None else round(1e3 * t) for t in times)


def _is_evidence(times_ms: Sequence[int | None], accuracies: Sequence[float]) -> bool:
    """Return whether equality of these times, and accuracies if times are whole seconds, cannot be coincidence."""
    is_curve = len(set(accuracies)) >= _MIN_ACCURACIES
    significant = {t for t in times_ms if t is not None and (is_curve or t % 1000)}
    return len(significant) >= _MIN_TIMES and max(significant) - min(significant) >= _MIN_MS


def _sentence(run: Run, original: Run, num_times: int) -> str:
    is_one_name = run.path.name == original.path.name
    name, other = (p if is_one_name else p.name for p in (run.path, original.path))
    same = [e.accuracy for e in run.evaluations] == [e.accuracy for e in original.evaluations]
    return (f'{name} is a duplicate of {other}: all {num_times} times of epochs and evaluations are equal to the '
            f'millisecond{"" if same else ", but not the accuracies"}')


def find_copies(runs: Sequence[Run]) -> list[Copy]:
    """Return the runs that duplicate an earlier one, whatever their dates, seeds and names."""
    first: dict[object, Run] = {}
    copies = []
    for run in runs:
        times_ms, accuracies = _times_ms(run), tuple(e.accuracy for e in run.evaluations)
        found = [first.setdefault(key, run) for key, needed in ((times_ms, ()), ((times_ms, accuracies), accuracies))
                 if _is_evidence(times_ms, needed)]
        original = next((r for r in found if r is not run), None)
        if original:
            copies.append(Copy(run, original, _sentence(run, original, sum(t is not None for t in times_ms))))
    return copies
