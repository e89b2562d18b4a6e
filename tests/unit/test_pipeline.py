"""DALI pipeline: every sample once over all ranks, correct pixels, and valid memory."""

import os
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S, address_of
from numbered import make_config, ramp, with_data
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU
from nvidia.dali.pipeline import Pipeline

from mlperf_rn50.data import batches, pipeline
from mlperf_rn50.data.batches import Request, eval_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.pipeline import keeps_outputs, to_mxnet
from mlperf_rn50.data.records import Record, RecordFile
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import DataError
from mlperf_rn50.model.options import ModelConfig


@pytest.fixture(scope='module')
def numbered(tmp_path_factory):
    """Configurations with 21 to 24 numbered images, close to multiples of the batch sizes below."""
    return {
        n: make_config(tmp_path_factory.mktemp('numbered') / str(n), ramp(n), num_val=n)
        for n in (21, 22, 23, 24)
    }


# Property tests check that shards partition the data for any number of ranks and images; these
# tests check DALI.


@pytest.mark.parametrize('nodes', [(0,), (0, 0, 1)], ids=['one rank', 'two nodes'])
def test_epoch_contains_every_sample_once(numbered, nodes):
    shards = [Shard(22, rank, len(nodes), 2, 1, nodes, 2) for rank in range(len(nodes))]
    streams = [train_batches(numbered[22], shard, 9, 0, None) for shard in shards]
    epochs, parts = [], []
    for _ in range(3):  # parts rotate after the second
        counted, padded, read = [], 0, [set() for _ in set(nodes)]
        for node, shard, stream in zip(nodes, shards, streams):
            for batch in islice(stream, shard.steps_per_epoch):
                labels = batch.labels.asnumpy().tolist()
                counted += labels[: batch.num_valid]
                padded += len(labels) - batch.num_valid
                read[node] |= set(labels)
        assert sorted(counted) == list(range(22))
        assert padded == shards[0].num_padded
        assert sum(map(len, read)) == 22  # nodes read disjoint parts
        epochs.append(counted)
        parts.append(read)
    assert epochs[0] != epochs[1]
    assert parts[0] == parts[1]
    assert (parts[1] != parts[2]) == (len(set(nodes)) > 1)


def test_each_evaluation_contains_every_sample_once(numbered):
    passes = [eval_batches(numbered[23], Shard(23, r, 2, 2), None) for r in range(2)]
    for _ in range(2):
        counted = [
            label
            for start in passes
            for b in start()
            for label in b.labels.asnumpy()[: b.num_valid]
        ]
        assert sorted(counted) == list(range(23))


@pytest.mark.parametrize('nodes', [(0, 0, 0), (0, 1, 2)])
def test_batches_count_the_bytes_read(numbered, nodes):
    config = numbered[21]
    records = RecordFile(Path(config.data.dir) / 'train.rec')
    shards = [Shard(21, r, 3, 2, 1, nodes) for r in range(3)]
    streams, known = [train_batches(config, s, 9, 0, None) for s in shards], [set() for _ in nodes]
    for _ in range(2 * shards[0].steps_per_epoch):
        for node, stream in zip(nodes, streams):
            batch = next(stream)
            labels = batch.labels.asnumpy().tolist()
            assert batch.num_bytes == records.num_bytes(labels)
            assert batch.num_new_bytes == records.num_bytes(sorted(set(labels) - known[node]))
            known[node] |= set(labels)
    batch = next(eval_batches(config, Shard(21, 0, 1, 5), None)())
    assert (batch.num_bytes, batch.num_new_bytes) == (records.num_bytes(batch.labels.asnumpy()), 0)


