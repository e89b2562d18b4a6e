"""Reads the samples of the nodes beside a log, which are untrusted input like the log."""
import itertools
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_rn50.files import regular_file
from mlperf_rn50.mlperf.collect import number
from mlperf_rn50.mlperf.run import Run

_MAX_LINE_BYTES, _MAX_SAMPLES, _MAX_NODES = 2**20, 10**6, 256
# What a picture shows: kinds of devices whose rates belong together.
KINDS = {'disk read': ('disk_read',), 'disk write': ('disk_write',),
         'network receive': ('net_receive', 'infiniband_receive'), 'network send': ('net_send', 'infiniband_send')}


@dataclass(frozen=True)
class NodeTelemetry:
    """What a node did during a run.

    Args:
        host: its name.
        path: the file.
        times_s: seconds since run_start, of each sample.
        rates: bytes per second of each sample, by the keys of KINDS; the loopback interface is not counted.
        cpu_percent: of all cores, of each sample.
        page_cache_bytes: of each sample.
    """

    host: str
    path: Path
    times_s: tuple[float, ...]
    rates: dict[str, tuple[float, ...]]
    cpu_percent: tuple[float, ...]
    page_cache_bytes: tuple[float, ...]


def _records(path: Path) -> list[dict[str, Any]]:
    found = []
    with suppress(OSError), open(path, encoding='utf-8', errors='replace', opener=regular_file) as f:
        for line in itertools.islice(iter(lambda: f.readline(_MAX_LINE_BYTES), ''), _MAX_SAMPLES):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and number(record.get('time_ms'), 0, 1e15) is not None:
                found.append(record)
    return found


def _rate(record: dict[str, Any], kinds: tuple[str, ...]) -> float:
    values = [record.get(f'{kind}_bytes_per_s') for kind in kinds]
    return sum(number(v, 0, 1e15) or 0.0 for devices in values if isinstance(devices, dict)
               for name, v in devices.items() if name != 'lo')


def _gauge(record: dict[str, Any], name: str) -> float:
    return number(record.get(name), 0, 1e18) or 0.0


def read_node(path: Path) -> NodeTelemetry | None:
    """The samples of a node on the run's clock; None where the file has none, or does not say when the run started."""
    host, offset_s, samples = path.stem.split('_', 2)[-1], None, []
    for record in _records(path):
        time_s = record['time_ms'] / 1000
        if record.get('event') == 'run_start':
            offset_s = (number(record.get('clock_s'), 0, 1e9) or 0.0) - time_s
        elif 'event' not in record and offset_s is not None:
            samples.append((time_s + offset_s, record))
    if not samples:
        return None
    records = [r for _, r in samples]
    return NodeTelemetry(host, path, tuple(t for t, _ in samples),
                         {label: tuple(_rate(r, kinds) for r in records) for label, kinds in KINDS.items()},
                         tuple(_gauge(r, 'cpu_percent') for r in records),
                         tuple(_gauge(r, 'page_cache_bytes') for r in records))


def read_telemetry(run: Run) -> list[NodeTelemetry]:
    """The samples of all nodes of a run, by name."""
    found = re.fullmatch(r'result_(\d+)\.txt', run.path.name)
    if not found:
        return []
    paths = sorted(run.path.parent.glob(f'telemetry_{found[1]}_*.jsonl'))[:_MAX_NODES]
    return [node for p in paths if (node := read_node(p))]
