"""Current state of a followed run, and its conversion to JSON."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from mlperf_rn50.analysis.sets.run_set import cost_of, node_hours
from mlperf_rn50.mllog.elapsed import ElapsedParts, render_parts
from mlperf_rn50.mllog.goodput import Goodput, render_goodput

_JSON_KEYS = {'standing': 'verdict', 'standing_epoch': 'verdict_epoch'}
# no log, or no readable log; mllog.run.RunStatus has the other statuses
WAITING, STARTING = 'waiting', 'starting'


@dataclass(frozen=True)
class LiveEvaluation:
    """Accuracy (Top-1) after a number of epochs, as a fraction; time_s is the time since
    run_start."""

    epoch: int
    accuracy: float
    time_s: float | None


@dataclass(frozen=True)
class BandPoint:
    """Mean and band of the reference runs' Top-1 at an epoch, as fractions; None if too few runs
    have a value there."""

    epoch: int
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class RankTime:
    """A rank's seconds per step since the last evaluation.

    data_s: waiting for images or Python. compute_s: with the update. wait_s: exchange, and waiting
    for other ranks.
    """

    rank: int
    host: str
    data_s: float
    compute_s: float
    wait_s: float

    @property
    def own_s(self) -> float:
        """Seconds per step of waiting for images and of computing; the other ranks wait for the
        largest value."""
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class Node:
    """Newest telemetry sample of a node."""

    host: str
    age_s: float | None
    cpu_percent: float | None  # average of all cores
    gpu_percent: float | None
    gpu_power_w: float | None


@dataclass(frozen=True)
class Checkpoints:
    """Number of checkpoints, and the newest one's step and age."""

    count: int = 0
    step: int | None = None
    age_s: float | None = None


@dataclass(frozen=True)
class UsedEnergy:
    """Energy used by all nodes so far; None if not measured."""

    seconds: float  # time on the run's clock that the energy covers
    cpu_kwh: float | None
    gpu_kwh: float | None
    reason: str  # why a measurement is missing, or ''

    @property
    def kwh(self) -> float | None:
        known = [v for v in (self.cpu_kwh, self.gpu_kwh) if v is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class LiveRun:
    """State of a run, with None for unknown values. Fields are also keys of the JSON output, unless
    in _JSON_KEYS."""

    path: str
    number: int | None = None
    others: tuple[tuple[int, str], ...] = ()  # number and status of each other run in the folder
    quiet_s: float | None = None  # time since the last write to the log or metrics
    nodes: tuple[Node, ...] = ()
    checkpoints: Checkpoints = Checkpoints()
    attempts: tuple[str, ...] = ()  # how the launcher's attempts ended
    energy: UsedEnergy | None = None

    status: str = WAITING
    has_launcher: bool = False  # of the folder whose newest run is shown
    has_end: bool = False  # whether the log has run_stop; a failed run without run_stop was killed
    other_benchmark: str = ''  # benchmark of a log that is not of a ResNet training run
    note: str = ''  # reason for WAITING or STARTING
    num_resumes: int = 0
    elapsed_parts: ElapsedParts | None = None  # of a resumed run, up to the last line of its log
    goodput: Goodput | None = None
    warnings: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()  # why the log, or the set of its folder, is refused

    dataset: str | None = None  # None for ImageNet
    target: float | None = None  # Top-1 as a fraction
    num_nodes: int | None = None
    has_changed_nodes: bool = False  # by a resume
    num_ranks: int | None = None
    global_batch_size: int | None = None
    opt_name: str | None = None
    seed: int | None = None
    train_samples: int | None = None

    epoch: float | None = None
    max_epochs: int | None = None
    step: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    images_per_s: float | None = None  # average over the current epoch
    time_s: float | None = None  # since run_start
    epoch_s: float | None = None  # time per epoch with its evaluation, averaged over recent epochs
    left_s: float | None = None  # estimated time to max_epochs
    speeds: tuple[tuple[float, float], ...] = ()  # (time_s, images_per_s)
    evaluations: tuple[LiveEvaluation, ...] = ()
    ranks: tuple[RankTime, ...] = ()
    limit: str = ''  # sentence of mlperf-rn50 why

    reference_text: str = ''
    num_reference: int = 0
    reference_epochs: tuple[float, float] | None = None  # first and last epoch of convergence
    reference_left_s: tuple[float, float] | None = None  # estimated times to reference_epochs
    band: tuple[BandPoint, ...] = ()
    standing: str = ''  # comparison of the last evaluation with the reference runs
    standing_epoch: int | None = None
    is_behind: bool = False

    @property
    def is_over(self) -> bool:
        """True if the log is final, and no launcher may begin another run; an interrupted or killed
        run may still be resumed."""
        is_final = self.status in ('converged', 'aborted', 'failed')
        return self.has_end and is_final and not self.has_launcher

    @property
    def skew(self) -> float | None:
        """Excess of the slowest rank's own_s over the median, as a fraction of the median; None for
        one rank."""
        own_s = [r.own_s for r in self.ranks]
        middle = statistics.median(own_s) if len(own_s) > 1 else 0.0
        return max(own_s) / middle - 1 if middle > 0 else None

    def node_hours(self, left_s: float | None = 0.0) -> float | None:
        """Return the node-hours used so far or, with left_s, those used after that many more
        seconds."""
        if self.time_s is None or left_s is None or not self.num_nodes:
            return None
        if self.has_changed_nodes:  # how long each number was used is not known
            return None
        return node_hours(self.time_s + left_s, self.num_nodes)


def to_json(run: LiveRun, price: float | None = None) -> dict[str, Any]:
    """Return a run as a JSON object; price is the cost of a node-hour."""
    hours, hours_at_end = run.node_hours(), run.node_hours(run.left_s)
    content = {_JSON_KEYS.get(name, name): value for name, value in asdict(run).items()}
    return {
        **content,
        'elapsed_parts': render_parts(run.elapsed_parts) or None,
        **render_goodput(run.goodput),
        'skew': run.skew,
        'is_over': run.is_over,
        'node_hours': hours,
        'cost': cost_of(hours, price),
        'node_hours_at_end': hours_at_end,
        'cost_at_end': cost_of(hours_at_end, price),
    }
