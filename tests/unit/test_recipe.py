"""Published recipes: choice by batch, interpolation, and deviations of a configuration."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import yaml
from helpers import HISTORY, ROOT, call

import mlperf_rn50
from mlperf_rn50.analysis.recipe import choose
from mlperf_rn50.analysis.recipe.differences import find_deviations, find_followed
from mlperf_rn50.analysis.recipe.tables import render_config
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config_file import resolve_config
from mlperf_rn50.data.images import JPEG_QUALITY
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.mllog.run import Evaluation
from mlperf_rn50.train.plan import config_world_size

PARSER = config_parser('train')
SETS = {s.name: s for s in load_published('open')}
GOOD = SETS['gx_V100x8_fjmxnet']
HIGH = {'schedule': {'base_lr': 99.0}}
CONVERGED = 'similar batches that reached 75.9 %'
# The learning rate of a v0.5 DGX-1 with another schedule, on two nodes of four accelerators.
CASE = {
    'run': {'num_nodes': 2, 'ranks_per_node': 4},
    'optimizer': {'name': 'sgd'},
    'schedule': {'base_lr': 0.6, 'warmup_epochs': 5, 'decay': 'poly', 'decay_epochs': 100},
    'data': {'decoder': 'mixed'},
    'model': {'layout': 'NHWC'},
    'train': {'device': 'gpu', 'precision': 'float16', 'local_batch_size': 208, 'eval_offset': 2},
}


def config_of(folder: Path, tree) -> Path:
    path = folder / 'case.yaml'
    path.write_text(yaml.safe_dump(tree))
    return path


def changed(**sections):
    """Return the configuration of the v0.6 DGX-1 recipe with some values changed."""
    published = choose.make_config(
        choose.choose_recipe(1664, sets=[s for s in load_published() if s.round == 'v0.6'])
    )
    return replace(
        published,
        **{name: replace(getattr(published, name), **keys) for name, keys in sections.items()},
    )


def test_equal_recipes_are_folded_with_all_their_systems():
    recipes = choose.group(load_published())
    assert sum(len(p.sets) for p in recipes) == len(load_published())
    assert len({(p.recipe, p.generation) for p in recipes}) == len(recipes)
    most = max(recipes, key=lambda p: len(p.sets))
    assert (most.recipe.global_batch_size, most.recipe.base_lr, most.recipe.decay_epochs) == (
        3264,
        10.5,
        37,
    )
    assert len(most.sets) > 40 and most.rounds == 'v0.7, v1.0, v1.1, v2.0, v2.1, v3.0'
    assert most.unlogged == {'label_smoothing'} and most.is_whole
    assert most.generation == 'v0.7 and later'


def test_lower_target_counts_epochs_until_each_run_reached_it():
    run = SETS['dgx1_ngc19.05_mxnet'].runs[0]
    assert (
        choose.reached_epoch(run, 0.759) == run.epochs_to_converge == 60
        and choose.reached_epoch(run, 0.99) is None
    )
    low, high = (choose.group([SETS['dgx1_ngc19.05_mxnet']], target=t)[0] for t in (0.749, None))
    assert low.epochs == (52, 52, 56, 56, 56) and high.epochs == (56, 60, 60, 60, 60)
    old = [SETS['dgx1_ngc18.11_mxnet']]  # runs with target 74.9 % that ended above 75 %
    assert choose.group(old, target=0.75) == [] != choose.group(old, target=0.749)
    aborted = [SETS['nf5488a5_mxnet']]
    assert [len(choose.group(aborted, target=t)[0].epochs) for t in (0.759, 0.749)] == [4, 5]


@pytest.mark.parametrize(
    'batch, opt_name, target, lr, epochs, source_batch',
    [
        (1664, None, None, 7.4, 35, 1664),
        (1664, None, 0.749, 7.4, 31, 1664),
        (1664, 'sgd', None, 3, 40, 1664),
        (1024, None, None, 5.05, 35, 1024),
        (16384, None, None, 22, 47, 16384),
        (20480, None, None, 22, 50, 20480),
        # rather than the 55 epochs at 1,000
        (13056, None, None, 20, 45, 13056),
        (1000, None, None, 5.05, 35, 1024),
        (3328, 'lars', None, 11, 35, 3264),
    ],
)  # 2 % below, rather than 60 epochs of an older round
def test_published_recipe_of_a_batch_is_chosen(batch, opt_name, target, lr, epochs, source_batch):
    choice = choose.choose_recipe(batch, opt_name, target)
    assert choice.kind == 'known' and choice.recipe.base_lr == lr and round(choice.epochs) == epochs
    assert (
        choice.sources[0].recipe.global_batch_size == source_batch
        and choice.recipe.global_batch_size == batch
    )
    assert (
        choice.recipe.target_accuracy
        == choice.target
        == (target or choice.sources[0].recipe.target_accuracy)
    )


def altered(base_lr, epochs=35, batch=1664, failed=0):
    """Return a published set with other learning rate and epochs; `failed` of its five runs miss
    the target."""
    curves = [
        [Evaluation(epochs, 0.5 if k < failed else 0.76, 0, None, None, None)]
        for k in range(len(GOOD.runs))
    ]
    recipe = replace(GOOD.recipe, base_lr=base_lr, global_batch_size=batch)
    return replace(
        GOOD,
        runs=tuple(replace(r, evaluations=c) for r, c in zip(GOOD.runs, curves)),
        unlogged=vars(recipe),
    )


@pytest.mark.parametrize(
    'batch, sets, base_lr',
    [
        # a reliable recipe of a nearby batch is preferred
        (1664, [altered(9.0, failed=1), altered(8.0, batch=1632)], 8.0),
        # of reliable recipes, the one with the exact batch
        (1664, [altered(7.4), altered(8.0, batch=1632)], 7.4),
        # 4 of 5 runs at the exact batch are too few
        (1632, [altered(5.0, batch=1632, failed=1), altered(7.4)], 7.4),
        # the shorter recipe, even if it has fewer runs
        (1664, [altered(5.0, 38), altered(5.0, 38), altered(7.4)], 7.4),
        (1664, [altered(5.0, 38), altered(7.4, batch=1632)], 7.4),  # even at a nearby batch
        # of equal epochs, the recipe with more runs
        (1664, [altered(5.0), altered(7.4), altered(7.4)], 7.4),
    ],
)
def test_reliable_then_shortest_then_nearest_recipe_is_chosen(batch, sets, base_lr):
    assert choose.choose_recipe(batch, sets=sets).recipe.base_lr == base_lr


@pytest.mark.needs_history
def test_recipe_has_the_fewest_epochs_of_all_rounds():
    """Compare with a list that another program made from the logs; it includes a set of the open
    division at 1,664."""
    sets = load_published('open')
    with open(HISTORY / 'recipes_fewest_epochs.csv', newline='', encoding='utf-8') as f:
        rows = [(int(r['global_batch']), float(r['mean_epochs'])) for r in csv.DictReader(f)]
    fewest = {
        batch: min(
            (fmean(e) for s in sets if s.global_batch_size == batch and (e := s.epochs)),
            default=None,
        )
        for batch, _ in rows
    }
    assert {b: round(e, 1) for b, e in fewest.items()} == dict(rows)
    longer = {
        b: (e, c.epochs)
        for b, e in rows
        if (c := choose.choose_recipe(b, sets=sets)).epochs > e + 0.5
    }
    assert longer == {}


def test_interpolated_rate_is_log_linear_and_epochs_are_on_the_grid():
    choice = choose.choose_recipe(2611, 'sgd', 0.749)  # the square root of 1,664 x 4,096
    assert choice.kind == 'between' and choice.recipe.base_lr == pytest.approx(
        (0.6 * 1.8) ** 0.5, rel=0.002
    )
    assert choice.recipe.warmup_epochs == round(5 + 3 * (2611 - 1664) / (4096 - 1664), 1)
    assert (
        choice.recipe.step_epochs == (30, 60, 80)
        and choice.epochs_range == (63, 64)
        and choice.epochs in (63, 64)
    )
    assert 'between' in choice.source_text and (choice.num_converged, choice.num_runs) == (15, 15)
    choice = choose.choose_recipe(10_000, 'lars')
    r = choice.recipe
    assert (r.decay_epochs, r.weight_decay, r.momentum) == (46, 2.5e-5, 0.9)
    assert (
        choice.epochs - r.first_eval_epoch
    ) % r.eval_period == 0 and choice.epochs <= r.last_eval_epoch


@pytest.mark.parametrize(
    'batch, opt_name, target, sets, message',
    [
        (256, None, None, None, 'lars of v0.6 1,664 to 59,904'),
        (1_000_000, 'lars', 0.759, None, 'got 1,000,000 (lars, 75.9 %)'),
        (1664, None, 0.8, None, 'there are none'),
        # its logs lack the end of the schedule
        (4096, None, None, [SETS['1-node-8s-cpx-2-mxnet']], 'there are none'),
    ],
)
def test_batch_outside_the_published_range_is_refused(batch, opt_name, target, sets, message):
    with pytest.raises(ConfigError, match=r'global batch: got [\d,]+ .*expected a batch') as e:
        choose.choose_recipe(batch, opt_name, target, sets)
    assert message in str(e.value)


def test_interpolation_errors_match_the_documentation():
    """Compare each published recipe with an interpolation between its neighbours in the same
    family."""
    page, pairs = (ROOT / 'docs/recipes.md').read_text(), []
    for family in choose.families(choose.group(load_published())):
        edge = choose.frontier(family)
        pairs += [
            (p, choose.interpolate(low, high, p.recipe.global_batch_size))
            for low, p, high in zip(edge, edge[1:], edge[2:])
        ]
    rows = [
        f'| {p.recipe.global_batch_size:,} | {p.recipe.base_lr:g} | {c.recipe.base_lr:g} '
        f'| {p.recipe.warmup_epochs:g} | {c.recipe.warmup_epochs:g} | {p.mean_epochs:.3g} | '
        f'{c.epochs:.3g} |'
        for p, c in pairs
        if p.recipe.global_batch_size > 4096 and p.generation == 'v0.7 and later'
    ]
    assert len(rows) == 10 and not [row for row in rows if row not in page]
    rates = [100 * abs(c.recipe.base_lr / p.recipe.base_lr - 1) for p, c in pairs]
    epochs = [100 * abs(c.epochs / p.mean_epochs - 1) for p, c in pairs]
    assert (
        f'{len(pairs)} recipes, the median and the worst error are {median(rates):.1f} % and '
        f'{max(rates):.0f} %' in ' '.join(page.split())
    )
    assert f'and {max(epochs):.0f} % for the epochs' in ' '.join(page.split())


@pytest.mark.parametrize(
    'name, round_name, batch, opt_name, target',
    [
        ('dgx1_v05', 'v0.5', 1664, 'sgd', 0.749),
        ('dgx2_v05', 'v0.5', 4096, 'sgd', 0.749),
        ('dgx1_v07', 'v0.7', 1664, 'lars', 0.759),
        ('dgxa100_v07', 'v0.7', 3264, 'sgd', 0.759),
        ('dgxa100_v10_8node', 'v1.0', 13056, 'lars', 0.759),
    ],
)
def test_recipe_matches_the_stored_configuration_of_the_system(
    name, round_name, batch, opt_name, target
):
    kept = resolve_config(ROOT / f'launch/configs/{name}.yaml', [], PARSER)
    choice = choose.choose_recipe(
        batch, opt_name, target, [s for s in load_published() if s.round == round_name]
    )
    written = choose.make_config(choice, kept.run.num_nodes, kept.run.ranks_per_node)
    assert (
        written.schedule == kept.schedule
        and written.optimizer == kept.optimizer
        and written.model == kept.model
    )
    # Options of data throughput belong to the system, not to the recipe.
    system_keys = {
        key: getattr(written.data, key)
        for key in (
            'prefetch_depth',
            'device_memory_padding_mib',
            'host_memory_padding_mib',
            'preallocate_width_hint',
            'preallocate_height_hint',
            'decoded_bytes_hint',
        )
    }
    assert written.data == replace(kept.data, **system_keys)
    assert written.train == replace(
        kept.train,
        local_batch_size=None,
        global_batch_size=batch,
        eval_offset=written.train.eval_offset,
    )


@pytest.mark.parametrize(
    'sections, texts',
    [
        (
            {'schedule': {'base_lr': 12.0}},
            ['schedule.base_lr: got 12 ', '(v0.6)', '5 at 1,664', CONVERGED],
        ),
        (
            {'schedule': {'decay_epochs': 90.0}},
            ['schedule.decay_epochs: got 90 ', '(v0.6)', '72 at 1,664', CONVERGED],
        ),
        (
            {'schedule': {'decay': 'cosine'}},
            ['schedule.decay: got cosine (72 epochs)', 'poly (72 epochs) at', CONVERGED],
        ),
        (
            {'train': {'global_batch_size': 3264}},
            ['schedule.base_lr: got 5 at batch 3,264', 'have 10 at 3,328', CONVERGED],
        ),
        (
            {'schedule': {'warmup_epochs': 2.0}},  # a mixture of recipes
            ['schedule.warmup_epochs: got 2 ', '(v0.6)', 'have 5 at 1,664'],
        ),
        (
            {'train': {'global_batch_size': 9_000}},
            ['got 9,000; no published lars set', 'recipe is not compared'],
        ),
        # scaled with the batch
        ({}, None),
        ({'train': {'global_batch_size': 1536}, 'schedule': {'base_lr': 4.62}}, None),
        ({'data': {'dataset': 'digits'}, **HIGH}, None),
        ({'data': {'num_train': 1000}, **HIGH}, None),
        ({'data': {'synthetic': True}, **HIGH}, None),
        ({'model': {'name': 'resnet18'}, **HIGH}, None),
    ],
)
def test_deviation_is_one_line_with_both_values(sections, texts):
    """Published values, and runs other than ResNet-50 on ImageNet, have no deviation."""
    lines = find_deviations(changed(**sections), None)
    assert len(lines) == bool(texts) and all(text in lines[0] for text in texts or ())


def test_manifest_describes_the_stored_images(tmp_path):
    manifest = tmp_path / 'manifest.json'
    path = config_of(tmp_path, {**CASE, 'data': {'dir': str(tmp_path)}})
    smaller = f'to 256 pixels on the shorter side, as JPEG of quality {JPEG_QUALITY}'
    for content, message in (
        ('{"resize_shorter": null}', 'byte for byte'),
        ('{"resize_shorter": 256}', smaller),
        ('[]', 'is not a manifest'),
        ('{"resize_shorter": "\\u001b[31mred"}', '?[31mred'),
    ):
        manifest.write_text(content)
        out = call('recipe', '--compare', path).stdout
        assert message in out and '\x1b' not in out
    manifest.unlink()
    os.mkfifo(manifest)  # must not block
    assert 'is not a manifest written by prepare' in call('recipe', '--compare', path).stdout


def test_command_writes_a_file_that_a_dry_run_accepts(tmp_path):
    out = tmp_path / 'f.yaml'
    done = call(
        'recipe', '--global-batch-size', 1664, '--nodes', 2, '--ranks-per-node', 4, '--out', out
    )
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.startswith(
        '# mlperf-rn50 recipe --global-batch-size 1664 --nodes 2 --ranks-per-node 4 --out '
    )
    assert (
        'Expected: 35 epochs' in text
        and 'DellEMC' in text
        and 'lars_eta' not in text
        and 'momentum' not in text
    )
    config = choose.make_config(choose.choose_recipe(1664), 2, 4)
    assert resolve_config(out, [], PARSER) == config and config.train.eval_offset == 2
    assert render_config(config, ['a\x1b[31m', 'b']).startswith('# a?[31m\n# b\n')
    done = call('train', '--config', out, '--dry-run')
    assert (
        done.returncode == 0
        and 'ranks                 8\n' in done.stdout
        and 'warning' not in done.stdout
    )
    report = json.loads(call('recipe', 1664, '--format', 'json').stdout)
    assert report['choice']['num_sets'] == 2
    assert (
        report['choice']['kind'] == 'known'
        and report['is_at_batch']
        and report['comparison'] is None
    )
    assert (
        report['choice']['recipe']['base_lr'] == 7.4
        and len(report['choice']['sources'][0]['systems']) > 1
    )
    again = call('recipe', '--global-batch-size', 3264, '--out', out)
    assert again.returncode == 2 and 'exists already' in again.stderr and out.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ['f.yaml']


@pytest.mark.parametrize(
    'words, text, message',
    [
        ([], '', 'N: missing; for example'),
        (['--global-batch-size', 100], '', '100'),
        (['--global-batch-size', 1664, '--nodes', 2], '', '--ranks-per-node'),
        ([8, '--global-batch-size', 8], '', 'got both'),
        (
            ['--global-batch-size', 1664, '--nodes', 3, '--ranks-per-node', 3],
            '',
            'a multiple of 9, such as 1665',
        ),
        (['--global-batch-size', 1664, '--out', '/proc/none/f.yaml'], '', '/proc/none/f.yaml'),
        (['--out', 'x'], '{}', '--out'),
        (
            ['--global-batch-size', 5],
            'train: {global_batch_size: 1664}',
            '--global-batch-size: got 5',
        ),
        # unknown number of ranks
        ([], 'train: {local_batch_size: 208}', 'give --nodes and --ranks-per-node'),
        ([], 'schedule: {warmup_epochs: null}', 'schedule.warmup_epochs: got null'),
        (
            [],
            'run: {num_nodes: ' + '9' * 400 + '}',
            'run.num_nodes: got a number with 400 digits, expected at most 18',
        ),
    ],
)
def test_invalid_arguments_are_a_one_line_error(tmp_path, words, text, message):
    """`text` is the configuration to compare with."""
    path = tmp_path / 'c.yaml'
    path.write_text(text)
    done = call('recipe', *words, *(['--compare', path] if text else []))
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.count('\n') == 1
    assert message in done.stderr


def test_command_reports_the_same_deviation_as_train(tmp_path):
    path = config_of(tmp_path, CASE)
    report = json.loads(call('recipe', '--compare', path, '--format', 'json').stdout)
    assert (
        report['choice'] is None
        and len(report['deviations']) == 1
        and report['version'] == mlperf_rn50.__version__
    )
    assert {row['key'] for row in report['comparison'] if row['is_alone']} == {
        'data.last_batch',
        'schedule.decay_epochs',
    }
    lines = [
        ' '.join(line.split()) for line in call('recipe', '--compare', path).stdout.splitlines()
    ]
    assert 'B 1,664 v0.5 nvidia dgx1_ngc18.11_mxnet 1x8 74.9 % 63 63 63 63 63 5 of 5' in lines
    for row in (
        'schedule.base_lr 0.6 3 0.6',
        'schedule.warmup_epochs 5 3 5†',
        'schedule.decay poly poly step†',
        'schedule.decay_epochs 100 * 42 100†',
        'schedule.step_epochs - - 30 60 80†',
        'optimizer.decay_bn_and_bias false ? ?',
        'data.min_area 0.05 0.05†',
    ):
        assert any(line.startswith(row) for line in lines), row
    dgx1 = json.loads(
        call(
            'recipe', '--compare', ROOT / 'launch/configs/dgx1_v05.yaml', '--format', 'json'
        ).stdout
    )
    # also steps
    assert not any(
        row['is_alone'] for row in dgx1['comparison'] if row['key'].startswith('schedule')
    )
    warning, _ = call('train', '--config', path, '--dry-run').stdout.splitlines()[-2:]
    assert warning == f'warning: {report["deviations"][0]}'
    assert warning.startswith('warning: schedule.decay: got poly (100 epochs)')
    assert 'have step (30 60 80 epochs) at 1,664' in warning


@pytest.mark.parametrize(
    'name, batches',
    [
        ('c4140_v100_1node', {1664}),
        ('c4140_v100_4node', {1664, 4096}),
        ('c4140_v100_8node', {4096, 16384, 16640}),
        ('dgx2_v05', {4096}),
    ],
)
def test_learning_rate_scaled_from_published_batches_has_no_deviation(name, batches):
    config = resolve_config(ROOT / f'launch/configs/{name}.yaml', [], PARSER)
    ranks = config_world_size(config)
    followed = find_followed(config, ranks)
    assert (
        find_deviations(config, ranks) == []
        and {p.recipe.global_batch_size for p in followed} == batches
    )
    unscaled = replace(
        config, schedule=replace(config.schedule, base_lr=5 * config.schedule.base_lr)
    )
    assert find_followed(unscaled, ranks) == [] != find_deviations(unscaled, ranks)


@pytest.mark.parametrize(
    'config',
    [choose.make_config(choose.choose_recipe(b, 'lars', 0.759)) for b in (1750, 2500, 3500, 5000)]
    + [
        choose.make_config(choose.choose_recipe(p.recipe.global_batch_size, sets=p.sets))
        for p in choose.group(load_published())
        if p.is_whole
    ],
)
def test_published_and_interpolated_recipes_have_no_deviation(config):
    assert find_deviations(config, None) == []
