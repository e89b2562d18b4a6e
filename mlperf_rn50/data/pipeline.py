"""The DALI pipelines: from RecordIO files to batches on the device.

Python decides which records are read and where they are cropped (shards.py, augment.py); DALI decodes,
crops, resizes, mirrors and normalises in its own threads. handover.py brings a batch to MXNet, without a copy
where DALI keeps its outputs alive.
"""
import dataclasses
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any, NamedTuple

import imagesize
import mxnet as mx
import numpy as np
from nvidia.dali import fn
from nvidia.dali import types as dali_types
from nvidia.dali.pipeline import Pipeline
from PIL import Image

from mlperf_rn50.config import Config, DataConfig
from mlperf_rn50.data.augment import NUM_DRAWS, padded_crop_anchors, random_resized_crops
from mlperf_rn50.data.handover import keeps_outputs, to_mxnet
from mlperf_rn50.data.records import KeptRecords, Record, RecordFile, open_split
from mlperf_rn50.data.shards import (
    Shard,
    alternating_mirrors,
    augmentation_uniforms,
    epoch_order,
    file_order,
    first_reads,
)
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
        num_bytes: read from files for it, padding included; not of records kept in memory or synthetic images.
        num_new_bytes: of those that this rank's node had not read before, since training started or was resumed.
    """

    images: mx.nd.NDArray
    labels: mx.nd.NDArray
    num_valid: int
    num_bytes: int = 0
    num_new_bytes: int = 0


class Request(NamedTuple):
    """What a forward pass reads.

    Args:
        samples: numbers of the records, int64, (batch,).
        is_new: whether this rank's node reads it for the first time, bool, (batch,).
        uniforms: random numbers of the augmentation, (batch, draws); None for an evaluation.
        is_mirrored: bool, (batch,); None for an evaluation.
    """

    samples: np.ndarray
    is_new: np.ndarray
    uniforms: np.ndarray | None = None
    is_mirrored: np.ndarray | None = None


@dataclass(frozen=True)
class Inputs:
    """What one run of a pipeline is fed with, one entry per image, and the bytes that were read for all of them.

    anchor and shape are the crop (y, x) and (height, width): fractions of the image for
    random_resized, pixels of the resized image for padded.
    """

    images: list[np.ndarray]
    labels: np.ndarray
    anchors: np.ndarray
    shapes: np.ndarray
    mirrors: np.ndarray
    num_bytes: int = 0
    num_new_bytes: int = 0


def whole_images(images: list[np.ndarray]) -> Inputs:
    """Return encoded images with label 0, neither cropped nor mirrored."""
    zeros, fractions = np.zeros((len(images), 1), np.int32), np.zeros((len(images), 2), np.float32)
    return Inputs(images, zeros, fractions, fractions + 1, zeros)


def _fill(records: list[Record], request: Request, data: DataConfig, where: str) -> Inputs:
    """Pairs the records of a batch with their crops."""
    for record in records:
        if not 0 <= record.label < data.num_classes:
            raise DataError(f'{where}: got a label of {record.label:g}, expected 0 to {data.num_classes - 1}; '
                            'set data.num_classes or prepare the data again')
    inputs = whole_images([r.image for r in records])
    changed: dict[str, Any] = {'labels': np.array([[r.label] for r in records], np.int32)}
    uniforms = request.uniforms
    if uniforms is not None and data.crop == 'random_resized':
        widths, heights = np.array([imagesize.get(io.BytesIO(i.data)) for i in inputs.images]).T
        if min(widths.min(), heights.min()) < 1:
            raise DataError(f'{where}: an image whose size cannot be read; prepare the data again')
        changed['anchors'], changed['shapes'] = random_resized_crops(
            uniforms[:, :-1], heights, widths, (data.min_area, data.max_area), (data.min_aspect, data.max_aspect))
    elif uniforms is not None and data.crop == 'padded':
        changed['anchors'] = padded_crop_anchors(uniforms[:, :2], data.crop_padding)
    if request.is_mirrored is not None:
        changed['mirrors'] = request.is_mirrored[:, None].astype(np.int32)
    return dataclasses.replace(inputs, **changed)


def _has_own_cpus(num_threads: int) -> bool:
    """Whether the launcher gave each DALI thread a logical CPU: free to move, two share one while others are idle."""
    return num_threads <= len([c for c in os.environ.get('DALI_AFFINITY_MASK', '').split(',') if c])


def _nvjpeg_keys(data: DataConfig) -> dict[str, Any]:
    """What DALI's decoder takes for the decoder mixed alone; nothing for the decoder cpu."""
    if data.decoder == 'cpu':
        return {}
    return {'hw_decoder_load': data.hw_decoder_load, 'hybrid_huffman_threshold': data.hybrid_huffman_threshold,
            'preallocate_width_hint': data.preallocate_width_hint,
            'preallocate_height_hint': data.preallocate_height_hint,
            'device_memory_padding': data.device_memory_padding_mib << 20,
            'host_memory_padding': data.host_memory_padding_mib << 20,
            'bytes_per_sample_hint': data.decoded_bytes_hint,
            'affine': _has_own_cpus(data.num_threads)}


