"""Causes of a missed accuracy that predictions show of labels: exchanged, shifted and wrong ones.
Pure functions."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlperf_rn50.analysis.why.accuracy import Cause, weigh
from mlperf_rn50.text import some

SIGMAS = 4.0  # by chance, a difference is larger in 1 of 16,000 comparisons


class Images(NamedTuple):
    images: np.ndarray  # as given to the network, float32
    labels: np.ndarray
    logits: np.ndarray

    @property
    def taken(self) -> np.ndarray:
        return self.logits.argmax(1)

    @property
    def is_right(self) -> np.ndarray:
        return self.taken == self.labels

    @property
    def top1(self) -> float:
        return float(self.is_right.mean())

    @property
    def least_top1(self) -> float:
        """The Top-1 up to which a network knows too little: twice that of the most frequent
        class."""
        chance = np.bincount(self.labels).max() / len(self.labels)
        return float(min(2 * chance, (1 + chance) / 2))


def _chances(logits: np.ndarray) -> np.ndarray:
    """Return the predicted probability of each class."""
    powers = np.exp(logits.astype(float) - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _assign(labels: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return a class for each label, each once, such that the labels' images have the largest
    probabilities."""
    from scipy.optimize import linear_sum_assignment

    table = 1e-6 * np.eye(chances.shape[1])  # a label without images stays
    np.add.at(table, labels, chances)
    return linear_sum_assignment(table, maximize=True)[1]


def find_exchange(labels: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return the class for which the images of each label are taken, if classes are exchanged, else
    the label.

    Even a weak network that learned the given classes predicts none of them more often on images of
    another one, so no exchange explains its predictions better. Each half of the images tests the
    exchange that the other half suggests.
    """
    num = chances.shape[1]
    half = np.random.default_rng(0).permutation(len(labels)) % 2
    other = np.empty_like(labels)
    for k in (0, 1):
        other[half == k] = _assign(labels[half != k], chances[half != k])[labels[half == k]]
    images = np.arange(len(labels))
    gain = chances[images, other] - chances[images, labels]
    found = _assign(labels, chances)
    cycle = np.arange(num)
    for _ in range(num):
        cycle = np.minimum(cycle, cycle[found])  # the lowest label of each cycle of the exchange
    gains, squares = (np.bincount(cycle[labels], g, num)[cycle] for g in (gain, gain**2))
    return np.where(gains > SIGMAS * np.sqrt(squares), found, np.arange(num))


def judge_labels(labels: np.ndarray, logits: np.ndarray) -> tuple[list[Cause], np.ndarray]:
    """Look for a permutation of the classes that explains predictions better than the labels;
    return new labels, too.

    The logits are those of images that were not trained.
    """
    chances, images, num = _chances(logits), np.arange(len(labels)), logits.shape[1]
    taken = find_exchange(labels, chances)
    at = np.array([chances[images, (labels + k) % num] for k in range(num)])
    k = int(at[1:].mean(1).argmax()) + 1
    gain, fair = at[k] - at[0], chances[images, taken[labels]].mean()
    # The largest of several shifts is compared, so that its bound grows with their number.
    most = at[0].mean() + ((SIGMAS**2 + 2 * np.log(num)) * (gain**2).sum()) ** 0.5 / len(labels)
    is_shifted = at[k].mean() > max(most, 0.75 * fair)
    moved = []
    if not is_shifted:
        moved = [f'{a} for {taken[a]}' for a in np.flatnonzero(taken != np.arange(num))]
    shifted = weigh(
        'labels_shifted',
        f'mean probability of the label {k if 2 * k <= num else k - num:+d}',
        at[k].mean(),
        most=min(1.0, most),
        strength=8.0 if is_shifted else 0.0,
    )
    swapped = Cause(
        'labels_swapped',
        8.0 if moved else 0.0,
        'classes taken for another',
        some(moved, 6) or 'none',
        'none',
    )
    return [shifted, swapped], (labels + k) % num if is_shifted else taken[labels]


def judge_noise(split: str, images: Images, is_fitting: bool = False) -> Iterator[Cause]:
    """Look for wrong labels of the surest quarter of the predictions; is_fitting: similar images
    have equal labels.

    A network takes an image for a similar class, so the label has a large logit; that of a wrong
    label is in the lower half as often as not. Up to 1 % there are usual, or a third of the images
    that it takes for others.
    """
    ordered = np.sort(images.logits, 1)
    sure = np.argsort(ordered[:, -2] - ordered[:, -1])[: len(ordered) // 4]
    ranks = (ordered[sure] > images.logits[sure, images.labels[sure]][:, None]).sum(1)
    num = max(1, len(sure))
    wrong, far = int((ranks > 0).sum()), int((2 * ranks >= ordered.shape[1]).sum())
    most = max(8, 0.025 * num, 0.01 * num + SIGMAS * (0.01 * num) ** 0.5, wrong / 3)
    yield weigh(
        'label_noise',
        f'{split} labels that surely are another class',
        min(1.0, 2 * far / num),
        most=min(1.0, 2 * most / num),
        strength=0.0 if is_fitting else 4.0,
    )
