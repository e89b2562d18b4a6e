"""Energy of a node's processors and GPUs, from energy counters or, for GPUs without one, power
readings.

Source: NVML, and the kernel's power capping framework (/sys/class/powercap; since Linux 5.10, only
for root). The zone intel-rapl:N of an Intel or AMD CPU package includes its inner zones (core,
uncore). Memory (dram) and the whole platform (psys) are excluded, and so is intel-rapl-mmio, which
counts the packages again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# upper bound of a package's power, to detect that its counter may have wrapped around twice
_MAX_PACKAGE_W = 2000.0
_MAX_POWER_GAP_S = 10.0  # maximum time between power readings, for interpolation
# identifies a running machine, also inside containers
BOOT_ID = Path('/proc/sys/kernel/random/boot_id')


class CounterLost(Exception):
    """The total of a counter is no longer known."""


class EnergyCounter:
    """Joules since this object was created, from an increasing counter that may wrap around at the
    end of its range."""

    def __init__(
        self, name: str, read: Callable[[], float], now_s: float, range_j: float | None = None
    ):
        self.name = name
        self._read = read
        self._range_j = range_j
        self._before = read()
        self._then_s = now_s
        self._total_j = 0.0

    def joules(self, now_s: float) -> float:
        """Return the joules so far, given a monotonic clock's time. Raise CounterLost if they are
        no longer known."""
        value_j = self._read()
        risen_j = value_j - self._before
        if self._range_j is not None:
            if (now_s - self._then_s) * _MAX_PACKAGE_W >= self._range_j:
                raise CounterLost('the counter may have wrapped around more than once')
            risen_j += self._range_j if risen_j < 0 else 0.0
        if risen_j < 0:
            raise CounterLost('the counter decreased')
        self._total_j += risen_j
        return self._take(value_j, now_s)

    def _take(self, value: float, now_s: float) -> float:
        self._before = value
        self._then_s = now_s
        return self._total_j


class PowerIntegral(EnergyCounter):
    """Joules since this object was created, by linear interpolation between readings in watts."""

    def joules(self, now_s: float) -> float:
        """Return the joules so far, like EnergyCounter.joules."""
        power_w = self._read()
        seconds = now_s - self._then_s
        if seconds > _MAX_POWER_GAP_S:
            raise CounterLost('the last reading is too old')
        self._total_j += (power_w + self._before) / 2 * seconds
        return self._take(power_w, now_s)


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def open_packages(sys: Path, now_s: float) -> list[EnergyCounter]:
    """Open the counters of all CPU packages. Return none if one of them cannot be read."""
    packages: list[EnergyCounter] = []
    try:
        for zone in sorted((sys / 'class/powercap').glob('intel-rapl:*')):
            name = (zone / 'name').read_text().strip()
            if name.startswith('package'):
                range_j = _microjoules(zone / 'max_energy_range_uj')
                read = partial(_microjoules, zone / 'energy_uj')
                packages.append(EnergyCounter(name, read, now_s, range_j))
    except (OSError, ValueError):
        return []
    return packages


def find_gpus() -> tuple[ModuleType | None, list[Any]]:
    """Return NVML and its handles for all GPUs of this host, or (None, []) if NVML does not
    work."""
    try:
        import pynvml

        pynvml.nvmlInit()
        numbers = range(pynvml.nvmlDeviceGetCount())
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in numbers]
    except Exception:  # no package, driver or permission: treated as a node without GPUs
        return None, []


def open_gpu_energy(nvml: Any, handles: Sequence[Any], now_s: float) -> list[EnergyCounter]:
    """Open the energy counters or power readings of all GPUs. Return [] if a GPU has neither."""
    try:
        return [_open_gpu(nvml, handle, str(i), now_s) for i, handle in enumerate(handles)]
    except Exception:  # an NVML error
        return []


def _open_gpu(nvml: Any, handle: Any, name: str, now_s: float) -> EnergyCounter:
    with suppress(Exception):  # a GPU older than Volta, or a pynvml without this function
        return EnergyCounter(
            name, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, now_s
        )
    return PowerIntegral(name, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, now_s)


class Meter:
    """Joules of this node's devices by kind. A kind with a lost counter is dropped, as its sum
    would be incomplete."""

    def __init__(self, counters: Mapping[str, Sequence[EnergyCounter]]):
        self._counters = {kind: list(group) for kind, group in counters.items() if group}
        self.are_gpus_counted = not any(
            isinstance(c, PowerIntegral) for c in self._counters.get('gpu', ())
        )

    def read(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return joules by kind and device, rounded to millijoules, without kinds that cannot be
        read now."""
        result = {}
        for kind, counters in tuple(self._counters.items()):
            try:
                result[kind] = {c.name: round(c.joules(now_s), 3) for c in counters}
            except CounterLost:
                del self._counters[kind]
            except Exception:  # a file system or NVML error; the next reading may succeed
                continue
        return result


def energy_facts(sys: Path = Path('/sys')) -> dict[str, int]:
    """Count the devices of this host with measurable energy, by kind."""
    nvml, handles = find_gpus()
    return {'cpu': len(open_packages(sys, 0.0)), 'gpu': len(open_gpu_energy(nvml, handles, 0.0))}
