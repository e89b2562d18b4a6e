"""Collection of a log's lines, one at a time, in a limited amount of memory."""
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent
from mlperf_rn50.mllog.findings import Findings
from mlperf_rn50.mllog.run import FactSource
from mlperf_rn50.runfolder.jsonl import number

_MAX_KEPT = 10_000  # maximum number of evaluations, epochs and so on; a real log has about a hundred
_MAX_KEYS = 64
_SAME_EVENT_S = 2.0  # maximum time between the lines that several ranks write for one event
_MAX_EPOCH = 10**6
_OPTIMIZER_KEY = re.compile(r'(opt|sgd|lars)_\w+|model_l2_regularization|model_bn_span|gradient_accumulation_steps')
INPUT_BATCH_SIZE = 'input_batch_size'  # in v0.5: images per step of one accelerator
RUN_FINAL = 'run_final'  # in v0.5: follows run_stop
_ONCE = frozenset([keys.INIT_STOP, keys.RUN_START, keys.RUN_STOP])  # some logs repeat the other single keys
_SINGLE = _ONCE | {  # one value per run, for any number of ranks
    keys.SUBMISSION_ORG, keys.SUBMISSION_DIVISION, keys.SUBMISSION_STATUS, keys.SUBMISSION_PLATFORM,
    keys.SUBMISSION_ENTRY, keys.GLOBAL_BATCH_SIZE, keys.TRAIN_SAMPLES, keys.EVAL_SAMPLES, events.TARGET_ACCURACY,
    events.DATASET, events.NUM_NODES, events.NUM_RANKS, events.ACCELERATORS_PER_NODE, INPUT_BATCH_SIZE, RUN_FINAL}
_COUNTED = frozenset([keys.INIT_START, keys.SEED, keys.CACHE_CLEAR])
_V05_KEYS = {  # tags of v0.5 and the later keys with the same meaning
    'run_clear_caches': keys.CACHE_CLEAR, 'run_set_random_seed': keys.SEED, 'train_epoch': keys.EPOCH_START,
    'preproc_num_train_examples': keys.TRAIN_SAMPLES, 'eval_size': keys.EVAL_SAMPLES,
    'eval_target': events.TARGET_ACCURACY, 'opt_learning_rate': keys.OPT_BASE_LR}


def integer(value: Any, low: int = 0, high: int = 10**12) -> int | None:
    """Return a whole number in the range, given as a number or as text; None for anything else."""
    is_text = isinstance(value, str) and re.fullmatch(r'\d{1,12}', value, re.ASCII)
    parsed = number(int(value) if is_text else value, low, high)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None


def changes(event: LogEvent) -> dict[str, list]:
    """Return the configuration keys that a resume has changed, with the values before and now."""
    changed = event.metadata.get('changed')
    pairs = changed.items() if isinstance(changed, dict) else ()
    return {key: values for key, values in pairs if isinstance(values, list) and len(values) == 2}


def _epoch_number(value: Any) -> int | None:
    """Return an epoch number; some logs compute it from steps, with a small error."""
    near = number(value, 0, _MAX_EPOCH)
    return round(near) if near is not None and abs(near - round(near)) <= 0.02 else integer(value, 0, _MAX_EPOCH)


class LinePosition(NamedTuple):
    """Time and line of an event, and the number of resumes before it (part)."""

    time_s: float
    line: int
    part: int


