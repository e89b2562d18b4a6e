"""Help before the set-up: no .venv, no packages, nothing is written."""

import os
import shutil
import sys

import pytest
from helpers import ROOT, run, write_files

from mlperf_rn50 import __version__
from mlperf_rn50.cli import COMMANDS

SCRIPTS = sorted(
    p.name for p in (ROOT / 'launch').iterdir() if p.is_file() and os.access(p, os.X_OK)
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """A checkout without .venv, and folders with a Python without packages, and with the programs
    of the scripts."""
    folder = tmp_path_factory.mktemp('bare')
    for name in ('launch', 'mlperf_rn50'):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
    python, programs = map(tmp_path_factory.mktemp, ('python', 'programs'))
    for name in ('bash', 'dirname', 'env', 'id', 'sed'):
        (programs / name).symlink_to(shutil.which(name))
    write_files(python, {'python3': f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'}, mode=0o755)
    return folder, python, f'{python}:{programs}'


def times_of(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob('*')}


@pytest.fixture
def bare(made):
    """The checkout and the folders, of which a test must change nothing in the checkout."""
    before = times_of(made[0])
    yield made
    assert times_of(made[0]) == before


@pytest.mark.parametrize('script', SCRIPTS)
@pytest.mark.parametrize('has_python', [True, False], ids=['python', 'shell'])
def test_script_prints_its_help_before_the_set_up(bare, tmp_path, script, has_python):
    folder, _, path = bare
    env = {'PATH': path if has_python else path.partition(':')[2], 'HOME': '/nonexistent'}
    done = run([folder / 'launch' / script, '--help'], env=env, cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout) > 60 and done.stderr == ''
    is_launcher = 'run_program' in (folder / 'launch' / script).read_text()
    assert done.stdout.startswith('usage: mlperf-rn50 ') == (is_launcher and has_python)


@pytest.mark.parametrize(
    'words', [[], *([name] for name in COMMANDS), ['train', 'schedule']], ids=' '.join
)
def test_command_prints_its_help_without_packages(bare, words):
    folder, python, path = bare
    program = [python / 'python3', '-B', '-m', 'mlperf_rn50']
    done = run([*program, *words[:1], '--help', *words[1:]], cwd=folder, env={'PATH': path})
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(('usage: mlperf-rn50', '# For a conf'))


@pytest.mark.parametrize('script', ['local.sh', 'demo.sh'])
def test_version_is_printed_without_packages(bare, script):
    folder, _, path = bare
    done = run([folder / 'launch' / script, '--version'], env={'PATH': path})
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith(f'mlperf-rn50 {__version__}')
    assert 'MXNet not installed' in done.stdout
