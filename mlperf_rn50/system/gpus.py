"""The GPUs that this process can use, in CUDA's order, and which of them each rank of a node takes.

CUDA sees what CUDA_VISIBLE_DEVICES names, of what the device files let it open; NVML lists the latter, in the order of
PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID. Source: CUDA C++ Programming Guide (environment
variables), NVML API reference.
"""
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.cgroup import read_small
from mlperf_rn50.system.power import find_gpus

VISIBLE = 'CUDA_VISIBLE_DEVICES'
_NVIDIA, _DISPLAY_CLASS = '0x10de', '0x03'


@dataclass(frozen=True)
class Gpu:
    """What CUDA takes for a device: a card, or an instance of one that is divided (MIG).

    Args:
        uuid: GPU-… or MIG-….
        bus_id: PCI address of the card, in Linux' notation; '' where NVML has none.
        compute_cap: compute capability, such as 8.0.
        memory_bytes: of the device; None where NVML has none.
    """

    uuid: str
    name: str
    bus_id: str
    compute_cap: str
    driver_version: str
    memory_bytes: int | None


def _text(value: Any) -> str:
    """Return a text of NVML; older packages give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def linux_bus_id(text: str) -> str:
    """Return a PCI address in Linux' notation, of NVML's 00000000:3B:00.0; '' for anything else."""
    domain, _, rest = text.partition(':')
    return f'{int(domain, 16):04x}:{rest.lower()}' if re.fullmatch(r'[0-9A-Fa-f]+', domain) and rest else ''


def _memory_bytes(nvml: Any, handle: Any) -> int | None:
    with suppress(Exception):  # NVML's own errors; some devices have no memory of their own
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    is_instance = nvml.nvmlDeviceIsMigDeviceHandle(handle)
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_instance else handle
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(card)
    return Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)),
               linux_bus_id(_text(nvml.nvmlDeviceGetPciInfo(card).busId)), f'{major}.{minor}',
               _text(nvml.nvmlSystemGetDriverVersion()), _memory_bytes(nvml, handle))


def visible_handles(nvml: Any, handles: Sequence[Any], visible: str | None) -> list[Any]:
    """Return NVML's handles of the devices that CUDA counts from 0, in its order.

    Args:
        handles: of all cards, in the order of their PCI addresses.
        visible: CUDA_VISIBLE_DEVICES: numbers and UUIDs; the first that NVML does not know ends the list. None where it
            is not set.
    """
    if visible is None:
        return list(handles)
    found: list[Any] = []
    for word in map(str.strip, visible.split(',')):
        try:
            handle = handles[int(word)] if re.fullmatch('[0-9]{1,9}', word) else nvml.nvmlDeviceGetHandleByUUID(word)
        except Exception:  # NVML's own errors, or a number beyond the last card
            break
        found.append(handle)
    return found


def find_visible_gpus() -> list[Gpu]:
    """Return the devices that CUDA counts from 0 in this process, by NVML; none without a driver.

    Beginnings of UUIDs, and divided cards that are named by number, are CUDA's own business: MXNet then counts
    otherwise, and make_view falls back on numbers.
    """
    nvml, handles = find_gpus()
    with suppress(Exception):  # NVML's own errors
        return [_read_gpu(nvml, h) for h in visible_handles(nvml, handles, os.environ.get(VISIBLE))]
    return []


def all_bus_ids(sys: Path) -> list[str]:
    """PCI addresses of all of NVIDIA's cards of a host, in their order, those that may not be opened included."""
    return [p.name for p in sorted((sys / 'bus/pci/devices').glob('*'))
            if read_small(p / 'vendor') == _NVIDIA and read_small(p / 'class').startswith(_DISPLAY_CLASS)]


