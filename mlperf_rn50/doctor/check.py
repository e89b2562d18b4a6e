"""Input and result of a doctor check: the facts of all ranks, and one line about them."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = dict[str, Any]  # of one rank, as in JSON
Status = Literal['ok', 'warning', 'failed', 'not needed']


@dataclass(frozen=True)
class Check:
    """Name, status, finding and fix of a check."""

    name: str
    status: Status
    found: str
    fix: str = ''


def hosts_of(rows: Sequence[Facts]) -> str:
    """Return the hosts of ranks as text for a message."""
    return ', '.join(dict.fromkeys(r['host'] for r in rows))


def grouped(rows: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    """Group the ranks by a value, in the order of their first rank."""
    groups: dict[str, list[Facts]] = {}
    for row in rows:
        groups.setdefault(value(row), []).append(row)
    return groups


def by_node(rows: Sequence[Facts]) -> list[list[Facts]]:
    """Group the ranks by node."""
    return list(grouped(rows, lambda r: r['host']).values())
