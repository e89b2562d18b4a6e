"""The system description of a submission, written from its runs and what they recorded in env.json."""
from collections.abc import Sequence
from typing import Any

from mlperf_rn50.mlperf.description import framework_of, objects_at, value_at
from mlperf_rn50.mlperf.run import Run

_STATUS_OF_4 = {'cloud': 'Available cloud', 'onprem': 'Available on-premise', 'preview': 'Preview',
                'research': 'Research, Development, or Internal (RDI)'}


def _size(value: Any) -> str:
    return f'{value / 1e9:.0f} GB' if isinstance(value, int) and not isinstance(value, bool) else ''


def _each(values: Sequence[str]) -> str:
    """'2x A + B' of A, A, B."""
    counts = {v: values.count(v) for v in values}
    return ' + '.join(f'{n}x {v}' if n > 1 else v for v, n in counts.items() if v)


def data_note(runs: Sequence[Run]) -> str:
    """Said wherever the result is: what it was trained on, if it is not ImageNet."""
    other = next((r for r in runs if not r.is_imagenet), None)
    if other is None:
        return ''
    return (f'Trained on {other.dataset or "other data"}, not ImageNet: a check of the format, not a result that can '
            'be submitted or compared.')


def _stack(env: dict[str, Any]) -> dict[str, str]:
    packages = value_at(env, 'packages')
    return {str(k): str(v) for k, v in packages.items()} if isinstance(packages, dict) else {}


def describe_system(runs: Sequence[Run], env: dict[str, Any], org: str, system: str,
                    round_name: str) -> dict[str, Any]:
    """The system description of the later rounds, from logs and env.json; what neither knows is ''.

    Args:
        runs: of the system.
        env: env.json of one of them.
        org: who submits.
        system: its name.
        round_name: v0.6 to v4.0.

    Source: mlperf_logging.system_desc_checker.
    """
    cpu = value_at(env, 'host', 'hardware', 'cpu')
    disks, gpus = objects_at(env, 'host', 'hardware', 'storage'), objects_at(env, 'host', 'hardware', 'gpus')
    cpu = cpu if isinstance(cpu, dict) else {}
    num_nodes = next((r.num_nodes for r in runs if r.num_nodes), None)
    accelerators = next((r.num_accelerators for r in runs if r.num_accelerators is not None), None)
    sockets, cores, threads = (cpu.get(k) if isinstance(cpu.get(k), int) else None
                               for k in ('sockets', 'cores_per_socket', 'threads_per_core'))
    stack = _stack(env)
    status = next((r.submission_status for r in runs if r.submission_status), 'research')
    return {
        'submitter': org, 'division': next((r.division for r in runs if r.division), 'open'),
        'status': _STATUS_OF_4[status] if round_name >= 'v4.0' else status, 'system_name': system,
        'number_of_nodes': '' if num_nodes is None else str(num_nodes),
        'host_processors_per_node': str(sockets or ''),
        'host_processor_model_name': str(cpu.get('model') or value_at(env, 'host', 'cpu')),
        'host_processor_core_count': str(cores or ''),
        'host_processor_vcpu_count': str(cores * threads) if cores and threads else '',
        'host_processor_frequency': f'{mhz:.0f} MHz' if isinstance(mhz := cpu.get('max_mhz'), float) else '',
        'host_processor_caches': str(cpu.get('caches') or ''), 'host_processor_interconnect': '',
        'host_memory_capacity': _size(value_at(env, 'host', 'memory_bytes')),
        'host_storage_type': _each([str(d.get('kind') or '') for d in disks]),
        'host_storage_capacity': _each([_size(d.get('bytes')) for d in disks]),
        'host_networking': _each([f'{n.get("name")} {n.get("rate") or ""}'.strip() for n in
                                  objects_at(env, 'host', 'hardware', 'networks')]),
        'host_networking_topology': '', 'host_memory_configuration': '',
        'accelerators_per_node': str(accelerators // num_nodes) if accelerators is not None and num_nodes else '',
        'accelerator_model_name': _each(sorted({str(g.get('name')) for g in gpus})) if accelerators != 0 else '',
        'accelerator_host_interconnect': '',
        'accelerator_frequency': str(gpus[0].get('clocks.max.sm') or '') if gpus and accelerators else '',
        'accelerator_on-chip_memories': '', 'accelerator_memory_configuration': '',
        'accelerator_memory_capacity': str(gpus[0].get('memory.total') or '') if gpus and accelerators else '',
        'accelerator_interconnect': '', 'accelerator_interconnect_topology': '', 'cooling': '',
        'hw_notes': next((r.platform for r in runs if r.platform and r.platform != 'unnamed'), ''),
        'framework': f'{framework_of(env) or "MXNet"} Gluon', 'other_software_stack': stack,
        'operating_system': str(value_at(env, 'host', 'os_name') or value_at(env, 'host', 'os')),
        'sw_notes': data_note(runs)}


def describe_entry(description: dict[str, Any]) -> dict[str, Any]:
    """entry.json of v0.5, from the later rounds' description."""
    d = description
    per_node = int(d['accelerators_per_node'] or 0)
    cores, sockets = d['host_processor_core_count'], d['host_processors_per_node']
    return {'division': d['division'], 'status': d['status'], 'hardware': d['system_name'], 'framework': d['framework'],
            'power': 'N/A', 'notes': d['sw_notes'], 'interconnect': d['host_networking'], 'os': d['operating_system'],
            'libraries': ' / '.join(f'{k} {v}' for k, v in d['other_software_stack'].items()), 'compilers': '',
            'nodes': [{'num_nodes': int(d['number_of_nodes'] or 0),
                       'cpu': f'{sockets}x {d["host_processor_model_name"]}',
                       'num_cores': int(cores or 0) * int(sockets or 0),
                       'num_vcpus': int(d['host_processor_vcpu_count'] or 0) * int(sockets or 0),
                       'accelerator': d['accelerator_model_name'], 'num_accelerators': per_node,
                       'sys_mem_size': d['host_memory_capacity'], 'sys_storage_type': d['host_storage_type'],
                       'sys_storage_size': d['host_storage_capacity'],
                       'cpu_accel_interconnect': d['accelerator_host_interconnect'],
                       'network_card': d['host_networking'], 'num_network_cards': '', 'notes': d['hw_notes']}]}
