"""Description of a submitted system: merged from the logs, a submitter's file, a description beside
the logs and env.json, in the fields of a round."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlperf_rn50.errors import ConfigError, nearest
from mlperf_rn50.files import load_ini
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.machine_fields import machine_fields
from mlperf_rn50.mllog.read.description import JsonObject, load_object, objects_at, system_path
from mlperf_rn50.mllog.rulesets import V05

_TABLE = load_ini(Path(__file__).with_name('fields.ini'))
_STATUS_OF_4 = {
    'cloud': 'Available cloud',
    'onprem': 'Available on-premise',
    'preview': 'Preview',
    'research': 'Research, Development, or Internal (RDI)',
}
# The official checker joins these as texts.
_TEXTS = """submitter division status system_name host_processor_model_name
    host_processor_core_count accelerator_model_name accelerators_per_node framework""".split()
COUNTS = ('number_of_nodes', 'accelerators_per_node')
_CORES = ('host_processor_core_count', 'host_processor_vcpu_count')
_NODE_ONLY = {*_TABLE['node']} - {*_TABLE['file']}


@dataclass(frozen=True)
class Described:
    """Where a description comes from, and its fields without empty ones."""

    name: str  # folder and file name
    fields: JsonObject


@dataclass(frozen=True)
class Description:
    fields: JsonObject  # content of the file
    notes: Sequence[str] = ()


def _is_in(round_name: str, rounds: str) -> bool:
    """Return whether a round is in a range such as v0.6-, v0.5-v0.6 or v0.6; - is empty."""
    first, dash, last = rounds.partition('-')
    return bool(first) and first <= round_name <= (last or ('v9' if dash else first))


def _rows(part: str) -> dict[str, list[str]]:
    """Return rounds, rounds that require a value, and later name of the fields of a part."""
    return {name: text.split() for name, text in _TABLE[part].items()}


def fields_of(round_name: str, part: str = 'file') -> dict[str, bool]:
    """Return the fields of a round's description, or of its nodes, and whether each is required."""
    return {
        name: _is_in(round_name, required)
        for name, (rounds, required, _) in _rows(part).items()
        if _is_in(round_name, rounds)
    }


def _value(key: str, value: Any) -> Any:
    """Return a submitted value: text, an object or a list; '' for an empty one, and for an object
    where the official checker needs text."""
    if isinstance(value, (dict, list)):
        return '' if key in _TEXTS else value
    return '' if value is None else str(value).strip()


def _filled(content: JsonObject) -> JsonObject:
    values = {key: _value(key, value) for key, value in content.items()}
    return {key: value for key, value in values.items() if value not in ('', {}, [])}


def load_described(path: Path) -> JsonObject:
    """Return the fields in a submitter's file. Raise ConfigError if it cannot be read or contains
    an unknown field."""
    try:
        content, _ = load_object(path)
    except ValueError as e:
        raise ConfigError(f'--describe: {path}: {e}') from e
    known = [*_TABLE['file'], *_TABLE['node']]
    for key in content:
        if key not in known:
            raise ConfigError(f'--describe: {path}: {key}: unknown field{nearest(key, known)}')
    return _filled(content)


def find_base(log: Path, round_name: str) -> Described | None:
    """Return the description in the submission tree of a log, or None if there is none."""
    is_entry = round_name == V05
    path = log.absolute().parent.parent / 'entry.json' if is_entry else system_path(log)
    try:
        content, _ = load_object(path)
    except ValueError:
        return None
    return Described(f'{path.parent.name}/{path.name}', _filled(content))


def data_note(runs: Sequence[Run]) -> str:
    """Return the label of a result on data other than ImageNet, or '' for ImageNet."""
    other = next((r for r in runs if not r.is_imagenet), None)
    if other is None:
        return ''
    whole = 'all of ImageNet' if other.dataset == 'imagenet' else 'ImageNet'
    return (
        f'Trained on {other.data_text or "other data"}, not {whole}; this result tests only the '
        'format, and cannot be submitted or compared.'
    )


def render_status(text: str, round_name: str) -> str:
    """Translate an availability ('onprem', 'on-prem', 'Available on-premise') into the term that a
    round uses."""
    word = re.sub('[^a-z]', '', text.lower())
    known = next((k for k in _STATUS_OF_4 if k in word), 'research')
    if round_name == V05 and known == 'onprem':
        return 'on-prem'
    return _STATUS_OF_4[known] if round_name >= 'v4.0' else known


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value not in (None, '')), None)


def logged_counts(run: Run) -> dict[str, int | None]:
    """Return the number of nodes, and of accelerators on each, that a log states."""
    num_nodes, total = map(run.logged, ('num_nodes', 'num_accelerators'))
    per_node = total // num_nodes if num_nodes and total is not None else None
    return dict(zip(COUNTS, (num_nodes, per_node)))


