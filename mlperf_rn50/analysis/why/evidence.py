"""Figures of images, labels, predictions and weights, and the causes of a missed accuracy that they
show. Pure.

A figure is beyond its bound only if chance does not explain it; its fixed strength is the larger,
the more certain.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from mlperf_rn50.analysis.why.accuracy import Cause, weigh
from mlperf_rn50.analysis.why.labels import SIGMAS, Images, judge_labels, judge_noise
from mlperf_rn50.text import percent

_CHANGE_SIGMAS = 3.2  # of changes, which must also make 5 % of the images right
# Distances between directions of weights: by rounding alone, and a fifth of that after a short run
# on digits.
_ROUNDING, _SLIGHT = 1e-6, 0.02
_FITTED = 0.9  # Top-1 on training images from which a network may know them by heart
# Usual ratios of the splits: 1.1 for random ones, 2.8 in fine detail if one was resized twice, 20
# if one is blurred.
_DETAILS = (
    ('blur_or_noise', 'coarse detail', 2),
    ('blur_or_noise', 'fine detail', 3),
    ('colour', 'colour', 8),
)
# Differences of the splits, and changes of images, that explain others.
_SPLITS = {'blur_or_noise', 'colour', 'classes_missing'}
_CHANGES = {'channel_order', 'orientation', 'normalisation', 'value_range'}


def when_trained(is_early: bool, causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes; if it is too early for them, accuse none."""
    for cause in causes:
        yield cause._replace(strength=0.0, verdict='too early') if is_early else cause


