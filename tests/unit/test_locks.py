"""Lock of a run folder: one launcher at a time."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import no_link
from mlperf_rn50.runfolder import locks
from mlperf_rn50.runfolder.locks import FileLock, folder_lock
from mlperf_rn50.runfolder.records import Failure, note_failure


def test_lock_of_another_users_launcher_is_respected_on_nfs(tmp_path, monkeypatch):
    """There, an exclusive lock on a file that is open for reading only is EBADF."""
    flock = fcntl.flock

    def refuse(file, kind):
        if file.mode == 'rb' and kind & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, 'Bad file descriptor')
        flock(file, kind)

    monkeypatch.setattr(locks, 'fcntl', SimpleNamespace(**{**vars(fcntl), 'flock': refuse}))

    def read_only(path, flags):
        if flags & os.O_APPEND:
            raise PermissionError
        return no_link(path, flags)

    with closing(FileLock(tmp_path / 'lock')) as own, closing(FileLock(own.path)) as other:
        assert own.take()
        monkeypatch.setattr(locks, 'no_link', read_only)
        assert not other.take()
        own.close()
        assert other.take()


def test_second_launcher_is_refused_and_a_crash_releases_the_lock(tmp_path):
    folder = tmp_path / 'a/run'
    with (
        folder_lock(folder),
        pytest.raises(ConfigError, match=rf'is in use by process {os.getpid()} on '),
        folder_lock(folder),
    ):
        pass
    assert not (tmp_path / 'a').exists()  # as before
    code = f"""import time
from pathlib import Path
from mlperf_rn50.runfolder.locks import folder_lock
with folder_lock(Path({str(folder)!r})): print(flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ConfigError, match='is in use by'), folder_lock(folder):
            pass
        holder.kill()
    with folder_lock(folder):  # the lock file of the killed process still exists
        note_failure(folder, Failure('1-a', 'h9', 'was not reached'))
        (folder / 'result_0.txt').touch()
    assert sorted(p.name for p in folder.iterdir()) == ['failures.jsonl', 'result_0.txt']
    with folder_lock(tmp_path / 'b/run'):  # no run begins
        note_failure(tmp_path / 'b/run', Failure('1-a', 'h9', 'was not reached'))
    assert not (tmp_path / 'b').exists()
