"""Follow a run folder while the run writes to it. The files are untrusted, read incrementally and
never locked.

Times are on the run's clock, which starts at run_start; only the ages of files use the clock of
this machine.
"""

import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlperf_rn50.analysis.run_data import load_run, load_run_config
from mlperf_rn50.analysis.sets.load import Rules, load_folder
from mlperf_rn50.analysis.sets.run_set import kwh
from mlperf_rn50.analysis.watch.history import MAX_ITEMS, MAX_TEXT, MetricsHistory, text
from mlperf_rn50.analysis.watch.run_state import (
    STARTING,
    Checkpoints,
    LiveEvaluation,
    LiveRun,
    Node,
    UsedEnergy,
)
from mlperf_rn50.analysis.why.time_answer import bottleneck_sentence
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import regular_file
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.elapsed import elapsed_parts
from mlperf_rn50.mllog.goodput import goodput_of, last_seen_s
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.reader import OtherBenchmark, read_run
from mlperf_rn50.mllog.read.resolve import QUIET_S, age_s
from mlperf_rn50.mllog.sidecar.energy import read_energy
from mlperf_rn50.runfolder.jsonl import Tail, decode
from mlperf_rn50.runfolder.locks import LAUNCHER_LOCK, is_locked
from mlperf_rn50.runfolder.names import (
    RunFolder,
    find_telemetry,
    host_of,
    list_checkpoints,
    packed_logs,
    run_number,
    step_of,
)
from mlperf_rn50.runfolder.records import (
    MetricsRecord,
    RanksRecord,
    ResumedRecord,
    TelemetryRecord,
    read_attempts,
)
from mlperf_rn50.text import printable

_MAX_NODES = 256
_TAIL_BYTES = 1 << 16  # bytes read from the end of a node's telemetry; enough for the newest sample
# nodes whose telemetry lags behind the newest by more than this get a warning
_UNEXPECTEDLY_QUIET_S = 60.0
_READ_AGAIN_S = 5.0  # time between checks whether the log of an unfinished run is still locked
# The energy is computed from all samples, so only once per period, and in at most this share of the
# time.
_ENERGY_PERIOD_S, _ENERGY_SHARE = 60.0, 0.05


