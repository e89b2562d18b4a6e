"""Reads metrics.jsonl beside one of our logs, which is untrusted input like the log."""
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.files import regular_file
from mlperf_rn50.mlperf.collect import integer, number
from mlperf_rn50.mlperf.description import beside
from mlperf_rn50.mlperf.run import Run

_MAX_LINE_BYTES, _MAX_METRICS, _MAX_NODES, _MAX_TEXT = 1 << 20, 100_000, 256, 400


@dataclass(frozen=True)
class NodeReads:
    """Bytes of training records that a node read, padded ones included, and of those it had not read before.

    Args:
        first_bytes: in the first epoch that is there.
        first_new_bytes: the new ones among them; None where the metrics do not say.
        later_bytes: in a later epoch, the mean; None with a single epoch.
        first_line: of the metrics, that the first epoch is from.
        last_line: of the metrics, that the last epoch is from.
    """

    host: str
    path: Path
    first_bytes: int
    first_new_bytes: int | None
    later_bytes: float | None
    later_new_bytes: float | None
    first_line: int
    last_line: int


def _records(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of metrics.jsonl in which a key may stand, with their lines; none where there is no such file."""
    try:
        with open(path, encoding='utf-8', errors='replace', opener=regular_file) as f:
            lines = itertools.islice(iter(lambda: f.readline(_MAX_LINE_BYTES), ''), _MAX_METRICS)
            for place, line in enumerate(lines, start=1):
                if key not in line:
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield place, record
    except OSError:
        return


def read_learning_rates(run: Run) -> Sequence[tuple[float, float]]:
    """(seconds since run_start, learning rate) as it was applied: from metrics.jsonl beside one of our logs, which has
    more of them than the log, else as the log has it; nothing where neither does."""
    pairs = (_learning_rate(record) for _, record in _records(beside(run.path, 'metrics', '.jsonl'), 'learning_rate'))
    return tuple(p for p in pairs if p) or run.learning_rates


def _learning_rate(record: dict[str, Any]) -> tuple[float, float] | None:
    """The time and learning rate of a record of metrics.jsonl; None where it has none."""
    time_s, learning_rate = number(record.get('time_s'), 0, 1e9), number(record.get('learning_rate'), 0, 1e9)
    return None if time_s is None or learning_rate is None else (time_s, learning_rate)


def read_curve(path: Path) -> list[tuple[int, float]]:
    """(epochs trained, Top-1 as a fraction) of every evaluation, from a metrics.jsonl.

    One that is there twice, as after a resume, counts as it was done last.
    """
    found: dict[int, float] = {}
    for _, record in _records(path, 'num_top1'):
        epoch, num = integer(record.get('epoch'), 1, 10**6), integer(record.get('num_images'), 1, 10**12)
        correct = integer(record.get('num_top1'), 0, num) if num else None
        if epoch and num and correct is not None:
            found[epoch] = correct / num
    return sorted(found.items())


def _by_host(record: dict[str, Any], name: str) -> dict[str, int]:
    """Bytes by host, as a record has them under a name."""
    found = record.get(name)
    pairs = list(found.items())[:_MAX_NODES] if isinstance(found, dict) else []
    return {host: num for host, value in pairs if (num := integer(value, 0, 10**18)) is not None}


def read_node_reads(run: Run) -> list[NodeReads]:
    """What each node read of the training set, by name: from metrics.jsonl beside one of our logs.

    An epoch that is there twice, as after a resume, counts as it was trained last.
    """
    path = beside(run.path, 'metrics', '.jsonl')
    epochs: dict[str, dict[int, tuple[int, int, int | None]]] = {}
    for line, record in _records(path, 'record_bytes'):
        epoch = integer(record.get('epoch'), 1, 10**6) if record.get('event') == 'epoch' else None
        if epoch is None:
            continue
        new = _by_host(record, 'new_record_bytes')
        for host, num_bytes in _by_host(record, 'record_bytes').items():
            if host in epochs or len(epochs) < _MAX_NODES:
                epochs.setdefault(host, {})[epoch] = (line, num_bytes, new.get(host))
    return [_node_reads(host, path, [e for _, e in sorted(found.items())]) for host, found in sorted(epochs.items())]


def _node_reads(host: str, path: Path, epochs: list[tuple[int, int, int | None]]) -> NodeReads:
    """The summary of a node from (line, bytes, new bytes) of its epochs."""
    (first_line, first_bytes, first_new), later = epochs[0], epochs[1:]
    new = [n for _, _, n in later if n is not None]
    return NodeReads(host, path, first_bytes, first_new, statistics.fmean(n for _, n, _ in later) if later else None,
                     statistics.fmean(new) if new and len(new) == len(later) else None, first_line, epochs[-1][0])


def read_stragglers(run: Run) -> list[str]:
    """What was said of ranks that were slow, the last word on each: from metrics.jsonl beside one of our logs."""
    told: dict[str, tuple[str, int]] = {}
    num_records = 0
    for _, record in _records(beside(run.path, 'metrics', '.jsonl'), 'stragglers'):
        if record.get('event') != 'ranks' or not isinstance(record.get('stragglers'), list):
            continue
        num_records += 1
        for text in record['stragglers'][:_MAX_NODES]:
            rank = text.partition(' is slow')[0] if isinstance(text, str) and len(text) < _MAX_TEXT else ''
            if rank and (rank in told or len(told) < _MAX_NODES):
                told[rank] = text, told.get(rank, ('', 0))[1] + 1
    return [f'{text} (at {count} of {num_records} evaluations)' for text, count in told.values()]
