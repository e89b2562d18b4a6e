"""Batches: every sample once over all ranks, correct pixels, sizes by epoch, caches and errors."""

import gc
import os
import weakref
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from numbered import encoded, make_config, ramp, with_data

from mlperf_rn50.config import for_evaluation
from mlperf_rn50.data import pipeline
from mlperf_rn50.data.batches import eval_batches, train_batches
from mlperf_rn50.data.pipeline import build_warm, to_mxnet
from mlperf_rn50.data.recordio import Record, RecordFile
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import DataError
from mlperf_rn50.model.options import ModelConfig


@pytest.fixture(scope='module')
def numbered(tmp_path_factory):
    """Configuration with 22 numbered images for training and for validation."""
    return make_config(tmp_path_factory.mktemp('numbered'), ramp(22), num_val=22)


def shard_of(local_batch_size, **keys):
    return Shard(22, **{'rank': 0, 'world_size': 1, **keys}, local_batch_size=local_batch_size)


def taken(config, shard, num, first_step=0, **data):
    return list(islice(train_batches(with_data(config, **data), shard, 9, first_step, None), num))


def evaluated(config, shard, num_passes=1):
    start = eval_batches(config, shard, None)
    return [batch for _ in range(num_passes) for batch in start()]


def contents(found):
    """Return all of batches but the numbers of bytes read."""
    return [(b.images.asnumpy().tobytes(), labels_of(b), b.num_valid) for b in found]


def bytes_of(found):
    return [(b.num_bytes, b.num_new_bytes) for b in found]


def labels_of(batch):
    return batch.labels.asnumpy().tolist()


def images_of(batches):
    """Yield the label of each image, and the image with channels last."""
    for b in batches:
        yield from zip(labels_of(b), b.images.asnumpy().transpose(0, 2, 3, 1))


def test_new_bytes_after_a_resume_within_an_epoch_are_of_records_not_read_since(numbered):
    found = taken(numbered, shard_of(2), 17, first_step=5)  # 6 steps of the first epoch
    assert all(b.num_new_bytes == b.num_bytes for b in found[:6])
    read = {label for b in found[:6] for label in labels_of(b)}
    has_new = [bool({*labels_of(b)} - read) for b in found[6:]]
    assert [b.num_new_bytes > 0 for b in found[6:]] == has_new and any(has_new)


# Property tests check that shards partition the data for any number of ranks and images; these
# tests check DALI.


@pytest.mark.parametrize('nodes', [(0,), (0, 0, 1)], ids=['one rank', 'two nodes'])
def test_epoch_contains_every_sample_once_and_its_bytes_are_counted(numbered, nodes):
    records = RecordFile(Path(numbered.data.dir) / 'train.rec')
    keys = {'world_size': len(nodes), 'nodes': nodes, 'rotation_epochs': 2}
    shards = [shard_of(2, rank=rank, **keys) for rank in range(len(nodes))]
    streams = [train_batches(numbered, shard, 9, 0, None) for shard in shards]
    epochs, parts, known = [], [], [set() for _ in nodes]
    for _ in range(3):  # parts rotate after the second
        counted, padded, read = [], 0, [set() for _ in nodes]
        for _ in range(shards[0].steps_per_epoch):
            for node, batch in zip(nodes, map(next, streams)):
                labels = labels_of(batch)
                counted += labels[: batch.num_valid]
                padded += len(labels) - batch.num_valid
                new = sorted({*labels} - known[node])
                assert bytes_of([batch]) == [(records.num_bytes(labels), records.num_bytes(new))]
                known[node].update(labels)
                read[node].update(labels)
        assert sorted(counted) == list(range(22)) and padded == shards[0].num_padded
        epochs.append(counted)
        parts.append(read)
    assert epochs[0] != epochs[1] and parts[0] == parts[1]
    assert (parts[1] != parts[2]) == (len(nodes) > 1)


