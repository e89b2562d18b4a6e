"""Which logs are one set? Finds those under some paths, and refuses to pool runs that were not made alike."""
import re
from collections.abc import Sequence
from pathlib import Path

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.reader import OtherBenchmark, read_run
from mlperf_rn50.mlperf.run import LogWarning, Run
from mlperf_rn50.study.convergence import System

# What runs must share to be one set, beside the keys of their optimizer.
_SHARED = ('global_batch_size', 'opt_name', 'target_accuracy', 'num_nodes', 'num_accelerators', 'dataset')


def _is_log_name(path: Path) -> bool:
    return re.fullmatch(r'result_\d+\.txt', path.name) is not None


def _find_logs(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    """The logs that are named, or lie in or below a folder that is, by folder.

    Raises:
        UserError: a path holds none.
    """
    found: dict[Path, dict[Path, None]] = {}
    for path in paths:
        logs = [path] if path.is_file() else sorted(p for p in path.rglob('result_*.txt') if _is_log_name(p))
        if not logs:
            raise UserError(f'{path}: {"no result_<k>.txt in it or below it" if path.exists() else "no such folder"}; '
                            'expected a log or a folder of logs')
        for log in logs:
            found.setdefault(log.parent, {})[log] = None
    return {folder: sorted(logs, key=lambda p: (len(p.name), p.name)) for folder, logs in found.items()}


def _load_run(path: Path) -> Run:
    """A run; a file that is no log is one that did not converge, and says why."""
    try:
        return read_run(path)
    except OtherBenchmark:
        raise
    except UserError as e:
        return Run(path, 'unknown', 'unreadable', warnings=(LogWarning(None, str(e).removeprefix(f'{path}: ')),))


def _check_pool(folder: Path, runs: Sequence[Run]) -> None:
    """Refuses to pool runs that were not made alike.

    Raises:
        UserError: names the field.
    """
    fields = [(name, [(r, r.fact(name)) for r in runs]) for name in _SHARED]
    names = dict.fromkeys(k for r in runs for k in r.optimizer)
    fields += [(key, [(r, r.optimizer.get(key)) for r in runs]) for key in names]
    for name, pairs in fields:
        known = [(r, value) for r, value in pairs if value is not None]
        other = next(((r, value) for r, value in known if value != known[0][1]), None)
        if other:
            raise UserError(f'{folder}: {name} is {known[0][1]} in {known[0][0].path.name} and {other[1]} in '
                            f'{other[0].path.name}; runs that differ in it are no set: report them apart')


def load_systems(paths: Sequence[Path]) -> list[System]:
    """The systems whose ResNet logs lie under some paths, smallest first within a study.

    Folders of other benchmarks, of which a round has many, are left out.

    Raises:
        UserError: a path holds no log, or a folder's runs differ in what a set must share.
    """
    systems = []
    others: list[OtherBenchmark] = []
    for folder, logs in _find_logs(paths).items():
        try:
            runs = tuple(map(_load_run, logs))
        except OtherBenchmark as e:
            others.append(e)
            continue
        _check_pool(folder, runs)
        home = folder.absolute()
        if home.name == 'resnet':  # <system>/resnet/result_<k>.txt of a submission
            home = home.parent
        systems.append(System(home.name, folder, home.parent, runs))
    if not systems:
        raise others[0]
    unreadable = [r for s in systems for r in s.runs if r.status == 'unreadable']
    if len(unreadable) == sum(len(s.runs) for s in systems):
        raise UserError(f'{unreadable[0].path}: {unreadable[0].warnings[0].text}')
    return sorted(systems, key=lambda s: (str(s.study), s.num_units or 0, s.num_nodes or 0, s.name))
