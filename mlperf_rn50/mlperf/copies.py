"""Logs that are copies of one another, whatever seed or date they name. Pure."""
from collections.abc import Sequence
from dataclasses import dataclass

from mlperf_rn50.mlperf.run import Run

# Below these, equal times may be chance: of a run of milliseconds, or of a clock that counts whole seconds.
_MIN_TIMES, _MIN_S = 4, 1.0


@dataclass(frozen=True)
class Copy:
    """A run whose log is that of another one.

    Args:
        run: the copy.
        original: the first run with its times.
        text: both and why, a sentence.
    """

    run: Run
    original: Run
    text: str


def _times_ms(run: Run) -> tuple[int | None, ...]:
    """When its epochs and evaluations began and ended, since run_start."""
    times = [t for e in run.evaluations for t in (e.start_s, e.time_s, e.stop_s)]
    times += [t for s in run.stretches for t in (s.start_s, s.stop_s)]
    return tuple(None if t is None else round(1e3 * t) for t in times)


def _is_evidence(times_ms: Sequence[int | None]) -> bool:
    """Whether another run cannot have the same times by chance."""
    telling = {t for t in times_ms if t is not None and t % 1000}
    return len(telling) >= _MIN_TIMES and max(telling) - min(telling) >= 1e3 * _MIN_S


def _sentence(run: Run, original: Run, num_times: int) -> str:
    names = [run.path.name, original.path.name]
    if names[0] == names[1]:
        names = [str(run.path), str(original.path)]
    same = [e.accuracy for e in run.evaluations] == [e.accuracy for e in original.evaluations]
    return (f'{names[0]} is a copy of {names[1]}: all {num_times} times of epochs and evaluations are equal to the '
            f'millisecond{"" if same else ", though not the accuracies"}')


def find_copies(runs: Sequence[Run]) -> list[Copy]:
    """The runs that repeat an earlier one: no two runs have every time of theirs in common.

    Times count from run_start, so that a log that was moved to another day is found too. Seeds, names and accuracies,
    which are easily changed, do not matter.
    """
    first: dict[int, Run] = {}  # by the hash of its times, which are many
    copies = []
    for run in runs:
        times_ms = _times_ms(run)
        if not _is_evidence(times_ms):
            continue
        original = first.setdefault(hash(times_ms), run)
        if original is not run and _times_ms(original) == times_ms:
            num_times = sum(t is not None for t in times_ms)
            copies.append(Copy(run, original, _sentence(run, original, num_times)))
    return copies
