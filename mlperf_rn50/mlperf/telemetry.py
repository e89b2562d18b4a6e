"""Reads the samples of the nodes beside a log, which are untrusted input like the log."""
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """What a node did during a run; NaN where a sample does not say.

    Args:
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


def read_records(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """The lines of a node that have a time; keys: only those in which one of some keys may stand."""
    with suppress(OSError), open(path, encoding='utf-8', errors='replace', opener=regular_file) as f:
        for line in itertools.islice(iter(lambda: f.readline(_MAX_LINE_BYTES), ''), _MAX_SAMPLES):
            if keys and not any(key in line for key in keys):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and number(record.get('time_ms'), 0, 1e15) is not None:
                yield record


def _rate(record: dict[str, Any], kinds: tuple[str, ...]) -> float:
    """Bytes per second of all devices that a sample tells of."""
    found = [record.get(f'{kind}_bytes_per_s') for kind in kinds]
    values = [number(v, 0, 1e15) for devices in found if isinstance(devices, dict)
              for name, v in devices.items() if name != 'lo']
    known = [v for v in values if v is not None]
    return sum(known) if known else math.nan


def _gauge(record: dict[str, Any], name: str) -> float:
    value = number(record.get(name), 0, 1e18)
    return math.nan if value is None else value


def read_node(path: Path) -> NodeTelemetry | None:
    """The samples of a node on the run's clock; None where the file has none, or does not say when the run started."""
    offset_s = None
    samples: list[tuple[float, ...]] = []
    for record in read_records(path):
        time_s = record['time_ms'] / 1000
        if record.get('event') == 'run_start':
            clock_s = number(record.get('clock_s'), 0, 1e9)
            offset_s = None if clock_s is None else clock_s - time_s
        elif 'event' not in record and offset_s is not None:
            samples.append((time_s + offset_s, *(_rate(record, kinds) for kinds in KINDS.values()),
                            _gauge(record, 'cpu_percent'), _gauge(record, 'page_cache_bytes')))
    if not samples:
        return None
    times_s, *rates, cpu_percent, page_cache_bytes = zip(*samples)
    return NodeTelemetry(host_of(path), path, times_s, dict(zip(KINDS, rates)), cpu_percent, page_cache_bytes)


def find_telemetry(folder: Path) -> dict[str, list[Path]]:
    """The files of samples in a folder of runs, in the order of their names, by the number of the run."""
    found: dict[str, list[Path]] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for name in sorted(e.name for e in entries):
            if m := re.fullmatch(r'telemetry_(\d+)_.+\.jsonl', name):
                found.setdefault(m[1], []).append(folder / name)
    return found


def files_of(run: Run, files: Mapping[str, Sequence[Path]] | None = None) -> Sequence[Path]:
    """The files of samples of a run, by host; files: what find_telemetry finds beside it, where that is known."""
    number_of_run = re.fullmatch(r'result_(\d+)\.txt', run.path.name)
    if not number_of_run:
        return ()
    return (find_telemetry(run.path.parent) if files is None else files).get(number_of_run[1], ())[:_MAX_NODES]


def host_of(path: Path) -> str:
    """The host that a file of samples is named after."""
    return path.stem.split('_', 2)[-1]


def read_telemetry(run: Run, files: Mapping[str, Sequence[Path]] | None = None) -> list[NodeTelemetry]:
    """The samples of all nodes of a run, by name; files: what find_telemetry finds beside it, where that is known."""
    return [node for p in files_of(run, files) if (node := read_node(p))]
