"""Causes of a missed accuracy from predictions, labels, weights and reads, on made-up figures."""
import json

import mxnet as mx
import numpy as np
import pytest
from sample_log import write_run

from mlperf_rn50.bench import probe
from mlperf_rn50.bench.probe import Images
from mlperf_rn50.cli.why import run
from mlperf_rn50.config import Config, RunConfig, render_yaml
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.weights import describe_weights, save_weights
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.options import TrainConfig

NUM = 10
LABELS = np.arange(400) % NUM


def accused(causes):
    return [c.name for c in causes if c.strength > 1]


def predictions(random, right, num=2000):
    """Return labels and logits: a share is right, most other images are taken for the next class; sure where right."""
    labels = random.integers(0, NUM, num)
    logits = random.standard_normal((num, NUM))
    is_right = random.random(num) < right
    logits[np.arange(num), labels] += np.where(is_right, 8, 4)
    logits[np.arange(num), (labels + 1) % NUM] += np.where(is_right, 4, 5.5)
    return labels, logits


def part(is_right, num=400):
    logits = np.zeros((num, 10))
    logits[:round(is_right * num), 1] = 1
    return Images(None, np.ones(num, int), logits)


@pytest.mark.parametrize('shift', [1, 9, 4])
def test_labels_that_are_shifted(shift):
    cause, other = probe.judge_labels(LABELS, (LABELS + shift) % NUM, NUM)
    assert (cause.name, cause.strength > 1, other.strength) == ('labels_shifted', True, 0)
    assert cause.figure == f'predictions at the label {shift if shift < 6 else shift - NUM:+d}'


def test_classes_that_are_exchanged():
    taken = np.choose(LABELS, [0, 1, 2, 8, 4, 5, 6, 7, 3, 9])
    _, cause = probe.judge_labels(LABELS, taken, NUM)
    assert (cause.name, cause.strength > 1, cause.measured) == ('labels_swapped', True, '3 for 8, 8 for 3')


def test_classes_that_a_weak_network_takes_for_each_other_more_often_than_not():
    labels, random = np.arange(2000) % NUM, np.random.default_rng(0)
    swapped = np.choose(labels, [0, 1, 2, 8, 4, 5, 6, 7, 3, 9])
    taken = np.where(random.random(2000) < 0.3, swapped, random.integers(0, NUM, 2000))
    assert accused(probe.judge_labels(labels, taken, NUM)) == ['labels_swapped']


@pytest.mark.parametrize('taken', [LABELS, np.full_like(LABELS, 7), np.where(LABELS == 3, 8, LABELS)],
                         ids=['right', 'one class only', 'one class lost'])
def test_predictions_that_no_permutation_explains(taken):
    assert accused(probe.judge_labels(LABELS, taken, NUM)) == []


def test_random_predictions_are_no_permutation():
    random = np.random.default_rng(0)
    for _ in range(100):
        assert accused(probe.judge_labels(LABELS, random.integers(0, NUM, len(LABELS)), NUM)) == []


@pytest.mark.parametrize('share', [0.15, 0.4])
def test_wrong_labels_are_any_class(share):
    random = np.random.default_rng(1)
    labels, logits = predictions(random, 0.9)
    wrong = np.where(random.random(len(labels)) < share, random.integers(0, NUM, len(labels)), labels)
    cause, = probe.judge_noise(Images(None, wrong, logits))
    assert cause.name == 'label_noise' and cause.strength > 1
    assert float(cause.measured.split()[1]) / 100 == pytest.approx(share, rel=0.4)


@pytest.mark.parametrize('right', [0.2, 0.5, 0.75, 0.95])
def test_weak_network_has_no_wrong_labels(right):
    for seed in range(30):
        labels, logits = predictions(np.random.default_rng(seed), right)
        assert accused(probe.judge_noise(Images(None, labels, logits))) == []


def test_network_without_knowledge_has_no_wrong_labels():
    random = np.random.default_rng(2)
    logits = random.standard_normal((2000, NUM))
    assert accused(probe.judge_noise(Images(None, random.integers(0, NUM, 2000), logits))) == []


