"""Build a system description from runs, env.json and a submitted description, and check the
result."""

import re
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.read.description import (
    JsonObject,
    framework_of,
    load_object,
    object_at,
    objects_at,
    system_path,
    value_at,
)

_STATUS_OF_4 = {
    'cloud': 'Available cloud',
    'onprem': 'Available on-premise',
    'preview': 'Preview',
    'research': 'Research, Development, or Internal (RDI)',
}
# Fields of a description in the order of its file.
_FIELDS = """
    submitter division status system_name number_of_nodes host_processors_per_node
    host_processor_model_name host_processor_core_count host_processor_vcpu_count
    host_processor_frequency host_processor_caches host_processor_interconnect host_memory_capacity
    host_storage_type host_storage_capacity host_networking host_networking_topology
    host_memory_configuration accelerators_per_node accelerator_model_name
    accelerator_host_interconnect accelerator_frequency accelerator_on-chip_memories
    accelerator_memory_configuration accelerator_memory_capacity accelerator_interconnect
    accelerator_interconnect_topology cooling hw_notes framework other_software_stack
    operating_system sw_notes""".split()
_COMPARED = ('number_of_nodes', 'accelerators_per_node')  # fields that the logs contain too
# result_summarizer parses these
_NUMBERS = ('number_of_nodes', 'host_processors_per_node', 'accelerators_per_node')
# Fields from the Order or the logs, not from the submitted description; sw_notes joins the texts of
# both.
_DETERMINED = ('submitter', 'system_name', 'division', 'status', 'sw_notes')


def _size(value: Any) -> str:
    return f'{value / 1e9:.0f} GB' if isinstance(value, int) and not isinstance(value, bool) else ''


def _each(values: Sequence[str]) -> str:
    """Return '2x A + B' for A, A, B."""
    return ' + '.join(f'{n}x {v}' if n > 1 else v for v, n in Counter(values).items() if v)


class SubmittedDescription(NamedTuple):
    name: str  # folder and file name
    fields: JsonObject  # without empty fields


def find_base(log: Path) -> SubmittedDescription | None:
    """Return the description in the submission tree of a log, or None if there is none."""
    path = system_path(log)
    try:
        content, _ = load_object(path)
    except ValueError:
        return None
    return SubmittedDescription(
        f'systems/{path.name}', {k: text for k, v in content.items() if (text := _text(k, v))}
    )


def _text(key: str, value: Any) -> Any:
    """Return a field as text, as in later rounds, or '' if it is empty. other_software_stack may
    stay an object."""
    if isinstance(value, dict) and key == 'other_software_stack':
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ''
    text = str(value).strip()
    return '' if text.upper() == 'N/A' else text


def data_note(runs: Sequence[Run]) -> str:
    """Return the label of a result on data other than ImageNet, or '' for ImageNet."""
    other = next((r for r in runs if not r.is_imagenet), None)
    if other is None:
        return ''
    return (
        f'Trained on {other.dataset or "other data"}, not ImageNet; this result tests only the '
        'format, and cannot be submitted or compared.'
    )


def _processor_fields(cpu: JsonObject) -> JsonObject:
    """Return the fields about the processors of a host from its hardware in env.json."""
    sockets, cores, threads = (
        count if isinstance(count := cpu.get(key), int) else 0
        for key in ('sockets', 'cores_per_socket', 'threads_per_core')
    )
    mhz = cpu.get('max_mhz')
    return {
        'host_processors_per_node': str(sockets or ''),
        'host_processor_core_count': str(cores or ''),
        'host_processor_vcpu_count': str(cores * threads or ''),
        'host_processor_frequency': f'{mhz:.0f} MHz' if isinstance(mhz, float) else '',
        'host_processor_caches': str(cpu.get('caches') or ''),
    }


