"""Comparison of a run with reference runs, its alarm, before and after a resume."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import emit, values
from lines import write_set

from mlperf_rn50.analysis.recipe.band import band
from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config import Config, RunConfig, check_values
from mlperf_rn50.config_file import resolve_config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError, UserError
from mlperf_rn50.mllog.sidecar.metrics import read_curve
from mlperf_rn50.train.compare import (
    ReferenceComparison,
    find_reference,
    open_comparison,
    reference_event,
)
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig
from mlperf_rn50.train.plan import make_plan
from mlperf_rn50.train.sinks.metrics_file import Metrics
from mlperf_rn50.train.sinks.progress_lines import ProgressLines

DIGITS = DataConfig(dataset='digits', num_train=1437, num_val=360, num_classes=10)
CONFIG = Config(
    run=RunConfig(),
    data=DIGITS,
    schedule=ScheduleConfig(0.1, 1, 'poly', 6),
    train=TrainConfig(global_batch_size=64, eval_period=1, target_accuracy=0.75, max_epochs=6),
)


@pytest.fixture
def config(tmp_path):
    """Configuration with a reference of three runs of four epochs."""
    folder = write_set(
        tmp_path / 'known',
        3,
        accuracies=lambda k: (0.3, 0.5, 0.7 + k / 100, 0.76),
        train_samples=1437,
        eval_samples=360,
        target=0.75,
        dataset='digits',
    )
    return replace(CONFIG, run=RunConfig(reference=(str(folder),)))


def opened(config, tmp_path, num_epochs=0):
    return open_comparison(
        find_reference(config, 64), make_plan(config, 1), tmp_path / 'metrics.jsonl', num_epochs
    )


def test_without_a_path_only_imagenet_is_looked_up():
    assert find_reference(CONFIG, 64) is None
    assert reference_event(ReferenceComparison(None), CONFIG, 64) is None
    imagenet = replace(CONFIG, data=DataConfig())
    assert find_reference(imagenet, 64) is None
    assert reference_event(ReferenceComparison(None), imagenet, 64).record.text.startswith(
        'no reference: no published set has this recipe (sgd, batch 64, learning rate 0.1, '
        'warm-up 1, poly over 6'
    )
    assert ReferenceComparison(None).compare(1, 0.5, 1.0) is None


def test_unreadable_reference_is_refused(tmp_path):
    write_set(tmp_path / 'mixed', batch=lambda k: 64 + k)
    for name, message in (
        ('none', 'none: no such folder; expected a log or a folder of logs'),
        ('mixed', 'got .*mixed: global_batch_size is 64 in result_0.txt and 65'),
    ):
        with pytest.raises(UserError, match=message):
            find_reference(replace(CONFIG, run=RunConfig(reference=(str(tmp_path / name),))), 64)


def test_resumed_run_keeps_earlier_evaluations(config, tmp_path):
    lines = [
        f'{{"event": "eval", "epoch": {epoch}, "num_top1": {num}, "num_images": 360}}\n'
        for epoch, num in [(1, 250), (1, 36), (2, 72), (3, 72)]
    ]
    (tmp_path / 'metrics.jsonl').write_text(''.join([*lines, '{"num_top1": "x"}\n']))
    assert read_curve(tmp_path / 'metrics.jsonl') == [(1, 0.1), (2, 0.2), (3, 0.2)]
    assert opened(config, tmp_path, 1).compare(2, 0.2, 20.0).record.behind
    again = opened(config, tmp_path, 2)  # the evaluation of epoch 3 is later than the checkpoint
    assert again.is_behind and again.curve == [(1, 0.1), (2, 0.2)]


def test_metrics_and_terminal_output(config, tmp_path, capsys):
    course = opened(config, tmp_path)
    run = SimpleNamespace(
        metrics=tmp_path / 'metrics.jsonl', train_log=tmp_path / 'train.log', result='r'
    )
    compared = (
        course.compare(epoch, accuracy, 10.0 * epoch)
        for epoch, accuracy in [(1, 0.1), (2, 0.2), (5, 0.5)]
    )
    emit(
        [Metrics(run, 'digits'), ProgressLines(run, config)],
        reference_event(course, config, 64),
        *compared,
    )
    reference, *records = map(json.loads, run.metrics.read_text().splitlines())
    known = values('event="reference" how="same" num_reference=3 reference_epochs=[4,4]')
    assert known.items() <= reference.items()
    assert reference['text'].startswith('reference: 3 runs of 1 set (')
    assert [b[0] for b in reference['band']] == [1, 2, 3, 4]
    assert [r['below'] for r in records] == [True, True, False]
    here = band(course.reference, [2])[2]
    known = values(
        'event="course" epoch=2 accuracy=0.2 num_reference=3 below=true behind=true '
        'reference_epochs=[4,4] seconds_left=[20.0,20.0]'
    )
    for name in ('mean', 'low', 'high'):
        known[name] = getattr(here, name)
    assert records[1] == {**known, 'point': 2 / 6, 'text': records[1]['text']}
    known = values('behind=false mean=null num_reference=0 seconds_left=null')
    assert known.items() <= records[2].items()
    text = capsys.readouterr().err
    assert text.count('\n') == 4 and ' behind: 30.0 points below' in text
    assert 'no reference run at this epoch' in text
    assert text.splitlines() == run.train_log.read_text().splitlines()


@pytest.mark.parametrize(
    'option', ['--run.reference a b', '--run.reference=a b', '--run.reference [a,b]']
)
def test_paths_follow_their_option(option):
    words = [*option.split(), '--run.seed', '3', '--train.global_batch_size=64']
    run = resolve_config(None, words, config_parser('train')).run
    assert (run.reference, run.seed) == (('a', 'b'), 3)


def test_stop_of_a_run_behind_needs_a_reference():
    stopping = RunConfig(stop_when_behind=True)
    check_values(replace(CONFIG, run=replace(stopping, reference=('logs/a',))))
    for run, message in (
        (stopping, 'run.stop_when_behind: got true on digits without a reference, expected'),
        (RunConfig(reference=('ok', 'a\x1b[2J')), 'run.reference: got .*, expected text without'),
    ):
        with pytest.raises(ConfigError, match=message):
            check_values(replace(CONFIG, run=run))
