"""`why --probe`: causes of a missed accuracy, measured on a run's last weights and its images, in minutes on a CPU.

Each `judge_` function yields figures. Those that are accused have a fixed strength, the larger the more certain.
"""
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from mlperf_rn50.analysis.why.accuracy import Cause, weigh
from mlperf_rn50.analysis.why.load import WhyRun
from mlperf_rn50.data.batches import Batch, eval_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.records import RecordFile, find_split
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.errors import DataError
from mlperf_rn50.model.weights import LAST, find_weights, load_weights, portable
from mlperf_rn50.model.zoo import build_model, restore_model
from mlperf_rn50.runfolder.records import EpochRecord, ResumedRecord
from mlperf_rn50.text import percent
from mlperf_rn50.train.evaluate import Forward, with_mirror
from mlperf_rn50.train.plan import make_plan

_SIGMAS = 4.0  # by chance, a difference is larger in 1 of 16,000 comparisons
_SIZE, _MOST_RECORDS = 50, 150_000  # images of a forward pass; records that are read per split
_MOST, _MOST_PIXELS = 2000, 25e6  # classified images per split, and their pixels
_RENEWING = 40  # batches after which 1 % of the old statistics of BatchNorm are left with momentum 0.9
# Distances between directions of weights: by rounding alone, and a fifth of that after a short run on digits.
_ROUNDING, _SLIGHT = 1e-6, 0.02


class Images(NamedTuple):
    images: np.ndarray  # as given to the network, float32
    labels: np.ndarray
    logits: np.ndarray

    @property
    def is_right(self) -> np.ndarray:
        return self.logits.argmax(1) == self.labels


def exceeds(count: Any, other: Any) -> Any:
    """Return whether a count is larger than another one by more than _SIGMAS standard errors of the difference."""
    return count - other > _SIGMAS * np.sqrt(count + other)


def judge_labels(labels: np.ndarray, taken: np.ndarray, num: int) -> Iterator[Cause]:
    """Look for a permutation of the classes that explains predictions on validation images better than the labels."""
    shifts, table = np.bincount((taken - labels) % num, minlength=num), np.zeros((num, num), int)
    k = int(shifts[1:].argmax()) + 1
    is_shifted = 3 * shifts[k] > len(labels) and exceeds(shifts[k], shifts[0])
    right, moved = (percent(n / len(labels)) for n in (shifts[0], shifts[k]))
    yield Cause('labels_shifted', 8.0 * is_shifted, f'predictions at the label {k if 2 * k <= num else k - num:+d}',
                moved, f'less than at the label, {right}')
    np.add.at(table, (labels, taken), 1)
    other = table.argmax(1)
    exchanged = np.flatnonzero(exceeds(table.max(1), table.diagonal()))
    is_swapped = not is_shifted and len(exchanged) > 0 and {*exchanged} == {*other[exchanged]}
    yield Cause('labels_swapped', 8.0 * is_swapped, 'classes taken for another',
                ', '.join(f'{a} for {other[a]}' for a in exchanged[:6]) or 'none', 'no exchange of classes')


