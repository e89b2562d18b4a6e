"""DALI on a GPU: the same crops and mirrors as on the CPU, nearly the same pixels, and no
overwritten batches."""

from dataclasses import replace
from itertools import islice

import mxnet as mx
import numpy as np
import pytest
from gpu.compare import from_layout
from gpu.conftest import IS_DRY
from gpu.pictures import pictures_config
from numbered import make_config, with_data

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import eval_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.doctor.facts import try_batches
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train.options import TrainConfig

BATCH = 8
# Mean absolute difference in levels of 0 to 255, for a batch and for the worst image. If the CPU
# decodes, only the last bits of the resize filter differ. nvJPEG has a different inverse transform
# and chroma upsampling.
MEAN_LEVELS = {'cpu': 0.5, 'mixed': 2.0}
WORST_LEVELS = {'cpu': 1.0, 'mixed': 4.0}


def images_of(folder, is_training, layout, precision, device_id, decoder, load=None):
    """Return the images of two batches in NCHW, and their labels."""
    data = dict(decoder=decoder, hw_decoder_load=load, pad_to_4_channels=layout == 'NHWC')
    config = pictures_config(folder, **data)
    config = replace(
        config, model=ModelConfig(layout=layout), train=TrainConfig(precision=precision)
    )
    shard = Shard(config.data.num_train if is_training else config.data.num_val, 0, 1, BATCH)
    batches = (
        train_batches(config, shard, 5, 0, device_id)
        if is_training
        else eval_batches(config, shard, device_id)()
    )
    pairs = [
        (from_layout(b.images.asnumpy(), layout)[:, :3].astype(np.float32), b.labels.asnumpy())
        for b in islice(batches, 2)
    ]
    return np.concatenate([i for i, _ in pairs]), np.concatenate([n for _, n in pairs])


def level_differences(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the mean absolute difference of each image."""
    return np.abs(got - expected).mean(axis=(1, 2, 3))


@pytest.mark.parametrize('decoder, load', [('cpu', None), ('mixed', 0.0), ('mixed', 1.0)])
@pytest.mark.parametrize(
    'layout, precision', [('NCHW', 'float32'), ('NHWC', 'float32'), ('NHWC', 'float16')]
)
@pytest.mark.parametrize('is_training', [True, False], ids=['training', 'evaluation'])
def test_images_match_cpu(
    is_training, layout, precision, decoder, load, pictures, device_id, figure
):
    expected, labels = images_of(pictures, is_training, 'NCHW', 'float32', None, 'cpu')
    got, got_labels = images_of(pictures, is_training, layout, precision, device_id, decoder, load)
    np.testing.assert_array_equal(got_labels, labels)
    differences = level_differences(got, expected)
    figure('mean difference from the CPU', float(differences.mean()), 'levels of 255')
    figure('largest difference of an image', float(differences.max()), 'levels of 255')
    assert differences.mean() <= MEAN_LEVELS[decoder]
    assert differences.max() <= WORST_LEVELS[decoder]
    # A different mirror or crop of the same image would exceed the tolerance.
    assert level_differences(got, expected[..., ::-1]).min() > 2 * WORST_LEVELS[decoder]
    assert level_differences(got[..., 8:], expected[..., :-8]).min() > 2 * WORST_LEVELS[decoder]


@pytest.mark.parametrize('decoder', ['cpu', 'mixed'])
def test_trial_of_the_doctor_runs_dali(decoder, device_id, figure):
    config = Config(
        data=DataConfig(decoder=decoder, image_size=64, resize_shorter=64),
        model=ModelConfig('resnet18'),
        train=TrainConfig(local_batch_size=BATCH),
    )
    trial = try_batches(config, 1, 0, device_id)
    figure(f'trial batches, decoder {decoder}', trial.seconds, 's')
    assert (trial.what, trial.problem) == (f'DALI with data.decoder={decoder}', '')


def read_late(batches, num_steps: int, context: mx.Context, side: int) -> list[tuple[list, list]]:
    """Return (levels, labels) of each batch, read by a device that is kept busy before each; images
    have one level.

    Nothing waits for the device, so the pipeline fills batches before the device has read earlier
    ones. If memory is reused too early, images have the level of a later batch, or several levels
    (None).

    Args:
        side: size of the square matrices that the device multiplies before each batch.
    """
    busy, read = mx.nd.random.uniform(-1, 1, shape=(side, side), ctx=context) / side, []
    for batch in islice(batches, num_steps):
        for _ in range(4):
            busy = mx.nd.clip(mx.nd.dot(busy, busy), -1, 1)
        late = mx.nd.sum(busy * 0)
        images = mx.nd.broadcast_add(
            batch.images, late.reshape((1, 1, 1, 1)).astype(batch.images.dtype)
        )
        flat = images.reshape((images.shape[0], -1))
        read.append((flat.min(axis=1), flat.max(axis=1), batch.labels + late.astype('int32')))
        del batch, images, flat
    return [
        (
            [int(a) if a == b else None for a, b in zip(low.asnumpy(), high.asnumpy())],
            labels.asnumpy().tolist(),
        )
        for low, high, labels in read
    ]


@pytest.mark.parametrize('decoder', ['cpu', 'mixed'])
@pytest.mark.parametrize('prefetch_depth', [2, 3, 4, 5])
def test_batches_are_not_overwritten_while_they_are_read(
    decoder, prefetch_depth, tmp_path, device_id, context, figure
):
    num_steps, busy_side = (12, 64) if IS_DRY else (300, 4096)
    images = [np.full((64, 64, 3), i, np.uint8) for i in range(200)]  # level = index = label
    config = make_config(
        tmp_path / 'tagged', images, decoder=decoder, prefetch_depth=prefetch_depth
    )
    shard = Shard(200, 0, 1, 4)
    on_cpu = train_batches(with_data(config, decoder='cpu'), shard, 3, 0, None)
    expected = [b.labels.asnumpy().tolist() for b in islice(on_cpu, num_steps)]
    read = read_late(train_batches(config, shard, 3, 0, device_id), num_steps, context, busy_side)
    wrong = [(batch, labels) for batch, labels in zip(read, expected) if batch != (labels, labels)]
    figure(
        f'streams, decoder {decoder}, {prefetch_depth} batches ahead: overwritten of {num_steps}',
        len(wrong),
        'batches',
    )
    assert wrong == [] and len(read) == num_steps
