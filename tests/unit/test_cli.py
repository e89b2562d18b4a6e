"""Command line: usage errors, missing packages, colour and shell completion."""

import configparser
import io
import os
import re
import shlex
import shutil
import sys
from dataclasses import fields

import pytest
from helpers import CLI, ROOT, Terminal, call, run, skip_for
from lines import write_set

from mlperf_rn50 import __version__
from mlperf_rn50.cli import COMMANDS, EXTRAS, explain_missing
from mlperf_rn50.cli.terminal import has_colour, paint, paint_statuses
from mlperf_rn50.config import SECTIONS

# Distributions whose names differ from the imported module.
DISTRIBUTIONS = {
    'nvidia': 'nvidia-dali-cuda120',
    'pil': 'pillow',
    'pynvml': 'nvidia-ml-py',
    'sklearn': 'scikit-learn',
}
INSTALL = 'is not installed; in the checkout, run launch/setup.sh'


def test_help_lists_every_command_and_is_printed_without_arguments():
    done = call('--help')
    assert (
        call('help').stdout == done.stdout
        and call('help', 'check').stdout == call('check', '--help').stdout
    )
    shown = re.findall(r'^  (\w+) +[A-Z][a-z]+ ', done.stdout, re.MULTILINE)
    assert (
        done.returncode == 0
        and shown == list(COMMANDS)
        and {'train', 'bench', 'report'} < set(shown)
    )
    assert [
        name
        for name in shown
        if f'examples:\n  mlperf-rn50 {name}' not in call(name, '--help').stdout
    ] == []
    mistaken = call()
    assert (mistaken.returncode, mistaken.stdout, mistaken.stderr) == (2, '', done.stdout)


def test_help_of_a_group_lists_its_keys_and_the_short_help_the_groups():
    short, group = call('train', '--help').stdout, call('bench', '--help', 'schedule').stdout
    assert short.startswith('usage: mlperf-rn50 train [OPTIONS] [--KEY VALUE ...]\n\n')
    assert (
        all(re.search(rf'^  {name} +[A-Z]', short, re.MULTILINE) for name in SECTIONS)
        and '--run.dir' not in short
    )
    assert re.findall(r'^  (\w+): ', group, re.MULTILINE) == [
        f.name for f in fields(SECTIONS['schedule'])
    ]
    assert (
        ' 0)\n  base_lr: 0.1\n' in group
        and '--schedule.KEY VALUE' in group
        and 'Literal' not in group
    )
    assert call('help', 'train', 'comm').stdout == call('train', '--help', 'comm').stdout
    assert call('train', '--help', 'shedule').stdout == short


def test_help_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv('COLUMNS', '60')
    for words in (['export'], ['train'], ['launch', 'kubernetes']):
        lines = call('help', *words).stdout.splitlines()
        assert (
            len(lines) > 10
            and [x for x in lines if len(x) > 60 and not x.startswith('usage:')] == []
        )


def test_version_lists_the_software_stack():
    first, packages, system, processor = call('--version').stdout.splitlines()
    assert first.startswith(f'mlperf-rn50 {__version__}') and system.startswith('Python 3.11.')
    assert (
        all(f'{name} ' in packages for name in ('MXNet', 'DALI', 'Horovod', 'Open MPI'))
        and ', ' in processor
    )


def test_debug_shows_the_traceback():
    assert 'Traceback' in call('--debug', 'report', '/nonexistent').stderr
    assert 'Traceback' not in call('report', '/nonexistent').stderr


