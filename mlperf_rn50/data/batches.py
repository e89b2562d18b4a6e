"""Training and evaluation batches on the device: choice of records, reading ahead, decoding and
transfer to MXNet."""

import io
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, cycle, groupby, islice, repeat, zip_longest
from time import monotonic
from typing import Any, NamedTuple

import imagesize
import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from mlperf_rn50.config import Config, for_evaluation, image_shape, with_size
from mlperf_rn50.data import pipeline, shards
from mlperf_rn50.data.augment import NUM_DRAWS, padded_crop_anchors, random_resized_crops
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.pipeline import Inputs
from mlperf_rn50.data.recordio import Record, RecordCache, RecordFile, find_split
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import DataError


@dataclass(frozen=True)
class Batch:
    """One rank's images and labels for one forward pass."""

    # float32 or float16, (batch, channels, side, side), or channels last for layout=NHWC
    images: NDArray
    labels: NDArray  # int32, (batch,)
    num_valid: int  # number of leading images that count; the rest is padding
    # bytes read from files, padding included; 0 for cached records and synthetic images
    num_bytes: int = 0
    # bytes of the records that this node reads for the first time since the process started
    num_new_bytes: int = 0
    # Parts of the time in which the caller waited for the batch: for record files, and for DALI.
    # The rest is Python.
    read_s: float = 0.0
    decode_s: float = 0.0


# Function that returns the next batches, given their num_valid.
NextBatches = Callable[[Iterable[int]], Iterator[Batch]]


class Request(NamedTuple):
    """Record numbers for one forward pass and, in training, random numbers for the augmentation."""

    samples: np.ndarray  # record numbers, int64, (batch,)
    # True if this rank's node reads the record for the first time, bool, (batch,)
    is_new: np.ndarray
    # random numbers for the augmentation, (batch, draws); None for an evaluation
    uniforms: np.ndarray | None = None
    # True if the image is mirrored, bool, (batch,); None for an evaluation
    is_mirrored: np.ndarray | None = None


def _fill(
    records: Sequence[Record], request: Request, data: DataConfig, describe: Callable[[int], str]
) -> Inputs:
    """Return pipeline inputs for a batch of records, with the crops and mirrors of its request."""
    for sample, record in zip(request.samples, records):
        if not 0 <= record.label < data.num_classes:
            raise DataError(
                f'{describe(sample)}: got a label of {record.label:g}, expected 0 to '
                f'{data.num_classes - 1}; set data.num_classes, or prepare the data again'
            )
    images = [r.image for r in records]
    changed: dict[str, Any] = {
        'labels': np.array([[r.label] for r in records], np.int32),
        'samples': request.samples,
    }
    uniforms = request.uniforms
    if uniforms is not None and data.crop == 'random_resized':
        is_turned = pipeline.DALI_HAS_ORIENTATION  # by EXIF
        found = [imagesize.get(io.BytesIO(i.data), exif_rotation=is_turned) for i in images]
        sizes = np.array([size[::-1] for size in found])
        if sizes.min() < 1:
            sample = request.samples[sizes.min(axis=1).argmin()]
            raise DataError(
                f'{describe(sample)}: got an image without a readable size; prepare the data again'
            )
        area, aspect = (data.min_area, data.max_area), (data.min_aspect, data.max_aspect)
        crops = random_resized_crops(uniforms[:, :-1], sizes, area, aspect)
        changed['anchors'], changed['shapes'] = crops
    elif uniforms is not None and data.crop == 'padded':
        changed['anchors'] = padded_crop_anchors(uniforms[:, :2], data.crop_padding)
    if request.is_mirrored is not None:
        changed['mirrors'] = request.is_mirrored[:, None].astype(np.int32)
    return replace(pipeline.whole_images(images), **changed)


