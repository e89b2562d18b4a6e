"""Run sets: pooling, score, strength of evidence, refusals and duplicates."""

import json
import os
import re
import socket
from dataclasses import replace

import pytest
from helpers import PUBLISHED, call, deny, json_table, shipped_logs, write_files
from lines import mllog, run_lines, v05, write_lines, write_set
from made_systems import kinds_of, load_set, study_of, written_set
from pytest import approx

from mlperf_rn50.analysis.report.sections import make_report
from mlperf_rn50.analysis.sets.defects import set_findings
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.run_set import score_minutes
from mlperf_rn50.analysis.sets.scaling import compare, compare_splits, find_series
from mlperf_rn50.analysis.sets.time_parts import Parts
from mlperf_rn50.analysis.show.plain import render_text
from mlperf_rn50.errors import UserError
from mlperf_rn50.mllog.duplicates import find_duplicates
from mlperf_rn50.mllog.findings import make_finding

REFUSAL = 'global_batch_size is 128 in result_0.txt and 32 in result_3.txt, expected one value'


def pace(k):
    """Return the time of the epochs of run k in whole seconds."""
    return 10.0 + k


def odd_pace(k):
    """Return times by which copies of logs are detected."""
    return 10.123 + k


def failing(*numbers):
    """Return the status of run k, if the runs with these numbers are aborted."""
    return lambda k: 'aborted' if k in numbers else 'success'


def of_first(value, others):
    """Return a function with one value for run 0, and another one for the others."""
    return lambda k: others if k else value


@pytest.mark.parametrize(
    'minutes, score',
    json_table("""
[5, 1, 4, 2, 3]       | 3.0
# an unconverged run is the slowest; the fastest is still dropped
[10, 2, 3, 4, null]   | 5.666667
[1, 2, 3, null, null] | null
[1, 2, 3, 4]          | null
[1, 2, 3, 4, 5, 6]    | null
"""),
)
def test_score_drops_fastest_and_slowest_of_five(minutes, score):
    assert score_minutes([m and 60.0 * m for m in minutes]) == (score and approx(score))


def test_set_of_five(tmp_path):
    system = written_set(tmp_path / 'study/box', epoch_s=pace, nodes=2, ranks=8)
    assert (system.name, system.study_name, len(system.converged)) == ('box', 'study', 5)
    assert (system.num_nodes, system.num_accelerators, system.num_units) == (2, 8, 8)
    assert (system.global_batch_size, system.epochs, system.epochs_mean) == (64, (2,) * 5, 2)
    # Two epochs of 10 to 14 s and two evaluations of 1 s: 22 to 30 s; the middle three are 24, 26,
    # 28.
    assert (60 * system.score_minutes, system.time_s, system.epoch_s) == approx((26, 26, 12))
    assert system.images_per_s == approx(1_281_167 / 12)
    assert set_findings(system) == []


def test_one_aborted_run_counts_as_the_slowest_and_two_make_the_set_invalid(tmp_path):
    one, two = (
        written_set(tmp_path / name, epoch_s=pace, status=failing(*numbers))
        for name, numbers in (('one', [0]), ('two', [0, 1]))
    )
    # 24, 26, 28, 30 and the aborted run, which was fast but counts as the slowest; 26, 28 and 30
    # remain.
    assert one.score_minutes == approx(28 / 60)
    assert make_finding('runs_unconverged', None, 1, 5, grade='note') in set_findings(one)
    assert two.score_minutes is None and two.time_s == approx(28)


def test_fewer_than_five_runs_have_a_mean_and_a_spread(tmp_path):
    system = written_set(tmp_path / 'three', 3, epoch_s=pace)
    assert system.score_minutes is None and (system.time_s, system.spread_s) == approx((24, 2))
    single = written_set(tmp_path / 'single', 1, first_s=30, eval_s=2, accuracies=(0.5, 0.6, 0.76))
    assert (single.spread_s, single.parts) == (None, Parts(4, 30, 20, 6, 0))


def resume(folder, number, **keys):
    """Insert a fault of a run and a resume 60 s after its first epoch into a log."""
    path = folder / f'result_{number}.txt'
    first, second = path.read_text().split(mllog('eval_stop', 11 + number / 2, epoch_num=1))
    second = re.sub(r'(?<="time_ms": )\d+', lambda m: str(int(m[0]) + 60_000), second)
    resumed = mllog('run_resumed', 75, 1, epoch_num=2, clock_s=11.0, **keys)
    path.write_text(f'{first}{resumed}{second}')


