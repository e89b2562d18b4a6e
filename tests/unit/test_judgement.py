"""What is wrong with a set of logs, in the words and exit codes of all commands."""

import json
import shutil

import pytest
from helpers import call, shipped_logs
from lines import complete, mllog, run_lines, write_lines, write_set
from made_systems import hide_package

from mlperf_rn50.analysis.sets.load import load_run_sets

DIGITS = shipped_logs() / 'digits_five'  # five real runs


def edit(path, change):
    path.write_text('\n'.join(change(path.read_text().splitlines())) + '\n')


def without_accuracy(number):
    """Return a function that removes one line with an accuracy in each line format."""

    def change(lines):
        for mark in (':::MLLOG', ':::MLPv'):
            found = [line for line in lines if mark in line and 'eval_accuracy' in line]
            lines = [line for line in lines if line is not found[number]] if found else lines
        return lines

    return change


def without_clearing(lines):
    return [line for line in lines if 'cache_clear' not in line and 'run_clear_caches' not in line]


def spoil(folder, *kinds):
    """Damage a set of five; each kind has its own log."""
    if 'contradiction' in kinds:
        edit(folder / 'result_1.txt', without_accuracy(-1))
    if 'batch' in kinds:
        path, name = folder / 'result_2.txt', '"key": "global_batch_size", "value": '
        path.write_text(path.read_text().replace(name, f'{name}9'))
    if 'duplicate' in kinds:
        shutil.copy(folder / 'result_3.txt', folder / 'result_4.txt')
    if 'format' in kinds:
        for k in (0, 1):
            edit(folder / f'result_{k}.txt', without_clearing)
    if 'garbage' in kinds:
        (folder / 'result_0.txt').write_text('Segmentation fault\n')
    return folder


REASONS = {
    'contradiction': 'result_1.txt: run_stop has status success, but the last accuracy',
    'duplicate': 'result_4.txt is a duplicate of result_3.txt',
    'garbage': 'result_0.txt: contains no MLPerf log line',
    'format': 'cache_clear is missing',
    'batch': 'global_batch_size is ',
}


@pytest.mark.parametrize(
    'kinds', ['contradiction', 'duplicate', 'garbage', 'format', 'contradiction batch duplicate']
)
def test_each_command_refuses_a_faulty_set_with_all_reasons_first(tmp_path, kinds):
    kinds = kinds.split()
    folder = spoil(shutil.copytree(DIGITS, tmp_path / 'five'), *kinds)
    checked, report = call('check', folder, '--ruleset', 'v4.0'), call('report', folder)
    package = call('package', folder, '--org', 'us', '--system', 'x', '--out', tmp_path / 'out')
    watch, predict = call('watch', folder, '--once', '--format', 'json'), call('predict', folder)
    codes = [done.returncode for done in (checked, report, package, watch, predict)]
    assert codes == [1, 1, 1, 1, 2] and not (tmp_path / 'out').exists()
    assert 'valid for v4.0 open: no (' in checked.stdout.splitlines()[0]
    sentences = '\n'.join(line for line in report.stdout.splitlines()[:6] if line.startswith('- '))
    assert 'Refused by the rules of' in sentences and 'MLPerf score' not in sentences
    for text in (checked.stdout, sentences, package.stdout, watch.stdout, predict.stderr):
        assert all(REASONS[kind] in text for kind in kinds), text
    (system,) = json.loads(call('report', folder, '--format', 'json').stdout)['systems']
    assert system['score_minutes'] is None and system['violations']


def test_run_that_failed_is_tolerated_by_each_command_and_named(tmp_path):
    folder = shutil.copytree(DIGITS, tmp_path / 'five')
    edit(folder / 'result_1.txt', without_clearing)
    checked = call('check', folder, '--ruleset', 'v4.0')
    report = call('report', folder, '--format', 'json')
    assert checked.returncode == report.returncode == 0
    text = '(one may fail: result_1.txt, breaks the rules: cache_clear is missing)'
    assert text in checked.stdout.splitlines()[0]
    (run_set,) = load_run_sets([folder])  # without the rules
    kept = sorted(r.time_to_train_s for r in run_set.runs if r.path.name != 'result_1.txt')[1:]
    (system,) = json.loads(report.stdout)['systems']
    assert system['score_minutes'] == pytest.approx(sum(kept) / 3 / 60)
    found = [finding['text'] for finding in system['findings']]
    assert any('the slowest of the score' in text for text in found)


