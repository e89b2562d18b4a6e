"""Epochs and time to the target of a system, a set of runs with different seeds. Pure except for reading energy."""
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeVar

from mlperf_rn50.analysis.sets.cost import images_per_joule, mean_energy, node_hours
from mlperf_rn50.analysis.sets.time_parts import Parts, mean_parts, seconds_per_epoch
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.package.duplicates import Duplicate, find_duplicates
from mlperf_rn50.mllog.run import LogWarning, Run
from mlperf_rn50.mllog.sidecar.energy import Energy, read_energy
from mlperf_rn50.mllog.sidecar.telemetry import find_telemetry
from mlperf_rn50.text import plural

RUNS_OF_A_SCORE = 5
_MAX_MISSING = 10  # missing logs listed in a warning
_T = TypeVar('_T')


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if either is missing or b is 0."""
    return a / b if a is not None and b else None


def score_minutes(times_s: Sequence[float | None]) -> float | None:
    """Return the MLPerf score of the times to train, which are None for runs that did not converge.

    By the MLPerf training rules, the fastest and the slowest of five runs are dropped. One run without convergence
    counts as the slowest, two make the set invalid.
    """
    if len(times_s) != RUNS_OF_A_SCORE or sum(t is None for t in times_s) > 1:
        return None
    kept = sorted(float('inf') if t is None else t for t in times_s)[1:-1]
    return statistics.fmean(kept) / 60


def _shared(name: str, kind: type[_T]) -> cached_property[_T | None]:
    """Return a property with the first known value of a fact, or None if the runs of a refused set disagree on it."""
    def first(system: 'System') -> _T | None:
        known = [v for r in system.runs if (v := r.fact(name)) is not None]
        return None if not known or system.refusal and any(v != known[0] for v in known) else known[0]
    return cached_property(first)


@dataclass(frozen=True)
class System:
    """The run set in a folder; a refused one has no score, time or mean, and only facts that its runs share."""

    name: str
    folder: Path
    study: Path
    runs: tuple[Run, ...]
    refusal: str | None = None  # why the runs do not form a set
    doubts: tuple[str, ...] = ()  # about the whole set, such as duplicates of other logs
    is_copy: bool = False  # all logs duplicate those of other systems

    @cached_property
    def copies(self) -> tuple[Duplicate, ...]:
        return tuple(find_duplicates(self.runs))

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """Runs without duplicates."""
        copied = {c.run.path for c in self.copies}
        return tuple(r for r in self.runs if r.path not in copied)

    @cached_property
    def study_name(self) -> str:
        """Name of the parent folder, or round and organisation of a submission."""
        return '/'.join(self.study.parts[-3:-1]) if self.study.name == 'results' else self.study.name

    @cached_property
    def round(self) -> str:
        return next((r.round for r in self.runs if r.status != 'unreadable'), 'unknown')

    org = _shared('org', str)
    platform = _shared('platform', str)
    division = _shared('division', str)
    framework = _shared('framework', str)
    accelerator = _shared('accelerator', str)
    num_nodes = _shared('num_nodes', int)
    num_ranks = _shared('num_ranks', int)
    num_accelerators = _shared('num_accelerators', int)
    global_batch_size = _shared('global_batch_size', int)
    target_accuracy = _shared('target_accuracy', float)
    train_samples = _shared('train_samples', int)
    dataset = _shared('dataset', str)

    @cached_property
    def num_units(self) -> int | None:
        """Number of accelerators, or of ranks on CPUs."""
        return self.num_accelerators or self.num_ranks

    @cached_property
    def is_imagenet(self) -> bool:
        return all(r.is_imagenet for r in self.runs)

    @cached_property
    def other_dataset(self) -> str | None:
        """Name of the data set, None for ImageNet."""
        return None if self.is_imagenet else self.dataset or 'another data set'

    @cached_property
    def converged(self) -> tuple[Run, ...]:
        return tuple(r for r in self.counted if r.status == 'converged')

    @cached_property
    def score_minutes(self) -> float | None:
        if self.refusal or any(r.status == 'running' for r in self.runs):
            return None
        return score_minutes([r.time_to_train_s if r.status == 'converged' else None for r in self.counted])

    @cached_property
    def scored(self) -> tuple[Run, ...]:
        """Runs that the time is averaged over: three for an MLPerf score, else all converged runs."""
        if self.refusal or self.score_minutes is None:
            return () if self.refusal else self.converged
        return tuple(sorted(self.converged, key=lambda r: r.time_to_train_s or 0.0)[1:RUNS_OF_A_SCORE - 1])

    @cached_property
    def time_s(self) -> float | None:
        """MLPerf score, or mean of the converged runs, in seconds."""
        times = [r.time_to_train_s for r in self.scored if r.time_to_train_s is not None]
        return statistics.fmean(times) if times else None

    @cached_property
    def spread_s(self) -> float | None:
        """Standard deviation of the times of all converged runs, in seconds; None for fewer than two."""
        times = [r.time_to_train_s for r in self.converged if r.time_to_train_s is not None]
        # The stdev of floats is rounded differently in Python 3.10.
        return float(statistics.stdev(map(Decimal, times))) if len(times) > 1 and not self.refusal else None

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        return tuple(r.epochs_to_converge for r in self.converged if r.epochs_to_converge is not None)

    @cached_property
    def epochs_mean(self) -> float | None:
        return statistics.fmean(self.epochs) if self.epochs and not self.refusal else None

    @cached_property
    def scored_epochs_mean(self) -> float | None:
        epochs = [r.epochs_to_converge for r in self.scored if r.epochs_to_converge is not None]
        return statistics.fmean(epochs) if epochs else None

    @cached_property
    def parts(self) -> Parts | None:
        return mean_parts(self.scored)

    @cached_property
    def epoch_s(self) -> float | None:
        return None if self.refusal else seconds_per_epoch(self.scored or self.runs)

    @cached_property
    def images_per_s(self) -> float | None:
        """Training throughput of all ranks, without evaluations and the first epoch."""
        return ratio(self.train_samples, self.epoch_s)

    @cached_property
    def node_hours(self) -> float | None:
        return node_hours(self.time_s, self.num_nodes) if self.time_s is not None and self.num_nodes else None

    @cached_property
    def energies(self) -> dict[Path, Energy]:
        """Energy of each run by log, from the files beside the log; energy so far if the run has no end."""
        files = find_telemetry(self.folder)
        return {r.path: read_energy(r, files) for r in self.runs if files and r.status != 'unreadable'}

    @cached_property
    def energy(self) -> Energy | None:
        """Mean energy of the scored runs, None without telemetry."""
        found = [self.energies[r.path] for r in self.scored if self.energies]
        return mean_energy(found) if found else None

    @cached_property
    def images_per_joule(self) -> float | None:
        """Training images per measured joule, over the scored runs."""
        return images_per_joule(self.scored, self.energy) if self.energy else None

    @cached_property
    def training_lines(self) -> tuple[tuple[Path, int], ...]:
        """Source lines of the training times: first and last epoch and last evaluation of each run."""
        return tuple((r.path, rows[place].line) for r in self.scored or self.runs
                     for rows, place in ((r.segments, 0), (r.segments, -1), (r.evaluations, -1)) if rows)

    @cached_property
    def eval_period(self) -> int | None:
        """Most frequent number of epochs between two evaluations."""
        gaps = [b.epoch - a.epoch for r in self.runs for a, b in zip(r.evaluations, r.evaluations[1:])]
        return Counter(gaps).most_common(1)[0][0] if gaps else None

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Refusal, duplicates and contradictions, then weak evidence, then other warnings about the logs."""
        return (*filter(None, [self.refusal]), *self.doubts, *(f'{c.text}; counted once' for c in self.copies),
                *self._log_warnings(True), *_weaknesses(self), *self._log_warnings(False))

    def _log_warnings(self, is_contradiction: bool) -> list[str]:
        """Warnings about the logs, each only once if it applies to all logs."""
        found = [(r, w) for r in self.runs for w in r.warnings if w.is_contradiction == is_contradiction]
        counts = Counter(text for text, _ in dict.fromkeys((w.text, r.path) for r, w in found))
        shared = {text: None for text, count in counts.items() if count == len(self.runs) > 1}
        return [*(f'all {len(self.runs)} logs: {text}' for text in shared),
                *(render_warning(r, w) for r, w in found if w.text not in shared)]


