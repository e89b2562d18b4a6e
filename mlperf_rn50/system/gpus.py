"""The GPUs that this process can use, in CUDA's order, and which of them each rank of a node takes.

CUDA sees what CUDA_VISIBLE_DEVICES names, of what the device files let it open; NVML lists the latter, in the order of
PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID. Source: CUDA C++ Programming Guide (environment
variables), MIG User Guide (device enumeration), nvidia-smi(1).
"""
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.system.hardware import query_gpus
from mlperf_rn50.system.power import find_gpus

VISIBLE = 'CUDA_VISIBLE_DEVICES'
_NVIDIA, _DISPLAY_CLASS = '0x10de', '0x03'


@dataclass(frozen=True)
class Gpu:
    """What CUDA takes for a device: a card, or an instance of one that is divided (MIG).

    Args:
        uuid: GPU-… or MIG-….
        name: as sold.
        bus_id: PCI address of the card, in Linux' notation; '' where it is not told.
        compute_cap: compute capability, such as 8.0.
        driver_version: of the host.
        memory_bytes: of the device; None where it is not told.
        parent: UUID of the card, for an instance.
        instance: its numbers of GPU instance and compute instance there.
    """

    uuid: str
    name: str
    bus_id: str
    compute_cap: str
    driver_version: str
    memory_bytes: int | None
    parent: str | None = None
    instance: tuple[int, int] | None = None


@dataclass(frozen=True)
class Card:
    """A card of this host, and its instances; None where it is not divided."""

    gpu: Gpu
    instances: tuple[Gpu, ...] | None = None


def _text(value: Any) -> str:
    """What NVML says; older packages give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def linux_bus_id(text: str) -> str:
    """A PCI address in Linux' notation, of NVML's 00000000:3B:00.0; '' for what is none."""
    domain, _, rest = text.partition(':')
    return f'{int(domain, 16):04x}:{rest.lower()}' if re.fullmatch(r'[0-9A-Fa-f]+', domain) and rest else ''


def _memory_bytes(nvml: Any, handle: Any) -> int | None:
    with suppress(Exception):  # NVML's own errors; some devices have no memory of their own
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _read_card(nvml: Any, handle: Any, driver_version: str) -> Card:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    gpu = Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)),
              linux_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)), f'{major}.{minor}', driver_version,
              _memory_bytes(nvml, handle))
    try:
        is_divided = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except Exception:  # before Ampere
        is_divided = False
    return Card(gpu, tuple(_read_instances(nvml, handle, gpu)) if is_divided else None)


def _read_instances(nvml: Any, handle: Any, card: Gpu) -> list[Gpu]:
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(Exception):  # no instance of that number, or none that may be used
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(Gpu(_text(nvml.nvmlDeviceGetUUID(part)), _text(nvml.nvmlDeviceGetName(part)), card.bus_id,
                             card.compute_cap, card.driver_version, _memory_bytes(nvml, part), card.uuid,
                             (nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part))))
    return found


def read_cards(nvml: Any, handles: Sequence[Any]) -> list[Card]:
    """The cards behind NVML's handles, in their order."""
    driver_version = _text(nvml.nvmlSystemGetDriverVersion())
    return [_read_card(nvml, handle, driver_version) for handle in handles]


def parse_cards(rows: Sequence[Mapping[str, str]]) -> list[Card]:
    """The cards that nvidia-smi lists; it says nothing of instances there."""
    def memory(text: str) -> int | None:
        number = text.removesuffix(' MiB')
        return int(number) << 20 if number.isdecimal() else None
    return [Card(Gpu(r.get('uuid', ''), r.get('name', ''), linux_bus_id(r.get('pci.bus_id', '')),
                     r.get('compute_cap', ''), r.get('driver_version', ''), memory(r.get('memory.total', ''))))
            for r in rows]


def find_cards() -> list[Card]:
    """The cards that this process may open, in the order of their PCI addresses; none without a driver."""
    nvml, handles = find_gpus()
    with suppress(Exception):  # NVML's own errors: then what nvidia-smi says
        if handles:
            return read_cards(nvml, handles)
    return parse_cards(query_gpus('uuid', 'name', 'pci.bus_id', 'compute_cap', 'driver_version', 'memory.total'))


def _first_instance(card: Card) -> Gpu | None:
    """What CUDA takes of a card: itself, the first instance of a divided one, or nothing."""
    return card.gpu if card.instances is None else next(iter(card.instances), None)


