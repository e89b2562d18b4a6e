"""Binding of ranks to cores and GPUs of a node, which launch/bind.sh executes.

Source: /sys/devices/system (cpu, node), NVML for GPUs. NCCL and UCX choose the network devices.
"""

import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from mlperf_rn50.errors import EXIT_USAGE, UserError
from mlperf_rn50.system.cgroup import find_limits, parse_cpu_list, read_small, render_cpu_list
from mlperf_rn50.system.gpu_env import DEVICE_VARIABLE, missing_settings
from mlperf_rn50.system.gpus import all_bus_ids, find_visible_gpus
from mlperf_rn50.system.launcher_env import (
    environment_number,
    launched_local,
    print_stderr,
    rank_name,
    settle_variables,
)
from mlperf_rn50.system.mpi_session import check_session
from mlperf_rn50.system.processor import quota_threads, set_omp_threads

SYS = Path('/sys')
Core = tuple[int, ...]  # its logical CPUs
T = TypeVar('T')


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node with its physical cores. socket: '' if unknown."""

    number: int
    cores: tuple[Core, ...]
    socket: str = ''


@dataclass(frozen=True)
class Topology:
    """The NUMA nodes of a host that have cores, and the NUMA node of each GPU."""

    nodes: tuple[NumaNode, ...]
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Binding:
    cpus: tuple[int, ...]
    # the CPUs in the order in which threads use them; begins with one CPU per core
    pinning: tuple[int, ...]
    num_threads: int
    numa_node: int
    gpu: int | None


def _cores(sys: Path, cpus: Sequence[int]) -> tuple[Core, ...]:
    """Group logical CPUs by physical core."""
    cores = []
    for cpu in cpus:
        path = sys / f'devices/system/cpu/cpu{cpu}/topology/thread_siblings_list'
        siblings = tuple(c for c in parse_cpu_list(read_small(path)) if c in cpus)
        cores.append(siblings or (cpu,))
    return tuple(dict.fromkeys(cores))


def choose_devices(
    visible: Sequence[str], installed: Sequence[str], num_devices: int
) -> tuple[Sequence[str], int | None]:
    """Return the GPUs to divide among a node's ranks, and the index of this rank's GPU, or None to
    use local_rank.

    If a node needs several GPUs, a rank that sees a single one uses its index among the installed
    GPUs, if they are enough. Otherwise, the ranks divide the visible GPUs. GPUs are PCI addresses;
    visible is in CUDA's order.
    """
    if len(visible) == 1 < num_devices <= len(installed) and visible[0] in installed:
        return installed, installed.index(visible[0])
    return visible, None


def find_topology(sys: Path, allowed: Sequence[int], bus_ids: Sequence[str]) -> Topology:
    """Read the topology of a node from /sys or a copy of it."""
    nodes = []
    paths = (sys / 'devices/system/node').glob('node[0-9]*')
    for number, path in sorted((int(p.name[4:]), p) for p in paths):
        cpus = [c for c in parse_cpu_list((path / 'cpulist').read_text()) if c in allowed]
        if cpus:
            socket = sys / f'devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id'
            nodes.append(NumaNode(number, _cores(sys, cpus), read_small(socket)))
    if not nodes:
        nodes = [NumaNode(0, _cores(sys, sorted(allowed)))]
    gpu_nodes = [read_small(sys / f'bus/pci/devices/{bus_id}/numa_node') for bus_id in bus_ids]
    # -1: unknown
    return Topology(tuple(nodes), tuple(int(n) if n.isdecimal() else 0 for n in gpu_nodes))


def _share(items: Sequence[T], part: int, num_parts: int) -> Sequence[T]:
    """Return one of num_parts consecutive, nearly equal parts of a sequence. If items are too few,
    parts share them."""
    start = part * len(items) // num_parts
    if num_parts > len(items):
        return [items[start]]
    return items[start : (part + 1) * len(items) // num_parts]


def _cores_without_gpus(
    nodes: Sequence[NumaNode], device: int, num_devices: int
) -> tuple[NumaNode, Sequence[Core]]:
    """Return a NUMA node and the cores of one device. The devices are spread over the nodes."""
    if num_devices < len(nodes):
        spanned = _share(nodes, device, num_devices)
        return spanned[0], [core for node in spanned for core in node.cores]
    numbers = [d * len(nodes) // num_devices for d in range(num_devices)]
    neighbours = [d for d in range(num_devices) if numbers[d] == numbers[device]]
    node = nodes[numbers[device]]
    return node, _share(node.cores, neighbours.index(device), len(neighbours))


def _cores_near_gpu(
    topology: Topology, device: int, num_devices: int
) -> tuple[NumaNode, Sequence[Core]]:
    """Return the NUMA node of a GPU and its cores: its share of those of the node, and of those of
    the nodes without a GPU on the same socket."""
    by_number = {node.number: node for node in topology.nodes}
    numbers = [topology.gpus[d % len(topology.gpus)] for d in range(num_devices)]
    nodes = [by_number.get(number, topology.nodes[0]) for number in numbers]
    node = nodes[device]
    neighbours = [d for d, n in enumerate(nodes) if n is node]
    cores = _share(node.cores, neighbours.index(device), len(neighbours))
    on_socket = [d for d, n in enumerate(nodes) if n.socket == node.socket]
    free_nodes = [n for n in topology.nodes if n not in nodes and n.socket == node.socket != '']
    free = [core for n in free_nodes for core in n.cores]
    if len(free) < len(on_socket):
        return node, cores
    return node, [*cores, *_share(free, on_socket.index(device), len(on_socket))]


def choose_binding(
    topology: Topology,
    local_rank: int,
    local_size: int,
    ranks_per_device: int,
    gpu: int | None = None,
) -> Binding:
    """Choose the binding of one rank. gpu is the index of its GPU on the node, or None to derive
    it from local_rank.

    A device is a GPU or, without GPUs, a set of cores; `ranks_per_device` consecutive ranks share
    one, and each begins with other cores.
    """
    device, number = divmod(local_rank, ranks_per_device)
    num_devices = -(-local_size // ranks_per_device)
    sharers = min(ranks_per_device, local_size - device * ranks_per_device)
    if gpu is not None:
        device = gpu
        num_devices = len(topology.gpus)
    if topology.gpus:
        node, cores = _cores_near_gpu(topology, device, num_devices)
    else:
        node, cores = _cores_without_gpus(topology.nodes, device, num_devices)
    num_threads = max(1, len(cores) // sharers)
    first = number * num_threads % len(cores)
    # the first logical CPU of each core, then the second ones
    by_thread = zip_longest(*cores[first:], *cores[:first])
    pinning = tuple(cpu for nth in by_thread for cpu in nth if cpu is not None)
    return Binding(
        cpus=tuple(sorted(pinning)),
        pinning=pinning,
        num_threads=num_threads,
        numa_node=node.number,
        gpu=device if topology.gpus else None,
    )


def _bind(command: Sequence[str]) -> None:
    settle_variables(os.environ)
    local_rank, local_size = launched_local()
    if local_rank == 0:  # one report per node is enough
        check_session(os.environ)
    if 'train' in command:
        # Otherwise, a stop request before the watcher handles the signal would kill the program.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.environ.update(missing_settings(os.environ))
    if sys.version_info < (3, 12):  # MXNet imports distutils, which is faster without setuptools
        os.environ.setdefault('SETUPTOOLS_USE_DISTUTILS', 'stdlib')
    if os.environ.get('MLPERF_RN50_BIND') == 'off':
        os.execvp(command[0], list(command))
    per_device = environment_number('MLPERF_RN50_RANKS_PER_DEVICE') or 1
    # ranks that train on CPUs spread over all cores
    is_on_cpu = os.environ.get(DEVICE_VARIABLE) == 'cpu'
    visible = [] if is_on_cpu else [g.bus_id for g in find_visible_gpus()]
    bus_ids, gpu = choose_devices(visible, all_bus_ids(SYS), -(-local_size // per_device))
    topology = find_topology(SYS, sorted(os.sched_getaffinity(0)), bus_ids)
    binding = choose_binding(topology, local_rank, local_size, per_device, gpu=gpu)
    if len(visible) == 1:
        binding = replace(binding, gpu=0)  # in CUDA, the rank's only GPU has number 0
    os.sched_setaffinity(0, binding.cpus)
    threads = set_omp_threads(quota_threads(binding.num_threads, local_size, find_limits()))
    os.environ.setdefault('DALI_AFFINITY_MASK', ','.join(map(str, binding.pinning)))
    if command[1:2] == ['train']:
        print_stderr(
            f'{rank_name()} (local {local_rank}): cores {render_cpu_list(binding.cpus)}, {threads} '
            f'threads, NUMA node {binding.numa_node}, '
            + ('no GPU' if binding.gpu is None else f'GPU {binding.gpu}')
        )
    os.execvp(command[0], list(command))


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit('usage: launch/bind.sh PROGRAM [ARGUMENTS...]')
    try:
        _bind(sys.argv[1:])
    except UserError as e:
        print_stderr(f'mlperf-rn50: {platform.node()}: {e}')
        sys.exit(e.exit_code)
    except OSError as e:  # of the program or of /sys
        print_stderr(f'mlperf-rn50: {platform.node()}: {e.filename or sys.argv[1]}: {e.strerror}')
        sys.exit(EXIT_USAGE)
