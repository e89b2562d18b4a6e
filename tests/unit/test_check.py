"""Log checkers: verdicts and violations, folders of logs, JSON output, and hostile logs."""

import io
import json
import logging
import os
import shutil
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
from helpers import call, deny, shipped_logs
from lines import mllog, run_lines, write_lines
from mlperf_logging.compliance_checker import mlp_parser
from sample_log import LARS, SGD, closed, shift_clock, write_run

from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.analysis.sets.verdict import make_check
from mlperf_rn50.analysis.show.text import render_text
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.mllog.check import judge
from mlperf_rn50.mllog.check.official import (
    MAX_LINE,
    find_danger,
    find_long_lines,
    marked_lines,
)
from mlperf_rn50.mllog.rulesets import parse_round, render_rounds
from mlperf_rn50.train.options import ScheduleConfig

LATER = judge.RULESETS[2:]
STEP = replace(SGD, schedule=ScheduleConfig(decay='step'))


@pytest.fixture
def good(tmp_path):
    return write_run(tmp_path / 'result_0.txt')


def violations(path, ruleset, division=None):
    return judge.check_log(path, [ruleset], division).verdicts[0].violations


@pytest.mark.parametrize('config', [SGD, LARS], ids=['sgd', 'lars'])
def test_good_log_passes_every_ruleset(tmp_path, config):
    path = write_run(tmp_path / 'result_0.txt', config)
    passed = {(r, d): violations(path, r, d) for r in LATER for d in ('open', 'closed')}
    assert passed == dict.fromkeys(passed, ()) and violations(path, judge.V05) == ()


@pytest.mark.parametrize(
    'config, accuracy, ruleset, division, message',
    [
        (LARS, 0.7595, '0.6.0', None, None),
        (STEP, 0.7595, '0.6.0', None, None),
        (
            SGD,
            0.7595,
            '0.6.0',
            None,
            'optimizer keys: expected opt_learning_rate_decay_boundary_epochs',
        ),
        (
            SGD,
            0.7489,
            judge.V05,
            None,
            'the target was missed',
        ),
        (STEP, 0.7489, '0.6.0', None, 'run_stop: got '),
        (
            SGD,
            0.7489,
            '0.7.0',
            None,
            'eval_accuracy: the best value is 0.7489',
        ),
        (SGD, 0.7489, '4.0.0', None, None),
        (SGD, 0.7489, '4.0.0', 'closed', 'eval_accuracy: the best value'),
    ],
)
def test_violations_by_ruleset(tmp_path, config, accuracy, ruleset, division, message):
    path, v06 = tmp_path / 'result_0.txt', tmp_path / 'result_0_v0.6.txt'
    write_run(
        path,
        config,
        accuracies=(0.1, accuracy),
        end='converged' if accuracy > 0.75 else 'aborted',
        v06=v06,
    )
    got = violations(v06 if ruleset == '0.6.0' else path, ruleset, division)
    assert any(text.startswith(message) for text in got) if message else got == (), got


