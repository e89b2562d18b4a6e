"""Logs of every round become runs; what is odd about them is said, with its line."""
import json
import tracemalloc

import pytest
from lines import mllog, quiet, run_lines, v05, v06, write_lines
from sample_log import write_run

from mlperf_rn50.errors import UserError
from mlperf_rn50.mlperf.metrics import read_learning_rates
from mlperf_rn50.mlperf.reader import read_events, read_run


@pytest.fixture
def read(tmp_path):
    def read(lines, name='result_0.txt'):
        return read_run(write_lines(tmp_path / name, lines))
    return read


def texts(run):
    return [w.text for w in run.warnings]


def drop(lines, *keys):
    return [line for line in lines if not any(f'"{k}"' in line for k in keys)]


def test_our_own_log(tmp_path):
    run = read_run(write_run(tmp_path / 'result_0.txt'))
    assert (run.round, run.status, run.epochs_to_converge) == ('v0.7+', 'converged', 4)
    assert [(e.epoch, e.accuracy) for e in run.evaluations] == [(2, 0.1), (4, 0.7595)]
    assert (run.num_nodes, run.num_ranks, run.num_accelerators, run.global_batch_size) == (2, 8, 0, 64)
    assert (run.seed, run.target_accuracy, run.dataset, run.is_imagenet) == (7, 0.749, 'imagenet', True)
    assert run.platform == 'here' and run.org == 'us' and run.opt_name == 'sgd'
    assert run.optimizer['sgd_opt_base_learning_rate'] == 0.5
    assert [(s.first_epoch, s.num_epochs, s.images_per_s) for s in run.stretches] == [
        (1, 1, 123.4), (2, 1, 123.4), (3, 1, 123.4), (4, 1, 123.4)]
    assert [lr for _, lr in run.learning_rates] == [0.25] * 4
    assert 0 <= run.time_to_train_s < 60 and 0 <= run.init_s < 60 and texts(run) == []


def test_a_later_log(read):
    run = read(run_lines((0.5, 0.76), epoch_s=10, eval_s=1, nodes=2, ranks=16))
    assert (run.status, run.epochs_to_converge, run.time_to_train_s, run.init_s) == ('converged', 2, 22.0, 4.0)
    assert (run.num_nodes, run.num_ranks, run.num_accelerators) == (2, 16, 16)
    assert [(s.start_s, s.stop_s) for s in run.stretches] == [(0, 10), (11, 21)]
    assert [(e.time_s, e.start_s, e.stop_s) for e in run.evaluations] == [(11, 10, 11), (22, 21, 22)]
    assert run.target_accuracy == 0.759 and run.sources['target_accuracy'].basis == 'implied'
    assert run.sources['num_nodes'].text == 'submission_platform' and run.sources['num_nodes'].line == 4
    assert run.lines['run_start'] == 25


def test_a_v06_log(read):
    entry = "{'nodes': \"{'num_nodes': '3', 'num_accelerators': '8'}\"}"
    run = read([v06('submission_entry', -9, entry), *[v06('init_start', -8)] * 24, v06('init_stop', -2),
                v06('run_start', 0),
                v06('global_batch_size', 0, 4992), v06('opt_name', 0, 'lars'), v06('lars_epsilon', 0, 0),
                v06('block_start', 0, first_epoch_num=1, epoch_count=2), v06('eval_start', 20, epoch_num=2),
                v06('eval_accuracy', 21, 0.76, epoch_num=2), v06('run_stop', 22, status='success')])
    assert (run.round, run.status) == ('v0.6', 'converged')
    assert (run.num_nodes, run.num_accelerators, run.num_ranks) == (3, 24, 24)
    assert (run.opt_name, run.global_batch_size, run.epochs_to_converge, run.time_to_train_s) == ('lars', 4992, 2, 22)
    # Only blocks are logged: one stretch of two epochs, up to its evaluation.
    assert [(s.first_epoch, s.num_epochs, s.start_s, s.stop_s) for s in run.stretches] == [(1, 2, 0, 20)]


