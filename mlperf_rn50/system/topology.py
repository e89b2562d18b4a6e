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

from mlperf_rn50.errors import EXIT_USAGE, UserError
from mlperf_rn50.system.cgroup import find_limits, parse_cpu_list, read_small, render_cpu_list
from mlperf_rn50.system.gpu_env import missing_settings
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


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node with its physical cores. A core is a tuple of its logical CPUs. socket: '' if
    unknown."""

    number: int
    cores: tuple[tuple[int, ...], ...]
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


def _cores(sys: Path, cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group logical CPUs by physical core."""

    def siblings(cpu: int) -> list[int]:
        return parse_cpu_list(
            read_small(sys / f'devices/system/cpu/cpu{cpu}/topology/thread_siblings_list')
        )

    return tuple(
        dict.fromkeys(tuple(c for c in siblings(cpu) if c in cpus) or (cpu,) for cpu in cpus)
    )


def choose_devices(
    visible: Sequence[str], installed: Sequence[str], num_devices: int
) -> tuple[Sequence[str], int | None]:
    """Return the GPUs to divide among a node's ranks, and the index of this rank's GPU, or None to
    use local_rank.

    If a node needs several GPUs, a rank that sees a single one uses its index among the installed
    GPUs, if they are enough. Otherwise, the ranks divide the visible GPUs. GPUs are PCI addresses
    of cards; visible is in CUDA's order.
    """
    if len(visible) == 1 < num_devices <= len(installed) and visible[0] in installed:
        return installed, installed.index(visible[0])
    return visible, None


def find_topology(sys: Path, allowed: Sequence[int], bus_ids: Sequence[str]) -> Topology:
    """Read the topology of a node from /sys or a copy of it."""
    nodes = []
    for path in sorted(
        (sys / 'devices/system/node').glob('node[0-9]*'), key=lambda p: int(p.name[4:])
    ):
        cpus = [c for c in parse_cpu_list((path / 'cpulist').read_text()) if c in allowed]
        if cpus:
            socket = read_small(
                sys / f'devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id'
            )
            nodes.append(NumaNode(int(path.name[4:]), _cores(sys, cpus), socket))
    if not nodes:
        nodes = [NumaNode(0, _cores(sys, sorted(allowed)))]
    gpu_nodes = (read_small(sys / f'bus/pci/devices/{bus_id}/numa_node') for bus_id in bus_ids)
    # -1: unknown
    return Topology(tuple(nodes), tuple(int(n) if n.isdecimal() else 0 for n in gpu_nodes))


def _share(items: Sequence, part: int, num_parts: int) -> Sequence:
    """Return one of num_parts consecutive, nearly equal parts of a sequence. If items are too few,
    parts share them."""
    if num_parts > len(items):
        return [items[part * len(items) // num_parts]]
    return items[part * len(items) // num_parts : (part + 1) * len(items) // num_parts]


def choose_binding(
    topology: Topology,
    local_rank: int,
    local_size: int,
    ranks_per_device: int,
    place: int | None = None,
) -> Binding:
    """Choose the binding of one rank. place is the index of its GPU on the node, or None to derive
    it from local_rank.

    A device is a GPU or, without GPUs, a set of cores; `ranks_per_device` consecutive ranks share
    one. The devices on a NUMA node divide its cores evenly, and those on a socket the cores of its
    NUMA nodes without a GPU. Without GPUs, the devices are spread over the NUMA nodes.
    """
    num_devices = -(-local_size // ranks_per_device) if place is None else len(topology.gpus)
    device = local_rank // ranks_per_device if place is None else place
    if topology.gpus:
        by_number = {n.number: i for i, n in enumerate(topology.nodes)}
        places = [
            by_number.get(topology.gpus[d % len(topology.gpus)], 0) for d in range(num_devices)
        ]
    else:
        places = [d * len(topology.nodes) // num_devices for d in range(num_devices)]
    node = topology.nodes[places[device]]
    neighbours = [d for d in range(num_devices) if places[d] == places[device]]
    cores: Sequence[tuple[int, ...]]
    if not topology.gpus and num_devices < len(topology.nodes):  # a device then spans several nodes
        cores = [c for n in _share(topology.nodes, device, num_devices) for c in n.cores]
    else:
        on_socket = [
            d for d in range(num_devices) if topology.nodes[places[d]].socket == node.socket
        ]
        free = [
            c
            for i, n in enumerate(topology.nodes)
            if i not in places and n.socket == node.socket != ''
            for c in n.cores
        ]
        cores = [
            *_share(node.cores, neighbours.index(device), len(neighbours)),
            *(
                _share(free, on_socket.index(device), len(on_socket))
                if len(free) >= len(on_socket)
                else []
            ),
        ]
    sharers = min(ranks_per_device, local_size - local_rank // ranks_per_device * ranks_per_device)
    num_threads = max(1, len(cores) // sharers)
    first = local_rank % ranks_per_device * num_threads % len(cores)
    pinning = [
        cpu for nth in zip_longest(*cores[first:], *cores[:first]) for cpu in nth if cpu is not None
    ]
    return Binding(
        tuple(sorted(pinning)),
        tuple(pinning),
        num_threads,
        node.number,
        device if topology.gpus else None,
    )


def _bind(command: Sequence[str]) -> None:
    settle_variables(os.environ)
    if launched_local()[0] == 0:  # one report per node is enough
        check_session(os.environ)
    if 'train' in command:
        # Otherwise, a stop request before the watcher handles the signal would kill the program.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.environ.update(missing_settings(os.environ))
    if os.environ.get('MLPERF_RN50_BIND') == 'off':
        os.execvp(command[0], list(command))
    local_rank, local_size = launched_local()
    per_device = environment_number('MLPERF_RN50_RANKS_PER_DEVICE') or 1
    visible = [g.bus_id for g in find_visible_gpus()]
    bus_ids, place = choose_devices(visible, all_bus_ids(SYS), -(-local_size // per_device))
    topology = find_topology(SYS, sorted(os.sched_getaffinity(0)), bus_ids)
    binding = choose_binding(topology, local_rank, local_size, per_device, place)
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
