"""Logs made to stall, crash or steer the official checker: none reaches it, and each is answered in a sentence."""
import io

import pytest
from helpers import PUBLISHED, ROOT, call
from lines import mllog, run_lines, v06, write_lines
from mlperf_logging.compliance_checker import mlp_compliance, mlp_parser
from mlperf_logging.compliance_checker.mlp_parser import ruleset_060, ruleset_400

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.check import check_log
from mlperf_rn50.mlperf.official import MAX_LINE, claimed_lines, find_danger, find_long_lines

MEGABYTE = 1 << 20


@pytest.fixture
def given(monkeypatch):
    """The lines that the official parser is given; its own reading of files, which is quadratic, is never used."""
    lines = []
    for module in (ruleset_060, ruleset_400):
        def record(number, text, parse=module.string_to_logline):
            lines.append(text)
            return parse(number, text)
        monkeypatch.setattr(module, 'string_to_logline', record)
        monkeypatch.setattr(module, 'strip_and_dedup', lambda _: pytest.fail('the quadratic expression was used'))
    monkeypatch.setattr(mlp_parser, 'parse_file', lambda *_, **__: pytest.fail('a file was read unbounded'))
    return lines


def write_with(folder, *lines):
    return write_lines(folder / 'result_0.txt', [*run_lines(), *lines])


@pytest.mark.parametrize('line', [
    ':::MLLOG ' + 'x' * MEGABYTE, 'x' * MEGABYTE + mllog('seed', 1, 2), mllog('seed', 1, 'x' * MEGABYTE),
    ':::MLLOG ' * (MEGABYTE // 9), ':::MLLOG ' + '[' * MEGABYTE, ':::MLLOG ' + '{"a":' * (MEGABYTE // 5),
    ':::MLL 1.0 seed: ' + '1' * MEGABYTE, ':::MLPv0.5.0 resnet 1.0 (a:1) ' + 'a' * MEGABYTE,
    ':::MLLOG' + ' ' * MEGABYTE, mllog('seed', 1, 'x' * MAX_LINE)],
    ids=['junk', 'late', 'value', 'tokens', 'brackets', 'objects', 'digits', 'key', 'spaces', 'just-too-long'])
@pytest.mark.parametrize('ruleset', ['0.6.0', '4.0.0'])
def test_a_long_line_is_a_violation_and_no_checker_is_given_it(tmp_path, given, line, ruleset):
    path = write_with(tmp_path, line)
    number = len(run_lines()) + 1
    [verdict] = check_log(path, [ruleset]).verdicts
    expected = f'line {number} is longer than 8192 characters, which no log line is; no checker was given it'
    assert verdict.violations[0] == expected and find_danger(path, ruleset) == expected
    assert not given


def test_a_long_line_of_another_program_is_none_of_ours(tmp_path, given):
    path = write_with(tmp_path, 'x' * MEGABYTE, '\r'.join(['progress' * 10, mllog('seed', 1, 2)] * 9000))
    assert find_long_lines(path) == []


def test_the_limit_is_where_it_is_said_to_be(tmp_path, given):
    frame = len(mllog('seed', 1, ''))
    fits, too_long = (mllog('seed', 1, 'x' * (MAX_LINE - frame - spare)) for spare in (1, 0))
    assert find_long_lines(write_with(tmp_path, fits)) == []
    assert len(find_long_lines(write_with(tmp_path, too_long))) == 1
    check_log(write_with(tmp_path, fits), ['4.0.0'])
    assert max(map(len, given)) == MAX_LINE - 1


@pytest.mark.parametrize('before', [MAX_LINE - 3, 2 * MAX_LINE - 1, 3 * MAX_LINE - 9, 3 * MEGABYTE])
def test_a_claim_is_found_wherever_it_stands_in_a_line(tmp_path, before):
    path = tmp_path / 'log'
    path.write_text('first\n' + 'x' * before + ':::MLLOG {}' + '\nlast ' + ':::MLL')
    assert list(claimed_lines(path)) == [(2, None), (3, 'last :::MLL')]


def test_lines_are_those_of_the_official_parser(tmp_path):
    text = 'a:::MLLOG 1\r\nb\rc:::MLLOG 2\r:::MLLOG 3\n\nd:::MLLOG :::MLLOG 4\x0b\x85:::MLLOG 5'
    (tmp_path / 'log').write_bytes(text.encode('latin-1'))
    official = [line for line in io.TextIOWrapper(io.BytesIO(text.encode('latin-1')), 'latin-1') if ':::ML' in line]
    ours = list(claimed_lines(tmp_path / 'log'))
    assert [line.strip() for _, line in ours] == [line.strip() for line in official] and len(ours) == 4
    assert [number for number, _ in ours] == [1, 2, 2, 4]


@pytest.mark.needs_published
def test_no_published_line_comes_near_the_limit():
    logs = [*PUBLISHED.rglob('result_*.txt'), *(ROOT / 'logs').rglob('result_*.txt')]
    longest = max(len(line or 'x' * MAX_LINE) for path in logs for _, line in claimed_lines(path))
    assert 1000 < longest < MAX_LINE // 4


@pytest.mark.parametrize('line, why', [
    (':::MLLOG {}', 'KeyError'), (':::MLLOG []', 'TypeError'), (':::MLLOG ' + '[' * 5000, 'RecursionError'),
    (':::MLLOG {"key": [], "time_ms": 1, "value": 1, "metadata": {}}', "a key is [], expected a text"),
    (':::MLLOG {"key": "seed", "time_ms": 1, "value": 1, "metadata": 3}', 'its value or metadata is missing')])
def test_a_line_on_which_the_official_tools_crash_is_a_violation(tmp_path, line, why):
    path = write_with(tmp_path, line)
    assert why in find_danger(path, '4.0.0')
    assert any(why in text for text in check_log(path, ['4.0.0']).verdicts[0].violations)


def test_values_that_crash_the_official_checker_are_a_violation(tmp_path):
    path = write_lines(tmp_path / 'result_0.txt', run_lines(('x',)))
    assert any('the official checker crashes on the log (TypeError:' in text
               for text in check_log(path, ['4.0.0'], 'closed').verdicts[0].violations)
    assert not mlp_compliance.logging.root.manager.disable


def test_thousands_of_torn_lines_are_folded(tmp_path):
    path = write_with(tmp_path, *[':::MLLOG {'] * 5000)
    torn = [t for t in check_log(path, ['v0.5']).verdicts[0].violations if t.startswith('torn line')]
    assert len(torn) == 21 and torn[-1] == 'torn line, and 4980 more of them'


def test_a_log_of_long_lines_only_is_no_log(tmp_path):
    (tmp_path / 'result_0.txt').write_text(':::MLLOG ' + 'x' * MAX_LINE)
    with pytest.raises(UserError, match='line 1 is longer than 8192 characters'):
        check_log(tmp_path / 'result_0.txt')


def test_an_accuracy_that_is_no_float_is_left_out(tmp_path):
    path = write_with(tmp_path, mllog('eval_accuracy', 9, 0.5).replace('0.5', '1' + '0' * 400), v06('x', 9))
    assert check_log(path, ['v0.5']).facts.best_top1 == 0.76


def test_the_command_survives_all_of_them(tmp_path):
    write_with(tmp_path, ':::MLLOG ' * 100_000, ':::MLLOG {}', '\x1b[2J:::MLLOG {"key": "\x1b]0;x"}')
    done = call('check', tmp_path)
    assert done.returncode == 1 and '\x1b' not in done.stdout and len(done.stdout.splitlines()) < 250
