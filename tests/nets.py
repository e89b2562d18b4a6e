"""Tiny configurations of networks, and their arrays."""

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.train.options import TrainConfig


def small_config(num_train, **train):
    """Return a configuration of ResNet-18 for synthetic images of 32 pixels."""
    sizes = dict(num_val=8, num_classes=3, image_size=32, resize_shorter=32)
    return Config(
        data=DataConfig(num_train=num_train, synthetic=True, **sizes),
        model=ModelConfig(name='resnet18'),
        train=TrainConfig(local_batch_size=4, **train),
    )


def arrays_of(net):
    """Return the values of a network's parameters by name."""
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}


def gradients_of(net):
    """Return the gradients of a network by name, and its running statistics, which have none."""
    return {
        name: (p.data() if p.grad_req == 'null' else p.grad()).asnumpy()
        for name, p in net.collect_params().items()
    }