def test_round_that_was_not_named_is_stated_with_the_option_that_selects_another(tmp_path):
    folder = write_set(tmp_path / 'runs', is_complete=True)
    line = call('check', folder).stdout.splitlines()[1]
    assert 'judged by v0.7, the oldest' in line and '--ruleset ROUND' in line
    assert 'judged by the rules of v0.7' in call('report', folder, '--findings').stdout
    shutil.copytree(folder, tmp_path / 'v1.0/us/results/box/resnet')
    assert '--ruleset' not in call('check', tmp_path / 'v1.0').stdout


def test_score_without_mlperf_logging_is_marked_as_unchecked(tmp_path, monkeypatch):
    # which the official checkers refuse
    folder = write_set(tmp_path / 'runs', epoch_s=lambda k: 10.123 + k)
    assert 'Refused by the rules of v4.0' in call('report', folder).stdout
    hide_package(monkeypatch, 'mlperf_logging')
    done = call('report', folder, '--findings')
    assert done.returncode == 0 and '(MLPerf score, rules not checked)' in done.stdout
    assert 'note: the rules of the round were not checked; run pip install' in done.stdout
    assert call('check', folder).returncode == 2


def test_round_whose_format_most_logs_lack_is_not_passed(tmp_path):
    folder = shutil.copytree(DIGITS, tmp_path / 'five')
    rounds = []
    for num_without in (0, 1, 2):
        for k in range(num_without):
            edit(folder / f'result_{k}.txt', lambda lines: [x for x in lines if ':::MLPv' not in x])
        [found] = json.loads(call('check', folder, '--format', 'json').stdout)['sets']
        rounds.append(found['passed_rounds'])
    assert rounds[0] == rounds[1] and rounds[0][0] == 'v0.5'  # as any fault, one log may have it
    assert rounds[2] == rounds[0][1:]


def test_set_that_is_refused_in_a_later_round_is_refused_by_check_and_report(tmp_path):
    """v1.1 requires lines about the weights."""
    for name in ('v0.7', 'v1.1'):
        folder = tmp_path / name / 'us/results/box/resnet'
        write_set(folder, is_complete=True, epoch_s=lambda k: 10.123 + k)
        checked, report = call('check', tmp_path), call('report', tmp_path, '--findings')
        assert checked.returncode == report.returncode == (name == 'v1.1')
    assert 'submitted again in v1.1 and refused by its rules: 5 logs: weights' in report.stdout


def test_logs_of_other_benchmarks_are_skipped_and_counted(tmp_path):
    box = tmp_path / 'v0.7/us/results/box'
    write_set(box / 'resnet', is_complete=True, epoch_s=lambda k: 10.123 + k)
    bert = [mllog('submission_benchmark', 0, 'bert\x1b[2J')]  # would clear the screen
    for k in range(3):
        write_lines(box / f'bert/result_{k}.txt', bert)
    for words in (['check'], ['report'], ['predict'], ['watch', '--once']):
        done = call(*words, tmp_path)
        # watch shows the newest of a folder
        text = '1 log' if 'watch' in words else '3 logs'
        assert done.returncode == 0
        assert f'skipped {text} of other benchmarks: bert' in done.stdout + done.stderr
        assert '\x1b' not in done.stdout + done.stderr
        for path in (box / 'bert', box / 'bert/result_1.txt'):
            done = call(*words, path)
            assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
            assert "got a log of the benchmark 'bert" in done.stderr
    found = json.loads(call('check', tmp_path, '--format', 'json').stdout)
    assert found['num_other_benchmarks'] == 3


def test_run_that_was_killed_after_a_resume_is_refused(tmp_path):
    """It was interrupted at 12 s and resumed at 60 s."""
    lines = complete(run_lines(division='open'))
    lines = [line for line in lines if 'run_stop' not in line and '"epoch_num": 2' not in line]
    lines += [
        mllog('run_stop', 12, status='aborted', reason='interrupted'),
        mllog('run_resumed', 60, 1, epoch_num=2, clock_s=11.5),
        mllog('epoch_start', 61, epoch_num=2),
    ]
    done = call('check', write_lines(tmp_path / 'result_0.txt', lines))
    assert done.returncode == 1 and 'no run_stop' in done.stdout


@pytest.mark.parametrize('num_images, is_refused', [(50_000, True), (1_277_952, False)])
def test_closed_division_refuses_unnamed_data_that_is_not_nearly_imagenet(
    tmp_path, num_images, is_refused
):
    keys = {'train_samples': num_images, 'epoch_s': lambda k: 10.123 + k}
    folder = write_set(tmp_path / 'v0.7/us/results/box/resnet', is_complete=True, **keys)
    assert ('requires ImageNet' in call('check', folder).stdout) == is_refused
