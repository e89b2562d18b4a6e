"""Predictions beside measurements: measured times, noise of the first epoch, resumed runs,
gradients, unknown cards."""

import json
import re
from dataclasses import replace

import pytest
from helpers import call
from lines import mllog, write_set

from mlperf_rn50.analysis.predict.answer import PredictionRequest, make_answer
from mlperf_rn50.analysis.predict.costs import costs_without
from mlperf_rn50.analysis.predict.model import predict_layout
from mlperf_rn50.analysis.predict.prediction import Costs, Epochs, Layout
from mlperf_rn50.analysis.predict.source import load_source
from mlperf_rn50.analysis.predict.tables import verdicts

DELL = 'v2.0/Dell/XE8545x4A100-SXM-40GB'
SMALL = {
    'accelerators': False,
    'division': 'open',
    'is_complete': True,
    'dataset': 'digits',
    'train_samples': 1000,
    'target': 0.7,
    'eval_s': 0.5,
}


def predicted(*words):
    shown = json.loads(call('predict', *words, '--format', 'json').stdout)
    return shown, {p['name']: p for p in shown['predictions']}


def small_set(folder, **keys):
    """Write runs of 4 epochs on CPUs; return the folder as text."""
    return str(
        write_set(folder, **{'num_runs': 1, 'accuracies': (0.1, 0.3, 0.5, 0.72), **SMALL, **keys})
    )


@pytest.mark.parametrize('form', ['table', 'markdown'])
def test_measured_time_at_another_batch_is_in_its_row_and_in_the_first_line(form):
    lines = call('predict', DELL, '--layouts', '16', '--format', form, '--wide').stdout.splitlines()
    assert (
        'measured 5.53 min at batch 13,056 (16xXE8545x4A100-SXM-40GB)' in lines[0]
        and 'predicted' in lines[0]
    )
    assert [line for line in lines[1:] if '5.53 at 13,056' in line]


def test_layouts_are_ranked_by_measured_times(tmp_path):
    """The model takes two nodes for faster than one, but they were measured at another batch, and
    are slower."""
    small_set(tmp_path / 'one', ranks=1, batch=100)
    small_set(tmp_path / 'two', ranks=2, nodes=2, batch=200, epoch_s=20.0)
    answer = make_answer(
        PredictionRequest(((1, 1), (2, 1), (4, 1)), 100),
        load_source([str(tmp_path)], 'one', gbit_s=1000.0),
    )
    assert answer.rows[1].minutes < answer.rows[0].minutes < answer.rows[1].best_measured_minutes
    assert (
        answer.rows[1].measured_minutes is None and answer.rows[1].best_measured_batch_size == 200
    )
    assert answer.best['fastest'] is answer.rows[2] and answer.best['cheapest'] is answer.rows[0]
    fewer = replace(answer, rows=answer.rows[:2])
    assert fewer.best['fastest'] is answer.rows[0] and verdicts(fewer)[0].startswith(
        'Fastest: 1x1, measured 0.70 min'
    )


def test_refused_layout_shows_its_measured_time(tmp_path):
    shown, rows = predicted(
        DELL, '--layouts', '16,32', '--global-batch-size', '1000', '--out', str(tmp_path)
    )
    assert (
        'not divisible' in rows['16x4']['refusal']
        and rows['16x4']['best_measured_batch_size'] == 13_056
    )
    assert shown['fastest'] == '32x4' and rows['32x4']['minutes'] is None
    page = (tmp_path / 'prediction.md').read_text()
    assert 'measured 5.53 min at batch 13,056' in page and 'measured 5.53 at 13,056' in page


def test_other_target_or_optimizer_is_no_measurement_and_a_changed_machine_has_none():
    for words in (('--target', '0.749'), ('--optimizer', 'sgd'), ('--what-if', 'link=100')):
        assert (
            predicted(DELL, '--layouts', '16', *words)[1]['16x4']['best_measured_minutes'] is None
        ), words


