"""What a run folder says now of the run in it, while it is written: read a little at a time, and believed of nothing.

Nothing is locked and nothing is written. Times are those of the run's own clock, and the age of its files.
"""
import math
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import read_text, regular_file
from mlperf_rn50.jsonl import Tail, decode, read_lines
from mlperf_rn50.mlperf import keys
from mlperf_rn50.mlperf.description import beside
from mlperf_rn50.mlperf.energy import KINDS, read_energy
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.facts import age_s
from mlperf_rn50.mlperf.metrics import Epoch, Number
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.telemetry import find_telemetry, host_of
from mlperf_rn50.study.cost import kwh, node_hours

_MAX_CONFIG_BYTES = 1 << 14
_TAIL_BYTES = 1 << 16  # of a node's samples: the newest is wanted
_MAX_POINTS, _MAX_RANKS, _MAX_NODES, _MAX_TEXT, _MAX_SAID = 20_000, 4096, 256, 400, 20
_PACE_EPOCHS = 4.0  # the last ones, over which the pace is taken
_UNEXPECTEDLY_QUIET_S = 60.0  # of a node's telemetry, beyond what other nodes are quiet
_READ_AGAIN_S = 5.0  # a log that was not written is asked again whether somebody holds its lock
# Energy is read from all samples: seldom, and the less often the longer it takes.
_ENERGY_PERIOD_S, _ENERGY_SHARE = 60.0, 0.05
WAITING, STARTING = 'waiting', 'starting'  # beside the statuses of mlperf.run.Run

Epochs = Annotated[float, msgspec.Meta(ge=0, le=10**6)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class _Report(msgspec.Struct, tag_field='event', tag='train'):
    step: Whole | None = None
    epoch: Epochs = 0.0
    time_s: Number | None = None
    loss: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] | None = None
    learning_rate: Number | None = None
    images_per_s: Number | None = None


class _Evaluated(msgspec.Struct, tag_field='event', tag='eval'):
    epoch: Epoch
    num_top1: Whole
    num_images: Count
    time_s: Number | None = None


class _RankSteps(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, le=10**6)]
    host: str
    num_steps: Count
    data_s: Number
    compute_s: Number
    wait_s: Number


class _Ranks(msgspec.Struct, tag_field='event', tag='ranks'):
    ranks: list[_RankSteps]
    stragglers: list[str]


class _Resumed(msgspec.Struct, tag_field='event', tag='resumed'):
    step: Whole
    number_of_nodes: Count | None = None
    number_of_ranks: Count | None = None
    global_batch_size: Count | None = None


class _Reference(msgspec.Struct, tag_field='event', tag='reference'):
    text: str = ''
    num_reference: Whole = 0
    reference_epochs: tuple[Epochs, Epochs] | None = None
    # Epoch, point of the schedule, mean, low, high, number of runs.
    band: list[tuple[Epoch, Any, Fraction | None, Fraction | None, Fraction | None, Any]] = []


class _Verdict(msgspec.Struct, tag_field='event', tag='course'):
    epoch: Epoch
    text: str = ''
    behind: bool = False
    reference_epochs: tuple[Epochs, Epochs] | None = None
    mean: Fraction | None = None
    low: Fraction | None = None
    high: Fraction | None = None


_METRICS = _Report | _Evaluated | _Ranks | _Resumed | _Reference | _Verdict


class _Attempt(msgspec.Struct):
    run: int | None
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)] | None = None
    end: str | None = None
    can_resume: bool = False


class _Gpu(msgspec.Struct):
    utilization_percent: Percent | None = None
    power_w: Annotated[float, msgspec.Meta(ge=0, le=1e5)] | None = None


class _Sample(msgspec.Struct):
    event: str | None = None
    cpu_percent: Percent | None = None
    gpus: list[_Gpu] = []


@dataclass(frozen=True)
class Evaluation:
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
    evaluations: tuple[Evaluation, ...] = ()
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


def _text(value: str) -> str:
    """Text of a record, in one line that may be shown."""
    return printable(' '.join(value[:_MAX_TEXT].split()))


