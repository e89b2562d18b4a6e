"""Reads the system description beside a log: entry.json (v0.5), systems/<system>.json (later), our env.json."""
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlperf_rn50.files import regular_file
from mlperf_rn50.mlperf.run import Source

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Description:
    """What a system description says of the hardware.

    Args:
        path: the file.
        org: who submitted, and where that is said.
        num_nodes: number of nodes.
        num_accelerators: of all nodes, or of one.
        is_of_one_node: whether num_accelerators is of one node.
        nodes_line, accelerators_line: where the file says so.
        accelerator: its model.
        framework: with its version.
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
    if isinstance(value, str) and re.fullmatch(r'\d{1,9}', value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None


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
        found = _describe(path, _load(path))
        text = path.read_text('utf-8', 'replace')
        nodes, accelerators = (_line_of(text, *keys) for keys in (('number_of_nodes', 'num_nodes'), (
            'accelerators_per_node', 'num_accelerators', 'gpus')))
        return replace(found, nodes_line=nodes, accelerators_line=accelerators), None
    except (OSError, ValueError) as e:
        return None, f'{path.name} cannot be read: {str(e)[:200]}; left out'


def _named_org(file: Path, content: dict[str, Any], key: str) -> tuple[str, Source] | None:
    """Who submits, as a file says."""
    org = _name(content.get(key))
    if org is None:
        return None
    return org, Source('described', file.name, _line_of(file.read_text('utf-8', 'replace'), key), file)


def _org_of(submission: Path) -> tuple[str, Source]:
    """Who made a v0.5 submission: its submission.json, else the name of its folder."""
    file = submission / 'submission.json'
    try:
        named = _named_org(file, _load(file), 'org')
    except (OSError, ValueError):
        named = None
    return named or (submission.name, Source('implied', 'the name of a folder'))


def org_of_folder(log: Path) -> tuple[str, Source] | None:
    """Who submits, as the tree of a round is named: v0.6/<org>/results/<system>/resnet/result_0.txt."""
    folders = log.absolute().parents
    if len(folders) < 5 or folders[0].name != 'resnet' or folders[2].name != 'results' or not round_of(folders[4].name):
        return None
    return folders[3].name, Source('implied', 'the name of a folder')


def round_of(folder: str) -> str | None:
    """The round that a folder is named after: v2.1, v1.0.0, training_results_v3.0."""
    m = re.fullmatch(r'(?:training_results_)?(v\d\.\d)(?:\.0)?', folder)
    return m[1] if m else None


def _line_of(text: str, *keys: str) -> int | None:
    """The first line that holds one of some keys."""
    return next((i for i, line in enumerate(text.splitlines(), start=1) if any(f'"{k}"' in line for k in keys)), None)


def _describe(path: Path, content: dict[str, Any]) -> Description:
    if path.name == 'entry.json':
        listed = content.get('nodes')
        nodes = [n for n in listed if isinstance(n, dict)] if isinstance(listed, list) else []
        counts = [(_count(n.get('num_nodes')), _count(n.get('num_accelerators'))) for n in nodes]
        known = [(n, a) for n, a in counts if n is not None and a is not None]
        return Description(path, _org_of(path.parent.parent.parent), sum(n for n, _ in known) if known else None,
                           sum(n * a for n, a in known) if known else None,
                           accelerator=_names([n.get('accelerator') for n in nodes]),
                           framework=_name(content.get('framework')))
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