def judge_noise(*splits: Images) -> Iterator[Cause]:
    """Look for wrong labels of the surest quarter of the predictions of a network that generalises.

    It takes an image for a similar class, so the label has a large logit. The logit of a wrong label is in the lower
    half as often as not. Up to 1 % of the images there are usual, and a third of the predictions must be right.
    """
    is_accused, shares = False, []
    for images in splits:
        ordered = np.sort(images.logits, 1)
        sure = np.argsort(ordered[:, -2] - ordered[:, -1])[:len(ordered) // 4]
        ranks = (ordered[sure] > images.logits[sure, images.labels[sure]][:, None]).sum(1)
        num, wrong, far = len(sure), int((ranks > 0).sum()), int((2 * ranks >= ordered.shape[1]).sum())
        most = max(8, 0.025 * num, 0.01 * num + _SIGMAS * (0.01 * num) ** 0.5, wrong / 3)
        is_accused |= far > most and 3 * wrong < 2 * num
        shares.append(percent(2 * far / num, '.0f'))
    yield Cause('label_noise', 4.0 * is_accused, 'training and validation labels that surely are another class',
                f'about {" and ".join(shares)}', 'at most 2 %')


def judge_records(train: Sequence[tuple[int, int]], validation: Sequence[tuple[int, int]], num: int) -> Iterator[Cause]:
    """Compare the splits, given as the (hash, label) of each image; single copies are usual in data sets."""
    ours, theirs = (np.bincount([label for _, label in part], minlength=num) for part in (train, validation))
    for split, own, other in (('training', ours, theirs), ('validation', theirs, ours)):
        # A tenth of the mean, and a quarter of the other split's share, because classes may be rare in both.
        few = np.flatnonzero((10 * num * own < own.sum()) & (4 * own * other.sum() < other * own.sum()))
        is_accused = len(few) > 0 and own.sum() > 20 * num  # otherwise by chance
        yield Cause('classes_missing', 6.0 * is_accused, f'classes that are rare or missing in {split} images',
                    f'{len(few)} of {num}, such as {few[0]}' if len(few) else 'none', 'none')
    known = dict(train)
    yield weigh('leak', 'validation images that are also training images', sum(key in known for key, _ in validation),
                most=max(3, 0.01 * len(validation)))
    num_labels = Counter(key for key, _ in {*train})
    yield weigh('label_noise', 'training images that recur with another label',
                sum(num_labels[key] > 1 for key, _ in train), most=max(3, 0.01 * len(train)))
    yield weigh('repeated_images', 'training images that are copies of others', len(train) - len(known),
                most=max(3, 0.25 * len(train)))


def judge_changes(right: np.ndarray, changes: Mapping[tuple[str, str], np.ndarray], num: int, train_top1: float,
                  logged: float | None) -> Iterator[Cause]:
    """Look for a change after which more validation images are right, or as many as logged, unlike without it.

    It is more certain if training images do better, because the statistics of BatchNorm lag early in any run.
    """
    top1, error = float(right.mean()), _SIGMAS * 0.5 / len(right) ** 0.5
    logged = top1 if logged is None else logged
    is_logged = abs(logged - top1) < error
    yield Cause('evaluation', 4.5 * (not is_logged), 'Top-1 that the run measured', percent(logged),
                f'that of its weights, {percent(top1)}')
    for (name, text), other in changes.items():
        gained, lost, now = int((other & ~right).sum()), int((right & ~other).sum()), float(other.mean())
        is_better = exceeds(gained, lost) and gained - lost > 0.05 * len(right) and now > 2 / num
        is_certain = train_top1 - top1 > max(error, 0.05) and name != 'batch_norm'
        explains = not is_logged and abs(logged - now) < error
        strength = now + 2 + 2 * is_certain if is_better else explains * (4 - abs(logged - now))
        yield Cause(name, strength, f'Top-1 with {text}', percent(now), f'at most {percent(top1)}')


def judge_weights(initial: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray]) -> Iterator[Cause]:
    """Compare the directions of weights, which weight decay does not change, with the initial ones."""
    moved = {}
    for name, first in initial.items():
        if first.ndim > 1 and first.shape == last[name].shape:
            directions = [a / np.linalg.norm(a.astype(float)) for a in (first, last[name])]
            moved[name] = float(np.linalg.norm(directions[0] - directions[1]))
    kept, second = [n for n, distance in moved.items() if distance < _ROUNDING], sorted(moved.values())[-2]
    is_slight = _ROUNDING < second < _SLIGHT
    yield Cause('frozen', 5.0 * (len(kept) > 0 and not is_slight), 'weight arrays that never changed',
                f'{len(kept)} of {len(moved)}, such as {kept[0]}' if kept else 'none', 'none')
    yield Cause('gradient_scale', 2.5 * is_slight, 'turn of all weight arrays but one, relative to their size',
                percent(second), f'at least {percent(_SLIGHT)}')


def judge_order(read: Mapping[int, int], shard: Shard, seed: int, records: RecordFile,
                labels: np.ndarray) -> Iterator[Cause]:
    """Compare the order of labels, and the bytes read by epoch, with what seed and number of ranks determine."""
    orders, num = [epoch_order(shard, seed, epoch) for epoch in range(3)], len(labels)
    same, usual = (np.diff(labels[orders[0]]) == 0).sum(), num * ((np.bincount(labels) / num) ** 2).sum()
    yield Cause('shuffle', 5.0 * exceeds(same, usual), 'images that follow one of their class', f'{same} of {num}',
                f'about {usual:.0f}')
    for epoch, expected in enumerate(map(records.num_bytes, orders), 1):
        got, is_stored = read.get(epoch, expected), records.num_bytes(np.resize(np.arange(num), shard.num_positions))
        name, how = ('shuffle', ' in stored order') if got == is_stored else ('equal_shards', '')
        yield Cause(name, 5.0 * (got != expected), f'bytes of images{how} read in epoch {epoch}', f'{got:,}',
                    f'{expected:,}')


def judge_gaps(train: Images, augmented: Images, validation: Images) -> Iterator[Cause]:
    """Compare the accuracies on training images, with and without augmentation, and on validation images."""
    a, b, c = (float(part.is_right.mean()) for part in (train, augmented, validation))
    error = _SIGMAS * (0.5 / min(len(part.labels) for part in (train, augmented, validation))) ** 0.5
    figure, measured = 'Top-1 on training, augmented and validation images', ', '.join(map(percent, (a, b, c)))
    yield Cause('augmentation', min(2.5, abs(a - b) / max(0.25, error)), figure, measured, 'similar first figures')
    yield Cause('overfitting', min(2.0, (a - c) / max(0.15, error)), figure, measured, 'a similar last figure')


