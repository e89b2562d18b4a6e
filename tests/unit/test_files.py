"""Files: appending of lines, full disks, and reading of untrusted files and folders."""

import errno
import os
import resource
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from helpers import call
from lines import write_set

from mlperf_rn50 import files
from mlperf_rn50.config_file import load_tree
from mlperf_rn50.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, StorageError
from mlperf_rn50.mllog.read.description import load_object
from mlperf_rn50.runfolder.jsonl import append, decode, read_lines
from mlperf_rn50.runfolder.records import ResumedRecord


def test_torn_last_line_is_cut_off_and_a_new_line_is_written_at_once(tmp_path):
    for k, (before, kept) in enumerate([('', ''), ('torn', ''), ('a\n', 'a\n'), ('a\nto', 'a\n')]):
        path = tmp_path / f'{k}'
        path.write_text(before)
        lines = files.LineFile(path)
        lines.write('next é')
        assert path.read_text() == kept + 'next é\n'
    with pytest.raises(FileExistsError):
        files.LineFile(path, is_new=True)


def test_error_of_a_full_disk_names_file_and_disk(tmp_path):
    lines = files.LineFile(Path('/dev/full'))
    with pytest.raises(StorageError) as e:
        lines.write('x')
    start = '/dev/full: cannot write: No space left on device; the disk at /dev has '
    assert str(e.value).startswith(start) and e.value.exit_code == EXIT_USAGE
    lines.close()
    with pytest.raises(StorageError, match='cannot write: No such file or directory') as e:
        files.LineFile(tmp_path / 'none/lines')
    assert e.value.exit_code == EXIT_FAILED


def test_error_of_a_disk_without_inodes_says_so(tmp_path, monkeypatch):
    disk = SimpleNamespace(f_files=12, f_favail=0, f_bavail=9, f_frsize=4096)
    monkeypatch.setattr(os, 'statvfs', lambda _: disk)

    def text():
        return str(files.storage_error(tmp_path / 'log', OSError(errno.ENOSPC, 'full')))

    assert ' has no inodes left; remove files; ' in text()
    disk.f_files = 0  # as on btrfs, which has no fixed number
    assert ' has 36864 bytes free; free space' in text()


def test_line_that_does_not_fit_leaves_no_part(tmp_path):
    lines = files.LineFile(tmp_path / 'lines')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match='lines: cannot write: File too large'):
            for _ in range(10):
                lines.write(100 * 'x')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # 91 bytes of the tenth line would have fitted
    assert (tmp_path / 'lines').read_text() == 9 * (100 * 'x' + '\n')


def test_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / 'config.yaml'
    files.write_atomically(path, 'old')
    full = Mock(side_effect=OSError(errno.ENOSPC, 'No space left on device'))
    for name in ('fsync', 'statvfs'):
        monkeypatch.setattr(os, name, full)
    message = 'config.yaml: cannot write: No space left on device; the disk does not respond'
    with pytest.raises(StorageError, match=message), files.writing(path):
        files.write_atomically(path, 'new')
    assert path.read_text() == 'old' and files.temporaries_in(tmp_path) == []


def test_untrusted_text_and_json_are_bounded(tmp_path):
    path = tmp_path / 'x'
    path.write_text('12345')
    assert files.read_text(path, 5) == '12345'
    with pytest.raises(ValueError, match='larger than 4 bytes'):
        files.read_text(path, 4)
    os.mkfifo(tmp_path / 'pipe')
    for endless in (Path('/dev/zero'), tmp_path / 'pipe'):
        with pytest.raises(OSError, match='expected a file'):
            files.read_text(endless, 1000)
        assert list(read_lines(endless, Step)) == []
    deep = 'nested too deeply'
    for text, message in (
        ('[' * 100_000, deep),
        ('{"a":' * 100_000, deep),
        ('{"a": NaN}', 'expected a number'),
        ('[-Infinity]', 'expected a number'),
        ('9' * 5000, 'digits'),
    ):
        with pytest.raises(ValueError, match=message):
            files.parse_json(text)


class Step(msgspec.Struct):
    step: int
    loss: float | None = None


def test_invalid_content_decodes_to_none():
    for text in '{"step": "1"}', '{"step": 1, "loss": NaN}', '[1]', '', '{"step": 1', '[' * 100_000:
        assert decode(text, Step) is None
    assert decode(b'\xff', Step) is None


def test_lines_keep_their_numbers_and_torn_lines_are_skipped(tmp_path):
    path = tmp_path / 'steps.jsonl'
    path.write_text('{"step": 1}\nnoise\n{"other": 2}\n{"step": 3, "loss": 0.5}\n{"step": 4}')
    assert list(read_lines(path, Step, b'"step"')) == [(1, Step(1)), (4, Step(3, 0.5))]
    path.write_text('x' * (2 * files.MAX_LINE_BYTES) + '{"step": 1}\n{"step": 2}\n')
    assert list(read_lines(path, Step)) == [(2, Step(2))]


