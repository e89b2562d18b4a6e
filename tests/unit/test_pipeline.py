"""What DALI delivers: every sample once over all ranks, the right pixels, and memory that stays valid."""
import os
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import HANG_LIMIT_S
from numbered import make_config, ramp, with_data

from mlperf_rn50.config import Config, DataConfig, ModelConfig
from mlperf_rn50.data import pipeline
from mlperf_rn50.data.augment import NUM_DRAWS
from mlperf_rn50.data.pipeline import Request, eval_batches, train_batches, train_requests
from mlperf_rn50.data.records import Record, RecordFile
from mlperf_rn50.data.shards import Shard, augmentation_uniforms, epoch_order
from mlperf_rn50.errors import DataError


@pytest.fixture(scope='module')
def numbered(tmp_path_factory):
    """Configurations of 21, 22 and 23 numbered images: around multiples of the batches below."""
    return {n: make_config(tmp_path_factory.mktemp('numbered') / str(n), ramp(n), num_val=n) for n in (21, 22, 23, 24)}


# Property tests prove that the shards partition the data for every world and size; these show that DALI follows them.

@pytest.mark.parametrize('nodes', [(0,), (0, 0, 1)], ids=['one rank', 'two nodes that keep their parts'])
def test_an_epoch_is_exactly_the_data_set(numbered, nodes):
    shards = [Shard(22, rank, len(nodes), 2, 1, nodes, 2) for rank in range(len(nodes))]
    streams = [train_batches(numbered[22], shard, 9, 0, None) for shard in shards]
    epochs, parts = [], []
    for _ in range(3):  # the parts move on after the second
        counted, padded, read = [], 0, [set() for _ in set(nodes)]
        for node, shard, stream in zip(nodes, shards, streams):
            for batch in islice(stream, shard.steps_per_epoch):
                labels = batch.labels.asnumpy().tolist()
                counted += labels[:batch.num_valid]
                padded += len(labels) - batch.num_valid
                read[node] |= set(labels)
        assert sorted(counted) == list(range(22))
        assert padded == shards[0].num_padded
        assert sum(map(len, read)) == 22  # no node reads an image of another one's part
        epochs.append(counted)
        parts.append(read)
    assert epochs[0] != epochs[1]
    assert parts[0] == parts[1]
    assert (parts[1] != parts[2]) == (len(set(nodes)) > 1)


def test_an_evaluation_is_exactly_the_validation_set_each_time(numbered):
    passes = [eval_batches(numbered[23], Shard(23, r, 2, 2), None) for r in range(2)]
    for _ in range(2):
        counted = [label for start in passes for b in start() for label in b.labels.asnumpy()[:b.num_valid]]
        assert sorted(counted) == list(range(23))


def size_of(records, labels):
    return int(sum(records.num_bytes(np.array([label])) for label in labels))


@pytest.mark.parametrize('nodes', [(0, 0, 0), (0, 1, 2)])
def test_batches_say_how_many_bytes_were_read_for_them(numbered, nodes):
    config = numbered[21]
    records = RecordFile(Path(config.data.dir) / 'train.rec')
    shards = [Shard(21, r, 3, 2, 1, nodes) for r in range(3)]
    streams, known = [train_batches(config, s, 9, 0, None) for s in shards], [set() for _ in nodes]
    for _ in range(2 * shards[0].steps_per_epoch):
        for node, stream in zip(nodes, streams):
            batch = next(stream)
            labels = batch.labels.asnumpy().tolist()
            assert batch.num_bytes == size_of(records, labels)
            assert batch.num_new_bytes == size_of(records, set(labels) - known[node])
            known[node] |= set(labels)
    batch = next(eval_batches(config, Shard(21, 0, 1, 5), None)())
    assert (batch.num_bytes, batch.num_new_bytes) == (size_of(records, batch.labels.asnumpy()), 0)


def test_building_reads_no_image(numbered, monkeypatch):
    reads, read = [], RecordFile.read
    monkeypatch.setattr(RecordFile, 'read', lambda self, position: (reads.append(position), read(self, position))[1])
    build = Mock(wraps=pipeline.build_pipeline)
    monkeypatch.setattr(pipeline, 'build_pipeline', build)
    before, shard = set(threading.enumerate()), Shard(21, 0, 1, 5)
    train, evaluation = train_batches(numbered[21], shard, 1, 0, None), eval_batches(numbered[21], shard, None)()
    assert build.call_count == 2
    # The order of the first epoch is drawn, in a thread that is the only one so far.
    [thread] = set(threading.enumerate()) - before
    thread.join(0.2)
    assert thread.name == 'ahead_0' and not reads
    next(train)
    num_reads = len(reads)
    assert num_reads >= 5
    next(evaluation)
    assert len(reads) > num_reads


