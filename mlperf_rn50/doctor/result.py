"""Types and helpers of the doctor's checks: the facts about a rank, and the result of a check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlperf_rn50.text import grouped

Facts = dict[str, Any]  # facts about one rank, as JSON values
Status = Literal['ok', 'warning', 'failed', 'not needed']


@dataclass(frozen=True)
class Check:
    """Result of a check: its name, its status, what it found, and how to fix a problem."""

    name: str
    status: Status
    found: str
    fix: str = ''


def hosts_of(rows: Sequence[Facts]) -> str:
    """Return the host names of ranks, joined by commas, for a message."""
    return ', '.join(dict.fromkeys(r['host'] for r in rows))


def by_node(rows: Sequence[Facts]) -> list[list[Facts]]:
    return list(grouped(rows, lambda r: r['host']).values())