@pytest.mark.parametrize(
    'words, missing, message',
    [
        (
            ['prepare', 'digits', '--out', 'digits'],
            'sklearn',
            f"scikit-learn {INSTALL} or pip install '.[demo]'",
        ),
        (['train', '--dry-run'], 'jsonargparse', f'jsonargparse {INSTALL}'),
    ],
)
def test_missing_package_is_one_line_with_the_install_command(words, missing, message, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    done = call(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, '', f'mlperf-rn50: {message}\n')


@pytest.mark.parametrize(
    'words, module, name',
    [
        (['prepare', 'digits', '--out', 'digits', '--workers', '2'], 'mxnet', 'MXNet'),
        (['doctor'], 'nvidia', 'DALI'),
    ],
    ids=['prepare', 'doctor'],
)
@pytest.mark.slow  # separate processes, because the test process may have imported the packages
def test_missing_package_that_is_imported_late_is_one_line(words, module, name, tmp_path):
    (tmp_path / f'{module}.py').write_text(
        f'raise ModuleNotFoundError("not here", name={module!r})\n'
    )
    done = run([*CLI, *words], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'})
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    [line] = [x for x in done.stderr.splitlines() if 'img/s' not in x]
    assert line == f'mlperf-rn50: {name} {INSTALL}'


@pytest.mark.parametrize('name', ['mlperf_rn50.nothing', None])
def test_any_other_missing_module_keeps_its_traceback(name):
    assert explain_missing(ModuleNotFoundError(f'No module named {name!r}', name=name)) is None


def names_of(lines):
    return {re.split('[=<>;]', line)[0].lower() for line in lines.split()}


def test_extras_contain_the_packages():
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


@pytest.fixture
def variables(monkeypatch):
    """Environment without colour settings."""
    for name in ('NO_COLOR', 'FORCE_COLOR'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    return monkeypatch


@pytest.mark.parametrize(
    'stream, set_to, expected',
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {'NO_COLOR': '1'}, False),
        (Terminal(), {'NO_COLOR': ''}, True),
        (Terminal(), {'TERM': 'dumb'}, False),
        (io.StringIO(), {'FORCE_COLOR': '1'}, True),
        (Terminal(), {'FORCE_COLOR': '1', 'NO_COLOR': '1'}, False),
    ],
)
def test_colour_follows_terminal_and_environment(stream, set_to, expected, variables):
    for name, value in set_to.items():
        variables.setenv(name, value)
    assert has_colour(stream) == expected


@pytest.mark.usefixtures('variables')
def test_only_the_status_of_a_line_is_coloured():
    text = (
        'ok     name  all ok\nfailed     disk  failed to write\n  v0.5   open   pass, levels 1 '
        'and 2\n  bypass'
    )
    shown = paint_statuses(text, Terminal())
    assert shown == (
        f'{paint("ok", "good")}     name  all ok\n{paint("failed", "bad")}     disk  failed to '
        'write\n'
        f'  v0.5   open   {paint("pass", "good")}, levels 1 and 2\n  bypass'
    )
    assert paint_statuses(text, io.StringIO()) == text


def test_report_text_is_the_same_with_and_without_colour(tmp_path, variables):
    write_set(
        tmp_path / 'sweep/1x4', 2, is_complete=True, status=lambda k: 'success' if k else 'aborted'
    )
    piped = call('report', tmp_path)
    variables.setenv('FORCE_COLOR', '1')
    shown = call('report', tmp_path).stdout
    assert (piped.returncode, piped.stderr) == (0, '') and '\x1b' not in piped.stdout
    assert re.findall(r'\x1b\[(3\d)m(\w+)\x1b', shown) == [('33', 'aborted'), ('32', 'converged')]
    assert (
        f'{paint("Runs", "bold")}\n' in shown and re.sub(r'\x1b\[\d+m', '', shown) == piped.stdout
    )


# Typed text and the completed last argument.
CASES = [
    ('rep', 'report'),
    ('--debug che', 'check'),
    ('report --fo', '--format'),
    ('report x --format c', 'csv'),
    ('report --out fold', 'folder'),
    ('check folder/result_0.t', 'folder/result_0.txt'),
    ('bench allr', 'allreduce'),
    ('train --train.precision bf', 'bfloat16'),
    ('train --run.clear_caches t', 'true'),
    ('train --config foldf', 'foldfile.yaml'),
    ('train --print schedule.base', 'schedule.base_lr'),
    ('train --elastic --resume fold', 'folder'),
    ('classify folder foldf', 'foldfile.yaml'),
    ('report published --round 2.0 --round v0.5', 'v0.5'),
]
# Completed only in bash.
BASH_CASES = [
    ('mlperf-rn50 report published/v0.7/N', 'published/v0.7/NVIDIA/'),
    ('mlperf-rn50 predict v4', 'v4.0/'),
    ('./launch/local.sh --nodes 2 --ranks-per-n', '--ranks-per-node'),
    ('launch/docker.sh --train.preci', '--train.precision'),
    ('launch/sweep.sh --lay', '--layouts'),
]


def bash(script, typed, program='mlperf-rn50'):
    """Complete as bash does, by the function that the script registers for the program."""
    words = shlex.join([program, *typed.split()])
    code = (
        f'source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed.split())}; '
        f'$(complete -p {program} | grep -o "_[a-z0-9_]* ") {program}; printf "%s\\n" '
        '"${COMPREPLY[@]}"'
    )
    return run(['bash', '--norc', '-uc', code])


def fish(script, typed):
    done = run(
        [
            'fish',
            '--no-config',
            '-c',
            f'source {script}; complete -C {shlex.quote("mlperf-rn50 " + typed)}',
        ]
    )
    done.stdout = (
        '\n'.join(line.partition('\t')[0].rstrip('/') for line in done.stdout.splitlines()) + '\n'
    )
    return done


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp('shell')
    (here / 'folder').mkdir()
    (here / 'folder/result_0.txt').touch()
    (here / 'foldfile.yaml').touch()
    for shell in ('bash', 'zsh', 'fish'):
        done = call('completion', shell)
        assert (done.returncode, done.stderr) == (0, '')
        (here / f'_{shell}').write_text(done.stdout)
    return here


@pytest.mark.parametrize('shell', [bash, fish])
def test_completion_of_arguments(shell, folder, monkeypatch):
    skip_for('' if shutil.which(shell.__name__) else f'{shell.__name__} is not installed')
    monkeypatch.chdir(folder)
    done = [(typed, shell(folder / f'_{shell.__name__}', typed)) for typed, _ in CASES]
    assert [(typed, d.stdout.splitlines(), d.stderr) for typed, d in done] == [
        (typed, [expected], '') for typed, expected in CASES
    ]


@pytest.mark.parametrize('typed, expected', BASH_CASES)
def test_bash_completes_launch_scripts_and_published_names(typed, expected, folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, _, words = typed.partition(' ')
    done = bash(folder / '_bash', words, program)
    assert done.stderr == '' and all(line.startswith(expected) for line in done.stdout.splitlines())
    assert len({line.count('/') for line in done.stdout.splitlines()}) == 1


def test_zsh_reads_the_script(folder):
    skip_for('' if shutil.which('zsh') else 'zsh is not installed')
    # compdef belongs to the completion system, which works only on a terminal.
    done = run(['zsh', '-f', '-c', f'compdef() {{ print $3 }}; eval "$(<{folder}/_zsh)"'])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, 'mlperf-rn50', '')


def test_completion_without_jsonargparse_covers_other_commands(monkeypatch):
    monkeypatch.setitem(sys.modules, 'jsonargparse', None)
    done = call('completion', 'bash')
    assert (done.returncode, done.stderr) == (0, '')
    assert (
        'evaluations' in done.stdout
        and 'train' in done.stdout
        and '--train.precision' not in done.stdout
    )
