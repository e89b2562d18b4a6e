"""How many epochs, and how long, until the target? Of a system: a set of runs that differ in their seeds. Pure."""
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from mlperf_rn50.mlperf.run import LogWarning, Run
from mlperf_rn50.study.time_parts import Parts, mean_parts, seconds_per_epoch

RUNS_OF_A_SCORE = 5


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


@dataclass(frozen=True)
class System:
    """The runs of one folder, which agree in everything but their seeds.

    Args:
        name: of the system; for our sweeps, of the layout.
        folder: of the runs.
        study: folder of the systems that are compared.
        refusal: why the runs are no set, and have no number in common; None for a set.
    """

    name: str
    folder: Path
    study: Path
    runs: tuple[Run, ...]
    refusal: str | None = None

    def _first(self, name: str):
        return next((v for r in self.runs if (v := r.fact(name)) is not None), None)

    @property
    def study_name(self) -> str:
        """Of the folder that holds the systems; for a submission, of its round and organisation."""
        is_submission = self.study.name == 'results'
        return '/'.join(self.study.parts[-3:-1]) if is_submission else self.study.name

    @property
    def round(self) -> str:
        return next((r.round for r in self.runs if r.status != 'unreadable'), 'unknown')

    @property
    def org(self) -> str | None:
        return self._first('org')

    @property
    def num_nodes(self) -> int | None:
        return self._first('num_nodes')

    @property
    def num_accelerators(self) -> int | None:
        return self._first('num_accelerators')

    @property
    def accelerator(self) -> str | None:
        return self._first('accelerator')

    @property
    def framework(self) -> str | None:
        return self._first('framework')

    @property
    def num_units(self) -> int | None:
        """What shares the work: accelerators, or ranks where there are none."""
        return self.num_accelerators or self._first('num_ranks')

    @property
    def global_batch_size(self) -> int | None:
        return self._first('global_batch_size')

    @property
    def target_accuracy(self) -> float | None:
        return self._first('target_accuracy')

    @property
    def train_samples(self) -> int | None:
        return self._first('train_samples')

    @property
    def dataset(self) -> str | None:
        return self._first('dataset')

    @property
    def is_imagenet(self) -> bool:
        return all(r.is_imagenet for r in self.runs)

    @property
    def platform(self) -> str | None:
        return self._first('platform')

    @property
    def converged(self) -> tuple[Run, ...]:
        return tuple(r for r in self.runs if r.status == 'converged')

    @property
    def score_minutes(self) -> float | None:
        return score_minutes([r.time_to_train_s if r.status == 'converged' else None for r in self.runs])

    @property
    def scored(self) -> tuple[Run, ...]:
        """The runs whose mean is the time of the system: the three of the MLPerf score, else all that converged."""
        if self.score_minutes is None:
            return self.converged
        ordered = sorted(self.converged, key=lambda r: r.time_to_train_s or 0.0)
        return tuple(ordered[1:RUNS_OF_A_SCORE - 1])

    @property
    def time_s(self) -> float | None:
        """The time of the system in seconds: the score, or the mean of the runs that converged."""
        times = [r.time_to_train_s for r in self.scored if r.time_to_train_s is not None]
        return statistics.fmean(times) if times else None

    @property
    def spread_s(self) -> float | None:
        """Standard deviation of the times of all runs that converged, in seconds; None with fewer than two."""
        times = [r.time_to_train_s for r in self.converged if r.time_to_train_s is not None]
        # Python 3.10 rounds the stdev of floats otherwise than those after it.
        return float(statistics.stdev(map(Decimal, times))) if len(times) > 1 else None

    @property
    def epochs(self) -> tuple[int, ...]:
        return tuple(r.epochs_to_converge for r in self.converged if r.epochs_to_converge is not None)

    @property
    def epochs_mean(self) -> float | None:
        return statistics.fmean(self.epochs) if self.epochs else None

    @property
    def scored_epochs_mean(self) -> float | None:
        epochs = [r.epochs_to_converge for r in self.scored if r.epochs_to_converge is not None]
        return statistics.fmean(epochs) if epochs else None

    @property
    def parts(self) -> Parts | None:
        return mean_parts(self.scored)

    @property
    def epoch_s(self) -> float | None:
        return seconds_per_epoch(self.scored or self.runs)

    @property
    def images_per_s(self) -> float | None:
        """Training images a second over all ranks, without evaluations and without the first epoch."""
        epoch_s = self.epoch_s
        if epoch_s and self.train_samples:
            return self.train_samples / epoch_s
        return None

    @property
    def eval_period(self) -> int | None:
        """Epochs between two evaluations, the most frequent."""
        gaps = [b.epoch - a.epoch for r in self.runs for a, b in zip(r.evaluations, r.evaluations[1:])]
        return Counter(gaps).most_common(1)[0][0] if gaps else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What weakens the numbers of the set, and what is odd about its logs: once where it is true of all."""
        counts = Counter(text for r in self.runs for text in dict.fromkeys(w.text for w in r.warnings))
        shared = [t for t, count in counts.items() if count == len(self.runs) > 1]
        single = [render_warning(r, w) for r in self.runs for w in r.warnings if w.text not in shared]
        return (*_weaknesses(self), *(f'all {len(self.runs)} logs: {t}' for t in shared), *single)


def render_warning(run: Run, warning: LogWarning) -> str:
    """A warning with its file and line."""
    line = '' if warning.line is None else f':{warning.line}'
    return f'{run.path.name}{line}: {warning.text}'


def _weaknesses(system: System) -> list[str]:
    result = []
    runs, done = system.runs, system.converged
    if len(done) < len(runs):
        result.append(f'{len(runs) - len(done)} of {len(runs)} runs did not converge')
    if len(runs) == RUNS_OF_A_SCORE and system.score_minutes is None:
        result.append('no MLPerf score: two or more runs without convergence make the set invalid')
    elif len(runs) != RUNS_OF_A_SCORE:
        result.append(f'no MLPerf score: it takes {RUNS_OF_A_SCORE} runs, here are {len(runs)}'
                      + ('; one run says nothing about the spread' if len(runs) == 1 else ''))
    seeds = Counter(r.seed for r in runs if r.seed is not None)
    result += [f'{count} runs have the same seed {seed}' for seed, count in seeds.items() if count > 1]
    period, epochs = system.eval_period, system.epochs
    if period and epochs and 0 < max(epochs) - min(epochs) <= period:
        result.append('the runs differ by one evaluation, earlier or later: a finer grid would tell more')
    if not system.is_imagenet:
        result.append(f'the data is {system.dataset or "another set"}, not ImageNet')
    return result
