"""Commit of the program: checkouts of other users, unusual checkouts, and code outside a
checkout."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import git as shell
from helpers import prepend_path, table, write_files

import mlperf_rn50
from mlperf_rn50.system.environment import git_commit


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the package and another commit before the current one."""
    home = tmp_path / 'checkout'
    (home / 'mlperf_rn50').mkdir(parents=True)
    shell(home, 'init', '-q')
    for text in ('old', 'new'):
        (home / 'mlperf_rn50/__init__.py').write_text(text)
        shell(home, 'add', '-A')
        shell(home, 'commit', '-qm', text)
    return home


@pytest.fixture
def commit_in(monkeypatch):
    """Return the function that finds the commit of the program in a folder."""

    def commit(home):
        monkeypatch.setattr(mlperf_rn50, '__file__', str(home / 'mlperf_rn50/__init__.py'))
        return git_commit()

    return commit


def test_commit_and_modified_files(checkout, commit_in):
    head = shell(checkout, 'rev-parse', 'HEAD')
    assert commit_in(checkout) == {'git_commit': head}
    (checkout / 'mlperf_rn50/__init__.py').write_text('changed')
    assert commit_in(checkout) == {'git_commit': f'{head}-dirty'}


def test_checkout_of_another_user(checkout, commit_in, tmp_path, monkeypatch):
    head = shell(checkout, 'rev-parse', 'HEAD')
    assuming = 'export GIT_TEST_ASSUME_DIFFERENT_OWNER=1'
    script = f'#!/bin/sh\n{assuming}\nexec {shutil.which("git")} "$@"'
    write_files(tmp_path / 'bin', {'git': script}, 0o755)
    prepend_path(monkeypatch, tmp_path / 'bin')
    with pytest.raises(AssertionError, match='dubious ownership'):
        shell(checkout, 'rev-parse', 'HEAD')
    assert commit_in(checkout) == {'git_commit': head}


def test_programs_in_the_configuration_of_a_checkout_are_not_run(checkout, commit_in, tmp_path):
    script = f'#!/bin/sh\ntouch {tmp_path / "canary"}'
    write_files(tmp_path, {'evil': script, 'hooks/post-index-change': script}, 0o755)
    shell(checkout, 'config', 'core.fsmonitor', str(tmp_path / 'evil'))
    shell(checkout, 'config', 'core.hooksPath', str(tmp_path / 'hooks'))
    # git compares the file and would update its index
    os.utime(checkout / 'mlperf_rn50/__init__.py', (1, 1))
    assert commit_in(checkout)['git_commit'] and not (tmp_path / 'canary').exists()


def test_checkout_around_the_code_of_a_different_owner_is_not_read(
    checkout, commit_in, monkeypatch
):
    monkeypatch.setattr(Path, 'lstat', lambda path: SimpleNamespace(st_uid=os.getuid() + 1))
    assert 'belongs to a different user than' in commit_in(checkout)['git_commit_missing']


def test_linked_shallow_and_nested_checkouts(checkout, commit_in, tmp_path):
    head = shell(checkout, 'rev-parse', 'HEAD')
    shell(checkout, 'worktree', 'add', '-q', '--detach', tmp_path / 'tree', 'HEAD~1')
    shell(tmp_path, 'clone', '-q', '--depth', '1', f'file://{checkout}', tmp_path / 'shallow')
    shell(tmp_path, 'init', '-q', 'outer')
    add = '-c protocol.file.allow=always submodule --quiet add'.split()
    shell(tmp_path / 'outer', *add, checkout, 'nested')
    before = shell(checkout, 'rev-parse', 'HEAD~1')
    for name, commit in {'tree': before, 'shallow': head, 'outer/nested': head}.items():
        assert commit_in(tmp_path / name)['git_commit'] == commit


def test_variables_of_git_do_not_name_another_checkout(checkout, commit_in, tmp_path, monkeypatch):
    head = shell(checkout, 'rev-parse', 'HEAD')
    shell(tmp_path, 'init', '-q', 'other')
    monkeypatch.setenv('GIT_DIR', str(tmp_path / 'other/.git'))
    assert commit_in(checkout) == {'git_commit': head}


@pytest.mark.parametrize(
    'place, reason',
    table("""
plain | plain/mlperf_rn50 is not in a git checkout
checkout/.venv | git: error: pathspec '__init__.py' did not match
checkout | git: No such file or directory
empty | git:
"""),
)
def test_missing_commit_has_a_reason(checkout, commit_in, tmp_path, monkeypatch, place, reason):
    """An archive, a wheel or an image is no checkout; the code may be installed in a folder of a
    checkout; git may be missing, or have no commit."""
    (tmp_path / place / 'mlperf_rn50').mkdir(parents=True, exist_ok=True)
    if place == 'empty':
        shell(tmp_path, 'init', '-q', 'empty')
    if place == 'checkout':
        monkeypatch.setenv('PATH', '')
    monkeypatch.delenv('MLPERF_RN50_COMMIT', raising=False)
    facts = commit_in(tmp_path / place)
    assert facts['git_commit'] is None and reason in facts['git_commit_missing']
    monkeypatch.setenv('MLPERF_RN50_COMMIT', 'a' * 40)  # of an image
    assert commit_in(tmp_path / place)['git_commit'] == ('a' * 40 if place == 'plain' else None)
