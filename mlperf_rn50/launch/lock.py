"""One launcher for a run folder: a lock that the kernel lets go of when its holder is gone, however it went."""
import errno
import fcntl
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from mlperf_rn50.errors import ConfigError

_NAME = '.launcher.lock'


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds a run folder; one that was made for it and stayed empty is removed again.

    Raises:
        ConfigError: another launcher holds it, or it cannot be made.
    """
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    path = folder / _NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(path)
    except OSError as e:
        raise ConfigError(f'--run-dir: {folder}: {e.strerror}; choose a folder that can be written') from e
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # while it is held: no other launcher takes a file that is about to go
        os.close(file)
        with suppress(OSError):  # it is not empty
            for made in missing:
                made.rmdir()


def _take(path: Path) -> int:
    while True:
        file = _open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors='replace').strip() or 'another launcher'
            os.close(file)
            raise ConfigError(f'--run-dir: {path.parent} is in use by {holder}; wait for it, or choose another '
                              'folder') from None
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            print(f'{path}: this file system has no locks ({e.strerror}); see to it that only one launcher uses this '
                  'folder', file=sys.stderr, flush=True)
            return file
        if _is_still(path, file):
            break
        os.close(file)  # its last holder has removed it meanwhile
    with suppress(OSError):  # only there to be named
        os.ftruncate(file, 0)
        who = f'process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n'
        os.write(file, who.encode())
    return file


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except PermissionError:  # what somebody else's launcher left; a lock needs no more than to read it
        return os.open(path, os.O_RDONLY | flags)


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False