def render_warning(run: Run, warning: LogWarning) -> str:
    line = '' if warning.line is None else f':{warning.line}'
    return f'{run.path.name}{line}: {warning.text}'


def _failures(runs: Sequence[Run]) -> list[str]:
    """Return the number of runs that do not count as converged, by reason."""
    unread = sum(r.status == 'unreadable' for r in runs)
    # The run reached the target and ended, but its clock or status contradicts itself.
    unclear = sum(r.status == 'failed' and keys.RUN_STOP in r.lines and r.target_accuracy is not None
                  and (r.final_accuracy or 0.0) >= r.target_accuracy for r in runs)
    short = sum(r.status not in ('converged', 'running') for r in runs) - unread - unclear
    texts = [(unread, 'logs cannot be read, counted as not converged'),
             (unclear, 'runs not counted because of contradictions in the log'),
             (short, 'runs did not converge')]
    return [f'{count} of {len(runs)} {text}' for count, text in texts if count]


def _missing_numbers(runs: Sequence[Run]) -> list[str]:
    """Return a warning about gaps in the numbers of result_<k>.txt, which start from 0 or 1."""
    names = [re.fullmatch(r'result_(\d{1,9})\.txt', r.path.name) for r in runs]
    numbers = {int(m[1]) for m in names if m}
    if len(numbers) < 2 or not all(names):
        return []
    wanted = range(min(*numbers, 1), max(numbers) + 1)
    count = len(wanted) - len(numbers)
    first = ', '.join(map(str, islice((k for k in wanted if k not in numbers), _MAX_MISSING)))
    more = f' and {count - _MAX_MISSING} more' if count > _MAX_MISSING else ''
    return [f'result_<k>.txt is missing for k = {first}{more}; the numbering has a gap'] if count else []


