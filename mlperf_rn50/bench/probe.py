"""`why --probe`: causes of a missed accuracy, measured on a run's last weights and its images, in minutes on a CPU."""
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from mlperf_rn50.analysis.why.accuracy import SIGMAS, SURE, Cause, config_of
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
from mlperf_rn50.train.checkpoint.checkpoint import load_newest
from mlperf_rn50.train.evaluate import Forward, with_mirror
from mlperf_rn50.train.plan import make_plan

_SIZE, _MOST_RECORDS = 50, 150_000  # images of a forward pass; records that are read per split
_MOST, _MOST_LARGE, _LARGE_SIDE = 2000, 500, 65  # classified images per split, also of those from a size in pixels
_RENEWING = 40  # batches after which 1 % of the old statistics of BatchNorm are left with momentum 0.9
# Distances between directions of weights: by rounding alone, and a fifth of that after a short run on digits.
_ROUNDING, _SLIGHT = 1e-6, 0.02
_SAME_PIXELS = 0.25  # difference between the splits, in deviations of pixels; digits have 0.004


class Images(NamedTuple):
    images: np.ndarray  # as given to the network, float32
    labels: np.ndarray
    logits: np.ndarray

    @property
    def is_right(self) -> np.ndarray:
        return self.logits.argmax(1) == self.labels

    @property
    def top1(self) -> float:
        return float(self.is_right.mean())


def exceeds(count: Any, other: Any) -> Any:
    """Return whether a count is larger than another one by more than SIGMAS standard errors of the difference."""
    return count - other > SIGMAS * np.sqrt(count + other)


def judge_labels(labels: np.ndarray, taken: np.ndarray, num: int) -> Iterator[Cause]:
    """Look for a permutation of the classes that explains predictions on validation images better than the labels."""
    shifts, table = np.bincount((taken - labels) % num, minlength=num), np.zeros((num, num), int)
    k = int(shifts[1:].argmax()) + 1
    np.add.at(table, (labels, taken), 1)
    moved = np.flatnonzero(exceeds(table.max(1), table.diagonal()) & (2 * table.max(1) > table.sum(1)))
    if 3 * shifts[k] > len(labels) and exceeds(shifts[k], shifts[0]):
        share, before = (percent(count / len(labels)) for count in (shifts[k], shifts[0]))
        yield Cause('labels_shifted', 8.0, f'the labels of a split are shifted: {share} of predictions are the label '
                    f'{k if 2 * k <= num else k - num:+d}, and {before} the label')
    elif len(moved) and {*moved} == {*table.argmax(1)[moved]}:
        yield Cause('labels_swapped', 8.0, 'classes are exchanged in the labels of a split: validation images of class '
                    + ', '.join(f'{a} are taken for {table[a].argmax()}' for a in moved[:6]))


