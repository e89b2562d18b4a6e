"""Which logs are one set? Finds those under some paths, and refuses to pool runs that were not made alike."""
import copyreg
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlperf_rn50.analysis.sets.convergence import System
from mlperf_rn50.errors import UserError
from mlperf_rn50.files import walk
from mlperf_rn50.mllog import keys
from mlperf_rn50.mllog.package.duplicates import Copy, find_copies
from mlperf_rn50.mllog.read.reader import OtherBenchmark, read_run
from mlperf_rn50.mllog.run import LogWarning, Run

# What runs must share to be one set, beside the keys of their optimizer.
_SHARED = ('global_batch_size', 'opt_name', 'target_accuracy', 'num_nodes', 'num_accelerators', 'dataset', 'round',
           'division', 'is_imagenet', 'train_samples', 'eval_samples')
# Facts that are the rules' or ImageNet's where a log says nothing, and the keys of which one says them.
_SAID_BY = {'is_imagenet': (keys.TRAIN_SAMPLES, 'dataset'), 'train_samples': (keys.TRAIN_SAMPLES,),
            'eval_samples': (keys.EVAL_SAMPLES,)}
_MAX_VALUE = 80  # characters of a value in a sentence
# More logs than _MANY are read by several processes, _AT_ONCE in a piece.
_MANY, _AT_ONCE, _MAX_PROCESSES = 64, 32, 8


def _logs_below(path: Path) -> tuple[list[Path], list[OSError]]:
    """The logs in or below a folder, or the log itself, and what could not be listed."""
    if os.path.isfile(path):
        return [path], []
    faults: list[OSError] = []
    logs = [Path(folder, name) for folder, folders, names in walk(path, faults.append)
            for name in (*folders, *names) if re.fullmatch(r'result_\d+\.txt', name)]
    return sorted(logs), faults


def _find_logs(paths: Sequence[Path]) -> tuple[dict[Path, list[Path]], list[OSError]]:
    """The logs that paths are or hold, by folder, and what cannot be listed; raise UserError where one has none."""
    found: dict[Path, dict[Path, None]] = {}
    faults: dict[str, OSError] = {}
    for path in paths:
        logs, own_faults = _logs_below(path)
        if not logs and all(isinstance(e, (FileNotFoundError, NotADirectoryError)) for e in own_faults):
            why = ('no such folder' if not os.path.lexists(path) else 'neither a file nor a folder' if own_faults else
                   'no result_<k>.txt in it or below it')
            raise UserError(f'{path}: {why}; expected a log or a folder of logs')
        for log in logs:
            found.setdefault(log.parent, {})[log] = None
        faults.update((e.filename, e) for e in own_faults)
    return ({folder: sorted(logs, key=lambda p: (len(p.name), p.name)) for folder, logs in found.items()},
            list(faults.values()))


def _unreadable(path: Path, *whys: str) -> Run:
    return Run(path, 'unknown', 'unreadable', warnings=tuple(LogWarning(None, why, True) for why in whys))


def _load_run(path: Path) -> Run | OtherBenchmark:
    """A run; a file that is no log is one that did not converge, and says why."""
    try:
        return read_run(path)
    except OtherBenchmark as e:
        return e
    except UserError as e:
        return _unreadable(path, str(e).removeprefix(f'{path}: '))


def _reduce(mapping: MappingProxyType) -> tuple[Any, tuple[Any, ...]]:
    return dict, (dict(mapping),)


copyreg.pickle(MappingProxyType, _reduce)  # a run has some


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it, also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _load_runs(logs: Sequence[Path]) -> list[Run | OtherBenchmark]:
    """What each log has, in their order; of many, read by several processes."""
    if len(logs) <= _MANY or _num_processors() < 2 or threading.active_count() > 1:  # threads survive no fork
        return list(map(_load_run, logs))
    try:
        with ProcessPoolExecutor(min(_num_processors(), _MAX_PROCESSES), initializer=_follow_parent) as pool:
            return list(pool.map(_load_run, logs, chunksize=_AT_ONCE))
    except (BrokenExecutor, OSError):  # a worker was killed, or none can be started
        return list(map(_load_run, logs))


def _make_set(logs: Sequence[Path], loaded: Sequence[Run | OtherBenchmark]) -> tuple[Run, ...] | OtherBenchmark:
    """The runs of a folder; a log of another benchmark among those of ResNet is one that cannot be read."""
    others = [x for x in loaded if isinstance(x, OtherBenchmark)]
    if others and not any(isinstance(x, Run) and x.status != 'unreadable' for x in loaded):
        return others[0]
    return tuple(x if isinstance(x, Run) else _unreadable(log, str(x).removeprefix(f'{log}: '))
                 for log, x in zip(logs, loaded))


