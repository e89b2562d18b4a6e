"""Sweeps: batch and learning rate of a layout, and the table of what came out."""
import pytest
from sample_log import write_run

from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mlperf.reader import read_run
from mlperf_rn50.study.convergence import find_layouts, render_layouts
from mlperf_rn50.study.layouts import parse_layouts, parse_lr_table, plan_layouts

SPLITS = [(1, 4), (2, 4), (8, 4)]


def numbers(layouts):
    return [(x.name, x.global_batch_size, x.base_lr, x.warmup_epochs) for x in layouts]


def test_strong_scaling_keeps_the_global_batch():
    assert numbers(plan_layouts(SPLITS, 256, False, False, 0.1, 5, None)) == [
        ('1x4', 256, 0.1, 5), ('2x4', 256, 0.1, 5), ('8x4', 256, 0.1, 5)]


@pytest.mark.parametrize('batch_size, is_local', [(256, False), (64, True)])
def test_weak_scaling_keeps_the_local_batch_and_scales_the_rate(batch_size, is_local):
    assert numbers(plan_layouts(SPLITS, batch_size, is_local, True, 0.1, 5, None)) == [
        ('1x4', 256, 0.1, 5), ('2x4', 512, 0.2, 5), ('8x4', 2048, 0.8, 5)]


def test_a_table_names_rate_and_warm_up():
    table = parse_lr_table('# batch rate warm-up\n256 0.1 2\n512 0.15 3  # tuned\n')
    assert numbers(plan_layouts(SPLITS[:2], 256, False, True, 9.0, 9, table)) == [('1x4', 256, 0.1, 2),
                                                                                ('2x4', 512, 0.15, 3)]
    with pytest.raises(ConfigError, match='no line for a global batch of 2048'):
        plan_layouts(SPLITS, 256, False, True, 9.0, 9, table)
    with pytest.raises(ConfigError, match='expected: global_batch base_lr warmup_epochs'):
        parse_lr_table('256 0.1')


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(ConfigError, match='3x1 = 3 ranks cannot share evenly'):
        plan_layouts([(1, 1), (3, 1)], 64, False, False, 0.1, 5, None)
    with pytest.raises(ConfigError, match='multiple of the 3 ranks'):
        plan_layouts([(3, 1), (6, 1)], 64, False, True, 0.1, 5, None)


@pytest.mark.parametrize('word', ['4', '0x4', '2x', 'x2', '2x4x1', '-1x2'])
def test_layouts_are_nodes_times_ranks(word):
    with pytest.raises(ConfigError, match='expected nodes x ranks'):
        parse_layouts([word])


def test_a_layout_comes_once():
    with pytest.raises(ConfigError, match='named twice'):
        parse_layouts(['1x2', '1x2'])


def test_a_log_becomes_a_run(tmp_path):
    run = read_run(write_run(tmp_path / 'result_0.txt'))
    assert (run.status, run.epochs_to_converge, run.evaluations) == ('converged', 4, ((2, 0.1), (4, 0.7595)))
    assert (run.num_nodes, run.num_ranks, run.global_batch_size, run.base_lr, run.seed) == (2, 8, 64, 0.5, 7)
    assert run.dataset == 'imagenet' and run.is_imagenet and run.platform == 'here'
    assert 0 <= run.time_to_train_s < 60


@pytest.mark.parametrize('end, status', [('aborted', 'aborted'), ('interrupted', 'interrupted'), ('failed', 'failed'),
                                         (None, 'failed')])
def test_a_run_without_its_target_has_no_epochs(tmp_path, end, status):
    run = read_run(write_run(tmp_path / 'result_0.txt', end=end))
    assert (run.status, run.epochs_to_converge) == (status, None)


def test_the_clock_of_a_resumed_run_leaves_the_gap_out(tmp_path):
    path = write_run(tmp_path / 'result_0.txt', end=None)
    line = (':::MLLOG {{"namespace": "", "time_ms": {}, "event_type": "X", "key": "{}", "value": 9, "metadata": {}}}\n')
    with open(path, 'a') as f:
        f.write(':::MLLOG {"torn": \n')
        f.write(line.format(10**12, 'run_resumed', '{"clock_s": 30.0, "number_of_ranks": 3, "number_of_nodes": 3, '
                                                   '"global_batch_size": 48}'))
        f.write(line.format(10**12 + 5000, 'run_stop', '{"status": "success"}'))
    run = read_run(path)
    assert (run.time_to_train_s, run.num_resumes, run.num_ranks, run.global_batch_size) == (35.0, 1, 3, 48)


def test_what_is_no_log_is_refused(tmp_path):
    (tmp_path / 'result_0.txt').write_text('hello\n')
    with pytest.raises(UserError, match='no :::MLLOG line'):
        read_run(tmp_path / 'result_0.txt')
    with pytest.raises(UserError, match='cannot read'):
        read_run(tmp_path / 'result_9.txt')
    with pytest.raises(UserError, match='no result_<k>.txt'):
        find_layouts(tmp_path / 'nowhere')


def test_the_table_shows_every_run_and_names_data_and_hosts(tmp_path):
    for name, ends in (('1x8', ['converged', 'aborted', None]), ('2x4', ['converged', 'converged'])):
        (tmp_path / name).mkdir()
        for k, end in enumerate(ends):
            write_run(tmp_path / name / f'result_{k}.txt', end=end, accuracies=(0.1, 0.7595) if end else (0.1,))
    text = render_layouts(find_layouts(tmp_path))
    rows = [line.split() for line in text.splitlines()]
    assert next(r for r in rows if r[:1] == ['1x8'])[1:8] == ['64', '0.5', '1', '/', '3', '4', '4.0']
    assert next(r for r in rows if r[:1] == ['2x4'])[1:9] == ['64', '0.5', '2', '/', '2', '4,', '4', '4.0']
    assert 'data: imagenet\n' in text and 'ran on: here' in text
    assert f'{tmp_path}/1x8/result_1.txt: aborted' in text and f'{tmp_path}/1x8/result_2.txt: failed' in text
    assert '| 2x4' in render_layouts(find_layouts(tmp_path), 'github')
