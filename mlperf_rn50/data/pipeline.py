"""The DALI pipelines: from RecordIO files to batches on the device.

Python decides which records are read and where they are cropped (shards.py, augment.py); DALI decodes,
crops, resizes, mirrors and normalises in its own threads. A batch reaches MXNet through DLPack without a
copy: DALI's outputs stay alive as long as an NDArray refers to them.
"""
import dataclasses
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import imagesize
import mxnet as mx
import numpy as np
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.pipeline import Pipeline

from mlperf_rn50.config import Config, DataConfig
from mlperf_rn50.data.augment import NUM_DRAWS, padded_crop_anchors, random_resized_crops
from mlperf_rn50.data.records import Record, RecordFile, open_split
from mlperf_rn50.data.shards import Shard, augmentation_uniforms, epoch_order
from mlperf_rn50.errors import DataError

# DALI makes these at run time, where a type checker does not see them.
types: Any = dali_types
_DTYPES = {'images': types.UINT8, 'labels': types.INT32, 'mirrors': types.INT32,
           'anchors': types.FLOAT, 'shapes': types.FLOAT}
# What a training crop needs of Inputs.
_WINDOW = {'random_resized': ('anchors', 'shapes'), 'padded': ('anchors',), 'none': ()}
_INTERPOLATION = {'nearest': types.INTERP_NN, 'linear': types.INTERP_LINEAR, 'cubic': types.INTERP_CUBIC,
                  'triangular': types.INTERP_TRIANGULAR, 'lanczos3': types.INTERP_LANCZOS3}


@dataclass(frozen=True)
class Batch:
    """One rank's images of one forward pass.

    Args:
        images: float32 or float16, (batch, channels, side, side), or channels last for layout=NHWC.
        labels: int32, (batch,).
        num_valid: images that count; they come first, the rest is padding.
        num_bytes: of the records that were read for it.
    """

    images: mx.nd.NDArray
    labels: mx.nd.NDArray
    num_valid: int
    num_bytes: int = 0


@dataclass(frozen=True)
class Inputs:
    """What one run of a pipeline is fed with, one entry per image.

    anchor and shape are the crop (y, x) and (height, width): fractions of the image for
    random_resized, pixels of the resized image for padded.
    """

    images: list[np.ndarray]
    labels: np.ndarray
    anchors: np.ndarray
    shapes: np.ndarray
    mirrors: np.ndarray


def _fill(records: list[Record], uniforms: np.ndarray | None, data: DataConfig, where: str) -> Inputs:
    """Pairs the records of a batch with their crops; uniforms is None for an evaluation."""
    images = [r.image for r in records]
    labels = np.array([[r.label] for r in records], np.int32)
    if labels.min() < 0 or labels.max() >= data.num_classes:
        raise DataError(f'{where}: got a label of {labels.max()}, expected 0 to {data.num_classes - 1}; '
                        'set data.num_classes or prepare the data again')
    anchors = np.zeros((len(records), 2), np.float32)
    shapes = np.ones((len(records), 2), np.float32)
    mirrors = np.zeros((len(records), 1), np.int32)
    if uniforms is not None:
        if data.crop == 'random_resized':
            widths, heights = np.array([imagesize.get(io.BytesIO(i.data)) for i in images]).T
            if min(widths.min(), heights.min()) < 1:
                raise DataError(f'{where}: an image whose size cannot be read; prepare the data again')
            anchors, shapes = random_resized_crops(uniforms[:, :-1], heights, widths, (data.min_area, data.max_area),
                                                   (data.min_aspect, data.max_aspect))
        elif data.crop == 'padded':
            anchors = padded_crop_anchors(uniforms[:, :2], data.crop_padding)
        mirrors = (uniforms[:, -1:] < data.mirror_probability).astype(np.int32)
    return Inputs(images, labels, anchors, shapes, mirrors)


def _has_own_cpus(num_threads: int) -> bool:
    """Whether the launcher gave each DALI thread a logical CPU: free to move, two share one while others are idle."""
    return num_threads <= len([c for c in os.environ.get('DALI_AFFINITY_MASK', '').split(',') if c])


