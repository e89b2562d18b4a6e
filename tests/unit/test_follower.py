"""State of a run folder at each stage of a run and with hostile content."""

import gzip
import json
import os
import shutil
from contextlib import closing

import pytest
from lines import START_S, run_lines, v05, write_lines
from live_runs import (
    NOW_S,
    course,
    evaluation,
    rank,
    reference,
    resumed,
    times,
    train,
    write_live,
    write_metrics,
)

from mlperf_rn50.analysis.watch.follower import Follower
from mlperf_rn50.analysis.watch.run_facts import facts_of
from mlperf_rn50.analysis.watch.run_state import BandPoint, Checkpoints, Node, to_json
from mlperf_rn50.runfolder import jsonl
from mlperf_rn50.runfolder.jsonl import Tail
from mlperf_rn50.runfolder.locks import FileLock
from mlperf_rn50.runfolder.names import find_run_folders


def look(folder, now_s=NOW_S):
    return Follower(folder).look(now_s)


def shown(run, *names):
    content = to_json(run)
    return tuple(content[name] for name in names)


def test_folder_without_a_run_is_waiting(tmp_path):
    run = look(tmp_path / 'later')
    assert shown(run, 'status', 'is_over') == ('waiting', False)
    assert run.note == 'not started yet: no such folder; waiting'
    assert look(tmp_path).note == 'not started yet: no log in the folder; waiting'


def test_tree_of_runs_stands_for_its_run_folders(tmp_path):
    none = tmp_path / 'none'
    assert [find_run_folders(path) for path in (tmp_path, none)] == [[tmp_path], [none]]
    folders = [write_live(tmp_path / name) for name in ('a/1x1', 'a/2x1', 'b')]
    log = folders[2] / 'result_0.txt'
    for path, expected in ((tmp_path, folders), (folders[2], folders[2:]), (log, [log])):
        assert find_run_folders(path) == expected


@pytest.mark.parametrize('num_lines', [1, 9])
def test_run_without_an_epoch_is_starting_and_has_no_foreign_data_or_target(tmp_path, num_lines):
    log = write_live(tmp_path, train(10)) / 'result_0.txt'
    assert shown(look(tmp_path), 'status', 'dataset', 'target') == ('running', 'digits', 0.749)
    # v0.5 has it before init_stop
    start = [v05('run_start', -5), v05('input_batch_size', -5, 32)]
    write_lines(log, [*log.read_text().splitlines()[:num_lines], *start])
    os.utime(log, (NOW_S, NOW_S))
    run = look(tmp_path)
    assert shown(run, 'status', 'note', 'target') == ('starting', 'starting', None)
    assert [name.text for name, _ in facts_of(run).rows] == ['status']


@pytest.mark.parametrize('name, is_over', [('.run_0.lock', True), ('.launcher.lock', False)])
def test_interrupted_run_whose_lock_was_taken_again_is_starting(tmp_path, name, is_over):
    folder = write_live(tmp_path, status='aborted')
    assert look(folder).status == 'aborted'
    with closing(FileLock(folder / name)) as lock:
        lock.take()
        assert shown(look(folder), 'status', 'is_over') == ('starting', False)
        os.utime(lock.path, (NOW_S - 9,) * 2)  # the lock of the run itself, before its last line
        assert shown(look(folder), 'status', 'is_over') == ('aborted', is_over)


def test_run_of_a_launcher_that_makes_several_is_not_the_last(tmp_path):
    folder = write_live(tmp_path, status='success', accuracies=(0.2, 0.8))
    with closing(FileLock(folder / '.launcher.lock')) as lock:
        lock.take()
        os.utime(lock.path, (NOW_S - 99,) * 2)
        assert shown(look(folder), 'status', 'is_over') == ('converged', False)
        log = folder / 'result_0.txt'
        assert Follower(log).look(NOW_S).is_over  # only this run is watched
    assert look(folder).is_over


