"""`why --probe`: causes of a missed accuracy, measured on a run's last weights and its images, in
minutes on a CPU."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import mxnet as mx
import numpy as np

from mlperf_rn50.analysis.run_data import RunData
from mlperf_rn50.analysis.why import evidence
from mlperf_rn50.analysis.why.accuracy import Cause, weigh
from mlperf_rn50.analysis.why.labels import SIGMAS, Images
from mlperf_rn50.data.batches import Batch, eval_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.recordio import RecordFile, find_split
from mlperf_rn50.data.shards import Shard, epoch_order
from mlperf_rn50.errors import DataError
from mlperf_rn50.model.weights import LAST, find_weights, load_weights, portable
from mlperf_rn50.model.zoo import build_model, restore_model
from mlperf_rn50.runfolder.records import EpochRecord, ResumedRecord
from mlperf_rn50.text import percent
from mlperf_rn50.train.evaluate import Forward, with_mirror
from mlperf_rn50.train.plan import make_elastic_plan

_SIZE, _MOST_RECORDS = 50, 150_000  # images of a forward pass; records that are read per split
MOST_IMAGES, _MOST_PIXELS = 2000, 25e6  # classified images per split, and their pixels
# batches after which 1 % of the old statistics of BatchNorm are left with momentum 0.9
_RENEWING = 40
_EARLY = 0.1  # part of the schedule before which a network is not judged


def judge_order(
    read: Mapping[int, int], shard: Shard, seed: int, records: RecordFile, labels: np.ndarray
) -> Iterator[Cause]:
    """Compare the order of labels, and the bytes read by epoch, with what seed and number of ranks
    determine."""
    num = len(labels)
    orders = [epoch_order(shard, seed, epoch) for epoch in range(3)]
    same = (np.diff(labels[orders[0]]) == 0).sum()
    usual = num * ((np.bincount(labels) / num) ** 2).sum()
    yield weigh(
        'shuffle',
        f'images of {num:,} that follow one of their class',
        same,
        most=usual + SIGMAS * (same + usual) ** 0.5,
        strength=5.0,
    )
    stored = records.num_bytes(np.resize(np.arange(num), shard.num_positions))
    for epoch, expected in enumerate(map(records.num_bytes, orders), 1):
        got = read.get(epoch, expected)
        is_stored = got == stored
        yield Cause(
            'shuffle' if is_stored else 'equal_shards',
            5.0 * (got != expected),
            f'bytes of images{" in stored order" if is_stored else ""} read in epoch {epoch}',
            f'{got:,}',
            f'{expected:,}',
        )


def change_images(
    images: np.ndarray, train: np.ndarray, data: DataConfig
) -> dict[tuple[str, str], np.ndarray]:
    """Return normalised images as they are after mistakes in their channels, pixels or
    normalisation."""
    mean, std = (np.array(v, np.float32).reshape(1, 3, 1, 1) for v in (data.mean, data.std))
    raw = images * std + mean
    of_channels: dict[str, Any] = {'axis': (0, 2, 3), 'keepdims': True}
    standard = (images - images.mean(**of_channels)) / images.std(**of_channels)
    changes = {
        'channel_order': {'blue before red': (raw[:, ::-1] - mean) / std},
        'orientation': {
            'images upside down': images[:, :, ::-1],
            'transposed images': images.swapaxes(2, 3),
            'mirrored images': images[..., ::-1],
            'images turned by 90 degrees': np.rot90(images, 1, (2, 3)),
            'images turned by 180 degrees': np.rot90(images, 2, (2, 3)),
            'images turned by 270 degrees': np.rot90(images, 3, (2, 3)),
        },
        'normalisation': {
            'inverted images': (255 - raw - mean) / std,
            'mean and deviation of training images': standard * train.std(**of_channels)
            + train.mean(**of_channels),
            'twice the values': 2 * images,
            'half the values': images / 2,
        },
        'value_range': {
            'values from 0 to 255': raw,
            'values from 0 to 1': raw / 255,
            '255 times the values': (255 * raw - mean) / std,
        },
    }
    return {(name, text): found for name, own in changes.items() for text, found in own.items()}


def _classify(net: Forward, images: np.ndarray) -> np.ndarray:
    batches = (images[i : i + _SIZE] for i in range(0, len(images), _SIZE))
    return np.concatenate([net(mx.nd.array(batch)).asnumpy() for batch in batches])


def _images(net: Forward, batches: Iterable[Batch]) -> Images:
    parts = [
        (b.images[: b.num_valid].asnumpy(), b.labels[: b.num_valid].asnumpy())
        for b in batches
        if b.num_valid
    ]
    images, labels = map(np.concatenate, zip(*parts))
    return Images(images, labels, _classify(net, images))


def _scan(records: RecordFile) -> list[tuple[int, int]]:
    """Return the hash and the label of each image, or of every k-th one of many."""
    numbers = range(0, len(records), -(-len(records) // _MOST_RECORDS))
    return [(hash(r.image.tobytes()), r.label) for r in map(records.read, numbers)]


def probe(run: RunData) -> tuple[list[Cause], str]:
    """Return the figures that weights and images show, accused or not, and of which weights they
    are.

    Raise UserError if weights or images are unusable.
    """
    original, folder, log = run.config, run.folder, run.log
    batch = log.global_batch_size if log else None
    if not original or not log or not log.num_ranks or not batch:
        raise DataError(
            f'{folder.config}: expected a readable configuration, and a log with the number of '
            'ranks and the batch size'
        )

    # The last network, and the same one for recomputed statistics of BatchNorm.
    description, arrays = load_weights(find_weights(folder.weights, LAST))
    plain = replace(original, model=replace(original.model, bn_momentum=0.9))
    config, arrays = portable(plain, arrays)
    trained, renewing = (restore_model(config, mx.cpu(), arrays, str(folder.dir)) for _ in range(2))
    net, renewed = (with_mirror(n, config) for n in (trained, renewing))

    # Images of both splits, with their logits.
    data, seed = config.data, config.run.seed or 0
    most = max(1, min(MOST_IMAGES, int(_MOST_PIXELS / data.image_size**2)))
    train, validation = (
        _images(net, eval_batches(config, Shard(n, 0, -(-n // most), _SIZE), None, split)())
        for split, n in (('train', data.num_train), ('validation', data.num_val))
    )
    batches = train_batches(config, Shard(data.num_train, 0, 1, _SIZE), 0, 0, None)
    augmented = _images(net, islice(batches, -(-min(most, data.num_train) // _SIZE)))
    changed = change_images(validation.images, train.images, data)
    after = {key: _classify(net, images) for key, images in changed.items()}
    # as MXNet recomputes the running statistics of BatchNorm in the backward pass
    for start in range(0, _RENEWING * _SIZE, _SIZE):
        images = augmented.images.take(range(start, start + _SIZE), 0, mode='wrap')
        with mx.autograd.record():
            logits = renewing(mx.nd.array(images))
        logits.backward()
    sound, sound_train = (
        part._replace(logits=_classify(renewed, part.images)) for part in (validation, train)
    )
    after['batch_norm', 'recomputed statistics of BatchNorm'] = sound.logits

    # Figures of predictions, images, records and weights.
    num_epochs = max(config.schedule.decay_epochs, config.train.max_epochs or 0)
    is_early = description.epoch < _EARLY * num_epochs
    records, others = (find_split(data, split)() for split in ('train', 'validation'))
    scanned = _scan(records)
    # as the run drew them, then converted like its last weights
    begun = replace(original, train=replace(original.train, device='cpu', precision='float32'))
    model = build_model(begun, mx.cpu(), seed, is_plain=True)
    drawn = {n: p.data().asnumpy() for n, p in model.collect_params().items()}
    _, initial = portable(original, drawn)
    labels = np.array([label for _, label in scanned])
    found = [
        *evidence.judge_predictions(
            train,
            augmented,
            validation,
            after,
            sound_train=sound_train,
            sound=sound,
            logged=description.top1,
            is_early=is_early,
        ),
        *evidence.judge_detail(
            *(evidence.measure_detail(p.images, data.mean, data.std) for p in (train, validation))
        ),
        *evidence.judge_records(scanned, _scan(others), data.num_classes),
        *evidence.when_trained(is_early, evidence.judge_weights(initial, arrays)),
    ]

    # The order of reading, unless a resume may have changed it or not all labels are known.
    given = original.data
    is_resumed = run.last(ResumedRecord) is not None
    if given.shuffle == 'global' and len(labels) == given.num_train and not is_resumed:
        read = {}
        if not given.record_cache_mib:
            read = {r.epoch: sum(r.record_bytes.values()) for r in run.all(EpochRecord)}
        # a run may have begun without some of its hosts
        shard = make_elastic_plan(original, log.num_ranks, batch).train_shard()
        found += judge_order(read, shard, seed, records, labels)
    return evidence.settle(found), (
        f'Probed: weights of epoch {description.epoch} of {num_epochs:g}, with Top-1 '
        f'{percent(validation.top1)} on {len(validation.labels):,} validation images.'
    )