def _transform(given: dict[str, Any], config: Config, is_training: bool, on_gpu: bool) -> Any:
    """The part of the graph from encoded images to normalised ones of the size that the network takes."""
    data = config.data
    # linear and cubic as in the recipes, which are older than DALI's antialias and its being the default.
    interpolation = {'interp_type': _INTERPOLATION[data.interpolation],
                     'antialias': data.interpolation in ('triangular', 'lanczos3')}
    side = data.image_size
    decoding = {'device': data.decoder, 'output_type': types.RGB, **_nvjpeg_keys(data)}
    images: Any
    if 'shapes' in given:
        images = fn.decoders.image_slice(given['images'], given['anchors'], given['shapes'], axis_names='HW',
                                         **decoding)
    else:
        images = fn.decoders.image(given['images'], **decoding)
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


def _read_ahead(records: RecordFile, data: DataConfig, wanted: Iterator[Request]) -> Iterator[Inputs]:
    """Reads what is wanted, which never ends, in order.

    Each of read_threads threads reads a batch; prefetch_depth more are ready.
    """
    pool = ThreadPoolExecutor(data.read_threads, 'read')
    kept = KeptRecords(records.read, data.record_cache_mib << 20)

    def read(request: Request) -> Inputs:
        found = [kept.read(s) for s in request.samples]
        is_read = np.array([is_read for _, is_read in found])
        inputs = _fill([record for record, _ in found], request, data, str(records.path))
        return dataclasses.replace(inputs, num_bytes=records.num_bytes(request.samples[is_read]),
                                   num_new_bytes=records.num_bytes(request.samples[request.is_new]))

    pending: deque[Future[Inputs]] = deque()
    try:
        for request in wanted:
            pending.append(pool.submit(read, request))
            if len(pending) > data.prefetch_depth + data.read_threads:
                yield pending.popleft().result()
    finally:
        # Not waited for: a forgotten generator may be closed in one of these very threads.
        pool.shutdown(wait=False, cancel_futures=True)


def _run(pipe: Pipeline) -> Any:
    """The next images and labels of a pipeline."""
    try:
        return pipe.run()
    except RuntimeError as e:  # DALI wraps a decoder's message in many lines
        raise DataError(f'the input pipeline failed: {" ".join(str(e).split())[:300]}') from e


