"""Agreement of the logs of a system with one another and with its description, and faults of the
description itself."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.faults import Fault
from mlperf_rn50.mllog.package.system_desc import COUNTS, missing_fields
from mlperf_rn50.mllog.package.tree_layouts import layout_of
from mlperf_rn50.mllog.read.description import JsonObject, load_object, objects_at
from mlperf_rn50.mllog.rulesets import V05
from mlperf_rn50.text import grouped

_KEYS = 'keys of mlperf_logging'
_RULE = 'SR <system_desc_id>.json metadata'
_NUMBERS = (*COUNTS, 'host_processors_per_node')  # result_summarizer parses these
_PLACEHOLDER = re.compile(
    r'.*(placeholder|\b(todo|tbd|fixme)\b).*|unnamed|<.*>|your[ _-].*', re.IGNORECASE | re.DOTALL
)


class _Fact(NamedTuple):
    """Something that each log states, and that the description must repeat."""

    key: str  # in the log
    field: str  # of the description
    stated: Callable[[Run], Any]
    is_described: Callable[[Any, JsonObject], bool]  # given the stated value


def is_placeholder(value: Any) -> bool:
    return bool(_PLACEHOLDER.fullmatch(str(value).strip()[:1000]))


def _plain(name: Any) -> str:
    """Return a name without case, spaces and punctuation except +, which joins organisations."""
    return re.sub(r'[^\w+]|_', '', str(name).casefold())


def _is_same_status(logged: str, content: JsonObject) -> bool:
    text = _plain(content['status'])
    if text == 'available':
        return logged in ('cloud', 'onprem')
    return logged in text or logged == 'research' and 'rdi' in text


def _is_same_platform(platform: str, content: JsonObject) -> bool:
    """Return whether the number before a platform, such as 2 in 2xDGX, counts the described nodes
    or accelerators."""
    factor = re.match(r'(\d{1,6})x(?=\D)', platform)
    num_nodes, per_node = (_number(content.get(name)) for name in COUNTS)
    if not factor or num_nodes is None:
        return True
    return int(factor[1]) in (num_nodes, per_node, num_nodes * (per_node or 0))


def _accelerators_per_node(run: Run) -> int | None:
    num_nodes, total = map(run.logged, ('num_nodes', 'num_accelerators'))
    return total // num_nodes if num_nodes and total is not None else None


def _same(field: str) -> Callable[[Any, JsonObject], bool]:
    """Return a function that compares a stated name or number with a field."""
    return lambda logged, content: (
        _plain(logged) == _plain(content[field]) or (logged == _number(content[field]))
    )


_NODES, _PER_NODE = COUNTS
_FACTS = (
    _Fact(keys.SUBMISSION_ORG, 'submitter', lambda run: run.logged_org, _same('submitter')),
    _Fact(keys.SUBMISSION_DIVISION, 'division', lambda run: run.division, _same('division')),
    _Fact(keys.SUBMISSION_STATUS, 'status', lambda run: run.submission_status, _is_same_status),
    _Fact(_NODES, _NODES, lambda run: run.logged('num_nodes'), _same(_NODES)),
    _Fact(_PER_NODE, _PER_NODE, _accelerators_per_node, _same(_PER_NODE)),
    _Fact(keys.SUBMISSION_PLATFORM, _NODES, lambda run: run.platform, _is_same_platform),
)


def _number(value: Any) -> int | None:
    text = str(value)
    return int(float(text)) if re.fullmatch(r'\d{1,9}(\.0+)?', text) else None


def _logs(runs: Sequence[Run], named: Sequence[Run]) -> str:
    if len(named) == len(runs):
        return f'all {len(runs)} logs'
    return ', '.join(run.path.name for run in named)


def _compare(fact: _Fact, runs: Sequence[Run], file: str, content: JsonObject) -> list[Fault]:
    """Return the faults of one fact in the logs of a system and its description."""
    again = 'set it for the next runs, because logs are never changed'
    by_value = grouped([r for r in runs if fact.stated(r) is not None], fact.stated)
    faults = [
        Fault(_logs(runs, named), fact.key, f'got {value!r:.80}, a placeholder; {again}', _KEYS)
        for value, named in by_value.items()
        if is_placeholder(value)
    ]
    if len(by_value) > 1:
        found = ', '.join(f'{value!r:.80} in {_logs(runs, n)}' for value, n in by_value.items())
        text = f'got {found}, expected one value; {again}'
        return [*faults, Fault(f'all {len(runs)} logs', fact.key, text, _KEYS)]
    stated, described = next(iter(by_value), None), content.get(fact.field)
    if faults or stated is None or described in (None, ''):
        return faults
    if fact.is_described(stated, content):
        return []
    text = (
        f'got {described!r:.80}, but {fact.key} is {stated!r:.80} in all {len(runs)} logs; correct '
        f'this file, or {again}'
    )
    return [Fault(file, fact.field, text, _RULE)]


def _later_fields(entry: JsonObject, org: Any) -> JsonObject:
    """Return the compared fields of an entry.json of v0.5 under their later names."""
    nodes = objects_at(entry, 'nodes')
    fields = {'submitter': org, **{key: entry.get(key) for key in ('division', 'status')}}
    if len(nodes) == 1:
        fields |= zip(COUNTS, (nodes[0].get('num_nodes'), nodes[0].get('num_accelerators')))
    return fields


def check_description(
    home: Path, system: str, round_name: str, runs: Sequence[Run]
) -> tuple[list[Fault], JsonObject]:
    """Return the faults of a system's description, also against its logs, and the required fields
    without a value."""
    layout = layout_of(round_name).of(system, '')
    file = layout.description
    org = None
    with suppress(ValueError):  # its absence is a fault of the tree
        org = load_object(home / layout.contact)[0].get('org')
    try:
        content, _ = load_object(home / file)
    except ValueError as e:
        return [Fault(file, '', f'{str(e)[:200]}; expected a JSON object', _RULE)], {}
    # in v0.6, some used the fields of v0.5
    form = V05 if round_name == 'v0.6' and 'nodes' in content else round_name
    missing = missing_fields(content, form)
    need = f'is empty, but {round_name} requires it; give it with --describe'
    faults = [Fault(file, name, need, _RULE) for name in missing]
    faults += [
        Fault(file, name, f'got {value!r:.80}, a placeholder; enter the value', _RULE)
        for name, value in content.items()
        if is_placeholder(value)
    ]
    faults += [
        Fault(file, name, f'got {content[name]!r:.40}, expected a whole number', _RULE)
        for name in _NUMBERS
        if content.get(name, '') != '' and not re.fullmatch('[0-9]{1,9}', str(content[name]))
    ]
    compared = _later_fields(content, org) if form == V05 else content
    for fact in _FACTS:
        known = {(fault.file, fault.key) for fault in faults}
        found = _compare(fact, runs, file, compared)
        faults += [fault for fault in found if (fault.file, fault.key) not in known]
    return faults, dict.fromkeys(missing, '')