def test_wait_for_a_batch_is_split_into_files_dali_and_python(numbered, monkeypatch):
    """On a clock that only these functions advance, in seconds, and with one thread."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def slow(function, seconds):
        def call(*arguments):
            clock.now += seconds
            return function(*arguments)

        return call

    lazy = SimpleNamespace(
        submit=lambda *call: SimpleNamespace(result=partial(*call)), shutdown=lambda **_: None
    )
    monkeypatch.setattr(batches, 'monotonic', clock.monotonic)
    monkeypatch.setattr(batches, 'ThreadPoolExecutor', lambda *_: lazy)
    monkeypatch.setattr(batches, '_fill', slow(batches._fill, 1))
    monkeypatch.setattr(RecordFile, 'read', slow(RecordFile.read, 0.5))
    monkeypatch.setattr(pipeline, 'run_pipeline', slow(pipeline.run_pipeline, 10))
    got = islice(train_batches(numbered[21], Shard(21, 0, 1, 4), 9, 0, None), 4)
    assert [(b.read_s, b.decode_s) for b in got][1:] == [(2, 10)] * 3


@pytest.mark.parametrize('micro, first_step', [(1, 0), (2, 3)])
def test_joined_batches_equal_single_ones(numbered, micro, first_step):
    """Epochs of 22 images have 6 or 3 steps, which 5 joined batches do not divide; the last step
    has padding."""
    shard, keys = Shard(22, 0, 1, 4, micro), {'crop': 'random_resized', 'mirror_probability': 0.5}
    single, joined = (
        list(
            islice(
                train_batches(
                    with_data(numbered[22], input_batch_multiplier=n, **keys),
                    shard,
                    9,
                    first_step,
                    None,
                ),
                14,
            )
        )
        for n in (1, 5)
    )
    for a, b in zip(single, joined, strict=True):
        assert (a.num_valid, a.num_bytes, a.num_new_bytes) == (
            b.num_valid,
            b.num_bytes,
            b.num_new_bytes,
        )
        np.testing.assert_array_equal(a.images.asnumpy(), b.images.asnumpy())
        np.testing.assert_array_equal(a.labels.asnumpy(), b.labels.asnumpy())
    assert {b.num_valid for b in joined} > {4}


class Output:
    """Output of a pipeline in MXNet, with a weak reference to find out whether it is held."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, key):
        return self.array[key]


@pytest.mark.parametrize('value, num_held', [('1', 4), ('0', 0)])
def test_asynchronous_engine_gets_copies_that_are_held_for_four_runs(
    numbered, monkeypatch, value, num_held
):
    """It frees a batch before the network has read it; DALI must not overwrite it, and its memory
    is busy for long."""
    monkeypatch.setenv('MXNET_ASYNC_GPU_ENGINE', value)
    assert keeps_outputs(counting_pipe()) == (IS_DALI_2 and value == '0')
    outputs = []

    def tracked(*arguments):
        output = Output(to_mxnet(*arguments))
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(pipeline, 'to_mxnet', tracked)
    stream = train_batches(numbered[24], Shard(24, 0, 1, 4), 9, 0, None)
    for _ in range(7):
        next(stream)
    assert [ref() is not None for ref in outputs] == [False] * 2 * (7 - num_held) + [
        True
    ] * 2 * num_held


def test_pixels_are_unchanged_normalised_or_padded_channels_last(numbered):
    batch = next(train_batches(numbered[21], Shard(21, 0, 1, 5), 1, 0, None))
    images, expected = batch.images.asnumpy(), ramp(21)
    for image, label in zip(images, batch.labels.asnumpy()):
        np.testing.assert_array_equal(image.transpose(1, 2, 0), expected[label])
    config = with_data(numbered[21], mean=(10.0, 20.0, 30.0), std=(2.0, 4.0, 8.0))
    scaled = next(train_batches(config, Shard(21, 0, 1, 5), 1, 0, None)).images.asnumpy()
    mean, std = np.array([10, 20, 30]).reshape(1, 3, 1, 1), np.array([2, 4, 8]).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(scaled, (images - mean) / std, atol=1e-5)
    config = replace(
        with_data(numbered[21], pad_to_4_channels=True), model=ModelConfig(layout='NHWC')
    )
    padded = next(train_batches(config, Shard(21, 0, 1, 5), 1, 0, None)).images.asnumpy()
    np.testing.assert_array_equal(
        padded.transpose(0, 3, 1, 2), np.pad(images, ((0, 0), (0, 1), (0, 0), (0, 0)))
    )


def test_mirrors_alternate_between_epochs(numbered):
    config = with_data(numbered[24], mirror='alternating', mirror_probability=0.5)
    shard = Shard(24, 0, 1, 8)
    batches, plain = train_batches(config, shard, 3, 0, None), ramp(24)
    epochs = []
    for _ in range(4):
        images = {
            int(n): i.transpose(1, 2, 0)
            for b in islice(batches, 3)
            for n, i in zip(b.labels.asnumpy(), b.images.asnumpy())
        }
        epochs.append([bool((images[n] != plain[n]).any()) for n in range(24)])
        for n, is_mirrored in enumerate(epochs[-1]):
            np.testing.assert_array_equal(images[n], plain[n][:, ::-1] if is_mirrored else plain[n])
    assert epochs[0] == epochs[2] and epochs[1] == epochs[3] == [not m for m in epochs[0]]
    assert 0 < sum(epochs[0]) < 24