def test_the_next_order_is_drawn_while_an_epoch_is_read(monkeypatch):
    drawn, asked = [], [threading.Event() for _ in range(4)]

    def draw(shard, seed, epoch):
        drawn.append((epoch, threading.current_thread() is threading.main_thread()))
        asked[epoch].set()
        return epoch_order(shard, seed, epoch)
    monkeypatch.setattr(pipeline, 'epoch_order', draw)
    shard = Shard(20, 0, 1, 10)
    requests = train_requests(DataConfig(), shard, 1, 3)  # the second step of the second epoch
    assert asked[1].wait(HANG_LIMIT_S)
    assert not asked[2].is_set()
    first = next(requests)
    assert asked[2].wait(HANG_LIMIT_S)
    np.testing.assert_array_equal(first.samples, epoch_order(shard, 1, 1)[10:])
    np.testing.assert_array_equal(first.uniforms, augmentation_uniforms(shard, 1, 1, 1, 0, NUM_DRAWS))
    np.testing.assert_array_equal(next(requests).samples, epoch_order(shard, 1, 2)[:10])
    assert asked[3].wait(HANG_LIMIT_S)
    assert drawn == [(1, False), (2, False), (3, False)]


def test_batches_from_a_later_step_are_those_of_a_run_from_the_start(numbered):
    config = with_data(numbered[23], crop='random_resized', mirror_probability=0.5)
    shard = Shard(23, 1, 2, 4)
    whole = list(islice(train_batches(config, shard, 9, 0, None), 8))
    later = list(islice(train_batches(config, shard, 9, 5, None), 3))
    for a, b in zip(whole[5:], later):
        np.testing.assert_array_equal(a.images.asnumpy(), b.images.asnumpy())
        np.testing.assert_array_equal(a.labels.asnumpy(), b.labels.asnumpy())
        assert a.num_valid == b.num_valid


def test_the_ranks_of_a_step_augment_as_one_rank_would(numbered):
    config = with_data(numbered[24], crop='random_resized', mirror_probability=0.5)
    one = next(train_batches(config, Shard(24, 0, 1, 8), 9, 0, None)).images.asnumpy()
    two = [next(train_batches(config, Shard(24, r, 2, 4), 9, 0, None)).images.asnumpy() for r in (0, 1)]
    np.testing.assert_array_equal(np.stack(two, axis=1).reshape(one.shape), one)


def test_pixels_arrive_unchanged_and_normalised(numbered):
    batch = next(train_batches(numbered[21], Shard(21, 0, 1, 5), 1, 0, None))
    images, expected = batch.images.asnumpy(), ramp(21)
    for image, label in zip(images, batch.labels.asnumpy()):
        np.testing.assert_array_equal(image.transpose(1, 2, 0), expected[label])
    config = with_data(numbered[21], mean=(10.0, 20.0, 30.0), std=(2.0, 4.0, 8.0))
    scaled = next(train_batches(config, Shard(21, 0, 1, 5), 1, 0, None)).images.asnumpy()
    mean, std = np.array([10, 20, 30]).reshape(1, 3, 1, 1), np.array([2, 4, 8]).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(scaled, (images - mean) / std, atol=1e-5)


def test_channels_last_and_fourth_channel(numbered):
    config = replace(with_data(numbered[21], pad_to_4_channels=True), model=ModelConfig(layout='NHWC'))
    batch = next(train_batches(config, Shard(21, 0, 1, 5), 1, 0, None))
    images = batch.images.asnumpy()
    assert images.shape == (5, 8, 8, 4)
    assert not images[..., 3].any()
    np.testing.assert_array_equal(images[0, ..., :3], ramp(21)[batch.labels.asnumpy()[0]])


def test_mirrors_alternate_from_epoch_to_epoch(numbered):
    config = with_data(numbered[24], mirror='alternating', mirror_probability=0.5)
    shard = Shard(24, 0, 1, 8)
    batches, plain = train_batches(config, shard, 3, 0, None), ramp(24)
    epochs = []
    for _ in range(4):
        images = {int(n): i.transpose(1, 2, 0) for b in islice(batches, 3)
                  for n, i in zip(b.labels.asnumpy(), b.images.asnumpy())}
        epochs.append([bool((images[n] != plain[n]).any()) for n in range(24)])
        for n, is_mirrored in enumerate(epochs[-1]):
            np.testing.assert_array_equal(images[n], plain[n][:, ::-1] if is_mirrored else plain[n])
    assert epochs[0] == epochs[2] and epochs[1] == epochs[3] == [not m for m in epochs[0]]
    assert 0 < sum(epochs[0]) < 24


def test_padded_crop_is_a_shift_with_black_borders(numbered):
    batch = next(train_batches(with_data(numbered[24], crop='padded', crop_padding=2), Shard(24, 0, 1, 24), 1, 0, None))
    shifts = set()
    for image, label in zip(batch.images.asnumpy(), batch.labels.asnumpy()):
        padded = np.pad(ramp(24)[label], ((2, 2), (2, 2), (0, 0)))
        places = [(y, x) for y in range(5) for x in range(5)
                  if (padded[y:y + 8, x:x + 8] == image.transpose(1, 2, 0)).all()]
        assert len(places) == 1
        shifts.update(places)
    assert len(shifts) > 5


