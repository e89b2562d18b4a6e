"""The edges of what a command is given: folders of any depth, and an output of any encoding."""
import os
import subprocess

import pytest
from helpers import CLI, call, run
from lines import write_set

from mlperf_rn50.files import walk

DEPTH = 1500  # folders in each other: more than Python calls deep


@pytest.fixture
def deep(tmp_path):
    """Makes folders of a name in each other; the lowest is the working folder until it is removed."""
    here = os.getcwd()

    def deep(name):
        os.chdir(tmp_path)
        for _ in range(DEPTH):
            os.mkdir(name)
            os.chdir(name)
        return tmp_path / name
    yield deep
    os.chdir(here)
    subprocess.run(['rm', '-rf', *tmp_path.iterdir()], check=True)  # shutil.rmtree calls itself


@pytest.mark.parametrize('command', ['report', 'check'])
def test_logs_below_very_many_folders_are_read(deep, command):
    top = deep('d')
    write_set('.', 2)
    done = call(command, top)
    assert done.stderr == '' and 'Traceback' not in done.stdout
    assert ('2 logs' if command == 'check' else 'result_1.txt  converged') in done.stdout, done.stdout


@pytest.mark.parametrize('command', ['report', 'check'])
def test_a_path_that_no_system_takes_is_said(deep, command):
    done = call(command, deep('ddd'))
    assert done.returncode in (1, 2) and 'Traceback' not in done.stderr
    assert 'File name too long' in done.stdout + done.stderr


def test_the_walk_is_that_of_the_standard_library(tmp_path):
    for name in ('b/c', 'a', 'b/a', 'secret'):
        (tmp_path / name).mkdir(parents=True)
    for name in ('b/2', 'b/1', 'a/x', '0'):
        (tmp_path / name).write_text('')
    (tmp_path / 'b/link').symlink_to(tmp_path / 'a')
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'gone').symlink_to('nowhere')
    theirs = [(place, sorted(folders), sorted(names)) for place, folders, names in os.walk(tmp_path)]
    assert sorted(walk(tmp_path, print)) == sorted(theirs)
    assert [os.path.relpath(place, tmp_path) for place, _, _ in walk(tmp_path, print)] == [
        '.', 'a', 'b', 'b/a', 'b/c', 'secret']
    faults = []
    assert list(walk(tmp_path / 'none', faults.append)) == []
    assert [(type(e), e.filename) for e in faults] == [(FileNotFoundError, str(tmp_path / 'none'))]


@pytest.mark.parametrize('name, variables', [
    ('系统', {'PYTHONIOENCODING': 'ascii'}),
    ('box', {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'})])  # whose names of files are bytes
def test_letters_that_the_output_lacks_end_no_report(tmp_path, name, variables):
    folder = write_set(tmp_path / name, 2, epoch_s=lambda k: 10 + k)
    plain = {k: v for k, v in os.environ.items() if k not in ('PYTHONUTF8', 'PYTHONIOENCODING')}
    done = run([*CLI, 'report', folder, '--out', tmp_path / 'out'], env={**plain, **variables})
    assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr
    assert '\\xb1' in done.stdout and done.stdout.isascii()
    for file in ('report.md', 'report.html', 'report.csv'):
        assert name in (tmp_path / 'out' / file).read_bytes().decode(), file
