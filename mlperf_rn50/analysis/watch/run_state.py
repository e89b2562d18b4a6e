"""What a run folder says now of the run in it, while it is written: read a little at a time, and believed of nothing.

Nothing is locked and nothing is written. Times are those of the run's own clock, and the age of its files.
"""
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from mlperf_rn50.analysis.sets.cost import node_hours

WAITING, STARTING = 'waiting', 'starting'  # beside the statuses of mlperf.run.Run


@dataclass(frozen=True)
class LiveEvaluation:
    """Top-1, a fraction, after a number of epochs, at a time of the run's clock."""

    epoch: int
    accuracy: float
    time_s: float | None


@dataclass(frozen=True)
class BandPoint:
    """What the reference runs had at an epoch: Top-1 as fractions; None for what too few runs say."""

    epoch: int
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class RankTime:
    """What a step took a rank since the last evaluation: waiting for data, computing, waiting for other ranks."""

    rank: int
    host: str
    data_s: float
    compute_s: float
    wait_s: float

    @property
    def own_s(self) -> float:
        """What the rank itself took: the others wait for that."""
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class Node:
    """The newest sample of a node; None where it has none."""

    host: str
    age_s: float | None
    cpu_percent: float | None  # of all cores
    gpu_percent: float | None
    gpu_power_w: float | None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: how many, and the newest one's step and age."""

    count: int = 0
    step: int | None = None
    age_s: float | None = None


@dataclass(frozen=True)
class UsedEnergy:
    """What the nodes of a run took so far; None of what was not measured."""

    seconds: float  # of the run's clock that it is of
    cpu_kwh: float | None  # of all CPU packages
    gpu_kwh: float | None  # of all GPUs
    reason: str  # why one of them was not measured

    @property
    def kwh(self) -> float | None:
        """Of all that was measured."""
        known = [v for v in (self.cpu_kwh, self.gpu_kwh) if v is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Place:
    """What the folder of a run has beside its log and its metrics."""

    path: str
    number: int | None = None
    others: tuple[tuple[int, str], ...] = ()  # the other runs: their numbers and statuses
    quiet_s: float | None = None
    nodes: tuple[Node, ...] = ()
    checkpoints: Checkpoints = Checkpoints()
    attempts: tuple[str, ...] = ()  # of a launcher, by its own record: how they ended
    energy: UsedEnergy | None = None


@dataclass(frozen=True)
class Setup:
    """What is trained, and where."""

    dataset: str | None = None  # None for ImageNet
    target: float | None = None  # Top-1 as a fraction
    num_nodes: int | None = None
    num_ranks: int | None = None
    global_batch_size: int | None = None
    opt_name: str | None = None
    seed: int | None = None
    train_samples: int | None = None


@dataclass(frozen=True)
class RunClock:
    """How far a run is."""

    epoch: float | None = None
    max_epochs: int | None = None
    step: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    images_per_s: float | None = None  # over the epoch so far
    time_s: float | None = None  # at its end, or now while it runs
    epoch_s: float | None = None  # of an epoch with its evaluation, at the pace of late
    left_s: float | None = None  # to max_epochs


@dataclass(frozen=True)
class ReferenceRuns:
    """A run beside its reference runs."""

    reference_text: str = ''
    num_reference: int = 0
    reference_epochs: tuple[float, float] | None = None  # first and last at which they were at the target
    reference_left_s: tuple[float, float] | None = None
    band: tuple[BandPoint, ...] = ()
    verdict: str = ''
    verdict_epoch: int | None = None
    is_behind: bool = False


@dataclass(frozen=True)
class LiveRun:
    """A run as its folder says it is now; None for what is not known."""

    place: Place
    status: str = WAITING  # there is no log yet; STARTING: it says nothing yet; else as in mlperf.run.Run
    has_end: bool = False  # of its log; a failed run without one was killed
    note: str = ''
    setup: Setup = Setup()
    clock: RunClock = RunClock()
    reference: ReferenceRuns = ReferenceRuns()
    speeds: tuple[tuple[float, float], ...] = ()  # seconds on its clock, images per second over the epoch so far
    evaluations: tuple[LiveEvaluation, ...] = ()
    ranks: tuple[RankTime, ...] = ()
    num_resumes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added any more: an interrupted or killed run may be gone on with."""
        return self.has_end and self.status in ('converged', 'aborted', 'failed')

    @property
    def skew(self) -> float | None:
        """How much longer the slowest rank's own part of a step is than the median one's; a fraction, None for one."""
        own_s = [r.own_s for r in self.ranks]
        middle = statistics.median(own_s) if len(own_s) > 1 else 0.0
        return max(own_s) / middle - 1 if middle > 0 else None

    @property
    def node_hours(self) -> float | None:
        return self._node_hours(0.0)

    @property
    def node_hours_at_end(self) -> float | None:
        return self._node_hours(self.clock.left_s)

    def _node_hours(self, left_s: float | None) -> float | None:
        time_s, num_nodes = self.clock.time_s, self.setup.num_nodes
        return None if time_s is None or left_s is None or not num_nodes else node_hours(time_s + left_s, num_nodes)


def to_json(run: LiveRun, price: float | None = None) -> dict[str, Any]:
    """A run for programs; price: of a node-hour."""
    content = asdict(run)
    for group in ('place', 'setup', 'clock', 'reference'):
        content |= content.pop(group)
    derived = ('skew', 'node_hours', 'node_hours_at_end', 'is_over')
    return {**content, **{name: getattr(run, name) for name in derived}, 'cost': cost_of(run.node_hours, price),
            'cost_at_end': cost_of(run.node_hours_at_end, price)}


def cost_of(hours: float | None, price: float | None) -> float | None:
    """What node-hours cost; None where one of the two is not known."""
    return None if hours is None or price is None else hours * price
