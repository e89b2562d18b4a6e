"""A run as read from its log, with the sources of its facts and the findings about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import ElapsedParts, Resume, elapsed_parts
from mlperf_rn50.mllog.findings import Finding

# aborted: ended below the target; interrupted: ended by a stop request; failed: ended by an error,
# or the log has no run_stop, no status, no evaluation or no valid time, or contradicts itself;
# running: no run_stop yet, and the log is still being written; unreadable: the file is not the log
# of a single ResNet run.
RunStatus = Literal['converged', 'aborted', 'interrupted', 'failed', 'running', 'unreadable']

# Top-1 required in the closed division of v0.5, and of later rounds
V05_TARGET, TARGET = 0.749, 0.759
IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000


@dataclass(frozen=True, slots=True)
class FactSource:
    """Source of a fact: logged under its own key, implied by lines, names or rules, or in a system
    description."""

    basis: Literal['logged', 'implied', 'described']
    text: str  # name of the key, lines or file
    line: int | None = None  # line number in `path` or, if that is None, in the log
    path: Path | None = None  # file of the description; None for the log
    numbers: tuple[int, ...] = ()  # of a count, the values from all sources


class Evaluation(NamedTuple):
    """Top-1, as a fraction, after `epoch` epochs of training. Times are seconds since run_start,
    None if unknown."""

    epoch: int
    accuracy: float
    line: int | None  # None for published sets
    time_s: float | None
    start_s: float | None
    stop_s: float | None


class TrainSegment(NamedTuple):
    """A logged epoch, or a block if the log has no epochs. Epochs count from 1; times are seconds
    since run_start."""

    first_epoch: int
    num_epochs: int
    start_s: float
    stop_s: float
    line: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read from its log. A fact is None if neither the log nor the system description
    gives it."""

    path: Path
    round: str  # v0.5, v0.6, a later round if the folder name contains it, otherwise v0.7+
    status: RunStatus
    org: str | None = None
    logged_org: str | None = None  # which may differ from that of the system description
    platform: str | None = None
    division: str | None = None
    submission_status: str | None = None
    dataset: str | None = None
    is_imagenet: bool = True
    num_nodes: int | None = None  # of a resumed run, since its last resume
    has_changed_nodes: bool = False  # whether a resume has changed it
    num_ranks: int | None = None
    num_accelerators: int | None = None  # 0 for a run on CPUs
    accelerator: str | None = None  # model, from the system description
    framework: str | None = None  # name and version, from the system description
    # of a node's ports to other nodes together, from the system description
    node_gbit_s: float | None = None
    global_batch_size: int | None = None
    opt_name: str | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    # settings that only the open division permits, and given weights, as logged by this program
    options: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    target_accuracy: float | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    evaluations: Sequence[Evaluation] = ()
    segments: Sequence[TrainSegment] = ()
    # (seconds since run_start, learning rate) as logged
    learning_rates: Sequence[tuple[float, float]] = ()
    init_s: float | None = None  # from the first init_start to init_stop
    epochs_to_converge: int | None = None
    last_epoch: int | None = None
    # whether the log counts evaluations from epoch 0, against the rules; here the first is 1
    is_from_0: bool = False
    # from run_start to run_stop; None if logged times contradict each other
    time_to_train_s: float | None = None
    start_s: float | None = None  # time of run_start, in seconds since 1970
    last_s: float | None = None  # time of the last event, in seconds since 1970
    age_s: float | None = None  # time since the last write to the log of a running run
    num_resumes: int = 0
    resumes: Sequence[Resume] = ()  # those after run_start
    sources: Mapping[str, FactSource] = field(default_factory=dict)  # by field name
    # line numbers of keys that occur once, such as run_start
    lines: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()  # errors first; one finding for all lines of a kind

    def fact(self, name: str) -> Any:
        """Return a field; None if it is only implied and the log has no run_stop, because more
        lines may follow."""
        source = self.sources.get(name)
        is_cut = keys.RUN_STOP not in self.lines
        return None if is_cut and source and source.basis == 'implied' else getattr(self, name)

    def logged(self, name: str) -> Any:
        """Return a field; None if the log does not state it under its own key."""
        source = self.sources.get(name)
        return getattr(self, name) if source and source.basis == 'logged' else None

    @property
    def seen_s(self) -> float | None:
        """Time to train or, without an end, the time from run_start to the last line."""
        if self.time_to_train_s is not None or self.start_s is None or self.last_s is None:
            return self.time_to_train_s
        resumed_s = self.resumes[-1].resumed_s if self.resumes else 0.0
        return max(self.last_s - self.start_s, resumed_s)

    @property
    def elapsed(self) -> ElapsedParts | None:
        """Parts of the time to train of a resumed run or, without an end, of the time to its last
        line."""
        return elapsed_parts(self.resumes, self.seen_s)

    @property
    def num_warnings(self) -> int:
        """Number of errors and warnings."""
        return sum(f.grade != 'note' for f in self.findings)

    @property
    def errors(self) -> tuple[str, ...]:
        """Texts of the findings that make a number of this run invalid. mlperf-rn50 check lists
        them as violations."""
        return tuple(f.text for f in self.findings if f.grade == 'error')

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """Epochs trained, and Top-1 as a fraction, for each evaluation."""
        return tuple((e.epoch, e.accuracy) for e in self.evaluations)

    @property
    def data_text(self) -> str | None:
        """other_dataset, with what distinguishes it if it is called ImageNet."""
        if self.other_dataset != 'imagenet' or self.train_samples is None:
            return self.other_dataset
        if self.train_samples == IMAGENET_TRAIN:
            return 'synthetic images'
        return f'imagenet with {self.train_samples:,} of {IMAGENET_TRAIN:,} training images'

    @property
    def other_dataset(self) -> str | None:
        """Name of the data set, None for ImageNet, of which some systems omit a few images of an
        epoch."""
        is_near = (
            not self.dataset
            and abs((self.train_samples or 0) - IMAGENET_TRAIN) < 0.01 * IMAGENET_TRAIN
        )
        return None if self.is_imagenet or is_near else self.dataset or 'an unnamed data set'

    @property
    def final_accuracy(self) -> float | None:
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def best_accuracy(self) -> float | None:
        return max((e.accuracy for e in self.evaluations), default=None)