def judge_records(
    train: Sequence[tuple[int, int]], validation: Sequence[tuple[int, int]], num: int
) -> Iterator[Cause]:
    """Compare the splits, given as the (hash, label) of each image; single copies are usual in data
    sets."""
    ours, theirs = (
        np.bincount([k for _, k in part], minlength=num) for part in (train, validation)
    )
    for split, own, other in (('training', ours, theirs), ('validation', theirs, ours)):
        # A tenth of the mean, and a quarter of the other split's share, because classes may be rare
        # in both.
        is_rare = (10 * num * own < own.sum()) & (4 * own * other.sum() < other * own.sum())
        few = np.flatnonzero(is_rare)
        is_accused = len(few) > 0 and own.sum() > 20 * num  # otherwise by chance
        yield Cause(
            'classes_missing',
            6.0 if is_accused else 0.0,
            f'classes that are rare or missing in {split} images',
            f'{len(few)} of {num}, such as {few[0]}' if is_accused else 'none',
            'none',
        )
    known = dict(train)
    num_leaked = sum(key in known for key, _ in validation)
    num_labels = Counter(key for key, _ in {*train})
    num_contrary = sum(num_labels[key] > 1 for key, _ in train)
    figure = 'validation images that are also training images'
    yield weigh('leak', figure, num_leaked, most=max(3, len(validation) // 100))
    figure = 'training images that recur with another label'
    yield weigh('label_noise', figure, num_contrary, most=max(3, len(train) // 100))
    num_copies, figure = len(train) - len(known), 'training images that are copies of others'
    yield weigh('repeated_images', figure, num_copies, most=max(3, len(train) // 4))


def judge_changes(
    validation: Images,
    after: Mapping[tuple[str, str], np.ndarray],
    *,
    fair: float,
    train_top1: float,
    logged: float | None,
) -> Iterator[Cause]:
    """Look for a change after which more validation images are right, or as many as logged, unlike
    without it.

    It is more certain if training images do better, because the statistics of BatchNorm lag early
    in any run.

    after: logits by name and text of the change; fair: Top-1 that other labels explain, which a
    change must exceed; logged: Top-1 that the run measured with the same weights, or None.
    """
    right, top1, num = validation.is_right, validation.top1, len(validation.labels)
    error = SIGMAS * 0.5 / num**0.5
    logged = top1 if logged is None else logged
    is_logged = abs(logged - top1) <= error
    low, high = percent(max(0.0, top1 - error)), percent(min(1.0, top1 + error))
    yield Cause(
        'evaluation',
        0.0 if is_logged else 4.5,
        'Top-1 that the run measured',
        percent(logged),
        f'{low} to {high}, that of its weights',
    )
    for (name, text), logits in after.items():
        other = logits.argmax(1) == validation.labels
        now, num_changed = float(other.mean()), int((other != right).sum())
        by_chance = max(0.05, _CHANGE_SIGMAS * num_changed**0.5 / num)
        most = min(1.0, max(fair, validation.least_top1, top1 + by_chance))
        is_certain = train_top1 - top1 > max(error, 0.05) and name != 'batch_norm'
        strength = now + (4 if is_certain else 2)
        found = weigh(name, f'Top-1 with {text}', now, most=most, strength=strength)
        if not is_logged and abs(logged - now) < error and found.strength <= 1:
            expected = 'not that which the run measured'
            found = Cause(name, 4 - abs(logged - now), found.figure, found.measured, expected)
        yield found


def judge_weights(
    initial: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray]
) -> Iterator[Cause]:
    """Compare the directions of weights, which weight decay does not change, with the initial
    ones."""
    moved = {}
    for name, first in initial.items():
        if first.ndim > 1 and first.shape == last[name].shape:
            directions = [a / np.linalg.norm(a.astype(float)) for a in (first, last[name])]
            moved[name] = float(np.linalg.norm(directions[0] - directions[1]))
    kept = [name for name, distance in moved.items() if distance < _ROUNDING]
    second = sorted(moved.values())[-2]
    is_slight = _ROUNDING < second < _SLIGHT
    frozen = Cause(
        'frozen',
        5.0 if kept else 0.0,
        f'weight arrays that turned by less than {_ROUNDING:g} of their length',
        f'{len(kept)} of {len(moved)}, such as {kept[0]}' if kept else 'none',
        'none',
    )
    yield from when_trained(is_slight, [frozen])
    yield Cause(
        'gradient_scale',
        2.5 if is_slight else 0.0,
        'turn of all weight arrays but one, relative to their length',
        percent(second),
        f'at least {percent(_SLIGHT)}',
    )


def judge_gaps(train: Images, augmented: Images, validation: Images) -> Iterator[Cause]:
    """Compare the accuracies on training images, with and without augmentation, and on validation
    images."""
    parts = (train, augmented, validation)
    plain, changed, held = (part.top1 for part in parts)
    error = SIGMAS * (0.5 / min(len(part.labels) for part in parts)) ** 0.5
    gap, fall = max(0.25, error), max(0.15, error)
    yield weigh(
        'augmentation',
        f'Top-1 on augmented training images, {percent(plain)} on others',
        changed,
        least=max(0.0, plain - gap),
        most=min(1.0, plain + gap),
        strength=min(2.5, abs(plain - changed) / gap),
    )
    knows_enough = held > validation.least_top1
    yield weigh(
        'overfitting',
        f'Top-1 on validation images, {percent(plain)} on training images',
        held,
        least=max(0.0, plain - fall) if plain >= _FITTED else 0.0,
        strength=min(2.0, (plain - held) / fall) if knows_enough else 0.0,
    )


def measure_detail(images: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Return coarse detail, fine detail and colour of each image relative to its large shapes, (3,
    images)."""
    from scipy.fft import dctn

    raw = images * np.reshape(std, (3, 1, 1)) + np.reshape(mean, (3, 1, 1))
    waves, side = dctn(raw, axes=(2, 3), norm='ortho'), raw.shape[-1]
    grey = waves.mean(1)
    colour = ((waves - grey[:, None]) ** 2).mean(1)
    grey[:, 0, 0] = 0.0
    # relative to the highest one that the pixels can show
    frequency = np.hypot(*np.mgrid[:side, :side]) / side
    bands = ((grey**2, 0, 0.25), (grey**2, 0.25, 0.5), (grey**2, 0.5, 2), (colour, 0, 0.25))
    shapes, *details = (
        (power * ((low <= frequency) & (frequency < high))).sum((1, 2))
        for power, low, high in bands
    )
    return np.array(details) / (shapes + side**2)


def judge_detail(train: np.ndarray, validation: np.ndarray) -> Iterator[Cause]:
    """Compare the splits by what measure_detail() returns for them."""
    splits = (np.log(part + 1e-4) for part in (train, validation))
    for (name, what, factor), ours, theirs in zip(_DETAILS, *splits):
        error = (ours.var() / len(ours) + theirs.var() / len(theirs)) ** 0.5
        margin = max(np.log(factor), SIGMAS * error)
        yield weigh(
            name,
            f'{what} of training images, relative to that of validation images',
            np.exp(ours.mean() - theirs.mean()),
            least=np.exp(-margin),
            most=np.exp(margin),
            strength=4.8,
        )


def _nearest(images: np.ndarray, labels: np.ndarray, num: int) -> float:
    """Return the share of images whose most similar one, other than copies, has the same label."""
    some = np.linspace(0, len(labels) - 1, num).astype(int)
    flat = images[some].reshape(num, -1)
    flat = flat - flat.mean(1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True) + 1e-9
    alike = flat @ flat.T
    alike[alike > 0.9999] = -1.0
    return float((labels[some][alike.argmax(1)] == labels[some]).mean())


def judge_classes(train: Images, validation: Images) -> Iterator[Cause]:
    """Compare the classes for which images of both splits are taken, which depend on the images but
    not on labels."""
    num = validation.logits.shape[1]
    seen, trained, labelled = (
        np.bincount(classes, minlength=num) / len(classes)
        for classes in (validation.taken, train.taken, validation.labels)
    )
    # classes may be rarer in one split
    moved = min(abs(seen - other).sum() / 2 for other in (trained, labelled))
    noise = 1 / len(train.labels) + 1 / len(validation.labels)
    by_chance = (((seen + trained) * noise) ** 0.5).sum() / 2
    yield weigh(
        'images_differ',
        'part of the validation images that is taken for other classes than training images',
        moved,
        most=min(1.0, 0.05 + by_chance),
        strength=1.5,
    )


def judge_neighbours(train: Images, validation: Images) -> tuple[list[Cause], set[str]]:
    """Compare how often similar images of a split have equal labels, which needs no network.

    A tenth of random labels lowers the share by a fifth. Images of a lower quality lower it less.
    Return also the splits whose labels fit their images, as far as the share of the other split is
    far above chance.
    """
    num = min(len(train.labels), len(validation.labels), 1000)
    shares = [_nearest(part.images, part.labels, num) for part in (train, validation)]
    causes, fitting = [], set()
    for split, own, other in zip(('training', 'validation'), shares, reversed(shares)):
        error = (2 * other * (1 - other) / num) ** 0.5
        least = max(0.0, other - max(0.2 * other, SIGMAS * error))
        figure = f'{split} images whose most similar one has the same label'
        causes.append(weigh('label_noise', figure, own, least, strength=4.2))
        if other > train.least_top1 and own >= other - 1.5 * error:
            fitting.add(split)
    return causes, fitting


def judge_predictions(
    train: Images,
    augmented: Images,
    validation: Images,
    after: Mapping[tuple[str, str], np.ndarray],
    *,
    sound_train: Images,
    sound: Images,
    logged: float | None,
    is_early: bool,
) -> Iterator[Cause]:
    """Yield what predictions show; what a change of images or of labels explains has no other
    cause.

    after: logits of validation images by name and text of the change; sound_train, sound: images
    with the logits for recomputed statistics of BatchNorm; logged: Top-1 that the run measured with
    these weights; is_early: whether the network was trained for too few epochs.
    """
    causes, labels = judge_labels(sound.labels, sound.logits)
    fair = float((sound.taken == labels).mean()) if (labels != sound.labels).any() else 0.0
    evaluation, *changes = judge_changes(
        validation, after, fair=fair, train_top1=train.top1, logged=logged
    )
    better = {}
    for change, logits in zip(changes, after.values()):
        part = validation._replace(logits=logits)
        if change.strength > 1 and part.top1 > validation.top1:
            better[change] = part
    if better:
        best = max(better, key=lambda change: better[change].top1)
        changes = [c if c == best else c._replace(strength=0.0) for c in changes]
        sound = validation = better[best]
        causes, labels = judge_labels(sound.labels, sound.logits)
    yield evaluation
    for change in changes:  # the statistics of BatchNorm lag behind the weights early in any run
        yield from when_trained(is_early and change.name == 'batch_norm', [change])
    least = sound_train.least_top1
    is_weak = is_early or sound_train.top1 <= min(1.5 * least, (1 + least) / 2)
    yield from when_trained(is_weak and not any(c.strength > 1 for c in causes), causes)
    similar, fitting = judge_neighbours(train, validation)
    yield from similar
    parts = (
        judge_noise('training', sound_train, 'training' in fitting),
        judge_noise('validation', sound._replace(labels=labels), 'validation' in fitting),
        judge_gaps(train, augmented, validation._replace(labels=labels)),
        judge_classes(sound_train, sound),
    )
    yield from when_trained(is_weak, chain(*parts))


def settle(found: Sequence[Cause]) -> list[Cause]:
    """Return figures; those that a more certain cause explains are not accused."""
    accused = {c.name for c in found if c.strength > 1}
    # ratios of 1.2 or 1.8
    is_unlike = any(c.name == 'blur_or_noise' and c.strength > 0.6 for c in found)
    explained = {'overfitting'} if is_unlike or accused - {'overfitting', 'augmentation'} else set()
    if accused & (_SPLITS | _CHANGES):
        explained.add('images_differ')
    if accused & (_SPLITS | {'images_differ'}):
        explained |= {'label_noise', 'labels_swapped', 'labels_shifted'}
    return [c._replace(strength=0.0) if c.name in explained else c for c in found]
