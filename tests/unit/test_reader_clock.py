"""The clock of a log, and how it ended, are believed only where they do not contradict themselves."""
import json
import re

import pytest
from lines import START_S, mllog, run_lines, v05, v06, write_lines
from sample_log import write_run

from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.study.time_parts import parts_of

ACCURACIES = (0.3, 0.5, 0.76)
NO_TIME = 'the clock contradicts itself, and its time does not count'


@pytest.fixture
def read(tmp_path):
    def read(lines):
        return read_run(write_lines(tmp_path / 'result_0.txt', lines))
    return read


def texts(run):
    return [w.text for w in run.warnings]


def moved(lines, key, by_s):
    """Lines of which those of one key have another time."""
    def later(m):
        return str(int(m[0]) + round(1e3 * by_s)) if len(m[0]) == 13 else f'{float(m[0]) + by_s:.9f}'
    return [re.sub(r'(?<=ms": )\d{13}|(?<=resnet )[\d.]+', later, line, count=1)
            if f'"{key}"' in line or f') {key}' in line else line for line in lines]


def later_log(epoch_s=120.0, eval_s=6.0):
    return run_lines(ACCURACIES, epoch_s=epoch_s, eval_s=eval_s)


def old_log(epoch_s=120.0, eval_s=6.0):
    lines, now = [v05('run_clear_caches', -9), v05('run_start', 0), v05('run_set_random_seed', 1, 7)], 30.0
    for epoch, accuracy in enumerate(ACCURACIES):
        lines.append(v05('train_epoch', now, epoch))
        lines.append(v05('eval_start', now + epoch_s))
        now += epoch_s + eval_s
        lines += [v05('eval_accuracy', now, {'epoch': epoch, 'value': accuracy}), v05('eval_stop', now)]
    return [*lines, v05('run_stop', now), v05('run_final', now + 1)]


@pytest.mark.parametrize('make', [later_log, old_log])
@pytest.mark.parametrize('key, by_s, word', [
    ('run_start', 600, 'run_start stands'), ('run_stop', -600, 'run_stop stands')])
def test_a_time_that_does_not_nest_does_not_count(read, make, key, by_s, word):
    assert read(make()).status == 'converged' and texts(read(make())) == []
    run = read(moved(make(), key, by_s))
    assert (run.status, run.time_to_train_s, run.epochs_to_converge) == ('failed', None, None)
    assert texts(run)[0].startswith(word) and texts(run)[0].endswith(NO_TIME) and parts_of(run) is None


@pytest.mark.parametrize('make, key, by_s, status, words', [
    (later_log, 'run_start', -600, 'failed', 'run_start stands 599.0 s before init_stop'),
    (old_log, 'run_start', -600, 'converged', 'nothing happens for 601.0 s after run_start'),
    (later_log, 'run_stop', 600, 'converged', 'run_stop stands 600.0 s after the last evaluation'),
    (old_log, 'run_stop', 600, 'failed', 'run_stop stands 599.0 s after run_final')])
def test_a_longer_clock_is_said(read, make, key, by_s, status, words):
    run = read([make()[0][:30], *moved(make(), key, by_s)])
    assert run.status == status and texts(run)[0].startswith(words) and 'torn' in texts(run)[-1]


def test_a_gap_is_odd_only_beside_epochs_and_evaluations(read):
    lines = later_log()
    assert texts(read(moved(lines, 'run_stop', 50))) == []
    assert texts(read(moved(later_log(eval_s=700.0), 'run_stop', 600))) == []
    assert texts(read([line.replace('success', 'aborted') for line in moved(lines, 'run_stop', 100)])) == []
    assert texts(read([line.replace('success', 'aborted') for line in moved(lines, 'run_stop', 200)]))
    slow = [line for line in later_log(epoch_s=700.0) if 'samples' not in line]
    assert texts(read(moved(slow, 'epoch_start', 600))) == []


@pytest.mark.parametrize('by_s', [-1.5, 1.5])
@pytest.mark.parametrize('key', ['run_start', 'run_stop', 'init_stop', 'epoch_stop', 'eval_accuracy'])
def test_small_skews_are_none(read, key, by_s):
    run = read(moved(later_log(), key, by_s))
    assert run.status == 'converged' and texts(run) == []


def test_epochs_that_go_back(read):
    lines = later_log()
    middle = next(i for i, line in enumerate(lines) if '"epoch_num": 2' in line)
    run = read([*lines[:middle], *(moved([line], json.loads(line[9:])['key'], -300)[0] for line in lines[middle:])])
    assert (run.status, run.time_to_train_s) == ('failed', None)
    assert any(t.startswith('epoch 2 stands 174.0 s before epoch 1') for t in texts(run))


