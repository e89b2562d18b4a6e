"""One run, as its log tells it."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlperf_rn50.mllog import keys

# aborted: it ended short of the target; interrupted: it was asked to stop; failed: the log ends without run_stop,
# contradicts itself, or the run gave up; running: no run_stop yet, and still being written; unreadable: no log.
RunStatus = Literal['converged', 'aborted', 'interrupted', 'failed', 'running', 'unreadable']
Basis = Literal['logged', 'implied', 'described']

# Top-1 that the rules of the closed division ask for: in v0.5, and later.
V05_TARGET, TARGET = 0.749, 0.759
IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000
MAX_WARNINGS = 50  # of each weight


@dataclass(frozen=True, slots=True)
class FactSource:
    """Where a fact comes from: logged, implied by what is logged, or a system description, in the log or beside it."""

    basis: Basis
    text: str  # which key, lines or file
    line: int | None = None  # of the log, or of path
    path: Path | None = None  # the description; None for the log


@dataclass(frozen=True, slots=True)
class LogWarning:
    """What is odd about a log."""

    line: int | None  # that it is about; None where it is the whole file
    text: str
    is_contradiction: bool = False  # what counts may be wrong: something else says otherwise


@dataclass
class _Note:
    line: int | None
    text: str
    count: int = 1


class Notes:
    """Collects warnings in memory that does not grow with the log: of many of a kind one, with their count."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bool, str], _Note] = {}  # by whether it is a contradiction, and its kind

    def warn(self, line: int | None, text: str, many: str = '', is_contradiction: bool = False) -> None:
        """Note what is odd; many says it of all lines of its kind, of which only the first is kept."""
        kind = is_contradiction, many or text
        if kind in self._kept:
            self._kept[kind].count += 1
        elif sum(weight == is_contradiction for weight, _ in self._kept) < MAX_WARNINGS:
            self._kept[kind] = _Note(line, text)
        else:
            self._kept.setdefault((is_contradiction, ''), _Note(line, 'more warnings follow; they are left out'))

    def contradict(self, line: int | None, text: str, many: str = '') -> None:
        """Note what cannot be true beside what counts."""
        self.warn(line, text, many, True)

    def include(self, other: 'Notes') -> None:
        """Take the notes of another in, before its own."""
        self._kept = {**other._kept, **self._kept}

    def warnings(self) -> tuple[LogWarning, ...]:
        """Return contradictions, then the rest, each in the order of the log."""
        return tuple(LogWarning(n.line, n.text if n.count == 1 else f'{n.count} lines: {kind}; first line {n.line}',
                                weight) for (weight, kind), n in sorted(self._kept.items(), key=lambda i: not i[0][0]))


class Evaluation(NamedTuple):
    """Top-1, a fraction, after a number of epochs; times in seconds since run_start."""

    epoch: int
    accuracy: float
    line: int
    time_s: float | None
    start_s: float | None
    stop_s: float | None


class TrainSegment(NamedTuple):
    """Epochs trained in one piece, one of them where the log has epochs; seconds since run_start, first from 1."""

    first_epoch: int
    num_epochs: int
    start_s: float
    stop_s: float
    images_per_s: float | None
    line: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its log tells it; None where neither log nor description say."""

    path: Path
    round: str  # v0.5, v0.6, or what the folders name for later ones, v0.7+ without it
    status: RunStatus
    benchmark: str = keys.RESNET  # no other is read
    org: str | None = None
    platform: str | None = None
    division: str | None = None
    submission_status: str | None = None
    dataset: str | None = None
    is_imagenet: bool = True
    num_nodes: int | None = None
    num_ranks: int | None = None
    num_accelerators: int | None = None  # 0 for a run on CPUs
    accelerator: str | None = None  # its model, as the system description names it
    framework: str | None = None  # with its version, as the system description names it
    global_batch_size: int | None = None
    opt_name: str | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    target_accuracy: float | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    evaluations: Sequence[Evaluation] = ()
    stretches: Sequence[TrainSegment] = ()
    learning_rates: Sequence[tuple[float, float]] = ()  # (seconds since run_start, learning rate) as logged
    init_s: float | None = None  # from the first init_start to init_stop, before the clock
    epochs_to_converge: int | None = None  # trained when the target was reached
    last_epoch: int | None = None
    # From run_start to run_stop, without the gaps of resumes; None where the clock contradicts itself.
    time_to_train_s: float | None = None
    age_s: float | None = None  # of a running run, since its log was written
    num_resumes: int = 0
    sources: Mapping[str, FactSource] = field(default_factory=dict)  # of each field that is a fact, by its name
    lines: Mapping[str, int] = field(default_factory=dict)  # of run_start, run_stop and the like, by key
    warnings: tuple[LogWarning, ...] = ()  # contradictions first; one warning for all lines of a kind

    def fact(self, name: str) -> Any:
        """A field, but None for one that was counted in a log that is cut short."""
        source = self.sources.get(name)
        is_cut = keys.RUN_STOP not in self.lines
        return None if is_cut and source and source.basis == 'implied' else getattr(self, name)

    @property
    def final_accuracy(self) -> float | None:
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def best_accuracy(self) -> float | None:
        return max((e.accuracy for e in self.evaluations), default=None)