@pytest.mark.parametrize(
    'resumed, time_s, is_marked', [((), 24.0, False), ((1, 3), 24.0, False), (range(5), 84.0, True)]
)
def test_resumed_runs_have_no_score_and_their_times_are_left_out_or_marked(
    tmp_path, resumed, time_s, is_marked
):
    # runs of 22, 23, 24, 25 and 26 s
    folder = write_set(tmp_path / 'box', epoch_s=lambda k: 10.0 + k / 2)
    for number in resumed:
        resume(folder, number)
    system, num = load_set(folder), len(resumed)
    assert (system.score_minutes is None, system.time_s) == (num > 0, approx(time_s))
    assert system.is_resumed == is_marked and len(system.converged) == 5
    text = ''.join(kinds_of(system, 'runs_resumed'))
    assert (f'{num} of 5 runs were resumed' in text) == bool(text) == (num > 0)
    assert ('; means leave' in text) == (num == 2)
    assert system.epochs == (2,) * (3 if num == 2 else 5)


@pytest.mark.parametrize('nodes, node_hours', [(2, approx(2 * 82 / 3600)), (1, None)])
def test_run_whose_nodes_changed_has_no_node_hours(tmp_path, nodes, node_hours):
    folder = write_set(tmp_path / 'box', 1, nodes=2, ranks=2, number_of_nodes=2)
    resume(folder, 0, number_of_nodes=nodes)
    assert load_set(folder).node_hours == node_hours


def test_run_whose_nodes_changed_is_in_no_series_and_has_no_efficiency(tmp_path):
    one = written_set(tmp_path / 'one', 1, ranks=2, number_of_nodes=1)
    folder = write_set(tmp_path / 'box', 1, nodes=2, ranks=6, number_of_nodes=2)
    resume(folder, 0, number_of_nodes=3)
    found = compare(load_set(folder), one)
    assert found.speedup and found.efficiency is found.hardware_efficiency is None
    assert find_series([one, load_set(folder)]) == []
    same = written_set(tmp_path / 'same', 1, ranks=6, number_of_nodes=1)
    assert load_set(folder).images_per_s and compare_splits([same, load_set(folder)]) == []


def test_set_of_which_one_run_lost_a_node_keeps_the_means_of_the_others(tmp_path):
    keys = {'nodes': 2, 'ranks': 2, 'number_of_nodes': 2}
    folder = write_set(tmp_path / 'box', epoch_s=lambda k: 10.0 + k / 2, **keys)
    resume(folder, 0, number_of_nodes=1, global_batch_size=60)
    resume(folder, 1, global_batch_size=60)  # fewer ranks on the same nodes
    system = load_set(folder)
    assert (system.refusal, system.num_nodes, len(system.timed)) == (None, 2, 3)
    assert system.score_minutes is None


def test_facts_of_a_set_are_those_of_the_runs_that_determine_its_time(tmp_path):
    folder = write_set(tmp_path / 'box', ranks=2, epoch_s=lambda k: 10.0 + k / 2)
    resume(folder, 0, number_of_ranks=1)
    assert load_set(folder).num_ranks == 2


@pytest.mark.parametrize(
    'num_runs, keys, kinds',
    [
        (3, {}, 'runs_not_five'),
        (1, {}, 'runs_not_five'),
        (5, {'seed': 9}, 'rule_broken seeds_equal'),
        (5, {'seed': None}, 'seeds_missing'),
        (
            5,
            {'period': 4, 'accuracies': of_first((0.5, 0.6, 0.76), (0.5, 0.76))},
            'resolution_low',
        ),
        (5, {'accuracies': of_first((0.5, 0.5, 0.6, 0.76), (0.5, 0.76))}, ''),
        (5, {'status': failing(0, 1)}, 'rule_broken runs_unconverged'),
    ],
)
def test_findings_of_weak_sets(tmp_path, num_runs, keys, kinds):
    found = set_findings(written_set(tmp_path, num_runs, epoch_s=odd_pace, **keys))
    assert [f.kind for f in found] == kinds.split()
    assert any('the spread of a single run is unknown' in f.text for f in found) == (num_runs == 1)