def test_crops_cut_the_drawn_window_and_the_centre(tmp_path):
    # An image whose red is its column and green its row, so that a crop tells where it was cut.
    y, x = np.mgrid[0:64, 0:64].astype(np.uint8)
    image = np.stack([x, y, np.zeros_like(x)], axis=2)
    config = make_config(tmp_path, [image] * 2, crop='random_resized', min_area=0.25, max_area=0.25,
                         min_aspect=1.0, max_aspect=1.0, image_size=32, resize_shorter=64)
    for red, green, _ in next(train_batches(config, Shard(2, 0, 1, 2), 4, 0, None)).images.asnumpy():
        assert 29 < red.max() - red.min() < 33  # half the side
        assert 29 < green.max() - green.min() < 33
    red = next(eval_batches(config, Shard(1, 0, 1, 1), None)()).images.asnumpy()[0, 0]
    np.testing.assert_array_equal(red[0], np.arange(16, 48))


@pytest.mark.parametrize('interpolation', ['linear', 'triangular'])
def test_only_triangular_averages_what_it_shrinks(tmp_path, interpolation):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    config = make_config(tmp_path, [pixels], image_size=8, resize_shorter=8, interpolation=interpolation)
    image = next(eval_batches(config, Shard(1, 0, 1, 1), None)()).images.asnumpy()[0].transpose(1, 2, 0)
    between = [4 * np.arange(8) + i for i in (1, 2)]  # the pixels beside the centre of each small one
    linear = np.mean([pixels[np.ix_(y, x)].astype(float) for y in between for x in between], axis=0)
    assert (np.abs(image - linear).max() <= 1) == (interpolation == 'linear')


def test_inputs_live_until_they_are_decoded(tmp_path):
    images = list(np.random.default_rng(0).integers(0, 256, (8, 200, 200, 3), np.uint8))
    config = make_config(tmp_path, images, prefetch_depth=4)
    for batch in islice(train_batches(config, Shard(8, 0, 1, 4), 1, 0, None), 10):
        for image, label in zip(batch.images.asnumpy(), batch.labels.asnumpy()):
            np.testing.assert_array_equal(image.transpose(1, 2, 0), images[label])


@pytest.mark.parametrize('num_threads, is_pinned', [(1, True), (2, False)])
def test_threads_are_pinned_where_each_has_a_cpu(numbered, monkeypatch, num_threads, is_pinned):
    def dali_threads():
        tasks = Path('/proc/self/task').iterdir()
        return {int(t.name) for t in tasks if (t / 'comm').read_text().startswith('[DALI][TP')}
    cpus = os.sched_getaffinity(0)
    monkeypatch.setenv('DALI_AFFINITY_MASK', f'{max(cpus)}')
    config = with_data(numbered[21], num_threads=num_threads)
    before = dali_threads()
    batches = train_batches(config, Shard(21, 0, 1, 5), 1, 0, None)
    next(batches)
    threads = dali_threads() - before
    assert len(threads) == num_threads
    assert all(os.sched_getaffinity(t) == ({max(cpus)} if is_pinned else cpus) for t in threads)


def test_a_damaged_image_stops_with_one_line(tmp_path):
    config = make_config(tmp_path, ramp(4))
    rec = tmp_path / 'train.rec'
    content = bytearray(rec.read_bytes())
    start = content.find(b'\x89PNG')
    content[start:start + 60] = b'\0' * 60
    rec.write_bytes(content)
    with pytest.raises(DataError, match='the input pipeline failed') as e:
        for batch in islice(train_batches(config, Shard(4, 0, 1, 2), 1, 0, None), 2):
            batch.images.asnumpy()
    assert '\n' not in str(e.value)


def test_synthetic_needs_no_file():
    config = Config(data=DataConfig(synthetic=True, image_size=16, resize_shorter=16, num_classes=5))
    batches = list(islice(train_batches(config, Shard(10, 0, 1, 4), 1, 0, None), 3))
    assert [b.num_valid for b in batches] == [4, 4, 2]
    assert batches[0].images.shape == (4, 3, 16, 16)
    assert batches[0].num_bytes == batches[0].num_new_bytes == 0
    assert sum(b.num_valid for b in eval_batches(config, Shard(10, 0, 1, 4), None)()) == 10


@pytest.mark.parametrize('label, said', [(-1, '-1'), (2, '2')])
def test_a_label_that_is_no_class_is_named(label, said):
    record = Record(np.zeros(1, np.uint8), label, 0)
    with pytest.raises(DataError) as e:
        pipeline._fill([record], Request(np.zeros(1), np.zeros(1)), DataConfig(num_classes=2), 'train.rec')
    assert f'train.rec: got a label of {said}, expected 0 to 1' in str(e.value)
