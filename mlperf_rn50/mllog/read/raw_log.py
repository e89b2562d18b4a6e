"""Collection of a log's lines, one at a time, in a limited amount of memory."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mlperf_rn50.mllog import elapsed, events, keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent
from mlperf_rn50.mllog.findings import Finding, Findings, make_finding
from mlperf_rn50.mllog.read.values import (
    MAX_EPOCH,
    V05_KEYS,
    changes,
    epoch_number,
    epoch_of,
    integer,
)
from mlperf_rn50.mllog.run import FactSource
from mlperf_rn50.runfolder.jsonl import number

# maximum number of evaluations, epochs and so on; a real log has about a hundred
_MAX_KEPT = 10_000
_MAX_KEYS = 64
_SAME_EVENT_S = 2.0  # maximum time between the lines that several ranks write for one event
_ROUNDING_S = 0.002  # of times in logs
_OPTIMIZER_KEY = re.compile(
    r'(opt|sgd|lars)_\w+|model_l2_regularization|model_bn_span|gradient_accumulation_steps'
)
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


class LinePosition(NamedTuple):
    """Time of an event, in seconds since 1970, and its line."""

    time_s: float
    line: int


def _mark_of(value: Any) -> LinePosition:
    """Return the position of an event that is kept alone or as the first item of a tuple."""
    return value if isinstance(value, LinePosition) else value[0]


class RawLog:
    """Content of all lines in one format. v0.5 epochs are converted to count from 1. Repeated
    epochs are not kept."""

    def __init__(self, line_format: LineFormat):
        self.format = line_format
        self.single: dict[str, tuple[LinePosition, LogEvent]] = {}
        self.optimizer: dict[str, Any] = {}
        # numbers of lines, for keys that every rank or node may write
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.first_lines: dict[str, int] = {}  # the first line of each of these keys
        self.is_training = False  # whether a line has a key that only a training run writes
        # lines equal to the first one of a single key, also in time
        self._copies: Counter[str] = Counter()
        self.first_init: LinePosition | None = None
        self.seed: tuple[int, LogEvent] | None = None  # line and event of the first seed
        self.resumed: list[tuple[LinePosition, LogEvent]] = []
        self.resumes: list[elapsed.Resume] = []  # of these lines, if the log has a run_start
        self.early_resumes: list[Finding] = []  # about those that are earlier than the line before
        # by first epoch: (start, number of epochs)
        self.epochs: dict[int, tuple[LinePosition, int]] = {}
        self.blocks: dict[int, tuple[LinePosition, int]] = {}
        # further starts of a block, by its first epoch
        self.block_repeats: Counter[int] = Counter()
        self.last_block_stop: LinePosition | None = None
        self.epoch_stops: dict[int, LinePosition] = {}
        self.eval_starts: dict[int, LinePosition] = {}
        self.eval_stops: dict[int, LinePosition] = {}
        self.accuracies: dict[int, tuple[LinePosition, float]] = {}
        self.stats: dict[int, tuple[LinePosition, Mapping[str, Any]]] = {}
        self.rates: list[tuple[LinePosition, Any]] = []  # learning rates as logged
        self.findings = Findings()
        self.flag = self.findings.flag
        self.has_other_end = False  # whether a second run_stop has a different status
        self.longest_gap_s = 0.0  # between two events
        self.last_s: float | None = None  # time of the last event
        self._epoch_now = 0
        # v0.5: start and stop of an evaluation whose epoch is not known yet
        self._open_eval: list[LinePosition] = []
        self._evaluated = self._open_epoch = 0
        self._lost: dict[int, LinePosition] = {}  # v0.5: ends of evaluations without an accuracy

    def value(self, key: str) -> Any:
        """Return the value of a single key; None if it is missing."""
        return self.single[key][1].value if key in self.single else None

    def line(self, key: str) -> int | None:
        """Return the line of a single key; None if it is missing."""
        return self.single[key][0].line if key in self.single else None

    @property
    def num_loggers(self) -> int:
        """Number of times that most single keys are written at the same time; ranks never write all
        at once."""
        return statistics.mode([1 + self._copies[key] for key in self.single] or [1])

    def source(self, key: str) -> FactSource:
        return FactSource('logged', key, self.line(key))

    def lost_evaluations(self, is_running: bool) -> list[tuple[LinePosition, int]]:
        """Return position and epoch of evaluations without an accuracy; the last one of a running
        run may still get it.

        Only if all other evaluations have a start or an end with the number of their epoch, which
        some logs lack.
        """
        last = max(self.accuracies, default=0)
        found = {
            k: mark
            for marks, is_end in ((self.eval_starts, False), (self.eval_stops, True))
            if self.accuracies.keys() <= marks.keys()
            for k, mark in marks.items()
            if k not in self.accuracies and (k < last or is_end and not is_running)
        }
        return [(mark, k) for k, mark in sorted({**found, **self._lost}.items())]

    def is_success(self, event: LogEvent) -> bool:
        """Return whether a run_stop marks success; v0.5 requires no status, and its published logs
        have none."""
        if self.format == 'MLPv0.5.0':
            return not (
                isinstance(event.value, dict) and event.value.get('success') in (False, 'false')
            )
        return event.metadata.get('status') == keys.SUCCESS

    def clock_s(self, mark: LinePosition | None) -> float | None:
        """Return seconds since run_start, None if unknown."""
        if mark is None or keys.RUN_START not in self.single:
            return None
        return mark.time_s - self.single[keys.RUN_START][0].time_s

    def add(self, line: int, event: LogEvent) -> None:
        """Add an event; raise ValueError if it begins a second run."""
        mark = LinePosition(event.time_s, line)
        key = V05_KEYS.get(event.key, event.key) if self.format == 'MLPv0.5.0' else event.key
        if event.key == events.RUN_RESUMED and len(self.resumed) < _MAX_KEPT:
            self._resume(mark, event)
        elif self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, event.time_s - self.last_s)
        self.last_s = event.time_s
        self.is_training |= key in _TRAINING
        if key in _COUNTED:
            self.first_lines.setdefault(key, mark.line)
            if key == keys.INIT_START and (
                self.first_init is None or mark.time_s < self.first_init.time_s
            ):
                self.first_init = mark
            if key == keys.SEED:
                self.seed = self.seed or (mark.line, event)
                if (
                    event is not (first := self.seed[1])
                    and self.format == 'MLPv0.5.0'
                    and (
                        event.metadata != first.metadata
                        or event.value == first.value
                        and not 0 < abs(event.time_s - first.time_s) <= _SAME_EVENT_S
                    )
                ):
                    # a rank logs its seed again, in another place of the code, or by a second
                    # logger
                    return
            self.counts[key] += 1
        elif key in _SINGLE:
            self._add_single(mark, key, event)
        elif _OPTIMIZER_KEY.fullmatch(key):
            if len(self.optimizer) < _MAX_KEYS:
                self.optimizer.setdefault(key, event.value)
            # v0.5 repeats it on every change
            if event.key == 'opt_learning_rate' and len(self.rates) < _MAX_KEPT:
                self.rates.append((mark, event.value))
        elif key == events.CLOCK_STEP:
            self.flag('clock_jumped', line, event.metadata.get('host'), event.value)
        else:
            self._add_progress(mark, key, event)

    def _resume(self, mark: LinePosition, event: LogEvent) -> None:
        """Add a resume, and drop what was logged after its checkpoint, because the run repeats
        it."""
        if event in [before for _, before in self.resumed[-1:]]:
            return  # a copy by a second logger
        self.resumed.append((mark, event))
        stop = self.single.pop(keys.RUN_STOP, None)
        _, target = changes(event).get('train.target_accuracy', (None, None))
        if number(target, 0, 1) is not None:
            self.single[events.TARGET_ACCURACY] = mark, replace(event, value=target)
        resumed_s, before_s = self.clock_s(mark), self.last_s
        if resumed_s is None or before_s is None:
            return
        last_s = resumed_s - (mark.time_s - before_s)
        if last_s > resumed_s + elapsed.SKEW_S:
            self.early_resumes.append(make_finding('resume_early', mark.line, last_s - resumed_s))
        epoch = integer(event.metadata.get('epoch_num'), 1) or 0
        # An evaluation may come after the checkpoint of its epoch.
        kept = [
            *((k, start) for k, (start, _) in self.epochs.items()),
            *((k + 1, end) for k, end in self.epoch_stops.items()),
            *((k + 2, accuracy) for k, (accuracy, _) in self.accuracies.items()),
        ]
        covered_s = max((self.clock_s(m) or 0.0 for k, m in kept if k <= epoch), default=0.0)
        clock_s = number(event.metadata.get('clock_s'), 0, 1e9)
        fault = elapsed.clock_fault(self.resumes, clock_s, covered_s, resumed_s)
        if fault:
            self.flag(fault, mark.line, clock_s, covered_s, resumed_s)
        stated = event.metadata.get('stopped_s')
        stopped_s = number(stated, last_s - elapsed.SKEW_S, resumed_s + elapsed.SKEW_S)
        if stated is not None and stopped_s is None:
            self.flag('resume_stop_odd', mark.line, stated, last_s, resumed_s)
        resume = elapsed.make_resume(
            self.resumes,
            None if fault else clock_s,
            resumed_s=resumed_s,
            stopped_s=max(last_s, stopped_s or 0.0),
            is_pause=stop is not None and stop[1].metadata.get('reason') != 'failed',
        )
        self.resumes.append(resume)
        if resume.checkpoint_s is not None:
            self._drop_after(mark.time_s - resumed_s + resume.checkpoint_s)

    def _drop_after(self, time_s: float) -> None:
        """Drop epochs, evaluations and statistics that were logged after a time since 1970."""
        for kept in (
            self.epochs,
            self.blocks,
            self.epoch_stops,
            self.eval_starts,
            self.eval_stops,
            self.accuracies,
            self.stats,
        ):
            for epoch in [
                k for k, value in kept.items() if _mark_of(value).time_s > time_s + _ROUNDING_S
            ]:
                del kept[epoch]
        self.rates = [
            (mark, rate) for mark, rate in self.rates if mark.time_s <= time_s + _ROUNDING_S
        ]
        self._epoch_now, self._evaluated = (
            max(self.epochs, default=0),
            max(self.accuracies, default=0),
        )
        self._open_eval = []

    def _add_single(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        if key not in self.single:
            self.single[key] = mark, event
            return
        first, before = self.single[key]
        self._copies[key] += event == before
        gap_s = mark.time_s - first.time_s
        is_later = event != before and not 0 < abs(gap_s) <= _SAME_EVENT_S
        if key == keys.RUN_START and keys.RUN_STOP in self.single and is_later:
            raise ValueError(
                f'got more than one run (run_stop on line {self.line(keys.RUN_STOP)}, run_start '
                'on line '
                f'{mark.line}), expected one run per log'
            )
        if key == keys.RUN_STOP and self._is_other_end(mark, event):
            return
        if before.value != event.value:
            self.flag('values_differ', mark.line, event.key, event.value, before.value, first.line)
        elif key in _ONCE:
            self.flag(
                'line_repeated' if abs(gap_s) <= _SAME_EVENT_S else 'line_repeated_late',
                mark.line,
                key,
                first.line,
                gap_s,
            )

    def _is_other_end(self, mark: LinePosition, event: LogEvent) -> bool:
        """Return whether a second run_stop has a different status; add an error if so."""
        first, before = self.single[keys.RUN_STOP]
        ends = [
            str(e.metadata.get('status') if self.format != 'MLPv0.5.0' else self.is_success(e))[:80]
            for e in (before, event)
        ]
        if ends[0] == ends[1]:
            return False
        self.has_other_end = True
        self.flag('statuses_differ', mark.line, ends[1], ends[0], first.line)
        return True

    def _add_progress(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        epoch = self._epoch(event)
        if key == keys.EPOCH_START:
            if self._keep(self.epochs, epoch, (mark, 1), mark, key):
                self._epoch_now = epoch or 0
        elif key == keys.BLOCK_START:
            first = epoch_number(event.metadata.get('first_epoch_num'))
            first = epoch if first is None else first
            count = epoch_number(event.metadata.get('epoch_count')) or 1
            if not self._keep(self.blocks, first, (mark, count), mark, key) and first is not None:
                self.block_repeats[first] += first in self.blocks
        elif key == keys.BLOCK_STOP:
            self.last_block_stop = mark
        elif (
            self.format == 'MLPv0.5.0'
            and key in (keys.EVAL_START, keys.EVAL_STOP)
            and event.value is None
        ):
            # has no epoch; the accuracy before or after eval_stop has one
            if key == keys.EVAL_START:
                if len(self._open_eval) == 2:
                    self._lost[self._open_epoch] = self._open_eval[1]
                self._open_eval, self._open_epoch = [mark], self._epoch_now
            elif self._open_eval:
                self._open_eval = [self._open_eval[0], mark]
            elif self._evaluated:
                self.eval_stops.setdefault(self._evaluated, mark)
        elif key in (keys.EPOCH_STOP, keys.EVAL_START, keys.EVAL_STOP):
            marks = {
                keys.EPOCH_STOP: self.epoch_stops,
                keys.EVAL_START: self.eval_starts,
                keys.EVAL_STOP: self.eval_stops,
            }[key]
            self._keep(marks, epoch, mark, mark, key)
        elif key == keys.EVAL_ACCURACY:
            self._add_accuracy(mark, epoch, event)
        elif (
            key == events.TRACKED_STATS
            and isinstance(event.value, dict)
            and len(self.stats) < _MAX_KEPT
        ):
            # some rounds call the epoch a step
            step = integer(event.metadata.get('step'), 1, MAX_EPOCH)
            self.stats.setdefault(epoch or step or self._epoch_now, (mark, event.value))
            if 'learning_rate' in event.value and len(self.rates) < _MAX_KEPT:
                self.rates.append((mark, event.value['learning_rate']))

    def _epoch(self, event: LogEvent) -> int | None:
        """Return the epoch of an event, or None; in v0.5, an event without a number is of the
        current epoch."""
        epoch = epoch_of(event, *map(self.value, _SIZES))
        return (self._epoch_now or None) if epoch is None and self.format == 'MLPv0.5.0' else epoch

    def _add_accuracy(self, mark: LinePosition, epoch: int | None, event: LogEvent) -> None:
        value = event.value.get('value') if isinstance(event.value, dict) else event.value
        accuracy = number(value, 0, 1)
        before = self.accuracies.get(epoch or 0)
        if accuracy is None:
            self.flag('accuracy_invalid', mark.line, value)
        elif before and before[1] != accuracy:
            self.flag('accuracies_differ', mark.line, epoch, accuracy, before[1], before[0].line)
        elif self._keep(self.accuracies, epoch, (mark, float(accuracy)), mark, event.key):
            self._evaluated = epoch or 0
            for marks, open_mark in zip((self.eval_starts, self.eval_stops), self._open_eval):
                marks.setdefault(self._evaluated, open_mark)
            self._open_eval = []

    def _keep(
        self, kept: dict[int, Any], epoch: int | None, value: Any, mark: LinePosition, key: str
    ) -> bool:
        """Keep a value if it is the first of its epoch, otherwise add a finding; return whether it
        was kept."""
        if epoch is None:
            self.flag('epoch_missing', mark.line, key)
        elif epoch in kept:
            if not self.resumed:  # a resumed run repeats the epochs after its checkpoint
                is_at_once = abs(mark.time_s - _mark_of(kept[epoch]).time_s) <= _SAME_EVENT_S
                self.flag(
                    'epoch_repeated_at_once' if is_at_once else 'epoch_repeated',
                    mark.line,
                    key,
                    epoch,
                )
        elif len(kept) >= _MAX_KEPT:
            self.flag('lines_too_many', mark.line, _MAX_KEPT, key)
        else:
            kept[epoch] = value
            return True
        return False
