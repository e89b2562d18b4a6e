"""Reads the system description beside a log: entry.json (v0.5), systems/<system>.json (later), our env.json."""
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlperf_rn50.files import regular_file
from mlperf_rn50.mlperf.run import Source

_MAX_BYTES = 1 << 20
_MAX_OF_A_NODE = 16  # accelerators


@dataclass(frozen=True)
class Description:
    """What a system description says of the hardware.

    Args:
        num_accelerators: of all nodes, or of one where is_of_one_node.
    """

    path: Path
    org: tuple[str, Source] | None
    num_nodes: int | None
    num_accelerators: int | None
    is_of_one_node: bool = False
    nodes_line: int | None = None
    accelerators_line: int | None = None
    accelerator: str | None = None
    framework: str | None = None


def _count(value: Any) -> int | None:
    """A count, which later rounds write as text."""
    if isinstance(value, str) and re.fullmatch(r'\d{1,9}(\.0+)?', value.strip(), re.ASCII):
        return int(float(value))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < 10**9 and value == int(value) else None


def _name(value: Any) -> str | None:
    """The name of a thing in one line; None where nothing is named."""
    text = ' '.join(value[:1000].split()) if isinstance(value, str) else ''
    return text if text.upper() not in ('', 'N/A', 'NONE', '-') else None


def _names(values: list[Any]) -> str | None:
    """Different names, one after another."""
    return ' + '.join(dict.fromkeys(name for v in values if (name := _name(v)))) or None


def beside(log: Path, stem: str, suffix: str) -> Path:
    """The file of a run of ours that lies beside its log: result_2.txt has config_2.yaml, result_0.txt config.yaml."""
    m = re.fullmatch(r'result_(\d+)(?:_v0\.6)?', log.stem)
    return log.with_name(f'{stem}{f"_{m[1]}" if m and m[1] != "0" else ""}{suffix}')


def _places(log: Path) -> list[Path]:
    """Where the description of a log may lie, the nearest first."""
    system = log.parent.parent
    return [beside(log, 'env', '.json'), system / 'entry.json',
            system.parent.parent / 'systems' / f'{system.name}.json']


