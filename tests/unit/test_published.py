"""Known run sets: recipes from logs of any round, and the table of published systems."""

import csv
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from helpers import HISTORY, PUBLISHED, ROOT, call, json_table
from pytest import approx

from mlperf_rn50.analysis.predict.anchors import base_of
from mlperf_rn50.analysis.sets.load import load_run_sets
from mlperf_rn50.analysis.sets.published import load_published, load_table, sets_under
from mlperf_rn50.analysis.sets.settings import Recipe, eval_grid, make_recipe
from mlperf_rn50.analysis.sets.time_parts import RunTimes, make_times
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN

sys.path.insert(0, str(ROOT / 'docs'))
import make_published  # noqa: E402

V06 = {
    'opt_name': 'lars',
    'lars_opt_base_learning_rate': 5.0,
    'lars_opt_learning_rate_warmup_epochs': 5,
    'lars_opt_learning_rate_decay_steps': 51_657,
    'lars_opt_end_learning_rate': 1e-4,
    'lars_opt_weight_decay': 2e-4,
}
V07 = {
    'opt_name': 'sgd',
    'sgd_opt_base_learning_rate': 6,
    'opt_learning_rate_warmup_epochs': 5,
    'sgd_opt_learning_rate_decay_steps': 42,
    'sgd_opt_learning_rate_decay_poly_power': 2,
    'sgd_opt_momentum': 0.9,
}
CURVE = ((4, 0.3), (8, 0.5), (12, 0.76))


def recipe(optimizer, batch=1664, curves=(CURVE,)):
    return make_recipe(optimizer, batch, IMAGENET_TRAIN, 0.759, curves)


@pytest.mark.parametrize(
    'logged, steps, epochs',
    [
        (V07, 42, 42),
        (V07, 1e9, None),  # implausibly long
        # 769.9 steps are an epoch
        (V06, 51_657, 51_657 / 770 + 5),
        (V06, 200, 200),
        (V06, 201, 201 / 770 + 5),
        ({'opt_name': 'sgd'}, None, None),
    ],
)
def test_end_of_a_schedule_is_in_epochs_or_in_steps_after_the_warm_up(logged, steps, epochs):
    key = f'{logged["opt_name"]}_opt_learning_rate_decay_steps'
    end = recipe(logged | {key: steps}).decay_epochs
    assert end == (epochs and approx(epochs, abs=0.01))
    # For data other than ImageNet the value is in steps; an epoch of digits has 12 steps of batch
    # 128.
    digits = make_recipe(logged | {key: 132}, 128, 1437, None, [])
    assert digits.decay_epochs == 11 + (digits.warmup_epochs or 0)


def test_recipe_uses_the_keys_of_the_optimizer():
    r = recipe({**V06, 'sgd_opt_base_learning_rate': 9, 'opt_momentum': 0.8})
    assert (r.opt_name, r.base_lr, r.warmup_epochs, r.decay) == ('lars', 5, 5, 'poly')
    assert (r.end_lr, r.weight_decay, r.momentum) == (1e-4, 2e-4, 0.8)
    steps = {
        'opt_name': 'sgd',
        'opt_learning_rate': 0.6,
        'model_l2_regularization': 1e-4,
        'opt_learning_rate_decay_boundary_epochs': [30, 60, 80],
        'label_smoothing': 0.1,
    }
    found = Recipe('sgd', 1664, 0.6, decay='step', step_epochs=(30.0, 60.0, 80.0))
    empty = recipe({})
    assert empty == Recipe(None, 1664, target_accuracy=0.759, eval_period=4, first_eval_epoch=4)
    keys = {f.name: v for f in fields(Recipe) if (v := getattr(found, f.name)) is not None}
    assert recipe(steps) == replace(empty, **keys, weight_decay=1e-4, label_smoothing=0.1)


def test_grid_is_the_most_frequent_gap_and_the_first_epoch():
    assert eval_grid([]) == (None, None) and eval_grid([[], [(3, 0.1)]]) == (None, 3)
    assert eval_grid([[(3, 0.1), (7, 0.2), (11, 0.3)], [(7, 0.2), (8, 0.3)]]) == (4, 3)


