"""Agreement of the logs of a system with one another and with its description, and faults of the
description itself."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.check.faults import Fault, name_logs
from mlperf_rn50.mllog.logged_run import Run
from mlperf_rn50.mllog.package.system_desc import COUNTS, logged_counts, missing_fields
from mlperf_rn50.mllog.package.tree_layouts import layout_of
from mlperf_rn50.mllog.read.description import JsonObject, count_in, load_object, objects_at
from mlperf_rn50.mllog.rulesets import V05
from mlperf_rn50.text import grouped

_KEYS = 'keys of mlperf_logging'
_RULE = 'SR <system_desc_id>.json metadata'
_NUMBERS = (*COUNTS, 'host_processors_per_node')  # result_summarizer parses these
_AGAIN = 'set it for the next runs, because logs are never changed'
_PLACEHOLDER = re.compile(
    r'.*(placeholder|\b(todo|tbd|fixme)\b).*|unnamed|<.*>|your[ _-].*', re.IGNORECASE | re.DOTALL
)


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
    num_nodes, per_node = (count_in(content.get(name)) for name in COUNTS)
    if not factor or num_nodes is None:
        return True
    return int(factor[1]) in (num_nodes, per_node, num_nodes * (per_node or 0))


def _stated(run: Run) -> JsonObject:
    """Return what a log states and the description must repeat, by its key in the log."""
    return {
        keys.SUBMISSION_ORG: run.logged_org,
        keys.SUBMISSION_DIVISION: run.division,
        keys.SUBMISSION_STATUS: run.submission_status,
        **logged_counts(run),
        keys.SUBMISSION_PLATFORM: run.platform,
    }


# field of the description by key of the log, where the names differ
_FIELDS = {
    keys.SUBMISSION_ORG: 'submitter',
    keys.SUBMISSION_DIVISION: 'division',
    keys.SUBMISSION_STATUS: 'status',
    keys.SUBMISSION_PLATFORM: COUNTS[0],
}


def _compare(key: str, runs: Sequence[Run], file: str, content: JsonObject) -> Iterator[Fault]:
    """Yield the faults of one fact in the logs of a system and its description."""
    by_value = grouped(runs, lambda run: _stated(run)[key])
    by_value.pop(None, None)
    doubts = [value for value in by_value if is_placeholder(value)]
    for value in doubts:
        text = f'got {value!r:.80}, a placeholder; {_AGAIN}'
        yield Fault(name_logs(runs, by_value[value]), key, text, _KEYS)
    if len(by_value) > 1:
        found = ', '.join(f'{value!r:.80} in {name_logs(runs, n)}' for value, n in by_value.items())
        text = f'got {found}, expected one value; {_AGAIN}'
        yield Fault(f'all {len(runs)} logs', key, text, _KEYS)
    field = _FIELDS.get(key, key)
    if doubts or len(by_value) != 1 or content.get(field) in (None, ''):
        return
    [stated] = by_value
    if key == keys.SUBMISSION_STATUS:
        is_same = _is_same_status(stated, content)
    elif key == keys.SUBMISSION_PLATFORM:
        is_same = _is_same_platform(stated, content)
    else:
        is_same = _plain(stated) == _plain(content[field]) or stated == count_in(content[field])
    if not is_same:
        text = (
            f'got {content[field]!r:.80}, but {key} is {stated!r:.80} in all {len(runs)} logs; '
            f'correct this file, or {_AGAIN}'
        )
        yield Fault(file, field, text, _RULE)


def _later_fields(entry: JsonObject, org: Any) -> JsonObject:
    """Return the compared fields of an entry.json of v0.5 under their later names."""
    nodes = objects_at(entry, 'nodes')
    fields = {'submitter': org, **{key: entry.get(key) for key in ('division', 'status')}}
    if len(nodes) == 1:
        fields |= zip(COUNTS, (nodes[0].get('num_nodes'), nodes[0].get('num_accelerators')))
    return fields


def check_description(
    home: Path, system: str, round_name: str, runs: Sequence[Run]
) -> tuple[list[Fault], list[str]]:
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
        return [Fault(file, '', f'{str(e)[:200]}; expected a JSON object', _RULE)], []
    # in v0.6, some used the fields of v0.5
    form = V05 if round_name == 'v0.6' and 'nodes' in content else round_name
    missing = missing_fields(content, form)
    need = f'is empty, but {round_name} requires it; enter it, or package again with --describe'
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
    for key in _stated(runs[0]):
        faults += _compare(key, runs, file, compared)
    firsts = [first for first, *_ in grouped(faults, lambda f: (f.file, f.key)).values()]
    return firsts, missing
