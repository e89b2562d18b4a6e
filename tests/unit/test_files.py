"""Files that grow by lines, on disks that take no more, and files that are read without trust."""
import errno
import os
import resource
from pathlib import Path

import pytest

from mlperf_rn50.errors import EXIT_FAILED, StorageError
from mlperf_rn50.files import (
    LineFile,
    parse_json,
    read_text,
    storage_error,
    temporaries_in,
    temporary_of,
    write_atomically,
    writing,
)


@pytest.mark.parametrize('before, kept', [('', ''), ('torn', ''), ('whole\n', 'whole\n'), ('a\nb\nto', 'a\nb\n')])
def test_a_torn_last_line_is_cut_off_and_a_new_one_stands_there_at_once(tmp_path, before, kept):
    path = tmp_path / 'lines'
    path.write_text(before)
    lines = LineFile(path)
    lines.write('next é')
    assert path.read_text() == kept + 'next é\n'
    with pytest.raises(FileExistsError):
        LineFile(path, is_new=True)


def test_a_link_is_not_written_through(tmp_path):
    target, link = tmp_path / 'target', tmp_path / 'link'
    target.write_text('without an end of line')
    link.symlink_to(target)
    with pytest.raises(StorageError, match='link: got a symbolic link'):
        LineFile(link)
    temporary_of(link).symlink_to(target)
    with pytest.raises(OSError):
        write_atomically(link, 'new')
    assert target.read_text() == 'without an end of line'


def test_a_full_disk_is_named_with_the_file(tmp_path):
    lines = LineFile(Path('/dev/full'))
    with pytest.raises(StorageError) as e:
        lines.write('x')
    assert str(e.value).startswith('/dev/full: cannot write: No space left on device; the disk at /dev has ')
    assert 'bytes free; make room' in str(e.value) and e.value.exit_code == EXIT_FAILED
    lines.close()
    with pytest.raises(StorageError, match='lines: cannot write: No such file or directory'):
        LineFile(tmp_path / 'none/lines')


def test_of_a_line_that_does_not_fit_nothing_is_left(tmp_path):
    lines, (soft, hard) = LineFile(tmp_path / 'lines'), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match='lines: cannot write: File too large'):
            for _ in range(10):
                lines.write(100 * 'x')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / 'lines').read_text() == 9 * (100 * 'x' + '\n')  # 91 bytes of a tenth would have had room


def test_what_could_not_be_written_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / 'config.yaml'
    write_atomically(path, 'old')

    def fail(_):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(StorageError, match='config.yaml: cannot write: No space left'), writing(path):
        write_atomically(path, 'new')
    assert path.read_text() == 'old' and temporaries_in(tmp_path) == []


def test_a_disk_that_does_not_answer_is_said(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr(os, 'statvfs', fail)
    said = str(storage_error(tmp_path / 'x', OSError(errno.EIO, 'Input/output error'), 'the weights'))
    assert 'x: cannot write the weights: Input/output error; its disk does not answer (Input/output error)' in said


def test_untrusted_text_and_json_are_bounded(tmp_path):
    path = tmp_path / 'x'
    path.write_text('12345')
    assert read_text(path, 5) == '12345'
    with pytest.raises(ValueError, match='larger than 4 bytes'):
        read_text(path, 4)
    os.mkfifo(tmp_path / 'pipe')
    for endless in (Path('/dev/zero'), tmp_path / 'pipe'):
        with pytest.raises(OSError, match='not a file'):
            read_text(endless, 1000)
    for text in ('[' * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match='nested too deeply'):
            parse_json(text)