@pytest.mark.parametrize(
    'field, values',
    [
        ('num_nodes', {'nodes': of_first(2, 1)}),
        ('target_accuracy', {'target': of_first(0.75, 0.7)}),
        ('num_accelerators', {'ranks': of_first(8, 4)}),
    ],
)
def test_different_runs_are_not_pooled(tmp_path, field, values):
    refusal = written_set(tmp_path, 3, **values).refusal
    assert re.match(f'{field} is .* in result_0.txt and .* in result_1.txt, ', refusal)
    assert load_set(tmp_path / 'result_1.txt').refusal is None


def rates(first, others):
    """Return the learning rates of the first run and of the others as keys of the logs."""
    return lambda k: {'sgd_opt_base_learning_rate': others if k else first}


def test_runs_that_count_have_no_score_if_they_differ_in_settings_which_are_named(tmp_path):
    system = written_set(tmp_path, optimizer=rates(7.6, 7.26), epoch_s=pace)
    assert system.refusal is system.score_minutes is None and system.time_s == approx(26)
    name = 'sgd_opt_base_learning_rate'
    parts = f'{name} 7.6 in result_0.txt; {name} 7.26 in result_1.txt, result_2.txt'
    [text] = kinds_of(system, 'settings_differ')
    [violation] = system.judgement.violations
    assert parts in text and violation.startswith(f'the runs have different settings: {parts}')


@pytest.mark.parametrize(
    'first, others',
    [
        ({'opt_learning_rate_decay': 'cosine'}, {'sgd_opt_learning_rate_decay_poly_power': 2}),
        ({'open_options': {'train.ema': 0.9}}, {}),
        ({'initial_weights': 'best.npz of another run'}, {}),
    ],
)
def test_settings_that_logs_leave_out_by_default_are_compared(tmp_path, first, others):
    system = written_set(tmp_path, division='open', optimizer=of_first(first, others), epoch_s=pace)
    assert system.score_minutes is None and f'{next(iter(first))} ' in system.parts_text


def test_run_that_does_not_count_may_have_another_batch(tmp_path):
    system = written_set(
        tmp_path, batch=of_first(48, 64), optimizer=rates(4.5, 6), status=failing(0), epoch_s=pace
    )
    assert (system.refusal, system.global_batch_size, system.recipe.base_lr) == (None, 64, 6)
    assert system.score_minutes == approx(28 / 60)
    assert 'batch_size 48, sgd_opt_base_learning_rate 4.5 in result_0.txt' in system.parts_text


def test_set_with_runs_of_both_divisions_is_open(tmp_path):
    system = written_set(tmp_path, division=of_first('open', 'closed'), target=0.759)
    assert (system.refusal, system.division) == (None, 'open')
    assert 'division open in result_0.txt' in system.parts_text


def test_deferred_values_of_v05_are_equal(tmp_path):
    for k in (0, 1):
        lines = [v05('opt_learning_rate', 0, f'DEFERRED: {k}-ca90'), v05('run_start', 0)]
        write_lines(tmp_path / f'result_{k}.txt', lines)
    system = load_set(tmp_path)
    assert (system.refusal, system.parts_text) == (None, None)
    assert [dict(r.optimizer) for r in system.runs] == [{'opt_base_learning_rate': 'DEFERRED'}] * 2


def test_set_submitted_again_in_a_later_round_is_one_set(tmp_path):
    def submit(name, system, epoch_s=odd_pace):
        return write_set(tmp_path / name / f'us/results/{system}/resnet', epoch_s=epoch_s)

    later, *_ = (submit(name, 'box') for name in ('v3.0', 'v2.0', 'v4.0'))
    submit('v3.0', 'other', lambda k: 20.123 + k)
    first, other = load_run_sets([tmp_path])
    assert (first.round, first.rounds, first.findings) == ('v2.0', ('v2.0', 'v3.0', 'v4.0'), ())
    assert (other.name, other.rounds) == ('other', ('v3.0',))
    assert make_finding('submitted_again', None, 'v3.0', later) in set_findings(first)


@pytest.fixture
def tree(tmp_path):
    """Study of three sets, of which the middle one has runs with different batches."""
    for nodes, batch in ((1, 64), (2, lambda k: 32 if k == 3 else 128), (4, 256)):
        keys = {'nodes': nodes, 'ranks': 4 * nodes, 'epoch_s': 40.0 / nodes, 'batch': batch}
        write_set(tmp_path / f'study/{nodes}n', is_complete=True, **keys)
    return tmp_path


