"""Batches of training and evaluation on the device: which records a batch has, read ahead, decoded, handed to MXNet."""
import dataclasses
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NamedTuple

import imagesize
import mxnet as mx
import numpy as np

from mlperf_rn50.config import Config
from mlperf_rn50.data.augment import NUM_DRAWS, padded_crop_anchors, random_resized_crops
from mlperf_rn50.data.dlpack import keeps_outputs, to_mxnet
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.pipeline import Inputs, build_warm, run_pipeline, whole_images
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
    """A pipeline over what is wanted, as a function that gives its next batches, one a number of valid images."""
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
            run_pipeline(pipe)
        for valid in num_valid:
            images, labels = (to_mxnet(output, is_kept, context) for output in run_pipeline(pipe))
            yield Batch(images, labels.reshape((-1,)), valid, *sizes.popleft())
    return batches


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
