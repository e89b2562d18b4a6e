"""Map a function over many items in several processes."""
import copyreg
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

_MANY, _AT_ONCE, _MAX_PROCESSES = 64, 32, 8
_Item = TypeVar('_Item')
_Result = TypeVar('_Result')


def _reduce(mapping: MappingProxyType) -> tuple[Any, tuple[Any, ...]]:
    return dict, (dict(mapping),)


copyreg.pickle(MappingProxyType, _reduce)


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it, also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def map_in_processes(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the result for each item in order. `function` is of a module, so that it can be pickled."""
    if len(items) <= _MANY or _num_processors() < 2 or threading.active_count() > 1:  # threads survive no fork
        return list(map(function, items))
    try:
        with ProcessPoolExecutor(min(_num_processors(), _MAX_PROCESSES), initializer=_follow_parent) as pool:
            return list(pool.map(function, items, chunksize=_AT_ONCE))
    except (BrokenExecutor, OSError):  # a worker was killed, or none can be started
        return list(map(function, items))
