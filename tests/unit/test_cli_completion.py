"""Completion in the shells themselves: a word is begun, and the only one that fits comes back."""
import os
import shlex
import shutil

import pytest
from helpers import HANG_LIMIT_S, call, run, skip_for

# What is typed, and what the last word becomes.
CASES = [('rep', 'report'), ('--deb', '--debug'), ('--debug che', 'check'), ('report --fo', '--format'),
         ('report x --format c', 'csv'), ('report --out fold', 'folder'),
         ('check folder/result_0.t', 'folder/result_0.txt'), ('prepare dig', 'digits'), ('bench allr', 'allreduce'),
         ('completion f', 'fish'), ('train --train.prec', '--train.precision'),
         ('train --train.precision bf', 'bfloat16'), ('train --run.clear_caches t', 'true'),
         ('train --config foldf', 'foldfile.yaml'), ('train --print schedule.base', 'schedule.base_lr'),
         ('train --elastic --resume fold', 'folder'), ('evaluate folder --which la', 'last'),
         ('classify folder foldf', 'foldfile.yaml'), ('package folder --out fold', 'folder')]


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


def test_a_word_is_completed_in_zsh(folder):
    """On a terminal of its own, as zsh completes nowhere else; each line shows only when its word is whole."""
    skip_for('' if shutil.which('zsh') else 'zsh is not installed')
    functions = folder / 'functions'
    functions.mkdir()
    shutil.copy(folder / '_zsh', functions / '_mlperf-rn50')
    typed = '\n'.join(_type_and_wait(*case) for case in CASES)
    (folder / 'drive.zsh').write_text(f'''zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z "PS1= zle_highlight=(none); fpath=({functions} \\$fpath); autoload -Uz compinit; compinit -uD; print REA''DY"
zpty -r z out '*READY*'
{typed}
''')
    environment = {**os.environ, 'TERM': 'xterm', 'COLUMNS': '200'}
    done = run(['zsh', '-f', 'drive.zsh'], cwd=folder, timeout=HANG_LIMIT_S, env=environment)
    assert done.stdout.splitlines() == [becomes for _, becomes in CASES]


def _type_and_wait(typed, becomes):
    """What types a line and TAB in zsh's zpty, waits until its last word is whole, and prints that."""
    whole = ' '.join(['mlperf-rn50', *typed.split()[:-1], becomes])
    return (f'zpty -w -n z {shlex.quote(f"mlperf-rn50 {typed}")}$\'\\t\'; zpty -r z out {shlex.quote(f"*{whole}*")}; '
            f'print -r -- {shlex.quote(becomes)}; zpty -w -n z $\'\\C-u\'')
