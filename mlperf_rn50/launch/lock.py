"""One launcher for a run folder."""
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.files import writing_folder
from mlperf_rn50.locks import FileLock


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a run folder; one that was made for it and stayed empty is removed again.

    Raises:
        ConfigError: another launcher holds it, or it cannot be made.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]  # the deepest first
    lock = FileLock(folder / '.launcher.lock')
    with writing_folder(folder, '--run-dir'):
        folder.mkdir(parents=True, exist_ok=True)
        is_taken = lock.take()
    if not is_taken:
        raise ConfigError(f'--run-dir: {folder} is in use by {lock.holder()}; wait for it, or choose another folder')
    try:
        yield
    finally:
        with suppress(OSError):
            lock.path.unlink()  # while it is held: the next launcher makes a new one
        lock.close()
        with suppress(OSError):
            for path in made:
                path.rmdir()
