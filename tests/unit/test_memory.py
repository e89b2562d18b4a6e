"""The estimate of a GPU's memory: by hand on small graphs, on real networks, and against cards that are known to do."""
import json
from dataclasses import replace

import mxnet as mx
import pytest
from helpers import CLI, ROOT, run

from mlperf_rn50.cli._parsers import config_parser
from mlperf_rn50.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from mlperf_rn50.model.folded import FoldedResNet
from mlperf_rn50.model.memory import (
    NetworkSize,
    Node,
    backward_elements,
    estimate_memory,
    forward_elements,
    kept_elements,
    largest_batch,
    memory_facts,
    network_size,
    read_graph,
)
from mlperf_rn50.model.zoo import build_model, count_parameters, image_shape
from mlperf_rn50.options import resolve_config
from mlperf_rn50.system.gpu_fit import FAR_OVER

# A unit: data, weight; convolution, norm, ReLU; a second convolution; added to the first ReLU; ReLU.
UNIT = [Node('null', (), 3), Node('null', (), 0), Node('Convolution', (0, 1), 10), Node('BatchNorm', (2, 1), 10),
        Node('Activation', (3,), 10), Node('Convolution', (4, 1), 20), Node('elemwise_add', (5, 4), 20),
        Node('Activation', (6,), 20), Node('FullyConnected', (7, 1), 2)]
V100_16, V100_32, A100_40, H100 = 16160 << 20, 32510 << 20, 40536 << 20, 81559 << 20


def test_what_a_backward_pass_reads_is_counted_once():
    assert kept_elements(UNIT) == 10 + 10 + 20  # before the norm, and both ReLUs' outputs
    assert kept_elements([*UNIT[:3], Node('Unknown', (2,), 7)]) == 10 + 7  # taken to need both
    assert kept_elements([UNIT[0], Node('Flatten', (0,), 5), Node('Convolution', (1,), 7)]) == 5


def test_gradients_live_until_their_operator_is_done():
    assert backward_elements(UNIT) == 20 + 10 + 10  # of the second convolution, the shortcut, and of its own input
    assert backward_elements(UNIT[:4]) == 20


def test_an_evaluation_keeps_what_is_still_to_be_read():
    assert forward_elements(UNIT) == 10 + 20  # the shortcut waits for the second convolution
    assert forward_elements([*UNIT[:3], Node('Activation', (2,), 10)]) == 10


@pytest.fixture(scope='module')
def resnet50():
    config = Config(train=TrainConfig(local_batch_size=1))
    net = build_model(config, mx.cpu(), 0)
    return network_size(net, FoldedResNet(config, mx.cpu()).net, image_shape(config), count_parameters(net))


def test_resnet50_by_hand(resnet50):
    # Outputs of all 53 convolutions and of the first, of the ReLUs behind them, of the pool and of the 16 units.
    convolutions, relus, pool, units = 11_113_984, 4_089_344, 200_704, 5_519_360
    assert resnet50.kept == convolutions + relus + pool + units + 2048 * 2  # and of the last pool, flattened
    assert resnet50.parameters == 25_557_032 and resnet50.image == 3 * 224 * 224
    assert resnet50.backward == 3 * 256 * 56 * 56


def test_other_networks_have_an_estimate():
    for name in ('vgg16', 'googlenet', 'alexnet'):
        config = Config(model=ModelConfig(name=name), train=TrainConfig(local_batch_size=1))
        graph = read_graph(build_model(config, mx.cpu(), 0), image_shape(config))
        assert kept_elements(graph) > forward_elements(graph) > 0 and backward_elements(graph) > 0


def recipe(name, **train):
    config = resolve_config(ROOT / 'launch/configs' / f'{name}.yaml', [], config_parser('doctor', '', ''))
    return replace(config, train=replace(config.train, **train))


@pytest.mark.parametrize('name, batch, card, fits', [
    ('dgx1_v05', 208, V100_16, True), ('dgxa100_v07', 408, A100_40, True), ('dgx2_v05', 256, V100_32, True),
    ('dgx1_v05', 408, V100_16, False), ('dgxa100_v07', 408, H100, True), ('dgxa100_v07', 1024, A100_40, False)])
