"""Room for the files of Open MPI: its session folder in TMPDIR, and shared memory.

Measured with Open MPI 4.1.8, 2 ranks: a session folder of 8.3 MB on each node, in TMPDIR, and 4 MiB a rank in /dev/shm.
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
    """What can still be written to a file system; None where there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def tmp_dir() -> Path:
    """TMPDIR as launch/engines/openmpi.sh has it; tempfile goes elsewhere where there is no room."""
    return Path(os.environ.get('TMPDIR') or '/tmp')


def no_room(name: str, folder: Path, free: int, needed: int) -> str:
    """What is said of a folder without room for Open MPI; free and needed in bytes."""
    return (f'{name}: {folder} has {free / 1e6:.1f} MB free, expected {needed / 1e6:.0f} MB for files of Open MPI; '
            'make room there')


def check_session(env: Mapping[str, str]) -> None:
    """Raise ConfigError where Open MPI has started this process and found no room for its files: it would not say so.

    What it has written there already counts as room.
    """
    base = env.get('OMPI_MCA_orte_tmpdir_base')
    free = free_bytes(Path(base).parent) if base else None
    if base and free is not None and free < SESSION_BYTES - _used_bytes(Path(base)):
        raise ConfigError(no_room('TMPDIR', Path(base).parent, free, SESSION_BYTES))


def _used_bytes(folder: Path) -> int:
    """What the files below a folder take on its disk."""
    try:
        return sum(512 * p.lstat().st_blocks for p in folder.rglob('*'))
    except OSError:  # some are gone meanwhile: of a job that works
        return SESSION_BYTES


def session_problem(folder: Path) -> str:
    """Why Open MPI's session folder cannot be made somewhere; '' where it can. Full, mpirun hangs without a word."""
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            os.posix_fallocate(f.fileno(), 0, SESSION_BYTES)
    except OSError as e:
        return e.strerror or type(e).__name__
    return ''