def test_record_after_a_torn_line_is_a_line_of_its_own(tmp_path):
    path = tmp_path / 'steps.jsonl'
    for before, steps in (('', [2]), ('{"step": 1}\n', [1, 2]), ('{"st', [2])):
        path.write_text(before)
        append(path, Step(2))
        assert [step.step for _, step in read_lines(path, Step)] == steps


def test_walk_matches_the_standard_library(tmp_path):
    for name in ('b/c', 'a', 'b/a', 'secret'):
        (tmp_path / name).mkdir(parents=True)
    for name in ('b/2', 'b/1', 'a/x', '0'):
        (tmp_path / name).write_text('')
    (tmp_path / 'b/link').symlink_to(tmp_path / 'a')
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'gone').symlink_to('nowhere')
    expected = [
        (place, sorted(folders), sorted(names)) for place, folders, names in os.walk(tmp_path)
    ]
    assert sorted(files.walk(tmp_path, print)) == sorted(expected)
    names = [os.path.basename(place) for place, _, _ in files.walk(tmp_path, print)]
    assert names[1:] == 'a b a c secret'.split()
    faults = []
    assert list(files.walk(tmp_path / 'none', faults.append)) == []
    assert [(type(e), e.filename) for e in faults] == [(FileNotFoundError, str(tmp_path / 'none'))]


@pytest.fixture
def deep(tmp_path):
    """Function that creates nested folders of a name; the deepest is the working folder until the
    test ends."""
    here = os.getcwd()

    def deep(name):
        os.chdir(tmp_path)
        for _ in range(1500):  # deeper than Python's recursion limit
            os.mkdir(name)
            os.chdir(name)
        return tmp_path / name

    yield deep
    os.chdir(here)
    subprocess.run(['rm', '-rf', *tmp_path.iterdir()], check=True)  # shutil.rmtree is recursive


def test_logs_in_deeply_nested_folders_are_read(deep):
    top = deep('d')
    write_set('.', 2)
    longer = deep('ddd')  # path longer than any system allows
    for command, text in (('report', 'result_1.txt  converged'), ('check', '2 logs')):
        done = call(command, top)
        assert done.stderr == '' and text in done.stdout
        done = call(command, longer)
        assert done.returncode in (1, 2) and 'File name too long' in done.stdout + done.stderr


def test_output_replaces_a_link_and_leaves_its_target(tmp_path):
    kept = tmp_path / 'kept'
    for make_link in (os.symlink, os.link):
        kept.write_text('precious')
        out = tmp_path / make_link.__name__
        for path in (out, files.temporary_of(out)):
            make_link(kept, path)
        files.write_atomically(out, 'new')
        assert out.read_text() == 'new' and not out.is_symlink() and kept.read_text() == 'precious'
    (tmp_path / 'folder').symlink_to(tmp_path)  # links to folders are followed
    files.write_atomically(tmp_path / 'folder/kept', 'new')
    assert kept.read_text() == 'new' and list(tmp_path.glob('.*')) == []


def test_failed_output_keeps_the_old_file(tmp_path):
    (tmp_path / 'a').write_text('old')
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / 'a') as f:
        f.write(b'new')
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ['a'] and (tmp_path / 'a').read_text() == 'old'


def test_byte_order_marks_are_skipped_and_utf16_is_named(tmp_path):
    path = tmp_path / 'config.yaml'
    path.write_bytes(b'\xef\xbb\xbfa\n\xef\xbb\xbfb\n')  # only the first is a mark
    assert files.read_text(path, 99) == 'a\n\ufeffb\n'
    assert list(files.numbered_lines(path)) == [(1, b'a\n'), (2, b'\xef\xbb\xbfb\n')]
    path.write_text('run: {seed: 7}\n', encoding='utf-8-sig')
    assert load_tree(path) == {'run': {'seed': 7}}
    path.write_text('{"event": "resumed", "step": 40}\n', encoding='utf-8-sig')
    assert [record.step for _, record in read_lines(path, ResumedRecord)] == [40]
    path.write_text('run: {seed: 7}\n', encoding='utf-16')
    with pytest.raises(ConfigError, match='UTF-16'):
        load_tree(path)
    path.write_text('{}', encoding='utf-16')
    with pytest.raises(ValueError, match='UTF-16'):
        load_object(path)


@pytest.mark.parametrize('number, is_ignored', [(errno.EINVAL, True), (errno.EIO, False)])
def test_file_system_that_cannot_sync_folders_is_no_fault(
    tmp_path, monkeypatch, number, is_ignored
):
    monkeypatch.setattr(os, 'fsync', Mock(side_effect=OSError(number, '')))
    with nullcontext() if is_ignored else pytest.raises(OSError):
        files.sync_folder(tmp_path)