def _weaknesses(system: System) -> list[str]:
    if system.refusal:
        return []
    runs, num_running = system.counted, sum(r.status == 'running' for r in system.runs)
    result = _failures(runs)
    if num_running:
        result.append(f'no MLPerf score yet: {num_running} of {len(runs)} runs still running')
    elif len(runs) == RUNS_OF_A_SCORE and system.score_minutes is None:
        result.append('no MLPerf score: two or more runs without convergence make the set invalid')
    elif len(runs) != RUNS_OF_A_SCORE:
        result.append(f'no MLPerf score: got {plural(len(runs), "run")}, expected {RUNS_OF_A_SCORE}'
                      + ('; the spread of a single run is unknown' if len(runs) == 1 else ''))
    seeds = Counter(r.seed for r in runs if r.seed is not None)
    result += [f'{count} runs have the same seed {seed}' for seed, count in seeds.items() if count > 1]
    if not seeds and sum(r.status != 'unreadable' for r in runs) > 1:
        result.append('no log contains a seed; the runs may have the same one')
    result += _missing_numbers(system.runs)
    period, epochs = system.eval_period, system.epochs
    if period and epochs and 0 < max(epochs) - min(epochs) <= period:
        result.append('the runs differ by at most one evaluation; a smaller eval_period gives better resolution')
    if not system.is_imagenet:
        result.append(f'the data set is {system.dataset or "unnamed"}, not ImageNet')
    return result
