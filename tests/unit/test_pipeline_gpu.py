"""DALI keys for GPUs, the record cache of a rank, and the warm-up before the clock starts."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
from helpers import HANG_LIMIT_S
from numbered import make_config, ramp, with_data
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.data import pipeline
from mlperf_rn50.data.batches import eval_batches, train_batches
from mlperf_rn50.data.pipeline import build_warm, synthetic_inputs
from mlperf_rn50.data.records import Record, RecordCache, RecordFile, find_split
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.train.options import TrainConfig

NVJPEG = {
    'hw_decoder_load': 0.7,
    'hybrid_huffman_threshold': 500_000,
    'preallocate_width_hint': 5980,
    'preallocate_height_hint': 6430,
    'device_memory_padding_mib': 256,
    'host_memory_padding_mib': 128,
    'decoded_bytes_hint': 1_315_942,
}


@pytest.fixture(scope='module')
def numbered(tmp_path_factory):
    return make_config(
        tmp_path_factory.mktemp('keys'),
        ramp(24),
        num_val=24,
        crop='random_resized',
        mirror_probability=0.5,
    )


@pytest.fixture
def given(monkeypatch):
    """List of the arguments of every decoder that is built."""
    given = []
    monkeypatch.setattr(Pipeline, 'build', lambda self: None)  # a build would require a GPU
    for name in ('image', 'image_slice'):
        make = getattr(fn.decoders, name)
        monkeypatch.setattr(
            fn.decoders, name, lambda *a, make=make, **k: (given.append(k), make(*a, **k))[1]
        )
    return given


@pytest.mark.parametrize(
    'decoder, crop', [('mixed', 'random_resized'), ('mixed', 'padded'), ('cpu', 'random_resized')]
)
def test_keys_configure_nvjpeg_and_no_other_decoder(numbered, given, decoder, crop):
    pipeline.build_pipeline(
        iter(()), 4, with_data(numbered, crop=crop, decoder=decoder, **NVJPEG), True, 0
    )
    expected = {
        'hw_decoder_load': 0.7,
        'hybrid_huffman_threshold': 500_000,
        'preallocate_width_hint': 5980,
        'preallocate_height_hint': 6430,
        'bytes_per_sample_hint': 1_315_942,
        'device_memory_padding': 256 * 2**20,
        'host_memory_padding': 128 * 2**20,
        'affine': False,
    }
    got = {k: v for k, v in given[-1].items() if k not in ('axis_names', 'output_type')}
    assert got == {'device': decoder, **(expected if decoder == 'mixed' else {})}


@pytest.mark.parametrize(
    'crop, is_training, load',
    [('random_resized', True, 0.0), ('random_resized', False, 0.65), ('padded', True, 0.65)],
)
def test_hardware_decodes_whole_images_but_no_crops(numbered, given, crop, is_training, load):
    pipeline.build_pipeline(
        iter(()), 4, with_data(numbered, crop=crop, decoder='mixed'), is_training, 0
    )
    assert given[-1]['hw_decoder_load'] == load


@pytest.mark.parametrize(
    'key, value', [('hw_decoder_load', 1.01), ('host_memory_padding_mib', 65_536)]
)
def test_values_out_of_range_for_dali_are_refused(key, value):
    config = Config(train=TrainConfig(local_batch_size=8))
    check_values(with_data(config, **NVJPEG))
    with pytest.raises(ConfigError, match=rf'data\.{key}: got {value}, expected '):
        check_values(with_data(config, **{key: value}))


def record(position, size=100):
    return Record(np.full(size, position % 256, np.uint8), position, position)


def test_records_are_cached_until_memory_is_full():
    reads = []
    cache = RecordCache(lambda p: (reads.append(p), record(p, [200, 500, 100, 50][p]))[1], 300)
    first, again = ([cache.read(p) for p in range(4)] for _ in range(2))
    assert [is_read for _, is_read in first] == [True] * 4
    # 100 bytes fit after 500 did not
    assert [is_read for _, is_read in again] == [False, True, False, True]
    assert reads == [0, 1, 2, 3, 1, 3]
    assert first[0][0] is again[0][0] and [r.sample_id for r, _ in again] == [0, 1, 2, 3]


def test_concurrent_reads_of_a_record_count_once():
    together, reads = threading.Barrier(4), Counter()

    def read(position):
        reads[position] += 1
        if position == 0:
            together.wait(HANG_LIMIT_S)  # all four read it before any of them has cached it
        return record(position)

    cache = RecordCache(read, 300)
    with ThreadPoolExecutor(4) as pool:
        assert [is_read for _, is_read in pool.map(cache.read, [0] * 4)] == [True] * 4
    assert [cache.read(p)[1] for p in (1, 2, 3)] == [True] * 3
    assert [cache.read(p)[1] for p in (0, 1, 2, 3)] == [False] * 3 + [True]
    assert reads == {0: 4, 1: 1, 2: 1, 3: 2}


def pixels(batches, num):
    return [(b.images.asnumpy(), b.labels.asnumpy(), b.num_valid) for b in islice(batches, num)]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize('split, nodes', [('train', (0, 1)), ('validation', (0, 0))])
def test_batches_from_the_cache_are_identical(numbered, monkeypatch, split, nodes):
    shard = Shard(24, 1, 2, 4, 1, nodes)

    def stream(config):
        if split == 'train':
            return train_batches(config, shard, 9, 0, None)
        start = eval_batches(config, shard, None)
        return (b for _ in range(4) for b in start())

    expected = pixels(stream(numbered), 12)
    reads, read = Counter(), RecordFile.read
    monkeypatch.setattr(RecordFile, 'read', lambda self, p: (reads.update([p]), read(self, p))[1])
    for threads in (8, 1):  # with 8, a record may be read twice at the same time
        reads.clear()
        assert_same(
            pixels(stream(with_data(numbered, record_cache_mib=1, read_threads=threads)), 12),
            expected,
        )
    assert max(reads.values()) == 1


def test_byte_counts_cover_only_reads_from_the_file(numbered):
    config = with_data(numbered, record_cache_mib=1, read_threads=1)
    records = find_split(config.data, 'train')()
    batches = list(islice(train_batches(config, Shard(24, 0, 1, 4), 9, 0, None), 18))
    sizes = [records.num_bytes(b.labels.asnumpy()) for b in batches[:6]] + [0] * 12
    assert [(b.num_bytes, b.num_new_bytes) for b in batches] == list(zip(sizes, sizes))


@pytest.mark.parametrize('crop, depth', [('random_resized', 1), ('padded', 3)])
def test_batches_after_a_warm_up_are_identical(numbered, monkeypatch, crop, depth):
    config, shard = with_data(numbered, crop=crop, prefetch_depth=depth), Shard(24, 0, 1, 5)

    def passes():
        start = eval_batches(config, shard, None)
        return [batch for _ in range(2) for batch in pixels(start(), 5)]

    streams = list(islice(train_batches(config, shard, 9, 2, None), 7))
    expected, expected_eval = pixels(iter(streams), 7), passes()
    monkeypatch.setattr(pipeline, 'build_warm', lambda *a, is_warm: build_warm(*a, is_warm=True))
    warm = list(islice(train_batches(config, shard, 9, 2, None), 7))
    assert_same(pixels(iter(warm), 7), expected)
    assert [(b.num_bytes, b.num_new_bytes) for b in warm] == [
        (b.num_bytes, b.num_new_bytes) for b in streams
    ]
    assert_same(passes(), expected_eval)


@pytest.mark.parametrize('depth', [1, 3])
def test_warm_up_runs_the_pipeline_and_reads_nothing(numbered, monkeypatch, depth):
    config, runs, taken, run = with_data(numbered, prefetch_depth=depth), [], [], Pipeline.run
    monkeypatch.setattr(Pipeline, 'run', lambda self: (runs.append(run(self)), runs[-1])[1])

    def source():
        while True:
            taken.append(0)
            yield synthetic_inputs(4)

    pipe, left_over = build_warm(source(), 4, config, True, None, is_warm=True)
    assert (len(runs), taken, len(list(left_over))) == (1, [], depth - 1)
    pipe.run()
    assert len(taken) == 1
    taken.clear()
    build_warm(source(), 4, config, True, None, is_warm=False)
    assert (len(runs), taken) == (2, [])
