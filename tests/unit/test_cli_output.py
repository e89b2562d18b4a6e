"""Output streams: closed pipes, full disks, and characters that the encoding lacks."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import CLI, HANG_LIMIT_S, run
from lines import write_set

FULL = 'mlperf-rn50: cannot write the output: No space left on device\n'


@pytest.fixture(scope='module')
def log(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp('set'), 1, True) / 'result_0.txt'


def arguments_of(log, command):
    """Return a command whose output fits a buffer, or whose output is larger than any buffer."""
    return {
        'little': ['report', log],
        'large': ['check', *[log] * 400],
        'help': ['report', '--help'],
    }[command]


def run_into(stdout, arguments, stderr=subprocess.PIPE):
    # Buffered, as usual, because argparse ignores write errors of unbuffered help texts.
    buffered = {k: v for k, v in os.environ.items() if k != 'PYTHONUNBUFFERED'}
    return subprocess.run(
        [*CLI, *map(str, arguments)],
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=HANG_LIMIT_S,
        env=buffered,
    )


@pytest.mark.parametrize('command', ['little', 'large', 'help'])
def test_closed_pipe_ends_the_command_without_an_error(log, command):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(writer, arguments_of(log, command))
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, '')  # 141 for a shell


@pytest.mark.parametrize('command', ['little', 'large'])
def test_full_disk_is_a_one_line_error(log, command):
    with open('/dev/full', 'w') as full:
        done = run_into(full, arguments_of(log, command))
    assert (done.returncode, done.stderr) == (1, FULL)


def test_unwritable_errors_keep_the_exit_code():
    with open('/dev/full', 'w') as full:
        assert run_into(subprocess.PIPE, ['report', '/nonexistent'], full).returncode == 2


def test_closed_output_is_not_an_error(log):
    code = f'import os, sys; os.close(1); os.execv(sys.executable, {[*CLI, "report", str(log)]!r})'
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=HANG_LIMIT_S
    )
    assert (done.returncode, done.stderr) == (0, '')


def test_page_is_written_for_a_user_without_home_and_name(log, tmp_path):
    code = f"""
import pwd, sys
pwd.getpwuid = lambda _: {{}}[0]  # as for a user number in a container
from mlperf_rn50.cli import main
sys.exit(main(['report', {str(log)!r}, '--out', {str(tmp_path / 'page')!r}]))"""
    without_home = {k: v for k, v in os.environ.items() if k != 'HOME'}
    done = run([sys.executable, '-c', code], env=without_home)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr
    assert (tmp_path / 'page/report.html').is_file()


@pytest.mark.parametrize(
    'name, variables',
    [
        ('系统', {'PYTHONIOENCODING': 'ascii'}),
        # file names are bytes
        ('box', {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}),
    ],
)
def test_characters_that_the_output_lacks_are_escaped(tmp_path, name, variables):
    folder = write_set(tmp_path / name, 2, True, epoch_s=lambda k: 10 + k)
    plain = {k: v for k, v in os.environ.items() if k not in ('PYTHONUTF8', 'PYTHONIOENCODING')}
    done = run([*CLI, 'report', folder, '--out', tmp_path / 'out'], env={**plain, **variables})
    assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr
    assert '\\xb1' in done.stdout and done.stdout.isascii()
    for file in ('report.md', 'report.html', 'report.csv'):
        assert name in (tmp_path / 'out' / file).read_bytes().decode(), file