@dataclass(frozen=True)
class View:
    """What a rank can use.

    Args:
        uuids: of the devices, in CUDA's order; where they are not told, a word for each.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """

    host: str
    uuids: tuple[str, ...]
    visible: str | None = None

    @property
    def shown(self) -> str:
        """CUDA_VISIBLE_DEVICES, as a message can hold it."""
        return 'not set' if self.visible is None else ascii(self.visible[:60])[1:-1]


def make_view(host: str, gpus: Sequence[Gpu], num_gpus: int, visible: str | None) -> View:
    """A rank's view; where the devices that were found are not so many as CUDA counts, they are known by number."""
    uuids = tuple(g.uuid for g in gpus)
    if len(uuids) == num_gpus and all(uuids):
        return View(host, uuids, visible)
    words = (visible or '').split(',')
    is_told = len(words) >= num_gpus and all(re.fullmatch('[0-9]{1,3}', w) for w in words)
    numbers = map(int, words) if is_told else range(num_gpus)
    return View(host, tuple(f'number {n} of {host}' for n in islice(numbers, num_gpus)), visible)


def choose_gpus(views: Sequence[View], ranks_per_device: int) -> list[int]:
    """The number of the GPU that each rank takes among those that it sees; views are of all ranks.

    Ranks of a host that see the same GPUs share them out in their order, `ranks_per_device` neighbours each; a rank
    that sees only its own takes number 0.

    Raises:
        ConfigError: more ranks would share one, or ranks that are no neighbours.
    """
    numbers, alike = [], Counter[tuple[str, tuple[str, ...]]]()
    sizes = Counter((v.host, v.uuids) for v in views)
    for rank, view in enumerate(views):
        key = view.host, view.uuids
        number = alike[key] // ranks_per_device
        alike[key] += 1
        if number >= len(view.uuids):
            raise ConfigError(_too_many(rank, view, sizes[key], ranks_per_device))
        numbers.append(number)
    _check_shared([v.uuids[n] for v, n in zip(views, numbers)], views, ranks_per_device)
    return numbers


def _too_many(rank: int, view: View, num_ranks: int, ranks_per_device: int) -> str:
    num_gpus, of = len(view.uuids), '' if view.visible is None else f' ({VISIBLE}={view.shown})'
    if not num_gpus:
        return (f'train.device: got gpu, and rank {rank} on {view.host} sees no GPU{of}; give it one, or set '
                'train.device=cpu')
    same = f'; all see {", ".join(view.uuids)}' if not view.uuids[0].startswith('number ') else ''
    return (f'run.ranks_per_device: got {ranks_per_device} with {num_ranks} ranks on {view.host} that see {num_gpus} '
            f'GPU{"s" * (num_gpus > 1)}{of}{same}; expected at least {-(-num_ranks // num_gpus)}, or a GPU for each '
            'rank')


def _check_shared(uuids: Sequence[str], views: Sequence[View], ranks_per_device: int) -> None:
    """Raise ConfigError where ranks that see unlike GPUs come to take the same one, or no neighbours do."""
    for uuid in dict.fromkeys(uuids):
        ranks = [r for r, taken in enumerate(uuids) if taken == uuid]
        leaders = [r for r in ranks if r % ranks_per_device == 0]  # those that exchange with other GPUs
        hosts = ', '.join(dict.fromkeys(views[r].host for r in ranks))
        got = f'run.ranks_per_device: got {ranks_per_device}, and ranks'
        if len(ranks) > ranks_per_device:
            raise ConfigError(f'{got} {", ".join(map(str, ranks))} on {hosts} all take GPU {uuid} ({VISIBLE}: '
                              f'{"; ".join(dict.fromkeys(views[r].shown for r in ranks))}); expected a GPU for each, '
                              f'or {len(ranks)}')
        if len(leaders) > 1:  # NCCL would refuse two of a GPU
            raise ConfigError(f'{got} {leaders[0]} and {leaders[1]} on {hosts}, which are no neighbours, take GPU '
                              f'{uuid}; expected the ranks of a GPU one after another')