@pytest.mark.parametrize('first_s', [1.0, 5.0, 9.9, 10.0, 30.0])
def test_no_part_of_a_run_is_negative(tmp_path, first_s):
    """A first epoch that is shorter than the others is chance, so it makes no layout faster than
    its own steps."""
    source = load_source(
        [small_set(tmp_path / 'one', ranks=2, batch=80, first_s=first_s)], gbit_s=10.0
    )
    answer = make_answer(PredictionRequest(((1, 2), (2, 2), (4, 2))), source)
    noise = max(0.0, (10.0 - first_s) / 4 / 10.0)
    assert source.base.outside_s == max(0.0, first_s - 10.0) and source.base.noise == pytest.approx(
        noise
    )
    # 12.5 steps per epoch
    assert source.base.step_s == pytest.approx(min(10.0, (3 * 10.0 + first_s) / 4) / 12.5)
    for row in answer.rows:
        steps = (
            row.layout.epochs.mean * source.base.train_samples / row.layout.recipe.global_batch_size
        )
        assert row.minutes * 60 >= steps * row.step_s and row.efficiency <= 1.0005
        assert row.interval[1] >= row.minutes * (1 + noise)
        assert any('first epoch' in doubt for doubt in row.doubts) == (noise >= 0.005)
    assert answer.rows[0].minutes == pytest.approx(source.sets[0].minutes)


def test_more_than_proportional_speed_is_a_doubt_and_within_the_interval():
    """R750xa took 5 minutes to start; the model assumes the usual start of two nodes."""
    row = predicted('v3.0/Dell/R750xax4H100-PCIE-80GB', '--layouts', '2')[1]['2x4']
    assert row['efficiency'] > 1.01 and [d for d in row['doubts'] if 'proportional' in d]
    assert row['interval'][1] >= row['minutes'] * row['efficiency'] * 0.999


def test_fewer_epochs_may_make_nodes_more_than_proportionally_faster(tmp_path):
    small_set(tmp_path / 'one', ranks=1, batch=100, accuracies=(0.1, 0.2, 0.3, 0.4, 0.5, 0.72))
    small_set(tmp_path / 'two', ranks=2, nodes=2, batch=200, accuracies=(0.1, 0.72))
    answer = make_answer(
        PredictionRequest(((1, 1), (2, 1)), 200), load_source([str(tmp_path)], gbit_s=1000.0)
    )
    assert answer.rows[1].efficiency > 1 and not [
        d for d in answer.rows[1].doubts if 'proportional' in d
    ]


@pytest.mark.parametrize(
    'card, similar',
    [
        ('H200', 'H100'),
        ('GH200', 'H100'),
        ('B200', 'H100'),
        ('L40', 'L40S'),
        ('NVIDIA L4', 'L40S'),
        ('A30', 'A100'),
        ('NVIDIA RTX A5000', 'A100'),
        ('T4', 'A100'),
        ('V100S', 'V100'),
        ('P100', 'V100'),
        ('MI300X', ''),
        ('', ''),
    ],
)
def test_card_without_sets_on_several_nodes_has_the_latency_of_the_nearest_generation(
    card, similar
):
    source, costs = load_source(['v4.0/NVIDIA/h200_ngc24.04_mxnet']), costs_without(None)
    base = replace(source.base, generation=card)
    layout = Layout(16, 8, source.base.layout.recipe, Epochs(35, 35, 35, ''))
    p = predict_layout(base, layout, source.link, costs)
    assert (
        p.other_s == costs.latency_s.get(similar, costs.other_latency_s) and p.knowledge == 'other'
    )
    known = predict_layout(replace(base, generation='H100'), layout, source.link, costs)
    assert (
        known.knowledge == 'own' and known.interval[1] / known.minutes < p.interval[1] / p.minutes
    )


