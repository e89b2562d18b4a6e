"""What a check of the doctor takes and gives: the facts of all ranks, and one line about them."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = dict[str, Any]  # of one rank, as JSON holds it
Status = Literal['ok', 'warning', 'failed', 'not needed']


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, how it came out, what was found, and what to do where it failed."""

    name: str
    status: Status
    found: str
    fix: str = ''


def hosts_of(rows: Sequence[Facts]) -> str:
    """The hosts of some ranks, for a message."""
    return ', '.join(dict.fromkeys(r['host'] for r in rows))


def grouped(rows: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    """The ranks with each value, in the order of their first rank."""
    groups: dict[str, list[Facts]] = {}
    for row in rows:
        groups.setdefault(value(row), []).append(row)
    return groups


def by_node(rows: Sequence[Facts]) -> list[list[Facts]]:
    """The ranks of each node."""
    return list(grouped(rows, lambda r: r['host']).values())