def v05_log(end=None, accuracy=0.75, target=0.749):
    return [*(v05('run_clear_caches', -9 - n) for n in range(3)), v05('run_start', 0),
            *(v05('run_set_random_seed', n / 10, n) for n in range(24)), v05('input_batch_size', 1, 32),
            v05('eval_size', 1, 50000), v05('eval_target', 1, target), v05('opt_learning_rate', 1, 0.1),
            v05('train_epoch', 2, 0), v05('train_epoch', 12, 1), v05('eval_start', 21), v05('eval_stop', 22),
            v05('eval_accuracy', 22, {'epoch': 1, 'value': accuracy}), v05('run_stop', 23, end), v05('run_final', 24)]


def test_a_v05_log_counts_epochs_from_zero_and_implies_its_batch(read):
    run = read(v05_log())
    assert (run.round, run.status, run.epochs_to_converge, run.time_to_train_s) == ('v0.5', 'converged', 2, 23)
    assert (run.num_nodes, run.num_accelerators, run.global_batch_size) == (3, 24, 24 * 32)
    assert run.sources['global_batch_size'].basis == 'implied'
    assert [(s.first_epoch, s.start_s, s.stop_s) for s in run.stretches] == [(1, 2, 12), (2, 12, 21)]
    assert (run.seed, run.target_accuracy) == (0, 0.749)


def test_a_v05_log_that_misses_its_target_is_no_success(read):
    assert (read(v05_log(accuracy=0.748)).status, read(v05_log({'success': False})).status) == ('aborted', 'aborted')


@pytest.mark.parametrize('end, status', [('aborted', 'aborted'), ('interrupted', 'interrupted'), ('failed', 'failed'),
                                         (None, 'failed')])
def test_a_run_without_its_target_has_no_epochs(tmp_path, end, status):
    run = read_run(quiet(write_run(tmp_path / 'result_0.txt', end=end)))
    assert (run.status, run.epochs_to_converge) == (status, None)
    assert any('no run_stop: the log ends here' in t for t in texts(run)) == (end is None)


def test_missing_ends(read):
    run = read(drop(run_lines(), 'run_start'))
    assert (run.status, run.time_to_train_s, run.stretches) == ('failed', None, ())
    assert 'no run_start: the time to train is not known' in texts(run)
    run = read(run_lines(status=None))
    assert (run.status, run.time_to_train_s) == ('failed', None) and len(run.stretches) == 2


def test_success_is_only_what_the_evaluations_bear_out(read):
    below = read(run_lines((0.5, 0.7589)))
    assert below.status == 'aborted'
    assert 'says success, but the last evaluation, 0.7589, is below the target of 0.759' in texts(below)
    assert read(drop(run_lines(), 'eval_accuracy')).status == 'failed'
    assert read([*drop(run_lines(), 'run_stop'), mllog('run_stop', -1, status='success')]).status == 'failed'
    assert read(run_lines((0.4,), division='open')).status == 'converged'  # an open run sets its own target
    assert read(run_lines((0.4,), division='open')).target_accuracy is None


def test_the_target_is_reached_at_equality(read):
    assert read(run_lines((0.759,))).status == 'converged'
    assert read(run_lines((0.74, 0.7489), target=0.749)).status == 'aborted'
    assert read(run_lines((0.74, 0.749), target=0.749)).status == 'converged'


def test_prefixes_other_tools_and_progress_bars(read):
    lines = run_lines()
    noisy = ['+ srun python', *(f'0: node7 {line}' for line in lines[:10]), 'NCCL INFO', '', *lines[10:20],
             ' 12%|###   |\r 13%|###   |\r' + lines[20], lines[21] + lines[22], *lines[23:]]
    assert read(noisy).evaluations[0].time_s == read(lines).evaluations[0].time_s
    assert texts(read(noisy)) == []


def test_torn_lines_are_left_out_and_said(read):
    lines = run_lines()
    torn = [*lines[:15], lines[15][:40], *lines[15:-1], ':::MLLOG {"key": "ru' + lines[-1]]
    run = read(torn)
    assert run.status == 'converged'
    assert [(w.line, w.text) for w in run.warnings] == [(16, '2 lines: torn line, left out; first line 16')]


