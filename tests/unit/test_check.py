"""Log checkers: verdicts and violations, folders of logs, JSON output, and hostile logs."""

import io
import json
import logging
import os
import re
import shutil
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
from helpers import call, deny, json_table, shipped_logs, table, write_files
from lines import mllog, run_lines, write_lines
from mlperf_logging.compliance_checker import mlp_parser
from sample_log import LARS, SGD, closed, shift_clock, write_five, write_run

from mlperf_rn50.analysis.sets.load import Rules, load_run_sets
from mlperf_rn50.analysis.sets.verdict import make_check
from mlperf_rn50.analysis.show.plain import render_text
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


def check_texts(texts, message):
    """Assert that one of the texts starts with a message, or that there is none if it is None."""
    assert any(t.startswith(message) for t in texts) if message else texts == (), texts


@pytest.mark.parametrize('config', [SGD, LARS], ids=['sgd', 'lars'])
def test_good_log_passes_every_ruleset(tmp_path, config):
    path = write_run(tmp_path / 'result_0.txt', config)
    passed = {(r, d): violations(path, r, d) for r in LATER for d in ('open', 'closed')}
    assert passed == dict.fromkeys(passed, ()) and violations(path, judge.V05) == ()


@pytest.mark.parametrize(
    'division, name, is_allowed',
    [
        ('open', 'distributed shampoo', True),
        ('closed', 'distributed shampoo', False),
        ('open', '../x', False),
    ],
)
def test_open_division_permits_any_word_as_optimizer(good, division, name, is_allowed):
    text = re.sub(r'("key": "opt_name", "value": )"\w+"', rf'\1"{name}"', good.read_text())
    good.write_text(text.replace('"value": "open"', f'"value": "{division}"'))
    found = [t for t in violations(good, LATER[-1]) if 'opt_name' in t]
    assert (not found) == is_allowed


def test_value_that_the_official_checker_cannot_compare_is_named(good):
    text = good.read_text()
    batch = r'("key": "global_batch_size", "value": )(\d+)'
    good.write_text(re.sub(batch, r'\1"\2"', text))
    found = violations(good, LATER[-1], 'closed')
    assert any(re.match(r"global_batch_size: got '\d+', for which value > 0", t) for t in found)
    assert not any('tensors' in t for t in found)


@pytest.mark.parametrize(
    'name, accuracy, ruleset, division, message',
    json_table("""
"lars" | 0.7595 | "0.6.0" | null | null
"step" | 0.7595 | "0.6.0" | null | null
"poly" | 0.7595 | "0.6.0" | null | "optimizer keys: expected opt_learning_rate_decay_boundary"
"poly" | 0.7489 | "v0.5"  | null | "the target was missed"
"step" | 0.7489 | "0.6.0" | null | "run_stop: got "
"poly" | 0.7489 | "0.7.0" | null | "eval_accuracy: the best value is 0.7489"
"poly" | 0.7489 | "4.0.0" | null | null
"poly" | 0.7489 | "4.0.0" | "closed" | "eval_accuracy: the best value"
"""),
)
def test_violations_by_ruleset(tmp_path, name, accuracy, ruleset, division, message):
    path, v06 = tmp_path / 'result_0.txt', tmp_path / 'result_0_v0.6.txt'
    end = 'converged' if accuracy > 0.75 else 'aborted'
    config = {'lars': LARS, 'step': STEP, 'poly': SGD}[name]
    write_run(path, config, accuracies=(0.1, accuracy), end=end, v06=v06)
    check_texts(violations(v06 if ruleset == '0.6.0' else path, ruleset, division), message)


@pytest.mark.parametrize('make, is_refused', [(closed, True), (lambda config: config, False)])
def test_target_below_that_of_v05_and_v06_is_a_violation_unless_open(tmp_path, make, is_refused):
    """Their official rules do not check it."""
    path, v06 = tmp_path / 'result_0.txt', tmp_path / 'result_0_v0.6.txt'
    config = make(replace(LARS, train=replace(LARS.train, target_accuracy=0.6)))
    write_run(path, config, accuracies=(0.1, 0.61), v06=v06)
    for log, ruleset, target in ((path, judge.V05, 0.749), (v06, '0.6.0', 0.759)):
        message = f'the best accuracy is 0.61000, expected at least {target}'
        check_texts(violations(log, ruleset), message if is_refused else None)


