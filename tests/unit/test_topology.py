"""Binding of ranks to cores and GPUs, and numbers of threads, on made-up machines."""

import pytest
from helpers import json_table, write_files
from hypothesis import given
from hypothesis import strategies as st

from mlperf_rn50.system.cgroup import parse_cpu_list, render_cpu_list
from mlperf_rn50.system.topology import (
    NumaNode,
    Topology,
    choose_binding,
    choose_devices,
    find_topology,
)


def node(number, first, num_cores, sibling=None, socket=''):
    """Return a NUMA node with cores first, first + 1, ...; second threads start at `sibling`."""
    second = [] if sibling is None else [range(sibling, sibling + num_cores)]
    return NumaNode(number, tuple(zip(range(first, first + num_cores), *second)), socket)


def bindings_of(machine, num_ranks, per_device=1):
    return [choose_binding(machine, rank, num_ranks, per_device) for rank in range(num_ranks)]


# Two sockets of 20 cores with two threads each, and two GPUs per socket.
C4140 = Topology((node(0, 0, 20, 40), node(1, 20, 20, 60)), (0, 0, 1, 1))
PLAIN = Topology((node(0, 0, 2),))


@given(st.sets(st.integers(0, 500)))
def test_cpu_lists_round_trip(cpus):
    assert set(parse_cpu_list(render_cpu_list(sorted(cpus)))) == cpus
    assert parse_cpu_list('0-3,8\n') == [0, 1, 2, 3, 8]
    assert render_cpu_list([0, 1, 2, 4]) == '0-2,4'


def test_rank_per_gpu_uses_socket_of_gpu():
    bindings = bindings_of(C4140, 4)
    assert [b.gpu for b in bindings] == [0, 1, 2, 3]
    assert [b.numa_node for b in bindings] == [0, 0, 1, 1]
    assert {b.num_threads for b in bindings} == {10}
    assert bindings[0].cpus == (*range(10), *range(40, 50))
    assert bindings[3].cpus == (*range(30, 40), *range(70, 80))
    # With one visible GPU per task, in a different order, a rank gets the cores of its GPU.
    for rank, place in enumerate((2, 0, 3, 1)):
        assert choose_binding(C4140, rank, 4, 1, place) == bindings[place]
    # A single rank on two sockets without GPUs uses both.
    both = Topology((node(0, 0, 4), node(1, 4, 4)))
    assert choose_binding(both, 0, 1, 1).cpus == tuple(range(8))


