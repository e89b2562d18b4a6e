"""Collection of a log's lines, one at a time, in a limited amount of memory."""

import re
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

from mlperf_rn50.mllog import elapsed, events, keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent
from mlperf_rn50.mllog.findings import Finding, Findings, make_finding
from mlperf_rn50.mllog.logged_run import FactSource
from mlperf_rn50.mllog.read.values import (
    V05_KEYS,
    changes,
    epoch_number,
    epoch_of,
    integer,
)
from mlperf_rn50.runfolder.jsonl import number

# maximum number of evaluations, epochs and so on; a real log has about a hundred
_MAX_KEPT = 10_000
_MAX_KEYS = 64
_MAX_RESUMES = 500  # each takes time in proportion to the epochs
_SAME_EVENT_S = 2.0  # maximum time between the lines that several ranks write for one event
_ROUNDING_S = 0.002  # of times in logs
_OPTIMIZER_KEY = re.compile(
    r'(opt|sgd|lars)_\w+|model_l2_regularization|model_bn_span|gradient_accumulation_steps'
)
_OPTIONS = events.OPEN_OPTIONS, events.INITIAL_WEIGHTS
_MAX_OPTIONS = 1000  # characters kept of each
INPUT_BATCH_SIZE = 'input_batch_size'  # in v0.5: images per step of one accelerator
RUN_FINAL = 'run_final'  # in v0.5: follows run_stop
# some logs repeat the other single keys
_ONCE = frozenset([keys.INIT_STOP, keys.RUN_START, keys.RUN_STOP])
_SINGLE = _ONCE | {  # one value per run, for any number of ranks
    keys.SUBMISSION_ORG,
    keys.SUBMISSION_DIVISION,
    keys.SUBMISSION_STATUS,
    keys.SUBMISSION_PLATFORM,
    keys.SUBMISSION_ENTRY,
    keys.GLOBAL_BATCH_SIZE,
    keys.TRAIN_SAMPLES,
    keys.EVAL_SAMPLES,
    events.TARGET_ACCURACY,
    events.DATASET,
    events.NUM_NODES,
    events.NUM_RANKS,
    events.ACCELERATORS_PER_NODE,
    INPUT_BATCH_SIZE,
    RUN_FINAL,
}
_COUNTED = frozenset([keys.INIT_START, keys.SEED, keys.CACHE_CLEAR])
_PROGRESS = frozenset(
    [
        keys.EPOCH_START,
        keys.EPOCH_STOP,
        keys.BLOCK_START,
        keys.BLOCK_STOP,
        keys.EVAL_START,
        keys.EVAL_STOP,
        keys.EVAL_ACCURACY,
    ]
)
_SIZES = keys.TRAIN_SAMPLES, keys.GLOBAL_BATCH_SIZE
_TRAINING = _COUNTED | _SINGLE | _PROGRESS | {events.RUN_RESUMED}


# Events by the number of their epoch. The value of a start is its number of epochs, and that of an
# accuracy is checked.
ByEpoch = dict[int, LogEvent]


