"""What a run folder says of the run in it, at every moment of its life, and whatever stands in it."""
import json
import os
import shutil

import pytest
from lines import START_S, run_lines, write_lines
from live_runs import NOW_S, course, evaluation, rank, reference, train, write_live, write_metrics

from mlperf_rn50.study.live import BandPoint, Evaluation, Follower, to_json
from mlperf_rn50.study.tail import Tail


def look(folder, now_s=NOW_S):
    return Follower(folder).look(now_s)


def test_a_folder_that_is_not_there_is_waited_for(tmp_path):
    run = look(tmp_path / 'later')
    assert (run.status, run.note, run.is_over) == ('waiting', 'not begun yet: no such folder; waiting', False)


def test_an_empty_folder_is_waited_for_and_runs_below_it_are_named(tmp_path):
    assert look(tmp_path).note == 'not begun yet: no log in the folder; waiting'
    write_live(tmp_path / '1x1')
    assert look(tmp_path).note.endswith('; there are runs in 1x1 below it')


def test_a_running_run(tmp_path):
    run = look(write_live(tmp_path, train(10), evaluation(1, 20), train(30), train(40)))
    assert (run.status, run.number, run.quiet_s, run.dataset, run.target) == ('running', 0, 3.0, 'digits', 0.749)
    assert (run.epoch, run.max_epochs, run.step, run.images_per_s) == (2.0, 10, 40, 128.0)
    assert run.evaluations == (Evaluation(1, 0.2, 10.0),)
    # 20 steps of 0.5 s; 8 epochs are left, of which 3 s have gone by since the last report.
    assert (run.epoch_s, run.left_s, run.time_s) == (10.0, 77.0, 23.0)
    assert run.node_hours == pytest.approx(2 * 23 / 3600) and run.node_hours_at_end == pytest.approx(2 * 100 / 3600)


def test_more_right_answers_than_images_are_no_evaluation(tmp_path):
    run = look(write_live(tmp_path, train(10), evaluation(1, 20), evaluation(2, 101)))
    assert [e.epoch for e in run.evaluations] == [1]


def test_a_run_without_metrics_has_what_its_log_says(tmp_path):
    folder = write_live(tmp_path)
    (folder / 'metrics.jsonl').unlink()
    run = look(folder)
    assert [(e.epoch, e.accuracy) for e in run.evaluations] == [(1, 0.2)] and run.epoch == 1 and run.left_s is None


def test_a_run_that_is_over(tmp_path):
    run = look(write_live(tmp_path, evaluation(1, 20), evaluation(2, 80), status='success', accuracies=(0.2, 0.8)))
    assert (run.status, run.is_over, run.left_s, run.time_s) == ('converged', True, None, 22.0)
    assert run.node_hours == pytest.approx(2 * 22 / 3600)


@pytest.mark.parametrize('status, reason, shown, is_over', [
    ('aborted', 'aborted', 'aborted', True), ('aborted', 'interrupted', 'interrupted', False)])
def test_an_interrupted_run_is_not_over_as_it_may_be_gone_on_with(tmp_path, status, reason, shown, is_over):
    folder = write_live(tmp_path, evaluation(1, 20))
    log = folder / 'result_0.txt'
    stop = json.loads(run_lines((0.2,), status=status)[-1].partition(' ')[2])
    stop['metadata']['reason'] = reason
    log.write_text(log.read_text() + ':::MLLOG ' + json.dumps(stop) + '\n')
    run = look(folder)
    assert (run.status, run.is_over) == (shown, is_over)


def test_a_killed_run_says_since_when_and_what_the_launcher_noted(tmp_path):
    folder = write_live(tmp_path, train(10), age_s=5000.0)
    write_metrics(folder / 'attempts.jsonl',
                  {'job': 'j', 'run': None, 'exit_code': 2, 'end': None, 'gained': False, 'can_resume': False},
                  {'job': 'j', 'run': 0, 'exit_code': 137, 'end': None, 'gained': True, 'can_resume': True})
    run = look(folder, NOW_S + 2 * 86400)
    assert (run.status, run.has_end, run.is_over) == ('failed', False, False)
    # The last that was written is an evaluation, in the log, at 11 s.
    assert run.quiet_s == 5000.0 + 2 * 86400 and run.time_s == 11.0 and run.left_s is None
    assert run.attempts == ('cut short (exit code 137), can be resumed',)


def test_the_newest_run_is_shown_and_the_others_named(tmp_path):
    write_live(tmp_path, status='success', accuracies=(0.8,))
    write_live(tmp_path, train(10), number=10)
    run = look(tmp_path)
    assert (run.number, run.step, run.others) == (10, 10, ((0, 'converged'),))
    run = look(tmp_path / 'result_0.txt')
    assert (run.number, run.status, run.others) == (0, 'converged', ((10, 'running'),))


