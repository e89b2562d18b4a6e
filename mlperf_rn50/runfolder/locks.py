"""Lock files: the kernel releases the lock when the holder ends, and the file names the holder."""

import errno
import fcntl
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import no_link, refuse_existing, regular_file, writing_folder
from mlperf_rn50.runfolder.names import list_runs
from mlperf_rn50.runfolder.records import RECORDS

LAUNCHER_LOCK = '.launcher.lock'  # in the run folder, held by its launcher
OUTPUT_LOCK = '.mlperf_rn50.lock'  # in a folder of outputs


def _lock(file: BinaryIO) -> None:
    """Lock a file without a wait; raise BlockingIOError if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno != errno.EBADF:
            raise
        # NFS refuses an exclusive lock on another user's file, which is open for reading only.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


class FileLock:
    """A lock on a file, which is created if missing."""

    def __init__(self, path: Path):
        self.path, self.is_held = path, False  # stays False on a file system without locks
        self._file: BinaryIO | None = None

    def take(self) -> bool:
        """Take the lock; return False if another process holds it. Warn and return True if locks
        are unsupported."""
        self._file = self._file or self._open()
        try:
            _lock(self._file)
        except BlockingIOError:
            return False
        except OSError as e:
            sys.stderr.write(
                f'{self.path}: this file system has no locks ({e.strerror}); start only one '
                'program at a '
                'time in this folder\n'
            )
            return True
        # the previous holder has deleted the file in the meantime
        if not self._is_current(self._file):
            self.close()
            return self.take()
        self.is_held = True
        with suppress(OSError):
            self._file.truncate(0)
            self._file.write(
                f'process {os.getpid()} on {platform.node()} since '
                f'{datetime.now():%Y-%m-%d %H:%M:%S}\n'.encode()
            )
        return True

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, 'a+b', buffering=0, opener=no_link)
        except PermissionError:  # another user's file; read access suffices for a lock
            if not self.path.exists():
                raise
            return open(self.path, 'rb', buffering=0, opener=no_link)

    def _is_current(self, file: BinaryIO) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        return False

    def holder(self) -> str:
        """Return the process that holds the lock, as the file names it."""
        return read_holder(self.path) or 'another process'

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file, self.is_held = None, False


def read_holder(path: Path) -> str:
    """Return the last holder that a lock file names; '' if there is none."""
    with suppress(OSError), open(path, 'rb', opener=regular_file) as f:
        return f.read(200).decode(errors='replace').strip()
    return ''


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds a lock; None if unknown, as on a file system that hides locks
    of other hosts."""
    try:
        with open(path, 'rb', opener=regular_file) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False if f' on {platform.node()} ' in f'{read_holder(path)} ' else None


@contextmanager
def folder_lock(
    folder: Path, option: str = '--run-dir', name: str = LAUNCHER_LOCK
) -> Iterator[None]:
    """Lock a folder for one program; remove the folders created here if no run began in them.

    Raise ConfigError if it is in use, not writable, or has another file of this name.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # deepest first
    lock = FileLock(folder / name)
    with writing_folder(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        if not lock.path.is_file() or not lock.holder().startswith(('process ', 'another ')):
            refuse_existing([lock.path], option)
        is_taken = lock.take()
    if not is_taken:
        raise ConfigError(
            f'{option}: {folder} is in use by {lock.holder()}; wait for it or use a new folder'
        )
    try:
        yield
    finally:
        with suppress(OSError):
            # before close(), so that no other program can lock a file that is then deleted
            lock.path.unlink()
        lock.close()
        with suppress(OSError):
            if folder in made and not list_runs(folder):
                for record in RECORDS:
                    (folder / record).unlink(missing_ok=True)
            for path in made:
                path.rmdir()