# A DGX A100 with four NUMA nodes of 16 cores per socket, of which those with odd numbers have two
# GPUs each.
NPS4 = Topology(
    tuple(node(n, 16 * n, 16, socket=str(n // 4)) for n in range(8)), (3, 3, 1, 1, 7, 7, 5, 5)
)


def test_numa_nodes_without_a_gpu_serve_the_gpus_of_their_socket():
    """NVIDIA's bindpcie divides the cores of a socket, too."""
    bindings = bindings_of(NPS4, 8)
    assert tuple(b.numa_node for b in bindings) == NPS4.gpus
    assert {b.num_threads for b in bindings} == {16}
    assert sorted(c for b in bindings for c in b.cpus) == list(range(128))
    assert bindings[0].pinning == (*range(48, 56), *range(8))  # begins with the node of the GPU
    one_socket = Topology((NPS4.nodes[1], NPS4.nodes[4]), (1, 1))
    assert choose_binding(one_socket, 0, 2, 1).cpus == tuple(range(16, 24))
    unknown = Topology(tuple(node(n, 16 * n, 16) for n in range(8)), NPS4.gpus)
    assert choose_binding(unknown, 0, 8, 1).cpus == tuple(range(48, 56))


def test_pinned_threads_use_physical_cores_first_and_avoid_neighbour_rank():
    assert choose_binding(C4140, 1, 4, 1).pinning == (*range(10, 20), *range(50, 60))
    shared = choose_binding(C4140, 3, 8, 2).pinning
    assert shared == (*range(15, 20), *range(10, 15), *range(55, 60), *range(50, 55))
    # The last rank of an incomplete group has its device's cores alone.
    assert [b.num_threads for b in bindings_of(C4140, 5, 2)] == [5, 5, 5, 5, 20]
    assert [b.pinning for b in bindings_of(PLAIN, 3, 3)] == [(0, 1), (1, 0), (0, 1)]


@pytest.mark.parametrize(
    'local_size, per_device, cpus',
    json_table("""
1 | 1 | "0-1"
2 | 1 | "0 1"
3 | 1 | "0 0 1"
4 | 2 | "0 0 1 1"
"""),
)
def test_machine_without_gpus(local_size, per_device, cpus):
    bindings = bindings_of(PLAIN, local_size, per_device)
    assert [render_cpu_list(b.cpus) for b in bindings] == cpus.split()
    assert {b.gpu for b in bindings} == {None}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    per_device=st.integers(1, 3),
    devices=st.integers(1, 9),
    has_gpus=st.booleans(),
)
def test_cores_are_shared_evenly(sizes, per_device, devices, has_gpus):
    gpus = [d * len(sizes) // devices for d in range(devices)] if has_gpus else []
    machine = Topology(tuple(node(i, 100 * i, n) for i, n in enumerate(sizes)), tuple(gpus))
    bindings = bindings_of(machine, devices * per_device, per_device)
    for r, b in enumerate(bindings):
        assert b.cpus == bindings[r // per_device * per_device].cpus
        assert b.num_threads == max(1, len(b.cpus) // per_device)
    used = [c for b in bindings[::per_device] for c in b.cpus]
    assert len(used) == len(set(used)) or devices > min(sizes)
    if devices >= len(sizes):
        assert {b.numa_node for b in bindings} == set(range(len(sizes)))


def test_topology_is_read_from_sys(tmp_path):
    files = {'bus/pci/devices/0000:3b:00.0/numa_node': 1}
    for number, cpus in enumerate(('0-1,4-5', '2-3,6-7')):
        files[f'devices/system/node/node{number}/cpulist'] = cpus
    for n in range(8):
        folder = f'devices/system/cpu/cpu{n}/topology'
        files[f'{folder}/thread_siblings_list'] = f'{n % 4},{n % 4 + 4}'
        files[f'{folder}/physical_package_id'] = n % 4 // 2
    write_files(tmp_path, files)
    found = find_topology(tmp_path, [0, 1, 2, 3, 4, 6, 7], ['0000:3b:00.0'])
    nodes = NumaNode(0, ((0, 4), (1,)), '0'), NumaNode(1, ((2, 6), (3, 7)), '1')
    assert found == Topology(nodes, (1,))
    without_numa = find_topology(tmp_path / 'none', [0, 3], ['none'])
    assert without_numa == Topology((NumaNode(0, ((0,), (3,))),), (0,))


HOST = ('0000:0b:00.0', '0000:1b:00.0', '0000:8b:00.0', '0000:9b:00.0')


# numbers of the GPUs
@pytest.mark.parametrize(
    'visible, of_host, num_devices, expected, index',
    json_table("""
[2, 3] | [0, 1, 2, 3] | 2 | [2, 3]       | null  # both ranks see both GPUs
[2]    | [0, 1, 2, 3] | 4 | [0, 1, 2, 3] | 2     # one GPU per task
[2]    | [0, 1, 2, 3] | 1 | [2]          | null
[0]    | []           | 2 | [0]          | null  # a container that hides /sys
[0]    | [0, 1, 2, 3] | 8 | [0]          | null  # instances: more ranks than cards
"""),
)
def test_rank_with_one_visible_gpu_is_placed_among_all_of_the_host(
    visible, of_host, num_devices, expected, index
):
    visible, of_host, expected = (tuple(HOST[n] for n in ns) for ns in (visible, of_host, expected))
    assert choose_devices(visible, of_host, num_devices) == (expected, index)
