"""Published recipes: choice by batch, interpolation, files, and deviations of a configuration.

tests/answers has whole outputs of the command.
"""

import json
import os
import re
from dataclasses import replace
from statistics import median

import pytest
from helpers import ROOT, call, json_table

from mlperf_rn50.analysis.recipe import choose
from mlperf_rn50.analysis.recipe.differences import find_deviations, find_followed
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config_file import resolve_config
from mlperf_rn50.data.images import JPEG_QUALITY
from mlperf_rn50.mllog.logged_run import Evaluation

SETS = {s.name: s for s in load_published('open')}
GOOD = SETS['gx_V100x8_fjmxnet']


def load(path):
    return resolve_config(path, [], config_parser('train'))


def of_round(name):
    return [s for s in load_published() if s.round == name]


def changed(**sections):
    """Return the configuration of the v0.6 DGX-1 recipe with some values changed."""
    config = choose.make_config(choose.choose_recipe(1664, sets=of_round('v0.6')))
    sections = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **sections)


def test_lower_target_counts_epochs_until_each_run_reached_it():
    dgx1 = SETS['dgx1_ngc19.05_mxnet']
    assert choose.reached_epoch(dgx1.runs[0], 0.759) == 60
    assert choose.reached_epoch(dgx1.runs[0], 0.99) is None
    for name, target, epochs in (
        ('dgx1_ngc19.05_mxnet', 0.749, [52, 52, 56, 56, 56]),
        ('dgx1_ngc19.05_mxnet', None, [56, 60, 60, 60, 60]),
        # runs with target 74.9 % that ended above 75 %
        ('dgx1_ngc18.11_mxnet', 0.75, []),
    ):
        found = choose.group([SETS[name]], target=target)
        assert [e for p in found for e in p.epochs] == epochs
    assert choose.group([SETS['dgx1_ngc18.11_mxnet']], target=0.749)
    aborted = [SETS['nf5488a5_mxnet']]
    assert [len(choose.group(aborted, target=t)[0].epochs) for t in (0.759, 0.749)] == [4, 5]


def altered(base_lr, epochs=35, batch=1664, failed=0):
    """Return a published set with other learning rate and epochs; `failed` of its five runs miss
    the target."""
    runs = tuple(
        replace(r, evaluations=[Evaluation(epochs, 0.5 if k < failed else 0.76, 0, *[None] * 3)])
        for k, r in enumerate(GOOD.runs)
    )
    recipe = replace(GOOD.recipe, base_lr=base_lr, global_batch_size=batch)
    return replace(GOOD, runs=runs, unlogged=vars(recipe))


# sets: learning rate, and what else differs
@pytest.mark.parametrize(
    'batch, sets, base_lr',
    json_table("""
# a reliable recipe of a nearby batch is preferred
1664 | [[9.0, {"failed": 1}], [8.0, {"batch": 1632}]]               | 8.0
# of reliable recipes, the one with the exact batch
1664 | [[7.4, {}], [8.0, {"batch": 1632}]]                          | 7.4
# 4 of 5 runs at the exact batch are too few
1632 | [[5.0, {"batch": 1632, "failed": 1}], [7.4, {}]]             | 7.4
# the shorter recipe, even if it has fewer runs
1664 | [[5.0, {"epochs": 38}], [5.0, {"epochs": 38}], [7.4, {}]]    | 7.4
1664 | [[5.0, {"epochs": 38}], [7.4, {"batch": 1632}]]              | 7.4  # even at a nearby batch
# of equal epochs, the recipe with more runs
1664 | [[5.0, {}], [7.4, {}], [7.4, {}]]                            | 7.4
"""),
)
def test_reliable_then_shortest_then_nearest_recipe_is_chosen(batch, sets, base_lr):
    sets = [altered(rate, **keys) for rate, keys in sets]
    assert choose.choose_recipe(batch, sets=sets).recipe.base_lr == base_lr


@pytest.mark.parametrize('batch, target', [(1296, 0.759), (2500, 0.749)])
def test_neighbour_with_slightly_more_epochs_than_a_larger_batch_is_not_dropped(batch, target):
    choice = choose.choose_recipe(batch, 'sgd', target)
    assert choice.kind == 'between' and 37 < choice.epochs < 42
    below, above = choice.sources
    assert below.batch < batch < above.batch


def test_interpolation_errors_match_the_documentation():
    """Compare each published recipe with an interpolation between its neighbours in the same
    family."""
    page, pairs = ' '.join((ROOT / 'docs/recipes.md').read_text().split()), []
    for family in choose.families(choose.group(load_published())):
        edge = choose.frontier(family)
        for low, p, high in zip(edge, edge[1:], edge[2:]):
            pairs.append((p, choose.interpolate(low, high, p.batch)))
    shown = [x for x in pairs if 4096 < x[0].batch <= 20480 and x[0].generation == 'v0.7 and later']
    assert len(shown) == 4
    for p, c in shown:
        a, b = p.recipe, c.recipe
        rates = f'{a.base_lr:g} | {b.base_lr:g} | {a.warmup_epochs:g} | {b.warmup_epochs:g}'
        assert f'| {p.batch:,} | {rates} | {p.mean_epochs:.3g} | {c.epochs:.3g} |' in page
    rates = [100 * abs(c.recipe.base_lr / p.recipe.base_lr - 1) for p, c in pairs]
    text = f'{len(pairs)} recipes, the median and the worst error are {median(rates):.1f} % and'
    assert f'{text} {max(rates):.0f} %' in page
    most = max(abs(c.epochs / p.mean_epochs - 1) for p, c in pairs)
    assert f'and {100 * most:.0f} % for the epochs' in page


