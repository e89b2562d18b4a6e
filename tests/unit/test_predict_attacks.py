"""Hostile input of predict and recipe: mistakes are a line, what is left out is named, nothing steers a terminal."""
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import PUBLISHED
from lines import write_set

from mlperf_rn50.cli import predict, recipe
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.study.known import known_of
from mlperf_rn50.study.predict import Layout, base_of, costs_without, predict_layout, published_link
from mlperf_rn50.study.predict_validation import render_validation, validate_systems
from mlperf_rn50.study.systems import load_systems

A100 = 'v0.7/NVIDIA/dgxa100_ngc20.06_mxnet'
SCHEDULE = {'sgd_opt_base_learning_rate': 6, 'sgd_opt_learning_rate_decay_steps': 40}
OURS = {'nodes': 1, 'ranks': 8, 'batch': 3264, 'accuracies': (0.5, 0.7, 0.76), 'epoch_s': 60.0, 'optimizer': SCHEDULE}


def test_more_layouts_than_anybody_reads_are_a_mistake():
    with pytest.raises(ConfigError, match='--layouts: got 100,000, expected at most 1,000'):
        predict.run([A100, '--layouts', ' '.join(f'{i}x1' for i in range(1, 100_001))])


@pytest.mark.parametrize('text, said', [
    ('schedule: {base_lr: null}', 'schedule.base_lr: got null, expected a value'),
    ('schedule: {warmup_epochs: null}', 'schedule.warmup_epochs: got null'),
    ('schedule: {base_lr: ' + '9' * 400 + '}', 'int too large to convert to float'),
    ('run: {num_nodes: ' + '9' * 400 + '}', 'run.num_nodes: got a number of 400 digits, expected at most 18')])
def test_a_configuration_without_a_value_or_beyond_numbers_is_a_mistake(tmp_path, text, said):
    path = tmp_path / 'c.yaml'
    path.write_text(f'train: {{global_batch_size: 1664}}\n{text}\n')
    with pytest.raises(ConfigError, match=re.escape(said)):
        recipe.run(['--compare', str(path)])


def test_a_manifest_that_is_a_pipe_is_none_and_one_of_escapes_steers_no_terminal(tmp_path, capsys):
    path, manifest = tmp_path / 'c.yaml', tmp_path / 'manifest.json'
    path.write_text(f'train: {{global_batch_size: 1664}}\ndata: {{dir: {tmp_path}}}\n')
    manifest.write_text('{"resize_shorter": "\\u001b[31mred"}')
    recipe.run(['--compare', str(path)])
    out = capsys.readouterr().out
    assert '\x1b' not in out and '?[31mred' in out
    manifest.unlink()
    os.mkfifo(manifest)  # would be waited for
    recipe.run(['--compare', str(path)])
    assert 'is no manifest of prepare' in capsys.readouterr().out


def render(folder, **how):
    return render_validation(validate_systems(load_systems([folder])), **how)


@pytest.mark.needs_published
def test_copies_count_once(tmp_path):
    for org in ('NVIDIA', 'Other'):
        shutil.copytree(Path(PUBLISHED) / 'v0.7' / 'NVIDIA', tmp_path / 'v0.7' / org)
    said = render(tmp_path)
    assert '\n1 predicted: ' in said
    assert len(re.findall('left out: all of its logs are copies of those of another system', said)) == 2


@pytest.mark.needs_published
def test_a_set_is_not_judged_with_constants_made_from_it_wherever_it_lies(tmp_path):
    shutil.copytree(Path(PUBLISHED) / 'v0.7' / 'NVIDIA', tmp_path / 'anywhere' / 'NVIDIA')
    validation = validate_systems(load_systems([tmp_path / 'anywhere']))
    [judged] = validation.predicted
    assert judged.target.round == 'v0.7+'  # no folder says more
    assert judged.costs == costs_without(*(known_of(s) for s in load_systems([Path(PUBLISHED) / 'v0.7'])))
    assert 'v0.7,' not in judged.costs.source and 'v0.6, v1.0' in judged.costs.source


@pytest.mark.needs_published
def test_names_are_neither_cells_nor_links_of_markdown(tmp_path):
    source = Path(PUBLISHED) / 'v0.7' / 'NVIDIA' / 'results'
    for name in ('dgxa100_ngc20.06_mxnet', 'dgxa100_n2_ngc20.06_mxnet'):
        shutil.copytree(source / name / 'resnet', tmp_path / 'v0.7' / 'NVIDIA' / 'results' / (
            f'<b>|![x](y)\x1b[2J{name}') / 'resnet')
    said = render(tmp_path, is_markdown=True)
    assert '<b>' not in said and '\x1b' not in said and '![x]' not in said and '&lt;b>\\|!\\[x](y)?\\[2J' in said
    assert '\x1b' not in render(tmp_path)


def known(tmp_path, **keys):
    write_set(tmp_path, 2, **{**OURS, **keys})
    [system] = load_systems([tmp_path])
    return known_of(system)


def test_a_run_shorter_than_its_epochs_predicts_no_negative_minutes(tmp_path):
    base = base_of(known(tmp_path, first_s=0.001, epoch_s=10_000.0, accelerators=False))
    assert base.outside_s < 0
    recipe_of = known(tmp_path).recipe
    p = predict_layout(base, Layout(1, 3264, recipe_of), published_link())
    assert p.minutes is None and 'say nothing of so short a run' in p.refusal


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    one = known(tmp_path, batch=10**7)
    p = predict_layout(base_of(one), Layout(1, 8, one.recipe), published_link())
    assert p.refusal == 'a batch of 10,000,000 is more than the data has images, 1,281,167'


def test_a_schedule_of_millions_of_epochs_is_none(tmp_path):
    assert known(tmp_path, optimizer={'sgd_opt_learning_rate_decay_steps': 1e9}).recipe.decay_epochs is None
