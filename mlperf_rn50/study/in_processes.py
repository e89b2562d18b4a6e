"""Many logs are read by several processes at once."""
import copyreg
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

_MANY, _AT_ONCE, _MAX_PROCESSES = 64, 32, 8
_Item = TypeVar('_Item')
_Result = TypeVar('_Result')


def _reduce(mapping: MappingProxyType) -> tuple[Any, tuple[Any, ...]]:
    """Between processes, a mapping that nobody may change is one that nobody does."""
    return dict, (dict(mapping),)


copyreg.pickle(MappingProxyType, _reduce)


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _follow_parent() -> None:
    """A process ends with its parent, however that ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _map_part(function: Callable[[_Item], _Result], part: Sequence[_Item]) -> list[_Result]:
    return [function(item) for item in part]


def _submit(pool: ProcessPoolExecutor, function: Callable[[_Item], _Result],
            parts: Sequence[Sequence[_Item]]) -> list[Future[list[_Result]]]:
    """Starts the processes, which a Ctrl-C of the terminal does not reach: their parent ends them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return [pool.submit(_map_part, function, part) for part in parts]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def map_in_processes(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The result for each item, in their order; by several processes where there are many.

    Args:
        function: of a module, so that it can be named to another process; it raises nothing.
    """
    if len(items) <= _MANY or _num_processors() < 2 or threading.active_count() > 1:  # threads survive no fork
        return _map_part(function, items)
    parts = [items[i:i + _AT_ONCE] for i in range(0, len(items), _AT_ONCE)]
    pool = ProcessPoolExecutor(min(_num_processors(), _MAX_PROCESSES, len(parts)), initializer=_follow_parent)
    try:
        return [result for future in _submit(pool, function, parts) for result in future.result()]
    except (BrokenExecutor, OSError):  # killed, or none can be started: the slow way
        return _map_part(function, items)
    finally:
        pool.shutdown(cancel_futures=True)