def _read_ahead(
    open_records: Callable[[], RecordFile],
    data: DataConfig,
    requests: Iterator[Request],
    num_ready: int,
) -> Iterator[Inputs]:
    """Yield inputs for endless requests in order. Read ahead one batch per read thread, and
    num_ready more."""
    records = open_records()
    pool = ThreadPoolExecutor(data.read_threads, 'read')
    cache = RecordCache(records.read, data.record_cache_mib << 20)

    def read(request: Request) -> Inputs:
        """Return inputs, with the fraction of the thread's time that reading took as read_s; the
        rest is Python."""
        start = monotonic()
        found, is_read = zip(*map(cache.read, request.samples))
        read_s = monotonic() - start
        inputs = _fill(found, request, data, records.describe)
        return replace(
            inputs,
            num_bytes=records.num_bytes(request.samples[np.array(is_read)]),
            num_new_bytes=records.num_bytes(request.samples[request.is_new]),
            read_s=read_s / max(monotonic() - start, 1e-9),
        )

    pending: deque[Future[Inputs]] = deque()
    try:
        for request in requests:
            pending.append(pool.submit(read, request))
            if len(pending) > num_ready + data.read_threads:
                start = monotonic()
                inputs = pending.popleft().result()
                yield replace(inputs, read_s=inputs.read_s * (monotonic() - start))
    finally:
        # Do not wait, because an abandoned generator may be closed by one of these threads.
        pool.shutdown(wait=False, cancel_futures=True)


def _join(parts: list[Inputs]) -> Inputs:
    """Return the inputs of one pipeline run for several batches. Byte counts are those of the
    first."""
    names = ('labels', 'anchors', 'shapes', 'mirrors')
    return replace(
        parts[0],
        images=[image for part in parts for image in part.images],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
    )


