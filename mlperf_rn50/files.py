"""Reading files without trusting them, and writing them so that nothing half-written is ever found."""
import errno
import hashlib
import io
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mlperf_rn50.errors import ConfigError, StorageError

MAX_LINE_BYTES = 1 << 20  # of a line of a log or of metrics

# What a disk says that is full, over its quota, failing or no longer to be written.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_KINDS = {stat.S_IFDIR: 'a folder', stat.S_IFIFO: 'a named pipe', stat.S_IFCHR: 'a device', stat.S_IFBLK: 'a device'}


def temporary_of(path: Path, kind: str = '') -> Path:
    """Where a file or folder is while it is not whole: hidden beside its place; kind: such as '.old'."""
    return path.with_name(f'.{path.name}.{os.getpid()}{kind}.tmp')


def temporaries_in(folder: Path, name: str = '*') -> list[Path]:
    """What killed writers left in a folder of the files of a name, a glob pattern; all that temporary_of makes."""
    return sorted(folder.glob(f'.{name}.*.tmp'))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is either the old or the new one, whatever happens."""
    temporary = temporary_of(path)
    try:
        with open(temporary, 'wb', opener=no_link) as f:
            f.write(content.encode() if isinstance(content, str) else content)
            sync(f)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def dump_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as indented JSON, in a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2) + '\n')


def regular_file(path: str, flags: int) -> int:
    """Open for open() a file alone; raise OSError for a folder, and what waits for a writer or never ends: a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL,
                      f'it is {_KINDS.get(stat.S_IFMT(mode), "something else")}, not a file', path)
    return descriptor


def no_link(path: str, flags: int) -> int:
    """Open for open() what is not a symbolic link (ELOOP): a link in a run folder never leads to a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def walk(folder: Path, onerror: Callable[[OSError], object]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what os.walk does, in order of names, however deep the folder is: os.walk of Python 3.11 calls itself."""
    left = [os.fspath(folder)]
    while left:
        for place, folders, names in itertools.islice(os.walk(left.pop(), onerror=onerror), 1):
            yield place, sorted(folders), sorted(names)
            below = (os.path.join(place, name) for name in sorted(folders, reverse=True))
            left += [path for path in below if not os.path.islink(path)]


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a small file; raise ValueError where it is larger or not UTF-8, OSError as open does."""
    with open(path, 'rb', opener=regular_file) as f:
        content = f.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f'is larger than {max_bytes} bytes')
    return content.decode()


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raise OSError as regular_file does."""
    with open(path, 'rb', opener=regular_file) as f:
        return f.read()


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a regular file with their numbers; of one that is too long, its start; raise OSError."""
    with open(path, 'rb', opener=regular_file) as f:
        for number in itertools.count(1):
            line = part = f.readline(MAX_LINE_BYTES)
            if not line:
                return
            while part and not part.endswith(b'\n'):
                part = f.readline(MAX_LINE_BYTES)
            yield number, line


def parse_json(text: str | bytes) -> Any:
    """Return what JSON of any source holds; raise ValueError where it is not JSON or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError('is nested too deeply') from e


class HashedFile:
    """A binary file that is written from its start to its end, and hashed meanwhile."""

    def __init__(self, file: BinaryIO):
        self._file, self._sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Adds to the file."""
        self._sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def read(self, *_: int) -> bytes:
        """Only here because NumPy takes nothing without it for a file."""
        raise io.UnsupportedOperation

    def hexdigest(self) -> str:
        """The SHA-256 of what was written."""
        return self._sha256.hexdigest()


class LineFile:
    """A text file that grows by whole lines; each is handed over at once, so that a kill loses none."""

    def __init__(self, path: Path, is_new: bool = False):
        """Open a file, a new one if missing; cut off a last line that a killed writer left torn.

        Raise FileExistsError where is_new and it is there already, StorageError where it cannot be written.
        """
        self._path = path
        try:
            self._file = open(path, 'x+b' if is_new else 'a+b', buffering=0, opener=no_link)
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.seek(0)
                content = self._file.read()
                self._file.truncate(content.rfind(b'\n') + 1)
                self._file.seek(0, os.SEEK_END)
        except FileExistsError:
            raise
        except OSError as e:
            raise storage_error(path, e) from e

    def write(self, line: str) -> None:
        """Add a line, whole or not at all; raise StorageError where it cannot be written."""
        before, rest = os.fstat(self._file.fileno()).st_size, line.encode('utf-8', 'replace') + b'\n'
        try:
            while rest:
                rest = rest[self._file.write(rest):]
        except OSError as e:
            with suppress(OSError):
                self._file.truncate(before)
            raise storage_error(self._path, e) from e

    def close(self) -> None:
        """Add no more; raise StorageError where the disk says only now that it has not kept the lines."""
        with writing(self._path):
            self._file.close()


def storage_error(path: Path, error: OSError, what: str = '') -> StorageError:
    """What a disk would not take, and which disk that is; what: such as 'the weights'."""
    if error.errno == errno.ELOOP:
        return StorageError(f'{path}: got a symbolic link, expected a file of this run; put the file itself in its '
                            'place')
    return StorageError(f'{path}: cannot write{" " * bool(what)}{what}: {error.strerror}; {_disk_of(path)}; make '
                        'room or repair it, and go on with the last checkpoint')


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into the StorageError that names the file and its disk."""
    try:
        yield
    except OSError as e:
        raise storage_error(path, e) from e


@contextmanager
def writing_folder(folder: Path, option: str = '--out') -> Iterator[None]:
    """Turn an OSError into the ConfigError that names the option and its folder."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f'{option}: {folder}: {e.strerror}; choose a folder that can be written') from e


def _disk_of(path: Path) -> str:
    """The disk that a path is on: where it is mounted, and its free bytes."""
    try:
        mount = next(p for p in (path.resolve(), *path.resolve().parents) if os.path.ismount(p))
        free = os.statvfs(mount)
        return f'the disk at {mount} has {free.f_bavail * free.f_frsize} bytes free'
    except OSError as e:
        return f'its disk does not answer ({e.strerror})'


def sync(file: BinaryIO) -> None:
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())