def _transform(given: dict[str, Any], config: Config, is_training: bool, on_gpu: bool) -> Any:
    """The part of the graph from encoded images to normalised ones of the size that the network takes."""
    data = config.data
    # linear and cubic as in the recipes, which are older than DALI's antialias and its being the default.
    interpolation = {'interp_type': _INTERPOLATION[data.interpolation],
                     'antialias': data.interpolation in ('triangular', 'lanczos3')}
    side = data.image_size
    images: Any
    if 'shapes' in given:
        images = fn.decoders.image_slice(given['images'], given['anchors'], given['shapes'], axis_names='HW',
                                         device=data.decoder, output_type=types.RGB)
    else:
        images = fn.decoders.image(given['images'], device=data.decoder, output_type=types.RGB)
    if on_gpu and data.decoder == 'cpu':
        images = images.gpu()
    if not is_training:
        images = fn.resize(images, resize_shorter=data.resize_shorter, **interpolation)
    else:
        images = fn.resize(images, size=[side, side], **interpolation)
        if data.crop == 'padded':
            images = fn.slice(images, start=fn.cast(given['anchors'], dtype=types.INT32), shape=[side, side],
                              axes=[0, 1], out_of_bounds_policy='pad', fill_values=0)
    return fn.crop_mirror_normalize(
        images, crop=[side, side], mirror=given['mirrors'], mean=list(data.mean), std=list(data.std),
        dtype=types.FLOAT16 if config.train.precision == 'float16' else types.FLOAT,
        output_layout='CHW' if config.model.layout == 'NCHW' else 'HWC', pad_output=data.pad_to_4_channels)


def build_pipeline(source: Iterator[Inputs], batch_size: int, config: Config, is_training: bool,
                   device_id: int | None) -> Pipeline:
    """The DALI graph of training or evaluation.

    Args:
        source: what each run reads.
        batch_size: images per run.
        config: data, model.layout and train.precision are used.
        is_training: crop as data.crop says; otherwise resize the shorter side and crop the centre.
        device_id: GPU number, None for the CPU.
    """
    data, on_gpu = config.data, device_id is not None

    # DALI wants only what the graph uses.
    window = _WINDOW[data.crop] if is_training else ()
    used = [f for f in dataclasses.fields(Inputs) if f.name in ('images', 'labels', 'mirrors', *window)]

    # DALI reads them where they are, so they live until their outputs have been handed out.
    alive: deque[Inputs] = deque(maxlen=data.prefetch_depth + 2)

    def feed() -> Iterator[tuple]:
        for i in source:
            alive.append(i)
            yield tuple(getattr(i, f.name) for f in used)

    pipe = Pipeline(batch_size, data.num_threads, device_id, prefetch_queue_depth=data.prefetch_depth,
                    set_affinity=_has_own_cpus(data.num_threads))
    with pipe:
        outputs = fn.external_source(source=feed(), num_outputs=len(used), batch=True, no_copy=True,
                                     dtype=[_DTYPES[f.name] for f in used], ndim=[1] * len(used))
        given = dict(zip((f.name for f in used), outputs))
        images, labels = _transform(given, config, is_training, on_gpu), given['labels']
        pipe.set_outputs(images, labels.gpu() if on_gpu else labels)
    pipe.build()
    return pipe


def _read_ahead(records: RecordFile, data: DataConfig,
                wanted: Iterator[tuple[np.ndarray, np.ndarray | None]]) -> Iterator[Inputs]:
    """Reads the wanted (samples, uniforms), which never end, in order.

    Each of read_threads threads reads a batch; prefetch_depth more are ready.
    """
    pool = ThreadPoolExecutor(data.read_threads, 'read')

    def read(samples: np.ndarray, uniforms: np.ndarray | None) -> Inputs:
        return _fill([records.read(s) for s in samples], uniforms, data, str(records.path))

    pending: deque[Future[Inputs]] = deque()
    try:
        for samples, uniforms in wanted:
            pending.append(pool.submit(read, samples, uniforms))
            if len(pending) > data.prefetch_depth + data.read_threads:
                yield pending.popleft().result()
    finally:
        # Not waited for: a forgotten generator may be closed in one of these very threads.
        pool.shutdown(wait=False, cancel_futures=True)


def _to_mxnet(tensor_list) -> mx.nd.NDArray:
    return mx.nd.from_dlpack(tensor_list.as_tensor().__dlpack__())


