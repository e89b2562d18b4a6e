"""Reader of the metrics.jsonl of a run, which is untrusted input like the log."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.names import run_of
from mlperf_rn50.runfolder.records import (
    EpochRecord,
    EvalRecord,
    RanksRecord,
    ResumedRecord,
    TrainRecord,
    read_records,
)

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
    steps = (step for _, step in read_records(run_of(run.path).metrics, TrainRecord))
    pairs = ((step.time_s, step.learning_rate) for step in steps)
    known = ((s, rate) for s, rate in pairs if s is not None and rate is not None)
    return tuple(known) or run.learning_rates


def read_curve(path: Path) -> list[tuple[int, float]]:
    """Return (epochs trained, Top-1 as a fraction) of each evaluation in a metrics.jsonl, the last
    if repeated."""
    evaluations = (e for _, e in read_records(path, EvalRecord) if e.num_top1 <= e.num_images)
    return sorted({e.epoch: e.num_top1 / e.num_images for e in evaluations}.items())


def read_node_reads(run: Run) -> list[NodeReads]:
    """Return the reads of each node, sorted by name; if a resume repeated an epoch, its last reads
    are used, and if it was within one, that epoch is left out. Nodes without the first epoch are
    left out, too."""
    path = run_of(run.path).metrics
    # (line, bytes, new bytes) by host and epoch
    epochs: dict[str, dict[int, tuple[int, int, int | None]]] = {}
    partial = 0  # number of an epoch that a resume began within
    kind: Any = EpochRecord | ResumedRecord
    for line, reads in read_records(path, kind):
        if isinstance(reads, ResumedRecord):
            trained = reads.epoch or 0.0
            partial = int(trained) + 1 if trained % 1 else 0
            continue
        if reads.epoch == partial:
            continue
        for host, num_bytes in reads.record_bytes.items():
            if host in epochs or len(epochs) < _MAX_NODES:
                new_bytes = reads.new_record_bytes.get(host)
                epochs.setdefault(host, {})[reads.epoch] = line, num_bytes, new_bytes
    result = []
    for host, by_epoch in sorted(epochs.items()):
        if 1 not in by_epoch:
            continue
        rows = [by_epoch[epoch] for epoch in sorted(by_epoch)]
        (first_line, first, first_new), later = rows[0], rows[1:]
        new = [n for _, _, n in later if n is not None]
        result.append(
            NodeReads(
                host=host,
                path=path,
                first_bytes=first,
                first_new_bytes=first_new,
                later_bytes=statistics.fmean(n for _, n, _ in later) if later else None,
                later_new_bytes=statistics.fmean(new) if new and len(new) == len(later) else None,
                first_line=first_line,
                last_line=rows[-1][0],
            )
        )
    return result


def read_stragglers(run: Run) -> list[Finding]:
    """Return the last message about each straggler, with the number of evaluations at which it was
    slow."""
    texts: dict[str, list[str]] = {}  # by rank
    found = [r.stragglers for _, r in read_records(run_of(run.path).metrics, RanksRecord)]
    for text in chain.from_iterable(found):
        rank = text.partition(' is slow')[0]
        if rank in texts or len(texts) < _MAX_NODES:
            texts.setdefault(rank, []).append(text)
    return [
        make_finding('straggler', None, own[-1], len(own), len(found), file=run.path)
        for own in texts.values()
    ]