def test_padded_crop_is_a_shift_with_black_borders(numbered):
    batch = next(
        train_batches(
            with_data(numbered[24], crop='padded', crop_padding=2), Shard(24, 0, 1, 24), 1, 0, None
        )
    )
    shifts = set()
    for image, label in zip(batch.images.asnumpy(), batch.labels.asnumpy()):
        padded = np.pad(ramp(24)[label], ((2, 2), (2, 2), (0, 0)))
        places = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if (padded[y : y + 8, x : x + 8] == image.transpose(1, 2, 0)).all()
        ]
        assert len(places) == 1
        shifts.update(places)
    assert len(shifts) > 5


def test_crops_cut_the_drawn_window_and_the_centre(tmp_path):
    # Red is the column and green the row, so that the pixels of a crop show its position.
    y, x = np.mgrid[0:64, 0:64].astype(np.uint8)
    image = np.stack([x, y, np.zeros_like(x)], axis=2)
    config = make_config(
        tmp_path,
        [image] * 2,
        crop='random_resized',
        min_area=0.25,
        max_area=0.25,
        min_aspect=1.0,
        max_aspect=1.0,
        image_size=32,
        resize_shorter=64,
    )
    for red, green, _ in next(
        train_batches(config, Shard(2, 0, 1, 2), 4, 0, None)
    ).images.asnumpy():
        assert 29 < red.max() - red.min() < 33  # half the side
        assert 29 < green.max() - green.min() < 33
    red = next(eval_batches(config, Shard(1, 0, 1, 1), None)()).images.asnumpy()[0, 0]
    np.testing.assert_array_equal(red[0], np.arange(16, 48))


@pytest.mark.parametrize('interpolation', ['linear', 'triangular'])
def test_only_triangular_interpolation_averages_shrunk_pixels(tmp_path, interpolation):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    config = make_config(
        tmp_path, [pixels], image_size=8, resize_shorter=8, interpolation=interpolation
    )
    image = (
        next(eval_batches(config, Shard(1, 0, 1, 1), None)()).images.asnumpy()[0].transpose(1, 2, 0)
    )
    # the pixels next to the centre of each output pixel
    between = [4 * np.arange(8) + i for i in (1, 2)]
    linear = np.mean([pixels[np.ix_(y, x)].astype(float) for y in between for x in between], axis=0)
    assert (np.abs(image - linear).max() <= 1) == (interpolation == 'linear')


def test_inputs_stay_valid_until_decoded(tmp_path):
    images = list(np.random.default_rng(0).integers(0, 256, (8, 200, 200, 3), np.uint8))
    config = make_config(tmp_path, images, prefetch_depth=4)
    for batch in islice(train_batches(config, Shard(8, 0, 1, 4), 1, 0, None), 10):
        for image, label in zip(batch.images.asnumpy(), batch.labels.asnumpy()):
            np.testing.assert_array_equal(image.transpose(1, 2, 0), images[label])


@pytest.mark.parametrize('num_threads, is_pinned', [(1, True), (2, False)])
def test_threads_are_pinned_if_each_has_a_cpu(numbered, monkeypatch, num_threads, is_pinned):
    def dali_threads():
        threads = set()
        for name in Path('/proc/self/task').glob('*/comm'):
            # a thread of an earlier test has just ended
            with suppress(FileNotFoundError, ProcessLookupError):
                if name.read_text().startswith('[DALI][TP'):
                    threads.add(int(name.parent.name))
        return threads

    cpus = os.sched_getaffinity(0)
    monkeypatch.setenv('DALI_AFFINITY_MASK', f'{max(cpus)}')
    config = with_data(numbered[21], num_threads=num_threads)
    before = dali_threads()
    batches = train_batches(config, Shard(21, 0, 1, 5), 1, 0, None)
    next(batches)
    threads = dali_threads() - before
    assert len(threads) == num_threads
    assert all(os.sched_getaffinity(t) == ({max(cpus)} if is_pinned else cpus) for t in threads)