def _run(pipe: Pipeline, num_valid: Iterator[int]) -> Iterator[Batch]:
    """Batches of a pipeline, paired with how many of each count."""
    for valid in num_valid:
        try:
            images, labels = pipe.run()
        except RuntimeError as e:  # DALI wraps whatever a decoder says in many lines
            raise DataError(f'the input pipeline failed: {" ".join(str(e).split())[:300]}') from e
        yield Batch(_to_mxnet(images), _to_mxnet(labels).reshape((-1,)), valid)


def train_steps(shard: Shard, first_step: int) -> Iterator[tuple[int, int, int]]:
    """The endless (epoch, step in the epoch, pass) of training, from a global step on."""
    for step in count(first_step):
        for micro in range(shard.num_micro):
            yield *divmod(step, shard.steps_per_epoch), micro


def train_requests(shard: Shard, seed: int, first_step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The (samples, uniforms) of every forward pass from a global step on."""
    current, order = -1, np.empty(0)
    for epoch, step, micro in train_steps(shard, first_step):
        if epoch != current:
            current, order = epoch, epoch_order(shard.num_samples, seed, epoch)
        yield shard.samples(order, step, micro), augmentation_uniforms(shard, seed, epoch, step, micro, NUM_DRAWS)


def train_batches(config: Config, shard: Shard, seed: int, first_step: int, device_id: int | None) -> Iterator[Batch]:
    """Training batches without end, from a global step on.

    Raises:
        DataError: the data is missing, damaged or not the configured one.
    """
    if config.data.synthetic:
        return _synthetic_batches(config, shard, train_steps(shard, first_step), device_id)
    records = open_split(config.data, 'train')
    source = _read_ahead(records, config.data, train_requests(shard, seed, first_step))
    pipe = build_pipeline(source, shard.local_batch_size, config, True, device_id)
    return _run(pipe, (shard.num_valid(s, m) for _, s, m in train_steps(shard, first_step)))


def eval_batches(config: Config, shard: Shard, device_id: int | None) -> Callable[[], Iterator[Batch]]:
    """A function that starts a pass over this rank's share of the validation set.

    Raises:
        DataError: the data is missing, damaged or not the configured one.
    """
    steps = range(shard.steps_per_epoch)
    if config.data.synthetic:
        return lambda: _synthetic_batches(config, shard, ((0, s, 0) for s in steps), device_id)
    records = open_split(config.data, 'validation')
    order = np.arange(shard.num_samples)

    # One endless pipeline for all evaluations: its first batches are decoded while training goes on.
    def wanted() -> Iterator[tuple[np.ndarray, None]]:
        while True:
            for step in steps:
                yield shard.samples(order, step), None
    pipe = build_pipeline(_read_ahead(records, config.data, wanted()), shard.local_batch_size, config, False, device_id)
    return lambda: _run(pipe, (shard.num_valid(s) for s in steps))


def made_up_batches(config: Config, shard: Shard, device_id: int | None) -> Iterator[Batch]:
    """Batches of made-up images without end, as for training with data.synthetic."""
    return _synthetic_batches(config, shard, train_steps(shard, 0), device_id)


def _synthetic_batches(config: Config, shard: Shard, steps: Iterator[tuple[int, int, int]],
                       device_id: int | None) -> Iterator[Batch]:
    """The same random images and labels again and again, already on the device."""
    data, side, size = config.data, config.data.image_size, shard.local_batch_size
    channels = 4 if data.pad_to_4_channels else 3
    shape = (size, channels, side, side) if config.model.layout == 'NCHW' else (size, side, side, channels)
    dtype = 'float16' if config.train.precision == 'float16' else 'float32'
    random = np.random.default_rng(shard.rank)
    context = device_context(device_id)
    images = mx.nd.array(random.standard_normal(shape, np.float32), context, dtype)
    labels = mx.nd.array(random.integers(0, data.num_classes, size), context, 'int32')
    for _, step, micro in steps:
        yield Batch(images, labels, shard.num_valid(step, micro))


def device_context(device_id: int | None) -> mx.Context:
    """The MXNet context of a GPU number, or of the CPU for None."""
    return mx.cpu() if device_id is None else mx.gpu(device_id)