def test_finished_run_without_metrics_has_the_values_of_the_log(tmp_path):
    folder = write_live(tmp_path, status='success', accuracies=(0.2, 0.8))
    (folder / 'metrics.jsonl').unlink()
    run = look(folder)
    assert [(e.epoch, e.accuracy) for e in run.evaluations] == [(1, 0.2), (2, 0.8)]
    names = 'status', 'is_over', 'epoch', 'left_s', 'time_s'
    assert shown(run, *names) == ('converged', True, 2, None, 22.0)


def test_interrupted_run_is_not_over(tmp_path):
    log = write_live(tmp_path, evaluation(1, 20)) / 'result_0.txt'
    stop = run_lines((0.2,), status='aborted')[-1].replace(
        '{"status"', '{"reason": "interrupted", "status"'
    )
    log.write_text(log.read_text() + stop + '\n')
    assert shown(look(tmp_path), 'status', 'is_over') == ('interrupted', False)


def attempt(run, exit_code, end, can_resume):
    return dict(run=run, exit_code=exit_code, end=end, can_resume=can_resume, gained=True)


def test_killed_run_has_quiet_time_and_launcher_attempts(tmp_path):
    folder = write_live(tmp_path, train(10), age_s=5000.0)
    write_metrics(
        folder / 'attempts.jsonl',
        attempt(None, 2, None, False),
        attempt(0, 137, None, True),
        attempt(0, 1, 'failed', False),
        attempt(0, 0, 'converged', True),
    )
    run = look(folder, NOW_S + 2 * 86400)
    names = 'status', 'has_end', 'is_over', 'left_s', 'quiet_s', 'time_s'
    # The last record is an evaluation at 11 s in the log.
    assert shown(run, *names) == ('failed', False, False, None, 5000.0 + 2 * 86400, 11.0)
    assert run.attempts == (
        'cut short (exit code 137), can be resumed',
        'failed (exit code 1), cannot be resumed',
        'converged (exit code 0)',
    )


def test_all_attempts_are_counted(tmp_path):
    folder = write_live(tmp_path, train(10))
    write_metrics(folder / 'attempts.jsonl', *[attempt(0, 137, None, True)] * 30)
    assert ('attempts', '30 by') in [
        (name.text, value.text[:5]) for name, value in facts_of(look(folder)).rows
    ]


def test_run_of_another_network_of_this_program_is_followed(tmp_path):
    log = write_live(tmp_path, train(10), status='success', accuracies=(0.2, 0.8)) / 'result_0.txt'
    log.write_text(log.read_text().replace('"resnet"', '"alexnet"'))
    run = look(tmp_path)
    assert shown(run, 'status', 'is_over') == ('converged', True) and not run.violations
    (tmp_path / 'metrics.jsonl').unlink()
    assert look(tmp_path).other_benchmark == 'alexnet'


def test_newest_run_is_shown_and_the_others_are_named(tmp_path):
    write_live(tmp_path, status='success', accuracies=(0.8,))
    write_live(tmp_path, train(10), number=10)
    assert shown(look(tmp_path), 'number', 'step', 'others') == (10, 10, ((0, 'converged'),))
    run = look(tmp_path / 'result_0.txt')
    assert shown(run, 'number', 'status', 'others') == (0, 'converged', ((10, 'running'),))


def test_deleted_and_recreated_folder_is_followed(tmp_path):
    folder = write_live(tmp_path / 'run', train(10))
    follower = Follower(folder)
    assert follower.look(NOW_S).step == 10
    shutil.rmtree(folder)
    assert follower.look(NOW_S).note == 'the folder is gone; waiting for it'
    write_live(folder, train(30))
    assert follower.look(NOW_S).step == 30


def test_resumed_run_has_repeated_records_once(tmp_path):
    records = [r for k in (1, 2, 3) for r in (train(20 * k), evaluation(k, 10 + 10 * k))]
    follower = Follower(write_live(tmp_path, *records, course(3, text='old'), train(70)))
    names = 'num_resumes', 'num_ranks', 'num_nodes', 'global_batch_size', 'max_epochs'
    assert shown(follower.look(NOW_S), *names) == (0, 2, 2, 64, 10)
    changed = {'train.max_epochs': [10, 12]}
    write_metrics(tmp_path / 'metrics.jsonl', resumed(40, changed=changed), mode='a')
    run = follower.look(NOW_S)
    assert [e.epoch for e in run.evaluations] == [1, 2]
    assert shown(run, 'verdict', 'epoch', *names) == ('', 2.0, 1, 8, 4, 256, 12)
    write_metrics(tmp_path / 'metrics.jsonl', evaluation(3, 50), mode='a')
    assert [e.accuracy for e in follower.look(NOW_S).evaluations] == [0.2, 0.3, 0.5]