def test_events_in_another_order_violate_the_rules(good):
    pairs = ('run_start', 'train_loop'), ('run_stop', 'run_final')
    swapped = {old: new for pair in pairs for old, new in (pair, pair[::-1])}
    names = rf'(?<=\) )({"|".join(swapped)})'
    text = re.sub(names, lambda match: swapped[match[0]], good.read_text())
    write_lines(good, text.splitlines())
    check_texts(violations(good, 'v0.5', None), 'level 1: the order is run_start, run_final')


def test_lines_of_one_time_violate_the_rules_because_they_are_sorted_by_name(good):
    """The official checker sorts lines, and run_final precedes run_stop."""
    lines = good.read_text().splitlines()
    [stop] = [line for line in lines if 'MLPv0.5.0' in line and ' run_stop' in line]
    place = [k for k, line in enumerate(lines) if ' run_final' in line][0]
    lines[place] = stop.partition(' run_stop')[0] + ' run_final'
    write_lines(good, lines)
    check_texts(violations(good, 'v0.5', None), 'level 1: the order is run_start, run_final')


# lines with the old text get the new one, or are removed for '-'
@pytest.mark.parametrize(
    'old, new, ruleset, message',
    table("""
"seed"                | - | 4.0.0 |
"train_samples"       | - | 4.0.0 | train_samples is missing
"cache_clear"         | - | 4.0.0 | cache_clear is missing
) run_start           | - | v0.5  | level 1: run_start appears 0 times, expected once
) eval_st             | - | v0.5  | level 1: eval_start and eval_stop are missing
model_hp_shorcut_add  | - | v0.5  | level 2: model_hp_shorcut_add is missing
) eval_accuracy       | - | v0.5  | level 1: eval_accuracy is missing
"value": "research"   | "value": "attic"  | 4.0.0 | submission_status: got 'attic'
"fc1_bias"            | "fc_bias"         | 2.1.0 | weights_initialization: expected exactly the
"value": "sgd"        | "value": "adam/../../x" | 4.0.0 | opt_name: got 'adam/../../x'
"value": "open"       | "value": "../x"   | 4.0.0 | submission_division: got '../x'
"time_ms"             | "time             | 4.0.0 | torn line
"""),
)
def test_violations_of_a_changed_log(good, old, new, ruleset, message):
    lines = good.read_text().splitlines()
    write_lines(good, [x.replace(old, new) for x in lines if new != '-' or old not in x])
    check_texts(violations(good, ruleset, 'closed' if ruleset == '2.1.0' else None), message)


def append(path, *lines):
    write_lines(path, [*path.read_text().splitlines(), *lines])


def test_resumed_run_on_digits_passes_the_format_and_cannot_be_submitted(tmp_path):
    path, v06 = tmp_path / 'result_0.txt', tmp_path / 'result_0_v0.6.txt'
    write_run(path, replace(LARS, data=DataConfig(dataset='digits')), v06=v06)
    resume = mllog('run_resumed', 2e8, 5, epoch_num=1, clock_s=1.0)
    append(path, resume, mllog('run_stop', 2e8 + 1, status='success'))
    done, old = call('check', path), call('check', v06)
    text = 'format passes: {}; can be submitted: no (digits'.format
    assert done.returncode == 0
    assert done.stdout == f'{text("v0.5, v0.7 to v4.0")}; resumed)\n  {path}\n'
    assert old.stdout.startswith(f'{text("v0.6")})\n')
    assert call('check', path, '--ruleset', '0.6.0').returncode == 1


NOTE = 'note: the last step of an epoch fills 75.00 % of its batch and scales its learning rate by'


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
    name = '"last_step_lr_factor", "value": '
    path.write_text(path.read_text().replace(name, f'{name}1e'))
    assert 'last step' not in render_text(make_check(load_run_sets([path], Rules())))


def test_options_of_the_open_division_are_refused_by_name_in_a_closed_one(tmp_path):
    data = DataConfig(sizes=(160, 192), eval_flip=True)
    config = replace(SGD, data=data, train=replace(SGD.train, ema=0.99))
    path = write_run(tmp_path / 'result_0.txt', config)
    assert violations(path, '4.0.0', 'open') == ()
    for ruleset in ('4.0.0', 'v0.5'):
        found = [v for v in violations(path, ruleset, 'closed') if 'only the open division' in v]
        assert [v.split()[0] for v in found] == ['data.sizes', 'data.eval_flip', 'train.ema']
    # A resume may add an option.
    append(path, mllog('open_options', 9, {'data.eval_size': 16}))
    assert 'data.eval_size is 16, which' in ' '.join(violations(path, '4.0.0', 'closed'))
    assert 'open_options' not in write_run(path).read_text()