class Follower:
    """Follow the newest run of a folder, or the run of a given log."""

    def __init__(self, path: Path):
        """Raise UserError if path is a file that is not named result_<k>.txt."""
        self.path = self.folder = path
        self._fixed = run_number(path.name)
        if self._fixed is not None:
            self.folder = path.parent
        elif path.is_file():
            raise UserError(f'{path}: got a file, expected a run folder, or result_<k>.txt in one')
        # by number: (signature, time read, content)
        self._logs: dict[int, tuple[Any, float, Run | UserError]] = {}
        self._tail = Tail(Path(), MetricsRecord)
        self._history = MetricsHistory()
        self._was_there = False
        self._judged: tuple[Any, tuple[str, ...]] = None, ()  # (key, reasons)
        # (key, time of next reading, value)
        self._energy: tuple[Any, float, UsedEnergy | None] = None, 0.0, None

    def look(self, now_s: float | None = None) -> LiveRun:
        """Return the run's state; now_s is the time in seconds since 1970, by default from the
        system clock."""
        now_s = time.time() if now_s is None else now_s
        waiting = LiveRun(str(self.path))
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            gone = 'the folder is gone; waiting for it'
            absent = 'not started yet: no such folder; waiting'
            return replace(waiting, note=gone if self._was_there else absent)
        except OSError as e:
            return replace(waiting, note=f'cannot be read: {e.strerror}; trying again')
        self._was_there = True
        numbers = sorted(k for name in names if (k := run_number(name)) is not None)
        logs = {number: self._read(number, now_s) for number in numbers}
        number = max(numbers, default=None) if self._fixed is None else self._fixed
        others = (
            (k, STARTING if isinstance(log, UserError) else log.status)
            for k, log in logs.items()
            if k != number
        )
        state = replace(waiting, others=tuple(others))
        if number not in logs:
            note = 'not started yet: no log in the folder; waiting'
            return replace(state, note=note, attempts=_attempts(self.folder, None))
        foreign = [log for log in logs.values() if isinstance(log, OtherBenchmark)]
        if len(foreign) == len(logs):
            benchmark = foreign[0].benchmark
            return replace(state, note=text(str(foreign[0])), other_benchmark=benchmark)
        state = self._look_at(RunFolder(self.folder, number), logs[number], state, now_s)
        if state.status == STARTING and (state.quiet_s or 0.0) < QUIET_S:
            return state
        packed = packed_logs(names) if self._fixed is None else []
        violations = self._judge(numbers if self._fixed is None else [number], packed, now_s)
        refused = [f'refused: {text("; ".join(violations))}'] if violations else []
        warnings = (*refused, *state.warnings)[:MAX_ITEMS]
        return replace(state, violations=violations, warnings=warnings)

    def _judge(
        self, numbers: Sequence[int], packed: Sequence[str], now_s: float
    ) -> tuple[str, ...]:
        """Return why logs are refused. They are judged again if a finished one changes, a running
        one has another error, or another run begins."""
        key: list[Any] = [packed]
        for n in numbers:
            signature, _, run = self._logs[n]
            if isinstance(run, UserError):
                key.append(n)
            elif run.status == 'running':
                key.append((n, run.errors))
            else:
                key.append((n, signature))
        if key != self._judged[0]:
            paths = [RunFolder(self.folder, n).result for n in numbers]
            paths += [self.folder / name for name in packed]
            judged, _ = load_folder(paths, Rules(now_s=now_s))
            runs = [self._logs[n][2] for n in numbers]
            foreign = tuple(str(run) for run in runs if isinstance(run, OtherBenchmark))
            self._judged = key, judged.reasons if judged else foreign
        return self._judged[1]

    def _read(self, number: int, now_s: float) -> Run | UserError:
        """Return a log's run. Read the log again if it changed or, every few seconds, if its run
        may have died."""
        path, signature = RunFolder(self.folder, number).result, None
        with suppress(OSError):
            status = path.stat()
            signature = status.st_ino, status.st_size, status.st_mtime_ns
        before, read_s, run = self._logs.get(number, (None, -math.inf, UserError('')))
        is_open = (
            isinstance(run, UserError) or run.status == 'running' or keys.RUN_STOP not in run.lines
        )
        if signature == before and not (is_open and abs(now_s - read_s) >= _READ_AGAIN_S):
            return run
        try:
            # this program also trains other networks, which are not judged
            is_own = os.path.exists(RunFolder(self.folder, number).metrics)
            run = read_run(path, now_s, is_own)
        except UserError as e:
            run = e
        self._logs[number] = signature, now_s, run
        return run

    def _used_energy(self, run: Run) -> UsedEnergy | None:
        before, again_at, used = self._energy
        now = time.monotonic()
        is_final = run.status != 'running'
        key = run.path, is_final
        if before == key and (is_final or now < again_at):
            return used
        energy = read_energy(run)
        used = UsedEnergy(
            seconds=energy.seconds,
            cpu_kwh=kwh(energy.cpu_joules),
            gpu_kwh=kwh(energy.gpu_joules),
            reason=printable('; '.join(dict.fromkeys(energy.reasons.values())))[:MAX_TEXT],
        )
        pause_s = max(_ENERGY_PERIOD_S, (time.monotonic() - now) / _ENERGY_SHARE)
        self._energy = key, now + pause_s, used
        return used

    def _follow_metrics(self, paths: RunFolder) -> MetricsHistory:
        """Return the history of a run with the records that were added since the last call."""
        is_other = self._tail.path != paths.metrics
        if is_other:
            self._tail = Tail(paths.metrics, MetricsRecord)
        is_new, records = self._tail.read()
        if is_other or is_new:
            self._history = MetricsHistory()
        has_times = False
        while records:  # a call reads a part of a large file
            for record in records:
                self._history.add(record)
            has_times |= any(isinstance(r, RanksRecord | ResumedRecord) for r in records)
            records = self._tail.read()[1]
        if has_times:
            self._history.limit = bottleneck_sentence(load_run(paths))[:MAX_TEXT]
        return self._history

    def _look_at(
        self, paths: RunFolder, run: Run | UserError, state: LiveRun, now_s: float
    ) -> LiveRun:
        history = self._follow_metrics(paths)
        ages = {
            path: age
            for path in (paths.result, paths.metrics)
            if (age := age_s(path, now_s)) is not None
        }
        # of the hosts of the newest start; a resumed run may have left others
        telemetry = find_telemetry(self.folder).get(paths.index, ())
        if history.resumes and (hosts := history.resumes[-1].hosts):
            of_hosts = {*map(paths.telemetry, hosts)}
            telemetry = [p for p in telemetry if p in of_hosts]
        state = replace(
            state,
            number=paths.index,
            has_launcher=self._fixed is None and is_locked(self.folder / LAUNCHER_LOCK) is True,
            quiet_s=min(ages.values(), default=None),
            attempts=_attempts(self.folder, paths.index),
            nodes=tuple(_node(path, now_s) for path in telemetry[:_MAX_NODES]),
            checkpoints=_checkpoints(paths.checkpoints, now_s),
        )
        if isinstance(run, UserError):
            note = f'starting: no readable log yet: {text(str(run))}'
            return replace(state, status=STARTING, note=note)
        # the data set and the target may not be logged yet
        if run.status == 'running' and run.last_epoch is None:
            return replace(state, status=STARTING, note='starting')
        config = load_run_config(paths, history.resumes)
        max_epochs = config.num_epochs if config else None
        state = replace(state, energy=self._used_energy(run), max_epochs=max_epochs)
        state = _live_run(state, run, history, ages.get(paths.metrics))
        # Only a lock taken after the log's last line is of a new start. An older one is of this
        # run, or of a launcher that makes several runs.
        is_locked_again = any(
            (age_s(path, now_s) or 0.0) < ages.get(paths.result, 0.0)
            for path in (paths.lock, self.folder / LAUNCHER_LOCK)
            if is_locked(path)
        )
        if state.has_end and run.status != 'converged' and is_locked_again:
            note = 'starting: this run resumes, or another one begins'
            state = replace(state, status=STARTING, note=note)
        return state


