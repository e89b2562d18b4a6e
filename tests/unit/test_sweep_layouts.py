"""Sweep layouts: batch size and learning rate."""

import re

import pytest
from helpers import ROOT, assert_one_line, call, json_table, write_files

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.sweep_layouts import parse_layouts, parse_lr_table, plan_layouts

SPLITS = [(1, 4), (2, 4), (8, 4)]


def planned(batch_size=256, splits=SPLITS, table=None, is_weak=True, num_passes=1):
    layouts = plan_layouts(splits, batch_size, num_passes, is_weak, 0.1, 5, table)
    return [(x.name, x.global_batch_size, x.base_lr, x.warmup_epochs) for x in layouts]


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_local_one():
    weak = [('1x4', 256, 0.1, 5), ('2x4', 512, 0.2, 5), ('8x4', 2048, 0.8, 5)]
    assert planned(is_weak=False) == [(name, *weak[0][1:]) for name, *_ in weak]
    assert planned() == weak


def test_batch_per_pass_is_multiplied_by_the_passes_of_the_first_layout(tmp_path):
    (tmp_path / 'c.yaml').write_text(
        'train: {local_batch_size: 8, gradient_accumulation_steps: 4}\n'
        'data: {dataset: digits, dir: none, num_train: 1437, num_val: 360, num_classes: 10}'
    )
    words = ['--study', 'none', '--layouts', '1x2 1x4', '--weak', '--dry-run']
    done = call('sweep', '--config', tmp_path / 'c.yaml', *words)
    assert re.findall(r'global batch +(\d+)', done.stdout) == ['64', '128']


def test_platform_has_the_nodes_of_each_layout():
    config = ROOT / 'launch/configs/c4140_v100_1node.yaml'
    words = ['--study', 'none', '--layouts', '1x4 2x4', '--hosts', 'h1,h2', '--dry-run']
    done = call('sweep', '--config', config, *words)
    assert re.findall('submission_platform: (.*?),', done.stdout) == [
        '1xC4140 with V100',
        '2xC4140 with V100',
    ]


def test_platform_of_ranks_on_this_machine_names_simulated_nodes(tmp_path):
    (tmp_path / 'c.yaml').write_text(
        'run: {submission_platform: 1xBox}\ntrain: {global_batch_size: 64}\n'
        'data: {dataset: digits, dir: none, num_train: 1437, num_val: 360, num_classes: 10}'
    )
    words = ['--study', 'none', '--layouts', '1x1 2x1', '--dry-run']
    done = call('sweep', '--config', tmp_path / 'c.yaml', *words)
    one, two = re.findall('submission_platform: (.*)', done.stdout)
    assert 'simulated' not in one and '2 nodes of 1 rank, simulated by' in two


def test_table_gives_learning_rate_and_warm_up():
    table = parse_lr_table('# batch rate warm-up\n256 0.3 2\n512 0.15 3  # tuned\n')
    expected = [('1x4', 256, 0.3, 2), ('2x4', 512, 0.15, 3)]
    assert planned(splits=SPLITS[:2], table=table) == expected
    with pytest.raises(ConfigError, match='no line for a global batch of 2048'):
        planned(table=table)
    with pytest.raises(ConfigError, match='expected: global_batch base_lr warmup_epochs'):
        parse_lr_table('256 0.1')


def test_indivisible_batch_is_refused():
    with pytest.raises(ConfigError, match='expected a multiple of 3x1 = 3 ranks'):
        planned(64, [(1, 1), (3, 1)], is_weak=False)
    with pytest.raises(ConfigError, match='multiple of the 3 ranks'):
        planned(64, [(3, 1), (6, 1)])
    with pytest.raises(ConfigError, match='multiple of 1x32 = 32 ranks and 4 passes'):
        planned(64, [(1, 8), (1, 32)], is_weak=False, num_passes=4)
    with pytest.raises(ConfigError, match='8 ranks and 4 passes of each$'):
        planned(16, [(1, 8)], num_passes=4)


@pytest.mark.parametrize(
    'text, message',
    [
        ('4', 'got 4, expected nodes x ranks'),
        ('0x4', 'expected nodes x ranks'),
        ('2x4x1', 'expected nodes x ranks'),
        (', ', 'got nothing, expected nodes x ranks'),
    ],
)
def test_invalid_layouts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_layouts(text)


@pytest.mark.parametrize(
    'options, message',
    json_table("""
"1x1,4x1 --hosts h1,h2"            | "got 4x1 with 2 hosts"
"1x1 --hosts "                     | "--hosts"
"1x1 --hostfile "                  | "--hostfile: got an empty"
"1x1 --lr-table "                  | "--lr-table: got an empty"
"1x4,2x8 --hosts h1:4,h2:4"        | "h1: got 8 ranks, expected 4"
"2x1 --hostfile hosts"             | "got 2x1 with 1 host"
"1x1 --seeds 2 --run.seed 7"       | "--seeds 2"
"1x1 --seeds 2 --config seed.yaml" | "run.seed: got 7"
"1x1 --seeds 2 --run.seed=7"       | "run.seed: got 7"
"1x1 --run.dir logs/other"         | "--run.dir: not allowed in a sweep"
"1x1 --run.num_nodes=2"            | "--run.num_nodes: not allowed in a sweep"
"1x1 --train.gradient_accumulation_steps 4" | "--train.gradient_accumulation_steps: layouts"
"""),
)
def test_sweeps_that_would_fail_later_are_refused_before_the_first_run(
    tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    config = 'train: {global_batch_size: 64}'
    write_files(
        tmp_path, {'hosts': 'h1', 'c.yaml': config, 'seed.yaml': f'run: {{seed: 7}}\n{config}'}
    )
    words = f'sweep --study none --config c.yaml --layouts {options}'
    done = call(*words.split(' '))
    assert_one_line(done, message)
