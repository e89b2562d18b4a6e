"""Shell completion: arguments in bash and fish, scripts and published names in bash, and zsh."""

import shlex
import shutil
import sys

import pytest
from helpers import call, run, skip_for

# Typed text and the completed last argument.
CASES = """
rep => report
--debug che => check
report --fo => --format
report x --format c => csv
report --out fold => folder
check folder/result_0.t => folder/result_0.txt
bench allr => allreduce
train --train.precision bf => bfloat16
train --run.clear_caches t => true
train --config foldf => foldfile.yaml
train --print schedule.base => schedule.base_lr
train --elastic --resume fold => folder
classify folder foldf => foldfile.yaml
recipe --compare foldf => foldfile.yaml
recipe 1664 --opti => --optimizer
predict x --opti => --optimizer
watch folder/res => folder/result_0.txt
report published --round 2.0 --round v0.5 => v0.5
"""
# Completed only in bash: command lines, and the beginning of each completion.
BASH_CASES = """
mlperf-rn50 report published/v0.7/N => published/v0.7/NVIDIA/
mlperf-rn50 predict v4 => v4.0/
./launch/local.sh --nodes 2 --ranks-per-n => --ranks-per-node
launch/docker.sh --train.preci => --train.precision
launch/sweep.sh --lay => --layouts
"""


def cases_of(table):
    return [line.split(' => ') for line in table.strip().splitlines()]


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
    code = f'source {script}; complete -C {shlex.quote("mlperf-rn50 " + typed)}'
    done = run(['fish', '--no-config', '-c', code])
    words = [line.partition('\t')[0].rstrip('/') for line in done.stdout.splitlines()]
    done.stdout = '\n'.join(words)
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
    for typed, expected in cases_of(CASES):
        done = shell(folder / f'_{shell.__name__}', typed)
        assert (done.stdout.splitlines(), done.stderr) == ([expected], ''), typed


@pytest.mark.parametrize('typed, expected', cases_of(BASH_CASES))
def test_bash_completes_launch_scripts_and_published_names(typed, expected, folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, _, words = typed.partition(' ')
    done = bash(folder / '_bash', words, program)
    lines = done.stdout.splitlines()
    assert done.stderr == '' and all(line.startswith(expected) for line in lines)
    assert len({line.count('/') for line in lines}) == 1


def test_bash_completes_published_names_only_where_a_command_takes_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert bash(folder / '_bash', 'watch publ').stdout.strip() == ''


def test_zsh_reads_the_script(folder):
    skip_for('' if shutil.which('zsh') else 'zsh is not installed')
    # compdef belongs to the completion system, which works only on a terminal.
    done = run(['zsh', '-f', '-c', f'compdef() {{ print $3 }}; eval "$(<{folder}/_zsh)"'])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, 'mlperf-rn50', '')


def test_completion_without_jsonargparse_covers_other_commands(monkeypatch):
    monkeypatch.setitem(sys.modules, 'jsonargparse', None)
    done = call('completion', 'bash')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'evaluations' in done.stdout and '--train.precision' not in done.stdout
