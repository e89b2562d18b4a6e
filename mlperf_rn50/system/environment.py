"""Hardware and software of this host, from lscpu, lsblk, /sys/class and nvidia-smi (NVML)."""

import os
import platform
import re
import subprocess
import sys
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
_GPU_KEYS = ('name', 'memory.total', 'clocks.max.sm', 'power.limit', 'driver_version')
_VARIABLES = tuple(
    'OMP_ HOROVOD_ MXNET_ DNNL_ DALI_ NCCL_ KMP_ GLIBC_ CUDA_VISIBLE_DEVICES '
    'CUDA_DEVICE_ORDER'.split()
)
_MXNETS = ('mxnet', 'mxnet-cu112', 'mxnet-cu117')
_PACKAGES = (
    *_MXNETS,
    *'horovod nvidia-dali-cuda120 numpy mlperf-logging mlperf-compliance openmpi'.split(),
)
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
            kind = 'HDD' if device.get('rota') else 'SSD'
            if device.get('tran') == 'nvme':
                kind = 'NVMe SSD'
            if str(device.get('name')).startswith('vd'):
                kind = 'virtual disk'
            model = (device.get('model') or '').strip() or None
            disks.append({'kind': kind, 'model': model, 'bytes': int(device['size'])})
    return disks


def find_networks(sys: Path = SYS) -> list[Facts]:
    """Find the network interfaces that have a device, and the InfiniBand ports. A rate is None if
    unknown."""
    result = []
    for path in sorted((sys / 'class/net').glob('*/device')):
        speed = read_small(path.parent / 'speed')
        rate = f'{speed} Mb/s' if re.fullmatch(r'[1-9]\d*', speed) else None
        result.append({'name': path.parent.name, 'rate': rate})
    for path in sorted((sys / 'class/infiniband').glob('*/ports/*/rate')):
        result.append({'name': path.parts[-4], 'rate': read_small(path) or None})
    return result


def find_hardware() -> Facts:
    lsblk = 'lsblk --json --bytes --nodeps --output NAME,TYPE,SIZE,ROTA,TRAN,MODEL'
    return {
        'cpu': parse_cpu(output_of('lscpu', '--json')),
        'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'storage': parse_storage(output_of(*lsblk.split())),
        'networks': find_networks(),
        'gpus': query_gpus(*_GPU_KEYS),
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
    reason."""
    folder = Path(mlperf_rn50.__file__).parent
    try:
        # an installed package may be in another checkout
        git(folder, 'ls-files', '--error-unmatch', '__init__.py')
        commit = git(folder, 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
    except ValueError as e:
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
