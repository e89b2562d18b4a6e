"""DALI pipelines from encoded images to batches on the device.

Python selects the records and crops (shards.py, augment.py). DALI decodes, crops, resizes, mirrors
and normalises in its own threads. MXNet shares the memory of outputs that DALI leaves unchanged and
copies others. Streams need no synchronisation, because Pipeline.run() without a stream returns
complete outputs. DALI 1.3x waits on the host for their CUDA events (Executor::ShareOutputs), and
DALI 2 documents such outputs as host-synchronous. MXNet releases shared memory only after the last
operator that uses it has ended on the GPU (PushFCompute), so DALI never overwrites it early.
"""

import ctypes
import io
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import mxnet as mx
import numpy as np
from nvidia.dali import backend as dali_backend
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.backend import TensorCPU
from nvidia.dali.pipeline import Pipeline
from PIL import Image

from mlperf_rn50.config import Config
from mlperf_rn50.errors import DataError
from mlperf_rn50.system.out_of_memory import explain_error

# DALI creates its types and schemas at run time, where type checkers cannot see them.
types: Any = dali_types
_backend: Any = dali_backend
# Older releases of DALI ignore the EXIF orientation.
DALI_HAS_ORIENTATION = (
    'adjust_orientation' in _backend.GetSchema('decoders__Image').GetArgumentNames()
)
_DTYPES = {
    'images': types.UINT8,
    'labels': types.INT32,
    'mirrors': types.INT32,
    'anchors': types.FLOAT,
    'shapes': types.FLOAT,
}
# The fields of Inputs that each kind of data.crop uses.
_WINDOW = {'random_resized': ('anchors', 'shapes'), 'padded': ('anchors',), 'none': ()}
_INTERPOLATION = {
    'nearest': types.INTERP_NN,
    'linear': types.INTERP_LINEAR,
    'cubic': types.INTERP_CUBIC,
    'triangular': types.INTERP_TRIANGULAR,
    'lanczos3': types.INTERP_LANCZOS3,
}


@dataclass(frozen=True)
class Inputs:
    """Inputs of one pipeline run, with one entry per image, and the number of bytes read for all
    images."""

    images: list[np.ndarray]
    labels: np.ndarray
    # (y, x) of the crops: fractions for random_resized, pixels of the resized image for padded
    anchors: np.ndarray
    shapes: np.ndarray  # (height, width) of the crops, as fractions of the image
    mirrors: np.ndarray
    samples: Sequence[int] = ()  # record numbers; none for images that are not from a record
    num_bytes: int = 0
    num_new_bytes: int = 0
    read_s: float = 0.0  # time for which the pipeline waited for the record files


def whole_images(images: list[np.ndarray]) -> Inputs:
    """Return inputs for encoded images with label 0, neither cropped nor mirrored."""
    zeros, origin = np.zeros((len(images), 1), np.int32), np.zeros((len(images), 2), np.float32)
    return Inputs(images, labels=zeros, anchors=origin, shapes=origin + 1, mirrors=zeros)


def _has_own_cpus(num_threads: int) -> bool:
    """Return whether the launcher assigned a logical CPU to each DALI thread. Unpinned threads may
    share a CPU."""
    cpus = os.environ.get('DALI_AFFINITY_MASK', '').split(',')
    return num_threads <= sum(map(bool, cpus))


