"""Logs that are copies of one another, whatever seed or date they name. Pure.

Two kinds of evidence are told apart:

- A copy: all times since run_start are equal to the millisecond; or, of many, at least 80 % lie within 2 ms of one of
  the other's, so that a time that was changed, noise of a millisecond or lines left out hide nothing. Of the runs in
  this repository and of the published rounds that it was tried on, no two have more than a quarter in common. It
  counts once.
- A likeness: the accuracies of four evaluations or more are equal digit for digit though the seeds are not, or the
  times are equal after scaling one run to the length of the other. That is odd, but proves nothing: it is said.

Times of whole seconds, as made-up logs and coarse clocks have, are no evidence, nor are whole tenths where they are
only near. Where all epochs of a run take the same time, two numbers tell all of its times: such a run is a copy only
where they are equal to the millisecond, and never a scaled one. What is no evidence alone is some beside accuracies
that are equal digit for digit.
"""
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from mlperf_rn50.mlperf.run import Run

# Below these, equal times may be chance: of a run of milliseconds, or of a clock that counts whole seconds.
_MIN_TIMES, _MIN_S = 4, 1.0
# Of times that are nearly equal: how far apart, which share of them, how many, and how far those are from each other.
_NEAR_MS, _MIN_SHARE, _MIN_NEAR, _APART_MS = 2.0, 0.8, 8, 10.0
_ROUND_MS = 100
_MIN_LENGTHS, _LENGTHS_APART_MS = 6, 4  # of the pieces of a run whose times tell more than the pace
_MIN_ACCURACIES = 4  # different ones
# Runs that may be alike are found by a few of their times, chosen by a hash, in bins of so many milliseconds or of
# such a share of the run; a bin that many runs have tells nothing.
_BIN_MS, _BINS, _SKETCH, _MAX_IN_BIN, _MAX_CANDIDATES = 32, 2 ** 16, 16, 50, 3


