"""Folders of outputs: repetition, files of the user, locks."""

import os
import re
import shutil

import pytest
from helpers import argv, call, deny, shipped_logs
from made_systems import commit_program

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.runfolder.locks import LAUNCHER_LOCK, OUTPUT_LOCK, folder_lock
from mlperf_rn50.runfolder.outputs import LISTING, new_files

NAMES = ('a.csv', 'b.md')


def write(folder, text='new', **options):
    with new_files(folder, **options) as place:
        for name in NAMES:
            (place / name).write_text(text)


def contents(folder):
    return {p.name: p.read_text() for p in folder.iterdir() if p.name != LISTING}


def test_files_of_a_command_are_replaced_by_it_and_no_others(tmp_path):
    for text in ('first', 'second', 'second', 'third'):
        write(tmp_path, text)
        assert contents(tmp_path) == dict.fromkeys(NAMES, text)
    (tmp_path / 'a.csv').unlink()
    write(tmp_path)
    assert len((tmp_path / LISTING).read_text().splitlines()) <= 2 * len(NAMES)


@pytest.mark.parametrize('name', [*NAMES, LISTING, OUTPUT_LOCK])
@pytest.mark.parametrize('kind', 'file link dangling hard-link folder pipe'.split())
@pytest.mark.parametrize('is_repeated', [False, True])
def test_file_of_the_user_is_refused_before_anything_is_written(tmp_path, name, kind, is_repeated):
    out, mine = tmp_path / 'out', tmp_path / 'mine'
    mine.write_text('mine')
    if is_repeated:
        write(out)
        (out / name).unlink(missing_ok=True)
    out.mkdir(exist_ok=True)
    path = out / name
    plants = {
        'file': lambda: path.write_text('mine'),
        'link': lambda: path.symlink_to(mine),
        'dangling': lambda: path.symlink_to(tmp_path / 'nothing'),
        'hard-link': lambda: path.hardlink_to(mine),
        'folder': path.mkdir,
        'pipe': lambda: os.mkfifo(path),
    }
    plants[kind]()
    before = sorted(os.listdir(out))
    with pytest.raises(ConfigError, match=re.escape(name) if name != OUTPUT_LOCK else '--out: '):
        write(out, 'changed')
    assert sorted(os.listdir(out)) == before and mine.read_text() == 'mine'
    assert not (tmp_path / 'nothing').exists()
    assert all((out / n).read_text() == 'new' for n in before if n in NAMES and n != name)


def test_changed_output_is_a_file_of_the_user(tmp_path):
    write(tmp_path)
    (tmp_path / 'b.md').write_text('new, with a remark')
    with pytest.raises(
        ConfigError, match='--out: .*b.md exists already and is not replaced; move it'
    ):
        write(tmp_path, 'changed')
    assert contents(tmp_path) == {'a.csv': 'new', 'b.md': 'new, with a remark'}


def test_interruption_between_two_files_does_not_prevent_the_next_try(tmp_path, monkeypatch):
    write(tmp_path, 'old')
    steps = [os.replace, os.replace]  # the listing and one file
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, IndexError)):
        patch.setattr('pathlib.Path.replace', lambda *paths: steps.pop()(*paths))
        write(tmp_path)
    assert contents(tmp_path) == {'a.csv': 'new', 'b.md': 'old'}
    write(tmp_path, 'newer')
    assert contents(tmp_path) == dict.fromkeys(NAMES, 'newer')


def test_failed_command_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_files(tmp_path / 'a/b') as place:
        (place / 'a.csv').write_text('x')
        raise ZeroDivisionError
    assert not (tmp_path / 'a').exists()


def test_not_repeatable_files_are_new(tmp_path):
    write(tmp_path, is_repeatable=False)
    assert not (tmp_path / LISTING).exists()
    with pytest.raises(ConfigError, match='a.csv .and 1 more. exists already'):
        write(tmp_path, is_repeatable=False)


def test_second_command_in_a_folder_is_refused_and_names_the_first(tmp_path):
    digits = shutil.copytree(shipped_logs() / 'digits_five', tmp_path / 'five')
    home, out = tmp_path / 'checkout', tmp_path / 'out'
    out.mkdir()
    commit_program(home, digits)
    with folder_lock(out, '--out', OUTPUT_LOCK):
        for template in (
            'report {} --out',
            f'package {{}} --org us --system x --code {home} --out',
            'predict v2.0/NVIDIA/dgxa100_ngc22.04_mxnet --layouts 1x8 --out',
        ):
            done = call(*argv(template, digits), out)
            assert done.returncode == 2 and done.stderr.count('\n') == 1
            assert f'{out} is in use by process {os.getpid()} on ' in done.stderr
    assert [*out.iterdir()] == []


def test_lock_file_of_the_user_is_kept(tmp_path):
    (tmp_path / LAUNCHER_LOCK).write_text('mine')
    with (
        pytest.raises(ConfigError, match=f'--run-dir: .*{LAUNCHER_LOCK} exists already'),
        folder_lock(tmp_path),
    ):
        pass
    assert (tmp_path / LAUNCHER_LOCK).read_text() == 'mine'


def test_lock_in_a_folder_without_write_permission_is_refused_with_this_reason(
    tmp_path, monkeypatch
):
    deny(monkeypatch, LAUNCHER_LOCK, 'open')
    with (
        pytest.raises(ConfigError, match='Permission denied; choose a writable folder'),
        folder_lock(tmp_path),
    ):
        pass


def test_report_can_be_repeated_and_a_trace_is_a_new_file(tmp_path):
    five, out, trace = shipped_logs() / 'digits_five', tmp_path / 'out', tmp_path / 'trace.json'
    for _ in range(2):
        assert call('report', five, '--out', out).returncode == 0
    (out / 'report.csv').write_text('mine')
    trace.write_text('mine')
    for words, message in (
        (('report', five, '--out', out), 'out/report.csv exists already'),
        (('why', five, '--perfetto', trace, '--out', tmp_path / 'x'), '--perfetto: '),
    ):
        done = call(*words)
        assert (done.returncode, done.stdout) == (2, '') and message in done.stderr
    assert trace.read_text() == 'mine' and not (tmp_path / 'x').exists()


def test_names_of_folders_do_not_control_the_terminal(tmp_path):
    strange = tmp_path / '\x1b]0;PWNED\x07\x1b[31m'
    logs = shutil.copytree(shipped_logs() / 'digits_five', strange / 'logs')
    commands = """
report LOGS --out X/report
check LOGS
watch LOGS --once
watch LOGS --html
predict LOGS --layouts 1x1 --out X/predict
package LOGS --org us --system x --out X/tree
package --check X/tree/us
prepare --verify X
prepare folder --source X --out X/data
why X
recipe --compare X/logs/config.yaml
classify X X/a.png
"""
    for words in commands.strip().splitlines():
        done = call(
            *(w.replace('LOGS', f'{logs}').replace('X', f'{strange}') for w in words.split())
        )
        assert done.returncode in (0, 1, 2), done.stderr
        assert not {'\x1b', '\x07'} & {*done.stdout, *done.stderr}, words
