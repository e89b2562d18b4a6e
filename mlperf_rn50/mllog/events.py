"""Decoding of log lines in the three formats of the rounds into events, and encoding of 0.6.0
lines.

Keys are official (mlperf_logging.mllog.constants, mlperf_compliance.tags) or this program's own,
which the checkers ignore. Epoch numbers stay as logged: v0.5 counts from 0, the other formats count
from 1.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

LineFormat = Literal['MLPv0.5.0', 'MLL', 'MLLOG']

# Keys of this program, in MLLOG and MLL lines.
# value: name; metadata: is_imagenet, synthetic, shuffle; mirror if not random
DATASET = 'dataset'
TARGET_ACCURACY = 'target_accuracy'  # value: fraction
NUM_RANKS = 'number_of_ranks'
NUM_NODES = 'number_of_nodes'
ACCELERATORS_PER_NODE = 'accelerators_per_node'  # 0 if the ranks train on CPUs
# value: step; metadata: epoch_num, clock_s (training that the checkpoint covers), stopped_s (since
# run_start: last sign of life of the attempt before), after_fault (true also after a stop that a
# lost host caused), elapsed_parts (mllog/elapsed.py; also of run_stop), submittable (false),
# number_of_ranks, number_of_nodes, global_batch_size, lr_scale, changed (configuration keys):
# {key: [before, now]}
RUN_RESUMED = 'run_resumed'
SGD_NESTEROV = 'sgd_opt_nesterov'  # value: true or false; not logged in the closed division
INITIAL_WEIGHTS = 'initial_weights'  # value: source of the weights; metadata: notes
# value: {configuration key: value} of those that only the open division permits
OPEN_OPTIONS = 'open_options'
LR_DECAY = 'opt_learning_rate_decay'  # value: cosine or step; not logged for poly
# value: factor on the scheduled learning rate of an epoch's last step
LAST_STEP_LR_FACTOR = 'last_step_lr_factor'
# value: {"throughput": images per second, "learning_rate"}; metadata: epoch_num
TRACKED_STATS = 'tracked_stats'
# value: new scale after a change; metadata: step, counted from 1 (0: the warm-up)
LOSS_SCALE = 'loss_scale'
# value: seconds by which a wall clock jumped during the run; metadata: host
CLOCK_STEP = 'clock_step'

_V05 = re.compile(
    r':::MLPv0\.5\.0 (?P<benchmark>[a-z]+) (?P<time>[\d.]+) \((?P<file>[^: ]+):(?P<line>\d+)\) '
    r'(?P<key>[A-Za-z0-9_]+)(?![A-Za-z0-9_])(?:\s?:\s+(?P<value>.+)|(?!\s?:))'
)
_V06 = re.compile(r':::MLL (?P<time>[\d.]+) (?P<key>[A-Za-z0-9_]+) ?:\s+(?P<value>.+)')
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_TOKEN = re.compile(r':::ML(?:Pv\d[\d.]*|LOG|L)(?=[\s{])')
# time and status of a run depend on each such line
_VITAL = ('run_start', 'run_stop', 'eval_accuracy')


@dataclass(slots=True)  # never modified, but a frozen instance takes three times as long to create
class LogEvent:
    """A log line."""

    line_format: LineFormat
    key: str
    time_s: float  # since 1970
    value: Any = None  # any JSON value
    metadata: dict[str, Any] = field(default_factory=dict)  # in v0.5: file, lineno and benchmark
    line: int = field(default=0, compare=False)  # number of the line in its file


def _object(value: Any, name: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f'{name} is not an object')
    return value


def _seconds(value: Any, ticks_per_s: float = 1.0) -> float:
    """Convert a time since 1970 to seconds. Raise ValueError if it is not plausible."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError('the time is not a number')
    if not 0 <= value < 1e11 * ticks_per_s:  # NaN is out of range too
        raise ValueError('the time is out of range')
    return value / ticks_per_s


def decode_events(line: str) -> list[LogEvent | ValueError]:
    """Return the events on a line, which may contain other output. A damaged one becomes
    ValueError(reason, text)."""
    # the usual case
    if line.startswith(':::MLLOG ') and '\r' not in line and line.find(':::ML', 1) < 0:
        return [_try_decode(line)]
    decoded = []
    for part in line.split('\r'):
        starts = [m.start() for m in _TOKEN.finditer(part)]
        decoded += [_try_decode(part[start:end]) for start, end in zip(starts, [*starts[1:], None])]
    return decoded


def _try_decode(text: str) -> LogEvent | ValueError:
    text = text.strip()
    try:
        if text.startswith(':::MLLOG'):
            return _decode_mllog(text)
        return _decode_v05(text) if text.startswith(':::MLP') else _decode_v06(text)
    except ValueError as e:
        return ValueError(str(e), text)
    except RecursionError:
        return ValueError('nested too deeply', text)


def _parse(text: str) -> Any:
    """Parse a JSON value and ignore output after it, which after a number must begin with a space
    or control code."""
    try:
        value, end = _scan(text, 0)
        is_whole = (
            text[end - 1] in '"]}'
            or not text[end:]
            or text[end] == ' '
            or not text[end].isprintable()
        )
    except StopIteration:
        is_whole = False
    return value if is_whole else json.loads(text)  # raises the error with its reason


def _decode_v05(text: str) -> LogEvent:
    m = _V05.match(text)
    if m is None or any(key != m['key'] and key.startswith(m['key']) for key in _VITAL):
        raise ValueError('not a whole :::MLPv0.5.0 line')
    value = None if m['value'] is None else _parse(m['value'])
    metadata = {'file': m['file'], 'lineno': int(m['line']), 'benchmark': m['benchmark']}
    time_s = _seconds(float(m['time']))
    return LogEvent('MLPv0.5.0', m['key'], time_s, value=value, metadata=metadata)


def _decode_mllog(text: str) -> LogEvent:
    record = _object(_parse(text[len(':::MLLOG') :].lstrip()), 'the line')
    try:
        key, ticks, metadata = record['key'], record['time_ms'], record['metadata']
    except KeyError as e:
        raise ValueError(f'no {e.args[0]}') from e
    if not isinstance(key, str):
        raise ValueError('key is not a string')
    _object(metadata, 'metadata')
    time_s = _seconds(ticks, 1e3)
    return LogEvent('MLLOG', key, time_s, value=record.get('value'), metadata=metadata)


def _decode_v06(text: str) -> LogEvent:
    m = _V06.match(text)
    if m is None:
        raise ValueError('not a :::MLL line')
    record = _object(_parse(m['value']), 'the value')
    metadata = _object(record.get('metadata', {}), 'metadata')
    time_s = _seconds(float(m['time']))
    return LogEvent('MLL', m['key'], time_s, value=record.get('value'), metadata=metadata)


def encode_v06(event: LogEvent) -> str:
    """Return an event as a 0.6.0 line, encoded here because that round's logger is no longer
    published."""
    body = json.dumps({'value': event.value, 'metadata': event.metadata}, allow_nan=False)
    return f':::MLL {event.time_s:.3f} {event.key}: {body}'
