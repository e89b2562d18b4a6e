"""Reads the system description beside a log: entry.json (v0.5), systems/<system>.json (later), our env.json."""
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_rn50.files import parse_json, regular_file
from mlperf_rn50.mllog.run import FactSource

_MAX_BYTES = 1 << 20


class Count(NamedTuple):
    """How many there are, and where it comes from."""

    number: int
    source: FactSource


def counted(number: int | None, source: FactSource) -> Count | None:
    """Return a count; None without a number."""
    return None if number is None else Count(number, source)


@dataclass(frozen=True)
class SystemDescription:
    """What a system description says of the hardware."""

    org: tuple[str, FactSource] | None = None
    nodes: Count | None = None
    accelerators: Count | None = None  # of all nodes
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


def load_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the object of a JSON file, and the text that it is made of.

    Raises:
        ValueError: there is no such file, or it cannot be read, is too large or no object; the text is the reason.
    """
    try:
        with open(path, encoding='utf-8', errors='replace', opener=regular_file) as f:
            text = f.read(_MAX_BYTES + 1)
    except OSError as e:
        raise ValueError(e.strerror) from e
    if len(text) > _MAX_BYTES:
        raise ValueError(f'is larger than {_MAX_BYTES} bytes')
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError('is not a JSON object')
    return content, text


def load_env(log: Path) -> dict[str, Any]:
    """Return the env.json of one of our runs; empty where there is none that can be read."""
    try:
        return load_object(beside(log, 'env', '.json'))[0]
    except ValueError:
        return {}


def value_at(env: dict[str, Any], *names: str) -> Any:
    """What lies at the end of some names in a tree of objects; '' where it does not."""
    for name in names:
        env = env.get(name) if isinstance(env, dict) else None  # type: ignore[assignment]
    return '' if env is None else env


def object_at(env: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the object that lies there; an empty one where there is none."""
    found = value_at(env, *names)
    return found if isinstance(found, dict) else {}


def objects_at(env: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """The objects of a list that lies there; none where there is no list."""
    found = value_at(env, *names)
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def framework_of(env: dict[str, Any]) -> str | None:
    """The framework that an env.json names."""
    packages = object_at(env, 'packages')
    return next((_name(f'MXNet {v}') for k, v in packages.items() if k.startswith('mxnet')), None)


def find_description(log: Path) -> tuple[SystemDescription, str | None]:
    """Return the description of a log, an empty one without a file, and what is wrong with its file."""
    try:
        path = next((p for p in _places(log.absolute()) if p.is_file()), None)
    except OSError as e:  # a folder that may not be entered
        return SystemDescription(), f'{Path(e.filename).name} cannot be read: {e.strerror}; left out'
    if path is None:
        return SystemDescription(), None
    try:
        content, text = load_object(path)
    except ValueError as e:
        return SystemDescription(), f'{path.name} cannot be read: {str(e)[:200]}; left out'
    return _describe(path, content, text), _unread(path.name, content)


def org_of_folder(log: Path) -> tuple[str, FactSource] | None:
    """Who submits, as the tree of a round is named: v0.6/<org>/results/<system>/resnet/result_0.txt, in v0.5 perhaps
    with a folder of the submission after that of <org>."""
    folders = [p.name for p in log.absolute().parents]
    if folders[0] != 'resnet' or 'results' not in folders[2:3]:
        return None
    org = next((name for name, above in zip(folders[3:5], folders[4:6]) if round_of(above)), None)
    return (org, FactSource('implied', 'the name of a folder')) if org else None


def round_of(folder: str) -> str | None:
    """The round that a folder is named after: v2.1, v1.0.0, training_results_v3.0."""
    m = re.fullmatch(r'(?:training_results_)?(v\d\.\d)(?:\.0)?', folder)
    return m[1] if m else None


def _line_of(text: str, *keys: str) -> int | None:
    """The first line that holds one of some keys."""
    return next((i for i, line in enumerate(text.splitlines(), start=1) if any(f'"{k}"' in line for k in keys)), None)


def _unread(name: str, content: dict[str, Any]) -> str | None:
    """Says that a number of a description is none."""
    places = [*((n, ('num_nodes', 'num_accelerators')) for n in objects_at(content, 'nodes')),
              (content, ('number_of_nodes', 'accelerators_per_node'))]
    bad = next(((key, d[key]) for d, keys in places for key in keys
                if _name(str(d.get(key) or '')) and _count(d[key]) is None), None)
    return f'{name} says {bad[0]} is {bad[1]!r:.80}, which is no number; left out' if bad else None


def _describe(path: Path, content: dict[str, Any], text: str) -> SystemDescription:
    def source(key: str) -> FactSource:
        return FactSource('described', path.name, _line_of(text, key), path)
    if path.name == 'entry.json':
        nodes = objects_at(content, 'nodes')
        counts = [(_count(n.get('num_nodes')), _count(n.get('num_accelerators'))) for n in nodes]
        known = [(num, num * each) for num, each in counts if num is not None and each is not None]
        num_nodes, total = (sum(column) for column in zip(*known)) if known else (None, None)
        return SystemDescription(None, counted(num_nodes or None, source('num_nodes')),
                           counted(total, source('num_accelerators')),
                           _names([n.get('accelerator') for n in nodes]), _name(content.get('framework')))
    if path.parent.name == 'systems':
        num_nodes, per_node = _count(content.get('number_of_nodes')), _count(content.get('accelerators_per_node'))
        org = _name(content.get('submitter'))
        return SystemDescription((org, source('submitter')) if org else None,
                           counted(num_nodes or None, source('number_of_nodes')),
                           counted(num_nodes * per_node if num_nodes is not None and per_node is not None else None,
                                   source('accelerators_per_node')),
                           _name(content.get('accelerator_model_name')), _name(content.get('framework')))
    gpus = objects_at(content, 'host', 'hardware', 'gpus')  # our env.json: the log itself counts nodes and GPUs
    return SystemDescription(accelerator=_names([g.get('name') for g in gpus]), framework=framework_of(content))