def images(labels, first=0):
    return [(first + k, int(label)) for k, label in enumerate(labels)]


def test_class_missing_in_a_split():
    rest = LABELS[LABELS != 4]
    for train, validation, split in ((rest, LABELS, 'training'), (LABELS, rest, 'validation')):
        cause, = (c for c in probe.judge_records(images(train), images(validation, 1000), NUM) if c.strength > 1)
        assert (cause.name, cause.measured) == ('classes_missing', '1 of 10, such as 4') and split in cause.figure


def test_classes_that_are_rare_in_both_splits():
    labels = np.repeat(np.arange(NUM), [2, *[100] * 9])
    assert accused(probe.judge_records(images(labels), images(labels, 5000), NUM)) == []


@pytest.mark.parametrize('num_copies, expected', [(3, []), (5, ['leak'])])
def test_images_in_both_splits(num_copies, expected):
    assert accused(probe.judge_records(images(LABELS), images(LABELS, len(LABELS) - num_copies), NUM)) == expected


def test_image_with_two_labels():
    train = [*images(LABELS), *((k, (label + 1) % NUM) for k, label in images(LABELS[:9]))]
    assert accused(probe.judge_records(train, images(LABELS, 5000), NUM)) == ['label_noise']


def test_one_picture_with_many_labels():
    train = [*images(LABELS), *((1000, label % NUM) for label in range(40))]
    assert accused(probe.judge_records(train, images(LABELS, 5000), NUM)) == ['label_noise']


@pytest.mark.parametrize('num_copies, expected', [(100, []), (200, ['repeated_images'])])
def test_images_that_are_repeated(num_copies, expected):
    train = [*images(LABELS), *images(LABELS[:num_copies])]
    assert accused(probe.judge_records(train, images(LABELS, 5000), NUM)) == expected


def right_images(num, of=400):
    return np.arange(of) < num


@pytest.mark.parametrize('before, after, expected', [
    (200, 300, ['channel_order']), (200, 215, []), (4, 60, [])], ids=['gain', 'small gain', 'chance'])
def test_change_after_which_more_images_are_right(before, after, expected):
    changes = {('channel_order', 'images with blue before red'): right_images(after)}
    assert accused(probe.judge_changes(right_images(before), changes, NUM, 0.9, before / 400)) == expected


def test_change_that_helps_all_images_is_less_certain():
    changes = {(name, 'x'): right_images(350) for name in ('channel_order', 'batch_norm')}
    for train_top1, expected in ((0.75, [False, False]), (0.95, [True, False])):
        _, *found = probe.judge_changes(right_images(300), changes, NUM, train_top1, 0.75)
        assert [c.strength > 3 for c in found] == expected


def test_change_that_explains_the_logged_accuracy():
    changes = {('batch_norm', 'fresh statistics'): right_images(50), ('value_range', 'x'): right_images(150)}
    assert accused(probe.judge_changes(right_images(360), changes, NUM, 0.9, 0.12)) == ['evaluation', 'batch_norm']


def test_weights_that_only_decayed():
    random = np.random.default_rng(3)
    initial = {name: random.standard_normal((40, 30)).astype(np.float32) for name in 'ab'}
    moved = {name: a + 1e-3 * random.standard_normal(a.shape).astype(np.float32) for name, a in initial.items()}
    assert accused(probe.judge_weights(initial, moved)) == ['gradient_scale']
    moved['a'] = moved['b'] = random.standard_normal((40, 30)).astype(np.float32)
    assert accused(probe.judge_weights(initial, moved)) == []
    cause, _ = probe.judge_weights(initial, {**moved, 'b': initial['b'] * np.float32(0.8)})
    assert (cause.name, cause.measured, cause.strength) == ('frozen', '1 of 2, such as b', 5)


class Records:
    """Stand-in for a file of images of different sizes."""

    sizes = np.random.default_rng(4).integers(100, 200, 401)

    def num_bytes(self, samples):
        return int(self.sizes[samples].sum())


SHARD, SORTED = Shard(401, 0, 2, 16), np.sort(np.arange(401) % NUM)