def _load(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        ValueError: it is too large or no object; says why.
        OSError: it cannot be read.
    """
    with open(path, encoding='utf-8', errors='replace', opener=regular_file) as f:
        text = f.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f'is larger than {_MAX_BYTES} bytes')
    try:
        content = json.loads(text)
    except RecursionError as e:
        raise ValueError('is nested too deeply') from e
    if not isinstance(content, dict):
        raise ValueError('is not a JSON object')
    return content


def load_env(log: Path) -> dict[str, Any]:
    """The env.json of one of our runs; empty where there is none that can be read."""
    try:
        return _load(beside(log, 'env', '.json'))
    except (OSError, ValueError):
        return {}


def value_at(env: dict[str, Any], *names: str) -> Any:
    """What lies at the end of some names in a tree of objects; '' where it does not."""
    for name in names:
        env = env.get(name) if isinstance(env, dict) else None  # type: ignore[assignment]
    return '' if env is None else env


def objects_at(env: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """The objects of a list that lies there; none where there is no list."""
    found = value_at(env, *names)
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def framework_of(env: dict[str, Any]) -> str | None:
    """The framework that an env.json names."""
    packages = value_at(env, 'packages')
    versions = packages if isinstance(packages, dict) else {}
    return next((_name(f'MXNet {v}') for k, v in versions.items() if str(k).startswith('mxnet')), None)


def find_description(log: Path) -> tuple[Description | None, str | None]:
    """The description of a log, and what is wrong with its file; None for what there is not."""
    try:
        path = next((p for p in _places(log.absolute()) if p.is_file()), None)
    except OSError as e:  # a folder that may not be entered
        return None, f'{Path(e.filename).name} cannot be read: {e.strerror}; left out'
    if path is None:
        return None, None
    try:
        content = _load(path)
        found = _describe(path, log.absolute(), content)
        text = path.read_text('utf-8', 'replace')
        nodes, accelerators = (_line_of(text, *keys) for keys in (('number_of_nodes', 'num_nodes'), (
            'accelerators_per_node', 'num_accelerators', 'gpus')))
        return replace(found, nodes_line=nodes, accelerators_line=accelerators), _unread(path.name, content)
    except (OSError, ValueError) as e:
        return None, f'{path.name} cannot be read: {str(e)[:200]}; left out'


def _named_org(file: Path, content: dict[str, Any], key: str) -> tuple[str, Source] | None:
    """Who submits, as a file says."""
    org = _name(content.get(key))
    if org is None:
        return None
    return org, Source('described', file.name, _line_of(file.read_text('utf-8', 'replace'), key), file)


def _org_of(log: Path) -> tuple[str, Source]:
    """Who made a v0.5 submission: its submission.json, else the name of a folder."""
    submission = log.parent.parent.parent.parent
    file = submission / 'submission.json'
    try:
        named = _named_org(file, _load(file), 'org')
    except (OSError, ValueError):
        named = None
    return named or org_of_folder(log) or (submission.name, Source('implied', 'the name of a folder'))


def org_of_folder(log: Path) -> tuple[str, Source] | None:
    """Who submits, as the tree of a round is named: v0.6/<org>/results/<system>/resnet/result_0.txt, in v0.5 perhaps
    with a folder of the submission after that of <org>."""
    folders = [p.name for p in log.absolute().parents]
    if folders[0] != 'resnet' or 'results' not in folders[2:3]:
        return None
    org = next((name for name, above in zip(folders[3:5], folders[4:6]) if round_of(above)), None)
    return (org, Source('implied', 'the name of a folder')) if org else None


def round_of(folder: str) -> str | None:
    """The round that a folder is named after: v2.1, v1.0.0, training_results_v3.0."""
    m = re.fullmatch(r'(?:training_results_)?(v\d\.\d)(?:\.0)?', folder)
    return m[1] if m else None


def _line_of(text: str, *keys: str) -> int | None:
    """The first line that holds one of some keys."""
    return next((i for i, line in enumerate(text.splitlines(), start=1) if any(f'"{k}"' in line for k in keys)), None)


def _nodes(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The kinds of nodes that an entry.json lists, and some later descriptions."""
    return objects_at(content, 'nodes')


def _unread(name: str, content: dict[str, Any]) -> str | None:
    """Says that a number of a description is none."""
    places = [*((n, ('num_nodes', 'num_accelerators')) for n in _nodes(content)),
              (content, ('number_of_nodes', 'accelerators_per_node'))]
    bad = next(((key, d[key]) for d, keys in places for key in keys
                if _name(str(d.get(key) or '')) and _count(d[key]) is None), None)
    return f'{name} says {bad[0]} is {bad[1]!r:.80}, which is no number; left out' if bad else None


def _of_all(node: dict[str, Any]) -> tuple[int, int] | None:
    """Nodes of a kind, and the accelerators of all of them, which a few list as those of each: 512 of "pod-512"."""
    nodes, each = _count(node.get('num_nodes')), _count(node.get('num_accelerators'))
    if nodes is None or each is None:
        return None
    is_whole = each > _MAX_OF_A_NODE and re.search(rf'(?<!\d){each}(?!\d)', _name(node.get('accelerator')) or '')
    return nodes, each if is_whole else nodes * each


def _describe_nodes(path: Path, content: dict[str, Any], org: tuple[str, Source] | None) -> Description:
    nodes = _nodes(content)
    known = [pair for n in nodes if (pair := _of_all(n))]
    return Description(path, org, sum(n for n, _ in known) if known else None,
                       sum(a for _, a in known) if known else None,
                       accelerator=_names([n.get('accelerator') for n in nodes]),
                       framework=_name(content.get('framework')))


def _describe(path: Path, log: Path, content: dict[str, Any]) -> Description:
    if path.name == 'entry.json':
        return _describe_nodes(path, content, _org_of(log))
    if path.parent.name == 'systems' and _nodes(content):
        return _describe_nodes(path, content, _named_org(path, content, 'submitter'))
    if path.parent.name == 'systems':
        num_nodes, per_node = _count(content.get('number_of_nodes')), _count(content.get('accelerators_per_node'))
        return Description(path, _named_org(path, content, 'submitter'), num_nodes,
                           num_nodes * per_node if num_nodes is not None and per_node is not None else None,
                           accelerator=_name(content.get('accelerator_model_name')),
                           framework=_name(content.get('framework')))
    host = content.get('host')
    gpus = host.get('gpus') if isinstance(host, dict) else None
    return Description(path, None, _count(content.get('num_nodes')), len(gpus) if isinstance(gpus, list) else None,
                       is_of_one_node=True,
                       accelerator=_names([g.get('name') for g in objects_at(content, 'host', 'hardware', 'gpus')]),
                       framework=framework_of(content))