def _determined(runs: Sequence[Run]) -> JsonObject:
    """Return the fields that the logs state."""
    stated = [
        {'division': r.division, 'status': r.submission_status, **logged_counts(r)} for r in runs
    ]
    firsts = {key: _first(s[key] for s in stated) for key in stated[0]}
    return {key: str(value) for key, value in firsts.items() if value is not None}


def _entry_fields(fields: JsonObject) -> JsonObject:
    """Return the fields of v0.5 that follow from later ones and from given fields of a node."""

    def number(value: Any) -> Any:
        return int(value) if re.fullmatch('[0-9]{1,9}', str(value)) else value

    def renamed(part: str) -> JsonObject:
        return {name: number(fields.get(later, '')) for name, (*_, later) in _rows(part).items()}

    node = renamed('node')
    num_processors = number(fields['host_processors_per_node'])
    if isinstance(num_processors, int):
        node['cpu'] = f'{num_processors}x {node["cpu"]}'
        totals = {key: node[key] for key in ('num_cores', 'num_vcpus')}
        node |= {k: num_processors * n for k, n in totals.items() if isinstance(n, int)}
    if node['num_accelerators'] == 0:
        node |= {'accelerator': 'N/A', 'cpu_accel_interconnect': 'N/A'}
    given = {name: fields[name] for name in _NODE_ONLY if fields.get(name)}
    return {**renamed('file'), 'nodes': [node | given]}


def missing_fields(content: JsonObject, round_name: str) -> list[str]:
    """Return the fields without a value that a round requires."""

    def is_needed(part: JsonObject, name: str) -> bool:
        value = part.get(name)
        values = value if isinstance(value, list) else [value]
        if any(_value(name, v) not in ('', {}, [], 'False') for v in values):
            return False
        counts = (str(part.get(key)) for key in ('accelerators_per_node', 'num_accelerators'))
        if name.startswith('accelerator') and '0' in counts:
            return False
        # one of the two is enough
        return not (name in _CORES and any(part.get(other) for other in _CORES))

    parts = [(content, fields_of(round_name))]
    if round_name == V05:
        parts += [(node, fields_of(V05, 'node')) for node in objects_at(content, 'nodes')]
    required = [(part, name) for part, names in parts for name in names if names[name]]
    return list(dict.fromkeys(name for part, name in required if is_needed(part, name)))


def describe(
    runs: Sequence[Run],
    env: JsonObject,
    *,
    org: str,
    system: str,
    round_name: str,
    given: Mapping[str, Any] = MappingProxyType({}),
    base: Described | None = None,
) -> Description:
    """Return the description of a system. A field comes from the logs if they state it, else from
    what a submitter gave, else from a description beside the logs, else from env.json."""
    machine = machine_fields(
        env,
        num_nodes=_first(r.num_nodes for r in runs),
        num_accelerators=_first(r.num_accelerators for r in runs),
    )
    platform = _first(r.platform for r in runs)
    built = {
        'submitter': org,
        'division': 'open',
        'system_type': 'datacenter',
        'status': 'research',
        'system_name': system,
        'hw_notes': '' if platform == 'unnamed' else platform,
        **machine,
    }
    # a description beside the logs may be of another submitter
    beside = {k: v for k, v in base.fields.items() if k != 'submitter'} if base else {}
    submitted = {**beside, **given}
    logged = _determined(runs)
    fields = {**dict.fromkeys(_TABLE['file'], ''), **_filled(built), **submitted, **logged}
    fields['status'] = render_status(str(fields['status']), round_name)
    if label := data_note(runs):
        notes = str(fields['sw_notes'])
        fields['sw_notes'] = notes if label in notes else f'{notes}; {label}'.removeprefix('; ')
    kept = [*fields_of(round_name)]
    if round_name == V05:
        fields = {**_entry_fields(fields), **{k: v for k, v in fields.items() if v}}
    else:
        kept += [key for key in submitted if key not in _NODE_ONLY]
    fields = {key: fields.get(key, '') for key in dict.fromkeys(kept)}
    others = {'--describe': dict(given), base.name if base else '': beside, 'env.json': machine}
    return Description(fields, _notes(fields, logged, others))


def _notes(fields: JsonObject, logged: JsonObject, others: Mapping[str, JsonObject]) -> list[str]:
    """Return a note on the sources of the fields, and one on each field that the logs change."""
    left = [name for name, value in fields.items() if value]
    parts = []
    for source, content in {'the logs': logged, **others}.items():
        if names := [name for name in left if content.get(name)]:
            parts.append(f'from {source}: {", ".join(names)}')
            left = [name for name in left if name not in names]

    def is_changed(name: str, value: Any) -> bool:
        text = str(value).casefold()
        return (render_status(text, '') if name == 'status' else text) != logged[name]

    changed = [
        f'{name} is {str(content[name]):.40} in {source}, but {logged[name]} in the logs, which is '
        'used'
        for source, content in others.items()
        for name in logged
        if name in content and is_changed(name, content[name])
    ]
    return [f'the system description: {"; ".join(parts)}', *changed]
