"""A run set: the runs of a system with different seeds, their epochs and time. Pure but for reading
the energy."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mlperf_rn50.analysis.sets.settings import Recipe, eval_grid, make_recipe
from mlperf_rn50.analysis.sets.time_parts import (
    Parts,
    RunTimes,
    make_times,
    mean_parts,
    seconds_per_epoch,
    speed_doubt,
)
from mlperf_rn50.answer import Refs
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.judge import CheckedLog, Judgement
from mlperf_rn50.mllog.duplicates import Duplicate, find_duplicates
from mlperf_rn50.mllog.findings import Finding
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.sidecar.energy import KINDS, Energy, read_energy
from mlperf_rn50.runfolder.names import find_telemetry

RUNS_OF_A_SCORE = 5
MAX_PER_NODE = 16  # accelerators; some descriptions call a pod of hundreds one node
_JOULES_PER_KWH = 3.6e6
_T = TypeVar('_T')


@cache
def generation_of(accelerator: str | None) -> str:
    """Return the generation of an accelerator, such as A100 for NVIDIA A100-SXM4-80GB (500W), or ''
    if unnamed."""
    found = re.search(r'\b[A-Z]\d{2,3}S?\b', (accelerator or '').upper())
    return found[0] if found else re.split(r'-(?!v\d)', accelerator or '')[0].strip()


def node_hours(seconds: float, num_nodes: int) -> float:
    return seconds / 3600 * num_nodes


def cost_of(hours: float | None, price_per_node_hour: float | None) -> float | None:
    """Return the cost of node-hours, in the currency of the price, or None if either is unknown."""
    return None if hours is None or price_per_node_hour is None else hours * price_per_node_hour


def kwh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_PER_KWH


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if either is missing or b is 0."""
    return a / b if a is not None and b else None


