"""Space for the files of Open MPI: its session folder in TMPDIR, and shared memory.

Measured with Open MPI 4.1.8 and 2 ranks: 8.3 MB per node in TMPDIR, and 4 MiB per rank in /dev/shm.
"""
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mlperf_rn50.errors import ConfigError

SHARED_MEMORY = Path('/dev/shm')
SESSION_BYTES = 10 << 20


def free_bytes(folder: Path) -> int | None:
    """Return the free space of a file system; None if the folder does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def tmp_dir() -> Path:
    """Return TMPDIR as launch/engines/openmpi.sh reads it, unlike tempfile, which replaces a TMPDIR that is full."""
    return Path(os.environ.get('TMPDIR') or '/tmp')


def no_room(name: str, folder: Path, free: int, needed: int) -> str:
    """Return the message for a folder without space for Open MPI; free and needed are in bytes."""
    return (f'{name}: {folder} has {free / 1e6:.1f} MB free, expected {needed / 1e6:.0f} MB for files of Open MPI; '
            'free space there')


def check_session(env: Mapping[str, str]) -> None:
    """Raise ConfigError if the disk is too full for the rest of Open MPI's session files; Open MPI would hang."""
    base = Path(env.get('OMPI_MCA_orte_tmpdir_base', ''))
    free = free_bytes(base.parent) if base.name else None
    try:
        used = sum(512 * p.lstat().st_blocks for p in base.rglob('*')) if base.name else 0
    except OSError:  # a file was removed in the meantime, so the job already runs
        return
    if free is not None and free < SESSION_BYTES - used:
        raise ConfigError(no_room('TMPDIR', base.parent, free, SESSION_BYTES))


def session_problem(folder: Path) -> str:
    """Return why a folder cannot hold Open MPI's session files, '' if it can; mpirun hangs on a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            os.posix_fallocate(f.fileno(), 0, SESSION_BYTES)
    except OSError as e:
        return e.strerror or type(e).__name__
    return ''