def _transform(given: dict[str, Any], config: Config, is_training: bool, on_gpu: bool) -> Any:
    """Add the operators that turn encoded images into normalised images of the network input
    size."""
    data = config.data
    # Recipes with linear and cubic interpolation are older than DALI's antialias option, which is
    # on by default.
    interpolation = {
        'interp_type': _INTERPOLATION[data.interpolation],
        'antialias': data.interpolation in ('triangular', 'lanczos3'),
    }
    side = data.size_of()
    decoding = {'device': data.decoder, 'output_type': types.RGB}
    if data.decoder == 'mixed':
        # DALI long had no hardware decoding of crops (pull request 2175), and NVIDIA's submission
        # for v1.1 avoids it.
        load = data.hw_decoder_load
        if load is None:
            load = 0.0 if 'shapes' in given else 0.65
        decoding |= {
            'hw_decoder_load': load,
            'hybrid_huffman_threshold': data.hybrid_huffman_threshold,
            'preallocate_width_hint': data.preallocate_width_hint,
            'preallocate_height_hint': data.preallocate_height_hint,
            'device_memory_padding': data.device_memory_padding_mib << 20,
            'host_memory_padding': data.host_memory_padding_mib << 20,
            'bytes_per_sample_hint': data.decoded_bytes_hint,
            'affine': _has_own_cpus(data.num_threads),
        }
    images: Any
    if 'shapes' in given:
        crop = given['anchors'], given['shapes']
        images = fn.decoders.image_slice(given['images'], *crop, axis_names='HW', **decoding)
    else:
        images = fn.decoders.image(given['images'], **decoding)
    if on_gpu and data.decoder == 'cpu':
        images = images.gpu()
    if not is_training:
        images = fn.resize(images, resize_shorter=data.resize_shorter, **interpolation)
    else:
        if data.crop == 'padded':  # shifts are in pixels of data.image_size
            whole = [data.image_size] * 2
            images = fn.resize(images, size=whole, **interpolation)
            images = fn.slice(
                images,
                start=fn.cast(given['anchors'], dtype=types.INT32),
                shape=whole,
                axes=[0, 1],
                out_of_bounds_policy='pad',
                fill_values=0,
            )
        if data.crop != 'padded' or side != data.image_size:
            images = fn.resize(images, size=[side, side], **interpolation)
    return fn.crop_mirror_normalize(
        images,
        crop=[side, side],
        mirror=given['mirrors'],
        mean=list(data.mean),
        std=list(data.std),
        dtype=types.FLOAT16 if config.train.precision == 'float16' else types.FLOAT,
        output_layout='HWC' if config.model.layout == 'NHWC' else 'CHW',
        pad_output=bool(data.pad_to_4_channels),
    )


def build_pipeline(
    source: Iterator[Inputs],
    batch_size: int,
    config: Config,
    is_training: bool,
    device_id: int | None,
) -> Pipeline:
    """Build the DALI graph for training (crops as in data.crop) or evaluation (resize and centre
    crop)."""
    data, on_gpu = config.data, device_id is not None
    # DALI accepts only inputs that the graph uses.
    used = ['images', 'labels', 'mirrors', *(_WINDOW[data.crop] if is_training else ())]
    # DALI reads the inputs in place (no_copy), so they must live until their outputs have been
    # returned.
    alive: deque[Inputs] = deque(maxlen=data.prefetch_depth + 2)

    def feed() -> Iterator[tuple]:
        for i in source:
            alive.append(i)
            yield tuple(getattr(i, name) for name in used)

    pipe = Pipeline(
        batch_size,
        data.num_threads,
        device_id,
        prefetch_queue_depth=data.prefetch_depth,
        set_affinity=_has_own_cpus(data.num_threads),
    )
    with pipe:
        outputs = fn.external_source(
            source=feed(),
            num_outputs=len(used),
            batch=True,
            no_copy=True,
            dtype=[_DTYPES[name] for name in used],
            ndim=[1] * len(used),
        )
        given = dict(zip(used, outputs))
        images, labels = _transform(given, config, is_training, on_gpu), given['labels']
        pipe.set_outputs(images, labels.gpu() if on_gpu else labels)
    pipe.build()
    return pipe


def run_pipeline(pipe: Pipeline) -> Any:
    """Return the next images and labels of a pipeline."""
    try:
        return pipe.run()
    except RuntimeError as e:  # DALI puts many lines before a decoder's message
        if explain_error(e):  # a lack of memory or threads
            raise
        reason = str(e).rpartition('encountered:')[2].partition('Current pipeline object')[0]
        raise DataError(f'the input pipeline failed: {" ".join(reason.split())[:300]}') from e


