"""What the lines of a log say, taken in one at a time and kept in memory that does not grow with the log."""
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlperf_rn50.mllog import events, keys
from mlperf_rn50.mllog.events import LineFormat, LogEvent
from mlperf_rn50.mllog.run import Notes

_MAX_KEPT = 10_000  # evaluations, epochs, ... of a log; a real one has a hundred
_MAX_KEYS = 64
_SAME_MOMENT_S = 2.0  # of one event that several ranks log
_SAME_MOMENT = 'an event of the same moment stands before, too, as where several ranks log it; the first counts'
_MAX_EPOCH = 10**6
_OPTIMIZER_KEY = re.compile(r'(opt|sgd|lars)_\w+|model_l2_regularization|model_bn_span|gradient_accumulation_steps')
INPUT_BATCH_SIZE = 'input_batch_size'  # v0.5: of one accelerator
RUN_FINAL = 'run_final'  # v0.5: after run_stop
# Keys of which a run has one value, whatever the number of ranks.
_SINGLE = frozenset([
    keys.SUBMISSION_ORG, keys.SUBMISSION_DIVISION, keys.SUBMISSION_STATUS, keys.SUBMISSION_PLATFORM,
    keys.SUBMISSION_ENTRY, keys.GLOBAL_BATCH_SIZE, keys.TRAIN_SAMPLES, keys.EVAL_SAMPLES, keys.INIT_STOP,
    keys.RUN_START, keys.RUN_STOP, events.TARGET_ACCURACY, events.DATASET, events.NUM_NODES, events.NUM_RANKS,
    events.ACCELERATORS_PER_NODE, INPUT_BATCH_SIZE, RUN_FINAL])
# Of these, events of which a run has one; of the others, some log the value again and again.
_ONCE = frozenset([keys.INIT_STOP, keys.RUN_START, keys.RUN_STOP])
_COUNTED = frozenset([keys.INIT_START, keys.SEED, keys.CACHE_CLEAR])
# v0.5 tags that mean what a later key means.
_V05_KEYS = {'run_clear_caches': keys.CACHE_CLEAR, 'run_set_random_seed': keys.SEED,
             'preproc_num_train_examples': keys.TRAIN_SAMPLES, 'eval_size': keys.EVAL_SAMPLES,
             'eval_target': events.TARGET_ACCURACY, 'opt_learning_rate': keys.OPT_BASE_LR,
             'train_epoch': keys.EPOCH_START}


def number(value: Any, low: float, high: float) -> float | None:
    """A value that is a number in a range, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and low <= value <= high else None


def integer(value: Any, low: int = 0, high: int = 10**12) -> int | None:
    """A value that is a whole number in a range, perhaps as text, else None."""
    is_text = isinstance(value, str) and re.fullmatch(r'\d{1,12}', value, re.ASCII)
    found = number(int(value) if is_text else value, low, high)
    return int(found) if found is not None and found == int(found) else None


def _epoch_number(value: Any) -> int | None:
    """An epoch; some name the share of the steps, which is a little less or more."""
    near = number(value, 0, _MAX_EPOCH)
    return round(near) if near is not None and abs(near - round(near)) <= 0.02 else integer(value, 0, _MAX_EPOCH)


class LinePosition(NamedTuple):
    """An event's place in time and in the file; part is how many resumes stand before it."""

    time_s: float
    line: int
    part: int