@pytest.mark.parametrize(
    'change, ruleset, message',
    [
        ({'"seed"': None}, '4.0.0', None),
        ({'"train_samples"': None}, '4.0.0', 'train_samples is missing'),
        ({'"cache_clear"': None}, '4.0.0', 'cache_clear is missing'),
        ({') run_start': None}, 'v0.5', 'level 1: run_start appears 0 times, expected once'),
        (
            {
                ') run_start': ') train_loop',
                ') train_loop': ') run_start',
                ') run_stop': ') run_final',
                ') run_final': ') run_stop',
            },
            'v0.5',
            'level 1: the order is run_start, run_final, run_stop, expected',
        ),
        (
            {') eval_start': None, ') eval_stop': None},
            'v0.5',
            'level 1: eval_start and eval_stop are missing',
        ),
        ({'model_hp_shorcut_add': None}, 'v0.5', 'level 2: model_hp_shorcut_add is missing'),
        ({') eval_accuracy': None}, 'v0.5', 'level 1: eval_accuracy is missing'),
        ({'"value": "research"': '"value": "attic"'}, '4.0.0', "submission_status: got 'attic'"),
        (
            {'"tensor": "fc1_bias"': '"tensor": "fc_bias"'},
            '2.1.0',
            'weights_initialization: expected exactly the tensors',
        ),
        (
            {'"value": "sgd"': '"value": "adam/../../x"'},
            '4.0.0',
            "opt_name: got 'adam/../../x'",
        ),
        (
            {'"value": "open"': '"value": "../x"'},
            '4.0.0',
            "submission_division: got '../x'",
        ),
        (
            {':::MLLOG {"namespace": "", "time_ms"': ':::MLLOG {"namespace": "", "time'},
            '4.0.0',
            'torn line ',
        ),
    ],
)
def test_violations_of_a_changed_log(good, change, ruleset, message):
    """`change` maps text in a line to its replacement, or to None to remove the lines that contain
    it."""
    lines = good.read_text().splitlines()
    lines = [
        next(
            (
                None if new is None else line.replace(old, new)
                for old, new in change.items()
                if old in line
            ),
            line,
        )
        for line in lines
    ]
    good.write_text('\n'.join(line for line in lines if line is not None))
    got = violations(good, ruleset, 'closed' if ruleset == '2.1.0' else None)
    assert any(text.startswith(message) for text in got) if message else got == (), got


def verdict(*logs):
    return render_text(make_check(load_run_sets(logs, Rules())))


def test_resumed_run_on_digits_passes_the_format_and_cannot_be_submitted(tmp_path):
    path, v06 = tmp_path / 'result_0.txt', tmp_path / 'result_0_v0.6.txt'
    write_run(path, replace(LARS, data=DataConfig(dataset='digits')), v06=v06)
    path.write_text(
        path.read_text()
        + mllog('run_resumed', 2e8, 5, epoch_num=1, clock_s=1.0)
        + '\n'
        + mllog('run_stop', 2e8 + 1, status='success')
        + '\n'
    )
    done = call('check', path)
    assert done.returncode == 0
    assert (
        done.stdout
        == f'format passes: v0.5, v0.7 to v4.0; can be submitted: no (digits; resumed)\n  {path}\n'
    )
    assert call('check', v06).stdout.startswith(
        'format passes: v0.6; can be submitted: no (digits)\n'
    )
    assert call('check', path, '--ruleset', '0.6.0').returncode == 1


NOTE = (
    'note: the last step of an epoch fills 75.00 % of its batch and scales its learning rate '
    'by 0.75; in the'
)


@pytest.mark.parametrize(
    'config, batch, is_noted',
    [(closed(LARS), 64, True), (closed(LARS), 48, False), (LARS, 64, False)],
)
def test_scaled_last_step_of_a_closed_run_is_noted(tmp_path, config, batch, is_noted):
    path = write_run(tmp_path / 'result_0.txt', config, batch=batch)
    run_sets = load_run_sets([path], Rules(['4.0.0']))
    checked = run_sets[0].logs[0]
    assert checked.passed and (NOTE in render_text(make_check(run_sets))) == is_noted
    facts = judge.logs_as_json([checked])['logs'][0]
    assert facts['last_step_lr_factor'] == 48 / batch
    path.write_text(
        path.read_text().replace(
            '"last_step_lr_factor", "value": ', '"last_step_lr_factor", "value": 1e'
        )
    )
    assert 'last step' not in verdict(path)


def test_options_of_the_open_division_are_refused_by_name_in_a_closed_one(tmp_path):
    config = replace(
        SGD, data=DataConfig(sizes=(160, 192), eval_flip=True), train=replace(SGD.train, ema=0.99)
    )
    path = write_run(tmp_path / 'result_0.txt', config)
    assert violations(path, '4.0.0', 'open') == ()
    for ruleset in ('4.0.0', 'v0.5'):
        refused = [
            v.partition(' ')[0]
            for v in violations(path, ruleset, 'closed')
            if 'only the open division' in v
        ]
        assert refused == ['data.sizes', 'data.eval_flip', 'train.ema']
    # A resume may add an option.
    path.write_text(path.read_text() + mllog('open_options', 9, {'data.eval_size': 16}) + '\n')
    assert 'data.eval_size is 16, which' in ' '.join(violations(path, '4.0.0', 'closed'))
    assert 'open_options' not in write_run(tmp_path / 'result_1.txt').read_text()