def test_resume_before_a_recorded_step_drops_later_evaluations(tmp_path):
    records = [evaluation(1, 20), evaluation(2, 30), evaluation(3, 40)]
    run = look(write_live(tmp_path, *records, resumed(40, epoch=2.0)))
    assert ([e.epoch for e in run.evaluations], run.epoch) == ([1, 2], 2.0)


def test_band_and_verdict_of_the_reference_and_first_warning_of_a_run_behind(tmp_path):
    records = [reference(1, 2, 3), train(20), evaluation(1, 20), course(1), train(40)]
    run = look(write_live(tmp_path, *records))
    assert (run.reference_text, run.num_reference) == ('reference: 5 runs', 5)
    assert (run.reference_epochs, run.reference_left_s) == ((4, 6), (17.0, 37.0))
    assert run.band == tuple(BandPoint(e, 0.5, 0.45, 0.55) for e in (1, 2, 3))
    expected = (course(1)['text'], 1, False)
    assert shown(run, 'verdict', 'verdict_epoch', 'is_behind') == expected
    slow = times(stragglers=['rank 1 is slow'])
    behind = course(1, behind=True, text='behind: 3')
    run = look(write_live(tmp_path / 'behind', slow, evaluation(1, 20), behind))
    assert run.is_behind and run.warnings[:2] == ('behind: 3', 'rank 1 is slow')
    assert run.band == (BandPoint(1, 0.5, 0.45, 0.55),)  # without a reference record


def test_only_finished_checkpoints_are_counted(tmp_path):
    folder = write_live(tmp_path, train(10))
    for name in ('step_20', 'step_100', '.step_120.7.tmp', 'damaged_step_80', 'step_x'):
        (folder / 'checkpoints' / name).mkdir(parents=True)
    os.utime(folder / 'checkpoints/step_100', (NOW_S - 9,) * 2)
    assert look(folder).checkpoints == Checkpoints(2, 100, 9.0)


def test_newest_sample_of_each_node_and_warning_of_a_silent_node(tmp_path):
    folder = write_live(tmp_path, train(10))
    gpus = [{'utilization_percent': u, 'power_w': w} for u, w in ((80, 300.0), (90, 100.0))]
    for host, age_s in (('n1', 1.0), ('n2', 90.0)):
        path = write_metrics(
            folder / f'telemetry_0_{host}.jsonl',
            {'time_ms': 1, 'event': 'start'},
            {'time_ms': 2, 'cpu_percent': 10.0},
            {'time_ms': 3, 'cpu_percent': 50.0, 'gpus': [*gpus, {}]},
            '{"cpu_pe',
        )
        os.utime(path, (NOW_S - age_s,) * 2)
    run = look(folder)
    assert run.nodes == (Node('n1', 1.0, 50.0, 85.0, 400.0), Node('n2', 90.0, 50.0, 85.0, 400.0))
    assert run.warnings == ('telemetry of n2: nothing was written for more than 60 s',)
    write_metrics(folder / 'metrics.jsonl', resumed(10, hosts={'n1': 2}), mode='a')
    run = look(folder)
    assert ([n.host for n in run.nodes], run.warnings) == (['n1'], ())


def test_large_file_is_read_in_one_look(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, '_MAX_LOOK_BYTES', 1)
    assert look(write_live(tmp_path, *(train(k) for k in range(10, 60, 10)))).step == 50


def test_growing_file_is_read_incrementally_and_a_replaced_file_anew(tmp_path):
    path = write_metrics(tmp_path / 'm', {'a': 1}, '{"a": ')
    tail = Tail(path, dict)
    assert tail.read() == (False, [{'a': 1}])
    write_metrics(path, '2}\n', mode='a')  # the second part of a torn line
    assert tail.read() == (False, [{'a': 2}]) and tail.read() == (False, [])
    for name, values in (('m', [3]), ('m', [4, 5, 6]), ('new', [1, 2, 3])):
        write_metrics(tmp_path / name, *({'a': v} for v in values)).replace(path)
        assert tail.read() == (True, [{'a': v} for v in values])


