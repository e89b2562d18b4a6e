"""Runs to resume: their checkpoints, and the temporary files that killed writers left."""

import fcntl
import re
from contextlib import suppress
from pathlib import Path

from mlperf_rn50.errors import CheckpointError, ConfigError, UserError
from mlperf_rn50.files import check_exists, no_link, temporaries_in
from mlperf_rn50.mllog.events import LogEvent
from mlperf_rn50.mllog.read.reader import read_events
from mlperf_rn50.runfolder.names import (
    RunFolder,
    folder_index,
    is_checkpoint_name,
    list_checkpoints,
    list_runs,
)
from mlperf_rn50.system.launcher_env import resume_command
from mlperf_rn50.train.checkpoint import checkpoint


def clear_run(run: RunFolder) -> None:
    """Remove the temporary files that killed writers left in a run; the caller holds the lock of
    the run."""
    checkpoint.clear_unfinished(run.checkpoints)
    paths = temporaries_in(run.weights)
    for name in (run.config.name, run.env.name, f'trace_{run.index}_*'):
        paths += temporaries_in(run.dir, name)
    for path in paths:
        path.unlink(missing_ok=True)


def clear_abandoned(run: RunFolder) -> None:
    """Remove temporary files that killed writers left in the folder's other runs; skip locked
    runs."""
    for path in run.dir.glob('.run_*.lock'):
        match = re.fullmatch(r'\.run_(\d+)\.lock', path.name)
        if not match or path == run.lock:
            continue
        with suppress(OSError), open(path, 'r+b', opener=no_link) as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear_run(RunFolder(run.dir, int(match[1])))


def find_run(path: Path) -> tuple[RunFolder, Path]:
    """Return the run that --resume PATH selects, and its checkpoint or checkpoints folder; raise
    UserError if none."""
    expected = 'a run folder with checkpoints/step_<n>'
    check_exists(path, expected)
    checkpoints = path.parent
    if not is_checkpoint(path):
        folders = [path]
        if not path.name.startswith('checkpoints'):
            folders = [run.checkpoints for run in list_runs(path)]
        usable = [f for f in folders if list_checkpoints(f)]
        if not usable:
            raise CheckpointError(f'{path}: contains no checkpoint, expected {expected}')
        path = checkpoints = usable[-1]
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such checkpoint')
    run = RunFolder(checkpoints.parent, folder_index(checkpoints))
    for needed in (run.config, run.result):
        if not needed.exists():
            raise ConfigError(f'{needed}: missing; resume the run in its original folder')
    return run, path


def is_checkpoint(path: Path) -> bool:
    """Check whether a path is a checkpoint, not a folder of checkpoints."""
    return is_checkpoint_name(path.name) or (path / 'state.json').exists()


def _has_converged(run: RunFolder) -> bool:
    return any(
        e.key == 'run_stop' and e.metadata.get('status') == 'success'
        for _, e in read_events(run.result)
        if isinstance(e, LogEvent)
    )


def check_unfinished(run: RunFolder) -> None:
    """Raise UserError for a run that has reached its target; name the newest run of the folder that
    has not."""
    if _has_converged(run):
        others = (
            f'; run {r.index} has not: {resume_command(r.checkpoints, is_newest=False)}'
            for r in reversed(list_runs(run.dir))
            if list_checkpoints(r.checkpoints) and not _has_converged(r)
        )
        raise UserError(
            f'--resume: {run.result} is the log of a run that reached its target; there is nothing '
            f'to resume{next(others, "")}'
        )