def judge_noise(labels: np.ndarray, logits: np.ndarray, split: str) -> Iterator[Cause]:
    """Look for wrong labels of the surest quarter of the predictions of a network that generalises.

    It takes an image for a similar class, so the label has a large logit. The logit of a wrong label is in the lower
    half as often as not. Up to 1 % of the images there are usual, and a third of the predictions must be right.
    """
    ordered = np.sort(logits, 1)
    sure = np.argsort(ordered[:, -2] - ordered[:, -1])[:len(ordered) // 4]
    ranks = (ordered[sure] > logits[sure, labels[sure]][:, None]).sum(1)
    num, wrong, far = len(sure), int((ranks > 0).sum()), int((2 * ranks >= ordered.shape[1]).sum())
    if exceeds(far, 0.01 * num) and far > max(8, 0.025 * num, wrong / 3) and 3 * wrong < 2 * num:
        yield Cause('label_noise', 4.0, f'about {percent(2 * far / num, ".0f")} of the {split} labels are wrong: {far} '
                    f'of the {num} surest predictions have a label of the less likely half of the classes')


def judge_records(train: Sequence[tuple[int, int]], validation: Sequence[tuple[int, int]], num: int) -> Iterator[Cause]:
    """Compare the splits, given as the (hash, label) of each image; single copies are usual in data sets."""
    ours, theirs = (np.bincount([label for _, label in part], minlength=num) for part in (train, validation))
    for split, own, other in (('training', ours, theirs), ('validation', theirs, ours)):
        # A tenth of the mean, and a quarter of the other split's share, because classes may be rare in both.
        few = np.flatnonzero((10 * num * own < own.sum()) & (4 * own * other.sum() < other * own.sum()))
        if len(few) and own.sum() > 20 * num:  # otherwise by chance
            yield Cause('classes_missing', 6.0, f'{len(few)} of {num} classes are rare or missing in the {split} '
                        f'images, such as class {few[0]} with {own[few[0]]} of {own.sum()}')
    known, mixed = dict(train), len({*train}) - len({key for key, _ in train})
    both = sum(key in known for key, _ in validation)
    yield Cause('leak', both / max(3, 0.01 * len(validation)), f'{both} of {len(validation)} validation images are '
                'also training images')
    yield Cause('label_noise', mixed / max(3, 0.01 * len(train)), f'{mixed} training images recur with another label')


def judge_changes(right: np.ndarray, changes: Mapping[tuple[str, str], np.ndarray], num: int, train_top1: float,
                  logged: float) -> Iterator[Cause]:
    """Look for a change after which more validation images are right, or as many as logged, unlike without it.

    It is sure if training images do better, because the statistics of BatchNorm lag early in any run, on all images.
    """
    top1, error = float(right.mean()), SIGMAS * 0.5 / len(right) ** 0.5
    for (name, text), other in changes.items():
        gained, lost, now = int((other & ~right).sum()), int((right & ~other).sum()), float(other.mean())
        if exceeds(gained, lost) and gained - lost > 0.05 * len(right) and now > 2 / num:
            is_sure = train_top1 - top1 > max(error, 0.05) and name != 'batch_norm'
            yield Cause(name, now + SURE - (not is_sure), f'with {text}, Top-1 is {percent(now)}, not {percent(top1)}')
        elif abs(logged - top1) > error > abs(logged - now):
            yield Cause(name, SURE + 1 - abs(logged - now), f'the run measured {percent(logged)}, as with {text} '
                        f'({percent(now)}), but its weights reach {percent(top1)}')


def judge_weights(initial: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray]) -> Iterator[Cause]:
    """Compare the directions of weights, which weight decay does not change, with the initial ones."""
    units = [{n: a[n] / np.linalg.norm(a[n].astype(float)) for n in initial if initial[n].ndim > 1}
             for a in (initial, last)]
    moved = {n: float(np.linalg.norm(a - units[1][n])) for n, a in units[0].items() if a.shape == units[1][n].shape}
    kept, second = [n for n, distance in moved.items() if distance < _ROUNDING], sorted(moved.values())[-2]
    if kept and not _ROUNDING < second < _SLIGHT:
        yield Cause('frozen', 5.0, f'{len(kept)} of {len(moved)} weight arrays never changed, such as {kept[0]}')
    yield Cause('gradient_scale', 2.5 * (_ROUNDING < second < _SLIGHT), f'all weight arrays but one turned by at most '
                f'{percent(second)} of their size, so the gradients or the learning rate are too small')


def judge_order(read: Mapping[int, int], shard: Shard, seed: int, records: RecordFile,
                labels: np.ndarray) -> Iterator[Cause]:
    """Compare the order of labels, and the bytes read by epoch, with what seed and number of ranks determine."""
    orders, num = [epoch_order(shard, seed, epoch) for epoch in range(3)], len(labels)
    same, usual = (np.diff(labels[orders[0]]) == 0).sum(), num * ((np.bincount(labels) / num) ** 2).sum()
    yield Cause('shuffle', 5.0 * bool(exceeds(same, usual)), f'{same} of {num} images follow one of their class')
    for epoch, expected in enumerate(map(records.num_bytes, orders), 1):
        if (got := read.get(epoch, expected)) != expected:
            is_plain = got == records.num_bytes(np.resize(np.arange(num), shard.num_positions))
            how = 'images in stored order' if is_plain else 'some images several times'
            yield Cause('shuffle' if is_plain else 'equal_shards', 5.0, f'the ranks read {got:,} bytes in epoch '
                        f'{epoch}, not {expected:,}: {how}')


def judge_gaps(train: Images, augmented: Images, validation: Images) -> Iterator[Cause]:
    a, b, c = train.top1, augmented.top1, validation.top1
    error = SIGMAS * (0.5 / min(len(part.labels) for part in (train, augmented, validation))) ** 0.5
    text = f'Top-1 is {percent(a)} on training, {percent(b)} on augmented and {percent(c)} on validation images'
    yield Cause('augmentation', min(2.5, abs(a - b) / max(0.25, error)), text)
    yield Cause('overfitting', min(2.0, (a - c) / max(0.15, error)), text)
    yield Cause('label_noise', SURE * (c - a) / max(0.1, error), f'training labels may be wrong, because {text}')
    yield Cause('label_noise', 1.1 * (a < 2 / train.logits.shape[1]), f'training labels may be random, because {text}')
    (m, s), (n, t) = ((part.images.mean((0, 2, 3)), part.images.std((0, 2, 3))) for part in (train, validation))
    difference = max(np.abs(m - n).max() / s.min(), np.abs(np.log(s / t)).max())
    yield Cause('normalisation', min(2.5, difference / _SAME_PIXELS), f'channels of training images have '
                f'mean {m.round(2)} and deviation {s.round(2)}, of validation images {n.round(2)} and {t.round(2)}')


