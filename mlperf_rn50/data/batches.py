"""Training and evaluation batches on the device: choice of records, reading ahead, decoding and
transfer to MXNet."""

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from mlperf_rn50.data.records import Record, RecordCache, RecordFile, find_split
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
    records: list[Record], request: Request, data: DataConfig, describe: Callable[[int], str]
) -> Inputs:
    """Return pipeline inputs for a batch of records, with the crops and mirrors of its request."""
    for sample, record in zip(request.samples, records):
        if not 0 <= record.label < data.num_classes:
            raise DataError(
                f'{describe(sample)}: got a label of {record.label:g}, expected 0 to '
                f'{data.num_classes - 1}; set data.num_classes, or prepare the data again'
            )
    inputs = pipeline.whole_images([r.image for r in records])
    changed: dict[str, Any] = {
        'labels': np.array([[r.label] for r in records], np.int32),
        'samples': request.samples,
    }
    uniforms = request.uniforms
    if uniforms is not None and data.crop == 'random_resized':
        sizes = np.array([imagesize.get(io.BytesIO(i.data))[::-1] for i in inputs.images])
        if sizes.min() < 1:
            sample = request.samples[sizes.min(axis=1).argmin()]
            raise DataError(
                f'{describe(sample)}: got an image without a readable size; prepare the data again'
            )
        changed['anchors'], changed['shapes'] = random_resized_crops(
            uniforms[:, :-1],
            sizes,
            (data.min_area, data.max_area),
            (data.min_aspect, data.max_aspect),
        )
    elif uniforms is not None and data.crop == 'padded':
        changed['anchors'] = padded_crop_anchors(uniforms[:, :2], data.crop_padding)
    if request.is_mirrored is not None:
        changed['mirrors'] = request.is_mirrored[:, None].astype(np.int32)
    return replace(inputs, **changed)


