"""Reads metrics.jsonl beside one of our logs, which is untrusted input like the log."""
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from mlperf_rn50.jsonl import read_lines
from mlperf_rn50.mllog.read.description import beside
from mlperf_rn50.mllog.run import Run

_MAX_NODES = 256
Number = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Epoch = Annotated[int, msgspec.Meta(ge=1, le=10**6)]  # trained, from 1
Images = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Bytes = dict[str, Annotated[int, msgspec.Meta(ge=0, le=10**18)]]  # by host


class _Step(msgspec.Struct):
    time_s: Number  # since run_start
    learning_rate: Number


class _Evaluation(msgspec.Struct):
    epoch: Epoch
    num_top1: Images
    num_images: Images


class _Reads(msgspec.Struct):
    event: Literal['epoch']
    epoch: Epoch
    record_bytes: Bytes
    new_record_bytes: Bytes = {}


class _StragglersRecord(msgspec.Struct):
    event: Literal['ranks']
    stragglers: list[Annotated[str, msgspec.Meta(max_length=400)]]


@dataclass(frozen=True)
class NodeReads:
    """Bytes of training records that a node read, padded ones included, and of new ones, not read before."""

    host: str
    path: Path
    first_bytes: int  # in the first epoch that is there
    first_new_bytes: int | None  # None where the metrics do not say
    later_bytes: float | None  # mean of the later epochs; None with a single epoch
    later_new_bytes: float | None
    first_line: int  # of the metrics, that the first epoch is from
    last_line: int


def read_learning_rates(run: Run) -> Sequence[tuple[float, float]]:
    """Return (seconds since run_start, learning rate) as it was applied: from metrics.jsonl beside one of our logs,
    which has more of them than the log, else as the log has it; nothing where neither does."""
    steps = read_lines(beside(run.path, 'metrics', '.jsonl'), _Step, b'learning_rate')
    return tuple((s.time_s, s.learning_rate) for _, s in steps) or run.learning_rates


def read_curve(path: Path) -> list[tuple[int, float]]:
    """Return (epochs trained, Top-1 as a fraction) of every evaluation, from a metrics.jsonl.

    One that is there twice, as after a resume, counts as it was done last.
    """
    return sorted({e.epoch: e.num_top1 / e.num_images for _, e in read_lines(path, _Evaluation, b'num_top1')
                   if e.num_top1 <= e.num_images > 0}.items())


def read_node_reads(run: Run) -> list[NodeReads]:
    """Return what each node read of the training set, by name: from metrics.jsonl beside one of our logs.

    An epoch that is there twice, as after a resume, counts as it was trained last.
    """
    path = beside(run.path, 'metrics', '.jsonl')
    epochs: dict[str, dict[int, tuple[int, int, int | None]]] = {}
    for line, reads in read_lines(path, _Reads, b'record_bytes'):
        for host, num_bytes in reads.record_bytes.items():
            if host in epochs or len(epochs) < _MAX_NODES:
                epochs.setdefault(host, {})[reads.epoch] = (line, num_bytes, reads.new_record_bytes.get(host))
    return [_node_reads(host, path, [e for _, e in sorted(found.items())]) for host, found in sorted(epochs.items())]


def _node_reads(host: str, path: Path, epochs: list[tuple[int, int, int | None]]) -> NodeReads:
    """Return the summary of a node from (line, bytes, new bytes) of its epochs."""
    (first_line, first_bytes, first_new), later = epochs[0], epochs[1:]
    new = [n for _, _, n in later if n is not None]
    return NodeReads(host, path, first_bytes, first_new, statistics.fmean(n for _, n, _ in later) if later else None,
                     statistics.fmean(new) if new and len(new) == len(later) else None, first_line, epochs[-1][0])


def read_stragglers(run: Run) -> list[str]:
    """Return what metrics.jsonl beside one of our logs says of slow ranks, the last word on each."""
    told: dict[str, tuple[str, int]] = {}
    records = [r for _, r in read_lines(beside(run.path, 'metrics', '.jsonl'), _StragglersRecord, b'stragglers')]
    for text in (text for r in records for text in r.stragglers):
        rank = text.partition(' is slow')[0]
        if rank in told or len(told) < _MAX_NODES:
            told[rank] = text, told.get(rank, ('', 0))[1] + 1
    return [f'{text} (at {count} of {len(records)} evaluations)' for text, count in told.values()]
