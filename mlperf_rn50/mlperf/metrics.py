"""Reads metrics.jsonl beside one of our logs, which is untrusted input like the log."""
import itertools
import json

from mlperf_rn50.mlperf.collect import number
from mlperf_rn50.mlperf.description import beside
from mlperf_rn50.mlperf.run import Run

_MAX_LINE_BYTES, _MAX_METRICS = 1 << 20, 100_000


def read_learning_rates(run: Run) -> tuple[tuple[float, float], ...]:
    """(seconds since run_start, learning rate) as it was applied: from metrics.jsonl beside one of our logs, which has
    more of them than the log, else as the log has it; nothing where neither does."""
    pairs = []
    try:
        with open(beside(run.path, 'metrics', '.jsonl'), encoding='utf-8', errors='replace') as f:
            for line in itertools.islice(iter(lambda: f.readline(_MAX_LINE_BYTES), ''), _MAX_METRICS):
                pairs.append(_learning_rate(line))
    except OSError:
        return run.learning_rates
    return tuple(p for p in pairs if p) or run.learning_rates


def _learning_rate(line: str) -> tuple[float, float] | None:
    """The time and learning rate of a line of metrics.jsonl; None where it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    time_s, learning_rate = number(record.get('time_s'), 0, 1e9), number(record.get('learning_rate'), 0, 1e9)
    return None if time_s is None or learning_rate is None else (time_s, learning_rate)
