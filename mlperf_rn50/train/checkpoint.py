"""Everything a resumed run needs, written atomically and read without trusting it.

A checkpoint is a folder step_<n> holding arrays.npz and state.json; state.json is small and carries the SHA-256
of arrays.npz. Order and augmentation are functions of (seed, epoch, step), so the global step is the whole position
in the data.
"""
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.files import HashedFile, sync, write_atomically
from mlperf_rn50.train.progress import Progress, dump_progress, parse_progress

FORMAT = 3
_PREFIX = 'step_'


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Writes a new .npz through to the disk; returns its SHA-256."""
    with open(path, 'xb') as f:
        hashed = HashedFile(f)
        np.savez(hashed, **arrays)
        sync(f)
    return hashed.hexdigest()


def save(folder: Path, progress: Progress, arrays: Mapping[str, np.ndarray], keep: int) -> Path:
    """Writes a checkpoint and drops all but the last `keep`.

    Args:
        folder: where checkpoints live; made if missing.
        progress: the small part.
        arrays: the large part, by name.
        keep: how many to keep.

    Raises:
        CheckpointError: it cannot be written; earlier ones are untouched.
    """
    final = folder / f'{_PREFIX}{progress.step:08d}'
    temporary = folder / f'.{final.name}.{os.getpid()}.tmp'
    try:
        temporary.mkdir(parents=True)
        digest = _write_arrays(temporary / 'arrays.npz', arrays)
        write_atomically(temporary / 'state.json', json.dumps(
            {'format': FORMAT, 'state': dump_progress(progress), 'sha256': digest}, indent=1))
        _sync_folder(temporary)
        if final.exists():  # the same step of the same run: written again after a resume
            _remove(final)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f'{final}: cannot write the checkpoint: {e.strerror}; earlier ones are kept, '
                              'make room or fix the permissions and resume') from e
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def _remove(path: Path) -> None:
    """Removes a checkpoint: out of sight first, so that no half of one is ever found."""
    aside = path.with_name(f'.{path.name}.{os.getpid()}.old.tmp')
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def begin_again(folder: Path, path: Path, progress: Progress, arrays: Mapping[str, np.ndarray]) -> None:
    """Lets a run that goes on from a checkpoint of a folder find its own ones to be the newest, by their steps.

    With a larger batch it counts fewer steps than before; and it may go on from an older checkpoint than the newest.

    Args:
        folder: of the run's checkpoints.
        path: the one it goes on from.
        progress: as it goes on.
        arrays: of the checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    if progress.step < _step_of(path):
        save(folder, progress, arrays, keep=len(list_checkpoints(folder)) + 1)
    for other in list_checkpoints(folder):
        if _step_of(other) > progress.step:
            _remove(other)


def clear_unfinished(folder: Path) -> None:
    """Removes what a run that was killed while it wrote has left."""
    for path in folder.glob(f'.{_PREFIX}*.tmp'):
        shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first."""
    found = [p for p in folder.glob(f'{_PREFIX}*') if p.is_dir() and p.name[len(_PREFIX):].isdecimal()]
    return sorted(found, key=_step_of)


def newest_step(folder: Path) -> int:
    """The step of a folder's newest checkpoint, by its name; -1 where there is none."""
    return max(map(_step_of, list_checkpoints(folder)), default=-1)


def _step_of(path: Path) -> int:
    return int(path.name[len(_PREFIX):])


def load(path: Path) -> tuple[Progress, dict[str, np.ndarray]]:
    """A checkpoint, read once and checked whole for damage: the small part, and the arrays by name.

    Raises:
        CheckpointError: it is damaged or not one of ours; names the one before it, if there is one.
    """
    try:
        described = json.loads((path / 'state.json').read_text())
        if described['format'] != FORMAT:
            raise ValueError(f'got format {described["format"]}, expected {FORMAT}')
        progress = parse_progress(described['state'])
        data, wanted = (path / 'arrays.npz').read_bytes(), str(described['sha256'])
        got = hashlib.sha256(data).hexdigest()
        if wanted != got:
            raise ValueError(f'arrays.npz is damaged: got SHA-256 {got[:12]}…, expected {wanted[:12]}…')
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return progress, {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
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