def test_repeated_lines_count_once(read):
    lines = run_lines()
    run = read([*lines[:-1], *lines[-4:]])
    assert (run.epochs_to_converge, run.time_to_train_s, len(run.evaluations)) == (2, 22, 2)
    assert texts(run) == ['3 lines: equal to an earlier line in time, key and value; it counts once; first line 27']
    run = read([line for line in lines for _ in (1, 2)])
    assert (run.epochs_to_converge, run.time_to_train_s, run.num_ranks) == (2, 22, 4) and len(run.warnings) == 2
    run = read([*lines[:-1], mllog('eval_accuracy', 30, 0.76, epoch_num=2), *lines[-1:]])
    assert 'eval_accuracy of epoch 2 stands before, too; the first counts' in texts(run)


def test_contradicting_lines_are_said(read):
    lines = run_lines()
    run = read([*lines[:-1], mllog('global_batch_size', 1, 32), mllog('eval_accuracy', 22, 0.77, epoch_num=2),
                lines[-1]])
    assert (run.global_batch_size, run.final_accuracy) == (64, 0.76)
    assert any(t.startswith('global_batch_size is 32, not 64 as in line ') for t in texts(run))
    assert any(t.startswith('eval_accuracy of epoch 2 is 0.77, not 0.76 as in line ') for t in texts(run))


@pytest.mark.parametrize('value', [float('nan'), -0.1, 75.9, '0.76', None, True, [0.76]])
def test_an_accuracy_that_is_none_is_left_out(read, value):
    run = read([*drop(run_lines((0.5,)), 'run_stop'), mllog('eval_accuracy', 30, value, epoch_num=2),
                mllog('run_stop', 31, status='success')])
    assert run.status == 'aborted' and len(run.evaluations) == 1
    assert any(t.startswith('eval_accuracy is ') for t in texts(run))


@pytest.mark.parametrize('epoch', [None, 'two', -1, 1.5, 1e300])
def test_an_evaluation_without_an_epoch_is_left_out(read, epoch):
    run = read([*run_lines((0.5,), status=None), mllog('eval_accuracy', 12, 0.8, epoch_num=epoch)])
    assert len(run.evaluations) == 1 and 'eval_accuracy names no epoch; left out' in texts(run)


def test_evaluations_over_other_numbers_of_images_are_flagged(read):
    assert texts(read(run_lines((25000 / 50000, 0.75976)))) == []
    odd = read(run_lines((25001 / 51584, 38001 / 51584, 39200 / 51584)))
    assert '3 of 3 accuracies are not shares of 50000 images, but of 51584' in texts(odd)
    assert any('of 49999' in t for t in texts(read(run_lines((12345 / 49999, 37999 / 49999)))))
    assert 'evaluations over 51584 images, ImageNet has 50000' in texts(read(
        [line.replace('"value": 50000', '"value": 51584') for line in run_lines((0.5,))]))


def test_float32_accuracies_are_shares(read):
    assert texts(read(run_lines((0.38138001, 0.7597600221633911)))) == []


def test_another_data_set_is_flagged(read):
    run = read(run_lines(train_samples=1437))
    assert not run.is_imagenet and any('another data set' in t for t in texts(run))


def test_a_run_that_went_on_after_its_target_is_flagged(read):
    run = read(run_lines((0.76, 0.77)))
    assert run.epochs_to_converge == 2
    assert 'epoch 1 had reached the target; the run went on to epoch 2, which counts' in texts(run)


def test_the_clock_of_a_resumed_run_leaves_the_gap_out(tmp_path):
    path = write_run(tmp_path / 'result_0.txt', end=None)
    with open(path, 'a') as f:
        f.write(mllog('run_resumed', 10**6, 9, clock_s=30.0, number_of_ranks=3, number_of_nodes=3,
                      global_batch_size=48) + '\n')
        f.write(mllog('run_stop', 10**6 + 5, status='success') + '\n')
    run = read_run(path)
    assert (run.time_to_train_s, run.num_resumes) == (35.0, 1)
    assert (run.num_nodes, run.num_ranks, run.global_batch_size) == (3, 3, 48)
    assert any('cannot be submitted' in t for t in texts(run))


def test_what_is_no_log_of_one_run_is_refused(read, tmp_path):
    with pytest.raises(UserError, match='no MLPerf log line in it'):
        read(['hello'])
    with pytest.raises(UserError, match='cannot read the log'):
        read_run(tmp_path / 'result_9.txt')
    with pytest.raises(UserError, match="a log of the benchmark 'ssd', expected resnet"):
        read([mllog('submission_benchmark', 0, 'ssd')])
    with pytest.raises(UserError, match="a log of the benchmark 'ssd', expected resnet"):
        read([line.replace(' resnet ', ' ssd ') for line in v05_log()])
    with pytest.raises(UserError, match='holds more than one run: line 27 is run_stop, line 40 run_start again'):
        read(run_lines() * 2)


