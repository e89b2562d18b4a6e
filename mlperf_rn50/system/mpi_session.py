"""Settings and messages of Open MPI, and space for its files: its session folder in TMPDIR, and
shared memory.

Measured with Open MPI 4.1.8 and 2 ranks: 8.3 MB per node in TMPDIR, and 4 MiB per rank in /dev/shm.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mlperf_rn50.errors import ConfigError

SHARED_MEMORY = Path('/dev/shm')
SESSION_BYTES = 10 << 20
SETTING_FILES = 'OMPI_MCA_mca_base_param_files'
# line of a file with settings
_SETTING = re.compile(r'^[ \t]*(\w+)[ \t]*=[ \t]*([^#\n]*)', re.MULTILINE)
_NOISE = re.compile(r'ORTE_ERROR_LOG|PMIX ERROR|\*\*\*|more process|Set MCA parameter')
# starts of messages without a cause
_GENERIC = ('It looks like', 'MPI_INIT has failed', 'Sorry! You were')


def free_bytes(folder: Path) -> int | None:
    """Return the free space of a file system, or None if the folder does not exist."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def tmp_dir() -> Path:
    """Return TMPDIR as launch/engines/openmpi.sh reads it, unlike tempfile, which replaces a TMPDIR
    that is full."""
    return Path(os.environ.get('TMPDIR') or '/tmp')


def session_base() -> Path:
    """Return the folder of Open MPI's session files: on all hosts that of the launcher, if any."""
    base = os.environ.get('OMPI_MCA_orte_tmpdir_base')
    return Path(base).parent if base else tmp_dir()


def no_room(name: str, folder: Path, free: int, needed: int) -> str:
    """Return the message for a folder without space for Open MPI. free and needed are in bytes."""
    return (
        f'{name}: {folder} has {free / 1e6:.1f} MB free, expected {needed / 1e6:.0f} MB for files '
        'of Open MPI; free space there'
    )


def check_session(env: Mapping[str, str]) -> None:
    """Raise ConfigError if the disk is too full for the rest of Open MPI's session files, because
    MPI would hang."""
    base = Path(env.get('OMPI_MCA_orte_tmpdir_base', ''))
    free = free_bytes(base.parent) if base.name else None
    with suppress(OSError):  # a file was removed in the meantime, so the job already runs
        used = sum(512 * p.lstat().st_blocks for p in base.rglob('*')) if base.name else 0
        if free is not None and free < SESSION_BYTES - used:
            raise ConfigError(no_room('TMPDIR', base.parent, free, SESSION_BYTES))


def session_problem(folder: Path) -> str:
    """Return why a folder cannot hold Open MPI's session files, so that mpirun would hang; '' if it
    can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            os.posix_fallocate(f.fileno(), 0, SESSION_BYTES)
    except OSError as e:
        return e.strerror or type(e).__name__
    return ''


def mpi_settings(env: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """Return the user's settings of Open MPI and UCX by variable; the environment overrides Open
    MPI's files."""
    home = os.path.expanduser('~')  # unlike Path.home(), works for a user without a home folder
    default = f'{home}/.openmpi/mca-params.conf:{prefix}/etc/openmpi-mca-params.conf'
    files = env.get(SETTING_FILES) or default
    found: dict[str, str] = {}
    for file in reversed(re.split('[:,]', files)):
        with suppress(OSError, ValueError):
            found |= {
                f'OMPI_MCA_{n}': value.strip()
                for n, value in _SETTING.findall(Path(file).read_text())
            }
    return found | {
        k: v for k, v in env.items() if k.startswith(('OMPI_MCA_', 'UCX_')) and k != SETTING_FILES
    }


def blame_settings(
    settings: Sequence[str], reason_with: Callable[[Collection[str]], str]
) -> tuple[Sequence[str], str]:
    """Return the settings of the user that keep Open MPI from starting ranks, if they do, and its
    reason; '' if it starts them.

    Args:
        reason_with: starts ranks with some of the settings, and returns the reason why Open MPI
            could not, or ''.
    """
    reason = reason_with(settings)
    if not reason or not settings or reason_with(()):
        return (), reason
    single = (name for name in settings if not reason_with([n for n in settings if n != name]))
    fault = next(single, None)
    lost = reason_of('')
    for _ in range(5):  # Open MPI loses some messages of ranks
        if reason and reason != lost:
            break
        reason = reason_with(settings)
    return [fault] if fault else settings, reason or lost


def reason_of(output: str) -> str:
    """Return the first message in the output of mpirun that names a cause, in one line."""
    lines = [line for line in output.splitlines() if not _NOISE.search(line)]
    text = '\n'.join(re.sub(r'^\[\S+:\d+\]|\[\S+\[/\S+\]', '', line) for line in lines)
    parts = re.split(r'^-{40,}$', text, flags=re.MULTILINE)
    messages = [' '.join(part.split()) for part in parts if part.strip()]
    first = min(messages, key=lambda m: m.startswith(_GENERIC), default='no reason given')
    return first[:400].rstrip('.')
