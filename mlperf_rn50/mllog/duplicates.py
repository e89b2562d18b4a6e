"""Detection of duplicate logs, regardless of their seeds and dates. Pure.

Runs are duplicates if all their times of epochs and evaluations since run_start are equal to the
millisecond, and at least four of these times, spread over a second or more, are not whole seconds.
If fewer are not, as from a clock that counts seconds, the accuracies must be equal too, and at
least four of them different.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mllog.logged_run import Run

# fewer equal values, or a shorter run, may be coincidence
_MIN_TIMES, _MIN_MS, _MIN_ACCURACIES = 4, 1000, 4


@dataclass(frozen=True)
class Duplicate:
    """A run that duplicates an earlier one, and a message about both."""

    run: Run
    original: Run
    text: str


def _is_evidence(times_ms: Sequence[int | None], accuracies: Sequence[float]) -> bool:
    """Return whether runs with these equal times and accuracies (empty: not compared) are certainly
    duplicates."""
    is_curve = len(set(accuracies)) >= _MIN_ACCURACIES
    significant = {t for t in times_ms if t is not None and (is_curve or t % 1000)}
    return len(significant) >= _MIN_TIMES and max(significant) - min(significant) >= _MIN_MS


def find_duplicates(runs: Sequence[Run]) -> list[Duplicate]:
    """Return the runs that duplicate an earlier run of the sequence, regardless of dates, seeds and
    names."""
    first: dict[object, Run] = {}
    duplicates = []
    for run in runs:
        times = [t for e in run.evaluations for t in (e.start_s, e.time_s, e.stop_s)]
        times += [t for s in run.segments for t in (s.start_s, s.stop_s)]
        times_ms = tuple(None if t is None else round(1e3 * t) for t in times)
        accuracies = tuple(e.accuracy for e in run.evaluations)
        earlier = [
            first.setdefault(key, run)
            for key, needed in ((times_ms, ()), ((times_ms, accuracies), accuracies))
            if _is_evidence(times_ms, needed)
        ]
        original = next((r for r in earlier if r is not run), None)
        if original:
            is_same_name = run.path.name == original.path.name
            name, other = (
                path if is_same_name else path.name for path in (run.path, original.path)
            )
            is_same = accuracies == tuple(e.accuracy for e in original.evaluations)
            duplicates.append(
                Duplicate(
                    run,
                    original,
                    (
                        f'{name} is a duplicate of {other}: all '
                        f'{sum(t is not None for t in times_ms)} times of epochs and '
                        'evaluations are equal to the '
                        f'millisecond{"" if is_same else ", but not the accuracies"}'
                    ),
                )
            )
    return duplicates