def train_steps(shard: Shard, first_step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (epoch, step in the epoch, forward pass in the step) endlessly, starting at a global
    step."""
    for step in count(first_step):
        for micro in range(shard.num_micro):
            yield *divmod(step, shard.steps_per_epoch), micro


def train_requests(data: DataConfig, shard: Shard, seed: int, first_step: int) -> Iterator[Request]:
    """Return training requests, starting at a global step. A thread draws each epoch's order one
    epoch in advance."""
    is_known = np.zeros(shard.num_samples, bool)
    pool = ThreadPoolExecutor(1, 'ahead')

    def draw(epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = shards.epoch_order(shard, seed, epoch)
        # a resumed run begins within an epoch
        start = first_step * shard.global_batch_size - epoch * shard.num_positions
        return order, shards.first_reads(shard, order, is_known, start)

    first_drawn = pool.submit(draw, first_step // shard.steps_per_epoch)

    def requests() -> Iterator[Request]:
        current = -1
        drawn = first_drawn
        for epoch, step, micro in train_steps(shard, first_step):
            if epoch != current:
                current = epoch
                order, is_first = drawn.result()
                drawn = pool.submit(draw, epoch + 1)
            samples = shard.select(order, step, micro)
            uniforms = shards.augmentation_uniforms(shard, seed, epoch, step, micro, NUM_DRAWS)
            if data.mirror == 'alternating':
                is_mirrored = shards.alternating_mirrors(samples, seed, epoch)
            else:
                is_mirrored = uniforms[:, -1] < data.mirror_probability
            is_new = shard.select(is_first, step, micro)
            yield Request(samples, is_new, uniforms, is_mirrored)

    return requests()


def eval_requests(shard: Shard) -> Iterator[Request]:
    # in storage order, with padding at the end
    order = np.resize(np.arange(shard.num_samples), shard.num_positions)
    none_new = np.zeros(shard.local_batch_size, bool)
    for step in cycle(range(shard.steps_per_epoch)):
        yield Request(shard.select(order, step), none_new)


def train_batches(
    config: Config,
    shard: Shard,
    seed: int,
    first_step: int,
    device_id: int | None,
    open_records: Callable[[], RecordFile] | None = None,
) -> Iterator[Batch]:
    """Return endless training batches, starting at a global step. Requesting the first one opens
    the files.

    Each run of epochs with one size has a pipeline of its own, and all pipelines take their images
    from one stream.
    """
    num_valid = (shard.num_valid(step, micro) for _, step, micro in train_steps(shard, first_step))
    runs = size_runs(config.data, shard, first_step)
    if config.data.synthetic:
        return _in_turn(
            lambda side, num: _make_synthetic(with_size(config, side), shard, device_id),
            runs,
            num_valid,
        )
    opened = open_records or find_split(config.data, 'train')
    requests = train_requests(config.data, shard, seed, first_step)
    num_ready = config.data.input_batch_multiplier * config.data.prefetch_depth
    inputs = _read_ahead(opened, config.data, requests, num_ready)

    def build(side: int, num: int | None) -> NextBatches:
        feed = islice(inputs, num)
        return _Feed(
            opened, feed, shard, with_size(config, side), is_training=True, device_id=device_id
        ).batches

    return _in_turn(build, runs, num_valid)


def size_runs(data: DataConfig, shard: Shard, first_step: int) -> list[tuple[int, int | None]]:
    """Return side and number of batches of each run of epochs with one size, from a step on; None:
    the last one."""
    first_epoch, step = divmod(first_step, shard.steps_per_epoch)
    epochs = range(first_epoch, max(first_epoch + 1, len(data.sizes)))
    num_done = step * shard.num_micro  # in the first epoch
    runs: list[tuple[int, int | None]] = []
    for side, same in groupby(map(data.size_of, epochs)):
        num = len(list(same)) * shard.steps_per_epoch * shard.num_micro
        runs.append((side, num - num_done))
        num_done = 0
    return [*runs[:-1], (runs[-1][0], None)]


def _in_turn(
    build: Callable[[int, int | None], NextBatches],
    runs: list[tuple[int, int | None]],
    num_valid: Iterator[int],
) -> Iterator[Batch]:
    """Build the first pipeline. Return the batches of all runs of epochs, whose pipelines a thread
    builds in time."""
    first = [build(*runs[0])]  # taken out below, so that its memory is freed after its epochs
    pool = ThreadPoolExecutor(1, 'build')

    def batches() -> Iterator[Batch]:
        current = first.pop()
        for (_, num), following in zip_longest(runs, runs[1:]):
            built = None
            if following:
                built = pool.submit(build, *following)
            yield from current(islice(num_valid, num))
            if built:
                current = built.result()

    return batches()


def eval_batches(
    config: Config, shard: Shard, device_id: int | None, split: str = 'validation'
) -> Callable[[], Iterator[Batch]]:
    """Return a function that returns the batches of one pass over this rank's images of a split,
    not augmented."""
    config = for_evaluation(config)
    num_valid = [shard.num_valid(step) for step in range(shard.steps_per_epoch)]
    if config.data.synthetic:
        batches = _make_synthetic(config, shard, device_id)
    else:
        # One endless pipeline serves all evaluations, so that the first batches of each are decoded
        # during training.
        opened, requests = find_split(config.data, split), eval_requests(shard)
        inputs = _read_ahead(opened, config.data, requests, config.data.prefetch_depth)
        batches = _Feed(
            opened, inputs, shard, config, is_training=False, device_id=device_id
        ).batches
    return lambda: batches(num_valid)


def synthetic_batches(config: Config, shard: Shard, device_id: int | None) -> Iterator[Batch]:
    """Return endless batches of synthetic images, like those of training with data.synthetic."""
    return _make_synthetic(config, shard, device_id)(repeat(shard.num_valid(0)))


class _Feed:
    """A pipeline, the inputs that it takes, and the batches that are cut from its runs.

    A run of the pipeline returns one or several batches, which are cut without a copy.
    """

    def __init__(
        self,
        open_records: Callable[[], RecordFile],
        inputs: Iterator[Inputs],
        shard: Shard,
        config: Config,
        is_training: bool,
        device_id: int | None,
    ):
        self._open_records, self._inputs = open_records, inputs
        self._decoder, self._device_id = config.data.decoder, device_id
        self._num_joined = config.data.input_batch_multiplier if is_training else 1
        self._size = shard.local_batch_size
        self._inside: deque[Inputs] = deque()  # batches in the pipeline
        # batches of the last run that are not used yet
        self._cut: deque[tuple[NDArray, NDArray]] = deque()
        # With the asynchronous engine, MXNet waits until freed memory is unused before it returns
        # it again, so no batch is overwritten early. The last runs are kept so that the training
        # loop, which is two steps ahead, does not wait. With gradient accumulation, it may wait for
        # the pass of four runs before, while the device still has three passes to compute.
        self._recent: deque[Any] = deque(maxlen=4 if pipeline.has_async_engine() else 0)
        # time that source() has taken in this run of the pipeline, and its part for record files
        self._source_s = self._read_s = 0.0
        # The pipeline holds its source. With a weak reference, it is freed with this object.
        self._pipe, self._left_over = pipeline.build_warm(
            _Feed.source(weakref.proxy(self)),
            self._num_joined * self._size,
            config,
            is_training,
            device_id,
            is_warm=device_id is not None and config.train.num_warmup_steps > 0,
        )
        self._is_kept = pipeline.keeps_outputs(self._pipe)

    def source(self) -> Iterator[Inputs]:
        """Yield the inputs of each run; the pipeline takes them ahead of its outputs."""
        start = monotonic()
        while parts := list(islice(self._inputs, self._num_joined)):
            self._inside.extend(parts)
            joined = _join(parts)
            self._read_s += sum(part.read_s for part in parts)
            self._source_s += monotonic() - start
            yield joined
            start = monotonic()

    def run(self) -> Any:
        """Return the outputs of the next run. Raise DataError that names an image which DALI cannot
        decode."""
        try:
            return pipeline.run_pipeline(self._pipe)
        except DataError as e:
            test = pipeline.DecoderTest(self._decoder, self._device_id)
            images = (pair for part in self._inside for pair in zip(part.images, part.samples))
            damaged = next((sample for image, sample in images if not test.passes(image)), None)
            # Without such an image, or if even a synthetic one fails, no image is at fault.
            if damaged is None or not test.passes(pipeline.synthetic_inputs(1).images[0]):
                raise
            raise DataError(
                f'{self._open_records().describe(damaged)}: DALI cannot decode this image ({e}); '
                'replace it and prepare the data again'
            ) from e

    def next(self, num_valid: int) -> Batch:
        """Return the next batch, from the last run or a new one."""
        for _ in self._left_over:  # the first call discards the remaining synthetic batches
            self.run()
        self._source_s = self._read_s = decode_s = 0.0
        if not self._cut:
            start = monotonic()
            outputs = self.run()
            decode_s = max(0.0, monotonic() - start - self._source_s)
            context, size = device_context(self._device_id), self._size
            images, labels = (pipeline.to_mxnet(o, self._is_kept, context) for o in outputs)
            self._recent.append((images, labels))
            starts = range(0, self._num_joined * size, size)
            self._cut.extend((images[i : i + size], labels[i : i + size]) for i in starts)
        images, labels = self._cut.popleft()
        part = self._inside.popleft()
        return Batch(
            images,
            labels.reshape((-1,)),
            num_valid,
            num_bytes=part.num_bytes,
            num_new_bytes=part.num_new_bytes,
            read_s=self._read_s,
            decode_s=decode_s,
        )

    def batches(self, num_valid: Iterable[int]) -> Iterator[Batch]:
        return map(self.next, num_valid)


def _make_synthetic(config: Config, shard: Shard, device_id: int | None) -> NextBatches:
    """Return a function like _Feed.batches, which repeats one batch of random images on the
    device."""
    random, context = np.random.default_rng(shard.rank), device_context(device_id)
    size = shard.local_batch_size
    dtype = 'float16' if config.train.precision == 'float16' else 'float32'
    pixels = random.standard_normal((size, *image_shape(config)), np.float32)
    images = mx.nd.array(pixels, context, dtype)
    labels = mx.nd.array(random.integers(0, config.data.num_classes, size), context, 'int32')
    return lambda num_valid: (Batch(images, labels, valid) for valid in num_valid)


def device_context(device_id: int | None) -> mx.Context:
    """Return the MXNet context of a GPU number, or of the CPU for None."""
    return mx.cpu() if device_id is None else mx.gpu(device_id)