DIGITS = shipped_logs() / 'digits_five'  # five real runs, with their metrics.jsonl


@pytest.mark.parametrize(
    'seconds, reason',
    [
        (
            600,
            'run_stop is 621.2 s later than run_start, but the run took 21.2 s',
        ),
        (-7200, 'run_start is 7192.5 s later than block 2'),
    ],
)
def test_a_step_of_the_clock_is_refused_by_every_command_with_its_reason(tmp_path, seconds, reason):
    folder = shutil.copytree(DIGITS, tmp_path / 'five')
    for path in folder.glob('result_*.txt'):
        path.write_text(shift_clock(path.read_text(), 0.95, seconds))
    checked = judge.check_log(folder / 'result_0.txt')
    assert all(any(t.startswith(reason) for t in v.violations) for v in checked.verdicts)
    run_set = load_run_sets([folder])[0]
    assert run_set.score_minutes is None and any(
        t.startswith(reason) for t in run_set.runs[0].errors
    )
    assert any(f': {reason}' in text for text in run_set.judgement.violations)
    done = call('package', folder, '--org', 'us', '--system', 'x', '--out', tmp_path / 'out')
    assert done.returncode == 1 and f': {reason}' in done.stdout


def test_a_clock_changed_by_less_than_a_second_is_no_contradiction(tmp_path):
    folder = shutil.copytree(DIGITS, tmp_path / 'five')
    path = folder / 'result_0.txt'
    path.write_text(shift_clock(path.read_text(), 0.95, 0.9))
    assert judge.check_log(path, ['4.0.0']).passed


# Several logs.
@pytest.fixture
def logs(tmp_path):
    """Two folders with one log each; the first passes the v0.5 rules, and the second misses their
    target."""
    for k, accuracy in enumerate((0.7595, 0.7489)):
        (tmp_path / f'logs/set_{k}').mkdir(parents=True)
        write_run(tmp_path / f'logs/set_{k}/result_{k}.txt', accuracies=(0.1, accuracy))
    return tmp_path / 'logs'


def test_folder_expands_to_its_logs_with_a_summary(logs):
    done = call('check', logs)
    reason = 'the target was missed: best accuracy 0.74890, expected at least 0.749'
    assert done.returncode == 1 and done.stdout.startswith(
        f'valid for their rounds: 1 of 2 sets, 2 logs\n'
        f'  {logs}/set_0/result_0.txt: valid for v0.5: yes. A score needs 5 such logs, judged by '
        'v0.5, the oldest that '
        f'the logs pass; --ruleset ROUND selects another\n'
        f'  {logs}/set_1/result_1.txt: valid for v4.0 open: no (run_stop has status success, but '
        'the last accuracy'
    )
    assert '  rules of other rounds (not required): v0.7 to v4.0 yes\n' in done.stdout  # of set_0
    path = logs / 'set_1/result_1.txt'
    path.write_text(
        '\n'.join(line for line in path.read_text().splitlines() if 'model_hp_' not in line)
    )
    single = call('check', path, '--ruleset', '0.5').stdout.splitlines()
    assert (
        single[0].endswith('6 more)') and single[1] == f'  {path}' and f'  - {reason}' in single[2:]
    )