def test_published_runs_fit_the_cards_that_they_ran_on(resnet50, name, batch, card, fits):
    total = sum(estimate_memory(resnet50, recipe(name), batch, 8).values())
    assert (total <= card) == fits
    assert fits or total > FAR_OVER * card
    assert (largest_batch(resnet50, recipe(name), 8, card) >= batch) == fits


def test_the_largest_batch_fits_and_one_more_does_not(resnet50):
    config = recipe('dgx1_v05')
    batch = largest_batch(resnet50, config, 8, V100_16)
    totals = [sum(estimate_memory(resnet50, config, b, 8).values()) for b in (batch, batch + 1)]
    assert totals[0] <= V100_16 < totals[1]
    assert largest_batch(resnet50, config, 8, 1 << 30) == 0


def test_parts_follow_the_configuration():
    network, train = NetworkSize(100, 10, 5, 3, 1000), TrainConfig(local_batch_size=2, device='gpu')
    config = Config(train=train, data=DataConfig(synthetic=True, prefetch_depth=2))
    parts = estimate_memory(network, config, 2, 1)
    assert (parts['activations'], parts['backward'], parts['weights'], parts['optimizer'], parts['evaluation'],
            parts['exchange'], parts['pipeline']) == (800, 160, 12000, 4000, 40, 0, 2 * 72)  # two pipelines
    half = replace(config, train=replace(train, precision='float16', eval_batch_size=7))
    parts = estimate_memory(network, half, 2, 4)
    assert (parts['activations'], parts['weights'], parts['optimizer'], parts['evaluation']) == (400, 6000, 18000, 70)
    assert parts['exchange'] > 64 << 20
    mixed = replace(config, data=replace(config.data, synthetic=False, decoder='mixed', num_threads=3,
                                         device_memory_padding_mib=64, decoded_bytes_hint=10**6))
    assert estimate_memory(network, mixed, 2, 1)['pipeline'] == 2 * (72 + 2 * 10**6 + 3 * (64 << 20))
    on_cpu = replace(mixed, data=replace(mixed.data, decoder='cpu', decoded_bytes_hint=0))
    assert estimate_memory(network, on_cpu, 2, 1)['pipeline'] == 2 * (72 + 2 * 420_000)


def test_ranks_that_share_a_card_have_a_part_of_it_each(resnet50):
    config = Config(train=TrainConfig(local_batch_size=64, device='gpu'), run=RunConfig(ranks_per_device=2))
    facts = memory_facts(resnet50, config, 64, 2, V100_32)
    assert facts['share_bytes'] == V100_32 // 2 and facts['num_sharing'] == 2
    assert facts['largest_batch'] == largest_batch(resnet50, config, 2, V100_32 // 2)
    assert memory_facts(resnet50, config, 64, 2, None) is None




@pytest.mark.slow
def test_a_step_takes_what_is_estimated():
    """48 images more, on a CPU: its resident set grows as the estimate says."""
    words = ['bench', 'train', '--models', 'resnet18', '--data.image_size', 128, '--steps', 1, '--warmup-steps', 1]
    told = [run([*CLI, *words, '--batch-sizes', batch, '--format', 'json']).stdout for batch in (16, 64)]
    measured = [json.loads(text)['tables'][0]['rows'][0]['memory_mib'] for text in told]
    config = Config(model=ModelConfig(name='resnet18'), train=TrainConfig(local_batch_size=1),
                    data=DataConfig(image_size=128, synthetic=True))
    net = build_model(config, mx.cpu(), 0)
    network = network_size(net, FoldedResNet(config, mx.cpu()).net, image_shape(config), count_parameters(net))
    few, many = (estimate_memory(network, config, batch, 1) for batch in (16, 64))
    estimated = sum(many[part] - few[part] for part in ('activations', 'backward', 'pipeline')) / 2**20
    assert measured[1] - measured[0] == pytest.approx(estimated, rel=0.2)