class DecoderTest(threading.local):
    """Test whether DALI decodes single images, apart from the pipelines of a run. Each thread has
    its own pipeline."""

    def __init__(self, decoder: str = 'cpu', device_id: int | None = None):
        self._decoder, self._device_id = decoder, device_id
        self._pipe: Pipeline | None = None

    def passes(self, image: np.ndarray) -> bool:
        pipe = self._pipe or self._build()
        self._pipe = None  # a pipeline cannot be used after an error
        try:
            pipe.feed_input('encoded', [image])
            pipe.run()
        except RuntimeError as e:
            if explain_error(e):  # a lack of memory or threads is no damage
                raise
            return False
        self._pipe = pipe
        return True

    def _build(self) -> Pipeline:
        """Return a pipeline. Raise DataError if DALI cannot start; no image is at fault."""
        pipe = Pipeline(1, 1, self._device_id, prefetch_queue_depth=1)
        with pipe:
            encoded = fn.external_source(name='encoded', dtype=types.UINT8, ndim=1)
            pipe.set_outputs(
                fn.decoders.image(encoded, device=self._decoder, output_type=types.RGB)
            )
        try:
            pipe.build()
        except RuntimeError as e:
            reason = explain_error(e) or ' '.join(str(e).split())[:300]
            raise DataError(f'DALI cannot start: {reason}') from e
        return pipe


def synthetic_inputs(batch_size: int) -> Inputs:
    """Return a batch that repeats one uncropped synthetic JPEG of 500 by 375 pixels, the usual size
    in ImageNet."""
    noise = np.random.default_rng(0).integers(0, 256, (47, 63, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(encoded, 'JPEG', quality=95)
    return whole_images([np.frombuffer(encoded.getvalue(), np.uint8)] * batch_size)


def build_warm(
    source: Iterator[Inputs],
    batch_size: int,
    config: Config,
    is_training: bool,
    device_id: int | None,
    is_warm: bool,
) -> tuple[Pipeline, Iterator[int]]:
    """Build a pipeline. Return it, and an iterator with an item for each synthetic batch still due
    before source's.

    With is_warm, the pipeline runs once on synthetic images, so that nvJPEG and DALI make their
    first allocations. This run consumes only the prefetched batches, which are synthetic, so
    nothing is read from source.
    """
    if not is_warm:
        return build_pipeline(source, batch_size, config, is_training, device_id), iter(())
    num_synthetic = config.data.prefetch_depth
    synthetic = repeat(synthetic_inputs(batch_size), num_synthetic)
    pipe = build_pipeline(chain(synthetic, source), batch_size, config, is_training, device_id)
    run_pipeline(pipe)
    return pipe, iter(range(num_synthetic - 1))


def has_async_engine() -> bool:
    """Return whether an operator on a GPU counts as done when it is launched. Only NVIDIA's MXNet
    does this."""
    return os.environ.get('MXNET_ASYNC_GPU_ENGINE', '').lower() in ('1', 'true')


def keeps_outputs(pipe: Any) -> bool:
    """Return whether DALI leaves outputs unchanged while MXNet uses them, as DALI 2's dynamic
    executor does.

    With the asynchronous engine, MXNet releases shared memory before the operators that use it have
    ended.
    """
    is_dynamic = bool(getattr(pipe, 'exec_dynamic', False))
    return is_dynamic and hasattr(TensorCPU, '__dlpack__') and not has_async_engine()


def to_mxnet(output: Any, is_kept: bool, context: mx.Context) -> mx.nd.NDArray:
    """Return an output of run(), a dense batch, as an MXNet array on its device. is_kept: result of
    keeps_outputs().

    Without is_kept, it is a finished copy in MXNet memory. The copy bypasses MXNet's engine, as in
    DALI's MXNet plugin, because an operator would queue behind pushed steps. On a GPU, DALI copies
    on its own stream, and the host waits for the copy (non_blocking=False; CopyToExternalImplGPU in
    backend_impl.cc), so run() may overwrite the tensor, and any stream may read the copy.
    """
    tensor = output.as_tensor()
    if is_kept:
        return mx.nd.from_dlpack(tensor.__dlpack__())
    array = mx.nd.empty(tuple(tensor.shape()), context, types.to_numpy_type(tensor.dtype))
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    tensor.copy_to_external(address)
    return array
