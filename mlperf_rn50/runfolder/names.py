"""Files of a run. A folder may contain several numbered runs; nothing is overwritten.

Run 0 owns result_0.txt, config.yaml, metrics.jsonl, env.json, train.log, checkpoints/ and weights/;
run k owns result_k.txt, config_k.yaml and so on. .run_k.lock reserves the number k, and is locked
while a program writes run k.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mlperf_rn50.errors import StorageError, UserError
from mlperf_rn50.files import check_exists, files_below, make_folder, writing_folder
from mlperf_rn50.text import grouped

CHECKPOINT_PREFIX = 'step_'
_RESULT = r'result_(\d{1,15})'
LOG = _RESULT + r'\.txt'  # name of the log of a run
PACKED_LOG = LOG + r'\.(?:gz|xz|zst|bz2|zip|7z)'
# Names of files and folders that contain the number of their run.
_NUMBERED = re.compile(
    r'(?:result|config|metrics|env|train|telemetry|trace|tensorboard|checkpoints|weights)_(\d+).*'
)
# of run 0
_FIRST = {
    'config.yaml',
    'metrics.jsonl',
    'env.json',
    'train.log',
    'tensorboard',
    'checkpoints',
    'weights',
}


@dataclass(frozen=True)
class _NumberedPath:
    """Path that contains the number of its run; first: text that replaces the number for run 0."""

    stem: str
    suffix: str = ''
    first: str = ''

    def __get__(self, run: 'RunFolder', _: object) -> Path:
        return run.dir / f'{self.stem}{f"_{run.index}" if run.index else self.first}{self.suffix}'


@dataclass(frozen=True)
class RunFolder:
    """Paths of run number `index` in folder `dir`."""

    dir: Path
    index: int
    config = _NumberedPath('config', '.yaml')
    metrics = _NumberedPath('metrics', '.jsonl')
    env = _NumberedPath('env', '.json')
    train_log = _NumberedPath('train', '.log')
    tensorboard = _NumberedPath('tensorboard')
    checkpoints = _NumberedPath('checkpoints')
    weights = _NumberedPath('weights')
    result = _NumberedPath('result', '.txt', first='_0')
    result_v06 = _NumberedPath('result', '_v0.6.txt', first='_0')
    lock = _NumberedPath('.run', '.lock', first='_0')

    def telemetry(self, host: str) -> Path:
        """Return the path of a node's samples; characters of the host name that are unsafe in file
        names become _."""
        safe = re.sub(r'[^\w.-]', '_', host)
        return self.dir / f'telemetry_{self.index}_{safe}.jsonl'

    @property
    def trace_request(self) -> Path:
        """Path of an empty file that requests a trace of a running job."""
        return self.dir / 'trace'

    def trace(self, rank: int) -> Path:
        """Return the path of a rank's traced steps."""
        return self.dir / f'trace_{self.index}_{rank}.jsonl'


def run_number(name: str) -> int | None:
    """Return k if the name of a file is result_<k>.txt, otherwise None."""
    m = re.fullmatch(LOG, name)
    return int(m[1]) if m else None


def packed_logs(names: Sequence[str]) -> list[str]:
    """Return the names of packed logs, without those that are also there unpacked."""
    packed = (name for name in names if re.fullmatch(PACKED_LOG, name))
    return sorted(name for name in packed if name.rpartition('.')[0] not in names)


def run_of(log: Path) -> RunFolder:
    """Return the run that wrote a log, result_<k>.txt or result_<k>_v0.6.txt; for a log with
    another name a run without files, because those in its folder may be of another log."""
    m = re.fullmatch(_RESULT + r'(?:_v0\.6)?', log.stem)
    return RunFolder(log.parent, int(m[1]) if m else -1)


def folder_index(folder: Path) -> int:
    """Return the number of the run that owns a folder such as weights_3; 0 for a name without a
    number."""
    digits = folder.name.rpartition('_')[2]
    return int(digits) if digits.isdecimal() else 0


def host_of(telemetry: Path) -> str:
    return telemetry.stem.split('_', 2)[-1]


def find_telemetry(folder: Path) -> dict[int, list[Path]]:
    """Return the telemetry files in a folder by run number; the files of each run are sorted by
    name."""
    with suppress(OSError):
        paths = [
            p for p in folder.iterdir() if re.fullmatch(r'telemetry_\d{1,15}_.+\.jsonl', p.name)
        ]
        return grouped(sorted(paths), lambda p: int(p.name.split('_')[1]))
    return {}


def check_present(run: RunFolder) -> None:
    """Raise StorageError if the log has vanished from the run folder, for example after a lost
    mount."""
    if not run.result.exists():
        raise StorageError(
            f'{run.dir}: {run.result.name} has vanished, perhaps with a mount; restore the folder, '
            'and resume from the last checkpoint'
        )


def list_runs(folder: Path) -> list[RunFolder]:
    """Return the runs of a folder, oldest first; none if it is missing."""
    numbers = [k for p in folder.glob('result_*.txt') if (k := run_number(p.name)) is not None]
    return [RunFolder(folder, number) for number in sorted(numbers)]


def newest_run(folder: Path) -> RunFolder | None:
    return next(reversed(list_runs(folder)), None)


def run_at(path: Path) -> RunFolder:
    """Return the run of a log, or the newest run of a folder. Raise UserError if there is none."""
    expected = 'a run folder, or result_<k>.txt in one'
    check_exists(path, expected)
    number = run_number(path.name)
    run = newest_run(path) if number is None else RunFolder(path.parent, number)
    if run is None:
        below = [folder for folder in find_run_folders(path) if folder != path]
        if len(below) == 1:
            return run_at(below[0])
        found = f'; it has the run folders {", ".join(map(str, below[:5]))}' if below else ''
        raise UserError(f'{path}: got no run, expected {expected}{found}')
    return run


def find_run_folders(path: Path) -> list[Path]:
    """Return the folders with runs below a folder that has none itself; otherwise the path
    itself."""
    logs = files_below(path, onerror=lambda _: None)
    below = {log.parent for log in logs if run_number(log.name) is not None}
    return [path] if path in below or not below else sorted(below)


def new_run(folder: Path) -> RunFolder:
    """Claim the next free run number of a folder, which is created if missing; raise UserError on
    failure."""
    with writing_folder(folder, 'run.dir'):
        make_folder(folder)
        taken = [int(m[1]) for p in folder.iterdir() if (m := _NUMBERED.fullmatch(p.name))]
        if any(
            p.name in _FIRST and not (p.is_dir() and next(p.iterdir(), None) is None)
            for p in folder.iterdir()
        ):
            taken.append(0)  # except for an empty folder, such as checkpoints on another disk
        for run in (RunFolder(folder, k) for k in count(max(taken, default=-1) + 1)):
            with suppress(FileExistsError):  # or another program claims it first
                run.lock.touch(exist_ok=False)
                break
    return run


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first; this only looks at names, not at
    content."""
    paths = (
        p for p in folder.glob(f'{CHECKPOINT_PREFIX}*') if is_checkpoint_name(p.name) and p.is_dir()
    )
    return sorted(paths, key=step_of)


def newest_step(folder: Path) -> int:
    """Return the step in the name of a folder's newest checkpoint, or -1 if there is none."""
    return max(map(step_of, list_checkpoints(folder)), default=-1)


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(CHECKPOINT_PREFIX + '[0-9]{1,19}', name) is not None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(CHECKPOINT_PREFIX))
