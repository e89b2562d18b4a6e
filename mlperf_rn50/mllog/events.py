"""Log lines and what they say: one Event type and the three line formats of the rounds.

The vocabularies themselves are the official ones (mlperf_logging.mllog.constants, mlperf_compliance.tags);
keys of our own, which every checker ignores, are named here. Epochs in an Event are as the line has them:
from 0 in v0.5 lines, from 1 in the others.
"""
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

LineFormat = Literal['MLPv0.5.0', 'MLL', 'MLLOG']

# Keys of our own, in MLLOG and MLL lines.
DATASET = 'dataset'                  # value: name; metadata: is_imagenet, synthetic, shuffle; mirror where not random
TARGET_ACCURACY = 'target_accuracy'  # value: fraction
NUM_RANKS = 'number_of_ranks'
NUM_NODES = 'number_of_nodes'
ACCELERATORS_PER_NODE = 'accelerators_per_node'  # 0 where the ranks train on CPUs
RUN_RESUMED = 'run_resumed'          # value: step; metadata: epoch_num, clock_s, submittable (false),
                                     # number_of_ranks, number_of_nodes, global_batch_size, lr_scale; changed, where
                                     # keys of the configuration were: {key: [before, now]}
SGD_NESTEROV = 'sgd_opt_nesterov'    # value: whether the momentum is Nesterov's; not in the closed division
INITIAL_WEIGHTS = 'initial_weights'  # value: where they came from; metadata: notes
TRACKED_STATS = 'tracked_stats'      # value: {"throughput": images per second, "learning_rate": of the epoch's last
                                     # step}; metadata: epoch_num

_V05 = re.compile(r':::MLPv0\.5\.0 (?P<benchmark>[a-z]+) (?P<time>\d+\.\d+) \((?P<file>[^: ]+):(?P<line>\d+)\) '
                  r'(?P<key>[A-Za-z0-9_]+)\s?(?::\s+(?P<value>.+))?$')
_V06 = re.compile(r':::MLL (?P<time>[\d.]+) (?P<key>[A-Za-z0-9_]+) ?:\s+(?P<value>.+)$')
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_TOKEN = re.compile(r':::ML(?:Pv0\.5\.0|LOG|L) ')


@dataclass(slots=True)  # not frozen, which makes it three times as slow to make
class LogEvent:
    """One log line; nobody changes it.

    Args:
        line_format: which of the three it was or will be.
        time_s: seconds since 1970.
        value: any JSON value; None where there is none.
        metadata: a JSON object; for v0.5 lines, file, lineno and benchmark.
    """

    line_format: LineFormat
    key: str
    time_s: float
    value: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


def _object(value: Any, what: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f'{what} is not an object')
    return value


def _seconds(value: Any, ticks_per_s: float = 1.0) -> float:
    """A time since 1970 that a calendar knows, in seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError('the time is not a number')
    if not 0 <= value < 1e11 * ticks_per_s:  # NaN too
        raise ValueError('the time is out of range')
    return value / ticks_per_s


def _key(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError('key is not a string')
    return value


def decode_events(line: str) -> list[LogEvent | ValueError]:
    """Every event of a line that several processes, or a progress bar, may share; for a torn one, its error."""
    if line.startswith(':::MLLOG ') and '\r' not in line and line.find(':::ML', 1) < 0:  # as nearly all lines are
        return [_try_decode(line)]
    found = []
    for part in line.split('\r'):
        starts = [m.start() for m in _TOKEN.finditer(part)]
        found += [_try_decode(part[start:end]) for start, end in zip(starts, [*starts[1:], None])]
    return found


def _try_decode(text: str) -> LogEvent | ValueError:
    try:
        return _decode(text.strip())
    except ValueError as e:
        return e
    except RecursionError:
        return ValueError('nested too deeply')


def _decode(text: str) -> LogEvent:
    if text.startswith(':::MLLOG'):
        return _decode_mllog(text)
    if text.startswith(':::MLPv0.5.0'):
        return _decode_v05(text)
    return _decode_v06(text)


def _parse(text: str) -> Any:
    """What JSON holds. Most lines are whole: these are spared what json.loads does beside scanning."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else json.loads(text)


def _decode_v05(text: str) -> LogEvent:
    m = _V05.match(text)
    if m is None:
        raise ValueError('not a :::MLPv0.5.0 line')
    value = None if m['value'] is None else _parse(m['value'])
    return LogEvent('MLPv0.5.0', m['key'], _seconds(float(m['time'])), value,
                 {'file': m['file'], 'lineno': int(m['line']), 'benchmark': m['benchmark']})


def _decode_mllog(text: str) -> LogEvent:
    record = _object(_parse(text[len(':::MLLOG '):]), 'the line')
    try:
        key, ticks, metadata = record['key'], record['time_ms'], record['metadata']
    except KeyError as e:
        raise ValueError(f'no {e.args[0]}') from e
    return LogEvent('MLLOG', _key(key), _seconds(ticks, 1e3), record.get('value'), _object(metadata, 'metadata'))


def _decode_v06(text: str) -> LogEvent:
    m = _V06.match(text)
    if m is None:
        raise ValueError('not a :::MLL line')
    record = _object(_parse(m['value']), 'the value')
    return LogEvent('MLL', m['key'], _seconds(float(m['time'])), record.get('value'),
                 _object(record.get('metadata', {}), 'metadata'))


def encode_v06(event: LogEvent) -> str:
    """A 0.6.0 line (the official logger of that round is no longer published)."""
    body = json.dumps({'value': event.value, 'metadata': event.metadata}, allow_nan=False)
    return f':::MLL {event.time_s:.3f} {event.key}: {body}'


def printable(text: str) -> str:
    """Text of a log as it may be shown: a log is not trusted, and must not steer a terminal."""
    return text if text.isprintable() else ''.join(c if c.isprintable() else '?' for c in text)