def _named(word: str, cards: Sequence[Card]) -> Gpu | None:
    """The device of an entry of CUDA_VISIBLE_DEVICES; None for one that is not valid."""
    if re.fullmatch(r'\d{1,9}', word, re.ASCII):
        return _first_instance(cards[int(word)]) if int(word) < len(cards) else None
    if word.startswith('MIG-'):
        instances = [i for c in cards for i in c.instances or ()]
        found = [i for i in instances if i.uuid.startswith(word)] or \
            [i for i in instances if i.instance and word == f'MIG-{i.parent}/{i.instance[0]}/{i.instance[1]}']
        return found[0] if len(found) == 1 else None
    of_word = [c for c in cards if c.gpu.uuid.startswith(word)] if word.startswith('GPU-') else []
    return _first_instance(of_word[0]) if len(of_word) == 1 else None


def visible_gpus(cards: Sequence[Card], visible: str | None) -> list[Gpu]:
    """The devices that CUDA counts from 0, in its order.

    Args:
        cards: that may be opened, in the order of their PCI addresses.
        visible: CUDA_VISIBLE_DEVICES, where it is set: numbers and UUIDs, or beginnings of them. An entry that is not
            valid, or comes twice, ends the list.

    CUDA counts a single instance, and no card beside it.
    """
    found: list[Gpu] = []
    if visible is None:
        found = [gpu for card in cards if (gpu := _first_instance(card))]
    for word in visible.split(',') if visible is not None else ():
        gpu = _named(word.strip(), cards)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return [g for g in found if g.parent][:1] or found


def find_visible_gpus() -> list[Gpu]:
    """The devices that CUDA counts from 0 in this process; none without a driver."""
    return visible_gpus(find_cards(), os.environ.get(VISIBLE))


def all_bus_ids(sys: Path) -> list[str]:
    """PCI addresses of all of NVIDIA's cards of a host, in their order, those that may not be opened included."""
    def read(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return ''
    return [p.name for p in sorted((sys / 'bus/pci/devices').glob('*'))
            if read(p / 'vendor') == _NVIDIA and read(p / 'class').startswith(_DISPLAY_CLASS)]


@dataclass(frozen=True)
class View:
    """What a rank can use.

    Args:
        host: of the rank.
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
    """The number of the GPU that each rank takes among those that it sees.

    Ranks of a host that see the same GPUs share them out in their order, `ranks_per_device` neighbours each; a rank
    that sees only its own takes number 0.

    Args:
        views: of all ranks.
        ranks_per_device: ranks that share a GPU.

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
        return f'train.device: got gpu, and rank {rank} on {view.host} sees no GPU{of}; give it one, or set ' \
            'train.device=cpu'
    same = f'; all see {", ".join(view.uuids)}' if not view.uuids[0].startswith('number ') else ''
    return (f'run.ranks_per_device: got {ranks_per_device} with {num_ranks} ranks on {view.host} that see {num_gpus} '
            f'GPU{"s" * (num_gpus > 1)}{of}{same}; expected at least {-(-num_ranks // num_gpus)}, or a GPU for each '
            'rank')


def _check_shared(uuids: Sequence[str], views: Sequence[View], ranks_per_device: int) -> None:
    """Raise ConfigError where ranks that see unlike GPUs come to take the same one, or no neighbours do."""
    for uuid, count in Counter(uuids).items():
        leaders = [r for r in range(0, len(uuids), ranks_per_device) if uuids[r] == uuid]
        if len(leaders) > 1 and count <= ranks_per_device:  # NCCL would refuse two of a GPU
            raise ConfigError(
                f'run.ranks_per_device: got {ranks_per_device}, and ranks {leaders[0]} and {leaders[1]} on '
                f'{views[leaders[0]].host}, which are no neighbours, take GPU {uuid}; expected the ranks of a GPU one '
                'after another')
        if count > ranks_per_device:
            ranks = [r for r, taken in enumerate(uuids) if taken == uuid]
            raise ConfigError(
                f'run.ranks_per_device: got {ranks_per_device}, and ranks {", ".join(map(str, ranks))} on '
                f'{", ".join(dict.fromkeys(views[r].host for r in ranks))} all take GPU {uuid} ({VISIBLE}: '
                f'{"; ".join(dict.fromkeys(views[r].shown for r in ranks))}); expected a GPU for '
                f'each, or {count}')
