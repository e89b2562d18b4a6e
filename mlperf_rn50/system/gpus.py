"""GPUs that this process can use, in CUDA's order, and their assignment to the ranks of a node.

NVML lists all GPUs whose device files can be opened, in order of PCI address, as CUDA does if
CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA uses only those in CUDA_VISIBLE_DEVICES, if set. Sources: CUDA
C++ guide, NVML API.
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
from mlperf_rn50.text import grouped

VISIBLE = 'CUDA_VISIBLE_DEVICES'
_NVIDIA = '0x10de'
_DISPLAY_CLASS = '0x03'


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: a card, or a MIG instance of a card. bus_id is the PCI address of the card, ''
    if unknown."""

    uuid: str
    name: str
    bus_id: str
    compute_cap: str
    driver_version: str
    memory_bytes: int | None


def _text(value: Any) -> str:
    """Convert a text from NVML to str, because older versions of its package return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def linux_bus_id(text: str) -> str:
    """Convert a PCI address from NVML notation (00000000:3B:00.0) to Linux notation. Return '' for
    anything else."""
    match = re.fullmatch(r'([0-9A-Fa-f]+):(.+)', text)
    return f'{int(match[1], 16):04x}:{match[2].lower()}' if match else ''


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    is_instance = nvml.nvmlDeviceIsMigDeviceHandle(handle)
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_instance else handle
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(card)
    memory_bytes = None
    with suppress(Exception):  # an NVML error; some devices have no memory of their own
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        bus_id=linux_bus_id(_text(nvml.nvmlDeviceGetPciInfo(card).busId)),
        compute_cap=f'{major}.{minor}',
        driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
        memory_bytes=memory_bytes,
    )


def _handle_of(nvml: Any, handles: Sequence[Any], uuid: str) -> Any:
    """Return the device of a UUID, or the only card whose UUID starts so."""
    with suppress(Exception):  # an NVML error
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    [handle] = [h for h in handles if uuid and _text(nvml.nvmlDeviceGetUUID(h)).startswith(uuid)]
    return handle


def _visible_handles(nvml: Any, handles: Sequence[Any], visible: str | None) -> list[Any]:
    if visible is None:
        return list(handles)
    visible_handles: list[Any] = []
    for word in map(str.strip, visible.split(',')):
        try:
            if re.fullmatch('[0-9]{1,9}', word):
                visible_handles.append(handles[int(word)])
            else:
                visible_handles.append(_handle_of(nvml, handles, word))
        # an NVML error, or an unknown number or UUID; CUDA ignores the rest of the list
        except Exception:
            break
    return visible_handles


def find_visible_gpus() -> list[Gpu]:
    """Return the devices that CUDA sees, from NVML. Numbers of cards in MIG mode, and prefixes of
    the UUIDs of MIG instances, are not resolved."""
    nvml, handles = find_gpus()
    with suppress(Exception):  # an NVML error
        handles = _visible_handles(nvml, handles, os.environ.get(VISIBLE))
        return [_read_gpu(nvml, handle) for handle in handles]
    return []


def all_bus_ids(sys: Path) -> list[str]:
    """Return the PCI addresses of all NVIDIA cards of a host, in order, including those that cannot
    be opened."""
    return [
        p.name
        for p in sorted((sys / 'bus/pci/devices').glob('*'))
        if read_small(p / 'vendor') == _NVIDIA
        and read_small(p / 'class').startswith(_DISPLAY_CLASS)
    ]


@dataclass(frozen=True)
class View:
    """Devices visible to a rank."""

    host: str
    uuids: tuple[str, ...]  # in CUDA's order; placeholders with numbers if unknown
    visible: str | None = None  # value of CUDA_VISIBLE_DEVICES
    cards: tuple[str, ...] = ()  # PCI address of each device's card; empty if unknown

    @property
    def shown(self) -> str:
        """CUDA_VISIBLE_DEVICES as shown in a message."""
        return 'not set' if self.visible is None else ascii(self.visible[:60])[1:-1]


def make_view(host: str, gpus: Sequence[Gpu], num_gpus: int, visible: str | None) -> View:
    """Make a rank's view. If NVML does not find as many GPUs as CUDA (num_gpus), numbers replace
    their UUIDs."""
    uuids = tuple(g.uuid for g in gpus)
    if len(uuids) == num_gpus and all(uuids):
        return View(host, uuids, visible, tuple(g.bus_id for g in gpus))
    words = (visible or '').split(',')
    has_numbers = len(words) >= num_gpus and all(re.fullmatch('[0-9]{1,3}', w) for w in words)
    numbers = map(int, words) if has_numbers else range(num_gpus)
    return View(host, tuple(f'number {n} of {host}' for n in islice(numbers, num_gpus)), visible)


def choose_gpus(views: Sequence[View], ranks_per_device: int) -> list[int]:
    """Return for each rank the number of its GPU among those that it sees. Each rank has one view.

    Ranks of a host that see the same GPUs divide them in order, `ranks_per_device` consecutive
    ranks per GPU; a rank that sees a single GPU uses number 0. Raise ConfigError if more or
    non-consecutive ranks would share a GPU.
    """
    numbers = []
    alike = Counter[tuple[str, tuple[str, ...]]]()
    sizes = Counter((v.host, v.uuids) for v in views)
    for rank, view in enumerate(views):
        key = view.host, view.uuids
        number = alike[key] // ranks_per_device
        alike[key] += 1
        if number >= len(view.uuids):
            raise ConfigError(_too_many(rank, view, sizes[key], ranks_per_device))
        numbers.append(number)
    uuids = [v.uuids[n] for v, n in zip(views, numbers)]
    cards = [v.cards[n] if v.cards else '' for v, n in zip(views, numbers)]
    _check_shared(uuids, cards, views, ranks_per_device)
    return numbers


def _too_many(rank: int, view: View, num_ranks: int, ranks_per_device: int) -> str:
    num_gpus = len(view.uuids)
    setting = '' if view.visible is None else f' ({VISIBLE}={view.shown})'
    if not num_gpus:
        return (
            f'train.device: got gpu, but rank {rank} on {view.host} sees no GPU{setting}; make one '
            'visible, or set train.device=cpu'
        )
    is_known = not view.uuids[0].startswith('number ')
    same = f'; all see {", ".join(view.uuids)}' if is_known else ''
    return (
        f'run.ranks_per_device: got {ranks_per_device} with {num_ranks} ranks on {view.host} that '
        f'see {num_gpus} GPU{"s" * (num_gpus > 1)}{setting}{same}; expected at least '
        f'{-(-num_ranks // num_gpus)}, or a GPU for each rank'
    )


def _check_shared(
    uuids: Sequence[str], cards: Sequence[str], views: Sequence[View], ranks_per_device: int
) -> None:
    """Raise ConfigError if more than `ranks_per_device` ranks, or ranks that are not consecutive,
    use the same GPU, or if NCCL would have to connect two instances of one card, which have the
    card's PCI address."""
    for uuid, ranks in grouped(range(len(uuids)), lambda rank: uuids[rank]).items():
        # the ranks that exchange gradients with other GPUs
        leaders = [r for r in ranks if r % ranks_per_device == 0]
        hosts = ', '.join(dict.fromkeys(views[r].host for r in ranks))
        shown = '; '.join(dict.fromkeys(views[r].shown for r in ranks))
        got = f'run.ranks_per_device: got {ranks_per_device}, but ranks'
        if len(ranks) > ranks_per_device:
            raise ConfigError(
                f'{got} {", ".join(map(str, ranks))} on {hosts} all use GPU {uuid} ({VISIBLE}: '
                f'{shown}); expected {len(ranks)}, or a GPU for each'
            )
        if len(leaders) > 1:  # NCCL rejects two ranks on one GPU
            raise ConfigError(
                f'{got} {leaders[0]} and {leaders[1]} on {hosts}, which are not consecutive, use '
                f'GPU {uuid}; expected consecutive ranks on a GPU'
            )

    leader_of: dict[tuple[str, str], int] = {}
    for rank in range(0, len(uuids), ranks_per_device):
        host = views[rank].host
        card = cards[rank]
        first = leader_of.setdefault((host, card), rank)
        if card and uuids[first] != uuids[rank]:
            raise ConfigError(
                f'run.ranks_per_device: got {ranks_per_device}, but ranks {first} and {rank} on '
                f'{host} use {uuids[first]} and {uuids[rank]}, two instances of the card {card}, '
                'which NCCL refuses; expected one rank per card, or the number of consecutive '
                'ranks on each card'
            )