@dataclass
class _Course:
    """What the records of metrics.jsonl come to, one after another."""

    last: _Report = field(default_factory=_Report)
    points: list[tuple[float, float]] = field(default_factory=list)  # epoch, time_s
    speeds: list[tuple[float, float]] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()
    stragglers: tuple[str, ...] = ()
    reference: _Reference = field(default_factory=_Reference)
    band: dict[int, BandPoint] = field(default_factory=dict)
    verdicts: dict[int, _Verdict] = field(default_factory=dict)
    layout: _Resumed | None = None
    num_resumes: int = 0

    def see(self, record: _METRICS) -> None:
        """One more record."""
        match record:
            case _Report():
                self.last = record
                self._at(record.epoch, record.time_s, record.images_per_s)
            case _Evaluated() if record.num_top1 <= record.num_images and len(self.evaluations) < _MAX_POINTS:
                self.evaluations[record.epoch] = Evaluation(record.epoch, record.num_top1 / record.num_images,
                                                            record.time_s)
                self._at(record.epoch, record.time_s)
            case _Ranks():
                self.ranks = tuple(RankTime(r.rank, _text(r.host), *(s / r.num_steps for s in (
                    r.data_s, r.compute_s, r.wait_s))) for r in record.ranks[:_MAX_RANKS])
                self.stragglers = tuple(filter(None, map(_text, record.stragglers[:_MAX_SAID])))
            case _Resumed():
                self._resumed(record)
            case _Reference():
                self.reference = record
                self.band = {epoch: BandPoint(epoch, mean, low, high) for epoch, _, mean, low, high, _ in record.band}
            case _Verdict() if len(self.verdicts) < _MAX_POINTS:
                self.verdicts[record.epoch] = record
                if record.epoch not in self.band and record.mean is not None:
                    self.band[record.epoch] = BandPoint(record.epoch, record.mean, record.low, record.high)

    def _at(self, epoch: float, time_s: float | None, images_per_s: float | None = None) -> None:
        """The run has got so far."""
        if time_s is None:
            return
        self.points = [p for p in self.points[-_MAX_POINTS:] if p[0] >= epoch - _PACE_EPOCHS] + [(epoch, time_s)]
        if images_per_s is not None:
            self.speeds.append((time_s, images_per_s))
            if len(self.speeds) > _MAX_POINTS:
                del self.speeds[1::2]

    def _resumed(self, record: _Resumed) -> None:
        """What was written of steps after the checkpoint is written again."""
        self.num_resumes += 1
        self.layout = record
        if self.last.step and self.last.epoch:
            epoch = record.step * self.last.epoch / self.last.step
            self.evaluations = {e: v for e, v in self.evaluations.items() if e <= epoch + 1e-6}
            self.verdicts = {e: v for e, v in self.verdicts.items() if e <= epoch + 1e-6}
            self.last = _Report(record.step, epoch)
        self.points, self.ranks, self.stragglers = [], (), ()

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch, evaluations included, over the last ones."""
        if not self.points:
            return None
        (first, since_s), (last, now_s) = self.points[0], self.points[-1]
        return (now_s - since_s) / (last - first) if last > first and now_s >= since_s else None


class Follower:
    """Follows the run of a folder, the newest one, or the run whose log is named."""

    def __init__(self, path: Path):
        """Raise UserError for a file that is no log of ours."""
        self.path, self.folder, self._fixed = path, path, None
        if m := re.fullmatch(r'result_(\d{1,9})\.txt', path.name):
            self.folder, self._fixed = path.parent, int(m[1])
        elif path.is_file():
            raise UserError(f'{path}: got a file, expected a run folder, or result_<k>.txt in one')
        self._logs: dict[int, tuple[Any, float, Run | UserError]] = {}  # by number: signature, when, what it says
        self._tail, self._course, self._was_there = Tail(Path(), _METRICS), _Course(), False
        self._energy: tuple[Any, float, UsedEnergy | None] = None, 0.0, None  # of what, when to read it again, what

    def look(self, now_s: float | None = None) -> LiveRun:
        """The run now; now_s: seconds since 1970, the present where None."""
        now_s = time.time() if now_s is None else now_s
        try:
            numbers = _numbers(self.folder)
        except OSError as e:
            return LiveRun(Place(str(self.path)), note=self._absence(e))
        self._was_there = True
        wanted = max(numbers, default=None) if self._fixed is None else self._fixed
        if wanted is None or wanted not in numbers:
            place = Place(str(self.path), others=self._others(numbers, wanted, now_s),
                          attempts=_attempts(self.folder, None))
            return LiveRun(place, note=_emptiness(self.folder))
        return self._run(wanted, numbers, now_s)

    def _absence(self, error: OSError) -> str:
        if not isinstance(error, FileNotFoundError):
            return f'cannot be read: {error.strerror}; trying again'
        return 'the folder is gone; waiting for it' if self._was_there else 'not begun yet: no such folder; waiting'

    def _read(self, number: int, now_s: float) -> Run | UserError:
        """What the log of a run says: read again when it was written, or to ask whether it is still held."""
        path = self.folder / f'result_{number}.txt'
        signature = _signature(path)
        before, read_s, said = self._logs.get(number, (None, -math.inf, UserError('')))
        is_open = isinstance(said, UserError) or said.status == 'running' or keys.RUN_STOP not in said.lines
        if signature == before and not (is_open and abs(now_s - read_s) >= _READ_AGAIN_S):
            return said
        try:
            said = read_run(path, now_s)
        except UserError as e:
            said = e
        self._logs[number] = signature, now_s, said
        return said

    def _used(self, run: Run) -> UsedEnergy | None:
        of_what, again_at, used = self._energy
        now = time.monotonic()
        is_final = run.status != 'running'
        if of_what == (what := (run.path, is_final)) and (is_final or now < again_at):
            return used
        used = _used_energy(run)
        taken_s = time.monotonic() - now
        self._energy = what, now + max(_ENERGY_PERIOD_S, taken_s / _ENERGY_SHARE), used
        return used

    def _others(self, numbers: Sequence[int], number: int | None, now_s: float) -> tuple[tuple[int, str], ...]:
        said = {n: self._read(n, now_s) for n in numbers if n != number}
        return tuple((n, STARTING if isinstance(s, UserError) else s.status) for n, s in sorted(said.items()))

    def _run(self, number: int, numbers: Sequence[int], now_s: float) -> LiveRun:
        log = self.folder / f'result_{number}.txt'
        said, metrics = self._read(number, now_s), beside(log, 'metrics', '.jsonl')
        if self._tail.path != metrics:
            self._tail, self._course = Tail(metrics, _METRICS), _Course()
        is_anew, records = self._tail.read()
        if is_anew:
            self._course = _Course()
        for record in records:
            self._course.see(record)
        ages = {path: age for path in (log, metrics) if (age := age_s(path, now_s)) is not None}
        place = Place(str(self.path), number, self._others(numbers, number, now_s), min(ages.values(), default=None),
                      _nodes(self.folder, number, now_s), _checkpoints(beside(log, 'checkpoints', ''), now_s),
                      _attempts(self.folder, number), None if isinstance(said, UserError) else self._used(said))
        if isinstance(said, UserError):
            return LiveRun(place, STARTING, note=f'its log says nothing yet: {_text(str(said))}')
        return _live_run(place, said, self._course, _max_epochs(beside(log, 'config', '.yaml')), ages.get(metrics))


def _live_run(place: Place, said: Run, course: _Course, max_epochs: int | None, metrics_age_s: float | None) -> LiveRun:
    """A run, from what its log says, its metrics come to and its configuration has."""
    last, layout, is_running = course.last, course.layout or _Resumed(0), said.status == 'running'
    evaluations = tuple(course.evaluations[e] for e in sorted(course.evaluations)) or tuple(
        Evaluation(e.epoch, e.accuracy, e.time_s) for e in said.evaluations)
    newest = evaluations[-1] if evaluations else Evaluation(0, 0.0, None)
    epoch, epoch_s = max(last.epoch, newest.epoch), course.epoch_s
    seen_s = max(last.time_s or 0.0, newest.time_s or 0.0)
    since_s = (metrics_age_s or 0.0) if is_running and seen_s else 0.0

    def left(until: float | None) -> float | None:
        if not is_running or epoch_s is None or until is None:
            return None
        return max(0.0, (until - epoch) * epoch_s - since_s)
    time_s = seen_s + since_s if said.time_to_train_s is None else said.time_to_train_s
    clock = RunClock(epoch, max_epochs, last.step, last.loss, last.learning_rate, last.images_per_s, time_s, epoch_s,
                     left(max_epochs))
    verdict = course.verdicts[max(course.verdicts)] if course.verdicts else None
    ends = (verdict and verdict.reference_epochs) or course.reference.reference_epochs
    first_s, last_s = map(left, ends or (None, None))
    reference = ReferenceRuns(
        _text(course.reference.text), course.reference.num_reference, ends,
        None if first_s is None or last_s is None else (first_s, last_s),
        tuple(course.band[e] for e in sorted(course.band)),
        *((_text(verdict.text), verdict.epoch, verdict.behind) if verdict else ()))
    setup = Setup(
        None if said.is_imagenet else _text(said.dataset or '') or 'another data set', said.target_accuracy,
        layout.number_of_nodes or said.num_nodes, layout.number_of_ranks or said.num_ranks,
        layout.global_batch_size or said.global_batch_size, _text(said.opt_name or '') or None, said.seed,
        said.train_samples)
    return LiveRun(
        place, said.status, keys.RUN_STOP in said.lines, setup=setup, clock=clock, reference=reference,
        speeds=tuple(course.speeds), evaluations=evaluations, ranks=course.ranks,
        num_resumes=max(said.num_resumes, course.num_resumes),
        warnings=_warnings(said, course, reference, place.nodes))


def _warnings(said: Run, course: _Course, reference: ReferenceRuns, nodes: Sequence[Node]) -> tuple[str, ...]:
    """What to mind, the weightiest first."""
    behind = [reference.verdict or 'behind the reference runs'] if reference.is_behind else []
    quiet = [n for n in nodes if n.age_s is not None and n.age_s > _UNEXPECTEDLY_QUIET_S
             + min(m.age_s for m in nodes if m.age_s is not None)] if said.status == 'running' else []
    silent = [f'telemetry of {n.host}: nothing was written for {n.age_s:.0f} s' for n in quiet]
    log = [_text(w.text) for w in said.warnings if w.line is None or not w.text.startswith('no run_stop')]
    return (*behind, *course.stragglers, *silent, *log)[:_MAX_SAID]


def _used_energy(run: Run) -> UsedEnergy:
    energy = read_energy(run)
    reasons = dict.fromkeys(energy.reasons[kind] for kind in KINDS if kind in energy.reasons)
    return UsedEnergy(energy.seconds, kwh(energy.cpu_joules), kwh(energy.gpu_joules),
                      printable('; '.join(reasons))[:_MAX_TEXT])


def _numbers(folder: Path) -> list[int]:
    """The numbers of the runs of a folder that have begun a log; raise OSError where it cannot be listed."""
    with os.scandir(folder) as entries:
        return sorted(int(m[1]) for e in entries if (m := re.fullmatch(r'result_(\d{1,9})\.txt', e.name)))


def _emptiness(folder: Path) -> str:
    """What is to be said of a folder without runs: perhaps the folders in it were meant."""
    below: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        below = sorted(e.name for e in entries if e.is_dir() and (Path(e.path) / 'result_0.txt').exists())
    meant = f'; there are runs in {", ".join(map(printable, below[:4]))}{" ..." if below[4:] else ""} below it'
    return f'not begun yet: no log in the folder; waiting{meant if below else ""}'


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None without one."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


def _max_epochs(path: Path) -> int | None:
    """Epochs after which a run gives up, by its config.yaml, as train/plan.py has it; None where it does not tell."""
    with suppress(OSError, ValueError, KeyError, RecursionError, yaml.YAMLError, msgspec.MsgspecError):
        config = msgspec.convert(yaml.safe_load(read_text(path, _MAX_CONFIG_BYTES)), dict[str, dict[str, Any]])
        epochs = config.get('train', {}).get('max_epochs') or config['schedule']['decay_epochs']
        return max(1, int(msgspec.convert(epochs, Epochs)))
    return None


def _checkpoints(folder: Path, now_s: float) -> Checkpoints:
    """The checkpoints of a folder that are whole."""
    found = {}
    with suppress(OSError), os.scandir(folder) as entries:
        found = {int(m[1]): Path(e.path) for e in entries if (m := re.fullmatch(r'step_(\d{1,12})', e.name))}
    return Checkpoints(len(found), max(found), age_s(found[max(found)], now_s)) if found else Checkpoints()


def _attempts(folder: Path, run: int | None) -> tuple[str, ...]:
    """How the attempts ended that a launcher noted of a run, None for those that got to none."""
    own = [a for _, a in read_lines(folder / 'attempts.jsonl', _Attempt) if a.run == run]
    return tuple(map(_ending, own[-_MAX_SAID:]))


def _ending(attempt: _Attempt) -> str:
    end = _text(attempt.end or '') or 'cut short'
    can = '' if end == 'converged' else f', {"can" if attempt.can_resume else "cannot"} be resumed'
    return f'{end} (exit code {"unknown" if attempt.exit_code is None else attempt.exit_code}){can}'


def _nodes(folder: Path, number: int, now_s: float) -> tuple[Node, ...]:
    """The newest sample of every node of a run, by name."""
    return tuple(_node(path, now_s) for path in find_telemetry(folder).get(str(number), ())[:_MAX_NODES])


def _node(path: Path, now_s: float) -> Node:
    sample = _last_sample(path)
    used = [g.utilization_percent for g in sample.gpus if g.utilization_percent is not None]
    power = [g.power_w for g in sample.gpus if g.power_w is not None]
    return Node(printable(host_of(path)), age_s(path, now_s), sample.cpu_percent,
                statistics.fmean(used) if used else None, math.fsum(power) if power else None)


def _last_sample(path: Path) -> _Sample:
    """The last sample of a node's file; an empty one without any."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            lines = f.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        return _Sample()
    found = (decode(line, _Sample) for line in reversed(lines) if line.endswith(b'\n'))
    return next((s for s in found if s and s.event is None), _Sample())


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