def test_lack_of_sets_is_named():
    shown, rows = predicted('v4.0/NVIDIA/h200_ngc24.04_mxnet', '--layouts', '1,16')
    assert [
        n
        for n in shown['notes']
        if re.match('16x8: no published set .* H200 on .* that of H100', n)
    ]
    assert not [d for d in rows['1x8']['doubts'] if 'H200' in d]
    changed = predicted(
        'v4.0/NVIDIA/eos_ngc24.04_mxnet', '--layouts', '1,2', '--what-if', 'generation=H200'
    )[1]
    assert [any('H200' in d for d in row['doubts']) for row in changed.values()] == [False, True]
    h100 = predicted('v4.0/NVIDIA/eos_ngc24.04_mxnet', '--layouts', '1,16')[1]
    gains = [h100[name]['minutes'] / rows[name]['minutes'] for name in ('1x8', '16x8')]
    # not faster on several nodes than on one, in comparison with H100
    assert gains[1] < gains[0] + 0.01


def config_text(name, classes=10, precision='float32', device='cpu', comm='compression: none'):
    return (
        f'data: {{num_classes: {classes}}}\nmodel: {{name: {name}}}\ncomm: {{{comm}}}\ntrain: '
        f'{{local_batch_size: 8, precision: {precision}, device: {device}}}\n'
    )


NETWORK = (
    json.dumps(
        {
            'event': 'network',
            'local_batch_size': 1,
            'flops_per_image': 1,
            'gradient_bytes': 7_000_000,
            'num_buckets': 1,
        }
    )
    + '\n'
)


@pytest.mark.parametrize(
    'config, metrics, megabytes, text',
    [
        (config_text('resnet18'), '', 44.7, 'resnet18 with 10 classes'),
        (config_text('resnet50'), '', 94.1, 'resnet50 with 10 classes'),
        (config_text('resnet50', comm='compression: fp16'), '', 47.1, 'resnet50 with 10 classes'),
        (config_text('vgg16', 1000, 'float16', 'gpu'), '', 276.7, 'vgg16 with 1,000 classes'),
        (config_text('resnet18'), NETWORK, 7.0, 'metrics.jsonl'),
        ('', NETWORK, 7.0, 'metrics.jsonl'),
        *(
            (text, '', 102.2, 'ResNet-50 assumed')
            for text in ('', 'model: [', config_text('other'), config_text('resnet18', -5))
        ),
    ],
)
def test_exchanged_bytes_are_those_of_the_network_of_the_run(
    tmp_path, config, metrics, megabytes, text
):
    folder = tmp_path / 'run'
    small_set(folder, ranks=2, batch=100)
    (folder / 'config.yaml').write_text(config)
    (folder / 'metrics.jsonl').write_text(metrics)
    source = load_source([str(folder)])
    assert (
        source.link.exchange_bytes / 1e6 == pytest.approx(megabytes, abs=0.05)
        and source.link.network == text
    )
    assert f'of {megabytes} MB ({text})' in call('predict', folder, '--layouts', '1').stdout


def test_resumed_runs_are_named_in_the_first_lines(tmp_path):
    folder = small_set(tmp_path / 'run', num_runs=1, ranks=2, batch=100)
    log = tmp_path / 'run/result_0.txt'
    lines = log.read_text().splitlines()
    stop = next(
        k for k, line in enumerate(lines) if '"epoch_start"' in line and '"epoch_num": 3' in line
    )
    log.write_text(
        '\n'.join(
            [
                *lines[:stop],
                mllog('run_resumed', 21, 20, epoch_num=3, clock_s=21.0, submittable=False),
                *lines[stop:],
            ]
        )
        + '\n'
    )
    shown, _ = predicted(folder, '--layouts', '1')
    assert shown['notes'][0].startswith('Resumed runs: run;')
    assert (
        call('predict', folder, '--layouts', '1')
        .stdout.splitlines()[1]
        .startswith('Resumed runs: run;')
    )


def test_start_of_other_layouts_is_never_negative():
    source = load_source(['v4.0/NVIDIA/h200_ngc24.04_mxnet'])
    layout = Layout(2, 8, source.base.layout.recipe, Epochs(35, 35, 35, ''))
    times = [
        predict_layout(source.base, layout, source.link, Costs(starts=((2, s),))).minutes
        for s in (-9.0, 0.0)
    ]
    assert times[0] == times[1]