@pytest.mark.parametrize(
    'name, batch, opt_name, target',
    json_table("""
"dgx1_v05"          | 1664  | "sgd"  | 0.749
"dgx2_v05"          | 4096  | "sgd"  | 0.749
"dgx1_v07"          | 1664  | "lars" | 0.759
"dgxa100_v07"       | 3264  | "sgd"  | 0.759
"dgxa100_v10_8node" | 13056 | "lars" | 0.759
"""),
)
def test_recipe_matches_the_stored_configuration_of_the_system(name, batch, opt_name, target):
    kept = load(ROOT / f'launch/configs/{name}.yaml')
    round_name = re.sub(r'.*_v(\d)(\d).*', r'v\1.\2', name)
    choice = choose.choose_recipe(batch, opt_name, target, of_round(round_name))
    written = choose.make_config(choice, kept.run.num_nodes, kept.run.ranks_per_node)
    for section in ('schedule', 'optimizer', 'model'):
        assert getattr(written, section) == getattr(kept, section)
    # Options of data throughput belong to the system, not to the recipe.
    keys = """prefetch_depth device_memory_padding_mib host_memory_padding_mib
        preallocate_width_hint preallocate_height_hint decoded_bytes_hint""".split()
    assert written.data == replace(kept.data, **{k: getattr(written.data, k) for k in keys})
    facts = {'global_batch_size': batch, 'eval_offset': written.train.eval_offset}
    assert written.train == replace(kept.train, local_batch_size=None, **facts)


@pytest.mark.parametrize(
    'sections, texts',
    json_table("""
{"schedule": {"base_lr": 12.0}}        | ["base_lr: got 12 ", "(v0.6)", "5 at 1,664", "reached"]
{"schedule": {"decay_epochs": 90.0}}   | ["decay_epochs: got 90 ", "72 at 1,664", "reached"]
{"schedule": {"decay": "cosine"}}      | ["decay: got cosine (72 epochs)", "poly (72 epochs) at"]
{"train": {"global_batch_size": 3264}} | ["base_lr: got 5 at batch 3,264", "have 10 at 3,328"]
{"schedule": {"poly_power": 1.0}}      | ["poly_power: got 1 ", "2 at 1,664"]
# a mixture of recipes
{"schedule": {"warmup_epochs": 2.0}}   | ["warmup_epochs: got 2 ", "(v0.6)", "5 at 1,664"]
{"train": {"global_batch_size": 9000}} | ["got 9,000; no published lars set"]
{}                                     | []
# scaled with the batch
{"train": {"global_batch_size": 1536}, "schedule": {"base_lr": 4.62}} | []
{"schedule": {"base_lr": 99.0}, "data": {"dataset": "digits"}}        | []
{"schedule": {"base_lr": 99.0}, "data": {"num_train": 1000}}          | []
{"schedule": {"base_lr": 99.0}, "data": {"synthetic": true}}          | []
{"schedule": {"base_lr": 99.0}, "model": {"name": "resnet18"}}        | []
"""),
)
def test_deviation_is_one_line_with_both_values(sections, texts):
    """Published values, and runs other than ResNet-50 on ImageNet, have no deviation."""
    lines = find_deviations(changed(**sections), None)
    assert len(lines) == bool(texts) and all(text in lines[0] for text in texts)


def test_step_factor_that_no_published_run_had_is_a_deviation():
    config = load(ROOT / 'launch/configs/dgx1_v05.yaml')
    assert find_deviations(config, 8) == []
    flat = replace(config, schedule=replace(config.schedule, step_factor=0.9))
    [line] = find_deviations(flat, 8)
    assert 'step_factor: got 0.9 ' in line and '0.1' in line
    both = replace(flat, schedule=replace(flat.schedule, step_epochs=(20.0, 40.0)))
    epochs, factor = find_deviations(both, 8)
    assert 'step_epochs: got ' in epochs and 'step_factor: got ' in factor


def test_manifest_describes_the_stored_images(tmp_path):
    case, manifest = tmp_path / 'case.yaml', tmp_path / 'manifest.json'
    text = (ROOT / 'tests/answers/schedule.yaml').read_text()
    case.write_text(text.replace('dir: absent', f'dir: {tmp_path}'))
    splits = {name: {'num_images': 1664, 'rec_bytes': 1} for name in ('train', 'validation')}
    content = {'format': 1, 'dataset': 'imagenet', 'classes': ['a', 'b'], 'splits': splits}
    invalid = 'is not a manifest written by prepare'
    for size, message in (
        (None, 'that of their source, which prepare has not changed'),
        (256, f'to 256 pixels on the shorter side, as JPEG of quality {JPEG_QUALITY}'),
        ('\x1b[31mred' * 9, 'to ?[31mred?[ pixels'),
        ('no manifest', invalid),
        ('pipe', invalid),  # must not block
    ):
        manifest.write_text(
            '[]' if size == 'no manifest' else json.dumps({**content, 'resize_shorter': size})
        )
        if size == 'pipe':
            manifest.unlink()
            os.mkfifo(manifest)
        out = call('recipe', '--compare', case).stdout
        assert '\x1b' not in out and message in out.partition('This configuration: ')[2]


