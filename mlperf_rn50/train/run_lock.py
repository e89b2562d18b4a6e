"""One writer to a run: the program that writes it holds its lock, which the kernel gives back however it ends."""
import fcntl
import os
import platform
import time
from contextlib import suppress
from typing import BinaryIO

from mlperf_rn50.errors import UserError
from mlperf_rn50.files import no_link, writing
from mlperf_rn50.system.launched import say
from mlperf_rn50.train.run_folder import RunFolder

# What is being killed may still write its checkpoint: a watcher and a launcher give it 35 s together.
_PATIENCE_S = 60.0


class RunLock:
    """The lock of a run, to be taken by its rank 0."""

    def __init__(self, run: RunFolder):
        self._path = run.lock
        self._file: BinaryIO | None = None
        self._since = 0.0
        self.is_held = False

    def take(self) -> bool:
        """Takes the lock; False while another program has it, to be asked again.

        Raises:
            UserError: another program still has it after a minute, or its file cannot be written.
        """
        if not self._file:
            with writing(self._path):
                self._file = open(self._path, 'a+b', buffering=0, opener=no_link)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(self._file)
            return False
        except OSError as e:
            say(f'mlperf-rn50: {self._path}: this file system has no locks ({e.strerror}); see to it that only one '
                'program writes this run')
            return True
        self.is_held = True
        with suppress(OSError):  # only there to be named
            self._file.truncate(0)
            self._file.write(f'process {os.getpid()} on {platform.node()}\n'.encode())
        return True

    def _wait(self, file: BinaryIO) -> None:
        """Raise UserError if it was waited for long enough; says so when the wait begins."""
        now = time.monotonic()
        if self._since and now - self._since > _PATIENCE_S:
            file.seek(0)
            holder = file.read(200).decode('utf-8', 'replace').strip() or 'another process'
            raise UserError(f'{self._path}: {holder} writes this run and has not ended within {_PATIENCE_S:.0f} s; '
                            'let it end, or stop it')
        if not self._since:
            self._since = now
            say(f'mlperf-rn50: {self._path}: another process still writes this run; waiting for it, at most '
                f'{_PATIENCE_S:.0f} s')

    def close(self) -> None:
        """Gives the lock back."""
        if self._file:
            self._file.close()
        self._file, self.is_held = None, False
