"""Scripts of launch/ that run in their checkout: wherever it is, and whatever the environment says."""
import os
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, run

PACKAGES = Path('.venv/lib/python3.11/site-packages')
SCRIPTS = ('setup.sh', 'test.sh', 'demo.sh', 'lint.sh')


@pytest.fixture
def checkout(tmp_path):
    """Makes a checkout in a folder: scripts, the locked versions, and stand-ins of .venv that say where they run."""
    def make(name):
        folder = tmp_path / name
        for part in ('launch', '.venv/bin', PACKAGES / 'mxnet', PACKAGES / 'horovod/mxnet'):
            (folder / part).mkdir(parents=True)
        for path in ('setup.cfg', 'launch/requirements.lock', 'launch/setup_ngc.sh', *(f'launch/{s}' for s in SCRIPTS)):
            shutil.copy(ROOT / path, folder / path)
        for stand_in in ('python', 'ruff'):
            (folder / '.venv/bin' / stand_in).write_text('#!/bin/sh\necho "$0 in $PWD"; exit 3\n')
            (folder / '.venv/bin' / stand_in).chmod(0o755)
        return folder
    return make


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_script_runs_in_its_own_checkout_whatever_cdpath_says(checkout, tmp_path, script):
    own, other = checkout('own'), checkout('other')
    for folder in (own, other):
        if script not in ('setup.sh', 'lint.sh'):  # what they start first
            (folder / 'launch/setup.sh').write_text('#!/bin/sh\necho "setup in $PWD"; exit 3\n')
    done = run(['bash', f'launch/{script}', *(['--check'] if script == 'setup.sh' else [])], cwd=own,
               env={'PATH': os.environ['PATH'], 'CDPATH': str(other)})
    said = done.stdout + done.stderr
    assert str(other) not in said and f'in {own}' in said, said


def test_a_check_needs_no_environment_but_a_path(checkout):
    own = checkout('a b\'c')
    done = run([own / 'launch/setup.sh', '--check'], env={'PATH': os.environ['PATH']})
    assert done.returncode == 2 and 'does not import' in done.stderr  # the stand-in imports nothing
    assert done.stderr.count('\n') == 1
    (own / PACKAGES / 'mxnet').rmdir()
    done = run([own / 'launch/setup.sh', '--check'])
    assert done.returncode == 2 and done.stderr == 'launch/setup.sh: .venv is unfinished; run launch/setup.sh\n'


@pytest.mark.parametrize('name', ['a\nb', 'a:b', 'a"b', 'a$b', 'a`b', 'a\\b'])
def test_a_path_that_programs_cannot_be_started_in_is_refused(checkout, name):
    done = run([checkout(name) / 'launch/setup.sh', '--check'])
    assert done.returncode == 2 and 'move the checkout' in done.stderr and done.stderr.count('\n') == 1, done.stderr


def test_a_place_that_cannot_be_written_is_named(checkout, tmp_path):
    tools = tmp_path / 'bin'  # no Python: nothing is installed, whatever happens
    tools.mkdir()
    for name in ('bash', 'cat', 'cut', 'dirname', 'flock', 'mktemp', 'rm', 'sed', 'sha256sum'):
        (tools / name).symlink_to(shutil.which(name))
    own = checkout('own')
    done = run([own / 'launch/setup.sh'], env={'PATH': str(tools), 'TMPDIR': str(tmp_path / 'none')})
    assert done.returncode == 2, done.stderr
    assert done.stderr == (f'launch/setup.sh: no folder can be made in {tmp_path}/none; set TMPDIR to another folder\n')
    (own / '.venv.lock').unlink()
    (own / '.venv.lock').mkdir()
    done = run([own / 'launch/setup.sh'], env={'PATH': str(tools), 'TMPDIR': str(tmp_path)})
    assert done.returncode == 2 and done.stderr == (
        f'launch/setup.sh: {own} cannot be written, where .venv goes; use a checkout of yours\n')