def _accelerator_fields(gpus: Sequence[JsonObject], num: int, num_nodes: int | None) -> JsonObject:
    """Return the fields about a known number of accelerators from the GPUs of a host in
    env.json."""
    gpu = gpus[0] if gpus and num else {}
    return {
        'accelerators_per_node': str(num // num_nodes) if num_nodes else '',
        'accelerator_frequency': str(gpu.get('clocks.max.sm') or ''),
        'accelerator_memory_capacity': str(gpu.get('memory.total') or ''),
    }


def describe_system(
    runs: Sequence[Run],
    env: JsonObject,
    org: str,
    system: str,
    round_name: str,
    base: SubmittedDescription | None,
) -> JsonObject:
    """Return the fields that the official checker requires, from logs, env.json and base; an
    unknown field is ''."""

    def logged(name: str) -> Any:
        return next((v for r in runs if (v := getattr(r, name)) is not None), None)

    cpu = object_at(env, 'host', 'hardware', 'cpu')
    disks, gpus, networks = (
        objects_at(env, 'host', 'hardware', name) for name in ('storage', 'gpus', 'networks')
    )
    num_nodes, num_accelerators = logged('num_nodes') or None, logged('num_accelerators')
    fields = base.fields if base else {}
    division = 'closed' if fields.get('division') == 'closed' else 'open'
    known = {
        'submitter': org,
        'division': logged('division') or division,
        'status': _status(
            logged('submission_status') or fields.get('status', 'research'), round_name
        ),
        'system_name': system,
        'number_of_nodes': str(num_nodes or ''),
        'host_processor_model_name': str(cpu.get('model') or value_at(env, 'host', 'cpu')),
        **_processor_fields(cpu),
        'host_memory_capacity': _size(value_at(env, 'host', 'memory_bytes')),
        'host_storage_type': _each([str(d.get('kind') or '') for d in disks]),
        'host_storage_capacity': _each([_size(d.get('bytes')) for d in disks]),
        'host_networking': _each(
            [f'{n.get("name")} {n.get("rate") or ""}'.strip() for n in networks]
        ),
        'hw_notes': next((r.platform for r in runs if r.platform and r.platform != 'unnamed'), ''),
        'framework': f'{framework_of(env) or "MXNet"} Gluon',
        'other_software_stack': {
            name: str(version) for name, version in object_at(env, 'packages').items()
        },
        'operating_system': str(value_at(env, 'host', 'os_name') or value_at(env, 'host', 'os')),
        'sw_notes': data_note(runs),
    }
    if num_accelerators is not None:
        known |= _accelerator_fields(gpus, num_accelerators, num_nodes)
    if num_accelerators != 0:
        known['accelerator_model_name'] = _each(sorted({str(g.get('name')) for g in gpus}))
    return dict.fromkeys(_FIELDS, '') | known


def merge_description(
    base: SubmittedDescription, built: JsonObject, logged: JsonObject
) -> tuple[JsonObject, list[str]]:
    """Return the base with gaps filled from `built`, and notes on the sources; `logged` is `built`
    without env.json."""
    fields = {k: v for k, v in base.fields.items() if k not in _DETERMINED}
    filled = [k for k, v in built.items() if v and k not in fields and k not in _DETERMINED]
    sources = [f'the system description is {base.name}']
    for source, is_logged in (('env.json', False), ('the logs', True)):
        if names := [k for k in filled if bool(logged[k]) is is_logged]:
            sources.append(f'from {source}: {", ".join(names)}')
    notes = ['; '.join(sources)]
    notes += [
        f'{k} is {fields[k]:.40} in {base.name}, but {built[k]} in the logs; the two must agree'
        for k in _COMPARED
        if k in fields and built[k] and fields[k] != built[k]
    ]
    division = base.fields.get('division', built['division'])
    if division != built['division']:
        notes.append(
            f'division is {division:.40} in {base.name}, but {built["division"]} in the logs, '
            'which is used'
        )
    labels = dict.fromkeys(
        text for text in (base.fields.get('sw_notes'), built['sw_notes']) if text
    )
    return {**built, **fields, 'sw_notes': '; '.join(labels)}, notes


def _status(text: str, round_name: str) -> str:
    """Translate an availability ('onprem', 'on-prem', 'Available on-premise') into the term that a
    round uses."""
    word = text.lower().replace('-', '')
    known = next((k for k in _STATUS_OF_4 if k in word), 'research')
    return _STATUS_OF_4[known] if round_name >= 'v4.0' else known


def find_gaps(description: JsonObject) -> list[str]:
    """Return the empty fields of a description, except those that may stay empty."""
    optional = ['hw_notes', 'sw_notes']
    if description.get('accelerators_per_node') == '0':
        optional.append('accelerator_')
    empty = [k for k, v in description.items() if v in ('', {})]
    return [k for k in empty if not k.startswith(tuple(optional))]


def check_description(
    home: Path, system: str, divisions: Set[str | None]
) -> tuple[list[str], list[str]]:
    """Return the flaws and gaps of a system's description in a tree, given the divisions in its
    logs."""
    name = f'systems/{system}.json'
    try:
        content, _ = load_object(home / name)
    except ValueError as e:
        return [f'{name}: {str(e)[:200]}'], []
    flaws = [
        f'{name}: {k} is {content[k]!r:.40}, expected a whole number'
        for k in _NUMBERS
        if k in content and not re.fullmatch('[0-9]{1,9}', str(content[k]))
    ]
    division = content.get('division')
    flaws += [
        f'{name}: division is {str(division):.40}, expected {logged} as in the logs'
        for logged in sorted(map(str, divisions - {None}))
        if division != logged
    ]
    gaps = find_gaps(content)
    return flaws, [f'{name} lacks {", ".join(gaps)}'] if gaps else []
