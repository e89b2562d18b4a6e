"""The files of a run. A folder may hold several runs, numbered; nothing is ever overwritten.

Run 0 owns result_0.txt, config.yaml, metrics.jsonl, env.json, train.log, checkpoints/ and weights/; run k
owns result_k.txt, config_k.yaml and so on. .run_k.lock claims the number k and is locked by who writes the run.
"""
import fcntl
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mlperf_rn50.errors import CheckpointError, ConfigError, StorageError, UserError
from mlperf_rn50.files import no_link, temporaries_in, writing_folder
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read.reader import read_events
from mlperf_rn50.system.telemetry import host_file_name
from mlperf_rn50.train.checkpoint.checkpoint import clear_unfinished, is_checkpoint_name, list_checkpoints

# Files and folders of a run that say its number.
_OWN = re.compile(r'(?:result|config|metrics|env|train|telemetry|tensorboard|checkpoints|weights)_(\d+).*')


class _OwnPath:
    """A path that every run of a folder has for itself: with the run's number from the second run on."""

    def __init__(self, stem: str, suffix: str = ''):
        self._stem, self._suffix = stem, suffix

    def __get__(self, run: 'RunFolder', _: object) -> Path:
        return run.dir / f'{self._stem}{f"_{run.index}" if run.index else ""}{self._suffix}'


@dataclass(frozen=True)
class RunFolder:
    """The paths of run number `index` in folder `dir`."""

    dir: Path
    index: int
    config = _OwnPath('config', '.yaml')
    metrics = _OwnPath('metrics', '.jsonl')
    env = _OwnPath('env', '.json')
    train_log = _OwnPath('train', '.log')
    tensorboard = _OwnPath('tensorboard')
    checkpoints = _OwnPath('checkpoints')
    weights = _OwnPath('weights')

    @property
    def result(self) -> Path:
        return self.dir / f'result_{self.index}.txt'

    @property
    def result_v06(self) -> Path:
        return self.dir / f'result_{self.index}_v0.6.txt'

    @property
    def lock(self) -> Path:
        return self.dir / f'.run_{self.index}.lock'

    def telemetry(self, host: str) -> Path:
        """The samples of a node."""
        return self.dir / f'telemetry_{self.index}_{host_file_name(host)}.jsonl'

    def clear_unfinished(self) -> None:
        """Removes what a part of this run that was killed while it wrote has left; for who holds its lock."""
        clear_unfinished(self.checkpoints)
        for path in (*temporaries_in(self.weights), *temporaries_in(self.dir, self.config.name),
                     *temporaries_in(self.dir, self.env.name)):
            path.unlink(missing_ok=True)


def clear_abandoned(run: RunFolder) -> None:
    """Remove what killed writers of the folder's other runs left unfinished; runs that are being written are left."""
    for path in run.dir.glob('.run_*.lock'):
        match = re.fullmatch(r'\.run_(\d+)\.lock', path.name)
        if not match or path == run.lock:
            continue
        with suppress(OSError), open(path, 'r+b', opener=no_link) as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            RunFolder(run.dir, int(match[1])).clear_unfinished()


def check_is_there(run: RunFolder) -> None:
    """Raise StorageError where a run's log is no longer in its folder: a mount that is gone leaves an empty one."""
    if not run.result.exists():
        raise StorageError(f'{run.dir}: is not the folder that this run writes to, {run.result.name} is not in it; '
                           'mount it again, and go on with the last checkpoint')


def run_numbers(folder: Path) -> list[int]:
    """The numbers of the runs of a folder that have begun a log."""
    return [int(m[1]) for p in folder.glob('result_*.txt') if (m := re.fullmatch(r'result_(\d+)\.txt', p.name))]


def next_index(folder: Path) -> int:
    """The number that new_run would give now in a folder, which is made if missing. Raises UserError if it cannot."""
    with writing_folder(folder, 'run.dir'):
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for p in folder.iterdir() if (m := _OWN.fullmatch(p.name))]
        if any((folder / n).exists() for n in ('config.yaml', 'metrics.jsonl', 'train.log')):
            taken.append(0)
        return next(k for k in count(max(taken, default=-1) + 1) if not RunFolder(folder, k).lock.exists())


def new_run(folder: Path) -> RunFolder:
    """Claim the next free run number of a folder, which is made if missing. Raises UserError if it cannot."""
    while True:
        run = RunFolder(folder, next_index(folder))
        with writing_folder(folder, 'run.dir'), suppress(FileExistsError):  # another program has just taken the number
            run.lock.touch(exist_ok=False)
            return run


def find_run(path: Path) -> tuple[RunFolder, Path]:
    """The run that --resume PATH means, and its checkpoints folder, or the one checkpoint that PATH is.

    Reads no checkpoint: rank 0 alone does that.

    Raises:
        CheckpointError: there is none.
    """
    checkpoints = path.parent
    if not is_one_checkpoint(path):
        folders = [path] if path.name.startswith('checkpoints') else sorted(path.glob('checkpoints*'), key=_run_index)
        found = [f for f in folders if list_checkpoints(f)]
        if not found:
            raise CheckpointError(f'{path}: no checkpoint in it; expected a run folder with checkpoints/step_<n>')
        path = checkpoints = found[-1]
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such checkpoint')
    run = RunFolder(checkpoints.parent, _run_index(checkpoints))
    for needed in (run.config, run.result):
        if not needed.exists():
            raise ConfigError(f'{needed}: missing; a run is resumed in the folder it ran in')
    return run, path


def is_one_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be a checkpoint, not a folder of some."""
    return is_checkpoint_name(path.name) or (path / 'state.json').exists()


def check_unfinished(run: RunFolder) -> None:
    """Raise UserError for a run that has reached its target: its log ends with success."""
    if any(e.key == 'run_stop' and e.metadata.get('status') == 'success'
           for _, e in read_events(run.result) if isinstance(e, LogEvent)):
        raise UserError(f'--resume: {run.result} is the log of a run that reached its target; there is nothing to go '
                        'on with, and its log stays as it is')


def _run_index(path: Path) -> int:
    digits = path.name.rpartition('_')[2]
    return int(digits) if digits.isdecimal() else 0