def test_packed_log_is_refused_as_by_check(tmp_path):
    log = write_live(tmp_path, train(10)) / 'result_0.txt'
    packed = gzip.compress(log.read_bytes())
    (tmp_path / 'result_0.txt.gz').write_bytes(packed)
    assert not look(tmp_path).violations
    (tmp_path / 'result_1.txt.gz').write_bytes(packed)
    assert 'gzip' in look(tmp_path).violations[0]
    assert not look(log).violations


HOSTILE = [True, None, 'x', -1, 1e400, float('nan'), [], {}, 10**30, '\x1b[2J' * 3]


@pytest.mark.parametrize('value', HOSTILE, ids=repr)
def test_hostile_values_are_ignored(tmp_path, value):
    ranks = times(rank(0, 1.0), rank(1, 1.0), stragglers=['a'])
    records = [train(10), evaluation(1, 20), reference(1), course(1), ranks, resumed(20)]
    bad = [{**r, key: value} for r in records for key in r] + [
        reference(1, band=[value]),
        reference(1, band=[[value] * 6]),
        times(value),
        times(dict.fromkeys(rank(0, 1.0), value)),
        times(stragglers=[value]),
    ]
    folder = write_live(tmp_path, *records, *bad)
    write_metrics(folder / 'attempts.jsonl', attempt(0, value, value, value))
    write_metrics(
        folder / 'telemetry_0_n1.jsonl',
        {'cpu_percent': value, 'gpus': value},
        {'cpu_percent': 1.0, 'gpus': [value, {'power_w': value, 'utilization_percent': value}]},
    )
    (folder / 'config.yaml').write_text(
        f'train: {{max_epochs: {json.dumps(value)}}}\nschedule: {json.dumps(value)}\n'
    )
    run = look(folder)
    text = json.dumps(to_json(run), allow_nan=False)  # all numbers are finite
    assert '\\u001b' not in text


def test_hostile_configuration_is_ignored(tmp_path):
    folder = write_live(tmp_path, train(10))
    for text in '[' * 1500, 'train: 7', '!!python/object:os.system {}', '\ud800', '#' * 100_000:
        (folder / 'config.yaml').write_bytes(text.encode('utf-8', 'surrogatepass'))
        assert shown(look(folder), 'status', 'max_epochs', 'left_s') == ('running', None, None)


def test_named_pipes_and_broken_links_do_not_block(tmp_path):
    folder = write_live(tmp_path, train(10))
    for name in ('metrics.jsonl', 'config.yaml', 'attempts.jsonl', 'telemetry_0_n1.jsonl'):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / 'checkpoints').symlink_to('nowhere')
    assert look(folder).status == 'running'


def test_quiet_log_of_a_failed_run_is_read_again_after_a_write(tmp_path):
    follower = Follower(write_live(tmp_path, train(10)))
    assert follower.look(NOW_S).status == 'running'
    assert follower.look(NOW_S + 1e6).status == 'failed'
    write_lines(tmp_path / 'result_0.txt', run_lines((0.2, 0.8), target=0.749))
    assert follower.look(START_S + 1e6).status == 'converged'


def test_learning_rate_of_a_partly_filled_step_is_that_of_the_schedule(tmp_path):
    folder = write_live(tmp_path, train(10, learning_rate=0.002, scheduled_learning_rate=0.004))
    assert look(folder).learning_rate == 0.004
    # of an earlier version
    write_metrics(folder / 'metrics.jsonl', train(11, learning_rate=0.003), mode='a')
    assert look(folder).learning_rate == 0.003


def test_pace_is_that_of_the_last_four_epochs(tmp_path):
    records = (train(20 * k, time_s=10.0 * k**2) for k in range(1, 7))
    assert look(write_live(tmp_path, *records)).epoch_s == (360 - 40) / 4