def test_command_writes_a_file_that_a_dry_run_accepts(tmp_path):
    out = tmp_path / 'f.yaml'
    done = call('recipe', 1664, '--nodes', 2, '--ranks-per-node', 4, '--out', out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    command, run, source, *others = [x for x in text.splitlines() if x.startswith('#')]
    assert command == f'# mlperf-rn50 recipe 1664 --nodes 2 --ranks-per-node 4 --out {out}'
    assert run.startswith('# 2 nodes with 4 ranks each, ImageNet, Top-1 75.9 %, batch 1,664, LARS.')
    assert source.startswith('# Known: MLPerf Training, DellEMC')
    assert others == ['# Not logged, from the submitted settings: label_smoothing.']
    config = choose.make_config(choose.choose_recipe(1664), 2, 4)
    assert load(out) == config and config.train.eval_offset == 2
    assert 'lars_eta' not in text and 'momentum' not in text
    done = call('train', '--config', out, '--dry-run')
    assert done.returncode == 0 and 'ranks                 8\n' in done.stdout
    assert 'warning' not in done.stdout
    again = call('recipe', '--global-batch-size', 3264, '--out', out)
    assert again.returncode == 2 and 'exists already' in again.stderr and out.read_text() == text
    assert [*tmp_path.iterdir()] == [out]
    call('recipe', 10_000, '--optimizer', 'lars', '--out', tmp_path / '\x1b[31m.yaml')
    [between] = tmp_path.glob('*31m.yaml')
    text = between.read_text()
    assert text.startswith('# mlperf-rn50 recipe 10000 --optimizer lars --out ')
    assert 'schedule are interpolated; no set' in text and '\x1b' not in text.splitlines()[0]


def test_batch_stands_for_an_unknown_number_of_ranks(tmp_path):
    path = ROOT / 'tests/answers/schedule.yaml'
    text = path.read_text().replace('run: {num_nodes: 2, ranks_per_node: 4}', '')
    (tmp_path / 'c.yaml').write_text(text)
    commands = [path], [tmp_path / 'c.yaml', '--global-batch-size', 1664]
    found = [
        json.loads(call('recipe', '--compare', *words, '--format', 'json').stdout)['deviations']
        for words in commands
    ]
    assert found[0] == found[1] != []


@pytest.mark.parametrize(
    'text, message',
    [
        ('schedule: {warmup_epochs: null}', 'schedule.warmup_epochs: got null'),
        (f'run: {{num_nodes: {"9" * 400}}}', 'got a number with 400 digits, expected at most 18'),
    ],
)
def test_invalid_configuration_is_a_one_line_error(tmp_path, text, message):
    (tmp_path / 'c.yaml').write_text(text)
    done = call('recipe', '--compare', tmp_path / 'c.yaml')
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.count('\n') == 1
    assert message in done.stderr


def test_json_has_the_recipe_or_the_comparison_and_the_deviation_that_train_warns_of():
    report = json.loads(call('recipe', 1664, '--format', 'json').stdout)
    choice = report['choice']
    assert (choice['kind'], choice['num_sets'], choice['recipe']['base_lr']) == ('known', 2, 7.4)
    assert report['is_at_batch'] and report['comparison'] is None
    assert len(choice['sources'][0]['systems']) > 1
    path = ROOT / 'tests/answers/schedule.yaml'
    report = json.loads(call('recipe', '--compare', path, '--format', 'json').stdout)
    alone = {row['key'] for row in report['comparison'] if row['is_alone']}
    assert alone == {'data.last_batch', 'schedule.decay_epochs'} and report['choice'] is None
    [deviation] = report['deviations']
    lines = call('train', '--config', path, '--dry-run').stdout.splitlines()
    assert f'warning: {deviation}' in lines


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
    config = load(ROOT / f'launch/configs/{name}.yaml')
    schedule = replace(config.schedule, base_lr=5 * config.schedule.base_lr)
    for planned, expected in ((config, batches), (replace(config, schedule=schedule), set())):
        ranks = planned.world_size
        assert {p.batch for p in find_followed(planned, ranks)} == expected
        assert (find_deviations(planned, ranks) == []) == bool(expected)


def test_published_and_interpolated_recipes_have_no_deviation():
    choices = [choose.choose_recipe(b, 'lars', 0.759) for b in (1750, 2500, 3500, 5000)]
    for p in choose.group(load_published()):
        if p.is_whole:
            choices.append(choose.choose_recipe(p.batch, sets=p.sets))
    for choice in choices:
        assert find_deviations(choose.make_config(choice), None) == []