def test_each_evaluation_contains_every_sample_once_and_counts_no_new_bytes(numbered):
    records = RecordFile(Path(numbered.data.dir) / 'validation.rec')
    passes = [eval_batches(numbered, shard_of(2, rank=r, world_size=2), None) for r in range(2)]
    for _ in range(2):
        found = [batch for p in passes for batch in p()]
        assert bytes_of(found) == [(records.num_bytes(labels_of(b)), 0) for b in found]
        assert sorted(n for b in found for n in labels_of(b)[: b.num_valid]) == list(range(22))


class Output:
    """Output of a pipeline in MXNet, with a weak reference to find out whether it is held."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, key):
        return self.array[key]


@pytest.mark.parametrize('value, num_held', [('1', 4), ('0', 0)])
def test_asynchronous_engine_gets_outputs_that_are_held_for_four_runs(
    numbered, monkeypatch, value, num_held
):
    """It frees a batch before the network has read it, and its memory is busy for long."""
    monkeypatch.setenv('MXNET_ASYNC_GPU_ENGINE', value)
    outputs = []

    def tracked(*arguments):
        output = Output(to_mxnet(*arguments))
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(pipeline, 'to_mxnet', tracked)
    stream = train_batches(numbered, shard_of(4), 9, 0, None)
    for _ in range(7):
        next(stream)
    expected = [False] * 2 * (7 - num_held) + [True] * 2 * num_held
    assert [ref() is not None for ref in outputs] == expected


# --- pixels


def test_pixels_are_unchanged_normalised_or_padded_channels_last(numbered):
    batch = taken(numbered, shard_of(5), 1)[0]
    for label, image in images_of([batch]):
        np.testing.assert_array_equal(image, ramp(22)[label])
    images, keys = batch.images.asnumpy(), {'mean': (10.0, 20.0, 30.0), 'std': (2.0, 4.0, 8.0)}
    scaled = taken(numbered, shard_of(5), 1, **keys)[0].images.asnumpy()
    mean, std = (np.reshape(keys[key], (1, 3, 1, 1)) for key in ('mean', 'std'))
    np.testing.assert_allclose(scaled, (images - mean) / std, atol=1e-5)
    config = replace(numbered, model=ModelConfig(layout='NHWC'))
    padded = taken(config, shard_of(5), 1, pad_to_4_channels=True)[0].images.asnumpy()
    expected = np.pad(images, ((0, 0), (0, 1), (0, 0), (0, 0)))
    np.testing.assert_array_equal(padded.transpose(0, 3, 1, 2), expected)


def test_mirrors_alternate_between_epochs(numbered):
    found = taken(numbered, shard_of(11), 8, mirror='alternating', mirror_probability=0.5)
    plain, epochs = ramp(22), []
    for k in range(0, 8, 2):
        images = dict(images_of(found[k : k + 2]))
        epochs.append([bool((images[n] != plain[n]).any()) for n in range(22)])
        for n, is_mirrored in enumerate(epochs[-1]):
            np.testing.assert_array_equal(images[n], plain[n][:, ::-1] if is_mirrored else plain[n])
    assert epochs[0] == epochs[2] and epochs[1] == epochs[3] == [not m for m in epochs[0]]
    assert 0 < sum(epochs[0]) < 22


def test_padded_crop_is_a_shift_with_black_borders(numbered):
    shifts = set()
    for label, image in images_of(taken(numbered, shard_of(22), 1, crop='padded', crop_padding=2)):
        padded = np.pad(ramp(22)[label], ((2, 2), (2, 2), (0, 0)))
        all_shifts = [(y, x) for y in range(5) for x in range(5)]
        places = [(y, x) for y, x in all_shifts if (padded[y : y + 8, x : x + 8] == image).all()]
        assert len(places) == 1
        shifts.update(places)
    assert len(shifts) > 5


def test_crops_cut_the_drawn_window_and_the_centre(tmp_path):
    # Red is the column and green the row, so that the pixels of a crop show its position.
    y, x = np.mgrid[0:64, 0:64].astype(np.uint8)
    image = np.stack([x, y, np.zeros_like(x)], axis=2)
    areas = {'min_area': 0.25, 'max_area': 0.25, 'min_aspect': 1.0, 'max_aspect': 1.0}
    sizes = {'image_size': 32, 'resize_shorter': 64}
    config = make_config(tmp_path, [image] * 2, crop='random_resized', **areas, **sizes)
    crops = taken(config, Shard(2, 0, 1, 2), 1)[0].images.asnumpy()
    np.testing.assert_allclose(np.ptp(crops[:, :2], axis=(2, 3)), 31, atol=1.5)  # half the side
    ((_, centre),) = images_of(evaluated(config, Shard(1, 0, 1, 1)))
    np.testing.assert_array_equal(centre[0, :, 0], np.arange(16, 48))


@pytest.mark.parametrize('interpolation', ['linear', 'triangular'])
def test_only_triangular_interpolation_averages_shrunk_pixels(tmp_path, interpolation):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    sizes = {'image_size': 8, 'resize_shorter': 8}
    config = make_config(tmp_path, [pixels], **sizes, interpolation=interpolation)
    ((_, image),) = images_of(evaluated(config, Shard(1, 0, 1, 1)))
    # the pixels next to the centre of each output pixel
    between = [4 * np.arange(8) + i for i in (1, 2)]
    linear = np.mean([pixels[np.ix_(y, x)].astype(float) for y in between for x in between], axis=0)
    assert (np.abs(image - linear).max() <= 1) == (interpolation == 'linear')


def test_inputs_stay_valid_until_decoded(tmp_path):
    images = list(np.random.default_rng(0).integers(0, 256, (8, 200, 200, 3), np.uint8))
    config = make_config(tmp_path, images, prefetch_depth=4)
    for label, image in images_of(taken(config, Shard(8, 0, 1, 4), 10)):
        np.testing.assert_array_equal(image, images[label])


# --- sizes that depend on the epoch


def test_synthetic_images_have_the_sizes_of_the_epochs(numbered):
    found = taken(numbered, shard_of(4), 4, first_step=5, synthetic=True, sizes=(4, 6))
    assert [b.images.shape[2] for b in found] == [4, 6, 6, 6]


def test_pipeline_of_a_size_is_freed_after_its_epochs(tmp_path, monkeypatch):
    built = []

    def build(*words, **keys):
        found = build_warm(*words, **keys)
        built.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(pipeline, 'build_warm', build)
    config = with_data(make_config(tmp_path, ramp(24)), sizes=(4, 6, 8))
    batches = train_batches(config, Shard(24, 0, 1, 8), 1, 0, None)
    assert [b.images.shape[2] for b in islice(batches, 12)] == 3 * [4] + 3 * [6] + 6 * [8]
    gc.collect()
    assert [pipe() is None for pipe in built] == [True, True, False]


@pytest.mark.parametrize('crop', ['padded', 'none'])
def test_smaller_image_is_the_whole_shifted_image_shrunk(numbered, crop):
    """Linear interpolation to half the size averages blocks of two by two pixels."""
    large, small = (
        taken(numbered, shard_of(4), 6, crop=crop, crop_padding=2, sizes=(side,)) for side in (8, 4)
    )
    for a, b in zip(large, small):
        blocks = a.images.asnumpy().reshape(4, 3, 4, 2, 4, 2).mean(axis=(3, 5))
        assert np.abs(blocks - b.images.asnumpy()).max() <= 1


def test_evaluation_has_its_own_size(numbered):
    config = with_data(numbered, sizes=(4,), eval_size=6, resize_shorter=8)
    for label, image in images_of(evaluated(config, shard_of(5))[:1]):
        np.testing.assert_array_equal(image, ramp(22)[label][1:7, 1:7])
    assert for_evaluation(config).data.image_size == 6


# --- the record cache, and the warm-up before the clock starts


def test_byte_counts_cover_only_reads_from_the_file(numbered):
    records = RecordFile(Path(numbered.data.dir) / 'train.rec')
    found = taken(numbered, shard_of(2), 22, record_cache_mib=1, read_threads=1)
    sizes = [records.num_bytes(labels_of(b)) for b in found[:11]] + [0] * 11
    assert bytes_of(found) == list(zip(sizes, sizes))


@pytest.mark.parametrize('crop, depth', [('random_resized', 1), ('padded', 3)])
def test_batches_after_a_warm_up_are_identical(numbered, monkeypatch, crop, depth):
    config = with_data(numbered, crop=crop, prefetch_depth=depth)

    def stream():
        return taken(config, shard_of(5), 7, first_step=2) + evaluated(config, shard_of(5), 2)

    cold = stream()
    monkeypatch.setattr(pipeline, 'build_warm', lambda *a, is_warm: build_warm(*a, is_warm=True))
    warm = stream()
    assert contents(warm) == contents(cold) and bytes_of(warm) == bytes_of(cold)


# --- errors


@pytest.mark.parametrize('end', ['.rec', '.idx'])
def test_missing_or_truncated_file_is_found_before_the_first_batch(tmp_path, end):
    config, shard = make_config(tmp_path, ramp(4), num_val=4), Shard(4, 0, 1, 2)
    for path in tmp_path.glob('*.index.npy'):
        path.unlink()
    for name, build in (
        ('train', lambda: train_batches(config, shard, 1, 0, None)),
        ('validation', lambda: eval_batches(config, shard, None)),
    ):
        os.truncate(tmp_path / f'{name}.rec', 3)
        with pytest.raises(DataError, match=rf'{name}.rec: got 3 bytes, expected \d+ as in mani'):
            build()
        (tmp_path / f'{name}{end}').unlink()
        with pytest.raises(DataError, match=f'{name}{end}: No such file .*; copy the folder'):
            build()


@pytest.mark.parametrize('label', [-1, 22])
def test_label_out_of_range_is_named(numbered, monkeypatch, label):
    record = Record(np.zeros(1, np.uint8), label, 0)
    monkeypatch.setattr(RecordFile, 'read', lambda *_: record)
    with pytest.raises(DataError, match=rf'record \d+, from /\d+: got a label of {label}, expect'):
        taken(numbered, shard_of(4), 1)


@pytest.mark.parametrize('is_named', [True, False])
@pytest.mark.parametrize(
    'image, crop, message',
    [
        (encoded('GIF'), 'none', 'DALI cannot decode this image .the input pipe.*; replace it and'),
        (encoded('GIF'), 'random_resized', 'DALI cannot decode this image .*; replace it and'),
        (encoded('JPEG2000', no_jp2=True), 'random_resized', 'got an image without a rea.* size;'),
    ],
    ids=['whole', 'crop', 'no size'],
)
def test_damaged_image_is_named_with_its_source(
    tmp_path, monkeypatch, image, crop, message, is_named
):
    """Images that were prepared without a test of DALI, as by earlier versions."""
    numbers = count()
    monkeypatch.setattr(
        'mlperf_rn50.data.images.encode_image',
        lambda content, **_: image if next(numbers) == 4 else content,
    )
    config = make_config(tmp_path, ramp(6), crop=crop, input_batch_multiplier=2)
    if not is_named:
        (tmp_path / 'train.names.txt').unlink()
    where = f'{tmp_path}/train.rec, record 4{", from /4" if is_named else ""}'
    with pytest.raises(DataError, match=f'^{where}: {message} prepare the data again$') as e:
        taken(config, Shard(6, 0, 1, 2), 3)
    assert len(str(e.value)) < 400


def test_failure_without_a_damaged_image_keeps_the_reason(numbered, monkeypatch):
    run = pipeline.run_pipeline

    def fail(pipe):
        run(pipe)
        raise DataError('the input pipeline failed: out of memory')

    monkeypatch.setattr(pipeline, 'run_pipeline', fail)
    for _ in range(2):
        with pytest.raises(DataError, match='^the input pipeline failed: out of memory$'):
            taken(numbered, shard_of(4), 1)
        # as on an unsupported GPU
        monkeypatch.setattr(pipeline.DecoderTest, 'passes', lambda *_: False)
