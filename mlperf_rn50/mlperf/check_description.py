"""The descriptions in a submission tree: what is wrong with them, and what they still leave open."""
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from mlperf_rn50.files import parse_json, read_text
from mlperf_rn50.mlperf.describe_system import NUMBERS, find_gaps

_MAX_BYTES = 1 << 20  # of a description
# The counts of a node in entry.json of v0.5, and the least that each can be.
_NODE_COUNTS = {'num_nodes': 1, 'num_cores': 0, 'num_vcpus': 0, 'num_accelerators': 0}


def check_description(home: Path, system: str, round_name: str,
                      divisions: Set[str | None]) -> tuple[list[str], list[str]]:
    """What is wrong with the description of a system, and what it leaves open, a sentence each.

    Args:
        home: the tree of the organisation.
        system: the name of its folder in results.
        round_name: one of ROUNDS.
        divisions: those that its logs name.
    """
    is_v05 = round_name == 'v0.5'
    path = home / (f'results/{system}/entry.json' if is_v05 else f'systems/{system}.json')
    where = path.relative_to(home)
    content, fault = _load(path)
    if content is None:
        return [f'{where}: {fault}'], []
    flaws = _check_nodes(content) if is_v05 else [
        f'{k} is {content[k]!r:.40}, expected a whole number' for k in NUMBERS
        if k in content and not _is_count(content[k])]
    flaws += [f'division is {str(content.get("division")):.40}, the logs say {logged}'
              for logged in sorted(map(str, divisions)) if content.get('division') != logged]
    gaps = find_gaps(content)
    return [f'{where}: {flaw}' for flaw in flaws], [f'{where} says nothing of {", ".join(gaps)}'] if gaps else []


def check_submitter(home: Path, round_name: str) -> list[str]:
    """What is wrong with submission.json, which v0.5 alone has."""
    if round_name != 'v0.5':
        return []
    content, fault = _load(home / 'submission.json')
    if content is None:
        return [f'submission.json: {fault}']
    org, email = content.get('org'), content.get('poc_email', '')
    flaws = [] if isinstance(org, str) and org.strip() else [f'org is {org!r:.40}, expected the name of who submits']
    flaws += [] if isinstance(email, str) else [f'poc_email is {email!r:.40}, expected an address']
    return [f'submission.json: {flaw}' for flaw in flaws]


def _load(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The object of a JSON file; None and why where there is none."""
    if not path.is_file():
        return None, 'is no file' if path.exists() else 'is missing'
    try:
        content = parse_json(read_text(path, _MAX_BYTES))
    except OSError as e:
        return None, f'cannot be read: {e.strerror}'
    except ValueError as e:
        return None, str(e)[:200]
    return (content, '') if isinstance(content, dict) else (None, 'is no JSON object')


def _is_count(value: object, least: int = 0) -> bool:
    """Whether it is a whole number of up to nine digits, or one written as text."""
    return (not isinstance(value, bool) and isinstance(value, (int, str))
            and bool(re.fullmatch(r'[0-9]{1,9}', str(value))) and int(value) >= least)


def _check_nodes(entry: Mapping[str, Any]) -> list[str]:
    """What is wrong with the nodes of entry.json."""
    nodes = entry.get('nodes')
    if not isinstance(nodes, list) or not nodes:
        return [f'nodes is {nodes!r:.40}, expected a list of objects']
    flaws = [f'nodes[{i}] is {node!r:.40}, expected an object' for i, node in enumerate(nodes)
             if not isinstance(node, dict)]
    return flaws + [f'nodes[{i}].{k} is {node.get(k)!r:.40}, expected a whole number' + ' above 0' * (least > 0)
                    for i, node in enumerate(nodes) if isinstance(node, dict) for k, least in _NODE_COUNTS.items()
                    if not _is_count(node.get(k), least)]
