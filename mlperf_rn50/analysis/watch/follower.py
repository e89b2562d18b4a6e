"""Follow a run folder while it is written: read incrementally, and not trusted.

Nothing is locked and nothing is written. Times are those of the run's own clock, and the age of its files.
"""
import math
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from mlperf_rn50.analysis.sets.cost import kwh
from mlperf_rn50.analysis.watch.history import MAX_NODES, MAX_SAID, MAX_TEXT, MetricsHistory, text
from mlperf_rn50.analysis.watch.records import METRICS, AttemptRecord, Epochs, NodeSample, ResumedRecord
from mlperf_rn50.analysis.watch.run_state import (
    STARTING,
    Checkpoints,
    LiveEvaluation,
    LiveRun,
    Node,
    Place,
    ReferenceRuns,
    RunClock,
    Setup,
    UsedEnergy,
)
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import read_text, regular_file
from mlperf_rn50.jsonl import Tail, decode, read_lines
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.events import printable
from mlperf_rn50.mllog.read.description import sibling
from mlperf_rn50.mllog.read.reader import read_run
from mlperf_rn50.mllog.read.resolve import age_s
from mlperf_rn50.mllog.run import Run
from mlperf_rn50.mllog.sidecar.energy import KINDS, read_energy
from mlperf_rn50.mllog.sidecar.telemetry import find_telemetry, host_of

_MAX_CONFIG_BYTES = 1 << 14
_TAIL_BYTES = 1 << 16  # of a node's samples: the newest is wanted
_UNEXPECTEDLY_QUIET_S = 60.0  # of a node's telemetry, beyond what other nodes are quiet
_READ_AGAIN_S = 5.0  # a log that was not written is asked again whether somebody holds its lock
# Energy is read from all samples: seldom, and the less often the longer it takes.
_ENERGY_PERIOD_S, _ENERGY_SHARE = 60.0, 0.05


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
        self._tail, self._course, self._was_there = Tail(Path(), METRICS), MetricsHistory(), False
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
        said, metrics = self._read(number, now_s), sibling(log, 'metrics', '.jsonl')
        if self._tail.path != metrics:
            self._tail, self._course = Tail(metrics, METRICS), MetricsHistory()
        is_anew, records = self._tail.read()
        if is_anew:
            self._course = MetricsHistory()
        for record in records:
            self._course.see(record)
        ages = {path: age for path in (log, metrics) if (age := age_s(path, now_s)) is not None}
        place = Place(str(self.path), number, self._others(numbers, number, now_s), min(ages.values(), default=None),
                      _nodes(self.folder, number, now_s), _checkpoints(sibling(log, 'checkpoints', ''), now_s),
                      _attempts(self.folder, number), None if isinstance(said, UserError) else self._used(said))
        if isinstance(said, UserError):
            return LiveRun(place, STARTING, note=f'its log says nothing yet: {text(str(said))}')
        return _live_run(place, said, self._course, _max_epochs(sibling(log, 'config', '.yaml')), ages.get(metrics))


def _live_run(place: Place, said: Run, course: MetricsHistory, max_epochs: int | None,
              metrics_age_s: float | None) -> LiveRun:
    """A run, from what its log says, its metrics come to and its configuration has."""
    last, layout, is_running = course.last, course.layout or ResumedRecord(0), said.status == 'running'
    evaluations = tuple(course.evaluations[e] for e in sorted(course.evaluations)) or tuple(
        LiveEvaluation(e.epoch, e.accuracy, e.time_s) for e in said.evaluations)
    newest = evaluations[-1] if evaluations else LiveEvaluation(0, 0.0, None)
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
        text(course.reference.text), course.reference.num_reference, ends,
        None if first_s is None or last_s is None else (first_s, last_s),
        tuple(course.band[e] for e in sorted(course.band)),
        *((text(verdict.text), verdict.epoch, verdict.behind) if verdict else ()))
    setup = Setup(
        None if said.is_imagenet else text(said.dataset or '') or 'another data set', said.target_accuracy,
        layout.number_of_nodes or said.num_nodes, layout.number_of_ranks or said.num_ranks,
        layout.global_batch_size or said.global_batch_size, text(said.opt_name or '') or None, said.seed,
        said.train_samples)
    return LiveRun(
        place, said.status, keys.RUN_STOP in said.lines, setup=setup, clock=clock, reference=reference,
        speeds=tuple(course.speeds), evaluations=evaluations, ranks=course.ranks,
        num_resumes=max(said.num_resumes, course.num_resumes),
        warnings=_warnings(said, course, reference, place.nodes))


def _warnings(said: Run, course: MetricsHistory, reference: ReferenceRuns, nodes: Sequence[Node]) -> tuple[str, ...]:
    """What to mind, the weightiest first."""
    behind = [reference.verdict or 'behind the reference runs'] if reference.is_behind else []
    quiet = [n for n in nodes if n.age_s is not None and n.age_s > _UNEXPECTEDLY_QUIET_S
             + min(m.age_s for m in nodes if m.age_s is not None)] if said.status == 'running' else []
    silent = [f'telemetry of {n.host}: nothing was written for {n.age_s:.0f} s' for n in quiet]
    log = [text(w.text) for w in said.warnings if w.line is None or not w.text.startswith('no run_stop')]
    return (*behind, *course.stragglers, *silent, *log)[:MAX_SAID]


def _used_energy(run: Run) -> UsedEnergy:
    energy = read_energy(run)
    reasons = dict.fromkeys(energy.reasons[kind] for kind in KINDS if kind in energy.reasons)
    return UsedEnergy(energy.seconds, kwh(energy.cpu_joules), kwh(energy.gpu_joules),
                      printable('; '.join(reasons))[:MAX_TEXT])


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
    own = [a for _, a in read_lines(folder / 'attempts.jsonl', AttemptRecord) if a.run == run]
    return tuple(map(_ending, own[-MAX_SAID:]))


def _ending(attempt: AttemptRecord) -> str:
    end = text(attempt.end or '') or 'cut short'
    can = '' if end == 'converged' else f', {"can" if attempt.can_resume else "cannot"} be resumed'
    return f'{end} (exit code {"unknown" if attempt.exit_code is None else attempt.exit_code}){can}'


def _nodes(folder: Path, number: int, now_s: float) -> tuple[Node, ...]:
    """The newest sample of every node of a run, by name."""
    return tuple(_node(path, now_s) for path in find_telemetry(folder).get(str(number), ())[:MAX_NODES])


def _node(path: Path, now_s: float) -> Node:
    sample = _last_sample(path)
    used = [g.utilization_percent for g in sample.gpus if g.utilization_percent is not None]
    power = [g.power_w for g in sample.gpus if g.power_w is not None]
    return Node(printable(host_of(path)), age_s(path, now_s), sample.cpu_percent,
                statistics.fmean(used) if used else None, math.fsum(power) if power else None)


def _last_sample(path: Path) -> NodeSample:
    """The last sample of a node's file; an empty one without any."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            lines = f.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        return NodeSample()
    found = (decode(line, NodeSample) for line in reversed(lines) if line.endswith(b'\n'))
    return next((s for s in found if s and s.event is None), NodeSample())
