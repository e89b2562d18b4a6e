"""What a run folder says now of the run in it, while it is written: read a little at a time, and believed of nothing.

Nothing is locked and nothing is written. Times are those of the run's own clock, and the age of its files.
"""
import math
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import read_text, regular_file
from mlperf_rn50.mlperf import keys
from mlperf_rn50.mlperf.collect import integer, number
from mlperf_rn50.mlperf.description import beside
from mlperf_rn50.mlperf.energy import KINDS, Energy, read_energy
from mlperf_rn50.mlperf.events import printable
from mlperf_rn50.mlperf.facts import age_s
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.mlperf.run import Run
from mlperf_rn50.mlperf.telemetry import find_telemetry
from mlperf_rn50.study.cost import kwh, node_hours
from mlperf_rn50.study.tail import Tail, object_of

_MAX_CONFIG_BYTES = 1 << 14
_TAIL_BYTES = 1 << 16  # of a node's samples: the newest is wanted
_MAX_POINTS, _MAX_RANKS, _MAX_NODES, _MAX_TEXT, _MAX_SAID = 20_000, 4096, 256, 400, 20
_MAX_EPOCH, _MAX_S = 10**6, 1e9
_PACE_EPOCHS = 4.0  # the last ones, over which the pace is taken
_UNEXPECTEDLY_QUIET_S = 60.0  # of a node's telemetry, beyond what other nodes are quiet
_READ_AGAIN_S = 5.0  # a log that was not written is asked again whether somebody holds its lock
# Energy is read from all samples: seldom, and the less often the longer it takes.
_ENERGY_PERIOD_S, _ENERGY_SHARE = 60.0, 0.05
WAITING, STARTING = 'waiting', 'starting'  # beside the statuses of mlperf.run.Run


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
    """What a step took a rank since the last evaluation, in seconds: waiting for data, computing, waiting for others.
    """

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
    """The newest sample of a node; None where it has none.

    Args:
        cpu_percent: of all cores.
    """

    host: str
    age_s: float | None
    cpu_percent: float | None
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
    """What the nodes of a run took so far.

    Args:
        seconds: of the run's clock that it is of.
        cpu_kwh: of all CPU packages; None where it was not measured.
        gpu_kwh: of all GPUs; the same.
        reason: why one of them was not measured.
    """

    seconds: float
    cpu_kwh: float | None
    gpu_kwh: float | None
    reason: str

    @property
    def kwh(self) -> float | None:
        """Of all that was measured."""
        known = [v for v in (self.cpu_kwh, self.gpu_kwh) if v is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class LiveRun:
    """A run as its folder says it is now; None for what is not known.

    Args:
        others: the other runs of the folder: their numbers and statuses.
        status: waiting, there is no log yet; starting, it says nothing yet; else as in mlperf.run.Run.
        has_end: whether its log has an end; a failed run without one was killed.
        dataset: None for ImageNet.
        target: Top-1 as a fraction.
        time_s: on its clock: of its end, or now while it goes on.
        images_per_s: over the epoch so far.
        epoch_s: one with its evaluation, at the pace of late.
        reference_epochs: the first and last at which reference runs were at the target.
        skew: how much longer the slowest rank's own part of a step is than the median one's; a fraction.
        attempts: of a launcher, by its own record: how they ended.
    """

    path: str
    number: int | None = None
    others: tuple[tuple[int, str], ...] = ()
    status: str = WAITING
    has_end: bool = False
    note: str = ''
    quiet_s: float | None = None
    dataset: str | None = None
    target: float | None = None
    num_nodes: int | None = None
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
    time_s: float | None = None
    images_per_s: float | None = None
    speeds: tuple[tuple[float, float], ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    epoch_s: float | None = None
    left_s: float | None = None
    reference_text: str = ''
    num_reference: int = 0
    reference_epochs: tuple[float, float] | None = None
    reference_left_s: tuple[float, float] | None = None
    band: tuple[BandPoint, ...] = ()
    verdict: str = ''
    verdict_epoch: int | None = None
    is_behind: bool = False
    ranks: tuple[RankTime, ...] = ()
    skew: float | None = None
    nodes: tuple[Node, ...] = ()
    checkpoints: Checkpoints = Checkpoints()
    num_resumes: int = 0
    attempts: tuple[str, ...] = ()
    node_hours: float | None = None
    node_hours_at_end: float | None = None
    energy: UsedEnergy | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added any more: an interrupted or killed run may be gone on with."""
        return self.has_end and self.status in ('converged', 'aborted', 'failed')

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation."""
        return max(self.evaluations, key=lambda e: e.accuracy, default=None)


def _text(value: Any) -> str:
    """Text of a record, in one line that may be shown; '' for anything else."""
    return printable(' '.join(value[:_MAX_TEXT].split())) if isinstance(value, str) else ''


def _pair(value: Any, high: float) -> tuple[float, float] | None:
    """Two numbers from 0, in their order."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    first, second = (number(v, 0, high) for v in value)
    return None if first is None or second is None or first > second else (float(first), float(second))


def _band(value: Any) -> tuple[BandPoint, ...]:
    """The band of a reference record: rows of epoch, point of the schedule, mean, low, high, runs."""
    rows = [row for row in value[:_MAX_POINTS] if isinstance(row, list) and len(row) >= 5] if isinstance(
        value, list) else []
    points = {epoch: BandPoint(epoch, *(number(v, 0, 1) for v in row[2:5])) for row in rows
              if (epoch := integer(row[0], 0, _MAX_EPOCH)) is not None}
    return tuple(points[e] for e in sorted(points))


@dataclass
class _Course:
    """What the records of metrics.jsonl come to, one after another."""

    train: dict[str, Any] = field(default_factory=dict)  # numbers of the last report
    points: list[tuple[float, float]] = field(default_factory=list)  # epoch, time_s
    speeds: list[tuple[float, float]] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    ranks: tuple[RankTime, ...] = ()
    stragglers: tuple[str, ...] = ()
    reference: dict[str, Any] = field(default_factory=dict)
    band: dict[int, BandPoint] = field(default_factory=dict)
    verdicts: dict[int, dict[str, Any]] = field(default_factory=dict)
    layout: dict[str, int | None] = field(default_factory=dict)
    num_resumes: int = 0

    def see(self, record: Mapping[str, Any]) -> None:
        """One more record."""
        seen = {'train': self._train, 'eval': self._eval, 'ranks': self._ranks, 'resumed': self._resumed,
                'reference': self._reference, 'course': self._verdict}.get(str(record.get('event')))
        if seen:
            seen(record)

    def _at(self, epoch: float | None, time_s: float | None) -> None:
        """The run has got so far."""
        if epoch is None or time_s is None:
            return
        self.points = [p for p in self.points[-_MAX_POINTS:] if p[0] >= epoch - _PACE_EPOCHS]
        self.points.append((epoch, time_s))

    def _train(self, record: Mapping[str, Any]) -> None:
        epoch, time_s = number(record.get('epoch'), 0, _MAX_EPOCH), number(record.get('time_s'), 0, _MAX_S)
        speed = number(record.get('images_per_s'), 0, 1e12)
        self.train = {'epoch': epoch, 'time_s': time_s, 'images_per_s': speed,
                      'step': integer(record.get('step'), 0), 'loss': number(record.get('loss'), -1e9, 1e9),
                      'learning_rate': number(record.get('learning_rate'), 0, 1e9)}
        self._at(epoch, time_s)
        if time_s is not None and speed is not None:
            self.speeds.append((time_s, speed))
            if len(self.speeds) > _MAX_POINTS:
                del self.speeds[1::2]

    def _eval(self, record: Mapping[str, Any]) -> None:
        epoch, images = integer(record.get('epoch'), 1, _MAX_EPOCH), integer(record.get('num_images'), 1)
        hits, time_s = integer(record.get('num_top1')), number(record.get('time_s'), 0, _MAX_S)
        if epoch is None or images is None or hits is None or hits > images or len(self.evaluations) >= _MAX_POINTS:
            return
        self.evaluations[epoch] = Evaluation(epoch, hits / images, time_s)
        self._at(epoch, time_s)

    def _ranks(self, record: Mapping[str, Any]) -> None:
        ranks, said = record.get('ranks'), record.get('stragglers')
        times = [_rank_time(r) for r in ranks[:_MAX_RANKS]] if isinstance(ranks, list) else []
        self.ranks = tuple(t for t in times if t)
        self.stragglers = tuple(t for s in said[:_MAX_SAID] if (t := _text(s))) if isinstance(said, list) else ()

    def _resumed(self, record: Mapping[str, Any]) -> None:
        """What was written of steps after the checkpoint is written again."""
        self.num_resumes += 1
        step, last = integer(record.get('step')), self.train
        self.layout = {name: integer(record.get(name), 1) for name in ('number_of_nodes', 'number_of_ranks',
                                                                       'global_batch_size')}
        if step is not None and last.get('step') and last.get('epoch'):
            epoch = step * last['epoch'] / last['step']
            self.evaluations = {e: v for e, v in self.evaluations.items() if e <= epoch + 1e-6}
            self.verdicts = {e: v for e, v in self.verdicts.items() if e <= epoch + 1e-6}
            self.train = {'step': step, 'epoch': epoch}
        self.points, self.ranks, self.stragglers = [], (), ()

    def _reference(self, record: Mapping[str, Any]) -> None:
        self.reference = {'text': _text(record.get('text')), 'count': integer(record.get('num_reference')) or 0,
                          'epochs': _pair(record.get('reference_epochs'), _MAX_EPOCH)}
        self.band = {b.epoch: b for b in _band(record.get('band'))}

    def _verdict(self, record: Mapping[str, Any]) -> None:
        epoch = integer(record.get('epoch'), 1, _MAX_EPOCH)
        if epoch is None or len(self.verdicts) >= _MAX_POINTS:
            return
        self.verdicts[epoch] = {'text': _text(record.get('text')), 'behind': record.get('behind') is True,
                                'epochs': _pair(record.get('reference_epochs'), _MAX_EPOCH)}
        if epoch not in self.band and number(record.get('mean'), 0, 1) is not None:
            self.band[epoch] = BandPoint(epoch, *(number(record.get(k), 0, 1) for k in ('mean', 'low', 'high')))

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch, evaluations included, over the last ones."""
        if not self.points:
            return None
        (first, since_s), (last, now_s) = self.points[0], self.points[-1]
        return (now_s - since_s) / (last - first) if last > first and now_s >= since_s else None


def _rank_time(value: Any) -> RankTime | None:
    """What a step took a rank; None for what is no record of one."""
    if not isinstance(value, dict):
        return None
    rank, steps = integer(value.get('rank'), 0, 10**6), integer(value.get('num_steps'), 1)
    parts = [number(value.get(k), 0, _MAX_S) for k in ('data_s', 'compute_s', 'wait_s')]
    if rank is None or steps is None or None in parts:
        return None
    return RankTime(rank, _text(value.get('host')), *(p / steps for p in parts if p is not None))


def skew_of(ranks: Sequence[RankTime]) -> float | None:
    """How much longer the slowest rank's own part of a step is than the median one's, as a fraction; None for one."""
    middle = statistics.median([r.own_s for r in ranks]) if len(ranks) > 1 else 0.0
    return max(r.own_s for r in ranks) / middle - 1 if middle > 0 else None


class Follower:
    """Follows the run of a folder, the newest one, or the run whose log is named."""

    def __init__(self, path: Path):
        """
        Raises:
            UserError: it is a file, and no log of ours.
        """
        self.path, self.folder, self._fixed = path, path, None
        if m := re.fullmatch(r'result_(\d{1,9})\.txt', path.name):
            self.folder, self._fixed = path.parent, int(m[1])
        elif path.is_file():
            raise UserError(f'{path}: got a file, expected a run folder, or result_<k>.txt in one')
        self._logs: dict[int, tuple[Any, float, Run | UserError]] = {}  # by number: signature, when, what it says
        self._tail, self._course, self._was_there = Tail(Path()), _Course(), False
        self._energy: tuple[Any, float, UsedEnergy | None] = None, 0.0, None  # of what, when to read it again, what
        self._config: tuple[Any, Mapping[str, Any]] = None, {}  # signature, content

    def look(self, now_s: float | None = None) -> LiveRun:
        """The run now; now_s: seconds since 1970, the present where None."""
        now_s = time.time() if now_s is None else now_s
        try:
            numbers = _numbers(self.folder)
        except OSError as e:
            return LiveRun(str(self.path), note=self._absence(e))
        self._was_there = True
        wanted = max(numbers, default=None) if self._fixed is None else self._fixed
        if wanted is None or wanted not in numbers:
            return LiveRun(str(self.path), others=self._others(numbers, wanted, now_s), note=_emptiness(self.folder),
                           attempts=_attempts(self.folder, None))
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
        """The energy of a run so far."""
        of_what, again_at, used = self._energy
        now = time.monotonic()
        is_final = run.status != 'running'
        if of_what == (what := (run.path, is_final)) and (is_final or now < again_at):
            return used
        used = _used_energy(read_energy(run))
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
            self._tail, self._course = Tail(metrics), _Course()
        is_anew, records = self._tail.read()
        if is_anew:
            self._course = _Course()
        for record in records:
            self._course.see(record)
        config = beside(log, 'config', '.yaml')
        if (signature := (config, _signature(config))) != self._config[0]:
            self._config = signature, _load_config(config)
        ages = {path: age for path in (log, metrics) if (age := age_s(path, now_s)) is not None}
        facts: dict[str, Any] = {
            'path': str(self.path), 'number': number, 'others': self._others(numbers, number, now_s),
            'quiet_s': min(ages.values(), default=None), 'nodes': _nodes(self.folder, number, now_s),
            'checkpoints': _checkpoints(beside(log, 'checkpoints', ''), now_s),
            'attempts': _attempts(self.folder, number),
            'energy': None if isinstance(said, UserError) else self._used(said)}
        return _summary(facts, said, self._course, self._config[1], ages.get(metrics))


def _summary(facts: dict[str, Any], said: Run | UserError, course: _Course, config: Mapping[str, Any],
             metrics_age_s: float | None) -> LiveRun:
    """A run, from what its log says, its metrics come to and its configuration has."""
    if isinstance(said, UserError):
        return LiveRun(status=STARTING, note=f'its log says nothing yet: {_text(str(said))}', **facts)
    last = course.train
    is_running = said.status == 'running'
    evaluations = [course.evaluations[e] for e in sorted(course.evaluations)] or [
        Evaluation(e.epoch, e.accuracy, e.time_s) for e in said.evaluations]
    epoch = max(last.get('epoch') or 0.0, evaluations[-1].epoch if evaluations else 0.0)
    seen_s = max(last.get('time_s') or 0.0, (evaluations[-1].time_s or 0.0) if evaluations else 0.0)
    since_s = (metrics_age_s or 0.0) if is_running and seen_s else 0.0
    time_s = said.time_to_train_s if said.time_to_train_s is not None else seen_s + since_s
    max_epochs, epoch_s = _max_epochs(config), course.epoch_s
    verdict = course.verdicts[max(course.verdicts)] if course.verdicts else {}
    reference_epochs = verdict.get('epochs') or course.reference.get('epochs')

    def left(until: float) -> float | None:
        return max(0.0, (until - epoch) * epoch_s - since_s) if is_running and epoch_s is not None else None

    left_s = left(max_epochs) if max_epochs else None
    pair = [left(e) for e in reference_epochs] if reference_epochs else []
    num_nodes = course.layout.get('number_of_nodes') or said.num_nodes
    return LiveRun(
        status=said.status, has_end=keys.RUN_STOP in said.lines,
        dataset=None if said.is_imagenet else _text(said.dataset) or 'another data set',
        target=said.target_accuracy, num_nodes=num_nodes,
        num_ranks=course.layout.get('number_of_ranks') or said.num_ranks,
        global_batch_size=course.layout.get('global_batch_size') or said.global_batch_size,
        opt_name=_text(said.opt_name) or None, seed=said.seed, train_samples=said.train_samples,
        epoch=epoch, max_epochs=max_epochs, step=last.get('step'), loss=last.get('loss'),
        learning_rate=last.get('learning_rate'), time_s=time_s, images_per_s=last.get('images_per_s'),
        speeds=tuple(course.speeds), evaluations=tuple(evaluations), epoch_s=epoch_s, left_s=left_s,
        reference_text=course.reference.get('text', ''), num_reference=course.reference.get('count', 0),
        reference_epochs=reference_epochs,
        reference_left_s=(pair[0], pair[1]) if pair and pair[0] is not None and pair[1] is not None else None,
        band=tuple(course.band[e] for e in sorted(course.band)), verdict=verdict.get('text', ''),
        verdict_epoch=max(course.verdicts, default=None), is_behind=verdict.get('behind', False), ranks=course.ranks,
        skew=skew_of(course.ranks),
        num_resumes=max(said.num_resumes, course.num_resumes),
        node_hours=node_hours(time_s, num_nodes) if num_nodes else None,
        node_hours_at_end=node_hours(time_s + left_s, num_nodes) if num_nodes and left_s is not None else None,
        warnings=_warnings(said, course, verdict, facts['nodes']), **facts)


def _warnings(said: Run, course: _Course, verdict: Mapping[str, Any], nodes: Sequence[Node]) -> tuple[str, ...]:
    """What to mind, the weightiest first."""
    behind = [verdict['text'] or 'behind the reference runs'] if verdict.get('behind') else []
    quiet = [n for n in nodes if n.age_s is not None and n.age_s > _UNEXPECTEDLY_QUIET_S
             + min(m.age_s for m in nodes if m.age_s is not None)] if said.status == 'running' else []
    silent = [f'telemetry of {n.host}: nothing was written for {n.age_s:.0f} s' for n in quiet]
    log = [_text(w.text) for w in said.warnings if w.line is None or not w.text.startswith('no run_stop')]
    return (*behind, *course.stragglers, *silent, *log)[:_MAX_SAID]


def _used_energy(energy: Energy) -> UsedEnergy:
    reasons = dict.fromkeys(energy.reasons[kind] for kind in KINDS if kind in energy.reasons)
    return UsedEnergy(energy.seconds, kwh(energy.cpu_joules), kwh(energy.gpu_joules),
                      printable('; '.join(reasons))[:_MAX_TEXT])


def _numbers(folder: Path) -> list[int]:
    """The numbers of the runs of a folder that have begun a log.

    Raises:
        OSError: it cannot be listed.
    """
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


def _load_config(path: Path) -> Mapping[str, Any]:
    """config.yaml of a run; empty where it cannot be read."""
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        os.close(regular_file(os.fspath(path), os.O_RDONLY))
        config = yaml.safe_load(read_text(path, _MAX_CONFIG_BYTES))
        return config if isinstance(config, dict) else {}
    return {}


def _max_epochs(config: Mapping[str, Any]) -> int | None:
    """Epochs after which a run gives up, as train/plan.py has it."""
    train, schedule = config.get('train'), config.get('schedule')
    given = integer(train.get('max_epochs'), 1, _MAX_EPOCH) if isinstance(train, dict) else None
    decay = number(schedule.get('decay_epochs'), 0, _MAX_EPOCH) if isinstance(schedule, dict) else None
    return given or (max(1, int(decay)) if decay is not None else None)


def _checkpoints(folder: Path, now_s: float) -> Checkpoints:
    """The checkpoints of a folder that are whole."""
    found = {}
    with suppress(OSError), os.scandir(folder) as entries:
        found = {int(m[1]): Path(e.path) for e in entries if (m := re.fullmatch(r'step_(\d{1,12})', e.name))}
    return Checkpoints(len(found), max(found), age_s(found[max(found)], now_s)) if found else Checkpoints()


def _attempts(folder: Path, run: int | None) -> tuple[str, ...]:
    """How the attempts ended that a launcher noted of a run, None for those that got to none."""
    _, records = Tail(folder / 'attempts.jsonl').read()
    mine = [r for r in records if integer(r.get('run')) == run]
    return tuple(_attempt(r) for r in mine[-_MAX_SAID:])


def _attempt(record: Mapping[str, Any]) -> str:
    code = integer(record.get('exit_code'), -255, 255)
    end = _text(record.get('end')) or 'cut short'
    can = 'can be resumed' if record.get('can_resume') is True else 'cannot be resumed'
    return f'{end} (exit code {"unknown" if code is None else code}){"" if end == "converged" else ", " + can}'


def _nodes(folder: Path, number_of_run: int, now_s: float) -> tuple[Node, ...]:
    """The newest sample of every node of a run, by name."""
    paths = find_telemetry(folder).get(str(number_of_run), ())
    return tuple(_node(path, now_s) for path in paths[:_MAX_NODES])


def _node(path: Path, now_s: float) -> Node:
    sample = _last_sample(path)
    gpus = sample.get('gpus')
    devices = [g for g in gpus[:64] if isinstance(g, dict)] if isinstance(gpus, list) else []
    used = [u for g in devices if (u := number(g.get('utilization_percent'), 0, 100)) is not None]
    power = [w for g in devices if (w := number(g.get('power_w'), 0, 1e5)) is not None]
    return Node(printable(path.stem.split('_', 2)[-1]), age_s(path, now_s),
                number(sample.get('cpu_percent'), 0, 100), statistics.fmean(used) if used else None,
                math.fsum(power) if power else None)


def _last_sample(path: Path) -> Mapping[str, Any]:
    """The last sample of a node's file; empty without one."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            lines = f.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        return {}
    return next((r for line in reversed(lines) if line.endswith(b'\n') and (r := object_of(line)) and 'event' not in r),
                {})


def to_json(run: LiveRun, price: float | None = None) -> dict[str, Any]:
    """A run for programs; price: of a node-hour."""
    return {**asdict(run), 'is_over': run.is_over, 'cost': cost_of(run.node_hours, price),
            'cost_at_end': cost_of(run.node_hours_at_end, price)}


def cost_of(hours: float | None, price: float | None) -> float | None:
    """What node-hours cost; None where one of the two is not known."""
    return None if hours is None or price is None else hours * price
