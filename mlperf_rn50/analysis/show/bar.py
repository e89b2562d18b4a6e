"""Progress bar of commands that read or draw for a long time."""

import sys
from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar('_T')


def track(items: Iterable[_T], total: int, name: str) -> Iterable[_T]:
    """Return the items. If stderr is a terminal, a progress bar is shown until the last one."""
    if sys.stderr is None or not sys.stderr.isatty():
        return items
    from rich import console, progress  # slow to import

    return progress.track(items, name, total, console=console.Console(stderr=True), transient=True)