@pytest.mark.parametrize('missing', ['.rec', '.idx'])
def test_missing_or_truncated_file_is_found_before_the_first_batch(tmp_path, missing):
    config, shard = make_config(tmp_path, ramp(4), num_val=4), Shard(4, 0, 1, 2)
    for path in tmp_path.glob('*.index.npy'):
        path.unlink()
    for name, build in (
        ('train', lambda: train_batches(config, shard, 1, 0, None)),
        ('validation', lambda: eval_batches(config, shard, None)),
    ):
        os.truncate(tmp_path / f'{name}.rec', 3)
        with pytest.raises(
            DataError, match=rf'{name}.rec: got 3 bytes, expected \d+ as in manifest.json; prepare'
        ):
            build()
        (tmp_path / f'{name}{missing}').unlink()
        with pytest.raises(
            DataError,
            match=f'{name}{missing}: No such file or directory; copy it again, or create it',
        ):
            build()


@pytest.mark.parametrize('label', [-1, 2])
def test_label_out_of_range_is_named(label):
    record = Record(np.zeros(1, np.uint8), label, 0)
    with pytest.raises(DataError, match=f'record 7: got a label of {label}, expected 0 to 1'):
        batches._fill(
            [record],
            Request(np.array([7]), np.zeros(1)),
            DataConfig(num_classes=2),
            'record {}'.format,
        )


# --- transfer from DALI to MXNet ------------------------------------------------------------------

IS_DALI_2 = hasattr(TensorCPU, '__dlpack__')
# The executors of the installed DALI; DALI 2 includes the older one.
EXECUTORS = [
    pytest.param({}, id='default'),
    *([pytest.param({'exec_dynamic': False}, id='older')] if IS_DALI_2 else []),
]
SIDE, SIZE = 32, 8


def counting_pipe(depth=2, **keys):
    """Build a pipeline whose i-th batch, from 0, has images and labels that are all i."""
    batches = (
        ([np.full((SIDE, SIDE, 3), i, np.uint8)] * SIZE, np.full((SIZE, 1), i, np.int32))
        for i in count()
    )
    pipe = Pipeline(SIZE, 2, None, prefetch_queue_depth=depth, **keys)
    with pipe:
        images, labels = fn.external_source(
            source=batches,
            num_outputs=2,
            batch=True,
            no_copy=True,
            ndim=[3, 1],
            dtype=[dali_types.UINT8, dali_types.INT32],
        )
        images = fn.crop_mirror_normalize(
            images, dtype=dali_types.FLOAT16, mean=[0.0] * 3, std=[1.0] * 3
        )
        pipe.set_outputs(images, labels + 0)  # in memory of DALI, not of the source
    pipe.build()
    return pipe


class Gate(mx.operator.CustomOp):
    """Identity operator that waits until is_open is set."""

    is_open = threading.Event()

    def forward(self, is_train, req, in_data, out_data, aux):
        assert self.is_open.wait(HANG_LIMIT_S)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register('gate_of_test_pipeline')
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


@pytest.mark.parametrize('keys', EXECUTORS)
@pytest.mark.parametrize('depth', [1, 3])
def test_batch_is_not_overwritten_while_the_network_reads_it(keys, depth):
    """The network reads the first batch only after all batches were requested."""
    pipe = counting_pipe(depth, **keys)
    is_kept = keeps_outputs(pipe)
    Gate.is_open.clear()
    try:
        late, sums = mx.nd.Custom(mx.nd.zeros(1), op_type='gate_of_test_pipeline'), []
        for _ in range(12):
            images, labels = (to_mxnet(output, is_kept, mx.cpu()) for output in pipe.run())
            sums.append(
                [
                    mx.nd.broadcast_add(images.reshape((-1,)), late.astype('float16')),
                    mx.nd.broadcast_add(labels.reshape((-1,)), late.astype('int32')),
                ]
            )
            del images, labels
    finally:
        Gate.is_open.set()
    assert [[set(a.asnumpy().tolist()) for a in pair] for pair in sums] == [
        [{i}, {i}] for i in range(12)
    ]


@pytest.mark.parametrize('keys', EXECUTORS)
def test_memory_is_shared_if_dali_keeps_it_and_shapes_and_types_match(keys):
    pipe = counting_pipe(**keys)
    is_kept, outputs = keeps_outputs(pipe), pipe.run()
    assert is_kept == (IS_DALI_2 and not keys)
    images, labels = (to_mxnet(output, is_kept, mx.cpu()) for output in outputs)
    assert (address_of(images) == outputs[0].as_tensor().data_ptr()) == is_kept
    assert (images.shape, labels.shape) == ((SIZE, 3, SIDE, SIDE), (SIZE, 1))
    assert (np.dtype(images.dtype).name, np.dtype(labels.dtype).name) == ('float16', 'int32')
