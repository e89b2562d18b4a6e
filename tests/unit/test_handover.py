"""Batches on their way from DALI to MXNet: what was handed over is what DALI made, whatever it makes next."""
import ctypes
import threading
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import HANG_LIMIT_S
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU
from nvidia.dali.pipeline import Pipeline

from mlperf_rn50.data import handover
from mlperf_rn50.data.handover import keeps_outputs, to_mxnet

IS_DALI_2 = hasattr(TensorCPU, '__dlpack__')
# The executors of the DALI at hand; DALI 2 has the one of before, too.
EXECUTORS = [pytest.param({}, id='default'),
             *([pytest.param({'exec_dynamic': False}, id='older')] if IS_DALI_2 else [])]
SIDE, SIZE = 32, 8


def counting_pipe(depth=2, **keys):
    """A pipeline whose i-th batch, from 0, has images and labels that are all i."""
    def batches():
        number = 0
        while True:
            images = [np.full((SIDE, SIDE, 3), number, np.uint8)] * SIZE
            yield images, np.full((SIZE, 1), number, np.int32)
            number += 1
    pipe = Pipeline(SIZE, 2, None, prefetch_queue_depth=depth, **keys)
    with pipe:
        images, labels = fn.external_source(source=batches(), num_outputs=2, batch=True, no_copy=True, ndim=[3, 1],
                                            dtype=[dali_types.UINT8, dali_types.INT32])
        images = fn.crop_mirror_normalize(images, dtype=dali_types.FLOAT16, mean=[0.0] * 3, std=[1.0] * 3)
        pipe.set_outputs(images, labels + 0)  # DALI's memory, not that of the source
    pipe.build()
    return pipe


def address_of(array):
    pointer = ctypes.c_void_p()
    mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer))
    return pointer.value


class Gate(mx.operator.CustomOp):
    """The number that it is given, once is_open is set."""

    is_open = threading.Event()

    def forward(self, is_train, req, in_data, out_data, aux):
        assert self.is_open.wait(HANG_LIMIT_S)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register('gate_of_test_handover')
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


@pytest.mark.parametrize('keys', EXECUTORS)
@pytest.mark.parametrize('depth', [1, 3])
def test_a_batch_is_not_overwritten_while_the_network_reads_it(keys, depth):
    """The network comes to the first batch only when all have been asked for."""
    pipe = counting_pipe(depth, **keys)
    is_kept = keeps_outputs(pipe)
    Gate.is_open.clear()
    try:
        late, found = mx.nd.Custom(mx.nd.zeros(1), op_type='gate_of_test_handover'), []
        for _ in range(12):
            images, labels = (to_mxnet(output, is_kept, mx.cpu()) for output in pipe.run())
            found.append([mx.nd.broadcast_add(images.reshape((-1,)), late.astype('float16')),
                          mx.nd.broadcast_add(labels.reshape((-1,)), late.astype('int32'))])
            del images, labels
    finally:
        Gate.is_open.set()
    assert [[set(a.asnumpy().tolist()) for a in pair] for pair in found] == [[{i}, {i}] for i in range(12)]


@pytest.mark.parametrize('keys', EXECUTORS)
def test_memory_is_shared_where_dali_keeps_it_and_shapes_and_types_are_dalis(keys):
    pipe = counting_pipe(**keys)
    is_kept, outputs = keeps_outputs(pipe), pipe.run()
    assert is_kept == (IS_DALI_2 and not keys)
    images, labels = (to_mxnet(output, is_kept, mx.cpu()) for output in outputs)
    assert (address_of(images) == outputs[0].as_tensor().data_ptr()) == is_kept
    assert (images.shape, labels.shape) == ((SIZE, 3, SIDE, SIDE), (SIZE, 1))
    assert (np.dtype(images.dtype).name, np.dtype(labels.dtype).name) == ('float16', 'int32')


@pytest.mark.parametrize('pipe, has_dlpack', [
    (SimpleNamespace(exec_dynamic=True), False), (SimpleNamespace(exec_dynamic=False), True),
    (SimpleNamespace(), True)])
def test_outputs_are_not_kept_where_dali_does_not_say_so(monkeypatch, pipe, has_dlpack):
    monkeypatch.setattr(handover, 'TensorCPU', type('TensorCPU', (), {'__dlpack__': None} if has_dlpack else {}))
    assert keeps_outputs(pipe) is False


def test_a_copy_is_waited_for():
    """copy_to_external() of a tensor on a GPU returns before the end of the copy if it is told non_blocking."""
    class Tensor:
        dtype = dali_types.FLOAT
        calls: list = []

        def shape(self):
            return [2, 3]

        def copy_to_external(self, *given, **keys):
            self.calls.append((len(given), keys))
            (np.ctypeslib.as_array((ctypes.c_float * 6).from_address(given[0].value)))[:] = range(6)
    output = SimpleNamespace(as_tensor=Tensor)
    array = to_mxnet(output, False, mx.cpu())
    assert Tensor.calls == [(1, {})]
    np.testing.assert_array_equal(array.asnumpy(), np.arange(6).reshape(2, 3))