@pytest.mark.parametrize(
    'end, first, period, last',
    json_table("""
37    | 3    | 4    | 35
35    | 3    | 4    | 35
34.8  | 3    | 4    | 31
34.95 | 3    | 4    | 35
3     | 4    | 4    | null
null  | 3    | 4    | null
37    | null | 4    | null
37    | 3    | null | null
"""),
)
def test_last_evaluation_within_a_schedule(end, first, period, last):
    r = Recipe('sgd', 1, decay_epochs=end, first_eval_epoch=first, eval_period=period)
    assert r.last_eval_epoch == last


def test_times_of_a_set_are_means_of_its_runs():
    runs = [(110.0, 10, 2, 6.0), (116.0, 10, 4, 12.0), (None, 10, 2, 6.0), (110.0, None, 2, 6.0)]
    assert make_times(9.0, runs) == RunTimes(9.0, 3.0, (14 + 14) / 2)
    assert make_times(None, runs) is None and make_times(9.0, runs[2:]) is None


def test_published_table_is_complete():
    sets, table = load_published(), load_table()
    folders = [str(f).casefold() for s in table for f in s.folders]
    assert len(sets) == 228 and len(table) == 318 and len({*folders}) == len(folders) == 361
    assert {s.division for s in sets} == {'closed'} < {s.division for s in load_published('open')}
    assert not any(s.is_duplicate or s.parts_text for s in table)
    assert not any(s.refusal or 'tpu' in s.name for s in sets)
    for s in sets:
        base = base_of(s)
        assert base and base.num_units % base.num_nodes == 0, s.name
        unknown = {f.name for f in fields(Recipe) if getattr(s.recipe, f.name) is None}
        is_step = s.recipe.decay == 'step'
        ends = {'decay_epochs', 'end_lr', 'poly_power'} if is_step else {'step_epochs'}
        optional = {'nesterov'} if s.recipe.opt_name == 'lars' else set()
        optional |= {'decay_epochs'} if s.org == 'Intel' else set()
        assert unknown - optional == ends - optional, s.name
        assert not {*s.unlogged} & {'base_lr', 'weight_decay', 'opt_name'}
        for r in s.runs:
            is_good = (r.final_accuracy or 0) >= s.recipe.target_accuracy
            assert is_good == (r.status == 'converged'), s.name
            assert r.epochs_to_converge == (r.curve[-1][0] if is_good else None), s.name
        assert 0 < s.times.evaluation_s < s.time_s and 0 < s.times.epoch_s * s.epochs[0] <= s.time_s


def test_set_of_several_rounds_is_one():
    """No two sets have the same times of runs; each is found under the names of all its
    submissions."""
    times = [tuple(r.time_to_train_s for r in s.runs) for s in load_table()]
    assert len({*times}) == len(times)
    name, rounds = 'Dell/2xXE8545x4A100-SXM-40GB', ('v2.0', 'v2.1', 'v3.0')
    [run_set] = {s for r in rounds for s in sets_under(Path('published', r, name))}
    assert run_set.rounds == rounds
    outputs = {
        call('predict', f'{r}/{name}', '--layouts', '2', '--format', 'json').stdout for r in rounds
    }
    [predicted] = outputs
    assert json.loads(predicted)['source']['source'] == 'published v2.0'
    entries = json.loads(make_published.FILE.read_text(encoding='utf-8'))['sets']
    # Logs of later rounds alone, read again, do not add an entry.
    assert make_published.make_table(run_set.later, entries) == entries