class RawLog:
    """What the lines of one format say. Epochs are counted from 1; of each the first mention counts."""

    def __init__(self, line_format: LineFormat):
        self.format = line_format
        self.single: dict[str, tuple[LinePosition, LogEvent]] = {}
        self.optimizer: dict[str, Any] = {}
        self.counts = dict.fromkeys(_COUNTED, 0)  # of lines that every rank or node may write
        self.first_lines: dict[str, int] = {}  # of what is counted
        self.first_init: LinePosition | None = None
        self.seed: tuple[int, Any] | None = None
        self.resumes: list[tuple[LinePosition, LogEvent]] = []
        self.epochs: dict[int, tuple[LinePosition, int]] = {}  # first epoch: its start, how many
        self.blocks: dict[int, tuple[LinePosition, int]] = {}
        self.last_block_stop: LinePosition | None = None
        self.epoch_stops: dict[int, LinePosition] = {}
        self.eval_starts: dict[int, LinePosition] = {}
        self.eval_stops: dict[int, LinePosition] = {}
        self.accuracies: dict[int, tuple[LinePosition, float]] = {}
        self.stats: dict[int, tuple[LinePosition, Mapping[str, Any]]] = {}
        self.rates: list[tuple[LinePosition, Any]] = []  # learning rates as they are logged
        self.notes = Notes()
        self.warn, self.contradict = self.notes.warn, self.notes.contradict
        self.has_other_end = False  # a second run_stop says that the run ended in another way
        self.longest_gap_s = 0.0  # between two events
        self.last_s: float | None = None  # when the last event happened
        self._epoch_now = 0
        self._open_eval: list[LinePosition] = []  # v0.5: start, and stop, of an evaluation whose epoch is not yet said
        self._evaluated = 0

    def value(self, key: str) -> Any:
        """The value of a key of which a run has one, None without it."""
        return self.single[key][1].value if key in self.single else None

    def line(self, key: str) -> int | None:
        """The line of a key of which a run has one."""
        return self.single[key][0].line if key in self.single else None

    def says_success(self, event: LogEvent) -> bool:
        """Whether a run_stop calls the run a success; published v0.5 logs say nothing, which is no objection."""
        if self.format == 'MLPv0.5.0':
            return not (isinstance(event.value, dict) and event.value.get('success') in (False, 'false'))
        return event.metadata.get('status') == keys.SUCCESS

    @property
    def last_epoch(self) -> int | None:
        """The last epoch that is named."""
        return max([k for where in (self.epochs, self.blocks, self.accuracies) for k in where], default=None)

    def clock_s(self, mark: LinePosition | None) -> float | None:
        """Seconds on the run's clock, which stands still between a run's end and its resume."""
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
        """Add one event; raise ValueError where the log continues with another run."""
        mark = LinePosition(event.time_s, line, len(self.resumes))
        key = event.key
        if self.format == 'MLPv0.5.0':
            key = _V05_KEYS.get(key, key)
        if self.last_s is not None and event.key != events.RUN_RESUMED:
            self.longest_gap_s = max(self.longest_gap_s, event.time_s - self.last_s)
        self.last_s = event.time_s
        if key in _COUNTED:
            self._add_counted(mark, key, event)
        elif key in _SINGLE:
            self._add_single(mark, key, event)
        elif key == events.RUN_RESUMED and len(self.resumes) < _MAX_KEPT:
            self.resumes.append((mark, event))
            self.single.pop(keys.RUN_STOP, None)
        elif _OPTIMIZER_KEY.fullmatch(key):
            if len(self.optimizer) < _MAX_KEYS:
                self.optimizer.setdefault(key, event.value)
            if event.key == 'opt_learning_rate' and len(self.rates) < _MAX_KEPT:  # v0.5: again whenever it changes
                self.rates.append((mark, event.value))
        else:
            self._add_progress(mark, key, event)

    def _add_counted(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        """A line that every rank or node may write."""
        self.counts[key] += 1
        self.first_lines.setdefault(key, mark.line)
        if key == keys.INIT_START and (self.first_init is None or mark.time_s < self.first_init.time_s):
            self.first_init = mark
        if key == keys.SEED and self.seed is None:
            self.seed = mark.line, event.value

    def _add_single(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        if key not in self.single:
            self.single[key] = mark, event
            return
        first, before = self.single[key]
        is_same = 0 < abs(mark.time_s - first.time_s) <= _SAME_MOMENT_S  # the log of another rank
        if key == keys.RUN_START and keys.RUN_STOP in self.single and not is_same:
            raise ValueError(f'holds more than one run: line {self.line(keys.RUN_STOP)} is run_stop, line {mark.line} '
                             'run_start again')
        if key == keys.RUN_STOP and self._is_other_end(mark, event):
            return
        if before.value != event.value:
            self.contradict(mark.line, f'{event.key} is {event.value!r:.80}, not {before.value!r:.80} as in line '
                                       f'{first.line}; the first counts',
                            f'{event.key} is another one again; the first counts')
        elif key in _ONCE and abs(mark.time_s - first.time_s) <= _SAME_MOMENT_S:
            self.warn(mark.line, f'{key} repeats line {first.line}; the first counts', _SAME_MOMENT)
        elif key in _ONCE:
            self.contradict(mark.line, f'{key} repeats line {first.line} at another time '
                                       f'({mark.time_s - first.time_s:+.1f} s); the first counts',
                            f'{key} repeats line {first.line} at another time; the first counts')

    def _is_other_end(self, mark: LinePosition, event: LogEvent) -> bool:
        """Whether a second run_stop tells of another end; says so."""
        first, before = self.single[keys.RUN_STOP]
        ends = [str(e.metadata.get('status') if self.format != 'MLPv0.5.0' else self.says_success(e))[:80]
                for e in (before, event)]
        if ends[0] == ends[1]:
            return False
        self.has_other_end = True
        self.contradict(mark.line, f'run_stop says {ends[1]!r}, but {ends[0]!r} in line {first.line}: this is no '
                                   'success; the time is that of the first')
        return True

    def _add_progress(self, mark: LinePosition, key: str, event: LogEvent) -> None:
        epoch = self._epoch(event)
        if key == keys.EPOCH_START:
            if self._keep(self.epochs, epoch, (mark, 1), mark, key):
                self._epoch_now = epoch or 0
        elif key == keys.BLOCK_START:
            first = _epoch_number(event.metadata.get('first_epoch_num'))
            count = _epoch_number(event.metadata.get('epoch_count')) or 1
            self._keep(self.blocks, first, (mark, count), mark, key)
        elif key == keys.BLOCK_STOP:
            self.last_block_stop = mark
        elif self.format == 'MLPv0.5.0' and key in (keys.EVAL_START, keys.EVAL_STOP) and event.value is None:
            self._add_bare(mark, key)
        elif key in (keys.EPOCH_STOP, keys.EVAL_START, keys.EVAL_STOP):
            where = {keys.EPOCH_STOP: self.epoch_stops, keys.EVAL_START: self.eval_starts,
                     keys.EVAL_STOP: self.eval_stops}[key]
            self._keep(where, epoch, mark, mark, key)
        elif key == keys.EVAL_ACCURACY:
            self._add_accuracy(mark, epoch, event)
        elif key == events.TRACKED_STATS and isinstance(event.value, dict) and len(self.stats) < _MAX_KEPT:
            of_step = integer(event.metadata.get('step'), 1, _MAX_EPOCH)  # so some rounds call the epoch
            self.stats.setdefault(epoch or of_step or self._epoch_now, (mark, event.value))
            if 'learning_rate' in event.value and len(self.rates) < _MAX_KEPT:
                self.rates.append((mark, event.value['learning_rate']))

    def _add_bare(self, mark: LinePosition, key: str) -> None:
        """A start or stop of v0.5 that names no epoch: that of the accuracy between or after them."""
        if key == keys.EVAL_START:
            self._open_eval = [mark]
        elif self._open_eval:
            self._open_eval = [self._open_eval[0], mark]
        elif self._evaluated:
            self.eval_stops.setdefault(self._evaluated, mark)

    def _epoch(self, event: LogEvent) -> int | None:
        """The epoch an event is about; v0.5 counts from 0, and leaves it out where it is the current one."""
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
            self.warn(mark.line, f'eval_accuracy is {value!r:.80}, expected a fraction from 0 to 1; left out',
                      'eval_accuracy is no fraction from 0 to 1; left out')
        elif before and before[1] != accuracy:
            self.contradict(mark.line, f'eval_accuracy of epoch {epoch} is {accuracy}, not {before[1]} as in line '
                                       f'{before[0].line}; the first counts',
                            'eval_accuracy of an epoch is another one again; the first counts')
        elif self._keep(self.accuracies, epoch, (mark, float(accuracy)), mark, event.key):
            self._evaluated = epoch or 0
            for where, open_mark in zip((self.eval_starts, self.eval_stops), self._open_eval):
                where.setdefault(self._evaluated, open_mark)
            self._open_eval = []

    def _keep(self, where: dict[int, Any], epoch: int | None, value: Any, mark: LinePosition, key: str) -> bool:
        """Notes the first value of an epoch, and says what is wrong with another one."""
        if epoch is None:
            self.warn(mark.line, f'{key} names no epoch; left out')
        elif epoch in where:
            if not self.resumes:  # a resumed run repeats what came after its checkpoint
                first = where[epoch] if isinstance(where[epoch], LinePosition) else where[epoch][0]
                is_same = abs(mark.time_s - first.time_s) <= _SAME_MOMENT_S
                self.warn(mark.line, f'{key} of epoch {epoch} stands before, too; the first counts',
                          _SAME_MOMENT if is_same else f'{key} of an epoch stands before, too; the first counts')
        elif len(where) >= _MAX_KEPT:
            self.warn(mark.line, f'more than {_MAX_KEPT} {key}; the rest is left out')
        else:
            where[epoch] = value
            return True
        return False