def test_many_that_go_back_are_one_sentence(read):
    lines = [mllog('run_start', 0), *(mllog('epoch_start', 1000 - 10 * n, epoch_num=n) for n in range(1, 31)),
             mllog('eval_accuracy', 1200, 0.76, epoch_num=30), mllog('run_stop', 1201, status='success')]
    assert [t for t in texts(read(lines)) if 'earlier epoch' in t] == [
        '29 lines: epoch stands before that of an earlier epoch; first line 3']


def test_an_evaluation_of_another_time_harms_no_clock(read):
    """As in a published set of v0.5: the first evaluation is older than run_start."""
    lines = old_log()
    first = next(i for i, line in enumerate(lines) if 'eval_start' in line)
    keys = ('eval_start', 'eval_accuracy', 'eval_stop')
    old = [moved([line], key, -400)[0] for line, key in zip(lines[first:], keys)]
    run = read([*lines[:first], *old, *lines[first + 3:]])
    assert (run.status, run.time_to_train_s) == ('converged', 408.0)
    assert texts(run) and all('run_start' in t for t in texts(run))
    assert any(t.startswith('2 lines: evaluation before run_start') for t in texts(run))


def test_initialisation_that_ends_before_it_begins(read):
    run = read(moved(later_log(), 'init_stop', -10))
    assert (run.status, run.init_s) == ('converged', None)
    assert texts(run)[0].startswith('init_stop stands 6.0 s before init_start')


def test_seconds_for_milliseconds(read):
    run = read([re.sub(r'ms": (\d{10})\d{3}', r'ms": \1', line) for line in later_log()])
    assert run.status == 'failed' and 'run_start is of 1970' in texts(run)[0]


def both(path, change):
    """A log of ours, which tells everything in two formats, with a change in it."""
    text = write_run(path).read_text()
    path.write_text('\n'.join(change(line) for line in text.splitlines()))
    return read_run(path)


@pytest.mark.parametrize('key, by_s', [('run_stop', 600), ('run_stop', -600), ('run_start', 600), ('run_start', -600),
                                       ('eval_accuracy', 600)])
def test_both_formats_of_a_log_tell_one_time(tmp_path, key, by_s):
    run = both(tmp_path / 'result_0.txt', lambda line: moved([line], key, by_s)[0] if ':::MLPv0.5.0' in line else line)
    assert (run.status, run.time_to_train_s) == ('failed', None)
    assert texts(run)[0].startswith(key) or '2 lines: eval_accuracy stands apart' in texts(run)[0]
    assert 'MLPv0.5.0 lines' in texts(run)[0]


@pytest.mark.parametrize('old, new', [('0.7595', '0.7412'), ('"success": true', '"success": false')])
def test_both_formats_of_a_log_tell_one_end(tmp_path, old, new):
    run = both(tmp_path / 'result_0.txt', lambda line: line.replace(old, new) if ':::MLPv0.5.0' in line else line)
    assert run.status == 'failed' and 'MLPv0.5.0 lines' in texts(run)[0]


@pytest.mark.parametrize('statuses', [('success', 'aborted'), ('aborted', 'success')])
def test_a_second_end_of_another_kind_is_no_success(read, statuses):
    lines = later_log()[:-1]
    ends = [mllog('run_stop', 378 + 5 * n, status=s) for n, s in enumerate(statuses)]
    run = read([lines[0][:30], *lines, *ends])
    assert (run.status, run.time_to_train_s) == ('failed', 378.0)
    assert texts(run)[0].startswith(f'run_stop says {statuses[1]!r}, but {statuses[0]!r} in line') and 'torn' in texts(
        run)[-1]


def test_a_second_end_of_the_same_kind(read):
    run = read([*later_log(), mllog('run_stop', 800, status='success')])
    assert (run.status, run.time_to_train_s) == ('converged', 378.0)
    assert 'at another time (+422.0 s); the first counts' in texts(run)[0]


def test_a_second_end_of_v05(read):
    lines = [*old_log()[:-2], v05('run_stop', 408, {'success': True}), v05('run_stop', 409, {'success': False})]
    assert read(lines).status == 'failed' and texts(read(lines))[0].startswith("run_stop says 'False', but 'True'")


def test_an_end_without_a_word_of_success(read):
    run = read([*later_log()[:-1], mllog('run_stop', 378)])
    assert run.status == 'aborted' and 'run_stop says nothing of success' in texts(run)[0]


def test_a_run_that_went_on_is_said_first(read):
    lines = [line.replace('0.5,', '0.7595,') for line in later_log()]
    run = read([lines[0][:30], *lines])
    assert texts(run)[0] == 'epoch 2 had reached the target; the run went on to epoch 3, which counts'


def test_repeats_are_one_sentence(read):
    lines = run_lines((0.1,) * 12 + (0.76,))[:-1]
    again = [mllog('epoch_start', 200 + n, epoch_num=n) for n in range(1, 13)]
    assert texts(read([*lines, *again, mllog('run_stop', 180, status='success')])) == [
        f'12 lines: epoch_start of an epoch stands before, too; the first counts; first line {len(lines) + 1}']