def _live_run(
    state: LiveRun, run: Run, history: MetricsHistory, metrics_age_s: float | None
) -> LiveRun:
    """Add the contents of the log and the metrics to a state."""
    last = history.last
    is_running = run.status == 'running'
    resumed = history.resumes[-1] if history.resumes else ResumedRecord(0)
    evaluations = tuple(history.evaluations[e] for e in sorted(history.evaluations)) or tuple(
        LiveEvaluation(e.epoch, e.accuracy, e.time_s) for e in run.evaluations
    )
    newest = evaluations[-1] if evaluations else LiveEvaluation(0, 0.0, None)
    epoch, epoch_s = max(last.epoch, newest.epoch), history.epoch_s
    logged_s = (run.last_s or 0.0) - (run.start_s or run.last_s or 0.0)
    seen_s = max(last.time_s or 0.0, newest.time_s or 0.0, logged_s)
    since_s = (metrics_age_s or 0.0) if is_running and seen_s else 0.0

    def left_s(until: float | None) -> float | None:
        if not is_running or epoch_s is None or until is None:
            return None
        return max(0.0, (until - epoch) * epoch_s - since_s)

    standing = history.standings[max(history.standings)] if history.standings else None
    ends = (standing and standing.reference_epochs) or history.reference.reference_epochs
    first_s, last_s = map(left_s, ends or (None, None))
    state = replace(
        state,
        status=run.status,
        has_end=keys.RUN_STOP in run.lines,
        num_resumes=max(run.num_resumes, len(history.resumes)),
        elapsed_parts=elapsed_parts(run.resumes, run.time_to_train_s or seen_s),
        goodput=goodput_of(run, history.parts, max(seen_s, last_seen_s(history.parts))),
        dataset=None if run.is_imagenet else text(run.dataset or '') or 'an unnamed data set',
        target=run.target_accuracy,
        num_nodes=resumed.number_of_nodes or run.num_nodes,
        has_changed_nodes=run.has_changed_nodes,
        num_ranks=resumed.number_of_ranks or run.num_ranks,
        global_batch_size=resumed.global_batch_size or run.global_batch_size,
        opt_name=text(run.opt_name or '') or None,
        seed=run.seed,
        train_samples=run.train_samples,
        epoch=epoch,
        step=last.step,
        loss=last.loss,
        images_per_s=last.images_per_s,
        learning_rate=last.scheduled_learning_rate or last.learning_rate,
        time_s=seen_s + since_s if run.time_to_train_s is None else run.time_to_train_s,
        epoch_s=epoch_s,
        left_s=left_s(state.max_epochs),
        speeds=tuple(history.speeds),
        evaluations=evaluations,
        ranks=history.ranks,
        limit=history.limit,
        reference_text=text(history.reference.text),
        num_reference=history.reference.num_reference,
        reference_epochs=ends,
        reference_left_s=None if first_s is None or last_s is None else (first_s, last_s),
        band=tuple(history.band[e] for e in sorted(history.band)),
        standing=text(standing.text) if standing else '',
        standing_epoch=standing.epoch if standing else None,
        is_behind=bool(standing and standing.behind),
    )
    return replace(state, warnings=_warnings(state, run, history.stragglers))


