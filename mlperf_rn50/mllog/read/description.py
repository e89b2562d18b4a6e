"""System description of a log: entry.json (v0.5), systems/<system>.json (later rounds), or this
program's env.json."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.files import parse_json, read_text
from mlperf_rn50.mllog.findings import Finding, make_finding
from mlperf_rn50.mllog.logged_run import FactSource
from mlperf_rn50.mllog.read.values import integer
from mlperf_rn50.runfolder.names import run_of

JsonObject = dict[str, Any]
_MAX_BYTES = 1 << 20


class Count(NamedTuple):
    number: int
    source: FactSource


def make_count(number: int | None, source: FactSource) -> Count | None:
    return None if number is None else Count(number, source)


@dataclass(frozen=True)
class SystemDescription:
    """Hardware, framework and submitter in a system description; None for what it lacks."""

    org: tuple[str, FactSource] | None = None
    nodes: Count | None = None
    accelerators: Count | None = None  # total of all nodes
    accelerator: str | None = None
    framework: str | None = None
    node_gbit_s: float | None = None  # of a node's ports to other nodes together
    fault: Finding | None = None  # about an unreadable file, or a value that is no number


def count_in(value: Any) -> int | None:
    """Return a count given as a number or, as in later rounds, as text; None for anything else."""
    if isinstance(value, str) and (m := re.fullmatch(r'(\d{1,9})(\.0+)?', value.strip(), re.ASCII)):
        value = m[1]
    return integer(value, high=10**9 - 1)


def _name(value: Any) -> str | None:
    """Return a name on one line; None if it is empty or a placeholder."""
    text = ' '.join(value[:1000].split()) if isinstance(value, str) else ''
    return text if text.upper() not in ('', 'N/A', 'NA', 'NONE', '-') else None


def _names(values: list[Any]) -> str | None:
    """Return the distinct names, joined; None if there are none."""
    return ' + '.join(dict.fromkeys(name for v in values if (name := _name(v)))) or None


def network_gbit_s(text: Any) -> float | None:
    """Return the total rate of a node's ports in Gbit/s, from 'Storage: ..., Compute: 8x HDR
    200Gb/Sec' for example.

    Ports for storage and management do not count. Of several kinds of ports, the one with the
    highest total counts.
    """
    parts = re.split(r'[,;+]| and ', text[:1000]) if isinstance(text, str) else []
    highest = 0
    for part in parts:
        if re.search('storage|management', part, re.IGNORECASE):
            continue
        ports = re.search(r'(\d{1,3}) ?x', part)
        for rate, unit in re.findall(r'(\d{1,4}) ?(Gb|GbE|GB/|GB)', part):
            gbit_s = int(rate) * (8 if unit == 'GB/' else 1)
            highest = max(highest, gbit_s * (int(ports[1]) if ports else 1))
    return float(highest) or None


def system_path(log: Path) -> Path:
    """Return the path of the system description in the submission tree of a log,
    systems/<system>.json."""
    system = log.absolute().parent.parent
    return system.parent.parent / 'systems' / f'{system.name}.json'


def load_object(path: Path) -> tuple[JsonObject, str]:
    """Return the object in a JSON file, and the text of the file; raise ValueError with the reason
    if there is none."""
    try:
        text = read_text(path, _MAX_BYTES, 'replace')
    except OSError as e:
        raise ValueError(e.strerror) from e
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError('is not a JSON object')
    return content, text


def load_env(log: Path) -> JsonObject:
    """Return the env.json that belongs to a log; empty if it is missing or unreadable."""
    try:
        return load_object(run_of(log).env)[0]
    except ValueError:
        return {}


def value_at(env: JsonObject, *names: str) -> Any:
    """Return the value at a path of names in nested objects; '' if there is none."""
    for name in names:
        env = env.get(name) if isinstance(env, dict) else None  # type: ignore[assignment]
    return '' if env is None else env


def object_at(env: JsonObject, *names: str) -> JsonObject:
    """Return the object at a path of names; empty if there is none."""
    value = value_at(env, *names)
    return value if isinstance(value, dict) else {}


def objects_at(env: JsonObject, *names: str) -> list[JsonObject]:
    """Return the objects in the list at a path of names, such as a.b, or [] if there is no list."""
    value = value_at(env, *names)
    return [x for x in value if isinstance(x, dict)] if isinstance(value, list) else []


def framework_of(env: JsonObject) -> str | None:
    versions = [v for k, v in object_at(env, 'packages').items() if k.startswith('mxnet')]
    return _name(f'MXNet {versions[0]}') if versions else None


def find_description(log: Path) -> SystemDescription:
    """Return the description in a file that belongs to a log; it is empty if there is no file."""
    log = log.absolute()
    name = ''
    try:
        for path in (run_of(log).env, log.parent.parent / 'entry.json', system_path(log)):
            name = path.name
            if path.is_file():
                content, text = load_object(path)
                fault = _check_numbers(name, content)
                return replace(_describe(path, content, text), fault=fault)
    except OSError as e:  # no permission for a folder
        return _unreadable(Path(e.filename).name, e.strerror)
    except ValueError as e:
        return _unreadable(name, str(e))
    return SystemDescription()


def _unreadable(name: str, reason: str | None) -> SystemDescription:
    return SystemDescription(fault=make_finding('description_unreadable', None, name, reason))


def org_of_folder(log: Path) -> tuple[str, FactSource] | None:
    """Return the submitter from a folder v0.6/<org>/results/<system>/resnet, or
    v0.5/<org>/<name>/results and so on."""
    folders = [p.name for p in log.absolute().parents]
    if folders[0] != 'resnet' or 'results' not in folders[2:3]:
        return None
    for name, above in zip(folders[3:5], folders[4:6]):
        if round_of(above):
            return name, FactSource('implied', 'the folder name')
    return None


def round_of(folder: str) -> str | None:
    """Return the round in a folder name such as v2.1, v1.0.0 or training_results_v3.0; None if it
    has none."""
    m = re.fullmatch(r'(?:training_results_)?(v\d\.\d)(?:\.0)?', folder)
    return m[1] if m else None


def _check_numbers(name: str, content: JsonObject) -> Finding | None:
    """Return a warning about the first count of a description that is not a number."""
    places = [
        *((n, ('num_nodes', 'num_accelerators')) for n in objects_at(content, 'nodes')),
        (content, ('number_of_nodes', 'accelerators_per_node')),
    ]
    for part, keys in places:
        for key in keys:
            if _name(str(part.get(key) or '')) and count_in(part[key]) is None:
                return make_finding('description_not_a_number', None, key, name, part[key])
    return None


def describe_entry(content: JsonObject, source: Callable[[str], FactSource]) -> SystemDescription:
    """Return the content of a v0.5 entry.json or of its copy in a v0.6 log. source returns the
    source of a key."""
    nodes = objects_at(content, 'nodes')
    counts = [(count_in(n.get('num_nodes')), count_in(n.get('num_accelerators'))) for n in nodes]
    known = [(num, num * each) for num, each in counts if num is not None and each is not None]
    num_nodes, total = (sum(column) for column in zip(*known)) if known else (None, None)
    return SystemDescription(
        nodes=make_count(num_nodes or None, source('num_nodes')),
        accelerators=make_count(total, source('num_accelerators')),
        accelerator=_names([n.get('accelerator') for n in nodes]),
        framework=_name(content.get('framework')),
    )


def _describe(path: Path, content: JsonObject, text: str) -> SystemDescription:
    def source(key: str) -> FactSource:
        lines = [i for i, line in enumerate(text.splitlines(), start=1) if f'"{key}"' in line]
        return FactSource('described', path.name, lines[0] if lines else None, path)

    if path.name == 'entry.json':
        return describe_entry(content, source)
    if path.parent.name == 'systems':
        num_nodes = count_in(content.get('number_of_nodes'))
        per_node = count_in(content.get('accelerators_per_node'))
        total = num_nodes * per_node if num_nodes is not None and per_node is not None else None
        org = _name(content.get('submitter'))
        return SystemDescription(
            org=(org, source('submitter')) if org else None,
            nodes=make_count(num_nodes or None, source('number_of_nodes')),
            accelerators=make_count(total, source('accelerators_per_node')),
            accelerator=_name(content.get('accelerator_model_name')),
            framework=_name(content.get('framework')),
            node_gbit_s=network_gbit_s(content.get('host_networking')),
        )
    # of env.json; the log has the numbers of nodes and GPUs
    gpus = objects_at(content, 'host', 'hardware', 'gpus')
    return SystemDescription(
        accelerator=_names([g.get('name') for g in gpus]), framework=framework_of(content)
    )