def test_a_folder_that_goes_away_and_comes_back(tmp_path):
    folder = write_live(tmp_path / 'run', train(10))
    follower = Follower(folder)
    assert follower.look(NOW_S).step == 10
    shutil.rmtree(folder)
    assert follower.look(NOW_S).note == 'the folder is gone; waiting for it'
    write_live(folder, train(30))
    assert follower.look(NOW_S).step == 30


def test_a_resumed_run_has_what_it_writes_again_once(tmp_path):
    resumed = {'event': 'resumed', 'step': 40, 'number_of_ranks': 8, 'number_of_nodes': 4, 'global_batch_size': 256}
    follower = Follower(write_live(tmp_path, train(20), evaluation(1, 20), train(40), evaluation(2, 30), train(60),
                                   evaluation(3, 40), course(3, text='old'), train(70)))
    assert follower.look(NOW_S).num_ranks == 2
    with open(tmp_path / 'metrics.jsonl', 'a') as f:
        f.write(json.dumps(resumed) + '\n')
    run = follower.look(NOW_S)
    assert [e.epoch for e in run.evaluations] == [1, 2] and run.verdict == '' and run.epoch == 2.0
    assert (run.num_resumes, run.num_ranks, run.num_nodes, run.global_batch_size) == (1, 8, 4, 256)
    with open(tmp_path / 'metrics.jsonl', 'a') as f:
        f.write(json.dumps(evaluation(3, 50)) + '\n')
    assert [e.accuracy for e in follower.look(NOW_S).evaluations] == [0.2, 0.3, 0.5]


def test_the_band_and_the_verdict_of_the_reference(tmp_path):
    run = look(write_live(tmp_path, reference(1, 2, 3), train(20), evaluation(1, 20), course(1), train(40)))
    assert run.band == tuple(BandPoint(e, 0.5, 0.45, 0.55) for e in (1, 2, 3))
    assert (run.num_reference, run.verdict, run.is_behind) == (5, 'on course: 5 of 5 reference runs', False)
    assert run.reference_epochs == (4, 6) and run.reference_left_s == (17.0, 37.0)


def test_a_run_that_is_behind_is_warned_of_first(tmp_path):
    slow = {'event': 'ranks', 'epoch': 1, 'time_s': 10.0, 'ranks': [], 'stragglers': ['rank 1 is slow']}
    run = look(write_live(tmp_path, slow, evaluation(1, 20), course(1, behind=True, text='behind: 3 points')))
    assert run.is_behind and run.warnings[:2] == ('behind: 3 points', 'rank 1 is slow')
    assert run.band == (BandPoint(1, 0.5, 0.45, 0.55),)  # without a record of the whole


def test_the_skew_is_that_of_what_ranks_take_themselves(tmp_path):
    ranks = {'event': 'ranks', 'epoch': 1, 'time_s': 1.0, 'stragglers': [],
             'ranks': [rank(0, 1.0), rank(1, 1.0), rank(2, 1.5, 'n2')]}
    run = look(write_live(tmp_path, ranks))
    assert run.skew == pytest.approx(0.5) and run.ranks[2].compute_s == pytest.approx(0.15)
    assert look(write_live(tmp_path, {**ranks, 'ranks': [rank(0, 1.0)]})).skew is None


def test_checkpoints_are_counted_and_unfinished_ones_are_not(tmp_path):
    folder = write_live(tmp_path, train(10))
    for name in ('step_20', 'step_100', '.step_120.7.tmp', 'damaged_step_80', 'step_x'):
        (folder / 'checkpoints' / name).mkdir(parents=True)
    os.utime(folder / 'checkpoints/step_100', (NOW_S - 9,) * 2)
    kept = look(folder).checkpoints
    assert (kept.count, kept.step, kept.age_s) == (2, 100, 9.0)


def test_the_newest_sample_of_each_node_and_one_that_stopped(tmp_path):
    folder = write_live(tmp_path, train(10))
    for host, age_s in (('n1', 1.0), ('n2', 90.0)):
        path = write_metrics(folder / f'telemetry_0_{host}.jsonl', {'time_ms': 1, 'event': 'start'},
                             {'time_ms': 2, 'cpu_percent': 10.0}, {'time_ms': 3, 'cpu_percent': 50.0, 'gpus': [
                                 {'utilization_percent': 80, 'power_w': 300.0}, {'utilization_percent': 90,
                                                                                 'power_w': 100.0}, 'x']}, '{"cpu_pe')
        os.utime(path, (NOW_S - age_s,) * 2)
    run = look(folder)
    assert [(n.host, n.cpu_percent, n.gpu_percent, n.gpu_power_w) for n in run.nodes] == [
        ('n1', 50.0, 85.0, 400.0), ('n2', 50.0, 85.0, 400.0)]
    assert run.warnings == ('telemetry of n2: nothing was written for 90 s',)


def test_a_file_that_grows_is_read_on_and_a_torn_line_when_it_is_whole(tmp_path):
    path = write_metrics(tmp_path / 'm', {'a': 1}, '{"a": ')
    tail = Tail(path)
    assert tail.read() == (False, [{'a': 1}])
    with open(path, 'a') as f:
        f.write('2}\n')
    assert tail.read() == (False, [{'a': 2}]) and tail.read() == (False, [])