def test_unreadable_logs_do_not_stop_the_check_and_json_agrees(logs, tmp_path, monkeypatch):
    (tmp_path / 'bad/closed').mkdir(parents=True)
    (tmp_path / 'bad/result_0.txt').write_text('\x1b[2Jno log\n')
    os.mkfifo(tmp_path / 'bad/result_1.txt')
    path = logs / 'set_0/result_0.txt'
    path.write_text(
        path.read_text()
        .replace('"value": 0.1', '"value": NaN')
        .replace('"here"', r'"\u001b[2J\ud800"')
    )
    deny(monkeypatch, 'bad/closed', 'scandir')
    words = ['check', tmp_path / 'bad', logs, '--ruleset', 'v0.5']
    done, as_json = call(*words), call(*words, '--format', 'json')
    content = json.loads(as_json.stdout, parse_constant=pytest.fail)
    assert done.returncode == as_json.returncode == 1 and '\x1b' not in done.stdout + as_json.stdout
    found = {log['file']: log for log in content['logs']}
    expected = 'contains no MLPerf log line; expected lines with :::MLLOG, :::MLL or :::MLPv0.5.0'
    for name, reason in [
        ('bad/result_0.txt', expected),
        ('bad/result_1.txt', 'cannot read the log: got a named pipe, expected a file'),
        ('bad/closed', 'the folder cannot be read: Permission denied'),
    ]:
        log = found[str(tmp_path / name)]
        assert reason in done.stdout and (log['error'], log['verdicts']) == (reason, [])
    assert done.stdout.startswith('valid for their rounds: 0 of 4 sets, 5 logs\n')
    assert as_json.stdout.isascii() and content['passed'] is False and len(found) == 5
    torn, missed = found[str(path)], found[str(logs / 'set_1/result_1.txt')]
    assert (torn['best_top1'], torn['is_imagenet'], torn['num_resumes']) == (0.7595, True, 0)
    assert (
        missed['verdicts'][0]['violations'][0].startswith('the target was missed')
        and not missed['passed']
    )


@pytest.mark.parametrize(
    'text, reason',
    [
        (None, 'contains no result_<k>.txt'),
        (':::MLLOG ' + 'x' * MAX_LINE, 'no MLPerf log line can be decoded (line 1'),
    ],
)
def test_folder_without_readable_logs_is_a_usage_error(tmp_path, text, reason):
    if text is not None:
        (tmp_path / 'result_0.txt').write_text(text)
    done = call('check', tmp_path)
    assert (done.returncode, done.stdout) == (2, '') and reason in done.stderr


# Logs made to stall, crash or mislead the official checker.
def write_with(folder, *lines):
    return write_lines(folder / 'result_0.txt', [*run_lines(), *lines])


@pytest.mark.parametrize(
    'line',
    [
        'x' * 90_000 + mllog('seed', 1, 2),
        mllog('seed', 1, 'x' * (MAX_LINE - len(mllog('seed', 1, '')))),
        ':::MLL 1.0 seed: ' + '1' * 90_000,
        ':::MLPv0.5.0 resnet 1.0 (a:1) ' + 'a' * 90_000,
    ],
    ids=['late', 'just-too-long', 'v0.6', 'v0.5'],
)
@pytest.mark.parametrize('ruleset', ['0.6.0', '4.0.0'])
def test_long_line_is_a_violation_and_skips_the_official_checker(tmp_path, line, ruleset):
    path = write_with(tmp_path, line)
    expected = (
        f'line {len(run_lines()) + 1} is longer than 8192 characters, the limit for a log line; '
        'the official '
        'checker was not run'
    )
    assert [text for text in violations(path, ruleset) if not text.startswith('torn')] == [expected]
    assert find_danger(path, ruleset) == expected


def test_longest_allowed_line_and_long_foreign_lines_are_accepted(tmp_path, monkeypatch):
    """Lines are parsed separately, because the official file parser takes time quadratic in their
    length."""
    monkeypatch.setattr(
        mlp_parser, 'parse_file', lambda *_, **__: pytest.fail('a file was read unbounded')
    )
    fits = mllog('seed', 1, 'x' * (MAX_LINE - 1 - len(mllog('seed', 1, ''))))
    progress = '\r'.join(['progress' * 10, mllog('seed', 1, 2)] * 90)  # with log lines in between
    path = write_with(tmp_path, fits, 'x' * 90_000, progress)
    assert find_long_lines(path) == []
    assert violations(path, '4.0.0') == violations(
        write_lines(tmp_path / 'without', run_lines()), '4.0.0'
    )