def test_report_shows_published_sets_without_logs(tmp_path, monkeypatch):
    v20 = sets_under(Path('published/v2.0'))
    assert v20 and v20 == sets_under(Path('published/2.0'))
    assert {s.org for s in sets_under(Path('published/v2.0/Dell'))} == {'Dell'}
    shown = call('report', 'published/v0.6/NVIDIA', '--format', 'json')
    systems = {s['system']: s for s in json.loads(shown.stdout)['systems']}
    dgx1 = systems['dgx1_ngc19.05_mxnet']
    assert dgx1['score_minutes'] == approx(115.22, abs=0.01)
    assert dgx1['images_per_s'] == approx(11_232, abs=2)
    assert dgx1['runs'][0]['evaluations'][0]['line'] is None
    page = call('report', 'published/v0.6/NVIDIA', '--format', 'html').stdout
    assert 'result_0.txt' in page and 'result_0.txt:0' not in page
    both = 'published/v2.0/Azure', 'published/v2.1/Azure'
    systems = json.loads(call('report', *both, '--format', 'json').stdout)['systems']
    named = [(s['system'], *s['rounds']) for s in systems]
    assert any(len(rounds) > 1 for _, *rounds in named) and len(named) == len({*named})
    assert '<html' in call('report', *both, '--format', 'html').stdout
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'published').mkdir()  # a folder of this name takes precedence
    assert not sets_under(Path('published'))


@pytest.mark.needs_published
def test_published_table_matches_the_logs():
    known = load_run_sets([PUBLISHED / 'v0.5', PUBLISHED / 'v0.6', PUBLISHED / 'v0.7'])
    assert len(known) == 6

    def facts_of(s, names):
        counts = s.num_nodes, s.num_accelerators, s.num_units, s.other_dataset, s.train_samples
        runs = [(r.status, r.epochs_to_converge, [e for e, _ in r.curve]) for r in s.runs]
        recipe = {
            name: approx(v) if isinstance(v := getattr(s.recipe, name), float) else v
            for name in names
        }
        return counts, runs, recipe

    def times_of(s):
        return [s.time_s, *(r.time_to_train_s for r in s.runs)]

    for s in known:
        [table] = [x for x in load_published() if (x.round, x.name) == (s.round, s.name)]
        logged = {f.name for f in fields(Recipe) if getattr(s.recipe, f.name) is not None}
        names = logged - {*table.unlogged}
        assert facts_of(table, names) == facts_of(s, names), s.name
        assert times_of(table) == approx(times_of(s), rel=1e-3)
        assert table.times.epoch_s == approx(s.times.epoch_s, rel=0.05)


def test_pods_have_no_nodes_and_no_cost_in_sentences():
    pods = {s.name: s for s in load_table() if s.stated_nodes != s.num_nodes}
    assert {*pods} >= {'tpu-v3-2048', 'tpu-v4-512-TF', 'ipu-pod64-TF1'}
    assert all(s.num_nodes is s.node_hours is None for s in pods.values())
    done = call('report', 'published', '--price-per-node-hour', 20)
    (sentence,) = re.findall('- At 20 per node-hour.*', done.stdout)
    assert 'least on v4.0/NVIDIA/h200_ngc24.04_mxnet, 4.01 (1 node of 8' in sentence


def test_systems_on_a_number_of_nodes_have_a_row_each():
    done = call('report', 'published', '--nodes', 16, '--format', 'csv', '--rows', 'systems')
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert len(rows) == sum(s.num_nodes == 16 for s in load_table()) > 1
    assert {row['num_nodes'] for row in rows} == {'16'} and 'file' not in rows[0]


@pytest.mark.needs_history
def test_published_table_agrees_with_another_reader():
    known = {tuple(n.casefold() for n in f.parts[1:]): s for s in load_table() for f in s.folders}
    with (HISTORY / 'truth.csv').open(encoding='utf-8') as file:
        # has one run twice
        rows = [row for row in csv.DictReader(file) if row['system'] != 'SYS-420GP-TNAR+']
    assert len(rows) > 330
    for row in rows:
        run_set = known[row['round'], row['org'].casefold(), row['system'].casefold()]
        score = float(row['score_minutes'] or 0.0)
        assert (run_set.score_minutes or 0.0) == approx(score, abs=0.0101), row
