"""Reading of untrusted files, and atomic writing."""

import codecs
import errno
import hashlib
import io
import itertools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mlperf_rn50.errors import ConfigError, FullDisk, StorageError, UserError

MAX_LINE_BYTES = 1 << 21  # maximum length of a line in a log
_BLOCK_BYTES = 1 << 24
PASSING_FAULTS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of storage, also over a network
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, *PASSING_FAULTS)
_KINDS = {
    stat.S_IFDIR: 'a folder',
    stat.S_IFIFO: 'a named pipe',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
}


def temporary_of(path: Path, kind: str = '') -> Path:
    """Return a hidden temporary path beside a file or folder. kind is an additional suffix, such as
    '.old'."""
    return path.with_name(f'.{path.name}.{os.getpid()}{kind}.tmp')


def temporaries_in(folder: Path, name: str = '*') -> list[Path]:
    """Return the temporary files that killed writers left in a folder. `name` is a glob pattern for
    the final names."""
    return sorted(folder.glob(f'.{name}.*.tmp'))


def check_exists(path: Path, expected: str) -> None:
    """Raise UserError if a user named a path without a file or folder."""
    if not path.exists():
        raise UserError(f'{path}: no such file or folder; expected {expected}; correct the path')


def refuse_existing(paths: Iterable[Path], option: str = '--out') -> None:
    """Raise ConfigError if a path exists, also as a link to nothing, because it may be of the
    user."""
    if found := [path for path in paths if os.path.lexists(path)]:
        others = f' (and {len(found) - 1} more)' if len(found) > 1 else ''
        raise ConfigError(
            f'{option}: {found[0]}{others} exists already and is not replaced; move it, or use a '
            'new name or folder'
        )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file. After a block without error, it replaces the file or link at path, never the
    link's target."""
    temporary = temporary_of(path)
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, 'xb') as f:
            yield f
            sync(f)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it always has either the old or the new content. A link is replaced by
    the file."""
    with replacing(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


def dump_json(path: Path, content: dict[str, Any], indent: int = 2) -> None:
    """Write an object as indented JSON. Create the folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=indent) + '\n')


def regular_file(path: str, flags: int) -> int:
    """Opener for open(): open a regular file; raise OSError for others, such as a pipe, which may
    block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(
            errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL,
            f'got {_KINDS.get(stat.S_IFMT(mode), "a special file")}, expected a file',
            path,
        )
    return descriptor


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading bytes. Raise OSError as regular_file does."""
    return open(path, 'rb', opener=regular_file)


def no_link(path: str, flags: int) -> int:
    """Open a file, as the opener of open(). Raise OSError for a link, which could lead out of a run
    folder."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, 'got a hard link, expected a file with one name', path)
    return descriptor


def walk(
    folder: Path, onerror: Callable[[OSError], object]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder like os.walk, then linked folders outside it once each. Works at any depth,
    without recursion."""
    left = [os.fspath(folder)]
    links: list[str] = []
    top = Path(os.path.realpath(folder))
    walked = [top]
    while left or links:
        if not left:
            link = links.pop(0)
            target = Path(os.path.realpath(link))
            if not top.is_relative_to(target) and not any(map(target.is_relative_to, walked)):
                left.append(link)
                walked.append(target)
            continue
        if found := next(os.walk(left.pop(), onerror=onerror), None):
            place, folders, names = found
            yield place, sorted(folders), sorted(names)
            for path in (os.path.join(place, name) for name in sorted(folders, reverse=True)):
                (links if os.path.islink(path) else left).append(path)


def files_below(folder: Path, onerror: Callable[[OSError], object]) -> Iterator[Path]:
    """Yield the files of a folder and of its folders, in the order of walk()."""
    for place, _, names in walk(folder, onerror):
        for name in names:
            yield Path(place, name)


def raise_error(error: OSError) -> NoReturn:
    """Raise the error of a folder that cannot be read; for walk()."""
    raise error


