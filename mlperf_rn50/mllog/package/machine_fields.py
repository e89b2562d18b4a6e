"""Fields of a system description that env.json, the record of a run's machine, determines."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.files import load_ini
from mlperf_rn50.mllog.read.description import (
    JsonObject,
    framework_of,
    object_at,
    objects_at,
    value_at,
)
from mlperf_rn50.mllog.read.values import integer

_SMALLEST_DISK_BYTES = 10**9
_MEMORY_KINDS = load_ini(Path(__file__).with_name('memory.ini'))['kinds']


def _bytes(facts: JsonObject, key: str = 'bytes') -> int:
    return integer(facts.get(key), high=10**18) or 0


def _size(num_bytes: int) -> str:
    return f'{num_bytes / 1e9:.0f} GB' if num_bytes else ''


def each(values: Sequence[str]) -> str:
    """Return '2x A + B' for A, A, B."""
    return ' + '.join(f'{n}x {v}' if n > 1 else v for v, n in Counter(values).items() if v)


def _text(facts: JsonObject, key: str) -> str:
    return str(facts.get(key) or '').strip()


def memory_kind(gpu: str) -> str:
    """Return the kind of memory of a GPU, such as HBM3, or '' if its name does not tell."""
    if found := re.search(r'\b(HBM\w+|GDDR\w+)', gpu):
        return found[0]
    return next((kind for kind, pattern in _MEMORY_KINDS.items() if re.search(pattern, gpu)), '')


def _processor_fields(cpu: JsonObject) -> JsonObject:
    sockets, cores, threads = (
        count if isinstance(count := cpu.get(key), int) else 0
        for key in ('sockets', 'cores_per_socket', 'threads_per_core')
    )
    mhz = cpu.get('max_mhz')
    return {
        'host_processors_per_node': str(sockets or ''),
        'host_processor_core_count': str(cores or ''),
        'host_processor_vcpu_count': str(cores * threads or ''),
        'host_processor_frequency': f'{mhz:.0f} MHz' if isinstance(mhz, float) else '',
        'host_processor_caches': _text(cpu, 'caches'),
        'host_processor_interconnect': 'N/A' if sockets == 1 else '',
    }


def _memory_modules(dimms: Sequence[JsonObject]) -> str:
    """Return '16x 64 GB DDR5 4800 MT/s' for equal memory modules."""
    sizes = [(_bytes(d) >> 30, d) for d in dimms]
    return each([f'{n} GB {_text(d, "kind")} {_text(d, "speed")}'.strip() for n, d in sizes if n])


def _network_fields(networks: Sequence[JsonObject]) -> JsonObject:
    """Return the fields about the network. An InfiniBand port replaces the interface at the same
    address, and ports without a link are left out if others have one."""
    ports = {_text(n, 'address') or _text(n, 'name'): n for n in networks}.values()
    linked = [n for n in ports if n.get('rate')] or ports
    texts = [f'{_text(n, "model") or _text(n, "name")} {_text(n, "rate")}'.strip() for n in linked]
    # the functions of a card differ in the last part of their addresses only
    cards = {a.rpartition('.')[0] or a: n for n in ports if (a := _text(n, 'address'))}
    models = Counter(_text(card, 'model') or 'card' for card in cards.values())
    return {
        'host_networking': re.sub(r'\b(\d+)000 Mb/s', r'\1 Gb/s', each(texts)),
        'host_network_card_count': ' + '.join(f'{n}x {model}' for model, n in models.items()),
    }


def _links(nvlinks: JsonObject, num_gpus: int, pcie: str) -> tuple[str, str]:
    """Return interconnect and topology of the GPUs of a host."""
    pairs = object_at(nvlinks, 'pairs')
    num_links = nvlinks.get('num_links')
    if num_gpus == 1 and nvlinks:
        return 'N/A', 'N/A'
    if not pairs or not isinstance(num_links, int):
        return '', ''
    if not num_links:
        return pcie, ''
    interconnect = f'{num_links}x {_text(nvlinks, "rate")} NVLink'
    if not all(kind.startswith('NV') for kind in pairs):
        return interconnect, ''
    if num_gpus == 2:
        return interconnect, 'Direct'
    # only a switch gives each pair all links of its GPUs
    return interconnect, 'NVSwitch' if set(pairs) == {f'NV{num_links}'} else 'Mesh'


def _accelerator_fields(hardware: JsonObject, num: int, num_nodes: int | None) -> JsonObject:
    """Return the fields about a known number of accelerators."""
    fields: JsonObject = {'accelerators_per_node': str(num // num_nodes) if num_nodes else ''}
    gpus = objects_at(hardware, 'gpus')
    if not (gpus and num):
        return fields
    gpu = gpus[0]
    generation, width = (
        number if (number := _text(gpu, f'pcie.link.{name}.max')).isdecimal() else ''
        for name in ('gen', 'width')
    )
    pcie = f'PCIe {generation}.0 x{width}' if generation and width else ''
    links = object_at(hardware, 'nvlinks') if len(gpus) * (num_nodes or 1) >= num else {}
    interconnect, topology = _links(links, len(gpus), pcie)
    has_fan = any(re.match(r'\d', _text(g, 'fan.speed')) for g in gpus)
    return fields | {
        'accelerator_host_interconnect': pcie,
        'accelerator_frequency': _text(gpu, 'clocks.max.sm'),
        'accelerator_memory_configuration': memory_kind(_text(gpu, 'name')),
        'accelerator_memory_capacity': _text(gpu, 'memory.total'),
        'accelerator_interconnect': interconnect,
        'accelerator_interconnect_topology': topology,
        'accelerator_driver': _text(gpu, 'driver_version'),
        'cooling': 'Air-cooled' if has_fan else '',
    }


def _software_fields(env: JsonObject, driver: str) -> JsonObject:
    packages = {name: str(version) for name, version in object_at(env, 'packages').items()}
    libraries = object_at(env, 'libraries')
    versions = {
        'cuda_version': libraries.get('cuda'),
        'cuda_driver_version': driver,
        'cudnn_version': libraries.get('cudnn'),
        'nccl_version': libraries.get('nccl'),
        'gcc_version': libraries.get('gcc'),
        'python_version': value_at(env, 'python'),
    }
    known = {name: str(version) for name, version in versions.items() if version}
    stack = known | packages
    return {
        'framework': f'{framework_of(env) or "MXNet"} Gluon',
        'ml_libraries': ' / '.join(f'{name} {version}' for name, version in stack.items()),
        'other_software_stack': stack,
        'operating_system': str(value_at(env, 'host', 'os_name') or value_at(env, 'host', 'os')),
        'compilers': f'gcc {known["gcc_version"]}' if 'gcc_version' in known else '',
        'python_version': known.get('python_version', ''),
    }


def machine_fields(
    env: JsonObject, num_nodes: int | None, num_accelerators: int | None
) -> JsonObject:
    """Return the fields that env.json determines, given counts from the logs; an unknown field is
    missing or ''."""
    hardware = object_at(env, 'host', 'hardware')
    cpu = object_at(hardware, 'cpu')
    disks, dimms, gpus, networks = (
        objects_at(hardware, name) for name in ('storage', 'dimms', 'gpus', 'networks')
    )
    # smaller ones are not for data
    disks = [d for d in disks if _bytes(d) >= _SMALLEST_DISK_BYTES]
    accelerators = {}
    if num_accelerators is not None:
        accelerators = _accelerator_fields(hardware, num_accelerators, num_nodes)
    if num_accelerators != 0:
        names = sorted({_text(g, 'name') for g in gpus})
        accelerators['accelerator_model_name'] = each(names)
    return {
        'number_of_nodes': str(num_nodes or ''),
        'host_processor_model_name': _text(cpu, 'model') or str(value_at(env, 'host', 'cpu')),
        **_processor_fields(cpu),
        'host_memory_capacity': _size(_bytes(object_at(env, 'host'), 'memory_bytes')),
        'host_memory_configuration': _memory_modules(dimms),
        'host_storage_type': each([_text(disk, 'kind') for disk in disks]),
        'host_storage_capacity': each([_size(_bytes(disk)) for disk in disks]),
        **_network_fields(networks),
        **accelerators,
        **_software_fields(env, accelerators.get('accelerator_driver', '')),
    }