@pytest.mark.parametrize('change', ['shorter', 'other', 'replaced'])
def test_a_file_that_is_another_one_is_read_anew(tmp_path, change):
    path = write_metrics(tmp_path / 'm', {'a': 1}, {'a': 2})
    tail = Tail(path)
    assert len(tail.read()[1]) == 2
    if change == 'replaced':
        write_metrics(tmp_path / 'new', {'a': 1}, {'a': 2}, {'a': 3}).replace(path)
    else:
        write_metrics(path, *[{'a': 3}, {'a': 4}, {'a': 5}][:1 if change == 'shorter' else 3])
    is_anew, records = tail.read()
    assert is_anew and len(records) == (1 if change == 'shorter' else 3)


def test_lines_that_are_none_are_left_out(tmp_path):
    path = tmp_path / 'm'
    path.write_bytes(b'\xff\xfe{}\n[1]\nnot json\n' + b'[' * 200_000 + b'\n{"a": "' + b'x' * (3 << 20) + b'"}\n'
                     + b'{"a": 9' + b'9' * 5000 + b'}\n{"a": "\xff"}\n')
    assert Tail(path).read() == (False, [{'a': '\ufffd'}])


def test_a_line_that_is_too_long_does_not_end_the_reading_of_what_follows(tmp_path):
    path = tmp_path / 'm'
    path.write_bytes(b'x' * (2 << 20))
    tail = Tail(path)
    assert tail.read() == (False, [])
    with open(path, 'ab') as f:
        f.write(b'{"a": 0}\n{"a": 1}\n')  # of which the first is the rest of the line
    assert tail.read() == (False, [{'a': 1}])


HOSTILE = [True, None, 'x', -1, 1e400, float('nan'), [], {}, 10**30, '\x1b[2J' * 3]


@pytest.mark.parametrize('value', HOSTILE, ids=repr)
def test_hostile_values_are_left_out(tmp_path, value):
    records = [train(10), evaluation(1, 20), reference(1), course(1),
               {'event': 'ranks', 'ranks': [rank(0, 1.0), rank(1, 1.0)], 'stragglers': ['a']},
               {'event': 'resumed', 'step': 20, 'number_of_ranks': 2, 'number_of_nodes': 2, 'global_batch_size': 64}]
    bad = [{**r, key: value} for r in records for key in r] + [
        reference(1, band=[value]), reference(1, band=[[value] * 6]), {**records[4], 'ranks': [value]},
        {**records[4], 'ranks': [{**rank(0, 1.0), k: value} for k in rank(0, 1.0)]},
        {**records[4], 'stragglers': [value]}]
    folder = write_live(tmp_path, *records, *bad)
    write_metrics(folder / 'attempts.jsonl', *[{'run': 0, 'exit_code': value, 'end': value, 'can_resume': value}])
    write_metrics(folder / 'telemetry_0_n1.jsonl', {'cpu_percent': value, 'gpus': value},
                  {'cpu_percent': 1.0, 'gpus': [value, {'power_w': value, 'utilization_percent': value}]})
    (folder / 'config.yaml').write_text(f'train: {{max_epochs: {json.dumps(value)}}}\nschedule: {json.dumps(value)}\n')
    run = look(folder)
    assert run.status == 'running'
    text = json.dumps(to_json(run), allow_nan=False)  # no number is out of all bounds
    assert '\\u001b' not in text


@pytest.mark.parametrize('config', ['[' * 1500, 'train: 7', '', '- 1', '!!python/object:os.system {}', 'a: &a [*a]',
                                    '\ud800', '#' * 100_000])
def test_a_hostile_configuration_is_none(tmp_path, config):
    folder = write_live(tmp_path, train(10))
    (folder / 'config.yaml').write_bytes(config.encode('utf-8', 'surrogatepass'))
    run = look(folder)
    assert run.status == 'running' and run.max_epochs is None and run.left_s is None


def test_named_pipes_and_links_to_nowhere_are_not_waited_for(tmp_path):
    folder = write_live(tmp_path, train(10))
    for name in ('metrics.jsonl', 'config.yaml'):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    for name in ('attempts.jsonl', 'telemetry_0_n1.jsonl'):
        os.mkfifo(folder / name)
    (folder / 'checkpoints').symlink_to('nowhere')
    assert look(folder).status == 'running'


def test_a_log_that_nobody_writes_is_asked_again_and_read_when_it_was_written(tmp_path):
    follower = Follower(write_live(tmp_path, train(10)))
    assert follower.look(NOW_S).status == 'running'
    assert follower.look(NOW_S + 1e6).status == 'failed'
    write_lines(tmp_path / 'result_0.txt', run_lines((0.2, 0.8), target=0.749))
    assert follower.look(START_S + 1e6).status == 'converged'