def test_lines_match_the_official_parser(tmp_path):
    text = 'a:::MLLOG 1\r\nb\rc:::MLLOG 2\r:::MLLOG 3\n\nd:::MLLOG :::MLLOG 4\x0b\x85:::MLLOG 5'
    (tmp_path / 'log').write_bytes(text.encode('latin-1'))
    official = [
        line
        for line in io.TextIOWrapper(io.BytesIO(text.encode('latin-1')), 'latin-1')
        if ':::ML' in line
    ]
    marked = list(marked_lines(tmp_path / 'log'))
    assert [line.strip() for _, line in marked] == [line.strip() for line in official] and len(
        marked
    ) == 4
    assert [number for number, _ in marked] == [1, 2, 2, 4]


@pytest.mark.parametrize(
    'line, reason',
    [
        (':::MLLOG {}', 'KeyError'),
        (':::MLLOG []', 'TypeError'),
        (':::MLLOG ' + '[' * 5000, 'RecursionError'),
        (
            ':::MLLOG {"key": [], "time_ms": 1, "value": 1, "metadata": {}}',
            'a key is [], expected a string',
        ),
        (
            ':::MLLOG {"key": "seed", "time_ms": 1, "value": 1, "metadata": 3}',
            'its value or metadata is missing',
        ),
    ],
)
def test_line_that_crashes_the_official_tools_is_a_violation(tmp_path, line, reason):
    path = write_with(tmp_path, line)
    assert reason in find_danger(path, '4.0.0')
    assert any(reason in text for text in violations(path, '4.0.0'))


def test_values_that_crash_the_official_checker_are_a_violation(tmp_path):
    path = write_lines(tmp_path / 'result_0.txt', run_lines(('x',)))
    assert (
        'the official checker crashes on the log (TypeError:'
        in violations(path, '4.0.0', 'closed')[0]
    )
    assert not logging.root.manager.disable


def test_torn_lines_are_folded_and_control_characters_removed(tmp_path):
    path = write_with(
        tmp_path,
        *[':::MLLOG {'] * 500,
        '\x1b[2J:::MLLOG {"key": "\x1b]0;x"}',
        mllog('eval_accuracy', 9, 0.5).replace('0.5', '1' + '0' * 400),
    )
    torn = [t for t in violations(path, 'v0.5') if t.startswith('torn line')]
    assert len(torn) == 21 and torn[-1] == 'torn lines: 481 more'
    assert judge.check_log(path).run.best_accuracy == 0.76  # 1e400 is not an accuracy
    done = call('check', tmp_path, '--ruleset', 'v0.5')
    assert done.returncode == 1 and '\x1b' not in done.stdout and len(done.stdout.splitlines()) < 60
    # this checker quotes the lines
    assert '\x1b' not in call('check', tmp_path, '--ruleset', '4.0.0').stdout


# Spellings of rulesets.
def test_round_is_accepted_in_each_form_and_printed_in_one():
    texts = ('4.0.0', ' V2.1', 'v0.5.0', '0.6', 'v0.7+')
    assert [parse_round(text) for text in texts] == ['v4.0', 'v2.1', 'v0.5', 'v0.6', 'v0.7+']
    assert render_rounds(['v0.5', '0.7.0', '1.0.0', '1.1.0', '4.0.0']) == 'v0.5, v0.7 to v1.1, v4.0'
    done = call('package', '--check', 'x', '--round', '0.6')
    assert (
        done.returncode == 2
        and "--round: invalid choice: 'v0.6' (choose from 'v1.0'" in done.stderr
    )


@pytest.mark.parametrize(
    'text, hint',
    [
        ('4.0.1', 'did you mean v4.0'),
        ('v3.2', 'did you mean v3.'),
        ('', 'from v0.5 to v4.0'),
        ('4', 'expected a round such as v2.0'),
    ],
)
def test_unknown_round_is_refused_with_a_suggestion(text, hint):
    with pytest.raises(ArgumentTypeError, match=f'^got {text!r}.*{hint}'):
        parse_round(text)
