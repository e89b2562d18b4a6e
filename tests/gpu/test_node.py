"""The node: which GPUs there are, where they sit, and that every rank is bound beside its own."""
import os

import mxnet as mx
from gpu.conftest import IS_DRY

from mlperf_rn50.system.cgroup import render_cpu_list
from mlperf_rn50.system.gpus import find_visible_gpus
from mlperf_rn50.system.power import find_gpus
from mlperf_rn50.system.telemetry import read_gpu
from mlperf_rn50.system.topology import SYS, choose_binding, find_topology


def test_every_rank_is_bound_beside_its_gpu(figure):
    bus_ids, allowed = [g.bus_id for g in find_visible_gpus()], sorted(os.sched_getaffinity(0))
    topology = find_topology(SYS, allowed, bus_ids)
    num = max(1, len(bus_ids))
    found = [choose_binding(topology, r, num, 1) for r in range(num)]
    for r, binding in enumerate(found):
        figure(f'topology of rank {r}', f'GPU {binding.gpu}, NUMA node {binding.numa_node}, cores '
                                        f'{render_cpu_list(sorted(binding.cpus))}')
    if not IS_DRY:
        assert len(bus_ids) == mx.context.num_gpus() and [b.gpu for b in found] == list(range(num))
        numbers = {n.number for n in topology.nodes}
        assert all(b.numa_node == topology.gpus[r] for r, b in enumerate(found) if topology.gpus[r] in numbers)


def test_the_cards_tell_their_power(figure):
    nvml, handles = find_gpus()
    told = [read_gpu(nvml, h) for h in handles]
    for number, values in enumerate(told):
        figure(f'GPU {number} at rest', ', '.join(f'{k} {v}' for k, v in values.items()))
    if not IS_DRY:
        assert told and all('memory_used_bytes' in v for v in told)
