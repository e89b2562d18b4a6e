"""Checkpoints, written atomically and verified when read.

A checkpoint is a folder step_<n> with arrays.npz and the small state.json, which contains the
SHA-256 of arrays.npz and of its own content. Image order and augmentation depend only on seed and
step, so the step defines the data position.
"""

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlperf_rn50 import files
from mlperf_rn50.errors import CheckpointError, DamagedCheckpoint, NonFiniteState, StorageError
from mlperf_rn50.files import read_bytes, read_text, temporary_of
from mlperf_rn50.model.weights import write_npz
from mlperf_rn50.npz import Arrays, find_non_finite, read_arrays
from mlperf_rn50.runfolder.names import (
    CHECKPOINT_PREFIX,
    is_checkpoint_name,
    list_checkpoints,
    step_of,
)
from mlperf_rn50.train.checkpoint.progress import Progress, TrainerState, dump_state, parse_state

FORMAT = 4
_ASIDE = 'damaged_'
_UNSEALED = (1, 2, 3)  # formats that had no SHA-256 of state.json
_MAX_STATE_BYTES = 1 << 24
_STORAGE_PAUSE_S = 5.0  # before a second read


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint with read-only arrays; damaged: newer checkpoints that are unusable, newest
    first, and why."""

    path: Path
    progress: Progress
    trainer: TrainerState
    damaged: Sequence[tuple[Path, str]] = ()


def save(folder: Path, progress: Progress, trainer: TrainerState, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`; raise CheckpointError or
    StorageError on failure."""
    final = folder / f'{CHECKPOINT_PREFIX}{progress.step:08d}'
    temporary = temporary_of(final)
    if name := find_non_finite(trainer.arrays):
        raise NonFiniteState(
            f'{final}: {name} has values that are not finite, which a ReLU can hide from the loss; '
            'not written; earlier ones are kept; lower schedule.base_lr, or check the memory'
        )
    try:
        files.make_folder(folder)
        # of a killed writer that had the same number of a process
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with files.replacing(temporary / 'arrays.npz') as f:
            digest = write_npz(f, trainer.arrays)
        files.write_atomically(
            temporary / 'state.json',
            seal(
                {'format': FORMAT, 'state': dump_state(progress, trainer), 'arrays_sha256': digest}
            ),
        )
        files.sync_folder(temporary)
        if final.exists():  # the run wrote it before a resume
            _remove(final)
        temporary.rename(final)
        files.sync_folder(folder)
    except OSError as e:
        error = StorageError if e.errno in files.PASSING_FAULTS else CheckpointError
        raise error(
            f'{final}: cannot write the checkpoint: {e.strerror}; earlier ones are kept; '
            f'{files.describe_disk(folder)}; free space or fix the permissions, then resume'
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def seal(content: dict[str, Any]) -> str:
    """Return the text of state.json: the content and its SHA-256."""
    text = json.dumps(content, indent=1)
    return json.dumps({**content, 'sha256': hashlib.sha256(text.encode()).hexdigest()}, indent=1)


def _unseal(text: str) -> dict[str, Any]:
    """Return the content given to seal; raise ValueError for damage, CheckpointError for other
    format versions."""
    content = files.parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f'state.json holds a {type(content).__name__}, expected an object')
    content.pop('sha256', None)
    is_whole = seal(content) == text
    version = content.get('format')
    # The format of a damaged file may be wrong itself.
    if version in _UNSEALED or is_whole and version != FORMAT:
        raise CheckpointError(
            f'got format {str(version)[:20]}, expected {FORMAT}; resume with the program version '
            'that wrote the checkpoint, or start a new run'
        )
    if not is_whole:
        raise ValueError('state.json is damaged: its SHA-256 does not match')
    return content


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that no partial checkpoint is found."""
    aside = temporary_of(path, '.old')
    with files.writing(path):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def put_aside(paths: Sequence[Path]) -> None:
    """Rename damaged checkpoints so that list_checkpoints ignores them; raise StorageError on
    failure."""
    for path in paths:
        aside = path.with_name(_ASIDE + path.name)
        shutil.rmtree(aside, ignore_errors=True)
        with files.writing(path):
            path.rename(aside)


def rewind(folder: Path, path: Path, progress: Progress, trainer: TrainerState) -> None:
    """Make the state of a resumed run the newest checkpoint of a folder; raise as save() does.

    The resumed step may precede the newest checkpoint, if the batch is larger now or an older
    checkpoint was resumed. path: the resumed checkpoint, which may be a copy in another folder.
    """
    is_own = is_checkpoint_name(path.name) and path.parent.resolve() == folder.resolve()
    if not is_own or progress.step < step_of(path):
        save(folder, progress, trainer, keep=len(list_checkpoints(folder)) + 1)
    last = progress.step
    if is_own:  # with a smaller batch, the same images take more steps
        last = min(last, step_of(path))
    for other in list_checkpoints(folder):
        if step_of(other) > last:
            _remove(other)


def clear_unfinished(folder: Path) -> None:
    """Remove temporary folders of killed writers; the caller holds the lock of the run."""
    for path in files.temporaries_in(folder, f'{CHECKPOINT_PREFIX}*'):
        shutil.rmtree(path, ignore_errors=True)


def load(path: Path) -> tuple[Progress, TrainerState]:
    """Read and verify a checkpoint; return its progress and the trainer's state, with read-only
    arrays.

    Raise DamagedCheckpoint, which names the previous checkpoint, CheckpointError (other version,
    failed read) or StorageError (failed read that may pass).
    """
    try:
        return _load(path)
    except DamagedCheckpoint as e:
        others = list_checkpoints(path.parent) if is_checkpoint_name(path.name) else []
        last = max((p for p in others if step_of(p) < step_of(path)), key=step_of, default=None)
        hint = (
            f'the previous one is {last}: --resume {last}' if last else 'there is no previous one'
        )
        raise DamagedCheckpoint(f'{e}; {hint}') from e


def load_newest(folder: Path) -> LoadedCheckpoint:
    """Load the newest intact checkpoint of a folder; raise CheckpointError if there is none,
    CheckpointError or StorageError if reading fails."""
    damaged: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return LoadedCheckpoint(path, *_load(path), damaged)
        except DamagedCheckpoint as e:
            damaged.append((path, str(e)))
    if not damaged:
        raise CheckpointError(f'{folder}: contains no checkpoint')
    raise CheckpointError(
        f'{folder}: none of its {len(damaged)} checkpoints is intact; the newest: {damaged[0][1]}'
    )


def _load(path: Path) -> tuple[Progress, TrainerState]:
    """Load a checkpoint; read it twice before an error of storage counts as damage."""
    try:
        return _load_once(path)
    except DamagedCheckpoint as e:
        if getattr(e.__cause__, 'errno', None) != errno.EIO:
            raise
    time.sleep(_STORAGE_PAUSE_S)
    return _load_once(path)


def _load_once(path: Path) -> tuple[Progress, TrainerState]:
    try:
        described = _unseal(read_text(path / 'state.json', _MAX_STATE_BYTES))
        progress, trainer = parse_state(described['state'])
        if is_checkpoint_name(path.name) and progress.step != step_of(path):
            raise ValueError(f'step: got {progress.step}, expected {step_of(path)} as in its name')
        data = read_bytes(path / 'arrays.npz')
        expected = str(described['arrays_sha256'])
        got = hashlib.sha256(data).hexdigest()
        if expected != got:
            raise ValueError(
                f'arrays.npz is damaged: got SHA-256 {got[:12]}…, expected {expected[:12]}…'
            )
        return progress, replace(trainer, arrays=read_arrays(data))
    except CheckpointError as e:
        raise CheckpointError(f'{path}: {e}') from e
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR):
            error = StorageError if e.errno in files.PASSING_FAULTS else CheckpointError
            raise error(f'{path}: cannot read the checkpoint: {e.strerror}') from e
        raise DamagedCheckpoint(f'{path}: {_reason(e)}') from e
    except (ValueError, KeyError, TypeError) as e:
        raise DamagedCheckpoint(f'{path}: {_reason(e)}') from e


def check_arrays(path: Path, arrays: Arrays, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the names and shapes of the arrays are as expected."""
    missing, unexpected = expected.keys() - arrays, arrays.keys() - expected
    if missing or unexpected:
        name = min(missing or unexpected)
        kind = 'missing' if missing else 'unexpected'
        raise CheckpointError(
            f'{path}: {name} is {kind}; this checkpoint is for a different model or optimizer'
        )
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise CheckpointError(
                f'{path}: {name}: got shape {arrays[name].shape}, expected {shape}; '
                'this checkpoint is for a different model or data set'
            )


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f'{Path(error.filename).name} is missing'
    if isinstance(error, OSError):
        return f'{Path(error.filename).name if error.filename else "a file"}: {error.strerror}'
    return (
        'not a checkpoint of this program '
        f'({" ".join(str(error).split())[:300] or type(error).__name__})'
    )
