"""Transfer of DALI outputs to MXNet arrays: shared where DALI leaves an output unchanged, else copied.

No stream synchronisation is needed. Outputs of Pipeline.run() without a stream are complete: DALI 1.3x waits on the
host for their CUDA events (Executor::ShareOutputs), and DALI 2 documents them as host-synchronous. MXNet releases
shared memory after its last operator on it has ended on the GPU (PushFCompute), so DALI never reuses memory in use.
"""
import ctypes
from typing import Any

import mxnet as mx
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU


def keeps_outputs(pipe: Any) -> bool:
    """Return whether the outputs of a pipeline stay unchanged while they are referenced.

    They do with the dynamic executor (the default of DALI 2). Older executors overwrite their buffers, even in use.
    """
    return bool(getattr(pipe, 'exec_dynamic', False)) and hasattr(TensorCPU, '__dlpack__')


def to_mxnet(output: Any, is_kept: bool, context: mx.Context) -> mx.nd.NDArray:
    """Return an output of run(), a dense batch, as an array on its device; is_kept: keeps_outputs() of the pipeline."""
    tensor = output.as_tensor()
    return mx.nd.from_dlpack(tensor.__dlpack__()) if is_kept else _copy(tensor, context)


def _copy(tensor: Any, context: mx.Context) -> mx.nd.NDArray:
    """Return a finished copy of a tensor in MXNet memory.

    It bypasses the MXNet engine, as DALI's MXNet plugin did, because an operator would queue behind all pushed steps.
    On a GPU, DALI copies on its own stream and waits for it on the host (non_blocking=False; CopyToExternalImplGPU in
    backend_impl.cc), so the next run() may overwrite the tensor and MXNet may read the copy on any stream.
    """
    array = mx.nd.empty(tuple(tensor.shape()), context, dali_types.to_numpy_type(tensor.dtype))
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    tensor.copy_to_external(address)
    return array
