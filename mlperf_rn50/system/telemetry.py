"""Samples of a node's state, once a second, as JSON lines in the folder of the run's log.

Rates are means since the previous sample; joules count from the start (see power.py). The line for
run_start aligns this node's clock with the run's. Source: psutil (/proc/stat, meminfo, diskstats,
net/dev), /sys/class/infiniband, NVML.
"""

import platform
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mlperf_rn50.errors import StorageError
from mlperf_rn50.files import LineFile
from mlperf_rn50.runfolder.jsonl import encode
from mlperf_rn50.runfolder.records import GpuSample, TelemetryRecord
from mlperf_rn50.system.cgroup import read_small
from mlperf_rn50.system.gpus import all_bus_ids
from mlperf_rn50.system.power import BOOT_ID, Meter, find_gpus, open_gpu_energy, open_packages

SYS = Path('/sys')
PERIOD_S = 1.0
_WORD_BYTES = 4  # unit of InfiniBand's data counters

Counters = dict[str, dict[str, int]]


def read_counters(sys: Path = SYS) -> Counters:
    """Read the bytes transferred by each disk, network interface and InfiniBand port since boot."""
    counted = psutil.disk_io_counters(perdisk=True) or {}
    disks = {n: d for n, d in counted.items() if (sys / 'block' / n / 'device').exists()}
    nets = psutil.net_io_counters(pernic=True)
    ports = sorted((sys / 'class/infiniband').glob('*/ports/*'))
    return {
        'disk_read': {n: d.read_bytes for n, d in disks.items()},
        'disk_write': {n: d.write_bytes for n, d in disks.items()},
        'net_receive': {n: i.bytes_recv for n, i in nets.items()},
        'net_send': {n: i.bytes_sent for n, i in nets.items()},
        'infiniband_receive': _words(ports, 'port_rcv_data'),
        'infiniband_send': _words(ports, 'port_xmit_data'),
    }


def _words(ports: Sequence[Path], counter: str) -> dict[str, int]:
    """Read a counter of 4-byte words of each port and convert it to bytes. Omit unreadable
    counters."""
    result = {}
    for port in ports:
        text = read_small(port / 'counters' / counter)
        if text.isdecimal():
            result[f'{port.parts[-3]}/{port.name}'] = _WORD_BYTES * int(text)
    return result


def make_rates(before: Counters, after: Counters, seconds: float) -> Counters:
    """Return bytes per second of each device between two readings, or 0 for a new or reset
    counter."""
    rates: Counters = {}
    for kind, values in after.items():
        for name, value in values.items():
            risen = max(0, value - before.get(kind, {}).get(name, value))
            rates.setdefault(f'{kind}_bytes_per_s', {})[name] = round(risen / seconds)
    return rates


def read_gpu(nvml: Any, handle: Any) -> GpuSample:
    """Read the state of a GPU, without unavailable values (a MIG instance has no utilisation)."""
    queries = {
        'utilization_percent': lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        'memory_used_bytes': lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        'power_w': lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        'sm_clock_mhz': lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    values: dict[str, Any] = {}
    for name, query in queries.items():
        with suppress(Exception):  # an NVML error
            values[name] = query()
    return GpuSample(**values)


class Telemetry:
    """Thread that samples this node until close(). Without a path it does nothing. One rank per
    node has a path."""

    def __init__(self, path: Path | None, num_gpus: int = 0):
        self._num_gpus = num_gpus
        self._file = LineFile(path) if path else None
        self._error: StorageError | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name='telemetry', daemon=True)
        if self._file:
            self._write(
                event='start',
                host=platform.node(),
                cpu_cores=psutil.cpu_count(),
                memory_bytes=psutil.virtual_memory().total,
            )
            self._thread.start()

    def run_start(self, clock_s: float, elapsed_s: float | None = None) -> None:
        """Record the run's times at present, so that readers can align the other lines with
        them."""
        self._write(event='run_start', clock_s=clock_s, elapsed_s=elapsed_s)

    def check(self) -> None:
        """Raise StorageError if a sample could not be written."""
        if self._error:
            raise self._error

    def close(self) -> None:
        if self._file:
            self._stop.set()
            self._thread.join()
            self._file.close()
            self._file = None

    def _write(self, **values: Any) -> None:
        if self._file:
            with self._lock:
                self._file.write(encode(TelemetryRecord(round(1000 * time.time()), **values)))

    def _run(self) -> None:
        try:
            self._sample()
        except StorageError as e:
            self._error = e

    def _sample(self) -> None:
        nvml, handles = find_gpus()
        before = read_counters()
        then = time.monotonic()
        # If this rank can open only some of the node's GPUs, measure none; their sum would look
        # like the node's energy.
        is_part = len(handles) < min(self._num_gpus, len(all_bus_ids(SYS)))
        metered = [] if is_part else handles
        packages = open_packages(SYS, then)
        meter = Meter({'cpu': packages, 'gpu': open_gpu_energy(nvml, metered, then)})
        if energy := meter.read(then):
            how = 'counted' if meter.are_gpus_counted else 'integrated from power'
            self._write(
                event='meter',
                boot=read_small(BOOT_ID) or None,
                energy_j=energy,
                gpu_energy=how if 'gpu' in energy else None,
            )
        psutil.cpu_percent()  # the next call measures from here
        while not self._stop.wait(PERIOD_S):
            after = read_counters()
            now = time.monotonic()
            memory = psutil.virtual_memory()
            self._write(
                cpu_percent=psutil.cpu_percent(),
                memory_used_bytes=memory.used,
                page_cache_bytes=memory.cached,
                **make_rates(before, after, now - then),
                gpus=[read_gpu(nvml, h) for h in handles],
                energy_j=meter.read(time.monotonic()),
            )
            before = after
            then = now
        if energy := meter.read(time.monotonic()):  # includes the time since the last sample
            self._write(event='stop', energy_j=energy)
