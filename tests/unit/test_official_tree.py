"""The official tools for a tree: their options in files, and their text."""

import pytest
from helpers import write_files
from lines import write_set

from mlperf_rn50.mllog.check.official_tree import judge_tree, read_params

ROOT, FOLDER = 'package_checker_params', 'results/box/resnet/package_checker_params'


@pytest.mark.parametrize(
    'name, text, ruleset, options, error',
    [
        (ROOT, 'rcp-bypass\n', '4.0.0', {'rcp-bypass'}, ''),
        (ROOT, 'rcp-bypass', '4.0.0', set(), 'end with a newline'),
        (ROOT, 'rcp-bypass\n', '1.1.0', set(), 'below results'),
        (
            ROOT,
            'rcp-bypass\nlog_output /tmp/x\n',
            '4.0.0',
            {'rcp-bypass'},
            'log_output',
        ),
        (FOLDER, 'rcp-bypass', '1.0.0', {'rcp-bypass'}, ''),
        (FOLDER, 'rcp-bypass\n', '4.0.0', set(), 'last line without'),
        (FOLDER, 'rcp-bypass\nseed-checker-bypass', '4.0.0', {'seed-checker-bypass'}, 'rcp-bypass'),
        ('results/box/package_checker_params', 'rcp-bypass', '4.0.0', {'rcp-bypass'}, ''),
    ],
)
def test_options_count_as_the_official_readers_read_them(
    tmp_path, name, text, ruleset, options, error
):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    found, errors = read_params(tmp_path, ruleset, 'box')
    assert found == options and bool(errors) == bool(error)
    assert all(e.file == name and error in e.text for e in errors)


@pytest.mark.parametrize('content', [b'\xff\xfer\x00', b'x' * 70_000], ids=['UTF-16', 'large'])
def test_options_that_cannot_be_read_are_an_error(tmp_path, content):
    (tmp_path / ROOT).write_bytes(content)
    found, [error] = read_params(tmp_path, '4.0.0', 'box')
    assert not found and error.file == ROOT


def test_names_that_git_dislikes_and_crashes_of_tools_are_errors(tmp_path):
    """The checker opens the description, which is absent."""
    home = tmp_path / 'us'
    write_set(home / 'results/box/resnet')
    write_files(home, {'benchmarks/resnet/.hidden': '', 'benchmarks/resnet/a b': ''})
    (home / 'benchmarks/broken').symlink_to('nowhere')
    errors = judge_tree(home, '2.0.0', ['box']).faults
    names, link = (e.file for e in errors if e.rule == 'repo_checker')
    assert {*names.split(', ')} == {'benchmarks/resnet/.hidden', 'benchmarks/resnet/a b'}
    assert link == 'benchmarks/broken'
    texts = {e.rule: e.text for e in errors}
    assert 'crashed: FileNotFoundError' in texts['package_checker']
    assert 'gives no score for box' in texts['result_summarizer']


def test_v05_has_no_tool_for_trees(tmp_path):
    [(name, _)] = judge_tree(tmp_path, 'v0.5', ['box']).results
    assert name == 'logs'
