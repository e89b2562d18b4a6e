"""A command whose packages are not installed says in one line what installs them."""
import configparser
import os
import re

import pytest
from helpers import CLI, ROOT, run

from mlperf_rn50.cli._packages import EXTRAS, explain_missing

# What pip calls them, where it is not what is imported.
DISTRIBUTIONS = {'nvidia': 'nvidia-dali-cuda120', 'pil': 'pillow', 'pynvml': 'nvidia-ml-py', 'sklearn': 'scikit-learn'}
BATCH = ['--train.local_batch_size', '2', '--data.synthetic', 'true']


def without(folder, *names):
    """The environment of a program that does not find some packages."""
    for name in names:
        (folder / f'{name}.py').write_text(
            f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})\n')
    return {**os.environ, 'PYTHONPATH': f'{folder}:{ROOT}'}


@pytest.mark.parametrize('words, missing, said', [
    (['prepare', 'digits', '--out', 'digits'], ['sklearn'], 'scikit-learn is not installed; install it with '
     "launch/setup.sh in the checkout, or pip install 'mlperf-rn50[demo]'"),
    (['prepare', 'digits', '--out', 'digits', '--workers', '2'], ['mxnet'], "MXNet is not installed; install it with "
     "launch/setup.sh in the checkout, or pip install 'mlperf-rn50[cpu]'"),
    (['prepare', 'folder', '--source', 'pictures', '--out', 'packed', '--workers', '1'], ['PIL'],
     'Pillow is not installed'), (['train', '--help'], ['jsonargparse'], "'mlperf-rn50[cpu]'"),
    (['doctor'], ['mxnet'], 'MXNet is not installed'), (['doctor'], ['nvidia'], 'DALI is not installed'),
    (['doctor'], ['psutil'], 'psutil is not installed'), (['bench', 'ops'], ['mxnet'], 'MXNet is not installed'),
    (['train', *BATCH], ['mxnet'], 'MXNet is not'),
    (['export', 'x', '--format', 'onnx'], ['onnx'], "'mlperf-rn50[export]'"),
    (['classify', 'x', 'y.png'], ['mxnet'], 'MXNet is not installed')])
def test_one_line_says_what_to_install(words, missing, said, tmp_path):
    for split in ('train', 'val'):
        (tmp_path / f'pictures/{split}/cat').mkdir(parents=True)
        (tmp_path / f'pictures/{split}/cat/1.png').write_bytes(b'\x89PNG')
    done = run([*CLI, *words], cwd=tmp_path, env=without(tmp_path, *missing))
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    [line] = [x for x in done.stderr.splitlines() if 'img/s' not in x]
    assert line.startswith('mlperf-rn50: ') and said in line


@pytest.mark.parametrize('name', ['mlperf_rn50.nothing', 'surprise', None])
def test_any_other_module_is_a_bug_and_keeps_its_traceback(name):
    assert explain_missing(ModuleNotFoundError(f'No module named {name!r}', name=name)) is None


def test_a_shell_completes_the_other_commands(tmp_path):
    done = run([*CLI, 'completion', 'bash'], env=without(tmp_path, 'jsonargparse'))
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
