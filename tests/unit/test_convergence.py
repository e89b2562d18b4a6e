"""Sets of runs: which may be pooled, their score, and how weak their evidence is."""
import re

import pytest
from helpers import call
from lines import mllog, run_lines, write_lines, write_set

from mlperf_rn50.errors import UserError
from mlperf_rn50.study.convergence import score_minutes
from mlperf_rn50.study.systems import load_systems
from mlperf_rn50.study.time_parts import parts_of

MINUTES = 60.0


@pytest.mark.parametrize('times, score', [
    ([1, 2, 3, 4, 5], 3.0), ([5, 1, 4, 2, 3], 3.0), ([1, 1, 1, 1, 100], 1.0),
    ([10, 2, 3, 4, None], 17 / 3),  # a run without convergence is the slowest: the fastest is dropped all the same
    ([1, 2, 3, None, None], None), ([None] * 5, None), ([1, 2, 3, 4], None), ([1, 2, 3, 4, 5, 6], None), ([], None)])
def test_the_score_drops_fastest_and_slowest_of_five(times, score):
    found = score_minutes([None if t is None else MINUTES * t for t in times])
    assert found == (None if score is None else pytest.approx(score))


def only(folder):
    systems = load_systems([folder])
    assert len(systems) == 1
    return systems[0]


def test_a_set_of_five(tmp_path):
    system = only(write_set(tmp_path / 'study/box', epoch_s=lambda k: 10.0 + k, nodes=2, ranks=8))
    assert (system.name, system.study_name, len(system.converged)) == ('box', 'study', 5)
    assert (system.num_nodes, system.num_accelerators, system.num_units, system.global_batch_size) == (2, 8, 8, 64)
    assert system.epochs == (2,) * 5 and system.epochs_mean == 2
    # Two epochs of 10 to 14 s and two evaluations of 1 s: 22 to 30 s; the middle three are 24, 26, 28.
    assert system.score_minutes == pytest.approx(26 / 60) and system.time_s == pytest.approx(26)
    assert system.epoch_s == pytest.approx(12) and system.images_per_s == pytest.approx(1_281_167 / 12)
    assert system.warnings == ()


def test_one_aborted_run_counts_as_the_slowest_and_two_make_the_set_invalid(tmp_path):
    one = only(write_set(tmp_path / 'one', epoch_s=lambda k: 10.0 + k,
                         status=lambda k: 'aborted' if k == 0 else 'success'))
    # 24, 26, 28, 30 and the aborted one, which was fast but is the slowest: 26, 28, 30.
    assert one.score_minutes == pytest.approx(28 / 60) and [r.status for r in one.runs].count('aborted') == 1
    assert '1 of 5 runs did not converge' in one.warnings
    two = only(write_set(tmp_path / 'two', epoch_s=lambda k: 10.0 + k, status=lambda k: None if k < 2 else 'success'))
    assert two.score_minutes is None and two.time_s == pytest.approx(28)
    assert any('two or more runs without convergence' in w for w in two.warnings)


def test_fewer_than_five_have_a_mean_and_a_spread(tmp_path):
    system = only(write_set(tmp_path, 3, epoch_s=lambda k: 10.0 + k))
    assert system.score_minutes is None and system.time_s == pytest.approx(24) and system.spread_s == pytest.approx(2)
    assert 'no MLPerf score: it takes 5 runs, here are 3' in system.warnings
    single = only(write_set(tmp_path / 'single', 1))
    assert single.spread_s is None and any('says nothing about the spread' in w for w in single.warnings)


def test_a_file_that_is_no_log_is_a_run_that_did_not_converge(tmp_path):
    folder = write_set(tmp_path, 4)
    (folder / 'result_4.txt').write_text('Segmentation fault\n')
    system = only(folder)
    assert [r.status for r in system.runs] == ['converged'] * 4 + ['unreadable'] and system.score_minutes is not None
    assert any(w.startswith('result_4.txt: no MLPerf log line in it') for w in system.warnings)
    with pytest.raises(UserError, match='result_4.txt: no MLPerf log line'):
        load_systems([folder / 'result_4.txt'])
    (tmp_path / '2x1').mkdir()
    (tmp_path / '2x1/result_0.txt').write_text('')  # killed before its first line
    assert sorted(len(s.runs) for s in load_systems([tmp_path])) == [1, 5]


