"""What a run ran on: env.json."""
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlperf_rn50.files import write_atomically
from mlperf_rn50.system.hardware import find_hardware
from mlperf_rn50.system.processor import find_processor
from mlperf_rn50.system.stack import git_commit, package_versions

_VARIABLES = ('OMP_', 'HOROVOD_', 'MXNET_', 'DNNL_', 'DALI_', 'NCCL_', 'KMP_', 'GLIBC_', 'CUDA_VISIBLE_DEVICES',
              'CUDA_DEVICE_ORDER')


def host_facts() -> dict[str, Any]:
    """Hardware and system of this host."""
    hardware = find_hardware()
    return {'hostname': platform.node(), 'os': platform.platform(), 'os_name': _os_name(),
            'cpu': hardware['cpu']['model'] or platform.machine(),
            'processor': asdict(find_processor()), 'cpu_cores': len(os.sched_getaffinity(0)),
            'memory_bytes': hardware['memory_bytes'], 'gpus': [g['name'] for g in hardware['gpus']],
            'hardware': hardware}


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
