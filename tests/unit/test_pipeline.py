"""DALI pipelines: decoder keys, pinned threads, warm-up, and memory shared with MXNet."""

import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S, address_of
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU
from nvidia.dali.pipeline import Pipeline

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.pipeline import (
    build_pipeline,
    keeps_outputs,
    synthetic_inputs,
    to_mxnet,
)
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


def config_of(**data):
    return Config(data=DataConfig(**data), train=TrainConfig(local_batch_size=8))


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


@pytest.mark.parametrize('decoder, crop', [('mixed', 'padded'), ('cpu', 'random_resized')])
def test_keys_configure_nvjpeg_and_no_other_decoder(given, decoder, crop):
    build_pipeline(iter(()), 4, config_of(crop=crop, decoder=decoder, **NVJPEG), True, 0)
    same = 'hw_decoder_load hybrid_huffman_threshold preallocate_width_hint preallocate_height_hint'
    expected = {
        **{key: NVJPEG[key] for key in same.split()},
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
def test_hardware_decodes_whole_images_but_no_crops(given, crop, is_training, load):
    build_pipeline(iter(()), 4, config_of(crop=crop, decoder='mixed'), is_training, 0)
    assert given[-1]['hw_decoder_load'] == load


@pytest.mark.parametrize(
    'key, value', [('hw_decoder_load', 1.01), ('host_memory_padding_mib', 65_536)]
)
def test_values_out_of_range_for_dali_are_refused(key, value):
    check_values(config_of(**NVJPEG))
    with pytest.raises(ConfigError, match=rf'data\.{key}: got {value}, expected '):
        check_values(config_of(**{**NVJPEG, key: value}))


@pytest.mark.parametrize('num_threads, is_pinned', [(1, True), (2, False)])
def test_threads_are_pinned_if_each_has_a_cpu(monkeypatch, num_threads, is_pinned):
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
    before = dali_threads()
    source = iter([synthetic_inputs(4)] * 9)
    pipe = build_pipeline(source, 4, config_of(num_threads=num_threads), True, None)
    pipe.run()
    threads = dali_threads() - before
    assert len(threads) == num_threads
    assert all(os.sched_getaffinity(t) == ({max(cpus)} if is_pinned else cpus) for t in threads)


# --- transfer from DALI to MXNet

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


@pytest.mark.parametrize('value', ['0', '1'])
@pytest.mark.parametrize('keys', EXECUTORS)
def test_memory_is_shared_if_dali_keeps_it_and_shapes_and_types_match(monkeypatch, keys, value):
    """The asynchronous engine of NVIDIA frees a batch before the network has read it."""
    monkeypatch.setenv('MXNET_ASYNC_GPU_ENGINE', value)
    pipe = counting_pipe(**keys)
    is_kept, outputs = keeps_outputs(pipe), pipe.run()
    assert is_kept == (IS_DALI_2 and not keys and value == '0')
    images, labels = (to_mxnet(output, is_kept, mx.cpu()) for output in outputs)
    assert (address_of(images) == outputs[0].as_tensor().data_ptr()) == is_kept
    assert (images.shape, labels.shape) == ((SIZE, 3, SIDE, SIDE), (SIZE, 1))
    assert (np.dtype(images.dtype).name, np.dtype(labels.dtype).name) == ('float16', 'int32')