def made_up_inputs(batch_size: int) -> Inputs:
    """A batch of one made-up JPEG of the size that is usual in ImageNet, 500 by 375 pixels, without any crop."""
    noise = np.random.default_rng(0).integers(0, 256, (47, 63, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(encoded, 'JPEG', quality=95)
    return whole_images([np.frombuffer(encoded.getvalue(), np.uint8)] * batch_size)


def train_steps(shard: Shard, first_step: int) -> Iterator[tuple[int, int, int]]:
    """The endless (epoch, step in the epoch, pass) of training, from a global step on."""
    for step in count(first_step):
        for micro in range(shard.num_micro):
            yield *divmod(step, shard.steps_per_epoch), micro


def train_requests(data: DataConfig, shard: Shard, seed: int, first_step: int) -> Iterator[Request]:
    """What every forward pass reads from a global step on.

    The order of an epoch is drawn in a thread while the one before is read; that of the first from this call on.
    """
    is_known, pool = np.zeros(shard.num_samples, bool), ThreadPoolExecutor(1, 'ahead')

    def draw(epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = epoch_order(shard, seed, epoch)
        return order, first_reads(shard, order, is_known)
    first_drawn = pool.submit(draw, first_step // shard.steps_per_epoch)

    def requests() -> Iterator[Request]:
        current, drawn = -1, first_drawn
        for epoch, step, micro in train_steps(shard, first_step):
            if epoch != current:
                current, (order, is_first), drawn = epoch, drawn.result(), pool.submit(draw, epoch + 1)
            samples = shard.samples(order, step, micro)
            uniforms = augmentation_uniforms(shard, seed, epoch, step, micro, NUM_DRAWS)
            is_mirrored = (alternating_mirrors(samples, seed, epoch) if data.mirror == 'alternating' else
                           uniforms[:, -1] < data.mirror_probability)
            yield Request(samples, shard.samples(is_first, step, micro), uniforms, is_mirrored)
    return requests()


def eval_requests(shard: Shard) -> Iterator[Request]:
    """What every pass reads, evaluation after evaluation."""
    order, none_new = file_order(shard), np.zeros(shard.local_batch_size, bool)
    while True:
        for step in range(shard.steps_per_epoch):
            yield Request(shard.samples(order, step), none_new)


def train_batches(config: Config, shard: Shard, seed: int, first_step: int, device_id: int | None) -> Iterator[Batch]:
    """Training batches without end, from a global step on.

    Everything is built when this is called; the first image is read when the first batch is asked for.
    """
    num_valid = (shard.num_valid(step, micro) for _, step, micro in train_steps(shard, first_step))
    if config.data.synthetic:
        return _synthetic_batches(config, shard, device_id)(num_valid)
    records = open_split(config.data, 'train')
    wanted = train_requests(config.data, shard, seed, first_step)
    return _build_batches(records, wanted, shard, config, True, device_id)(num_valid)


def eval_batches(config: Config, shard: Shard, device_id: int | None) -> Callable[[], Iterator[Batch]]:
    """A function that starts a pass over this rank's share of the validation set; built and read as train_batches."""
    num_valid = [shard.num_valid(step) for step in range(shard.steps_per_epoch)]
    if config.data.synthetic:
        batches = _synthetic_batches(config, shard, device_id)
    else:
        # One endless pipeline for all evaluations: its first batches are decoded while training goes on.
        records = open_split(config.data, 'validation')
        batches = _build_batches(records, eval_requests(shard), shard, config, False, device_id)
    return lambda: batches(num_valid)


def made_up_batches(config: Config, shard: Shard, device_id: int | None) -> Iterator[Batch]:
    """Batches of made-up images without end, as for training with data.synthetic."""
    return _synthetic_batches(config, shard, device_id)(repeat(shard.num_valid(0)))


def _build_batches(records: RecordFile, wanted: Iterator[Request], shard: Shard, config: Config, is_training: bool,
                   device_id: int | None) -> Callable[[Iterable[int]], Iterator[Batch]]:
    """A pipeline over what is wanted, as a function that gives its next batches, one for each number of valid images.
    """
    sizes: deque[tuple[int, int]] = deque()  # bytes of the inputs whose batches are still to come

    def source() -> Iterator[Inputs]:
        for inputs in _read_ahead(records, config.data, wanted):
            sizes.append((inputs.num_bytes, inputs.num_new_bytes))
            yield inputs
    pipe, left_over = build_warm(source(), shard.local_batch_size, config, is_training, device_id,
                                 is_warm=device_id is not None and config.train.num_warmup_steps > 0)
    context, is_kept = device_context(device_id), keeps_outputs(pipe)

    def batches(num_valid: Iterable[int]) -> Iterator[Batch]:
        for _ in left_over:  # made-up batches, before the first call only
            _run(pipe)
        for valid in num_valid:
            images, labels = (to_mxnet(output, is_kept, context) for output in _run(pipe))
            yield Batch(images, labels.reshape((-1,)), valid, *sizes.popleft())
    return batches


def build_warm(source: Iterator[Inputs], batch_size: int, config: Config, is_training: bool, device_id: int | None,
               is_warm: bool) -> tuple[Pipeline, Iterator[int]]:
    """A pipeline as build_pipeline makes it, and an item for each made-up batch that comes out of it before the first
    of source.

    Args:
        is_warm: run it once on made-up images, so that what nvJPEG and DALI set up and allocate at first use is there.
            The first run takes in as many batches as are prefetched, so nothing of source is read.
    """
    if not is_warm:
        return build_pipeline(source, batch_size, config, is_training, device_id), iter(())
    num_made_up = config.data.prefetch_depth
    made_up = repeat(made_up_inputs(batch_size), num_made_up)
    pipe = build_pipeline(chain(made_up, source), batch_size, config, is_training, device_id)
    _run(pipe)
    return pipe, iter(range(num_made_up - 1))


def _synthetic_batches(config: Config, shard: Shard,
                       device_id: int | None) -> Callable[[Iterable[int]], Iterator[Batch]]:
    """The same random images and labels again and again, already on the device; as _build_batches."""
    data, side, size = config.data, config.data.image_size, shard.local_batch_size
    channels = 4 if data.pad_to_4_channels else 3
    shape = (size, channels, side, side) if config.model.layout == 'NCHW' else (size, side, side, channels)
    dtype = 'float16' if config.train.precision == 'float16' else 'float32'
    random = np.random.default_rng(shard.rank)
    context = device_context(device_id)
    images = mx.nd.array(random.standard_normal(shape, np.float32), context, dtype)
    labels = mx.nd.array(random.integers(0, data.num_classes, size), context, 'int32')
    return lambda num_valid: (Batch(images, labels, valid) for valid in num_valid)


def device_context(device_id: int | None) -> mx.Context:
    """The MXNet context of a GPU number, or of the CPU for None."""
    return mx.cpu() if device_id is None else mx.gpu(device_id)
