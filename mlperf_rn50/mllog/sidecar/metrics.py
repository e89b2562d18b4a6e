"""Reader of the metrics.jsonl of a run, which is untrusted input like the log."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.records import EpochRecord, EvalRecord, RanksRecord, TrainRecord

_MAX_NODES = 256


@dataclass(frozen=True)
class NodeReads:
    """Bytes of training records, with padding, that a node read; new bytes are those read for the
    first time."""

    host: str
    path: Path
    first_bytes: int  # in the first logged epoch
    first_new_bytes: int | None  # None if it is not logged
    later_bytes: float | None  # mean of the later epochs; None with a single epoch
    later_new_bytes: float | None
    first_line: int  # line numbers in metrics.jsonl
    last_line: int


def read_learning_rates(run: Run) -> Sequence[tuple[float, float]]:
    """Return (seconds since run_start, learning rate) from metrics.jsonl, else from the log, which
    has fewer pairs."""
    steps = read_lines(run_of(run.path).metrics, TrainRecord, b'learning_rate')
    return (
        tuple(
            (s.time_s, s.learning_rate)
            for _, s in steps
            if s.time_s is not None and s.learning_rate is not None
        )
        or run.learning_rates
    )


def read_curve(path: Path) -> list[tuple[int, float]]:
    """Return (epochs trained, Top-1 as a fraction) of each evaluation in a metrics.jsonl, the last
    if repeated."""
    return sorted(
        {
            e.epoch: e.num_top1 / e.num_images
            for _, e in read_lines(path, EvalRecord, b'num_top1')
            if e.num_top1 <= e.num_images
        }.items()
    )


def read_node_reads(run: Run) -> list[NodeReads]:
    """Return the reads of each node, sorted by name; if a resume repeated an epoch, its last reads
    are used."""
    path = run_of(run.path).metrics
    # (line, bytes, new bytes) by host and epoch
    epochs: dict[str, dict[int, tuple[int, int, int | None]]] = {}
    for line, reads in read_lines(path, EpochRecord, b'record_bytes'):
        for host, num_bytes in reads.record_bytes.items():
            if host in epochs or len(epochs) < _MAX_NODES:
                epochs.setdefault(host, {})[reads.epoch] = (
                    line,
                    num_bytes,
                    reads.new_record_bytes.get(host),
                )
    result = []
    for host, by_epoch in sorted(epochs.items()):
        rows = [by_epoch[epoch] for epoch in sorted(by_epoch)]
        (first_line, first, first_new), later = rows[0], rows[1:]
        new = [n for _, _, n in later if n is not None]
        result.append(
            NodeReads(
                host,
                path,
                first,
                first_new,
                statistics.fmean(n for _, n, _ in later) if later else None,
                statistics.fmean(new) if new and len(new) == len(later) else None,
                first_line,
                rows[-1][0],
            )
        )
    return result


def read_stragglers(run: Run) -> list[Finding]:
    """Return the last message about each straggler, with the number of evaluations at which it was
    slow."""
    messages: dict[str, tuple[str, int]] = {}
    found = [
        r.stragglers for _, r in read_lines(run_of(run.path).metrics, RanksRecord, b'stragglers')
    ]
    for text in chain.from_iterable(found):
        rank = text.partition(' is slow')[0]
        if rank in messages or len(messages) < _MAX_NODES:
            messages[rank] = text, messages.get(rank, ('', 0))[1] + 1
    return [
        make_finding('straggler', None, text, count, len(found), file=run.path)
        for text, count in messages.values()
    ]