def test_what_several_workers_log_is_one_sentence(read):
    lines = [x for line in later_log() if 'init_start' not in line
             for x in (line, moved([line], json.loads(line[9:])['key'], 0.003)[0])]
    run = read(lines)
    assert run.status == 'converged' and len(texts(run)) == 1 and 'as where several ranks log it' in texts(run)[0]


def test_contradictions_stand_before_the_rest(read):
    lines = later_log()
    run = read([*(line[:50 + n] for n, line in enumerate(lines[:12])), *lines[:-1], mllog('global_batch_size', 370, 32),
                lines[-1]])
    assert texts(run) == ['global_batch_size is 32, not 64 as in line 22; the first counts',
                          '12 lines: torn line, left out; first line 1']


@pytest.mark.parametrize('write, expected', [
    (lambda e: e - 1, 3), (lambda e: e - 0.01, 3), (float, 3), (str, 3)], ids=['from 0', 'fractions', 'floats', 'text'])
def test_epochs_in_other_numbers(read, write, expected):
    def one(line):
        event = json.loads(line[9:])
        if 'epoch_num' in event['metadata']:
            event['metadata']['epoch_num'] = write(event['metadata']['epoch_num'])
        return ':::MLLOG ' + json.dumps(event)
    run = read([one(line) for line in later_log()])
    assert (run.epochs_to_converge, [s.first_epoch for s in run.stretches]) == (expected, [1, 2, 3])
    assert [e.start_s for e in run.evaluations] == [120.0, 246.0, 372.0]


def test_epochs_from_0_and_evaluations_by_what_was_trained(read):
    lines = [line.replace(f'"epoch_num": {n}', f'"epoch_num": {n - 1}') if '"epoch_st' in line else line
             for n in (1, 2, 3) for line in later_log() if f'"epoch_num": {n}' in line]
    head = [line for line in later_log() if 'epoch_num' not in line]
    assert read([*head[:-1], *lines, head[-1]]).epochs_to_converge == 3


def test_an_evaluation_before_the_first_epoch(read):
    lines = later_log()
    start = next(i for i, line in enumerate(lines) if '"run_start"' in line)
    run = read([*lines[:start + 1], mllog('eval_accuracy', 0.5, 0.001, epoch_num=0), *lines[start + 1:]])
    assert run.epochs_to_converge == 3


def test_v05_epochs_from_1(read):
    def later(m):
        return f'{m[1]}{int(m[2]) + 1}'
    lines = [re.sub(r'("epoch": |train_epoch: )(\d+)', later, line) for line in old_log()]
    assert read(lines).epochs_to_converge == 3
    lost = read([line for line in old_log() if not line.endswith('train_epoch: 0')])
    assert (lost.epochs_to_converge, [s.first_epoch for s in lost.stretches]) == (3, [2, 3])


def test_organisations(tmp_path):
    """Who submits is what the submission says; the log is asked where there is none."""
    home = tmp_path / 'v2.0/Beta/results/box/resnet'
    log = write_lines(home / 'result_0.txt', run_lines())
    assert read_run(log).org == 'Beta' and texts(read_run(log))[0] == (
        "submission_org is 'us', the name of a folder says 'Beta', which counts")
    systems = tmp_path / 'v2.0/Beta/systems'
    systems.mkdir()
    (systems / 'box.json').write_text(json.dumps({'submitter': 'Gamma'}))
    run = read_run(log)
    assert (run.org, run.sources['org'].text) == ('Gamma', 'box.json') and run.warnings[0].line == 2
    assert texts(run)[0] == "submission_org is 'us', box.json says 'Gamma', which counts"
    (systems / 'box.json').write_text(json.dumps({'submitter': 'US, Inc.'}))
    assert read_run(log).org == 'US, Inc.' and texts(read_run(log)) == []
    alone = write_lines(tmp_path / 'sweep/Beta/results/box/resnet/result_0.txt', run_lines())
    assert read_run(alone).org == 'us' and texts(read_run(alone)) == []


def test_organisations_of_v05(tmp_path):
    home = tmp_path / 'v0.5/Acme/chip-8/results/box'
    log = write_lines(home / 'resnet/result_0.txt', [*old_log(), v05('submission_org', 0, 'Beta')])
    (home / 'entry.json').write_text('{"nodes": [{"num_nodes": 1, "num_accelerators": 8}]}')
    assert read_run(log).org == 'Acme'
    (home.parent.parent / 'submission.json').write_text('{"org": "Delta"}')
    assert read_run(log).org == 'Delta' and "submission.json says 'Delta'" in texts(read_run(log))[0]


def test_v06_lines_that_have_no_time(read):
    lines = [v06('submission_org', -START_S, 'us'), v06('run_start', 0), v06('epoch_start', 1, epoch_num=1),
             v06('eval_accuracy', 60, 0.76, epoch_num=1), v06('run_stop', 60, status='success')]
    assert read(lines).status == 'converged' and texts(read(lines)) == []