def test_refused_set_is_not_compared(tree):
    study = study_of(tree)
    assert [s.name for s in study.run_sets] == ['1n', '4n', '2n'] and study.baseline.name == '1n'
    assert study.comparisons[2] is None and not study.splits
    with pytest.raises(UserError, match='--baseline: 2n is refused because global_batch_size'):
        study_of(tree, baseline='2n')
    alone = study_of(tree / 'study/2n')
    text = render_text(make_report([alone]))
    assert alone.comparisons == [None] and text.count(REFUSAL) == 2
    assert 'Speed-up and efficiency are' not in text


def copy_log(path, target):
    """Copy a log with another seed."""
    write_lines(target, [path.read_text().replace('"seed", "value": ', '"seed", "value": 7')])


def test_duplicate_with_different_seed_is_not_counted(tmp_path):
    folder = write_set(tmp_path, epoch_s=odd_pace, eval_s=1.01)
    copy_log(folder / 'result_1.txt', folder / 'result_3.txt')
    system = load_set(tmp_path)
    assert (len(system.runs), len(system.counted), len(system.converged)) == (5, 4, 4)
    found = set_findings(system)
    assert (found[0].kind, found[0].file) == ('duplicate', folder / 'result_3.txt')
    assert make_finding('runs_not_five', None, '4 runs', 5, '') in found
    assert system.time_s == approx(2 * (10.123 + (0 + 1 + 2 + 4) / 4 + 1.01))
    row = json.loads(call('report', tmp_path, '--format', 'json').stdout)['systems'][0]
    assert (row['num_runs'], row['num_converged'], row['score_minutes']) == (5, 4, None)


def test_unreadable_folder_is_refused(tree, monkeypatch):
    deny(monkeypatch, '2n', 'scandir')
    study, reason = study_of(tree), 'the folder cannot be read: Permission denied'
    assert study.run_sets[2].refusal == reason
    assert study.baseline.name == '1n' and study.comparisons[2] is None
    done = call('report', tree / 'study/2n')  # the result is the same for this folder only
    assert (done.returncode, done.stderr) == (1, '') and f'refused: {reason}' in done.stdout


def test_description_in_an_inaccessible_folder_is_ignored(tmp_path, monkeypatch):
    folder = write_set(tmp_path / 'us/results/box/resnet', 1)
    deny(monkeypatch, 'systems/box.json', 'stat')
    [text] = kinds_of(load_set(folder), 'description_unreadable')
    assert 'box.json' in text and 'Permission denied' in text


@pytest.mark.parametrize(
    'nodes, per_node, ranks, known',
    json_table("""
2 | 64 | 1  | null
1 | 17 | 1  | null
1 | 16 | 1  | 1
1 | 24 | 24 | 1
"""),
)
def test_pod_that_is_described_as_a_node_has_no_known_number_of_nodes(
    tmp_path, nodes, per_node, ranks, known
):
    facts = {'number_of_nodes': nodes, 'accelerators_per_node': str(per_node)}
    write_files(tmp_path, {'v2.0/us/systems/pod.json': json.dumps(facts)})
    write_set(tmp_path / 'v2.0/us/results/pod/resnet', ranks=ranks, platform='pod')
    system = load_set(tmp_path)
    assert (system.num_nodes, system.num_accelerators) == (known, nodes * per_node)
    text = ''.join(kinds_of(system, 'nodes_unknown'))
    assert (system.node_hours is None) == bool(text) == (known is None)
    assert known or f'{nodes * per_node:,} accelerators' in text


def test_set_has_no_score_while_a_run_is_running(tmp_path):
    # Five runs of equal whole seconds and few accuracies are no duplicates, as a coarse clock
    # produces them.
    found = written_set(tmp_path, accuracies=[0.1] * 20 + [0.76])
    system = replace(found, runs=(replace(found.runs[0], status='running'), *found.runs[1:]))
    assert found.score_minutes and system.score_minutes is None
    assert set_findings(system) == [make_finding('runs_unfinished', None, 1, 5)]


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    'make, error',
    [
        (os.mkfifo, 'got a named pipe, expected a file'),
        (os.mkdir, 'got a folder, expected a file'),
        (lambda p: os.symlink('/dev/zero', p), 'got a device, expected a file'),
        (make_socket, 'No such device or address'),
        (lambda p: os.symlink(p.name, p), 'Too many levels of symbolic links'),
    ],
)
def test_special_files_do_not_block(tmp_path, monkeypatch, make, error):
    path = write_set(tmp_path, 2) / 'result_2.txt'
    monkeypatch.chdir(tmp_path)  # because a socket name must be short
    make(path)
    done = call('report', tmp_path)
    assert done.returncode == 1 and f'result_2.txt: cannot read the log: {error}' in done.stdout
    assert call('check', path).returncode == 2