def _warnings(state: LiveRun, run: Run, stragglers: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings, most important first."""
    behind = [state.standing or 'behind the reference runs'] if state.is_behind else []
    ages = [n.age_s for n in state.nodes if n.age_s is not None] if run.status == 'running' else []
    quiet = [
        f'telemetry of {n.host}: nothing was written for more than {_UNEXPECTEDLY_QUIET_S:.0f} s'
        for n in state.nodes
        if ages and n.age_s is not None and n.age_s > _UNEXPECTEDLY_QUIET_S + min(ages)
    ]
    log = [text(w.text) for w in run.findings if w.kind not in ('no_run_stop', 'resumed')]
    return (*behind, *stragglers, *quiet, *log)[:MAX_ITEMS]


def _checkpoints(folder: Path, now_s: float) -> Checkpoints:
    """Return the number of complete checkpoints in a folder, and the newest one's step and age."""
    with suppress(OSError):
        if found := list_checkpoints(folder):
            return Checkpoints(len(found), step_of(found[-1]), age_s(found[-1], now_s))
    return Checkpoints()


def _attempts(folder: Path, number: int | None) -> tuple[str, ...]:
    """Return how the launcher's attempts at a run ended; number is None for attempts that did not
    start a run."""
    texts = []
    for attempt in [a for a in read_attempts(folder) if a.run == number]:
        end = text(attempt.end or '') or 'cut short'
        can = (
            ''
            if end == 'converged'
            else f', {"can" if attempt.can_resume else "cannot"} be resumed'
        )
        texts.append(f'{end} (exit code {attempt.exit_code}){can}')
    return tuple(texts)


def _node(path: Path, now_s: float) -> Node:
    """Return the newest sample of a node's telemetry."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _TAIL_BYTES))
            lines = f.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        lines = []
    samples = (decode(line, TelemetryRecord) for line in reversed(lines) if line.endswith(b'\n'))
    sample = next((s for s in samples if s and s.event is None), TelemetryRecord(0))
    used = [g.utilization_percent for g in sample.gpus if g.utilization_percent is not None]
    power = [g.power_w for g in sample.gpus if g.power_w is not None]
    return Node(
        host=printable(host_of(path)),
        age_s=age_s(path, now_s),
        cpu_percent=sample.cpu_percent,
        gpu_percent=statistics.fmean(used) if used else None,
        gpu_power_w=math.fsum(power) if power else None,
    )
