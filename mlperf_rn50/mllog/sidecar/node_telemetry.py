"""Reader of the node telemetry of a run, which is untrusted input like the log."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.runfolder.jsonl import read_lines
from mlperf_rn50.runfolder.names import find_telemetry, host_of, run_number
from mlperf_rn50.runfolder.records import TelemetryRecord

TelemetryFiles = Mapping[int, Sequence[Path]] | None  # by run number
_MAX_NODES, _MAX_SAMPLES = 256, 4_000_000  # of a run
# Counters whose sum a plot shows, by label of the plot.
KINDS = {
    'disk read': ('disk_read',),
    'disk write': ('disk_write',),
    'network receive': ('net_receive', 'infiniband_receive'),
    'network send': ('net_send', 'infiniband_send'),
}


@dataclass(frozen=True)
class NodeTelemetry:
    """Samples of a node during a run; NaN for missing values."""

    host: str
    times_s: tuple[float, ...]  # since run_start
    rates: dict[str, tuple[float, ...]]  # bytes per second by KINDS, without the loopback interface


def _rate(record: TelemetryRecord, kinds: tuple[str, ...]) -> float:
    """Return the total bytes per second of all devices in a sample, without the loopback
    interface."""
    rates = [
        value
        for kind in kinds
        for name, value in getattr(record, f'{kind}_bytes_per_s').items()
        if name != 'lo'
    ]
    return sum(rates) if rates else math.nan


def read_node(path: Path, most: int = _MAX_SAMPLES) -> NodeTelemetry | None:
    """Return the samples of a node after run_start, on the run's clock; None if it has no such
    samples.

    Above `most` samples, every second one is left out.
    """
    offset_s = None
    samples = []
    for _, record in read_lines(path, TelemetryRecord):
        if record.event == 'run_start':
            run_s = record.clock_s if record.elapsed_s is None else record.elapsed_s
            offset_s = None if run_s is None else run_s - record.time_s
        elif record.event is None and offset_s is not None:
            rates = (_rate(record, kinds) for kinds in KINDS.values())
            samples.append((record.time_s + offset_s, *rates))
            if len(samples) > most:
                del samples[1::2]
    if not samples:
        return None
    times_s, *by_kind = zip(*samples)
    return NodeTelemetry(host_of(path), times_s, dict(zip(KINDS, by_kind)))


def files_of(run: Run, files: TelemetryFiles = None) -> Sequence[Path]:
    """Return the telemetry files of a run; files: find_telemetry's result for its folder, or None
    to search it."""
    number = run_number(run.path.name)
    by_run = find_telemetry(run.path.parent) if files is None else files
    return () if number is None else by_run.get(number, ())[:_MAX_NODES]


def read_telemetry(run: Run, files: TelemetryFiles = None) -> list[NodeTelemetry]:
    """Return the samples of all nodes in a run; files: as for files_of."""
    paths = files_of(run, files)
    most = _MAX_SAMPLES // max(1, len(paths))
    return [node for p in paths if (node := read_node(p, most))]