def order_causes(order=lambda epoch: epoch_order(SHARD, 7, epoch)):
    read = {e + 1: Records().num_bytes(order(e)) for e in range(3)}
    return accused(probe.judge_order(read, SHARD, 7, Records(), SORTED))


def test_bytes_read_in_the_planned_order():
    assert order_causes() == []


def test_ranks_that_read_equal_images():
    assert set(order_causes(lambda e: np.repeat(epoch_order(SHARD, 7, e)[::2], 2))) == {'equal_shards'}


def test_ranks_that_read_images_in_stored_order():
    assert set(order_causes(lambda e: np.resize(np.arange(401), SHARD.num_positions))) == {'shuffle'}


def test_sorted_images_that_are_not_shuffled(monkeypatch):
    monkeypatch.setattr(probe, 'epoch_order', lambda shard, seed, epoch: np.resize(np.arange(401), shard.num_positions))
    assert accused(probe.judge_order({}, SHARD, 7, Records(), SORTED)) == ['shuffle']


@pytest.mark.parametrize('train, augmented, validation, expected', [
    (0.99, 0.98, 0.9, []), (1.0, 1.0, 0.5, ['overfitting']), (0.9, 0.4, 0.85, ['augmentation']),
    (0.3, 0.9, 0.3, ['augmentation']), (0.6, 0.6, 0.8, [])])
def test_gaps_between_accuracies(train, augmented, validation, expected):
    assert accused(probe.judge_gaps(part(train), part(augmented), part(validation))) == expected


def test_changed_images():
    pixels = np.random.default_rng(5).integers(0, 256, (2, 3, 4, 4)).astype(np.float32)
    data = DataConfig(mean=(100.0, 110.0, 120.0), std=(50.0, 60.0, 70.0))
    mean, std = np.reshape(data.mean, (3, 1, 1)), np.reshape(data.std, (3, 1, 1))
    train = np.random.default_rng(6).standard_normal((2, 3, 4, 4))
    changed = {text: images for (_, text), images in probe.change_images((pixels - mean) / std, train, data).items()}
    np.testing.assert_allclose(changed['values from 0 to 255'], pixels, atol=1e-4)
    np.testing.assert_allclose(changed['blue before red'], (pixels[:, ::-1] - mean) / std, atol=1e-4)
    for k in (1, 2, 3):
        np.testing.assert_array_equal(np.rot90(changed[f'images turned by {90 * k} degrees'], -k, (2, 3)),
                                      changed['half the values'] * 2)
    matched = changed['mean and deviation of training images']
    np.testing.assert_allclose(matched.mean((0, 2, 3)), train.mean((0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(matched.std((0, 2, 3)), train.std((0, 2, 3)), rtol=1e-4)


def test_command_probes_a_network_that_was_not_trained(tmp_path, digits, thin_resnets, monkeypatch, capsys):
    monkeypatch.setattr(probe, '_MOST', 60)
    data = DataConfig(str(digits), 'digits', 1437, 360, 10, image_size=32, resize_shorter=32, crop='none')
    config = Config(RunConfig(seed=5), data, ModelConfig('resnet18'), train=TrainConfig(global_batch_size=64))
    arrays = {n: p.data().asnumpy() for n, p in build_model(config, mx.cpu(), 5).collect_params().items()}
    names = [str(k) for k in range(10)]
    description = describe_weights(config, names, 60, 4, 5, is_best=True, is_last=True)
    save_weights(tmp_path / 'weights', 'best', description, arrays)
    write_run(tmp_path / 'result_0.txt', config, (0.1, 0.1), 'aborted')
    (tmp_path / 'config.yaml').write_text(render_yaml(config))
    assert run([str(tmp_path), '--probe', '--format', 'json']) == 0
    found = json.loads(capsys.readouterr().out)['accuracy']
    assert [c['text'] for c in found['causes'] if c['cause'] == 'frozen'] == [
        'frozen (weight arrays that never changed: 21 of 21, such as conv0_weight, expected none)']
    assert {'figure', 'measured', 'expected', 'verdict'} < found['evidence'][0].keys()