def test_named_pipes_next_to_a_log_do_not_block(tmp_path):
    folder = write_set(tmp_path / 'runs', is_complete=True)
    for name in ('env.json', 'metrics.jsonl', 'telemetry_0_alpha.jsonl'):
        os.mkfifo(folder / name)
    assert call('report', folder, '--out', tmp_path / 'out').returncode == 0
    call('package', folder, '--org', 'us', '--system', 'x', '--out', tmp_path / 'o')


def test_invalid_paths_are_one_line_errors(tmp_path):
    os.symlink('loop', tmp_path / 'loop')
    os.mkfifo(tmp_path / 'pipe')
    os.symlink(tmp_path, tmp_path / 'again')  # a loop of folders is walked once
    runs = write_set(tmp_path / 'runs', 1)
    assert len(load_run_sets([tmp_path])) == 1
    for command, paths, error in (
        ('report', ['pipe'], 'pipe: neither a file nor a folder; expected'),
        ('report', ['none'], 'none: no such folder; expected'),
        ('check', [runs, 'none'], 'none: no such folder; expected a log or a folder of logs'),
        ('check', ['none', 'published/v2.0/Dell'], 'packaged sets have no logs'),
    ):
        words = [p if 'published' in str(p) else tmp_path / p for p in paths]
        done = call(command, *words)
        assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
        assert error in done.stderr
    done = call('report', tmp_path / 'loop')
    assert done.returncode == 1 and 'Too many levels of symbolic links' in done.stdout


@pytest.mark.parametrize(
    'folder',
    [shipped_logs(), pytest.param(PUBLISHED, marks=pytest.mark.needs_published)],
    ids=['own', 'published'],
)
def test_real_logs_are_not_duplicates(folder):
    runs = [r for s in load_run_sets([folder]) for r in s.runs]
    assert len(runs) > 10 and find_duplicates(runs) == []


def test_duplicates_of_other_system_are_refused(tmp_path):
    for name, epoch_s in (('a', 10), ('c', 20)):  # whole seconds and a curve of accuracies
        write_set(
            tmp_path / 's' / name,
            epoch_s=lambda k, e=epoch_s: e + k,
            accuracies=(0.1, 0.2, 0.3, 0.4, 0.76),
        )
    for path in (tmp_path / 's/a').iterdir():
        copy_log(path, tmp_path / 's/b' / path.name)
    study = study_of(tmp_path)
    doubt = make_finding('duplicates_elsewhere', None, 'all', 5, 'a').text
    refused = {s.name: doubt in s.judgement.violations for s in study.run_sets}
    assert refused == {'a': False, 'b': True, 'c': False}
    assert doubt in render_text(make_report([study]))
    copied = study.run_sets[1]
    assert copied.score_minutes is None
    assert copied.time_s == approx(sum(r.time_to_train_s for r in copied.runs) / 5)
    # a ratio is meaningless
    assert {s.name for s, c in zip(study.run_sets, study.comparisons) if c} == {'a', 'c'}


def test_single_duplicate_log_of_other_system_is_named(tmp_path):
    first = write_set(tmp_path / 'a/a', epoch_s=odd_pace)
    second = write_set(tmp_path / 'b/a', epoch_s=lambda k: 20.123 + k)
    copy_log(first / 'result_1.txt', second / 'result_3.txt')
    original, copied = load_run_sets([tmp_path])
    path = second / 'result_3.txt'
    expected = make_finding(
        'duplicate_elsewhere', None, path.name, 'result_1.txt', first, file=path
    )
    assert (original.findings, copied.findings) == ((), (expected,))


@pytest.mark.parametrize(
    'numbers, missing',
    json_table("""
[0, 1, 2, 3, 7] | "4, 5, 6"
[0, 1, 2, 3, 5] | "4"
[1, 2, 3, 4, 5] | ""
[2, 3, 4, 5, 6] | "1"
[7]             | ""
[0, 999999999]  | "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 999999988 more"
"""),
)
def test_gaps_in_run_numbers_are_reported(tmp_path, numbers, missing):
    for k, number in enumerate(numbers):
        write_lines(tmp_path / f'result_{number}.txt', run_lines(seed=k, epoch_s=odd_pace(k)))
    text = ''.join(kinds_of(load_set(tmp_path), 'numbers_missing'))
    assert missing in text and bool(text) == bool(missing)