def _said(run: Run, name: str) -> Any:
    """A fact that its log or description says; None where it is only supposed."""
    is_said = name not in _SAID_BY or any(key in run.lines for key in _SAID_BY[name])
    return run.fact(name) if is_said else None


def _find_difference(runs: Sequence[Run]) -> str | None:
    """What says that runs were not made alike: the field, its values and the files."""
    runs = [r for r in runs if r.status != 'unreadable']
    fields = [(name, [(r, _said(r, name)) for r in runs]) for name in _SHARED]
    names = dict.fromkeys(k for r in runs for k in r.optimizer)
    fields += [(key, [(r, r.optimizer.get(key)) for r in runs]) for key in names]
    for name, pairs in fields:
        known = [(r, value) for r, value in pairs if value is not None]
        other = next(((r, value) for r, value in known if value != known[0][1]), None)
        if other:
            first, second = (f'{str(value)[:_MAX_VALUE]} in {r.path.name}' for r, value in (known[0], other))
            return f'{name} is {first} and {second}; runs that differ in it are no set: report them apart'
    return None


def _find_submitters(runs: Sequence[Run]) -> list[str]:
    """What says that the logs of a set name several submitters."""
    named: dict[str, Run] = {}
    for run in runs:
        if run.org:
            named.setdefault(''.join(c for c in run.org.casefold() if c.isalnum()), run)
    if len(named) < 2:
        return []
    texts = [f'{str(r.org)[:_MAX_VALUE]!r} in {r.path.name}' for r in islice(named.values(), 3)]
    return [f'the logs name {len(named)} submitters, a set has one: {", ".join(texts)}']


def _find_foreign(systems: Sequence[System]) -> list[System]:
    """The systems, of which those know it whose logs are copies of another's before them."""
    homes = {id(r): i for i, s in enumerate(systems) for r in s.runs}
    found: dict[int, dict[int, list[Copy]]] = {i: {} for i in range(len(systems))}
    for copy in find_copies([r for s in systems for r in s.runs]):
        home, other = homes[id(copy.run)], homes[id(copy.original)]
        if home != other:
            found[home].setdefault(other, []).append(copy)
    return [replace(s, doubts=(*s.doubts, *(_foreign_text(s, systems[i], copies) for i, copies in found[k].items())),
                    is_copy=sum(map(len, found[k].values())) == len(s.runs)) for k, s in enumerate(systems)]


def _foreign_text(system: System, other: System, copies: Sequence[Copy]) -> str:
    name = other.name if other.name != system.name else str(other.folder)
    if len(copies) == 1:
        copy = copies[0]
        return f'{copy.run.path.name} has the times of {copy.original.path.name} of {name}: one is a copy of the other'
    which = f'all {len(copies)}' if len(copies) == len(system.runs) else f'{len(copies)} of {len(system.runs)}'
    return f'{which} logs have the times of logs of {name}: they are copies, not runs of another system'


def _make_system(folder: Path, runs: tuple[Run, ...], refusal: str | None) -> System:
    home = folder.absolute()
    if home.name == 'resnet':  # <system>/resnet/result_<k>.txt of a submission
        home = home.parent
    return System(home.name, folder, home.parent, runs, refusal, tuple(_find_submitters(runs)))


def _unread_system(fault: OSError) -> System:
    """A folder that could not be listed, in the place of what may be in it."""
    folder = Path(fault.filename)
    return _make_system(folder, (_unreadable(folder),), f'the folder cannot be read: {fault.strerror}')


def load_systems(paths: Sequence[Path]) -> list[System]:
    """The systems whose ResNet logs lie under some paths, smallest first within a study.

    Folders of other benchmarks, of which a round has many, are left out. One whose runs differ in what a set must
    share, or that cannot be read, is a system with a refusal.

    Raises:
        UserError: a path holds no log, or there is nothing but what is no log.
    """
    found, faults = _find_logs(paths)
    systems = [_unread_system(fault) for fault in faults]
    others: list[OtherBenchmark] = []
    loaded = iter(_load_runs([log for logs in found.values() for log in logs]))
    for folder, logs in found.items():
        runs = _make_set(logs, [next(loaded) for _ in logs])
        if isinstance(runs, OtherBenchmark):
            others.append(runs)
        else:
            systems.append(_make_system(folder, runs, _find_difference(runs)))
    if not systems:
        raise others[0]
    if all(r.status == 'unreadable' for s in systems for r in s.runs) and not faults:
        run = systems[0].runs[0]
        raise UserError(f'{run.path}: {run.warnings[0].text}')
    return _find_foreign(sorted(systems, key=lambda s: (str(s.study), s.num_units or 0, s.num_nodes or 0, s.name)))