@pytest.mark.parametrize('field, values', [
    ('global_batch_size', {'batch': lambda k: 64 if k else 32}),
    ('sgd_opt_base_learning_rate', {'optimizer': lambda k: {'sgd_opt_base_learning_rate': 0.1 + k}}),
    ('num_nodes', {'nodes': lambda k: 1 if k else 2}),
    ('target_accuracy', {'target': lambda k: 0.7 if k else 0.75}),
    ('num_accelerators', {'ranks': lambda k: 4 if k else 8}),
    ('sgd_opt_momentum', {'sgd_opt_momentum': lambda k: 0.9 if k else 0.8})])
def test_runs_that_differ_are_not_pooled(tmp_path, field, values):
    write_set(tmp_path, 3, **values)
    assert re.match(f'{field} is .* in result_0.txt and .* in result_1.txt; .* report them', only(tmp_path).refusal)
    done = call('report', tmp_path)
    assert (done.returncode, done.stderr) == (1, '') and f'refused: {field} is ' in done.stdout
    assert len(load_systems([tmp_path / 'result_1.txt'])) == 1


def test_a_run_that_was_killed_early_does_not_forbid_its_set(tmp_path):
    write_set(tmp_path, 4)
    write_lines(tmp_path / 'result_4.txt', run_lines()[:6])
    assert [r.status for r in only(tmp_path).runs] == ['converged'] * 4 + ['failed']


def test_the_same_seed_twice_is_said(tmp_path):
    assert '3 runs have the same seed 9' in only(write_set(tmp_path, 3, seed=9)).warnings


def test_runs_one_evaluation_apart_are_weak_evidence(tmp_path):
    weak = only(write_set(tmp_path / 'weak', 3, accuracies=lambda k: (0.5, 0.76) if k else (0.5, 0.6, 0.76), period=4))
    assert weak.eval_period == 4 and any('differ by one evaluation' in w for w in weak.warnings)
    strong = only(write_set(tmp_path / 'strong', 3, accuracies=lambda k: (0.5, 0.76) if k else (0.5, 0.5, 0.6, 0.76)))
    assert not any('differ by one evaluation' in w for w in strong.warnings)


def test_where_the_time_goes(tmp_path):
    write_set(tmp_path, 1, first_s=30, epoch_s=10, eval_s=2, accuracies=(0.5, 0.6, 0.76))
    parts = parts_of(only(tmp_path).runs[0])
    assert (parts.init_s, parts.first_s, parts.training_s, parts.evaluation_s, parts.other_s) == (4, 30, 20, 6, 0)
    assert parts.on_clock_s == 56


def test_folders_of_other_benchmarks_are_left_out(tmp_path):
    write_set(tmp_path / 'v1.0/us/results/box/resnet', 2)
    write_lines(tmp_path / 'v1.0/us/results/box/bert/result_0.txt', [mllog('submission_benchmark', 0, 'bert')])
    assert len(only(tmp_path).runs) == 2
    with pytest.raises(UserError, match="benchmark 'bert', expected resnet"):
        load_systems([tmp_path / 'v1.0/us/results/box/bert'])


def test_only_numbered_results_are_looked_for(tmp_path):
    write_set(tmp_path, 2)
    (tmp_path / 'result_0_v0.6.txt').write_text('another form of result_0\n')
    assert [r.path.name for r in only(tmp_path).runs] == ['result_0.txt', 'result_1.txt']
    with pytest.raises(UserError, match='no such folder'):
        load_systems([tmp_path / 'nowhere'])
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='no result_<k>.txt in it'):
        load_systems([tmp_path / 'empty'])
