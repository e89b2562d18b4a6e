"""Counting what is right."""
import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.data.pipeline import Batch
from mlperf_rn50.errors import RunFailed
from mlperf_rn50.train.comm import LocalComm
from mlperf_rn50.train.evaluate import Accuracy, correct_counts, evaluate


def counts(logits, labels, num_valid=None):
    got = correct_counts(mx.nd.array(logits), mx.nd.array(labels, dtype='int32'),
                         len(labels) if num_valid is None else num_valid)
    return [int(n) for n in got.asnumpy()]


def test_against_sorting():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(200, 20)), random.integers(0, 20, 200)
    ranked = np.argsort(-logits, axis=1)
    expected = [sum(label in row[:k] for row, label in zip(ranked, labels)) for k in (1, 5)]
    assert counts(logits, labels) == expected


def test_padding_is_never_scored():
    logits = np.eye(4)
    assert [counts(logits, range(4), n)[0] for n in range(5)] == [0, 1, 2, 3, 4]


def test_not_a_number_is_never_right():
    logits = np.zeros((3, 10))
    logits[0, :] = np.nan
    logits[1, 2] = np.nan
    assert counts(logits, [0, 2, 0]) == [1, 1]


def test_equal_logits_rank_by_class_number_and_fewer_classes_than_five_are_all_in():
    assert counts(np.zeros((7, 7)), range(7)) == [1, 5]
    assert counts(np.eye(3), [0, 1, 0]) == [2, 3]


def _batch(num_valid):
    return Batch(mx.nd.array(np.eye(4)), mx.nd.array(range(4), dtype='int32'), num_valid)


def test_the_whole_set_is_divided_once_and_another_number_of_images_is_an_error():
    batches = [_batch(4), _batch(4), _batch(2)]
    assert evaluate(lambda images: images, batches, 10, LocalComm()) == Accuracy(10, 10, 10)
    for num_images in (9, 11):
        with pytest.raises(RunFailed, match=f'got 10 images over all ranks, expected {num_images}'):
            evaluate(lambda images: images, batches, num_images, LocalComm())
