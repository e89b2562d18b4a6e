"""The wheel: complete contents, minimal dependencies, and equal reports on every available
Python."""

import configparser
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from helpers import CLI, PUBLISHED, ROOT, run, shipped_logs
from lines import write_set

# Inputs of the wheel.
SOURCES = ('mlperf_rn50', 'docs', 'setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE')
TRAINING_PACKAGES = {'mxnet', 'mlperf-compliance', 'jsonargparse', 'psutil', 'tqdm'}
CHECKER_PACKAGES = {'mlperf-logging', 'pandas', 'scipy'}
PIP = [sys.executable, '-m', 'pip']


def find_python(version: str) -> Path | None:
    """Find a Python version in PATH, pyenv or uv; ignore shims, which may not resolve to a
    Python."""
    uv = os.environ.get('UV_PYTHON_INSTALL_DIR') or Path.home() / '.local/share/uv/python'
    uv_folder = Path(uv)
    folders = [Path(folder) for folder in os.get_exec_path()]
    places = [
        *(folder / f'python{version}' for folder in folders if folder.name != 'shims'),
        *Path.home().glob(f'.pyenv/versions/{version}.*/bin/python'),
        *uv_folder.glob(f'cpython-{version}.*/bin/python{version}'),
    ]
    return next((p for p in places if os.access(p, os.X_OK)), None)


PYTHONS = {
    '3.11': Path(sys.executable),
    **{v: p for v in ('3.10', '3.12', '3.13') if (p := find_python(v))},
}


def canonical(name):
    return re.sub('[-_.]+', '-', name).lower()


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Wheel built by pip from a copy of the checkout."""
    home = tmp_path_factory.mktemp('wheel')
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, home / 'source' / name, ignore=shutil.ignore_patterns('__pycache__')
            )
        else:
            shutil.copy(ROOT / name, home / 'source')
    build = [*PIP, 'wheel', '--no-deps', '--no-build-isolation']
    done = run([*build, '-w', home, home / 'source'])
    assert done.returncode == 0, done.stderr
    return next(home.glob('*.whl'))


@pytest.mark.slow
def test_wheel_contains_every_file_of_the_package(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith('mlperf_rn50/')}
    assert held == {
        str(p.relative_to(ROOT))
        for p in (ROOT / 'mlperf_rn50').rglob('*')
        if p.is_file() and '__pycache__' not in p.parts
    }


def pins(lock):
    lines = (ROOT / 'launch' / lock).read_text().splitlines()
    return {
        canonical(name): version
        for name, _, version in (line.partition('==') for line in lines if line[0] != '#')
    }


def test_minimum_versions_are_the_tested_versions():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    least = dict(line.split('>=') for line in setup['options']['install_requires'].split())
    pinned, in_container = pins('requirements.lock'), pins('requirements_ngc.lock')
    assert {canonical(name): version for name, version in least.items()} == {
        name: (in_container if name == 'matplotlib' else pinned)[name]
        for name in map(canonical, least)
    }


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Synthetic set with a spread that Python 3.10 would round differently, a measured sweep, and
    published logs."""
    home = write_set(
        tmp_path_factory.mktemp('logs') / 'made_up/n1',
        epoch_s=lambda k: 7.1 + k / 3,
        target=0.759,
        accuracies=lambda k: [0.1] * (36 + k % 3) + [0.7591],
    )
    return [home, shipped_logs() / 'digits_sweep', *([PUBLISHED] if PUBLISHED.is_dir() else [])]


def clean_environment(**variables):
    """Return the environment without variables that add packages."""
    return {
        k: v for k, v in os.environ.items() if not k.startswith(('PYTHON', 'VIRTUAL_ENV'))
    } | variables


def pip(home, *words):
    """Run pip of this environment on the environment at home, which lacks pip."""
    on_home = ['--disable-pip-version-check', '--python', home / 'bin/python']
    return run([*PIP, *on_home, *words], env=clean_environment())


def install(home, package):
    """Install a package with dependencies; return the names of all installed packages."""
    for words in (['install', package], ['check']):
        done = pip(home, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    return {canonical(p['name']) for p in json.loads(pip(home, 'list', '--format', 'json').stdout)}


@pytest.fixture(scope='module', params=PYTHONS)
def home(request, tmp_path_factory):
    """Empty virtual environment."""
    home = tmp_path_factory.mktemp('home')
    venv = [PYTHONS[request.param], '-m', 'venv', '--without-pip', home]
    done = run(venv, env=clean_environment())
    assert done.returncode == 0, done.stderr
    yield home
    shutil.rmtree(home)


def run_both(home, *words, path=ROOT):
    """Run the installed program and the checkout's; assert equal output, and return the result."""

    def run_here(program, env):
        return run([*program, *words], cwd=tempfile.mkdtemp(dir=home), env=env)

    done = run_here([home / 'bin/mlperf-rn50'], clean_environment())
    expected = run_here(CLI, clean_environment(PYTHONPATH=str(path)))
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout), done.stderr
    return done


@pytest.mark.slow
def test_report_works_without_checker_and_training_packages(home, wheel, logs, tmp_path):
    assert not install(home, f'{wheel}') & (TRAINING_PACKAGES | CHECKER_PACKAGES)
    without = tmp_path / 'without/mlperf_logging.py'
    without.parent.mkdir()
    without.write_text('raise ModuleNotFoundError("not here", name="mlperf_logging")\n')
    done = run_both(home, 'report', *logs, '--format', 'json', path=f'{without.parent}:{ROOT}')
    assert done.returncode == 0 and len(json.loads(done.stdout)) > 0

    def run_here(*words):
        return run([home / 'bin/mlperf-rn50', *words], cwd=tmp_path, env=clean_environment())

    for words in (
        ['--version'],
        ['predict', 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet', '--layouts', '1x8 2x8'],
        ['recipe', '--global-batch-size', '1664'],
        ['watch', shipped_logs() / 'digits_five', '--once'],
        ['report', logs[0], '--out', 'report'],
    ):
        done = run_here(*words)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert '<svg' in (tmp_path / 'report/report.html').read_text()
    done = run_here('check', logs[0] / 'result_0.txt')
    message = "pip install '.[check]' in the checkout\n"
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.endswith(message)


@pytest.mark.slow
def test_check_and_package_require_an_extra(home, wheel, logs):
    names = install(home, f'{wheel}[check]')  # in addition to the packages from the previous test
    assert names >= CHECKER_PACKAGES and not names & TRAINING_PACKAGES
    done = run_both(home, 'report', *logs, '--format', 'json')
    # the made-up set is refused
    assert done.returncode == 1 and '"reference_epochs"' in done.stdout
    five = shipped_logs() / 'digits_five'
    done = run_both(home, 'check', *sorted(five.glob('result_*.txt')), logs[0] / 'result_0.txt')
    assert done.returncode == 1 and 'format passes: v0.5, v0.7 to v4.0; can be' in done.stdout
    options = '--org us --system vm --out tree --code'.split()
    done = run_both(home, 'package', five, *options, ROOT)
    assert done.returncode == 1 and 'found no errors (v4.0)' in done.stdout  # digits
    if not (home / 'lib/python3.11').is_dir():
        done = pip(home, 'install', '--dry-run', f'{wheel}[cpu]')
        assert done.returncode == 1
        assert 'No matching distribution found for mxnet<0; python_version' in done.stderr