class RawLog:
    """Content of all lines in one format. v0.5 epochs are converted to count from 1. Repeated epochs are not kept."""

    def __init__(self, line_format: LineFormat):
        self.format = line_format
        self.single: dict[str, tuple[LinePosition, LogEvent]] = {}
        self.optimizer: dict[str, Any] = {}
        self.counts = dict.fromkeys(_COUNTED, 0)  # numbers of lines, for keys that every rank or node may write
        self.first_lines: dict[str, int] = {}  # the first line of each of these keys
        self.first_init: LinePosition | None = None
        self.seed: tuple[int, LogEvent] | None = None  # line and event of the first seed
        self.resumes: list[tuple[LinePosition, LogEvent]] = []
        self.epochs: dict[int, tuple[LinePosition, int]] = {}  # by first epoch: (start, number of epochs)
        self.blocks: dict[int, tuple[LinePosition, int]] = {}
        self.block_repeats: Counter[int] = Counter()  # further starts of a block, by its first epoch
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
        self._open_eval: list[LinePosition] = []  # v0.5: start and stop of an evaluation whose epoch is not known yet
        self._evaluated = self._open_epoch = 0
        self._lost: dict[int, LinePosition] = {}  # v0.5: ends of evaluations without an accuracy

    def value(self, key: str) -> Any:
        """Return the value of a single key; None if it is missing."""
        return self.single[key][1].value if key in self.single else None

    def line(self, key: str) -> int | None:
        """Return the line of a single key; None if it is missing."""
        return self.single[key][0].line if key in self.single else None

    def source(self, key: str) -> FactSource:
        return FactSource('logged', key, self.line(key))

    def lost_evaluations(self, is_running: bool) -> list[tuple[LinePosition, int]]:
        """Return position and epoch of evaluations without an accuracy; the last one of a running run may still get it.

        Only if all other evaluations have a start or an end with the number of their epoch, which some logs lack.
        """
        last = max(self.accuracies, default=0)
        found = {k: mark for marks, is_end in ((self.eval_starts, False), (self.eval_stops, True))
                 if self.accuracies.keys() <= marks.keys() for k, mark in marks.items()
                 if k not in self.accuracies and (k < last or is_end and not is_running)}
        return [(mark, k) for k, mark in sorted({**found, **self._lost}.items())]

    def is_success(self, event: LogEvent) -> bool:
        """Return whether a run_stop marks success; v0.5 requires no status, and its published logs have none."""
        if self.format == 'MLPv0.5.0':
            return not (isinstance(event.value, dict) and event.value.get('success') in (False, 'false'))
        return event.metadata.get('status') == keys.SUCCESS

    def clock_s(self, mark: LinePosition | None) -> float | None:
        """Return seconds since run_start, None if unknown. After a resume, they continue from its checkpoint's."""
        if mark is None:
            return None
        if mark.part:
            start, event = self.resumes[mark.part - 1]
            before_s = number(event.metadata.get('clock_s'), 0, 1e9)
            return mark.time_s - start.time_s + before_s if before_s is not None else None
        if keys.RUN_START not in self.single:
            return None
        return mark.time_s - self.single[keys.RUN_START][0].time_s

    def add(self, line: int, event: LogEvent) -> None:
        """Add an event; raise ValueError if it begins a second run."""
        mark = LinePosition(event.time_s, line, len(self.resumes))
        key = _V05_KEYS.get(event.key, event.key) if self.format == 'MLPv0.5.0' else event.key
        if self.last_s is not None and event.key != events.RUN_RESUMED:
            self.longest_gap_s = max(self.longest_gap_s, event.time_s - self.last_s)
        self.last_s = event.time_s
        if key in _COUNTED:
            self.first_lines.setdefault(key, mark.line)
            if key == keys.INIT_START and (self.first_init is None or mark.time_s < self.first_init.time_s):
                self.first_init = mark
            if key == keys.SEED:
                self.seed = self.seed or (mark.line, event)
                if event is not (first := self.seed[1]) and self.format == 'MLPv0.5.0' and (
                        event.metadata != first.metadata or event.value == first.value
                        and not 0 < abs(event.time_s - first.time_s) <= _SAME_EVENT_S):
                    return  # a rank logs its seed again, in another place of the code, or by a second logger
            self.counts[key] += 1
        elif key in _SINGLE:
            self._add_single(mark, key, event)
        elif key == events.RUN_RESUMED and len(self.resumes) < _MAX_KEPT:
            self.resumes.append((mark, event))
            self.single.pop(keys.RUN_STOP, None)
            _, target = changes(event).get('train.target_accuracy', (None, None))
            if number(target, 0, 1) is not None:
                self.single[events.TARGET_ACCURACY] = mark, replace(event, value=target)
        elif _OPTIMIZER_KEY.fullmatch(key):
            if len(self.optimizer) < _MAX_KEYS:
                self.optimizer.setdefault(key, event.value)
            if event.key == 'opt_learning_rate' and len(self.rates) < _MAX_KEPT:  # v0.5 repeats it on every change
                self.rates.append((mark, event.value))
        elif key == events.CLOCK_STEP:
            self.flag('clock_jumped', line, event.metadata.get('host'), event.value)
        else:
            self._add_progress(mark, key, event)

    def _add_single(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        if key not in self.single:
            self.single[key] = mark, event
            return
        first, before = self.single[key]
        gap_s = mark.time_s - first.time_s
        if key == keys.RUN_START and keys.RUN_STOP in self.single and not 0 < abs(gap_s) <= _SAME_EVENT_S:
            raise ValueError(f'got more than one run (run_stop on line {self.line(keys.RUN_STOP)}, run_start on line '
                             f'{mark.line}), expected one run per log')
        if key == keys.RUN_STOP and self._is_other_end(mark, event):
            return
        if before.value != event.value:
            self.flag('values_differ', mark.line, event.key, event.value, before.value, first.line)
        elif key in _ONCE:
            self.flag('line_repeated' if abs(gap_s) <= _SAME_EVENT_S else 'line_repeated_late', mark.line, key,
                      first.line, gap_s)

    def _is_other_end(self, mark: LinePosition, event: LogEvent) -> bool:
        """Return whether a second run_stop has a different status; add an error if so."""
        first, before = self.single[keys.RUN_STOP]
        ends = [str(e.metadata.get('status') if self.format != 'MLPv0.5.0' else self.is_success(e))[:80]
                for e in (before, event)]
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
            first = _epoch_number(event.metadata.get('first_epoch_num'))
            count = _epoch_number(event.metadata.get('epoch_count')) or 1
            if not self._keep(self.blocks, first, (mark, count), mark, key) and first is not None:
                self.block_repeats[first] += first in self.blocks
        elif key == keys.BLOCK_STOP:
            self.last_block_stop = mark
        elif self.format == 'MLPv0.5.0' and key in (keys.EVAL_START, keys.EVAL_STOP) and event.value is None:
            if key == keys.EVAL_START:  # has no epoch; the accuracy before or after eval_stop has one
                if len(self._open_eval) == 2:
                    self._lost[self._open_epoch] = self._open_eval[1]
                self._open_eval, self._open_epoch = [mark], self._epoch_now
            elif self._open_eval:
                self._open_eval = [self._open_eval[0], mark]
            elif self._evaluated:
                self.eval_stops.setdefault(self._evaluated, mark)
        elif key in (keys.EPOCH_STOP, keys.EVAL_START, keys.EVAL_STOP):
            marks = {keys.EPOCH_STOP: self.epoch_stops, keys.EVAL_START: self.eval_starts,
                     keys.EVAL_STOP: self.eval_stops}[key]
            self._keep(marks, epoch, mark, mark, key)
        elif key == keys.EVAL_ACCURACY:
            self._add_accuracy(mark, epoch, event)
        elif key == events.TRACKED_STATS and isinstance(event.value, dict) and len(self.stats) < _MAX_KEPT:
            step = integer(event.metadata.get('step'), 1, _MAX_EPOCH)  # some rounds call the epoch a step
            self.stats.setdefault(epoch or step or self._epoch_now, (mark, event.value))
            if 'learning_rate' in event.value and len(self.rates) < _MAX_KEPT:
                self.rates.append((mark, event.value['learning_rate']))

    def _epoch(self, event: LogEvent) -> int | None:
        """Return the epoch of an event, or None. v0.5 counts from 0; without a number, it is the current epoch."""
        if self.format != 'MLPv0.5.0':
            return _epoch_number(event.metadata.get('epoch_num'))
        value = event.value.get('epoch') if isinstance(event.value, dict) else event.value
        epoch = _epoch_number(value)
        return self._epoch_now if epoch is None else epoch + 1

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

    def _keep(self, kept: dict[int, Any], epoch: int | None, value: Any, mark: LinePosition, key: str) -> bool:
        """Keep a value if it is the first of its epoch, otherwise add a finding; return whether it was kept."""
        if epoch is None:
            self.flag('epoch_missing', mark.line, key)
        elif epoch in kept:
            if not self.resumes:  # a resumed run repeats the epochs after its checkpoint
                first = kept[epoch] if isinstance(kept[epoch], LinePosition) else kept[epoch][0]
                is_at_once = abs(mark.time_s - first.time_s) <= _SAME_EVENT_S
                self.flag('epoch_repeated_at_once' if is_at_once else 'epoch_repeated', mark.line, key, epoch)
        elif len(kept) >= _MAX_KEPT:
            self.flag('lines_too_many', mark.line, _MAX_KEPT, key)
        else:
            kept[epoch] = value
            return True
        return False
