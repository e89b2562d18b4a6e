"""How many epochs, and how long, until the target? Of a system: a set of runs that differ in their seeds.

Pure, but for the energy, which is read from what lies beside the logs when it is asked for.
"""
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
from mlperf_rn50.mllog.package.duplicates import Copy, find_copies
from mlperf_rn50.mllog.run import LogWarning, Run
from mlperf_rn50.mllog.sidecar.energy import Energy, read_energy
from mlperf_rn50.mllog.sidecar.telemetry import find_telemetry
from mlperf_rn50.text import are

RUNS_OF_A_SCORE = 5
_MAX_MISSING = 10  # numbers of results in a sentence
_T = TypeVar('_T')


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one is missing, or b is 0."""
    return a / b if a is not None and b else None


def score_minutes(times_s: Sequence[float | None]) -> float | None:
    """The MLPerf score in minutes; None where the set has none.

    Args:
        times_s: time to train of each run in seconds, None for a run that did not converge.

    Source: MLPerf training rules: five runs, fastest and slowest dropped; one run without convergence counts as the
        slowest, two make the set invalid.
    """
    if len(times_s) != RUNS_OF_A_SCORE or sum(t is None for t in times_s) > 1:
        return None
    kept = sorted(float('inf') if t is None else t for t in times_s)[1:-1]
    return statistics.fmean(kept) / 60


def _shared(name: str, kind: type[_T]) -> cached_property[_T | None]:
    """Return a property: a fact that the first run has that has it; None for a refused set whose runs differ in it."""
    def first(system: 'System') -> _T | None:
        known = [v for r in system.runs if (v := r.fact(name)) is not None]
        return None if not known or system.refusal and any(v != known[0] for v in known) else known[0]
    return cached_property(first)


@dataclass(frozen=True)
class System:
    """The runs of one folder, which agree in everything but their seeds; with a refusal, no set.

    A refused one has no score, time or mean, and of the rest only what its runs share.
    """

    name: str
    folder: Path
    study: Path
    runs: tuple[Run, ...]
    refusal: str | None = None  # why the runs are no set
    doubts: tuple[str, ...] = ()  # of all of it: logs of another system, or of several submitters
    is_copy: bool = False  # whether all of its logs are those of another system, so that a ratio would say nothing

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(find_copies(self.runs))

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs without copies of others."""
        copied = {c.run.path for c in self.copies}
        return tuple(r for r in self.runs if r.path not in copied)

    @cached_property
    def study_name(self) -> str:
        """Of the folder that holds the systems; for a submission, of its round and organisation."""
        is_submission = self.study.name == 'results'
        return '/'.join(self.study.parts[-3:-1]) if is_submission else self.study.name

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
        """What shares the work: accelerators, or ranks where there are none."""
        return self.num_accelerators or self.num_ranks

    @cached_property
    def is_imagenet(self) -> bool:
        return all(r.is_imagenet for r in self.runs)

    @cached_property
    def other_dataset(self) -> str | None:
        """The data set; None for ImageNet."""
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
        """The runs whose mean is the time of the system: the three of the MLPerf score, else all that converged."""
        if self.refusal:
            return ()
        if self.score_minutes is None:
            return self.converged
        ordered = sorted(self.converged, key=lambda r: r.time_to_train_s or 0.0)
        return tuple(ordered[1:RUNS_OF_A_SCORE - 1])

    @cached_property
    def time_s(self) -> float | None:
        """The time of the system in seconds: the score, or the mean of the runs that converged."""
        times = [r.time_to_train_s for r in self.scored if r.time_to_train_s is not None]
        return statistics.fmean(times) if times else None

    @cached_property
    def spread_s(self) -> float | None:
        """Standard deviation of the times of all runs that converged, in seconds; None with fewer than two."""
        times = [r.time_to_train_s for r in self.converged if r.time_to_train_s is not None]
        # Python 3.10 rounds the stdev of floats otherwise than those after it.
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
        """Training images a second over all ranks, without evaluations and without the first epoch."""
        return ratio(self.train_samples, self.epoch_s)

    @cached_property
    def node_hours(self) -> float | None:
        """Hours of all nodes for the time of the system."""
        return node_hours(self.time_s, self.num_nodes) if self.time_s is not None and self.num_nodes else None

    @cached_property
    def energies(self) -> dict[Path, Energy]:
        """The energy of each run by its log, read beside it; of those that have no end, so far."""
        files = find_telemetry(self.folder)
        return {r.path: read_energy(r, files) for r in self.runs if files and r.status != 'unreadable'}

    @cached_property
    def energy(self) -> Energy | None:
        """The energy to the target: the mean of the runs of the time; None where there is no telemetry of them."""
        found = [self.energies[r.path] for r in self.scored if self.energies]
        return mean_energy(found) if found else None

    @cached_property
    def images_per_joule(self) -> float | None:
        """Training images over the joules of what was measured, of the runs of the time."""
        return images_per_joule(self.scored, self.energy) if self.energy else None

    @cached_property
    def training_lines(self) -> tuple[tuple[Path, int], ...]:
        """Logs and lines that training times come from: of each run the first and the last epoch, and evaluation."""
        return tuple((r.path, rows[place].line) for r in self.scored or self.runs
                     for rows, place in ((r.segments, 0), (r.segments, -1), (r.evaluations, -1)) if rows)

    @cached_property
    def eval_period(self) -> int | None:
        """Epochs between two evaluations, the most frequent."""
        gaps = [b.epoch - a.epoch for r in self.runs for a, b in zip(r.evaluations, r.evaluations[1:])]
        return Counter(gaps).most_common(1)[0][0] if gaps else None

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Why it is no set, its copies and contradictions, what weakens its numbers, and what is odd about its logs."""
        wrong = [*([self.refusal] if self.refusal else []), *self.doubts,
                 *(f'{c.text}; it counts once' for c in self.copies)]
        return (*wrong, *self._of_logs(True), *_weaknesses(self), *self._of_logs(False))

    def _of_logs(self, is_contradiction: bool) -> list[str]:
        """What the logs are warned of, once where it is true of all."""
        found = [(r, w) for r in self.runs for w in r.warnings if w.is_contradiction == is_contradiction]
        counts = Counter(text for text, _ in dict.fromkeys((w.text, r.path) for r, w in found))
        shared = {text: None for text, count in counts.items() if count == len(self.runs) > 1}
        return [*(f'all {len(self.runs)} logs: {text}' for text in shared),
                *(render_warning(r, w) for r, w in found if w.text not in shared)]


def render_warning(run: Run, warning: LogWarning) -> str:
    """A warning with its file and line."""
    line = '' if warning.line is None else f':{warning.line}'
    return f'{run.path.name}{line}: {warning.text}'


def _failures(runs: Sequence[Run]) -> list[str]:
    """How many runs count as none that converged, and why."""
    unread = sum(r.status == 'unreadable' for r in runs)
    # It ended, but its clock or its end says two things.
    unclear = sum(r.status == 'failed' and keys.RUN_STOP in r.lines and r.target_accuracy is not None
                  and (r.final_accuracy or 0.0) >= r.target_accuracy for r in runs)
    short = sum(r.status not in ('converged', 'running') for r in runs) - unread - unclear
    texts = [(unread, f'cannot be read: {"it counts" if unread == 1 else "they count"} as not converged', 'logs'),
             (unclear, f'{"does" if unclear == 1 else "do"} not count: the log contradicts itself', 'runs'),
             (short, 'did not converge', 'runs')]
    return [f'{count} of {len(runs)} {name} {text}' for count, text, name in texts if count]


def _missing_numbers(runs: Sequence[Run]) -> list[str]:
    """The numbers that result_<k>.txt lack, counted from 0 or 1."""
    names = [re.fullmatch(r'result_(\d{1,9})\.txt', r.path.name) for r in runs]
    numbers = {int(m[1]) for m in names if m}
    if len(numbers) < 2 or not all(names):
        return []
    wanted = range(min(*numbers, 1), max(numbers) + 1)
    count = len(wanted) - len(numbers)
    if not count:
        return []
    first = islice((k for k in wanted if k not in numbers), _MAX_MISSING)
    more = f' and {count - _MAX_MISSING} more' if count > _MAX_MISSING else ''
    return [f'result_{", ".join(map(str, first))}{more} {are(count)} missing: what became of '
            f'{"that run" if count == 1 else "those runs"}?']


def _weaknesses(system: System) -> list[str]:
    if system.refusal:
        return []
    result = []
    runs, num_running = system.counted, sum(r.status == 'running' for r in system.runs)
    result += _failures(runs)
    if num_running:
        result.append(f'no MLPerf score yet: {num_running} of {len(runs)} runs still running')
    elif len(runs) == RUNS_OF_A_SCORE and system.score_minutes is None:
        result.append('no MLPerf score: two or more runs without convergence make the set invalid')
    elif len(runs) != RUNS_OF_A_SCORE:
        result.append(f'no MLPerf score: it takes {RUNS_OF_A_SCORE} runs, here {are(len(runs))} {len(runs)}'
                      + ('; one run says nothing about the spread' if len(runs) == 1 else ''))
    seeds = Counter(r.seed for r in runs if r.seed is not None)
    result += [f'{count} runs have the same seed {seed}' for seed, count in seeds.items() if count > 1]
    if not seeds and sum(r.status != 'unreadable' for r in runs) > 1:
        result.append('no log names a seed: nothing says that the runs differ in theirs')
    result += _missing_numbers(system.runs)
    period, epochs = system.eval_period, system.epochs
    if period and epochs and 0 < max(epochs) - min(epochs) <= period:
        result.append('the runs differ by one evaluation, earlier or later: a finer grid would tell more')
    if not system.is_imagenet:
        result.append(f'the data is {system.dataset or "another set"}, not ImageNet')
    return result
