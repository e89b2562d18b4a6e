"""Training on images of a size that depends on the epoch."""

from itertools import islice

import mxnet as mx
import numpy as np
import pytest
from numbered import make_config, ramp, with_data

from mlperf_rn50.config import Config, for_evaluation, with_size
from mlperf_rn50.data.batches import eval_batches, size_runs, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.zoo import (
    build_for_sizes,
    build_model,
    count_flops,
    image_shape,
    variance_corrections,
)
from mlperf_rn50.train.options import TrainConfig


@pytest.mark.parametrize(
    'sizes, first_step, runs',
    [
        ((), 7, [(224, None)]),
        ((16,), 0, [(16, None)]),
        ((16, 24), 0, [(16, 10), (24, None)]),
        ((16, 16, 24, 24), 0, [(16, 20), (24, None)]),
        ((16, 16, 24, 24), 7, [(16, 6), (24, None)]),
        ((16, 24, 16), 5, [(24, 10), (16, None)]),
        ((16, 24, 16), 9, [(24, 2), (16, None)]),
        ((16, 24), 99, [(24, None)]),
    ],
)
def test_runs_of_epochs_begin_and_end_at_their_steps(sizes, first_step, runs):
    assert size_runs(DataConfig(sizes=sizes), Shard(18, 0, 1, 2, num_micro=2), first_step) == runs


@pytest.fixture(scope='module')
def numbered(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp('numbered'), ramp(22), num_val=22)


def taken(config, first_step, num, **keys):
    return list(
        islice(
            train_batches(with_data(config, **keys), Shard(22, 0, 1, 4), 9, first_step, None), num
        )
    )


@pytest.mark.parametrize('num_joined', [1, 4])
def test_stream_consists_of_the_streams_of_each_size(numbered, num_joined):
    """Six batches per epoch are no multiple of four batches per run of a pipeline."""
    keys = {
        'crop': 'padded',
        'crop_padding': 2,
        'mirror_probability': 0.5,
        'input_batch_multiplier': num_joined,
    }
    whole = taken(numbered, 0, 28, sizes=(4, 4, 6, 8), **keys)
    assert [b.images.shape[2] for b in whole] == [4] * 12 + [6] * 6 + [8] * 10
    assert sum(b.num_new_bytes > 0 for b in whole) == 6  # every record is new once
    for side, steps in ((4, range(12)), (6, range(12, 18)), (8, range(18, 28))):
        alone = taken(numbered, 0, 28, sizes=(side,), **keys)
        for step in steps:
            for a, b in (
                (whole[step].images, alone[step].images),
                (whole[step].labels, alone[step].labels),
            ):
                np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
            assert whole[step].num_valid == alone[step].num_valid


@pytest.mark.parametrize('first_step', [5, 12, 14, 17, 18, 20])
def test_stream_continues_to_the_bit_from_any_step(numbered, first_step):
    keys = {'crop': 'padded', 'sizes': (4, 4, 6, 8), 'mirror_probability': 0.5}
    whole, rest = (
        taken(numbered, 0, 26, **keys),
        taken(numbered, first_step, 26 - first_step, **keys),
    )
    for a, b in zip(whole[first_step:], rest, strict=True):
        np.testing.assert_array_equal(a.images.asnumpy(), b.images.asnumpy())


def test_synthetic_images_have_the_sizes_of_the_epochs(numbered):
    batches = taken(numbered, 5, 4, synthetic=True, sizes=(4, 6))
    assert [b.images.shape[2] for b in batches] == [4, 6, 6, 6]


@pytest.mark.parametrize('crop', ['padded', 'none'])
def test_smaller_image_is_the_whole_shifted_image_shrunk(numbered, crop):
    """Linear interpolation to half the size averages blocks of two by two pixels."""
    large, small = (
        taken(numbered, 0, 6, crop=crop, crop_padding=2, sizes=(side,)) for side in (8, 4)
    )
    for a, b in zip(large, small):
        blocks = a.images.asnumpy().reshape(4, 3, 4, 2, 4, 2).mean(axis=(3, 5))
        assert np.abs(blocks - b.images.asnumpy()).max() <= 1


def test_evaluation_has_its_own_size(numbered):
    config = with_data(numbered, sizes=(4,), eval_size=6, resize_shorter=8)
    images = next(eval_batches(config, Shard(22, 0, 1, 5), None)()).images.asnumpy()
    np.testing.assert_array_equal(
        images, [image.transpose(2, 0, 1)[:, 1:7, 1:7] for image in ramp(5)]
    )
    assert for_evaluation(config).data.image_size == 6 and image_shape(for_evaluation(config)) == (
        3,
        6,
        6,
    )


@pytest.mark.parametrize('sizes', [(16, 24, 32), (40, 48), (32, 40)], ids=str)
def test_networks_of_all_sizes_train_the_same_parameters(thin_resnets, sizes):
    """Up to 32 pixels, the last maps are rows of pixels (_RowConv), so that these networks
    differ."""
    config = Config(
        data=DataConfig(image_size=32, sizes=sizes, num_classes=5),
        model=ModelConfig(name='resnet18'),
        train=TrainConfig(local_batch_size=2),
    )
    net = build_model(config, mx.cpu(), 3)
    nets, params = build_for_sizes(config, net), net.collect_params()
    assert list(nets) == sorted(sizes, reverse=True) and nets[sizes[0]] is net
    assert len({id(n) for n in nets.values()}) == len({min(s, 33) for s in sizes})
    for side in (*sizes, *sizes):  # each network again, after the parameters have changed
        alone = build_model(with_size(config, side), mx.cpu(), 4)
        for name, param in alone.collect_params().items():
            param.set_data(params[name].data())
        images = mx.nd.array(np.random.default_rng(side).normal(size=(2, 3, side, side)))
        for n in (nets[side], alone):
            with mx.autograd.record():
                loss = (n(images) ** 2).sum()
            loss.backward()
        for name, param in params.items():
            other = alone.collect_params()[name]
            np.testing.assert_array_equal(
                param.data().asnumpy(), other.data().asnumpy(), err_msg=name
            )
            if param.grad_req != 'null':
                np.testing.assert_allclose(
                    param.grad().asnumpy(), other.grad().asnumpy(), rtol=1e-5, atol=1e-7
                )
                param.data()[:] -= 1e-3 * param.grad()
        shape = image_shape(with_size(config, side))
        assert count_flops(nets[side], shape) == count_flops(alone, shape)
        assert variance_corrections(nets[side], (2, *shape)) == variance_corrections(
            alone, (2, *shape)
        )
