"""The energy that a node's processors and GPUs take, as they count it themselves.

Source: the kernel's power capping framework (/sys/class/powercap: a zone intel-rapl:N per CPU package, of AMD's as of
Intel's; readable for root alone since Linux 5.10) and NVML. The zones inside a package (core, uncore) are part of it;
memory (dram) and the whole platform (psys) are left out, as is intel-rapl-mmio, which counts the packages again.
"""
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# No package takes more: by then a counter that goes round may have done so twice.
_MAX_PACKAGE_W = 2000.0
# Power readings that lie further apart say nothing of what is between them.
_MAX_POWER_GAP_S = 10.0
# Tells one running machine from another, whatever its containers are called.
BOOT_ID = Path('/proc/sys/kernel/random/boot_id')


class Lost(Exception):
    """A counter cannot be followed any longer."""


class Rising:
    """Joules since it was made, of a counter that rises, and starts again at 0 beyond its range where it has one."""

    def __init__(self, name: str, read_j: Callable[[], float], now_s: float, range_j: float | None = None):
        self.name, self._read_j, self._range_j = name, read_j, range_j
        self._before_j, self._then_s, self._total_j = read_j(), now_s, 0.0

    def joules(self, now_s: float) -> float:
        """Joules by now, on a monotonic clock; Lost is raised where they will never be known again."""
        value_j = self._read_j()
        risen_j = value_j - self._before_j
        if self._range_j is not None:
            if (now_s - self._then_s) * _MAX_PACKAGE_W >= self._range_j:
                raise Lost('it may have gone round more than once')
            risen_j += self._range_j if risen_j < 0 else 0.0
        if risen_j < 0:
            raise Lost('it fell')
        self._before_j, self._then_s = value_j, now_s
        self._total_j += risen_j
        return self._total_j


class Integrated:
    """Joules since it was made, from readings of power, as straight lines between them."""

    def __init__(self, name: str, read_w: Callable[[], float], now_s: float):
        self.name, self._read_w = name, read_w
        self._before_w, self._then_s, self._total_j = read_w(), now_s, 0.0

    def joules(self, now_s: float) -> float:
        """As Rising.joules."""
        power_w, seconds = self._read_w(), now_s - self._then_s
        if seconds > _MAX_POWER_GAP_S:
            raise Lost('nobody looked')
        self._total_j += (power_w + self._before_w) / 2 * seconds
        self._before_w, self._then_s = power_w, now_s
        return self._total_j


Counter = Rising | Integrated


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def open_packages(sys: Path, now_s: float) -> list[Counter]:
    """The counters of all CPU packages; none where one of them cannot be read."""
    found: list[Counter] = []
    try:
        for zone in sorted((sys / 'class/powercap').glob('intel-rapl:*')):
            name = (zone / 'name').read_text().strip()
            if name.startswith('package'):
                path, range_j = zone / 'energy_uj', _microjoules(zone / 'max_energy_range_uj')
                found.append(Rising(name, partial(_microjoules, path), now_s, range_j))
    except (OSError, ValueError):
        return []
    return found


def find_gpus() -> tuple[ModuleType | None, list[Any]]:
    """NVML and its handles of all GPUs of this host; none without a driver."""
    try:
        import pynvml
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver, no right to ask: a node without GPUs, as far as this is concerned
        return None, []


def open_gpu_energy(nvml: Any, handles: Sequence[Any], now_s: float) -> list[Counter]:
    """The counters of all GPUs, from their power where they have none; none where one of them tells neither."""
    try:
        return [_open_gpu(nvml, handle, str(i), now_s) for i, handle in enumerate(handles)]
    except Exception:  # NVML's own errors
        return []


def _open_gpu(nvml: Any, handle: Any, name: str, now_s: float) -> Counter:
    with suppress(Exception):  # older than Volta, or no such function in an old package
        return Rising(name, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, now_s)
    return Integrated(name, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, now_s)


class Meter:
    """Joules of this node's devices since it was made. A kind of which one device is lost is told no more: a part of
    it would look like the whole."""

    def __init__(self, counters: Mapping[str, Sequence[Counter]]):
        """counters: by kind, cpu and gpu; a kind without any is not measured."""
        self._counters = {kind: list(found) for kind, found in counters.items() if found}
        self.are_gpus_counted = all(isinstance(c, Rising) for c in self._counters.get('gpu', ()))

    def read(self, now_s: float) -> dict[str, dict[str, float]]:
        """Joules by kind and device, to the millijoule; without what cannot be read now."""
        return {kind: found for kind in tuple(self._counters) if (found := self._read_kind(kind, now_s))}

    def _read_kind(self, kind: str, now_s: float) -> dict[str, float]:
        try:
            return {c.name: round(c.joules(now_s), 3) for c in self._counters[kind]}
        except Lost:
            del self._counters[kind]
        except Exception:  # of the file system or of NVML: perhaps the next time
            pass
        return {}


def open_meter(sys: Path, nvml: Any, handles: Sequence[Any], now_s: float) -> Meter:
    """A meter of this node, from now on."""
    return Meter({'cpu': open_packages(sys, now_s), 'gpu': open_gpu_energy(nvml, handles, now_s)})


def energy_facts(sys: Path = Path('/sys')) -> dict[str, int]:
    """Devices of this host whose energy can be measured, by kind."""
    nvml, handles = find_gpus()
    return {'cpu': len(open_packages(sys, 0.0)), 'gpu': len(open_gpu_energy(nvml, handles, 0.0))}