def describe(tmp_path, content, name='entry.json'):
    (tmp_path / 'results/box').mkdir(parents=True, exist_ok=True)
    path = tmp_path / 'results/box' / name if name == 'entry.json' else tmp_path / 'systems/box.json'
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return 'results/box/resnet/result_0.txt'


def test_a_description_fills_in_and_is_said_to_contradict(tmp_path, read):
    name = describe(tmp_path, {'nodes': [{'num_nodes': 2, 'num_accelerators': 4},
                                         {'num_nodes': 1, 'num_accelerators': 16}]})
    alone = [line for line in v05_log() if 'seed' not in line and 'clear' not in line]
    run = read(alone, name)
    assert (run.num_nodes, run.num_accelerators, run.global_batch_size) == (3, 24, 768)
    assert run.sources['num_nodes'].basis == 'described' and texts(run) == []
    name = describe(tmp_path, {'nodes': [{'num_nodes': 36, 'num_accelerators': 8}]})
    run = read(v05_log(), name)
    assert (run.num_nodes, run.num_accelerators) == (3, 24)
    assert texts(run) == ['entry.json says 36 nodes, the 3 lines that clear a cache 3; 3 counts',
                          'entry.json says 288 accelerators, the 24 lines of seeds 24; 24 counts']


@pytest.mark.parametrize('platform', ['0xbox', '2 x box', '12x34', 'box', '', 7])
def test_a_platform_that_names_no_nodes(read, platform):
    run = read([mllog('submission_platform', -7, platform), *drop(run_lines(), 'submission_platform')])
    assert (run.num_nodes, run.num_accelerators) == (None, 4)


def test_a_later_description(tmp_path, read):
    name = describe(tmp_path, {'submitter': 'them', 'number_of_nodes': '2', 'accelerators_per_node': '0'}, 'system')
    run = read(drop(run_lines(ranks=8, nodes=1), 'submission_platform', 'submission_org'), name)
    assert (run.org, run.num_nodes, run.num_accelerators) == ('them', 2, 0)  # ranks on CPUs


@pytest.mark.parametrize('content', ['', '[1]', '[' * 10**5, '{"nodes": 3}', '{"nodes": [{"num_nodes": "many"}]}',
                                     '{"a": ' + ' ' * (1 << 20) + '1}'])
def test_a_broken_description_is_left_out(tmp_path, read, content):
    assert read(run_lines(), describe(tmp_path, content)).status == 'converged'


@pytest.mark.parametrize('folder, expected', [('v2.1', 'v2.1'), ('training_results_v3.0', 'v3.0'), ('v1.0.0', 'v1.0'),
                                              ('version', 'v0.7+')])
def test_the_round_of_a_later_log_is_that_of_its_folder(read, folder, expected):
    assert read(run_lines(), f'{folder}/us/result_0.txt').round == expected


def test_a_folder_of_another_round_is_said(read):
    run = read(v05_log(), 'v0.7/result_0.txt')
    assert run.round == 'v0.5' and 'lies in a folder v0.7, but has the lines of v0.5' in texts(run)


def test_applied_learning_rates_come_from_the_metrics_beside_the_log(tmp_path):
    run = read_run(write_run(tmp_path / 'result_1.txt'))
    assert [lr for _, lr in read_learning_rates(run)] == [0.25] * 4
    (tmp_path / 'metrics_1.jsonl').write_text('{"event": "train", "time_s": 2.0, "learning_rate": 0.5}\nno\n[1]\n'
                                              '{"time_s": "x", "learning_rate": 1}\n{"event": "eval", "time_s": 3}\n')
    assert read_learning_rates(run) == ((2.0, 0.5),)


