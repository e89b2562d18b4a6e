"""Everything a resumed run needs, written atomically and read without trusting it.

A checkpoint is a folder step_<n> holding arrays.npz and state.json; state.json is small, lists every
array with its shape and dtype, and carries the SHA-256 of arrays.npz. Order and augmentation are
functions of (seed, epoch, step), so the global step is the whole position in the data.
"""
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.files import write_atomically

FORMAT = 2
_PREFIX = 'step_'


@dataclass(frozen=True)
class State:
    """The small part of a checkpoint.

    Args:
        step: optimizer steps taken.
        seed: of the run.
        world_size: number of ranks that wrote it.
        best_top1: best Top-1 so far, a fraction.
        clock_s: seconds on the run's clock so far.
        global_batch_size: images per step.
        lr_batch_size: images per step that the configured learning rate is for.
        num_train: images per epoch.
        result_index: number of the result file the run writes.
        num_resumes: how often the run was resumed before.
    """

    step: int
    seed: int
    world_size: int
    best_top1: float
    clock_s: float
    global_batch_size: int
    lr_batch_size: int
    num_train: int
    result_index: int
    num_resumes: int


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def save(folder: Path, state: State, arrays: dict[str, np.ndarray], keep: int) -> Path:
    """Writes a checkpoint and drops all but the last `keep`.

    Args:
        folder: where checkpoints live; made if missing.
        state: the small part.
        arrays: the large part, by name.
        keep: how many to keep.

    Raises:
        CheckpointError: it cannot be written; earlier ones are untouched.
    """
    final = folder / f'{_PREFIX}{state.step:08d}'
    temporary = folder / f'.{final.name}.{os.getpid()}.tmp'
    try:
        temporary.mkdir(parents=True)
        with open(temporary / 'arrays.npz', 'wb') as f:
            np.savez(f, **arrays)
            f.flush()
            os.fsync(f.fileno())
        described = {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items()}
        write_atomically(temporary / 'state.json', json.dumps(
            {'format': FORMAT, 'state': asdict(state), 'sha256': _sha256(temporary / 'arrays.npz'),
             'arrays': described}, indent=1))
        _sync_folder(temporary)
        if final.exists():  # the same step of the same run: written again after a resume
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f'{final}: cannot write the checkpoint: {e.strerror}; earlier ones are kept, '
                              'make room or fix the permissions and resume') from e
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first."""
    found = [p for p in folder.glob(f'{_PREFIX}*') if p.is_dir() and p.name[len(_PREFIX):].isdecimal()]
    return sorted(found, key=lambda p: int(p.name[len(_PREFIX):]))


def load_state(path: Path) -> tuple[State, dict[str, list]]:
    """The small part of a checkpoint, and dtype and shape of every array, after checking the whole for damage.

    Raises:
        CheckpointError: it is damaged or not one of ours; names the one before it, if there is one.
    """
    try:
        described = json.loads((path / 'state.json').read_text())
        if described['format'] != FORMAT:
            raise ValueError(f'got format {described["format"]}, expected {FORMAT}')
        state = State(**described['state'])
        wanted, got = described['sha256'], _sha256(path / 'arrays.npz')
        if wanted != got:
            raise ValueError(f'arrays.npz is damaged: got SHA-256 {got[:12]}…, expected {str(wanted)[:12]}…')
        return state, dict(described['arrays'])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f'{path}: {_reason(e)}{_previous_hint(path)}') from e


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The large part of a checkpoint that load_state accepted.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with np.load(path / 'arrays.npz', allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, EOFError) as e:
        raise CheckpointError(f'{path}: {_reason(e)}{_previous_hint(path)}') from e


def check_arrays(path: Path, arrays: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the arrays are exactly those wanted (by name, with their shapes)."""
    for name in sorted(set(wanted) - set(arrays)):
        raise CheckpointError(f'{path}: {name} is missing; this checkpoint is of another model or optimizer')
    for name in sorted(set(arrays) - set(wanted)):
        raise CheckpointError(f'{path}: {name} is not of this run; this checkpoint is of another model or optimizer')
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            raise CheckpointError(f'{path}: {name}: got shape {arrays[name].shape}, expected {shape}; '
                                  'this checkpoint is of another model or data set')


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f'{Path(error.filename).name} is missing'
    return f'not a checkpoint of this program ({" ".join(str(error).split()) or type(error).__name__})'


def _previous_hint(path: Path) -> str:
    others = [p for p in list_checkpoints(path.parent) if p.name < path.name]
    return f'; the one before it is {others[-1]}: --resume {others[-1]}' if others else '; there is none before it'
