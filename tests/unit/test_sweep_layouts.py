"""Sweep layouts: batch size and learning rate."""

import pytest
from helpers import argv, call

from mlperf_rn50.errors import ConfigError
from mlperf_rn50.launch.sweep_layouts import parse_layouts, parse_lr_table, plan_layouts

SPLITS = [(1, 4), (2, 4), (8, 4)]


def numbers(layouts):
    return [(x.name, x.global_batch_size, x.base_lr, x.warmup_epochs) for x in layouts]


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_local_one():
    assert numbers(plan_layouts(SPLITS, 256, False, False, 0.1, 5, None)) == [
        ('1x4', 256, 0.1, 5),
        ('2x4', 256, 0.1, 5),
        ('8x4', 256, 0.1, 5),
    ]
    for batch_size, is_local in ((256, False), (64, True)):
        assert numbers(plan_layouts(SPLITS, batch_size, is_local, True, 0.1, 5, None)) == [
            ('1x4', 256, 0.1, 5),
            ('2x4', 512, 0.2, 5),
            ('8x4', 2048, 0.8, 5),
        ]


def test_table_gives_learning_rate_and_warm_up():
    table = parse_lr_table('# batch rate warm-up\n256 0.1 2\n512 0.15 3  # tuned\n')
    assert numbers(plan_layouts(SPLITS[:2], 256, False, True, 9.0, 9, table)) == [
        ('1x4', 256, 0.1, 2),
        ('2x4', 512, 0.15, 3),
    ]
    with pytest.raises(ConfigError, match='no line for a global batch of 2048'):
        plan_layouts(SPLITS, 256, False, True, 9.0, 9, table)
    with pytest.raises(ConfigError, match='expected: global_batch base_lr warmup_epochs'):
        parse_lr_table('256 0.1')


def test_indivisible_batch_is_refused():
    with pytest.raises(ConfigError, match='expected a multiple of 3x1 = 3 ranks'):
        plan_layouts([(1, 1), (3, 1)], 64, False, False, 0.1, 5, None)
    with pytest.raises(ConfigError, match='multiple of the 3 ranks'):
        plan_layouts([(3, 1), (6, 1)], 64, False, True, 0.1, 5, None)


@pytest.mark.parametrize(
    'text, per_node, layouts',
    [
        ('1x4 2x4', None, [(1, 4), (2, 4)]),
        ('1x4,2x4,', None, [(1, 4), (2, 4)]),
        ('16', 8, [(16, 8)]),
        ('1, 2x4 1x8', 8, [(1, 8), (2, 4)]),
        ('2', 0, [(2, 0)]),
    ],
)
def test_layouts_are_separated_by_spaces_or_commas(text, per_node, layouts):
    assert parse_layouts(text, per_node) == layouts


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
    [
        (['--layouts', '1x1 4x1', '--hosts', 'h1,h2'], 'got 4x1 with 2 hosts'),
        (['--layouts', '1x1', '--hosts', ''], '--hosts'),
        ('--layouts 2x1 --hostfile {folder}/hosts'.split(), 'got 2x1 with 1 host'),
        ('--layouts 1x1 --seeds 2 --run.seed 7'.split(), '--seeds 2'),
        ('--layouts 1x1 --seeds 2 --config {folder}/seed.yaml'.split(), 'run.seed: got 7'),
    ],
)
def test_sweeps_that_would_fail_later_are_refused_before_the_first_run(tmp_path, options, message):
    (tmp_path / 'hosts').write_text('h1\n')
    (tmp_path / 'seed.yaml').write_text('run: {seed: 7}\ntrain: {global_batch_size: 64}\n')
    (tmp_path / 'c.yaml').write_text('train: {global_batch_size: 64}\n')
    done = call(
        *argv('sweep --study none --config {}', tmp_path / 'c.yaml'),
        *(word.format(folder=tmp_path) for word in options),
    )
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
