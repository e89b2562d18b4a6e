"""Completion in the shells themselves: a word is begun, and the only one that fits comes back."""
import shlex
import shutil

import pytest
from helpers import call, run, skip_for

# What is typed, and what the last word becomes.
CASES = [('rep', 'report'), ('--debug che', 'check'), ('report --fo', '--format'), ('report x --format c', 'csv'),
         ('report --out fold', 'folder'), ('check folder/result_0.t', 'folder/result_0.txt'),
         ('bench allr', 'allreduce'), ('train --train.precision bf', 'bfloat16'),
         ('train --run.clear_caches t', 'true'),
         ('train --config foldf', 'foldfile.yaml'), ('train --print schedule.base', 'schedule.base_lr'),
         ('train --elastic --resume fold', 'folder'), ('classify folder foldf', 'foldfile.yaml')]


def bash(script, typed):
    words = shlex.join(['mlperf-rn50', *typed.split()])
    code = (f'source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed.split())}; _shtab_mlperf_rn50; '
            'printf "%s\\n" "${COMPREPLY[@]}"')
    return run(['bash', '--norc', '-uc', code])


def fish(script, typed):
    done = run(['fish', '--no-config', '-c', f'source {script}; complete -C {shlex.quote("mlperf-rn50 " + typed)}'])
    done.stdout = '\n'.join(line.partition('\t')[0].rstrip('/') for line in done.stdout.splitlines()) + '\n'
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
def test_a_word_is_completed(shell, folder, monkeypatch):
    skip_for('' if shutil.which(shell.__name__) else f'{shell.__name__} is not installed')
    monkeypatch.chdir(folder)
    done = [(typed, shell(folder / f'_{shell.__name__}', typed)) for typed, _ in CASES]
    assert [(typed, d.stdout.splitlines(), d.stderr) for typed, d in done] == [
        (typed, [becomes], '') for typed, becomes in CASES]


def test_zsh_reads_its_script(folder):
    skip_for('' if shutil.which('zsh') else 'zsh is not installed')
    # compdef is of the completion system, which works on a terminal alone.
    done = run(['zsh', '-f', '-c', f'compdef() {{ print $3 }}; eval "$(<{folder}/_zsh)"'])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, 'mlperf-rn50', '')
