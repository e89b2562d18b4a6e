"""Files of a run. A folder may contain several numbered runs; nothing is overwritten.

Run 0 owns result_0.txt, config.yaml, metrics.jsonl, env.json, train.log, checkpoints/ and weights/; run k owns
result_k.txt, config_k.yaml and so on. .run_k.lock reserves the number k, and is locked while a program writes run k.
"""
import fcntl
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mlperf_rn50.errors import CheckpointError, ConfigError, StorageError, UserError
from mlperf_rn50.files import make_folder, no_link, temporaries_in, writing_folder
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read.reader import read_events
from mlperf_rn50.system.telemetry import host_file_name
from mlperf_rn50.train.checkpoint.checkpoint import clear_unfinished, is_checkpoint_name, list_checkpoints

# Names of files and folders that contain the number of their run.
_NUMBERED = re.compile(r'(?:result|config|metrics|env|train|telemetry|tensorboard|checkpoints|weights)_(\d+).*')


class _NumberedPath:
    """Path that contains the number of its run; first: text that replaces the number for run 0."""

    def __init__(self, stem: str, suffix: str = '', first: str = ''):
        self._stem, self._suffix, self._first = stem, suffix, first

    def __get__(self, run: 'RunFolder', _: object) -> Path:
        return run.dir / f'{self._stem}{f"_{run.index}" if run.index else self._first}{self._suffix}'


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
        return self.dir / f'telemetry_{self.index}_{host_file_name(host)}.jsonl'

    def clear_unfinished(self) -> None:
        """Remove temporary files of killed writers; the caller holds the lock of the run."""
        clear_unfinished(self.checkpoints)
        for path in (*temporaries_in(self.weights), *temporaries_in(self.dir, self.config.name),
                     *temporaries_in(self.dir, self.env.name)):
            path.unlink(missing_ok=True)


def clear_abandoned(run: RunFolder) -> None:
    """Remove temporary files that killed writers left in the folder's other runs; skip locked runs."""
    for path in run.dir.glob('.run_*.lock'):
        match = re.fullmatch(r'\.run_(\d+)\.lock', path.name)
        if not match or path == run.lock:
            continue
        with suppress(OSError), open(path, 'r+b', opener=no_link) as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            RunFolder(run.dir, int(match[1])).clear_unfinished()


def check_present(run: RunFolder) -> None:
    """Raise StorageError if the log has vanished from the run folder, for example after a lost mount."""
    if not run.result.exists():
        raise StorageError(f'{run.dir}: {run.result.name} has vanished, so this is no longer the folder of this run; '
                           'mount it again, and resume from the last checkpoint')


def run_numbers(folder: Path) -> list[int]:
    return [int(m[1]) for p in folder.glob('result_*.txt') if (m := re.fullmatch(r'result_(\d+)\.txt', p.name))]


def next_index(folder: Path) -> int:
    """Return the next free run number of a folder, which is created if missing; raise UserError on failure."""
    with writing_folder(folder, 'run.dir'):
        make_folder(folder)
        taken = [int(m[1]) for p in folder.iterdir() if (m := _NUMBERED.fullmatch(p.name))]
        if any((folder / n).exists() for n in ('config.yaml', 'metrics.jsonl', 'train.log')):
            taken.append(0)
        return next(k for k in count(max(taken, default=-1) + 1) if not RunFolder(folder, k).lock.exists())


def new_run(folder: Path) -> RunFolder:
    """Claim the next free run number of a folder, which is created if missing; raise UserError on failure."""
    while True:
        run = RunFolder(folder, next_index(folder))
        with writing_folder(folder, 'run.dir'), suppress(FileExistsError):  # another program claimed it first
            run.lock.touch(exist_ok=False)
            return run


def find_run(path: Path) -> tuple[RunFolder, Path]:
    """Return the run that --resume PATH selects, and its checkpoint or checkpoints folder; raise UserError if none."""
    checkpoints = path.parent
    if not is_checkpoint(path):
        folders = [path] if path.name.startswith('checkpoints') else sorted(path.glob('checkpoints*'), key=_run_index)
        usable = [f for f in folders if list_checkpoints(f)]
        if not usable:
            raise CheckpointError(f'{path}: contains no checkpoint, expected a run folder with checkpoints/step_<n>')
        path = checkpoints = usable[-1]
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such checkpoint')
    run = RunFolder(checkpoints.parent, _run_index(checkpoints))
    for needed in (run.config, run.result):
        if not needed.exists():
            raise ConfigError(f'{needed}: missing; resume the run in its original folder')
    return run, path


def is_checkpoint(path: Path) -> bool:
    """Check whether a path is a checkpoint, not a folder of checkpoints."""
    return is_checkpoint_name(path.name) or (path / 'state.json').exists()


def check_unfinished(run: RunFolder) -> None:
    """Raise UserError for a run that has reached its target."""
    if any(e.key == 'run_stop' and e.metadata.get('status') == 'success'
           for _, e in read_events(run.result) if isinstance(e, LogEvent)):
        raise UserError(f'--resume: {run.result} is the log of a run that reached its target; there is nothing to '
                        'resume')


def _run_index(path: Path) -> int:
    digits = path.name.rpartition('_')[2]
    return int(digits) if digits.isdecimal() else 0
