"""Expected time of a planned run, from published systems with the same accelerator."""

from dataclasses import replace

import pytest
from helpers import ROOT, json_table

from mlperf_rn50.analysis.recipe import differences
from mlperf_rn50.analysis.sets.published import load_published
from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config_file import resolve_config
from mlperf_rn50.mllog.logged_run import IMAGENET_TRAIN
from mlperf_rn50.text import span

DGX1 = resolve_config(ROOT / 'launch/configs/dgx1_v05.yaml', [], config_parser('train'))


def changed(**keys):
    return replace(
        DGX1,
        **{section: replace(getattr(DGX1, section), **values) for section, values in keys.items()},
    )


def text_of(config=DGX1, num_ranks=8, gpu=None, last_epochs=(63, 100)):
    return differences.expected_time(config, num_ranks, last_epochs, gpu)


@pytest.fixture
def published(monkeypatch):
    """Make expected_time know only systems of these names."""

    def limit(*names):
        systems = [s for s in load_published() if s.name in names]
        monkeypatch.setattr(differences, 'load_published', lambda: systems)
        return systems

    return limit


def test_interval_is_from_the_fastest_and_the_slowest_published_system(published):
    """Their times to train include evaluations."""
    systems = published('dgx1_ngc18.11_mxnet', 'dgx2_ngc18.11_mxnet')
    seconds = sorted(63 * s.num_units * s.time_s / s.scored_epochs_mean / 8 for s in systems)
    fast, slow = (f'{63 * IMAGENET_TRAIN / 8 / s:,.0f}' for s in seconds)
    assert text_of() == (
        f'about {span(*seconds)} for 63 epochs on 8 V100 at {slow} to {fast} images/s each (2 '
        'published systems); published v0.5 sets at batch 1,664 took 63 epochs'
    )


@pytest.mark.parametrize(
    'last_epochs, expected',
    [((1,), '1 epoch'), ((61, 65, 69), '65 epochs'), ((61, 62), '62 epochs')],
)
def test_epochs_are_those_after_which_the_run_may_end(last_epochs, expected):
    assert f' for {expected} on 8 V100 ' in text_of(last_epochs=last_epochs)


def test_without_a_followed_recipe_the_time_is_that_of_all_epochs():
    text = text_of(changed(schedule={'base_lr': 9.0}))
    assert ' for 100 epochs on ' in text and text.endswith(' systems)')


@pytest.mark.parametrize(
    'keys, gpu, expected',
    json_table("""
{} | "NVIDIA H200"           | ""
{} | "NVIDIA A100-SXM4-80GB" | "A100"  # goes before the platform
{"run": {"submission_platform": "DGX-1"}} | null | ""
{"train": {"precision": "float32"}}       | null | ""
{"data": {"synthetic": true}}             | null | ""
{"train": {"local_batch_size": 2000}}     | null | ""
"""),
)
def test_time_needs_published_systems_with_this_accelerator_and_similar_images(keys, gpu, expected):
    text = text_of(changed(**keys), gpu=gpu)
    assert bool(text) == bool(expected) and expected in text