def test_v05_evaluations_that_name_no_epoch_and_values_that_come_again(read):
    """As some organisations logged v0.5: no epochs, the global batch, the target again at every evaluation."""
    lines = [v05('run_start', 0), v05('input_batch_size', 1, 4096), v05('run_set_random_seed', 1, 'none'),
             v05('input_batch_size', 2, 4096)]
    for k, accuracy in enumerate((0.4, 0.6, 0.7505800127983093)):
        lines += [v05('eval_start', 50 + 40 * k), v05('eval_size', 58 + 40 * k, 50000), v05('eval_stop', 58 + 40 * k),
                  v05('eval_accuracy', 59 + 40 * k, {'value': accuracy, 'epoch': 3 + 4 * k}),
                  v05('eval_target', 60 + 40 * k, 0.749)]
    run = read([*lines, v05('run_stop', 150, {'success': 'true'})])
    assert (run.status, run.epochs_to_converge, run.global_batch_size, run.seed) == ('converged', 12, 4096, None)
    assert run.sources['global_batch_size'].text == 'input_batch_size, too large for one accelerator'
    assert [(e.epoch, e.start_s, e.stop_s) for e in run.evaluations] == [(4, 50, 58), (8, 90, 98), (12, 130, 138)]
    assert [(s.first_epoch, s.num_epochs, s.start_s, s.stop_s) for s in run.stretches] == [
        (1, 4, 0, 50), (5, 4, 58, 90), (9, 4, 98, 130)]
    assert texts(run) == []
    assert read([*lines, v05('run_stop', 150, {'success': 'false'})]).status == 'aborted'


def test_v05_stops_may_follow_the_accuracy(read):
    run = read(v05_log())
    assert [(e.start_s, e.stop_s) for e in run.evaluations] == [(21, 22)]
    lines = [line for line in v05_log() if 'eval_stop' not in line]
    run = read([*lines[:-2], v05('eval_stop', 22.5), *lines[-2:]])
    assert [(e.start_s, e.stop_s) for e in run.evaluations] == [(21, 22.5)] and texts(run) == []


def test_throughput_under_its_other_names(read):
    stats = mllog('tracked_stats', 10, {'imgs_sec': 35769.9}, step=1), mllog('throughput', 10, 35769.9)
    run = read([*run_lines(status=None), *stats, mllog('run_stop', 22, status='success')])
    assert [s.images_per_s for s in run.stretches] == [35769.9, None] and texts(run) == []


def test_blocks_without_evaluation_starts(read):
    lines = drop(run_lines(), 'epoch_start', 'epoch_stop', 'eval_start', 'eval_stop')
    run = read([*lines, mllog('block_start', 0, first_epoch_num=1, epoch_count=1),
                mllog('block_start', 11, first_epoch_num=2, epoch_count=1)])
    assert [(s.start_s, s.stop_s) for s in run.stretches] == [(0, 11), (11, 22)]


def test_a_description_counts_before_the_name_of_a_platform(tmp_path, read):
    name = describe(tmp_path, {'number_of_nodes': '1', 'accelerators_per_node': '4'}, 'system')
    run = read(run_lines(nodes=4, ranks=4), name)  # "4xbox": four accelerators, not nodes
    assert run.num_nodes == 1 and texts(run) == ['submission_platform says 4 nodes, box.json 1; 1 counts']


def test_v05_learning_rates_are_those_that_were_logged(read):
    run = read([*v05_log()[:-2], v05('opt_learning_rate', 15, 0.01), *v05_log()[-2:]])
    assert run.learning_rates == ((1.0, 0.1), (15.0, 0.01)) and run.optimizer['opt_base_learning_rate'] == 0.1


def test_memory_does_not_grow_with_the_log(tmp_path):
    path = tmp_path / 'result_0.txt'
    with open(path, 'w') as f:
        f.write('x' * 30_000_000 + '\n')
        for epoch in range(30_000):
            f.write(mllog('eval_accuracy', epoch, 0.5, epoch_num=epoch) + '\n')
            f.write(mllog(f'opt_{epoch}', 0, 'x' * 900) + '\n')
        f.write(':::MLLOG ' + '[' * 3_000_000)
    tracemalloc.start()
    run = read_run(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(run.evaluations) == 10_000 and len(run.warnings) < 200 and len(run.optimizer) == 64
    assert peak < 40_000_000


def test_lines_keep_their_numbers_after_a_long_one(tmp_path):
    path = write_lines(tmp_path / 'log', ['a' * 3_000_000, 'b', mllog('run_start', 0)])
    assert [number for number, _ in read_events(path)] == [3]
