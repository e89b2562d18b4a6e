"""Order of reading, changed images and the command `why --probe`, on made-up figures."""

import json

import mxnet as mx
import numpy as np
import pytest
from helpers import call
from sample_log import write_run

from mlperf_rn50.bench import probe
from mlperf_rn50.config import Config, RunConfig, render_yaml
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.weights import describe_weights, save_weights
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.options import ScheduleConfig, TrainConfig

NUM = 10


def accused(causes):
    return [c.name for c in causes if c.strength > 1]


class Records:
    """Stand-in for a file of images of different sizes."""

    sizes = np.random.default_rng(4).integers(100, 200, 401)

    def num_bytes(self, samples):
        return int(self.sizes[samples].sum())


SHARD, SORTED = Shard(401, 0, 2, 16), np.sort(np.arange(401) % NUM)


@pytest.mark.parametrize(
    'order, causes',
    [
        (lambda epoch: epoch_order(SHARD, 7, epoch), set()),
        (lambda epoch: np.repeat(epoch_order(SHARD, 7, epoch)[::2], 2), {'equal_shards'}),
        (lambda _: np.resize(np.arange(401), SHARD.num_positions), {'shuffle'}),
    ],
    ids=['planned', 'equal', 'stored'],
)
def test_bytes_read_show_the_order(order, causes):
    read = {e + 1: Records().num_bytes(order(e)) for e in range(3)}
    assert {*accused(probe.judge_order(read, SHARD, 7, Records(), SORTED))} == causes


def test_sorted_images_that_are_not_shuffled(monkeypatch):
    stored = np.resize(np.arange(401), SHARD.num_positions)
    monkeypatch.setattr(probe, 'epoch_order', lambda *_: stored)
    assert accused(probe.judge_order({}, SHARD, 7, Records(), SORTED)) == ['shuffle']


def test_changed_images():
    pixels = np.random.default_rng(5).integers(0, 256, (2, 3, 4, 4)).astype(np.float32)
    data = DataConfig(mean=(100.0, 110.0, 120.0), std=(50.0, 60.0, 70.0))
    mean, std = np.reshape(data.mean, (3, 1, 1)), np.reshape(data.std, (3, 1, 1))
    images = (pixels - mean) / std
    train = np.random.default_rng(6).standard_normal((2, 3, 4, 4))
    changed = {text: found for (_, text), found in probe.change_images(images, train, data).items()}
    for text, expected in (
        ('values from 0 to 255', pixels),
        ('blue before red', (pixels[:, ::-1] - mean) / std),
        ('half the values', images / 2),
        *((f'images turned by {90 * k} degrees', np.rot90(images, k, (2, 3))) for k in (1, 2, 3)),
    ):
        np.testing.assert_allclose(changed[text], expected, atol=1e-4)
    matched = changed['mean and deviation of training images']
    for measure in (np.mean, np.std):
        expected = measure(train, (0, 2, 3))
        np.testing.assert_allclose(measure(matched, (0, 2, 3)), expected, atol=1e-4)


@pytest.mark.parametrize(
    'epochs, layout, is_padded', [(12, 'NCHW', False), (12, 'NHWC', True), (80, 'NCHW', False)]
)
def test_command_probes_a_network_that_was_not_trained(
    tmp_path, digits, thin_resnets, monkeypatch, epochs, layout, is_padded
):
    monkeypatch.setattr(probe, 'MOST_IMAGES', 60)
    data = DataConfig(
        str(digits),
        'digits',
        1437,
        360,
        10,
        image_size=32,
        resize_shorter=32,
        crop='none',
        pad_to_4_channels=is_padded,
    )
    config = Config(
        RunConfig(seed=5, num_nodes=2, ranks_per_node=1),  # begun without one of its nodes
        data,
        ModelConfig('resnet18', layout=layout),
        train=TrainConfig(global_batch_size=64, device='gpu' if is_padded else 'cpu'),
        schedule=ScheduleConfig(decay_epochs=epochs),
    )
    parameters = build_model(config, mx.cpu(), 5).collect_params()
    arrays = {n: p.data().asnumpy() for n, p in parameters.items()}
    description = describe_weights(config, [*'0123456789'], 60, 4, 5, is_best=True, is_last=True)
    save_weights(tmp_path / 'weights', 'best', description, arrays)
    write_run(tmp_path / 'result_0.txt', config, (0.1, 0.1), 'aborted')
    (tmp_path / 'config.yaml').write_text(render_yaml(config))
    found = json.loads(call('why', tmp_path, '--probe', '--format', 'json').stdout)['accuracy']
    is_late = epochs == 12
    assert ('frozen' in [c['cause'] for c in found['causes']]) == is_late
    (frozen,) = (row for row in found['evidence'] if row['cause'] == 'frozen')
    assert frozen['measured'] == '21 of 21, such as conv0_weight' and 'turned' in frozen['figure']
    assert frozen['verdict'] == ('cause' if is_late else 'too early')
    assert f'weights of epoch 4 of {epochs}' in ' '.join(found['notes'])