DIGITS = shipped_logs() / 'digits_five'  # five real runs, with their metrics.jsonl


@pytest.mark.parametrize(
    'seconds, reason',
    [
        (600, 'run_stop is 621.2 s later than run_start, but the run took 21.2 s'),
        (-7200, 'run_start is 7192.5 s later than block 2'),
        (0.9, ''),  # no contradiction
    ],
)
def test_a_step_of_the_clock_is_refused_by_every_command_with_its_reason(tmp_path, seconds, reason):
    folder = shutil.copytree(DIGITS, tmp_path / 'five')
    for path in folder.glob('result_*.txt'):
        path.write_text(shift_clock(path.read_text(), 0.95, seconds))
    (run_set,) = load_run_sets([folder])
    done = call('package', folder, '--org', 'us', '--system', 'x', '--out', tmp_path / 'out')
    texts = [
        *(' '.join(v.violations) for v in judge.check_log(folder / 'result_0.txt').verdicts[2:]),
        ' '.join(run_set.runs[0].errors),
        ' '.join(run_set.judgement.violations),
        done.stdout,
    ]
    if reason:
        assert all(reason in text for text in texts)
    else:
        assert not any(texts[:-1])
    is_packaged = (tmp_path / 'out').exists()
    assert bool(reason) == (run_set.score_minutes is None) != is_packaged


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
    first, passed, missed, *others = done.stdout.splitlines()
    assert (done.returncode, first) == (1, 'valid for their rounds: 1 of 2 sets (2 logs)')
    assert passed.startswith(f'  {logs}/set_0/result_0.txt: valid for v0.5: yes. A score needs 5')
    assert passed.endswith('the oldest that the logs pass; --ruleset ROUND selects another')
    assert missed.startswith(
        f'  {logs}/set_1/result_1.txt: valid for v4.0 open: no (run_stop has status success, but'
    )
    assert '  rules of other rounds (not required): v0.7 to v4.0 yes' in others  # of set_0
    path = logs / 'set_1/result_1.txt'
    write_lines(path, [x for x in path.read_text().splitlines() if 'model_hp_' not in x])
    first, second, *others = call('check', path, '--ruleset', '0.5').stdout.splitlines()
    assert first.endswith('6 more)') and second == f'  {path}'
    reason = 'the target was missed: best accuracy 0.74890, expected at least 0.749'
    assert f'  - {reason}' in others


def test_set_with_too_few_epochs_does_not_pass_rounds_with_reference_points(tmp_path):
    write_five(tmp_path / 'five', closed(LARS), accuracies=(0.7595,), batch=1632)
    [found] = json.loads(call('check', tmp_path / 'five', '--format', 'json').stdout)['sets']
    assert (found['is_valid'], found['round'], found['passed_rounds'][-1]) == (True, 'v0.5', 'v0.7')
    assert ' v4.0 no (epochs to converge: fails' in call('check', tmp_path / 'five').stdout


def test_unreadable_logs_do_not_stop_the_check_and_json_agrees(logs, tmp_path, monkeypatch):
    write_files(tmp_path / 'bad', {'result_0.txt': '\x1b[2Jno log', 'closed/x': ''})
    os.mkfifo(tmp_path / 'bad/result_1.txt')
    path = logs / 'set_0/result_0.txt'
    text = path.read_text().replace('"value": 0.1', '"value": NaN')
    path.write_text(text.replace('"here"', r'"\u001b[2J\ud800"'))
    deny(monkeypatch, 'bad/closed', 'scandir')
    words = ['check', tmp_path / 'bad', logs, '--ruleset', 'v0.5']
    done, as_json = call(*words), call(*words, '--format', 'json')
    content = json.loads(as_json.stdout, parse_constant=pytest.fail)
    assert done.returncode == as_json.returncode == 1 and '\x1b' not in done.stdout
    assert as_json.stdout.isascii() and '\x1b' not in as_json.stdout
    found = {log['file']: log for log in content['logs']}
    for name, reason in [
        ('bad/result_0.txt', 'contains no MLPerf log line; expected lines with :::MLLOG'),
        ('bad/result_1.txt', 'cannot read the log: got a named pipe, expected a file'),
        ('bad/closed', 'the folder cannot be read: Permission denied'),
    ]:
        log = found[str(tmp_path / name)]
        assert reason in done.stdout and reason in log['error'] and log['verdicts'] == []
    assert done.stdout.startswith('valid for their rounds: 0 of 4 sets (5 logs)\n')
    assert content['passed'] is False and len(found) == 5
    torn, missed = found[str(path)], found[str(logs / 'set_1/result_1.txt')]
    assert (torn['best_top1'], torn['is_imagenet'], torn['num_resumes']) == (0.7595, True, 0)
    assert 'the target was missed' in missed['verdicts'][0]['violations'][0]
    assert not missed['passed']


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


