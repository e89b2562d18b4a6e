"""launch/setup_ngc.sh: choice of the container's Python and programs."""

import os
import re
import sys

import pytest
from helpers import ROOT, run, write_files


def call(function, folder, path):
    """Call a function of the script as launch/setup.sh does."""
    lines = (ROOT / 'launch/setup.sh').read_text()
    fail = re.search(r'^fail\(\) \{.*?^\}', lines, re.DOTALL | re.MULTILINE)[0]
    parts = [f'. {ROOT}/launch/{name}' for name in ('setup_machine.sh', 'setup_ngc.sh')]
    script = '\n'.join(['set -euo pipefail', fail, *parts, function])
    return run(['bash', '-c', script], cwd=folder, env={'PATH': f'{path}:{os.defpath}'})


@pytest.fixture
def container(tmp_path):
    """Container Python with its packages, and a checkout's .venv with the same packages."""
    for folder in (tmp_path / 'container', tmp_path / '.venv'):
        assert run([sys.executable, '-m', 'venv', '--without-pip', folder]).returncode == 0
        [packages] = folder.glob('lib/python3*/site-packages')
        write_files(
            packages,
            {f'{name}/__init__.py': '' for name in ('mxnet', 'horovod', 'nvidia/dali', 'pip')},
        )
    return tmp_path


def test_container_python_is_not_taken_from_checkout_venv(container):
    done = call(
        'find_container_python', container, f'{container}/.venv/bin:{container}/container/bin'
    )
    assert done.returncode == 0 and done.stdout.strip() == str(
        container / 'container/bin/python3'
    ), done.stderr
    done = call('find_container_python', container, f'{container}/.venv/bin')
    assert done.returncode == 2 and 'got no python3 in PATH with mxnet' in done.stderr


def test_missing_program_of_the_container_is_named(tmp_path):
    # The programs in .venv are not from the container.
    codes = {'.venv/bin/mpirun': 2, '.venv/bin/horovodrun': 3, 'bin/mpirun': 0}
    write_files(
        tmp_path, {name: f'#!/bin/sh\nexit {code}' for name, code in codes.items()}, mode=0o755
    )
    path = f'{tmp_path}/.venv/bin:{tmp_path}/bin'
    done = call('link_container_programs', tmp_path, path)
    assert done.returncode == 2 and 'horovodrun is missing in this container' in done.stderr
    assert run([tmp_path / '.venv/bin/mpirun'], env={}).returncode == 0


def test_container_packages_of_pythonpath_are_found_only_if_they_are_missing_otherwise(container):
    [packages] = (container / 'container').glob('lib/python3*/site-packages')
    (container / 'module').mkdir()
    script = (
        'add_container_packages "$(find_container_python)"; cat '
        '.venv/lib/python3*/site-packages/container.pth'
    )

    def folders():
        done = call(
            f'container_path={container}/module; {script}', container, f'{container}/container/bin'
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert 'module' not in folders()
    (packages / 'mxnet').rename(container / 'module/mxnet')
    assert [
        str(packages) in line or f'{container}/module' in line for line in folders().splitlines()
    ] == [True, True]