class RawLog:
    """Content of all lines in one format. v0.5 epochs are converted to count from 1. Repeated
    epochs are not kept."""

    def __init__(self, line_format: LineFormat):
        self.format = line_format
        self.is_v05 = line_format == 'MLPv0.5.0'
        self.single: dict[str, LogEvent] = {}
        self.optimizer: dict[str, Any] = {}
        self.options: dict[str, str] = {}  # values of _OPTIONS as text
        # numbers of lines, for keys that every rank or node may write
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.first_lines: dict[str, int] = {}  # the first line of each of these keys
        self.is_training = False  # whether a line has a key that only a training run writes
        # lines equal to the first one of a single key, also in time
        self._copies: Counter[str] = Counter()
        self.first_init: LogEvent | None = None
        self.seed: LogEvent | None = None  # the first one
        self.resumed: list[LogEvent] = []
        self.resumes: list[elapsed.Resume] = []  # of these lines, if the log has a run_start
        self.early_resumes: list[Finding] = []  # about those that are earlier than the line before
        self.epochs: ByEpoch = {}
        self.blocks: ByEpoch = {}  # by first epoch
        # further starts of a block, by its first epoch
        self.block_repeats: Counter[int] = Counter()
        self.last_block_stop: LogEvent | None = None
        self.epoch_stops: ByEpoch = {}
        self.eval_starts: ByEpoch = {}
        self.eval_stops: ByEpoch = {}
        self.accuracies: ByEpoch = {}
        self.rates: list[LogEvent] = []  # learning rates as logged
        self.findings = Findings()
        self.flag = self.findings.flag
        self.has_other_end = False  # whether a second run_stop has a different status
        self.longest_gap_s = 0.0  # between two events
        self.last_s: float | None = None  # time of the last event
        self._epoch_now = 0
        # v0.5: start and stop of an evaluation whose epoch is not known yet
        self._open_eval: list[LogEvent] = []
        self._evaluated = self._open_epoch = 0
        self._lost: ByEpoch = {}  # v0.5: ends of evaluations without an accuracy

    def value(self, key: str) -> Any:
        """Return the value of a single key; None if it is missing."""
        return self.single[key].value if key in self.single else None

    def line(self, key: str) -> int | None:
        """Return the line of a single key; None if it is missing."""
        return self.single[key].line if key in self.single else None

    @property
    def num_loggers(self) -> int:
        """Number of times that most single keys are written at the same time; ranks never write all
        at once."""
        return statistics.mode([1 + self._copies[key] for key in self.single] or [1])

    def source(self, key: str) -> FactSource:
        return FactSource('logged', key, self.line(key))

    def lost_evaluations(self, is_running: bool) -> list[tuple[int, LogEvent]]:
        """Return epoch and event of evaluations without an accuracy; the last one of a running run
        may still get it.

        Only if all other evaluations have a start or an end with the number of their epoch, which
        some logs lack.
        """
        last, found = max(self.accuracies, default=0), dict[int, LogEvent]()
        for kept, is_end in ((self.eval_starts, False), (self.eval_stops, True)):
            for epoch in kept.keys() - self.accuracies:
                is_over = epoch < last or is_end and not is_running
                if is_over and self.accuracies.keys() <= kept.keys():
                    found[epoch] = kept[epoch]
        return sorted({**found, **self._lost}.items())

    def is_success(self, event: LogEvent) -> bool:
        """Return whether a run_stop marks success; v0.5 requires no status, and its published logs
        have none."""
        if not self.is_v05:
            return event.metadata.get('status') == keys.SUCCESS
        stated = event.value.get('success') if isinstance(event.value, dict) else None
        return stated not in (False, 'false')

    def clock_s(self, event: LogEvent | None) -> float | None:
        """Return the time of an event in seconds since run_start, None if unknown."""
        if event is None or keys.RUN_START not in self.single:
            return None
        return event.time_s - self.single[keys.RUN_START].time_s

    def add(self, event: LogEvent) -> None:
        """Add an event; raise ValueError if it begins a second run."""
        key = self._key(event)
        if key == events.RUN_RESUMED and len(self.resumed) < _MAX_RESUMES:
            self._resume(event)
        elif key == events.RUN_RESUMED:
            self.flag('lines_too_many', event.line, _MAX_RESUMES, key)
        elif self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, event.time_s - self.last_s)
        self.last_s = event.time_s
        self.is_training |= key in _TRAINING
        if key in _COUNTED:
            self._count(key, event)
        elif key in _SINGLE:
            self._add_single(key, event)
        elif _OPTIMIZER_KEY.fullmatch(key):
            if len(self.optimizer) < _MAX_KEYS:
                self.optimizer.setdefault(key, event.value)
            # v0.5 repeats it on every change
            if event.key == 'opt_learning_rate' and len(self.rates) < _MAX_KEPT:
                self.rates.append(event)
        elif key in _OPTIONS:
            self.options.setdefault(key, str(event.value)[:_MAX_OPTIONS])
        elif key == events.CLOCK_STEP:
            self.flag('clock_jumped', event.line, event.metadata.get('host'), event.value)
        else:
            self._add_progress(key, event)

    def _key(self, event: LogEvent) -> str:
        """Return the key of an event, or the later one with the same meaning for a tag of v0.5."""
        return V05_KEYS.get(event.key, event.key) if self.is_v05 else event.key

    def _count(self, key: str, event: LogEvent) -> None:
        self.first_lines.setdefault(key, event.line)
        if key == keys.INIT_START:
            self.first_init = min(self.first_init or event, event, key=lambda e: e.time_s)
        if key == keys.SEED:
            self.seed = first = self.seed or event
            is_at_once = 0 < abs(event.time_s - first.time_s) <= _SAME_EVENT_S
            is_copy = event.value == first.value and not is_at_once
            # a rank logs its seed again, in another place of the code, or by a second logger
            if self.is_v05 and event is not first and (event.metadata != first.metadata or is_copy):
                return
        self.counts[key] += 1

    def _resume(self, event: LogEvent) -> None:
        """Add a resume, and drop what was logged after its checkpoint, because the run repeats
        it."""
        if event in self.resumed[-1:]:
            return  # a copy by a second logger
        self.resumed.append(event)
        stop = self.single.pop(keys.RUN_STOP, None)
        _, target = changes(event).get('train.target_accuracy', (None, None))
        if number(target, 0, 1) is not None:
            self.single[events.TARGET_ACCURACY] = replace(event, value=target)
        resumed_s = self.clock_s(event)
        if resumed_s is None or self.last_s is None:
            return
        last_s = resumed_s - (event.time_s - self.last_s)
        if last_s > resumed_s + elapsed.SKEW_S:
            self.early_resumes.append(make_finding('resume_early', event.line, last_s - resumed_s))

        # An evaluation may come after the checkpoint of its epoch. So may the next epoch, which may
        # have to wait until the checkpoint before is written.
        epoch = integer(event.metadata.get('epoch_num'), 1) or 0
        lasts = (
            (self.epochs, epoch - 1),
            (self.epoch_stops, epoch - 1),
            (self.accuracies, epoch - 2),
        )
        covered = [e for by_epoch, last in lasts for k, e in by_epoch.items() if k <= last]
        covered_s = max((self.clock_s(e) or 0.0 for e in covered), default=0.0)
        clock_s = number(event.metadata.get('clock_s'), 0, 1e9)
        fault = elapsed.clock_fault(self.resumes, clock_s, covered_s, resumed_s)
        if fault:
            self.flag(fault, event.line, clock_s, covered_s, resumed_s)

        stated = event.metadata.get('stopped_s')
        stopped_s = number(stated, last_s - elapsed.SKEW_S, resumed_s + elapsed.SKEW_S)
        if stated is not None and stopped_s is None:
            self.flag('resume_stop_odd', event.line, stated, last_s, resumed_s)
        is_asked = stop is not None and stop.metadata.get('reason') != 'failed'
        resume = elapsed.make_resume(
            self.resumes,
            None if fault else clock_s,
            resumed_s=resumed_s,
            stopped_s=max(last_s, stopped_s or 0.0),
            is_pause=is_asked and event.metadata.get('after_fault') is not True,
        )
        self.resumes.append(resume)
        if resume.checkpoint_s is not None:
            self._drop_after(event.time_s - resumed_s + resume.checkpoint_s + _ROUNDING_S)

    def _drop_after(self, time_s: float) -> None:
        """Drop epochs, evaluations and learning rates that were logged after a time since 1970."""
        marks = self.epoch_stops, self.eval_starts, self.eval_stops
        for kept in (self.epochs, self.blocks, *marks, self.accuracies):
            for epoch in [k for k, event in kept.items() if event.time_s > time_s]:
                del kept[epoch]
        for first in self.block_repeats.keys() - self.blocks:
            del self.block_repeats[first]
        self.rates = [event for event in self.rates if event.time_s <= time_s]
        self._epoch_now = max(self.epochs, default=0)
        self._evaluated = max(self.accuracies, default=0)
        self._open_eval = []

    def _add_single(self, key: str, event: LogEvent) -> None:
        first = self.single.setdefault(key, event)
        if first is event:
            return
        self._copies[key] += event == first
        gap_s = event.time_s - first.time_s
        is_later = event != first and not 0 < abs(gap_s) <= _SAME_EVENT_S
        if key == keys.RUN_START and keys.RUN_STOP in self.single and is_later:
            raise ValueError(
                f'got more than one run (run_stop on line {self.line(keys.RUN_STOP)}, run_start '
                f'on line {event.line}), expected one run per log'
            )
        if key == keys.RUN_STOP and self._is_other_end(event):
            return
        if first.value != event.value:
            self.flag('values_differ', event.line, event.key, event.value, first.value, first.line)
        elif key in _ONCE:
            kind = 'line_repeated' if abs(gap_s) <= _SAME_EVENT_S else 'line_repeated_late'
            self.flag(kind, event.line, key, first.line, gap_s)

    def _is_other_end(self, event: LogEvent) -> bool:
        """Return whether a second run_stop has a different status; add an error if so."""
        first = self.single[keys.RUN_STOP]
        before, now = (
            str(self.is_success(e) if self.is_v05 else e.metadata.get('status'))[:80]
            for e in (first, event)
        )
        if before == now:
            return False
        self.has_other_end = True
        self.flag('statuses_differ', event.line, now, before, first.line)
        return True

    def _add_progress(self, key: str, event: LogEvent) -> None:
        epoch = self._epoch(event)
        marks = {
            keys.EPOCH_STOP: self.epoch_stops,
            keys.EVAL_START: self.eval_starts,
            keys.EVAL_STOP: self.eval_stops,
        }
        if key == keys.EPOCH_START:
            if self._keep(self.epochs, epoch, event, value=1):
                self._epoch_now = epoch or 0
        elif key == keys.BLOCK_START:
            first = epoch_number(event.metadata.get('first_epoch_num'))
            first = epoch if first is None else first
            length = epoch_number(event.metadata.get('epoch_count')) or 1
            if not self._keep(self.blocks, first, event, value=length) and first in self.blocks:
                self.block_repeats[first] += 1
        elif key == keys.BLOCK_STOP:
            self.last_block_stop = event
        elif self.is_v05 and event.value is None and key in (keys.EVAL_START, keys.EVAL_STOP):
            self._add_open_eval(key, event)
        elif key in marks:
            self._keep(marks[key], epoch, event)
        elif key == keys.EVAL_ACCURACY:
            self._add_accuracy(epoch, event)
        elif (
            key == events.TRACKED_STATS
            and isinstance(event.value, dict)
            and 'learning_rate' in event.value
            and len(self.rates) < _MAX_KEPT
        ):
            self.rates.append(replace(event, value=event.value['learning_rate']))

    def _epoch(self, event: LogEvent) -> int | None:
        """Return the epoch of an event, or None; in v0.5, an event without a number is of the
        current epoch."""
        epoch = epoch_of(event, *map(self.value, _SIZES))
        return (self._epoch_now or None) if epoch is None and self.is_v05 else epoch

    def _add_open_eval(self, key: str, event: LogEvent) -> None:
        """Add start or end of an evaluation without an epoch; the accuracy before or after its end
        has one."""
        if key == keys.EVAL_START:
            if len(self._open_eval) == 2:
                self._lost[self._open_epoch] = self._open_eval[1]
            self._open_eval = [event]
            self._open_epoch = self._epoch_now
        elif self._open_eval:
            self._open_eval = [self._open_eval[0], event]
        elif self._evaluated:
            self.eval_stops.setdefault(self._evaluated, event)

    def _add_accuracy(self, epoch: int | None, event: LogEvent) -> None:
        value = event.value.get('value') if isinstance(event.value, dict) else event.value
        accuracy = number(value, 0, 1)
        if accuracy is None:
            self.flag('accuracy_invalid', event.line, value)
            return
        first = self.accuracies.get(epoch or 0)
        if first and first.value != accuracy:
            self.flag('accuracies_differ', event.line, epoch, accuracy, first.value, first.line)
        elif self._keep(self.accuracies, epoch, event, value=float(accuracy)):
            self._evaluated = epoch or 0
            for marks, mark in zip((self.eval_starts, self.eval_stops), self._open_eval):
                marks.setdefault(self._evaluated, mark)
            self._open_eval = []

    def _keep(
        self, kept: ByEpoch, epoch: int | None, event: LogEvent, value: float | None = None
    ) -> bool:
        """Keep an event with a value if it is the first of its epoch, otherwise add a finding.
        Return whether it was kept."""
        key = self._key(event)
        if epoch is None:
            self.flag('epoch_missing', event.line, key)
        elif epoch in kept:
            if not self.resumed:  # a resumed run repeats the epochs after its checkpoint
                is_at_once = abs(event.time_s - kept[epoch].time_s) <= _SAME_EVENT_S
                kind = 'epoch_repeated_at_once' if is_at_once else 'epoch_repeated'
                self.flag(kind, event.line, key, epoch)
        elif len(kept) >= _MAX_KEPT:
            self.flag('lines_too_many', event.line, _MAX_KEPT, key)
        else:
            # without metadata, which takes the most memory
            kept[epoch] = LogEvent(self.format, key, event.time_s, value, line=event.line)
            return True
        return False
