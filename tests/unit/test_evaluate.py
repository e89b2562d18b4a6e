"""Evaluation: correct counts, confusion matrix and likeliest classes."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.cli.classify import likeliest
from mlperf_rn50.cli.evaluate import _answer
from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import Batch
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.zoo import build_model
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.evaluate import (
    NO_CLASS,
    Accuracy,
    Confusion,
    ConfusionMatrix,
    evaluate,
    with_mirror,
)
from mlperf_rn50.train.options import TrainConfig


def batch(logits, labels, num_valid=None) -> Batch:
    num_valid = len(labels) if num_valid is None else num_valid
    return Batch(mx.nd.array(logits), mx.nd.array(labels, dtype='int32'), num_valid)


def evaluated(*batches, num_images=None, **keys) -> Accuracy:
    """Return the accuracy of given logits, which a single rank has."""
    num_images = num_images or sum(b.num_valid for b in batches)
    return evaluate(lambda logits: logits, batches, num_images, Comm(), **keys)


def counts(logits, labels) -> list[int]:
    accuracy = evaluated(batch(logits, labels))
    return [accuracy.num_top1, accuracy.num_top5]


def random_logits(num_images, num_classes):
    random = np.random.default_rng(0)
    return random.normal(size=(num_images, num_classes)), random.integers(
        0, num_classes, num_images
    )


def test_counts_match_sorting():
    logits, labels = random_logits(200, 20)
    ranked = np.argsort(-logits, axis=1)
    assert counts(logits, labels) == [
        sum(label in row[:k] for row, label in zip(ranked, labels)) for k in (1, 5)
    ]


@pytest.mark.parametrize('num_classes', [4, 5, 6, 10])
def test_an_image_with_nan_is_never_correct(num_classes):
    logits = np.zeros((5, num_classes))
    logits[:3, 0] = 5
    logits[0, :] = logits[1, 2] = logits[2, 1:4] = logits[3, 0] = np.nan
    assert counts(logits, [0] * 5) == [1, 1]


def test_ties_rank_by_class_number_and_top5_includes_all_of_fewer_classes():
    assert counts(np.zeros((7, 7)), range(7)) == [1, 5]
    assert counts(np.eye(3), [0, 1, 0]) == [2, 3]


def test_images_are_counted_once_and_a_wrong_number_is_an_error():
    batches = [batch(np.eye(4), range(4), n) for n in (4, 4, 2)]
    assert evaluated(*batches) == Accuracy(10, 10, 10)
    for num_images in (9, 11):
        with pytest.raises(RunFailed, match=f'got 10 images over all ranks, expected {num_images}'):
            evaluated(*batches, num_images=num_images)


@pytest.mark.parametrize(
    'device, num_images, num_off, text, code',
    [
        ('cpu', 50_000, 0, '70.00 %, the same', 0),
        ('cpu', 50_000, 1, '70.00 %, NOT THE SAME', 1),
        ('gpu', 50_000, 50, '70.00 %, the same within the rounding of a GPU', 0),
        ('gpu', 50_000, 51, '70.00 %, NOT THE SAME', 1),
        ('gpu', 360, 1, '70.00 %, the same within the rounding of a GPU', 0),
        ('gpu', 360, 2, '70.00 %, NOT THE SAME', 1),
    ],
)
def test_top1_of_the_log_is_exact_on_cpus_and_within_rounding_on_gpus(
    device, num_images, num_off, text, code
):
    weights = SimpleNamespace(path=Path('best.npz'), description=SimpleNamespace(epoch=3))
    config = Config(train=TrainConfig(device=device))
    accuracy = Accuracy(num_images * 7 // 10 + num_off, num_images, num_images)
    answer = _answer(config, weights, accuracy, logged=0.7, confusions=[])
    assert answer.exit_code == code
    assert text in [cell.text for table in answer.tables for row in table.rows for cell in row]


class Slow(mx.operator.CustomOp):
    """A network whose first batch is ready once many further batches were given, or after 1 s."""

    has_many_waiting = threading.Event()
    was_far_behind = None

    def forward(self, is_train, req, in_data, out_data, aux):
        Slow.was_far_behind = self.has_many_waiting.wait(1)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register('slow')
class SlowProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, in_shapes, in_dtypes):
        return Slow()


def test_python_gives_the_device_few_batches_in_advance():
    """Otherwise the watchdog sees no sign of life while the device computes."""
    batches = [batch(np.eye(4), range(4))] * 30
    num_given = 0

    def on_batch():
        nonlocal num_given
        num_given += 1
        if num_given == 10:
            Slow.has_many_waiting.set()

    def net(logits):
        return mx.nd.Custom(logits, op_type='slow') if num_given == 1 else logits

    evaluate(net, iter(batches), 120, Comm(), on_batch=on_batch)
    assert num_given == 30
    assert Slow.was_far_behind is False


def matrix_of(logits, labels, num_valid=None) -> ConfusionMatrix:
    matrix = ConfusionMatrix(len(logits[0]))
    accuracy = evaluated(batch(logits, labels, num_valid), on_logits=matrix.add)
    assert matrix.counts.trace() == accuracy.num_top1 and matrix.counts.sum() == accuracy.num_images
    return matrix


@pytest.mark.parametrize('kind', ['normal', 'ties', 'infinite', 'nan'])
def test_diagonal_matches_the_correct_counts(kind):
    logits, labels = random_logits(300, 7)
    if kind == 'ties':
        logits = np.round(logits)
    elif kind == 'infinite':
        logits[np.abs(logits) > 1] *= np.inf
    elif kind == 'nan':
        logits[logits > 1] = np.nan
    matrix = matrix_of(logits, labels)
    np.testing.assert_array_equal(matrix.counts.sum(axis=1), np.bincount(labels, minlength=7))
    assert (matrix.counts[:, -1].sum() > 0) == (kind == 'nan')
    assert matrix_of(logits, labels, 200).counts.sum() == 200  # no padding


def test_confusions_are_sorted_by_frequency_then_class():
    taken = [(0, 1), (2, 1), (2, 1), (1, 0), (1, 0), (1, 2), (0, 0), (2, 2)]
    matrix = matrix_of(np.eye(3)[[t for _, t in taken]], [c for c, _ in taken])
    found = matrix.largest(100, 'xyz')
    assert [c.true_class + c.taken_for for c in found] == ['yx', 'zy', 'xy', 'yz']
    assert [c.num_images for c in found] == [2, 2, 1, 1]
    assert [c.share for c in found] == [2 / 3, 2 / 3, 1 / 2, 1 / 3]
    assert matrix.largest(3, 'xyz') == found[:3]
    [confusion] = matrix_of(np.full((2, 3), np.nan), [1, 1]).largest(5, 'xyz')
    assert confusion == Confusion('y', NO_CLASS, 2, 1.0)


def test_sum_over_ranks_is_exact():
    class TwoRanks(Comm):
        def gather_object(self, value, only_on_rank_0=False):
            # places and counts of three ranks, of which the last one has no image
            return [value, [[3, 6], [2**53, 2**53]], [[], []]]

    matrix = matrix_of(np.eye(3), [0, 1, 1])
    matrix.sum(TwoRanks())
    assert matrix.counts[1, 2] == 2**53 + 1 and matrix.counts[0, 3] == 2**53


def test_likeliest_classes_of_logits():
    guesses = likeliest(np.array([0, 1000, 1, 1000, -5, 999], np.float32), 'abcdef')
    assert ''.join(g.name for g in guesses) == 'bdfca'
    assert [g.number for g in guesses] == [1, 3, 5, 2, 0]
    assert guesses[0].probability == pytest.approx(1 / (2 + np.exp(-1)))
    assert guesses[4].probability == 0
    assert len(likeliest(np.zeros(3, np.float32), 'abc')) == 3


def test_logits_of_an_image_and_its_mirror_image_are_averaged(thin_resnets):
    """A network with static memory must not overwrite its earlier output."""
    data = DataConfig(eval_flip=True, image_size=16, num_classes=4)
    config = Config(data=data, model=ModelConfig(name='resnet18'))
    net = build_model(config, mx.cpu(), 0)
    images = mx.nd.array(np.random.default_rng(0).normal(size=(2, 3, 16, 16)))
    each = [net(x).asnumpy() for x in (images, images[:, :, :, ::-1])]
    assert (each[0] != each[1]).any()
    got = with_mirror(net, config)(images).asnumpy()
    np.testing.assert_array_equal(got, (each[0] + each[1]) / 2)
    by_rows = replace(config, model=ModelConfig(layout='NHWC'))
    row = mx.nd.array([[[[1], [3], [8]]]])
    assert with_mirror(lambda x: x, by_rows)(row).asnumpy().ravel().tolist() == [4.5, 3, 4.5]
