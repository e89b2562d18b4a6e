"""The command check: folders, several logs, rulesets as they are written, JSON, and what is missing."""
import json
import os
import sys
from argparse import ArgumentTypeError

import pytest
from helpers import call
from sample_log import write_run

from mlperf_rn50.mlperf.rulesets import PACKAGED, RULESETS, parse_round, parse_ruleset


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    """Three logs in folders below one, of which the second missed the target of v0.5."""
    home = tmp_path_factory.mktemp('logs')
    for k, accuracy in enumerate((0.7595, 0.7489, 0.76)):
        (home / f'set_{k}').mkdir()
        write_run(home / f'set_{k}/result_{k}.txt', accuracies=(0.1, accuracy), end='converged')
    return home


def test_a_folder_stands_for_the_logs_below_it_and_ends_with_a_sum(logs):
    done = call('check', logs, '--ruleset', '0.5')
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if 'result_' in line] == [
        f'{logs}/set_{k}/result_{k}.txt' for k in range(3)]
    assert done.stdout.endswith('\n3 logs\n  v0.5   2 pass, 1 fails\n')


def test_a_single_log_has_no_sum(logs):
    done = call('check', logs / 'set_0', '--ruleset', 'v0.5')
    assert done.returncode == 0 and ' logs' not in done.stdout.splitlines()[-1]


def test_a_sum_has_every_ruleset(logs):
    done = call('check', logs / 'set_0/result_0.txt', logs / 'set_1/result_1.txt')
    rows = done.stdout[done.stdout.index('2 logs'):].splitlines()
    assert rows[1:4] == ['  v0.5   1 pass, 1 fails', '  0.7.0  1 pass, 1 fails', '  1.0.0  2 pass']


def test_a_folder_without_logs_is_a_mistake(tmp_path):
    done = call('check', tmp_path)
    assert (done.returncode, done.stdout) == (2, '')
    assert f'{tmp_path}: no result_<k>.txt in it or below it' in done.stderr


def test_one_log_that_cannot_be_read_does_not_end_the_others(logs, tmp_path):
    (tmp_path / 'result_0.txt').write_text('no log\n')
    done = call('check', tmp_path / 'none.txt', tmp_path, logs / 'set_0', '--ruleset', 'v0.5')
    assert done.returncode == 1
    assert f'{tmp_path}/none.txt\n  FAIL: cannot read the log: No such file' in done.stdout
    assert f'{tmp_path}/result_0.txt\n  FAIL: no MLPerf log line in it' in done.stdout
    assert done.stdout.endswith('\n3 logs, 2 of them cannot be read\n  v0.5   1 pass\n')
    alone = call('check', tmp_path)
    assert (alone.returncode, alone.stdout) == (2, '') and 'no MLPerf log line in it' in alone.stderr


def test_a_named_pipe_is_no_log(logs, tmp_path):
    os.mkfifo(tmp_path / 'result_0.txt')
    done = call('check', tmp_path, logs / 'set_0', '--ruleset', 'v4.0')
    assert done.returncode == 1
    assert 'result_0.txt\n  FAIL: cannot read the log: it is a named pipe, not a file' in done.stdout


def test_a_folder_that_cannot_be_read_is_said(logs, tmp_path, monkeypatch):
    (tmp_path / 'closed').mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith('closed'):
            raise PermissionError(13, 'Permission denied', path)
        return scandir(path)
    monkeypatch.setattr(os, 'scandir', refuse)
    done = call('check', tmp_path, logs / 'set_0', '--ruleset', 'v0.5')
    assert done.returncode == 1
    assert f'{tmp_path}/closed\n  FAIL: cannot read the log: it is a folder, not a file' in done.stdout