def read_text(path: Path, max_bytes: int, errors: str = 'strict') -> str:
    """Return the text of a file without a byte order mark; errors: as of bytes.decode.

    Raise ValueError above max_bytes or if it is not UTF-8, and OSError as open() does.
    """
    with open_regular(path) as f:
        content = f.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f'is larger than {max_bytes} bytes')
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError('is UTF-16, expected UTF-8; convert it')
    return content.decode('utf-8-sig', errors)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raise OSError as regular_file does."""
    with open_regular(path) as f:
        return f.read()


def numbered_lines(path: Path, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each line of a regular file, cut off after `limit` bytes. Raise
    OSError as open().

    The first line has no byte order mark.
    """
    with open_regular(path) as f:
        for number in itertools.count(1):
            line = part = f.readline(limit)
            if not line:
                return
            while part and not part.endswith(b'\n'):
                part = f.readline(limit)
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON. Raise ValueError if it is malformed, which includes NaN, or nested too
    deeply."""

    def refuse(name: str) -> None:
        raise ValueError(f'got {name}, expected a number')

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as e:
        raise ValueError('is nested too deeply') from e


def load_ini(path: Path) -> ConfigParser:
    """Return the sections of an .ini file, whose keys and values are taken as they are."""
    sections = ConfigParser(interpolation=None)
    sections.optionxform = str  # type: ignore[assignment,method-assign]
    sections.read_string(path.read_text(encoding='utf-8'))
    return sections


def digest_of(path: Path, kind: str = 'sha256') -> str:
    """Return the digest of a regular file as hexadecimal digits. Raise OSError as regular_file
    does."""
    digest = hashlib.new(kind)
    with open_regular(path) as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class HashedFile(io.RawIOBase):
    """A binary file that is written sequentially and hashed at the same time."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


class LineFile:
    """A text file that grows by whole lines. It is unbuffered, so that no line is lost if the
    process is killed."""

    def __init__(self, path: Path, is_new: bool = False):
        """Open or create a file and remove an incomplete last line. With is_new, an existing file
        is an error."""
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
        """Append a line completely or not at all. Raise StorageError on failure."""
        before = os.fstat(self._file.fileno()).st_size
        rest = line.encode('utf-8', 'replace') + b'\n'
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as e:
            with suppress(OSError):
                self._file.truncate(before)
            raise storage_error(self._path, e) from e

    def close(self) -> None:
        """Close the file. Raise StorageError if the disk reports a late write error."""
        with writing(self._path):
            self._file.close()


class LineHandler(logging.Handler):
    """Handler that writes each message to a LineFile at once and raises its errors, unlike the
    handlers of logging."""

    def __init__(self, path: Path, is_new: bool):
        super().__init__()
        self._file = LineFile(path, is_new)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record))

    def close(self) -> None:
        self._file.close()
        super().close()


def describe_disk(path: Path) -> str:
    """Describe the free space, or the lack of inodes, of the disk with a path, which need not
    exist."""
    try:
        mount = next(p for p in (path.resolve(), *path.resolve().parents) if os.path.ismount(p))
        free = os.statvfs(mount)
    except OSError as e:
        return f'the disk does not respond ({e.strerror})'
    if free.f_files and not free.f_favail:
        return f'the disk at {mount} has no inodes left; remove files'
    return f'the disk at {mount} has {free.f_bavail * free.f_frsize} bytes free'


def storage_error(path: Path, error: OSError, what: str = '') -> StorageError:
    """Return the error for a failed write of `what`, such as 'the weights', with the free disk
    space."""
    if error.errno in (errno.ELOOP, errno.EMLINK):
        kind = 'symbolic' if error.errno == errno.ELOOP else 'hard'
        return StorageError(
            f'{path}: got a {kind} link, expected a file of this run; replace the link with the '
            'file'
        )
    action = f'cannot write {what}' if what else 'cannot write'
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (FullDisk if is_full else StorageError)(
        f'{path}: {action}: {error.strerror}; {describe_disk(path)}; free space or repair the '
        'disk, and resume from the last checkpoint'
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the file and its disk."""
    try:
        yield
    except OSError as e:
        raise storage_error(path, e) from e


@contextmanager
def writing_folder(folder: Path, option: str = '--out') -> Iterator[None]:
    """Convert an OSError to a ConfigError that names the option and its folder."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f'{option}: {folder}: {e.strerror}; choose a writable folder') from e


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk, unless its file system cannot sync folders."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_if_possible(fd)
    finally:
        os.close(fd)


def sync_if_possible(fd: int) -> None:
    """Sync a file or folder to disk, unless its file system cannot, such as a read-only one."""
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents where missing, and sync the entries of the new ones to
    disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        with suppress(OSError):  # a parent without read permission
            sync_folder(path.parent)
