"""The checkers: what passes, what does not, and that a reason is given."""
import sys
from dataclasses import replace

import pytest
from helpers import PUBLISHED, call, run
from sample_log import LARS, SGD, write_run

from mlperf_rn50.config import DataConfig, ScheduleConfig
from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf import check

LATER = check.RULESETS[2:]


@pytest.fixture
def good(tmp_path):
    return write_run(tmp_path / 'result_0.txt', v06=tmp_path / 'result_0_v0.6.txt')


@pytest.fixture
def missed(tmp_path):
    return write_run(tmp_path / 'result_0.txt', accuracies=(0.1, 0.7489), end='aborted',
                     v06=tmp_path / 'result_0_v0.6.txt')


def verdicts(path, rulesets=check.RULESETS, division=None):
    return {v.ruleset: v for v in check.check_log(path, tuple(rulesets), division).verdicts}


@pytest.mark.parametrize('config', [SGD, LARS], ids=['sgd', 'lars'])
def test_a_good_log_passes_every_open_ruleset(tmp_path, config):
    path = write_run(tmp_path / 'result_0.txt', config)
    for v in verdicts(path, [check.V05, *LATER]).values():
        assert v.passed, v


@pytest.mark.parametrize('ruleset', LATER)
@pytest.mark.parametrize('config', [SGD, LARS], ids=['sgd', 'lars'])
def test_a_good_log_passes_closed_too(tmp_path, config, ruleset):
    path = write_run(tmp_path / 'result_0.txt', config)
    assert verdicts(path, [ruleset], 'closed')[ruleset].violations == ()


@pytest.mark.parametrize('ruleset', ['1.0.0', '2.1.0', '3.1.0', '4.0.0'])
def test_the_official_program_agrees(good, ruleset, tmp_path):
    done = run([sys.executable, '-m', 'mlperf_logging.compliance_checker', '--usage', 'training',
                '--ruleset', ruleset, '--log_output', tmp_path / 'out', good])
    assert (done.returncode, 'SUCCESS' in done.stderr) == (0, True)


@pytest.mark.parametrize('config', [LARS, replace(SGD, schedule=ScheduleConfig(decay='step'))], ids=['lars', 'sgd'])
def test_the_v06_log_passes_its_own_rules(tmp_path, config):
    v06 = tmp_path / 'result_0_v0.6.txt'
    write_run(tmp_path / 'result_0.txt', config, v06=v06)
    assert verdicts(v06, ['0.6.0'])['0.6.0'].violations == ()


def test_v06_knows_no_polynomial_sgd(good):
    got = verdicts(good.with_name('result_0_v0.6.txt'), ['0.6.0'])['0.6.0'].violations
    assert len(got) == 1 and got[0].startswith('optimizer keys: expected opt_learning_rate_decay_boundary_epochs')


def test_only_rulesets_of_the_lines_found_are_judged(good):
    v06 = good.with_name('result_0_v0.6.txt')
    assert check.find_facts(v06).applicable_rulesets == ('0.6.0',)
    assert check.find_facts(good).applicable_rulesets == (check.V05, *LATER)


def test_a_run_that_missed_its_target_is_refused_where_the_rules_refuse_it(missed):
    got = verdicts(missed, [check.V05, '0.7.0', '4.0.0'])
    assert got[check.V05].violations == ('the target was missed: best accuracy 0.74890, expected at least 0.749',)
    assert 'no line passes the test' in got['0.7.0'].violations[0]
    assert 'the best is 0.7489' in got['0.7.0'].violations[0]
    assert got['4.0.0'].passed  # the open rules of 1.0 and later know no target
    assert not verdicts(missed, ['4.0.0'], 'closed')['4.0.0'].passed
    v06 = missed.with_name('result_0_v0.6.txt')
    assert any('run_stop' in text and 'aborted' in text for text in verdicts(v06, ['0.6.0'])['0.6.0'].violations)


@pytest.mark.parametrize('key, ruleset, message', [
    ('seed', '4.0.0', None),
    ('train_samples', '4.0.0', 'train_samples stands 0 times, expected once'),
    ('cache_clear', '4.0.0', 'cache_clear is missing'),
    ('submission_org', '1.0.0', 'submission_org stands 0 times, expected once'),
    ('run_start', 'v0.5', 'level 1: run_start stands 0 times, expected once'),
    ('model_hp_shorcut_add', 'v0.5', 'level 2: model_hp_shorcut_add is missing'),
    ('eval_accuracy', 'v0.5', 'level 1: eval_accuracy is missing'),
])
def test_a_missing_line_is_named(good, key, ruleset, message):
    lines = [line for line in good.read_text().splitlines() if f'"{key}"' not in line and f') {key}' not in line]
    good.write_text('\n'.join(lines))
    got = verdicts(good, [ruleset])[ruleset].violations
    assert got == () if message is None else message in got


