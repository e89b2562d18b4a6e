"""A command whose packages are not installed says in one line what installs them."""
import configparser
import os
import re
import sys

import pytest
from helpers import CLI, ROOT, call, run

from mlperf_rn50.cli import EXTRAS, explain_missing

# What pip calls them, where it is not what is imported.
DISTRIBUTIONS = {'nvidia': 'nvidia-dali-cuda120', 'pil': 'pillow', 'pynvml': 'nvidia-ml-py', 'sklearn': 'scikit-learn'}
INSTALL = 'is not installed; install it with launch/setup.sh in the checkout, or pip install'


@pytest.mark.parametrize('words, missing, said', [
    (['prepare', 'digits', '--out', 'digits'], 'sklearn', f"scikit-learn {INSTALL} 'mlperf-rn50[demo]'"),
    (['train', '--help'], 'jsonargparse', f"jsonargparse {INSTALL} 'mlperf-rn50[cpu]'")])
def test_one_line_says_what_to_install(words, missing, said, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    done = call(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'mlperf-rn50: {said}\n')


@pytest.mark.parametrize('words, module, name', [
    (['prepare', 'digits', '--out', 'digits', '--workers', '2'], 'mxnet', 'MXNet'), (['doctor'], 'nvidia', 'DALI')],
    ids=['of other processes', 'the doctor'])
@pytest.mark.slow  # processes, as here these packages may be imported already
def test_it_is_said_where_the_package_is_imported_late(words, module, name, tmp_path):
    (tmp_path / f'{module}.py').write_text(f'raise ModuleNotFoundError("not here", name={module!r})\n')
    done = run([*CLI, *words], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'})
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    [line] = [x for x in done.stderr.splitlines() if 'img/s' not in x]
    assert line == f"mlperf-rn50: {name} {INSTALL} 'mlperf-rn50[cpu]'"


@pytest.mark.parametrize('name', ['mlperf_rn50.nothing', None])
def test_any_other_module_is_a_bug_and_keeps_its_traceback(name):
    assert explain_missing(ModuleNotFoundError(f'No module named {name!r}', name=name)) is None


def test_a_shell_completes_the_other_commands(monkeypatch):
    monkeypatch.setitem(sys.modules, 'jsonargparse', None)
    done = call('completion', 'bash')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'evaluations' in done.stdout and 'train' in done.stdout and '--train.precision' not in done.stdout


def names_of(lines):
    return {re.split('[=<>;]', line)[0].lower() for line in lines.split()}


def test_the_extras_hold_the_packages():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    extras = setup['options.extras_require']
    always = names_of(setup['options']['install_requires'])
    for extra, packages in EXTRAS.items():
        shared = extras['train'] + extras['wheels'] if extra == 'cpu' else ''
        held = names_of(extras.get(extra, '') + shared)
        for module in packages:
            name = DISTRIBUTIONS.get(module.lower(), module.lower().replace('_', '-'))
            assert not extra or name in held | always, f'{name} is not in {extra}'