def change_images(images: np.ndarray, train: np.ndarray, data: DataConfig) -> dict[tuple[str, str], np.ndarray]:
    """Return normalised images as they are after mistakes in their channels, pixels or normalisation."""
    (m, s), (n, t) = ((part.mean((0, 2, 3), keepdims=True), part.std((0, 2, 3), keepdims=True))
                      for part in (images, train))
    mean, std = (np.array(v, np.float32).reshape(1, 3, 1, 1) for v in (data.mean, data.std))
    raw = images * std + mean
    return {('channel_order', 'blue before red'): (raw[:, ::-1] - mean) / std,
            ('orientation', 'images upside down'): images[:, :, ::-1],
            ('orientation', 'transposed images'): images.swapaxes(2, 3),
            ('orientation', 'mirrored images'): images[..., ::-1],
            **{('orientation', f'images turned by {90 * k} degrees'): np.rot90(images, k, (2, 3)) for k in (1, 2, 3)},
            ('normalisation', 'inverted images'): (255 - raw - mean) / std,
            ('normalisation', 'mean and deviation of training images'): (images - m) / s * t + n,
            ('normalisation', 'twice the values'): 2 * images,
            ('normalisation', 'half the values'): images / 2,
            ('value_range', 'values from 0 to 255'): raw,
            ('value_range', 'values from 0 to 1'): raw / 255,
            ('value_range', '255 times the values'): (255 * raw - mean) / std}


def _classify(net: Forward, images: np.ndarray) -> np.ndarray:
    return np.concatenate([net(mx.nd.array(images[i:i + _SIZE])).asnumpy() for i in range(0, len(images), _SIZE)])


def _images(net: Forward, batches: Iterable[Batch]) -> Images:
    parts = [(b.images[:b.num_valid].asnumpy(), b.labels[:b.num_valid].asnumpy()) for b in batches if b.num_valid]
    images, labels = (np.concatenate(part) for part in zip(*parts))
    return Images(images, labels, _classify(net, images))


def _renew_statistics(net: mx.gluon.HybridBlock, images: np.ndarray) -> None:
    """Recompute the running statistics of BatchNorm, as MXNet does in the backward pass."""
    for start in range(0, _RENEWING * _SIZE, _SIZE):
        with mx.autograd.record():
            logits = net(mx.nd.array(images.take(range(start, start + _SIZE), 0, mode='wrap')))
        logits.backward()


def probe(run: WhyRun) -> list[Cause]:
    """Return the figures that weights and images show, accused or not. Raise UserError if either is unusable."""
    original, folder, log = run.config, run.folder, run.log
    if not original or not log or not log.num_ranks:
        raise DataError(f'{folder.config}: expected a readable configuration, and a log with the number of ranks')
    description, arrays = load_weights(find_weights(folder.weights, LAST))
    config, arrays = portable(replace(original, model=replace(original.model, bn_momentum=0.9)), arrays)
    data, seed, num = config.data, config.run.seed or 0, config.data.num_classes
    most = min(_MOST, int(_MOST_PIXELS / data.image_size ** 2))
    trained, renewing = (restore_model(config, mx.cpu(), arrays, str(folder.dir)) for _ in range(2))
    net, renewed = (with_mirror(n, config) for n in (trained, renewing))
    train, validation = (_images(net, eval_batches(config, Shard(n, 0, -(-n // most), _SIZE), None, split)())
                         for split, n in (('train', data.num_train), ('validation', data.num_val)))
    batches = train_batches(config, Shard(data.num_train, 0, 1, _SIZE), 0, 0, None)
    augmented = _images(net, islice(batches, -(-min(most, data.num_train) // _SIZE)))
    _renew_statistics(renewing, augmented.images)
    changed = change_images(validation.images, train.images, data)
    after = {key: _classify(net, images) for key, images in changed.items()}
    sound, sound_train = (part._replace(logits=_classify(renewed, part.images)) for part in (validation, train))
    after['batch_norm', 'recomputed statistics of BatchNorm'] = sound.logits
    initial = build_model(config, mx.cpu(), seed, is_plain=True).collect_params()
    records = [find_split(data, split)() for split in ('train', 'validation')]
    scanned, others = ([(hash(r.image.tobytes()), r.label) for r in map(
        part.read, range(0, len(part), -(-len(part) // _MOST_RECORDS)))] for part in records)
    found = [*judge_labels(sound.labels, sound.logits.argmax(1), num),
             *judge_noise(sound_train, sound), *judge_records(scanned, others, num),
             *judge_changes(validation.is_right, {k: v.argmax(1) == validation.labels for k, v in after.items()}, num,
                            float(train.is_right.mean()), description.top1),
             *judge_weights({n: p.data().asnumpy() for n, p in initial.items()}, arrays),
             *judge_gaps(train, augmented, validation)]
    if data.shuffle == 'global' and len(scanned) == data.num_train and not run.last(ResumedRecord):
        read = {r.epoch: sum(r.record_bytes.values()) for r in run.all(EpochRecord) if not data.record_cache_mib}
        shard = make_plan(original, log.num_ranks).train_shard()
        found += judge_order(read, shard, seed, records[0], np.array([label for _, label in scanned]))
    return found
