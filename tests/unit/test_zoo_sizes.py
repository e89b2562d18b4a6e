"""Networks for images of several sizes, with the same parameters."""

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import Config, with_size
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.zoo import (
    build_for_sizes,
    build_model,
    count_flops,
    image_shape,
    variance_corrections,
)
from mlperf_rn50.train.options import TrainConfig


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
