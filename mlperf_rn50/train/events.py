"""What happens in a run, as the sinks read it. Epochs count from 0, steps are steps taken."""
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlperf_rn50.config import Config
from mlperf_rn50.train.checkpoint.changes import Change
from mlperf_rn50.train.plan import Plan


@dataclass(frozen=True)
class Opened:
    """A new run begins: its configuration, the (name, ranks) of its hosts, and whether their page caches are empty."""

    config: Config
    hosts: Sequence[tuple[str, int]]
    is_cache_clear: bool
    cache_reason: str


@dataclass(frozen=True)
class InitStarted:
    """The network is about to be built."""

    plan: Plan
    seed: int


@dataclass(frozen=True)
class Built:
    """The network is there; initial_weights: where weights came from, '' for drawn ones."""

    plan: Plan
    seed: int
    tensor_names: Sequence[str]
    num_parameters: int
    flops_per_image: int
    initial_weights: str = ''
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class InitStopped:
    """All is ready and nothing of the data was touched."""


@dataclass(frozen=True)
class RunStarted:
    """The clock starts: a new run's."""

    plan: Plan
    num_hosts: int


@dataclass(frozen=True)
class Resumed:
    """The clock goes on: a run's that goes on from a checkpoint, with the world size and batch it had before.

    changes: all that its configuration has otherwise than before.
    """

    plan: Plan
    num_hosts: int
    step: int
    clock_s: float
    checkpoint: str
    world_size_before: int
    batch_before: int
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class EpochStarted:
    """An epoch begins, at a step of it; block_epochs: epochs up to the next evaluation, where a block begins too."""

    epoch: int
    num_steps: int
    first_step: int
    block_epochs: int | None


@dataclass(frozen=True)
class StepDone:
    """A step is done; epoch: epochs taken, with a fraction."""

    step: int
    epoch: float
    time_s: float
    loss: float
    learning_rate: float
    images_per_s: float
    is_reported: bool = False
    mean_loss: float = 0.0
    gradient_norm: float | None = None
    trust_ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochDone:
    """An epoch's last step is done."""

    epoch: int
    time_s: float
    images_per_s: float
    learning_rate: float


@dataclass(frozen=True)
class RecordsRead:
    """What an epoch read: bytes of records by host, and of those that the host had not read before."""

    epoch: int
    num_bytes: Mapping[str, int]
    num_new_bytes: Mapping[str, int]


@dataclass(frozen=True)
class EvalStarted:
    """The evaluation after an epoch begins."""

    epoch: int


@dataclass(frozen=True)
class Evaluated:
    """The evaluation after an epoch is over; first_epoch: of the block that ends with it."""

    epoch: int
    first_epoch: int
    time_s: float
    num_top1: int
    num_top5: int
    num_images: int

    @property
    def top1(self) -> float:
        return self.num_top1 / self.num_images

    @property
    def top5(self) -> float:
        return self.num_top5 / self.num_images


@dataclass(frozen=True)
class ReferenceFound:
    """The reference runs of a run, or that there are none: in a sentence, and as metrics.jsonl holds them."""

    text: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """An evaluation beside the reference runs: in a sentence, and as metrics.jsonl holds it; is_new: a new alarm."""

    text: str
    record: Mapping[str, Any]
    is_new: bool


@dataclass(frozen=True)
class RanksTimed:
    """What the steps since the last evaluation took each rank.

    Args:
        ranks: per rank: rank, host, cores, num_steps, data_s, compute_s, wait_s.
    """

    epoch: int
    time_s: float
    ranks: Sequence[Mapping[str, Any]]
    stragglers: Sequence[str]


@dataclass(frozen=True)
class Saving:
    """A checkpoint is being taken."""


@dataclass(frozen=True)
class Alive:
    """Something went on in an evaluation."""


@dataclass(frozen=True)
class Noted:
    """Something worth knowing of the run."""

    text: str


@dataclass(frozen=True)
class Warned:
    """Something that does not stop the run."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The run is over: converged, aborted, interrupted or failed."""

    status: str
    epochs_to_converge: int | None
    time_s: float
    best_top1: float
    images_per_s: float


Event = (Opened | InitStarted | Built | InitStopped | RunStarted | Resumed | EpochStarted | StepDone | EpochDone
         | RecordsRead | EvalStarted | Evaluated | ReferenceFound | Compared | RanksTimed | Saving | Alive | Noted
         | Warned | Ended)


class Sink(Protocol):
    """What keeps or shows events, and changes nothing of the run."""

    def see(self, event: Event) -> None:
        """An event has happened."""

    def close(self) -> None:
        """There will be no more."""


class Sinks:
    """All sinks of a rank."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)

    def see(self, event: Event) -> None:
        """An event has happened."""
        for sink in self._sinks:
            sink.see(event)

    def close(self) -> None:
        """There will be no more; all are closed, whatever one of them says."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)
