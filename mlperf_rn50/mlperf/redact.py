"""Takes host names and absolute paths out of what is to be published."""
import re
from collections.abc import Sequence
from typing import Any

from mlperf_rn50.mlperf.description import objects_at, value_at


def redact(value: Any, hosts: Sequence[str]) -> Any:
    """A tree of objects without host names and without absolute paths."""
    if isinstance(value, dict):
        return {k: redact(v, hosts) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(v, hosts) for v in value]
    if not isinstance(value, str):
        return value
    for i, host in enumerate(hosts):
        value = re.sub(rf'(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)', f'node{i + 1}', value)
    return re.sub(r'(?<![\w.])/(?:[\w.@+-]+/)*([\w.@+-]+)', r'\1', value)


def hosts_of(env: dict[str, Any]) -> list[str]:
    """The host names that env.json tells."""
    names = [n.get('hostname') for n in objects_at(env, 'nodes')] + [value_at(env, 'host', 'hostname')]
    return list(dict.fromkeys(n for n in names if isinstance(n, str) and n))