def _read_ahead(
    open_records: Callable[[], RecordFile],
    data: DataConfig,
    requests: Iterator[Request],
    num_ready: int,
) -> Iterator[Inputs]:
    """Yield inputs for endless requests in order. Read ahead one batch per read thread, and
    num_ready more."""
    records, pool = open_records(), ThreadPoolExecutor(data.read_threads, 'read')
    cache = RecordCache(records.read, data.record_cache_mib << 20)

    def read(request: Request) -> Inputs:
        """Return inputs, with the fraction of the thread's time that reading took as read_s; the
        rest is Python."""
        start = monotonic()
        results = [cache.read(s) for s in request.samples]
        read_s = monotonic() - start
        is_read = np.array([is_read for _, is_read in results])
        inputs = _fill([record for record, _ in results], request, data, records.describe)
        return replace(
            inputs,
            num_bytes=records.num_bytes(request.samples[is_read]),
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
    is_known, pool = np.zeros(shard.num_samples, bool), ThreadPoolExecutor(1, 'ahead')

    def draw(epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = shards.epoch_order(shard, seed, epoch)
        return order, shards.first_reads(shard, order, is_known)

    first_drawn = pool.submit(draw, first_step // shard.steps_per_epoch)

    def requests() -> Iterator[Request]:
        current, drawn = -1, first_drawn
        for epoch, step, micro in train_steps(shard, first_step):
            if epoch != current:
                current, (order, is_first), drawn = (
                    epoch,
                    drawn.result(),
                    pool.submit(draw, epoch + 1),
                )
            samples = shard.samples(order, step, micro)
            uniforms = shards.augmentation_uniforms(shard, seed, epoch, step, micro, NUM_DRAWS)
            is_mirrored = (
                shards.alternating_mirrors(samples, seed, epoch)
                if data.mirror == 'alternating'
                else uniforms[:, -1] < data.mirror_probability
            )
            yield Request(samples, shard.samples(is_first, step, micro), uniforms, is_mirrored)

    return requests()


def eval_requests(shard: Shard) -> Iterator[Request]:
    # in storage order, with padding at the end
    order = np.resize(np.arange(shard.num_samples), shard.num_positions)
    none_new = np.zeros(shard.local_batch_size, bool)
    for step in cycle(range(shard.steps_per_epoch)):
        yield Request(shard.samples(order, step), none_new)


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
    inputs = _read_ahead(
        opened,
        config.data,
        train_requests(config.data, shard, seed, first_step),
        config.data.input_batch_multiplier * config.data.prefetch_depth,
    )
    return _in_turn(
        lambda side, num: _build_batches(
            opened, islice(inputs, num), shard, with_size(config, side), True, device_id
        ),
        runs,
        num_valid,
    )


def size_runs(data: DataConfig, shard: Shard, first_step: int) -> list[tuple[int, int | None]]:
    """Return side and number of batches of each run of epochs with one size, from a step on; None:
    the last one."""
    epoch, step = divmod(first_step, shard.steps_per_epoch)
    runs = [
        (side, len(list(epochs)))
        for side, epochs in groupby(
            data.size_of(e) for e in range(epoch, max(epoch + 1, len(data.sizes)))
        )
    ]
    nums: list[int | None] = [
        shard.num_micro * (num * shard.steps_per_epoch - step * (i == 0))
        for i, (_, num) in enumerate(runs)
    ]
    return list(zip((side for side, _ in runs), [*nums[:-1], None]))


def _in_turn(
    build: Callable[[int, int | None], NextBatches],
    runs: list[tuple[int, int | None]],
    num_valid: Iterator[int],
) -> Iterator[Batch]:
    """Build the first pipeline. Return the batches of all runs of epochs, whose pipelines a thread
    builds in time."""
    first, pool = build(*runs[0]), ThreadPoolExecutor(1, 'build')

    def batches() -> Iterator[Batch]:
        current = first
        for (_, num), following in zip_longest(runs, runs[1:]):
            built = following and pool.submit(build, *following)
            yield from current(islice(num_valid, num))
            if built:
                current = built.result()

    return batches()


def eval_batches(
    config: Config, shard: Shard, device_id: int | None, split: str = 'validation'
) -> Callable[[], Iterator[Batch]]:
    """Return a function that returns the batches of one pass over this rank's images of a split,
    not augmented."""
    config, num_valid = (
        for_evaluation(config),
        [shard.num_valid(step) for step in range(shard.steps_per_epoch)],
    )
    if config.data.synthetic:
        batches = _make_synthetic(config, shard, device_id)
    else:
        # One endless pipeline serves all evaluations, so that the first batches of each are decoded
        # during training.
        open_records = find_split(config.data, split)
        inputs = _read_ahead(
            open_records, config.data, eval_requests(shard), config.data.prefetch_depth
        )
        batches = _build_batches(open_records, inputs, shard, config, False, device_id)
    return lambda: batches(num_valid)


def synthetic_batches(config: Config, shard: Shard, device_id: int | None) -> Iterator[Batch]:
    """Return endless batches of synthetic images, like those of training with data.synthetic."""
    return _make_synthetic(config, shard, device_id)(repeat(shard.num_valid(0)))


def _build_batches(
    open_records: Callable[[], RecordFile],
    inputs: Iterator[Inputs],
    shard: Shard,
    config: Config,
    is_training: bool,
    device_id: int | None,
) -> NextBatches:
    """Build a pipeline for inputs.

    A run of the pipeline returns one or several batches, which are cut without a copy.
    """
    inside: deque[Inputs] = deque()  # batches in the pipeline
    num_joined, size = (
        config.data.input_batch_multiplier if is_training else 1,
        shard.local_batch_size,
    )
    # time that source() has taken in this run of the pipeline, and its part for record files
    read_s = source_s = 0.0

    def source() -> Iterator[Inputs]:
        nonlocal read_s, source_s
        start = monotonic()
        while parts := list(islice(inputs, num_joined)):
            inside.extend(parts)
            joined = _join(parts)
            read_s, source_s = read_s + sum(p.read_s for p in parts), source_s + monotonic() - start
            yield joined
            start = monotonic()

    pipe, left_over = pipeline.build_warm(
        source(),
        num_joined * size,
        config,
        is_training,
        device_id,
        is_warm=device_id is not None and config.train.num_warmup_steps > 0,
    )
    context, is_kept = device_context(device_id), pipeline.keeps_outputs(pipe)

    cut: deque[tuple[NDArray, NDArray]] = deque()  # batches of the last run that are not used yet
    # With the asynchronous engine, MXNet waits until freed memory is unused before it returns it
    # again. So the last runs are kept until the steps that read them have ended, as the training
    # loop is two steps ahead.
    recent: deque[tuple[NDArray, NDArray]] = deque(maxlen=4 if pipeline.has_async_engine() else 0)

    def run() -> Any:
        try:
            return pipeline.run_pipeline(pipe)
        except DataError as e:
            test = pipeline.DecoderTest(config.data.decoder, device_id)
            images = ((i, s) for part in inside for i, s in zip(part.images, part.samples))
            damaged = next((sample for image, sample in images if not test.passes(image)), None)
            # no image is at fault
            if damaged is None or not test.passes(pipeline.synthetic_inputs(1).images[0]):
                raise
            raise DataError(
                f'{open_records().describe(damaged)}: DALI cannot decode this image ({e}); '
                'replace it and '
                'prepare the data again'
            ) from e

    def batches(num_valid: Iterable[int]) -> Iterator[Batch]:
        nonlocal read_s, source_s
        for _ in left_over:  # the first call discards the remaining synthetic batches
            run()
        for valid in num_valid:
            decode_s = read_s = source_s = 0.0
            if not cut:
                start = monotonic()
                outputs = run()
                decode_s = max(0.0, monotonic() - start - source_s)
                images, labels = (pipeline.to_mxnet(output, is_kept, context) for output in outputs)
                recent.append((images, labels))
                cut.extend(
                    (images[i : i + size], labels[i : i + size])
                    for i in range(0, num_joined * size, size)
                )
            images, labels = cut.popleft()
            part = inside.popleft()
            yield Batch(
                images,
                labels.reshape((-1,)),
                valid,
                part.num_bytes,
                part.num_new_bytes,
                read_s,
                decode_s,
            )

    return batches


def _make_synthetic(config: Config, shard: Shard, device_id: int | None) -> NextBatches:
    """Return a function like that of _build_batches, which repeats one batch of random images on
    the device."""
    size, random, context = (
        shard.local_batch_size,
        np.random.default_rng(shard.rank),
        device_context(device_id),
    )
    dtype = 'float16' if config.train.precision == 'float16' else 'float32'
    images = mx.nd.array(
        random.standard_normal((size, *image_shape(config)), np.float32), context, dtype
    )
    labels = mx.nd.array(random.integers(0, config.data.num_classes, size), context, 'int32')
    return lambda num_valid: (Batch(images, labels, valid) for valid in num_valid)


def device_context(device_id: int | None) -> mx.Context:
    """Return the MXNet context of a GPU number, or of the CPU for None."""
    return mx.cpu() if device_id is None else mx.gpu(device_id)