def change_images(images: np.ndarray, data: DataConfig) -> dict[tuple[str, str], np.ndarray]:
    """Return normalised images as they are after mistakes in their channels or normalisation."""
    mean, std, usual_mean, usual_std = (np.array(v, np.float32).reshape(1, 3, 1, 1) for v in (
        data.mean, data.std, DataConfig().mean, DataConfig().std))
    raw = images * std + mean
    return {('channel_order', 'images with blue before red'): (raw[:, ::-1] - mean) / std,
            ('normalisation', 'inverted images'): (255 - raw - mean) / std,
            ('normalisation', 'images without subtracted mean'): raw / std,
            ('normalisation', 'images normalised as ImageNet'): (raw - usual_mean) / usual_std,
            ('value_range', 'values from 0 to 255'): raw, ('value_range', 'values from 0 to 1'): raw / 255,
            ('value_range', 'values from -1 to 1'): raw / 127.5 - 1,
            ('value_range', 'values times 255'): (255 * raw - mean) / std}


def _classify(net: Forward, images: np.ndarray) -> np.ndarray:
    return np.concatenate([net(mx.nd.array(images[i:i + _SIZE])).asnumpy() for i in range(0, len(images), _SIZE)])


def _images(net: Forward, batches: Iterable[Batch]) -> Images:
    parts = [(b.images[:b.num_valid].asnumpy(), b.labels[:b.num_valid].asnumpy()) for b in batches if b.num_valid]
    images, labels = (np.concatenate(part) for part in zip(*parts))
    return Images(images, labels, _classify(net, images))


def probe(run: WhyRun) -> list[Cause]:
    """Return the causes that weights and images show, accused or not. Raise UserError if either is unusable."""
    original, folder, log = config_of(run), run.folder, run.log
    if not original or not log or not log.num_ranks:
        raise DataError(f'{folder.config}: expected a readable configuration, and a log with the number of ranks')
    if folder.weights.is_dir():
        description, arrays = load_weights(find_weights(folder.weights, LAST))
        logged = description.top1
    else:
        saved, logged = load_newest(folder.checkpoints).trainer.arrays, log.final_accuracy
        head = 'model/' if original.train.ema is None else 'ema/'
        arrays = {n.removeprefix(head): a.astype(np.float32) for n, a in saved.items() if n.startswith(head)}
    config, arrays = portable(replace(original, model=replace(original.model, bn_momentum=0.9)), arrays)
    data, seed, num = config.data, config.run.seed or 0, config.data.num_classes
    most = _MOST_LARGE if data.image_size >= _LARGE_SIDE else _MOST
    plain, renewing, new = (restore_model(config, mx.cpu(), found, str(folder.dir)) for found in (arrays, arrays, {
        n: np.full_like(a, n.endswith('var')) if 'running' in n else a for n, a in arrays.items()}))
    net, renewed, fresh = (with_mirror(n, config) for n in (plain, renewing, new))
    train, validation = (_images(net, eval_batches(config, Shard(n, 0, -(-n // most), _SIZE), None, split)())
                         for split, n in (('train', data.num_train), ('validation', data.num_val)))
    batches = train_batches(config, Shard(data.num_train, 0, 1, _SIZE), 0, 0, None)
    augmented = _images(net, islice(batches, -(-min(most, data.num_train) // _SIZE)))
    for start in range(0, _RENEWING * _SIZE, _SIZE):  # MXNet renews the statistics in the backward pass
        with mx.autograd.record():
            logits = renewing(mx.nd.array(augmented.images.take(range(start, start + _SIZE), 0, mode='wrap')))
        logits.backward()
    after = {key: _classify(net, images) for key, images in change_images(validation.images, data).items()}
    after |= {('batch_norm', f'BatchNorm statistics of {name}'): _classify(other, validation.images)
              for name, other in (('the last weights', renewed), ('a new network', fresh))}
    sound = after['batch_norm', 'BatchNorm statistics of the last weights']
    initial = build_model(config, mx.cpu(), seed, is_plain=True).collect_params()
    records = [find_split(data, split)() for split in ('train', 'validation')]
    scanned, others = ([(hash(r.image.tobytes()), r.label) for r in map(part.read, range(0, len(part), -(
        -len(part) // _MOST_RECORDS)))] for part in records)
    found = [*judge_labels(validation.labels, sound.argmax(1), num),
             *judge_noise(validation.labels, sound, 'validation'),
             *judge_noise(train.labels, _classify(renewed, train.images), 'training'),
             *judge_records(scanned, others, num),
             *judge_changes(validation.is_right, {k: v.argmax(1) == validation.labels for k, v in after.items()}, num,
                            train.top1, validation.top1 if logged is None else logged),
             *judge_weights({n: p.data().asnumpy() for n, p in initial.items()}, arrays),
             *judge_gaps(train, augmented, validation)]
    if data.shuffle == 'global' and len(scanned) == data.num_train and not run.last(ResumedRecord):
        read = {r.epoch: sum(r.record_bytes.values()) for r in run.all(EpochRecord) if not data.record_cache_mib}
        shard = make_plan(original, log.num_ranks).train_shard()
        found += judge_order(read, shard, seed, records[0], np.array([label for _, label in scanned]))
    return found
