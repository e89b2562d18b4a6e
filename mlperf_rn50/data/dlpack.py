"""From DALI's outputs to MXNet's arrays: shared where DALI leaves an output alone, copied where it writes over it.

No stream is waited for here. Pipeline.run() without one gives outputs that are complete: DALI 1.3x waits on the host
for the CUDA events of what computed them (Executor::ShareOutputs), and DALI 2 calls them host-synchronous (the
docstring of run()). From then on MXNet may read them on any stream of its own. It lets go of what it shares when its
last operator with it has ended, for which its GPU workers have waited for their stream (PushFCompute), so DALI gets
memory back that nothing reads.
"""
import ctypes
from typing import Any

import mxnet as mx
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU


def keeps_outputs(pipe: Any) -> bool:
    """Whether the outputs of a pipeline stay as they are for as long as anything refers to them.

    Those of the dynamic executor do (the default of DALI 2). The older ones (DALI 1.3x has no others) have as many
    buffers as batches are prefetched, and write the next batches into them, also while they are read.
    """
    return bool(getattr(pipe, 'exec_dynamic', False)) and hasattr(TensorCPU, '__dlpack__')


def to_mxnet(output: Any, is_kept: bool, context: mx.Context) -> mx.nd.NDArray:
    """An output of run(), a dense batch, as an array on the device where it lies.

    Args:
        is_kept: keeps_outputs() of its pipeline: True shares the memory, False copies it before this returns.
    """
    tensor = output.as_tensor()
    return mx.nd.from_dlpack(tensor.__dlpack__()) if is_kept else _copy(tensor, context)


def _copy(tensor: Any, context: mx.Context) -> mx.nd.NDArray:
    """A copy of a tensor in memory of MXNet, there when this returns.

    It goes past MXNet's engine, as DALI's own plugin for MXNet did: an operator would wait in line behind all the
    steps that were pushed before, and a new array has no reader or writer to wait for. On a GPU DALI copies on a stream
    from its pool and waits on the host for the end of it (non_blocking is False; CopyToExternalImplGPU in its
    backend_impl.cc): the next run() may then write over the tensor, and MXNet read the copy on any stream.
    """
    array = mx.nd.empty(tuple(tensor.shape()), context, dali_types.to_numpy_type(tensor.dtype))
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    tensor.copy_to_external(address)
    return array