def seed_of_length(length):
    """Return a log line with a number of characters."""
    return mllog('seed', 1, 'x' * (length - len(mllog('seed', 1, ''))))


@pytest.mark.parametrize(
    'line',
    [
        'x' * 90_000 + mllog('seed', 1, 2),
        seed_of_length(MAX_LINE),
        ':::MLL 1.0 seed: ' + '1' * 90_000,
        ':::MLPv0.5.0 resnet 1.0 (a:1) ' + 'a' * 90_000,
    ],
    ids=['late', 'just-too-long', 'v0.6', 'v0.5'],
)
@pytest.mark.parametrize('ruleset', ['0.6.0', '4.0.0'])
def test_long_line_is_a_violation_and_skips_the_official_checker(tmp_path, line, ruleset):
    path = write_with(tmp_path, line)
    [text] = [text for text in violations(path, ruleset) if not text.startswith('torn')]
    assert text == find_danger(path, ruleset)
    assert text.startswith(f'line {len(run_lines()) + 1} is longer than 8192 characters')


def test_longest_allowed_line_and_long_foreign_lines_are_accepted(tmp_path, monkeypatch):
    """Lines are parsed separately, because the official file parser takes time quadratic in their
    length."""
    monkeypatch.setattr(mlp_parser, 'parse_file', None)
    progress = '\r'.join(['progress' * 10, mllog('seed', 1, 2)] * 90)  # with log lines in between
    path = write_with(tmp_path, seed_of_length(MAX_LINE - 1), 'x' * 90_000, progress)
    assert find_long_lines(path) == []
    plain = write_lines(tmp_path / 'without', run_lines())
    assert violations(path, '4.0.0') == violations(plain, '4.0.0')


def test_lines_match_the_official_parser(tmp_path):
    text = b'a:::MLLOG 1\r\nb\rc:::MLLOG 2\r:::MLLOG 3\n\nd:::MLLOG :::MLLOG 4\x0b\x85:::MLLOG 5'
    (tmp_path / 'log').write_bytes(text)
    official = [x for x in io.TextIOWrapper(io.BytesIO(text), 'latin-1') if ':::ML' in x]
    numbers, lines = zip(*marked_lines(tmp_path / 'log'))
    assert [x.strip() for x in lines] == [x.strip() for x in official]
    assert numbers == (1, 2, 2, 4)


@pytest.mark.parametrize('num_before', [0, *range((1 << 21) - 12, (1 << 21) + 2), 5 << 20])
def test_mark_in_a_huge_line_is_found_and_the_line_keeps_its_number(tmp_path, num_before):
    """Also where the line is cut to save memory. A carriage return begins another log line."""
    with open(tmp_path / 'log', 'wb') as file:
        file.write(b':::MLLOG 1\n' + bytes(num_before) + b':::MLLOG 2')
        file.truncate(num_before + (1 << 22))
        file.seek(0, 2)
        file.write(b'\n' + b'x' * num_before + b'\r:::MLLOG 3\n:::MLLOG 4')
    found = [*marked_lines(tmp_path / 'log')]
    assert {number for number, line in found if len(line) > MAX_LINE} == {2}
    assert [line.strip() for _, line in found if len(line) < MAX_LINE] == [
        f':::MLLOG {k}' for k in (1, 3, 4)
    ]


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
    text = 'the official checker crashes on the log (TypeError:'
    assert text in violations(path, '4.0.0', 'closed')[0]
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


def test_round_is_accepted_in_each_form_and_printed_in_one():
    texts = ('4.0.0', ' V2.1', 'v0.5.0', '0.6', 'v0.7+')
    assert [parse_round(text) for text in texts] == ['v4.0', 'v2.1', 'v0.5', 'v0.6', 'v0.7+']
    assert render_rounds(['v0.5', '0.7.0', '1.0.0', '1.1.0', '4.0.0']) == 'v0.5, v0.7 to v1.1, v4.0'
    done = call('package', '--check', 'x', '--round', '0.7+')
    assert done.returncode == 2 and "--round: invalid choice: 'v0.7+'" in done.stderr


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