def test_a_wrong_value_is_named(good):
    good.write_text(good.read_text().replace('"value": "research"', '"value": "attic"'))
    assert any(t.startswith("submission_status: got 'attic'") for t in verdicts(good, ['4.0.0'])['4.0.0'].violations)


def test_a_wrong_tensor_is_named(good):
    good.write_text(good.read_text().replace('"tensor": "fc1_bias"', '"tensor": "fc_bias"'))
    got = verdicts(good, ['2.1.0'], 'closed')['2.1.0'].violations
    assert got == ('weights_initialization: the tensors are not exactly those of ResNet-50 as the rules name them',)


def test_a_repeated_line_is_named(good):
    lines = good.read_text().splitlines()
    stop = next(line for line in lines if '"run_stop"' in line)
    good.write_text('\n'.join([*lines, stop.replace('success', 'aborted').replace('null', '1')]))
    assert 'run_stop stands 2 times, expected once' in verdicts(good, ['4.0.0'])['4.0.0'].violations


@pytest.mark.parametrize('key, value', [('submission_benchmark', '../../../../tmp/evil'),
                                        ('submission_division', '../x'), ('opt_name', 'adam/../../x')])
def test_a_log_cannot_choose_the_rules_it_is_checked_by(good, key, value, monkeypatch):
    lines = good.read_text().splitlines()
    changed = [line.replace('"resnet"', f'"{value}"').replace('"open"', f'"{value}"').replace('"sgd"', f'"{value}"')
               if f'"key": "{key}"' in line else line for line in lines]
    good.write_text('\n'.join(changed))
    from mlperf_logging.compliance_checker import mlp_compliance
    monkeypatch.setattr(mlp_compliance, 'make_checker', lambda *_, **__: pytest.fail('the checker was run'))
    assert verdicts(good, ['4.0.0'])['4.0.0'].violations[0].startswith(f'{key}: got {value!r}, expected')


def test_torn_lines_are_violations(good):
    good.write_text(good.read_text() + ':::MLLOG {"namespace": ""')
    assert any('torn line' in t for t in verdicts(good, ['4.0.0'])['4.0.0'].violations)


def test_a_file_without_log_lines_is_an_error(tmp_path):
    path = tmp_path / 'x.txt'
    path.write_text('hello\n')
    with pytest.raises(UserError, match='no MLPerf log line in it'):
        check.check_log(path, ('4.0.0',), None)
    with pytest.raises(UserError, match='cannot read the log'):
        check.find_facts(tmp_path / 'none')


def test_the_command_says_what_can_be_claimed_and_that_digits_are_not_imagenet(tmp_path):
    path = write_run(tmp_path / 'result_0.txt', replace(SGD, data=DataConfig(dataset='digits')))
    done = call('check', path)
    assert done.returncode == 0
    assert 'can claim: v0.5 open, 0.7.0 open' in done.stdout
    assert 'the data set is digits, not ImageNet' in done.stdout
    assert call('check', path, '--ruleset', '0.6.0').returncode == 1


@pytest.mark.needs_published
@pytest.mark.parametrize('name, ruleset, passes', [
    ('v0.5/NVIDIA/results/dgx1_ngc18.11_mxnet/resnet/result_0.txt', 'v0.5', True),
    ('v0.5/NVIDIA/results/dgx2h_multi_ngc18.11_mxnet/resnet/result_3.txt', 'v0.5', True),
    ('v0.6/NVIDIA/results/dgx1_ngc19.05_mxnet/resnet/result_2.txt', '0.6.0', True),
    ('v0.7/NVIDIA/results/dgxa100_ngc20.06_mxnet/resnet/result_0.txt', '0.7.0', True),
    ('v0.7/NVIDIA/results/dgxa100_ngc20.06_mxnet/resnet/result_0.txt', '4.0.0', False),
])
def test_published_logs(name, ruleset, passes):
    assert verdicts(PUBLISHED / name, [ruleset])[ruleset].passed == passes