@dataclass(frozen=True)
class Copy:
    """A run whose log is that of another one, or like it.

    Args:
        run: the later one.
        original: the first run with its times or accuracies.
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


def _telling_ms(times_ms: Iterable[int | None]) -> list[int]:
    """The times that are no round numbers, ascending."""
    return sorted({t for t in times_ms if t is not None and t > 0 and t % _ROUND_MS})


def _sorted_ms(times_ms: Iterable[int | None]) -> list[int]:
    """All times but the start, ascending."""
    return sorted({t for t in times_ms if t})


def _telling_accuracies(run: Run) -> tuple[float, ...]:
    """The accuracies; none where they are too few to tell a run."""
    accuracies = tuple(e.accuracy for e in run.evaluations)
    return accuracies if len(set(accuracies)) >= _MIN_ACCURACIES else ()


def _sketch(bins: Iterable[int]) -> list[int]:
    """A few of the bins, the same ones whichever run has them."""
    return sorted({b * 0x9E3779B1 & 0xFFFFFFFF for b in bins})[:_SKETCH]


def _count_apart(values: Iterable[float], apart: float) -> int:
    """How many of ascending values are so far from one another."""
    count, last = 0, -inf
    for value in values:
        if value - last >= apart:
            count, last = count + 1, value
    return count


def _is_even(times_ms: Sequence[float]) -> bool:
    """Whether ascending times are those of pieces of a few lengths only."""
    lengths = sorted(b - a for a, b in zip(times_ms, times_ms[1:]))
    return _count_apart(lengths, _LENGTHS_APART_MS) < _MIN_LENGTHS


def _near(a_ms: Sequence[float], b_ms: Sequence[float], within_ms: float) -> list[float]:
    """The times of the first that the second has too, or nearly."""
    found, i = [], 0
    for t in a_ms:
        while i < len(b_ms) and b_ms[i] < t - within_ms:
            i += 1
        if i < len(b_ms) and b_ms[i] <= t + within_ms:
            found.append(t)
    return found


def _are_near(a_ms: Sequence[float], b_ms: Sequence[float], within_ms: float) -> tuple[int, int] | None:
    """How many times of so many are nearly equal, where these are too many for chance."""
    fewer, more = sorted((a_ms, b_ms), key=len)
    near = _near(fewer, more, within_ms)
    is_many = _count_apart(near, _APART_MS) >= _MIN_NEAR and len(near) >= _MIN_SHARE * len(fewer)
    return (len(near), len(fewer)) if is_many and near[-1] - near[0] >= 1e3 * _MIN_S else None


class _Index:
    """Finds earlier runs that may be alike, in time that does not grow with their number."""

    def __init__(self) -> None:
        self._runs: dict[int, list[int]] = defaultdict(list)

    def candidates(self, sketch: Sequence[int]) -> list[int]:
        """The places of those that share half of it or more, best first."""
        counts = Counter(place for key in sketch for place in self._runs.get(key, ()))
        return [place for place, count in counts.most_common(_MAX_CANDIDATES) if count >= len(sketch) / 2]

    def add(self, place: int, sketch: Iterable[int]) -> None:
        """Makes a run one of the earlier ones."""
        for key in sketch:
            if len(self._runs[key]) < _MAX_IN_BIN:
                self._runs[key].append(place)


def _names(run: Run, original: Run) -> tuple[str, str]:
    is_one = run.path.name == original.path.name
    return (str(run.path), str(original.path)) if is_one else (run.path.name, original.path.name)


def _same_accuracies(run: Run, original: Run) -> bool:
    return [e.accuracy for e in run.evaluations] == [e.accuracy for e in original.evaluations]


def _sentence(run: Run, original: Run, why: str) -> str:
    name, other = _names(run, original)
    same = _same_accuracies(run, original)
    return f'{name} is a copy of {other}: {why}{"" if same else ", though not the accuracies"}'


def _all_equal(times_ms: Sequence[int | None]) -> str:
    num_times = sum(t is not None for t in times_ms)
    return f'all {num_times} times of epochs and evaluations are equal to the millisecond'


def _nearly_equal(near: tuple[int, int], within_ms: float) -> str:
    return f'{near[0]} of {near[1]} times of epochs and evaluations are equal to {within_ms or 1:.0f} ms'


def _copy_of_twin(run: Run, twin: Run) -> Copy | None:
    """Whether a run is a copy of one with its accuracies, however round its times are."""
    times_ms, its_ms = _times_ms(run), _times_ms(twin)
    near = _are_near(_sorted_ms(times_ms), _sorted_ms(its_ms), _NEAR_MS)
    if not near or not _same_accuracies(run, twin):
        return None
    why = _all_equal(times_ms) if times_ms == its_ms else _nearly_equal(near, _NEAR_MS)
    return Copy(run, twin, _sentence(run, twin, why))


def find_copies(runs: Sequence[Run]) -> list[Copy]:
    """The runs that repeat an earlier one, which no honest run does.

    Times count from run_start, so that a log that was moved to another day is found too. Seeds, names and accuracies,
    which are easily changed, do not matter. The time that this takes is linear in the number of runs.
    """
    first: dict[int, int] = {}  # places by the hash of the times, which are many
    curves: dict[int, int] = {}  # and by that of the accuracies
    index, copies = _Index(), []
    for place, run in enumerate(runs):
        times_ms, accuracies = _times_ms(run), _telling_accuracies(run)
        twin = runs[curves.setdefault(hash(accuracies), place)] if accuracies else run
        if twin is not run and (copy := _copy_of_twin(run, twin)):
            copies.append(copy)
            continue
        if not _is_evidence(times_ms):
            continue
        original = runs[first.setdefault(hash(times_ms), place)]
        if original is not run and _times_ms(original) == times_ms:
            copies.append(Copy(run, original, _sentence(run, original, _all_equal(times_ms))))
            continue
        telling = _telling_ms(times_ms)
        sketch = _sketch(t // _BIN_MS for t in telling)
        within_ms = 0.0 if _is_even(telling) else _NEAR_MS
        found = _first_near(runs, index.candidates(sketch), telling, within_ms)
        if found:
            original, near = found
            copies.append(Copy(run, original, _sentence(run, original, _nearly_equal(near, within_ms))))
        else:
            index.add(place, sketch)
    return copies


def _first_near(runs: Sequence[Run], places: Iterable[int], telling: Sequence[int], within_ms: float,
                end: int | None = None) -> tuple[Run, tuple[int, int]] | None:
    """The first of some runs whose times, scaled to an end where one is given, are nearly those of another; and how
    many are."""
    for place in places:
        times = _telling_ms(_times_ms(runs[place]))
        if found := _are_near(telling, [t * end / times[-1] for t in times] if end else times, within_ms):
            return runs[place], found
    return None


def _find_scaled(runs: Sequence[Run]) -> list[Copy]:
    """The runs whose times are those of an earlier one, all multiplied by one number."""
    index, likenesses = _Index(), []
    for place, run in enumerate(runs):
        telling = _telling_ms(_times_ms(run))
        if len(telling) < _MIN_NEAR or _is_even(telling):
            continue
        end = telling[-1]
        sketch = _sketch(t * _BINS // end for t in telling)
        found = _first_near(runs, index.candidates(sketch), telling, _NEAR_MS, end)
        if found:
            original, (num, whole) = found
            name, other = _names(run, original)
            factor = end / _telling_ms(_times_ms(original))[-1]
            likenesses.append(Copy(run, original, f'{name} may be a copy of {other}: {num} of {whole} times of epochs '
                                                  f'and evaluations are {factor:.4g} times those there'))
        else:
            index.add(place, sketch)
    return likenesses


def _find_same_accuracies(runs: Sequence[Run]) -> list[Copy]:
    """The runs of another seed that have every accuracy of an earlier one."""
    first: dict[int, Run] = {}
    likenesses = []
    for run in runs:
        accuracies = _telling_accuracies(run)
        if not accuracies:
            continue
        original = first.setdefault(hash(accuracies), run)
        has_its_seed = run.seed is not None and run.seed == original.seed
        if original is not run and not has_its_seed and _same_accuracies(run, original):
            name, other = _names(run, original)
            likenesses.append(Copy(run, original, f'{name} may be a copy of {other}: all {len(accuracies)} accuracies '
                                                  'are equal digit for digit, though not the times'))
    return likenesses


def find_likenesses(runs: Sequence[Run]) -> list[Copy]:
    """The runs, none a certain copy, that are suspiciously like an earlier one; each once, also linear."""
    found = {id(c.run): c for c in (*_find_same_accuracies(runs), *_find_scaled(runs))}
    return [found[id(run)] for run in runs if id(run) in found]