def test_json_says_the_same(logs, tmp_path):
    (tmp_path / 'result_0.txt').write_text('\x1b[2Jno log\n')
    done = call('check', logs, tmp_path / 'result_0.txt', '--ruleset', 'v0.5', '--format', 'json')
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said['passed'] is False and len(said['logs']) == 4
    assert said['sum'] == {'num_logs': 4, 'num_unreadable': 1,
                           'rulesets': {'v0.5': {'num_passed': 2, 'num_failed': 1}}}
    good, missed, _, unread = said['logs']
    assert good['verdicts'] == [{'ruleset': 'v0.5', 'division': 'open', 'passed': True, 'violations': []}]
    assert (good['can_claim'], good['is_imagenet'], good['num_resumes']) == (['v0.5 open'], True, 0)
    assert good['best_top1'] == 0.7595 and good['file'].endswith('result_0.txt')
    assert missed['verdicts'][0]['violations'][0].startswith('the target was missed') and not missed['passed']
    assert unread['error'].startswith('no MLPerf log line') and unread['verdicts'] == []


def test_json_is_json_whatever_stands_in_a_log(logs, tmp_path):
    text = (logs / 'set_0/result_0.txt').read_text().replace('"value": 0.1', '"value": NaN')
    text = text.replace('"here"', r'"\u001b[2J\ud800"')
    (tmp_path / 'result_0.txt').write_text(text)
    done = call('check', tmp_path, '--format', 'json')
    assert json.loads(done.stdout, parse_constant=pytest.fail)['logs'][0]['best_top1'] == 0.7595
    assert done.stdout.isascii() and '\x1b' not in done.stdout


@pytest.mark.parametrize('text, ruleset, round_name', [
    ('4.0.0', '4.0.0', 'v4.0'), ('v4.0.0', '4.0.0', 'v4.0'), ('v4.0', '4.0.0', 'v4.0'), ('4.0', '4.0.0', 'v4.0'),
    (' V2.1', '2.1.0', 'v2.1'), ('v1.0', '1.0.0', 'v1.0')])
def test_a_ruleset_may_be_written_as_round_or_version(text, ruleset, round_name):
    assert (parse_ruleset(text), parse_round(text)) == (ruleset, round_name)


@pytest.mark.parametrize('text, ruleset', [('0.5', 'v0.5'), ('v0.5.0', 'v0.5'), ('0.6', '0.6.0')])
def test_rounds_that_are_over_are_checked_only(text, ruleset):
    assert parse_ruleset(text) == ruleset
    with pytest.raises(ArgumentTypeError, match='expected a round that is packaged: v1.0'):
        parse_round(text)


@pytest.mark.parametrize('text, hint', [('4.0.1', 'did you mean 4.0.0'), ('v3.2', 'did you mean v3.1'),
                                        ('', 'from v0.5 to v4.0'), ('latest', 'from v0.5 to v4.0'),
                                        ('4', 'expected a round such as 4.0.0 or v4.0')])
def test_another_ruleset_is_refused_with_the_nearest(text, hint):
    with pytest.raises(ArgumentTypeError, match=f'^got {text!r}.*{hint}'):
        parse_ruleset(text)


@pytest.mark.parametrize('command, option', [('check', '--ruleset'), ('package', '--round')])
def test_both_commands_take_both_ways_and_list_them(command, option):
    done = call(command, '--help')
    text = ' '.join(done.stdout.split())
    assert done.returncode == 0 and all(r in text for r in (RULESETS if command == 'check' else PACKAGED))
    done = call(command, 'x', option, '4.0.1')
    assert done.returncode == 2 and f"{option}: got '4.0.1'" in done.stderr and 'did you mean 4.0.0?' in done.stderr


def test_without_mlperf_logging_one_line_says_what_to_install(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mlperf_logging', None)
    for name in [n for n in sys.modules if n.startswith('mlperf_logging.')]:
        monkeypatch.delitem(sys.modules, name)
    done = call('check', logs)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == "mlperf-rn50: needs mlperf-logging: pip install 'mlperf-rn50[check]'\n"
    assert call('check', logs / 'set_0', '--ruleset', 'v0.5').returncode == 0  # whose checker is our own