def _known(runs: Sequence[Run], name: str) -> list[Any]:
    """Return the values of an attribute in the runs that have one."""
    return [v for r in runs if (v := getattr(r, name)) is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no values or one is missing."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def olympic_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest value."""
    return statistics.fmean(sorted(values)[1:-1])


def score_minutes(times_s: Sequence[float | None]) -> float | None:
    """Return the MLPerf score of the times to train, which are None for runs that did not converge.

    By the MLPerf training rules, the fastest and the slowest of five runs are dropped. One run
    without convergence counts as the slowest, two make the set invalid.
    """
    if len(times_s) != RUNS_OF_A_SCORE or sum(t is None for t in times_s) > 1:
        return None
    return olympic_mean([float('inf') if t is None else t for t in times_s]) / 60


def _shared(name: str, kind: type[_T]) -> cached_property[_T | None]:
    """Return a property: the first known value, timed runs first; None if the runs of a refused set
    differ."""

    def first(run_set: 'RunSet') -> _T | None:
        known = [v for r in (*run_set.timed, *run_set.runs) if (v := r.fact(name)) is not None]
        if not known or run_set.refusal and any(v != known[0] for v in known):
            return None
        return known[0]

    return cached_property(first)


@dataclass(frozen=True, eq=False)
class RunSet:
    """Runs that differ only in the seed, and values derived from them.

    A refused set has no score, time or mean, and only facts that its runs share.
    """

    name: str  # of the system
    folder: Path  # for a published set, published/round/organisation/system
    study: Path  # parent folder
    runs: tuple[Run, ...]
    refusal: str | None = None  # why the runs do not form a set, so that they have no mean either
    judgement: Judgement = Judgement()  # of judge_set
    findings: tuple[Finding, ...] = ()  # about the whole set, such as duplicates of other logs
    parts_text: str | None = None  # runs with different settings, if any
    later: tuple['RunSet', ...] = ()  # the same logs, submitted again in later rounds
    is_duplicate: bool = False  # all logs duplicate those of other sets
    is_published: bool = False  # whether the set is from the packaged table
    # recipe fields known only from the submitted settings
    unlogged: Mapping[str, Any] = field(default_factory=dict)
    logs: tuple[CheckedLog, ...] = ()  # as read, if the set was loaded from logs
    # mean times of a published set, whose runs lack epoch times
    given_times: RunTimes | None = None

    @cached_property
    def duplicates(self) -> tuple[Duplicate, ...]:
        return tuple(find_duplicates(self.runs))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the set is refused, the same for all commands."""
        return self.judgement.violations or ((self.refusal,) if self.refusal else ())

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """Runs without duplicates."""
        copied = {d.run.path for d in self.duplicates}
        return tuple(r for r in self.runs if r.path not in copied)

    @cached_property
    def readable(self) -> tuple[Run, ...]:
        """Runs with a readable log, without duplicates."""
        return tuple(r for r in self.counted if r.status != 'unreadable')

    @cached_property
    def study_name(self) -> str:
        """Name of the parent folder, or round and organisation of a submission."""
        return '/'.join(self.study.parts[-3:-1]) if self.is_submission else self.study.name

    @property
    def is_submission(self) -> bool:
        """Whether the set is in a tree of MLPerf, with the folder of a round or an organisation
        above results."""
        has_name = self.is_published or self.folder.absolute().name == keys.RESNET
        return has_name and self.study.name == 'results'

    @cached_property
    def round(self) -> str:
        return next((r.round for r in self.runs if r.status != 'unreadable'), 'unknown')

    org = _shared('org', str)
    platform = _shared('platform', str)
    framework = _shared('framework', str)
    node_gbit_s = _shared('node_gbit_s', float)
    accelerator = _shared('accelerator', str)
    stated_nodes = _shared('num_nodes', int)
    num_ranks = _shared('num_ranks', int)
    num_accelerators = _shared('num_accelerators', int)
    global_batch_size = _shared('global_batch_size', int)
    target_accuracy = _shared('target_accuracy', float)
    train_samples = _shared('train_samples', int)
    dataset = _shared('dataset', str)

    @cached_property
    def num_nodes(self) -> int | None:
        """Number of nodes, None for a pod that is described as few nodes: those with more
        accelerators than a node has, without a rank for each."""
        limit = MAX_PER_NODE * (self.stated_nodes or 0)
        is_pod = (self.num_accelerators or 0) > limit and self.num_accelerators != self.num_ranks
        return None if is_pod else self.stated_nodes

    @cached_property
    def division(self) -> str | None:
        """Division of the set: open if any of its runs is."""
        divisions = {r.division for r in self.runs} - {None}
        return keys.OPEN if keys.OPEN in divisions else next(iter(divisions), None)

    @cached_property
    def rounds(self) -> tuple[str, ...]:
        """Rounds in which the logs were submitted."""
        return tuple(dict.fromkeys((self.round, *(s.round for s in self.later))))

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of the logs, one for each submission."""
        return self.folder, *(s.folder for s in self.later)

    @cached_property
    def num_units(self) -> int | None:
        """Number of accelerators, or of ranks on CPUs."""
        return self.num_accelerators or self.num_ranks

    @property
    def units_per_node(self) -> float:
        return (self.num_units or 0) / (self.num_nodes or 1)

    @cached_property
    def is_imagenet(self) -> bool:
        return all(r.other_dataset is None for r in self.runs)

    @cached_property
    def other_dataset(self) -> str | None:
        """Name of the data set, None for ImageNet."""
        return None if self.is_imagenet else self.dataset or 'an unnamed data set'

    @cached_property
    def converged(self) -> tuple[Run, ...]:
        return tuple(r for r in self.counted if r.status == 'converged')

    @cached_property
    def timed(self) -> tuple[Run, ...]:
        """Converged runs whose times and epochs count: those without a resume or, if there are
        none, all."""
        return tuple(r for r in self.converged if not r.num_resumes) or self.converged

    @cached_property
    def resumed(self) -> tuple[Run, ...]:
        return tuple(r for r in self.counted if r.num_resumes)

    @property
    def is_resumed(self) -> bool:
        """Whether times and ratios of the set are those of resumed runs."""
        return any(r.num_resumes for r in self.timed)

    @cached_property
    def olympic_minutes(self) -> float | None:
        """Score without regard to broken rules; None for a set with a resumed run."""
        if self.refusal or self.resumed or any(r.status == 'running' for r in self.runs):
            return None
        return score_minutes(
            [
                r.time_to_train_s
                if r.status == 'converged' and r.path not in self.judgement.misses
                else None
                for r in self.counted
            ]
        )

    @cached_property
    def score_minutes(self) -> float | None:
        """MLPerf score, None for logs that are refused."""
        return None if self.judgement.violations else self.olympic_minutes

    @cached_property
    def scored(self) -> tuple[Run, ...]:
        """Runs over which the time is averaged: three of five as for an MLPerf score, else the
        timed runs."""
        if self.refusal:
            return ()
        if self.score_minutes is None:
            return self.timed
        ordered = sorted(
            self.converged,
            key=lambda r: (r.path in self.judgement.misses, r.time_to_train_s or 0.0),
        )
        return tuple(ordered[1 : RUNS_OF_A_SCORE - 1])  # a run without convergence is the slowest

    @cached_property
    def time_s(self) -> float | None:
        """MLPerf score, or mean of the scored runs, in seconds."""
        return _mean(_known(self.scored, 'time_to_train_s'))

    @cached_property
    def spread_s(self) -> float | None:
        """Standard deviation of the times of all timed runs, in seconds, or None for fewer than
        two."""
        times = _known(self.timed, 'time_to_train_s')
        if len(times) < 2 or self.refusal:
            return None
        # Decimals, because Python 3.10 rounds the stdev of floats differently.
        return float(statistics.stdev(map(Decimal, times)))

    @cached_property
    def epochs(self) -> tuple[int, ...]:
        return tuple(_known(self.timed, 'epochs_to_converge'))

    @cached_property
    def epochs_mean(self) -> float | None:
        return None if self.refusal else _mean(self.epochs)

    @cached_property
    def scored_epochs_mean(self) -> float | None:
        return _mean(_known(self.scored, 'epochs_to_converge'))

    @cached_property
    def parts(self) -> Parts | None:
        return mean_parts(self.scored)

    @cached_property
    def speed_doubt(self) -> Finding | None:
        """Reason to doubt a speed computed from the logged epochs, or None."""
        return speed_doubt(self.scored)

    @cached_property
    def epoch_s(self) -> float | None:
        if self.given_times:
            return self.given_times.epoch_s
        if self.refusal or self.speed_doubt:
            return None
        return seconds_per_epoch(self.scored or self.runs)

    @cached_property
    def images_per_s(self) -> float | None:
        """Training throughput of all ranks, without evaluations and the first epoch."""
        return ratio(self.train_samples, self.epoch_s)

    @cached_property
    def has_changed_nodes(self) -> bool:
        """Whether a resume changed the number of nodes of a run that determines the time."""
        return any(r.has_changed_nodes for r in self.timed)

    @cached_property
    def node_hours(self) -> float | None:
        if self.time_s is None or not self.num_nodes or self.has_changed_nodes:
            return None
        return node_hours(self.time_s, self.num_nodes)

    @cached_property
    def energies(self) -> dict[Path, Energy]:
        """Energy of each run by log, from files beside the log. For a run without an end, this is
        the energy so far."""
        files = {} if self.is_published else find_telemetry(self.folder)
        return {
            r.path: read_energy(r, files) for r in self.runs if files and r.status != 'unreadable'
        }

    @cached_property
    def energy(self) -> Energy | None:
        """Mean energy of the scored runs, None without telemetry. It has only the kinds measured in
        all these runs."""
        found = [self.energies[r.path] for r in self.scored if self.energies]
        if not found:
            return None
        reasons = {
            kind: e.reasons[kind] for kind in KINDS for e in reversed(found) if kind in e.reasons
        }
        return Energy(
            statistics.fmean(e.seconds for e in found),
            _mean([e.cpu_joules for e in found]),
            _mean([e.gpu_joules for e in found]),
            reasons,
        )

    @cached_property
    def images_per_joule(self) -> float | None:
        """Training images per measured joule, over the scored runs, None if epochs or images of one
        are unknown."""
        images = _mean(
            [
                e * r.train_samples
                if (e := r.epochs_to_converge or r.last_epoch) and r.train_samples
                else None
                for r in self.scored
            ]
        )
        return ratio(images, self.energy.joules if self.energy else None)

    @cached_property
    def eval_period(self) -> int | None:
        """Most frequent number of epochs between two evaluations."""
        return eval_grid([r.curve for r in self.runs])[0]

    @property
    def minutes(self) -> float | None:
        return self.time_s / 60 if self.time_s else None

    @property
    def source(self) -> str:
        """Folder of the logs, or round of a published set."""
        return f'published {self.round}' if self.is_published else str(self.folder)

    @property
    def has_recipe(self) -> bool:
        return not self.reasons and bool(self.global_batch_size)

    @cached_property
    def recipe(self) -> Recipe:
        """Recipe of a set with has_recipe."""
        assert self.global_batch_size, f'{self.folder}: the global batch size is unknown'
        optimizer = {
            k: v
            for r in reversed((*self.converged, *self.readable))
            for k, v in r.optimizer.items()
        }
        logged = make_recipe(
            optimizer,
            batch=self.global_batch_size,
            samples=self.train_samples,
            target=self.target_accuracy,
            curves=[r.curve for r in self.readable],
        )
        return replace(logged, **self.unlogged)

    @cached_property
    def times(self) -> RunTimes | None:
        """Mean times of the scored runs, or None if the logs have no epochs, or no run ended."""
        return self.given_times or make_times(
            self.epoch_s,
            [
                (r.time_to_train_s, r.last_epoch, len(r.evaluations), self.parts.evaluation_s)
                for r in self.scored
                if self.parts
            ],
        )

    @property
    def step_s(self) -> float | None:
        if not self.times or not self.global_batch_size or not self.train_samples:
            return None
        return self.times.epoch_s * self.global_batch_size / self.train_samples


# Log lines from which numbers come.
def line_refs(run: Run, *names: str) -> Refs:
    return tuple((run.path, run.lines[n]) for n in names if n in run.lines)


def fact_refs(runs: Sequence[Run], field: str) -> Refs:
    """Return the source line of a fact in the first run that has one."""
    refs = (
        (s.path or r.path, s.line)
        for r in runs
        if (s := r.sources.get(field)) and s.line is not None
    )
    return tuple(islice(refs, 1))


def evaluation_refs(run: Run) -> Refs:
    return tuple((run.path, e.line) for e in run.evaluations[-1:] if e.line is not None)


def clock_refs(run: Run) -> Refs:
    return line_refs(run, keys.RUN_START, keys.RUN_STOP)


def time_refs(*run_sets: RunSet | None) -> Refs:
    return tuple(ref for s in run_sets if s for r in s.scored for ref in clock_refs(r))


def training_refs(*run_sets: RunSet | None) -> Refs:
    """Return the first and last epoch and the last evaluation of each run."""
    return tuple(
        (r.path, line)
        for s in run_sets
        if s
        for r in s.scored or s.runs
        for rows, place in ((r.segments, 0), (r.segments, -1), (r.evaluations, -1))
        if rows and (line := rows[place].line) is not None
    )
