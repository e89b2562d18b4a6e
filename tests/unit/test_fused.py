"""Fused norms: detection, numbers and names equal to unfused norms, and channels last."""

import json
from dataclasses import replace
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_near, json_table
from mxnet import autograd
from mxnet.gluon import nn
from nets import arrays_of, gradients_of, small_config

from mlperf_rn50.config import Config, check_values
from mlperf_rn50.data.batches import synthetic_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import ConfigError
from mlperf_rn50.model import fused, resnet, zoo
from mlperf_rn50.model.fused import (
    PLAIN,
    Fusion,
    NormAddRelu,
    NormRelu,
    fusion_of,
    fusion_text,
    layout_warnings,
    with_layout,
)
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.resnet import FoldedResNet, ResNet
from mlperf_rn50.model.weights import portable
from mlperf_rn50.model.zoo import build_model, count_flops, image_shape, restore_model
from mlperf_rn50.system.processor import Processor
from mlperf_rn50.train import trainer as trainers
from mlperf_rn50.train.comm.horovod import Comm
from mlperf_rn50.train.options import TrainConfig
from mlperf_rn50.train.plan import make_plan

pytestmark = pytest.mark.usefixtures('thin_resnets')
GPU = Config(
    data=DataConfig(num_classes=4, pad_to_4_channels=True),
    model=ModelConfig(name='resnet18', layout='NHWC'),
    train=TrainConfig(local_batch_size=4, device='gpu', precision='float16'),
)
CPU = Config(train=TrainConfig(local_batch_size=4))
SMALL = small_config(num_train=16)
BOTH, ON_CPU = Fusion(NormRelu, NormAddRelu), Fusion(nn.BatchNormReLU)


def with_level(level) -> Processor:
    return Processor('EPYC', 'AuthenticAMD', 25, 17, 'AMX', level, '')


AVX2, AVX512, BF16 = map(with_level, ('AVX2', 'AVX-512', 'AVX-512 BF16'))


def config_for(device, model, precision) -> Config:
    plain = {'gpu': GPU, 'cpu': CPU}[device]
    model, train = replace(plain.model, **model), replace(plain.train, precision=precision)
    return replace(plain, model=model, train=train)


def with_model(**keys) -> Config:
    return replace(GPU, model=replace(GPU.model, **keys))


@pytest.fixture
def nvidia(monkeypatch):
    """MXNet with NVIDIA's layer and its two operators, built from plain ones, which refuse unknown
    keys.

    Source: _BatchNorm of basic_layers.py, BatchNormParam of batch_norm-inl.h and
    BatchNormAddReluParam of batch_norm_add_relu-inl.h in NVIDIA's MXNet.
    """
    plain_layer = nn.BatchNorm.__init__

    def layer(self, *arguments, act_type=None, bn_group=1, xbuf_ptr=0, **keys):
        plain_layer(self, *arguments, **keys)
        self._kwargs |= {'act_type': act_type, 'bn_group': bn_group, 'xbuf_ptr': xbuf_ptr}

    monkeypatch.setattr(nn.BatchNorm, '__init__', layer)
    for space in (mx.nd, mx.sym):
        add_operators(space, monkeypatch)


def add_operators(space, monkeypatch):
    """Replace BatchNorm and add BatchNormAddRelu in mx.nd or mx.sym."""
    plain, relu = space.BatchNorm, space.Activation

    def batch_norm(*arrays, act_type=None, bn_group=1, xbuf_ptr=0, **keys):
        y = plain(*arrays, **keys)
        return relu(y, act_type=act_type) if act_type else y

    # The position of the addend differs between releases, so all arguments are keywords.
    def batch_norm_add_relu(*, addend, bn_group=1, xbuf_ptr=0, **keys):
        return relu(plain(**keys) + addend, act_type='relu')

    monkeypatch.setattr(space, 'BatchNorm', batch_norm)
    monkeypatch.setattr(space, 'BatchNormAddRelu', batch_norm_add_relu, raising=False)


# --- detection


def test_missing_fused_operators_are_refused():
    assert fusion_of(GPU, BF16) == PLAIN and str(PLAIN) == 'fused operators: none'
    assert not fused.runs_nvidias_kernels(GPU)
    operators = {
        'fused_bn_relu': 'BatchNorm with act_type',
        'fused_bn_add_relu': 'BatchNormAddRelu',
    }
    for key, operator in operators.items():
        with pytest.raises(ConfigError, match=rf'^model.{key}: got true, .* has no {operator};'):
            build_model(with_model(**{key: True}), mx.cpu(), 0)


FUSIONS = {
    'both': BOTH,
    'add': Fusion(None, NormAddRelu),
    'relu': Fusion(NormRelu, None),
    'none': PLAIN,
    'cpu': ON_CPU,
}


# Without these kernels, the operators would omit the sum and the ReLU.
@pytest.mark.parametrize(
    'device, model, precision, expected',
    json_table("""
"gpu" | {}                                                 | "float16" | "both"
"gpu" | {"fused_bn_relu": true, "fused_bn_add_relu": true} | "float16" | "both"
"gpu" | {"fused_bn_relu": false}                           | "float16" | "add"
"gpu" | {"fused_bn_add_relu": false}                       | "float16" | "relu"
"gpu" | {"layout": "NCHW"}                                 | "float16" | "none"
"gpu" | {}                                                 | "float32" | "none"
"cpu" | {"fused_bn_relu": false}                           | "float32" | "none"
"cpu" | {"fused_bn_relu": true}                            | "float32" | "cpu"
"""),
)
def test_fused_operators_are_used_if_a_kernel_exists(nvidia, device, model, precision, expected):
    config, expected = config_for(device, model, precision), FUSIONS[expected]
    assert fusion_of(config, AVX2) == fusion_of(config, BF16) == expected
    has_kernels = expected.norm_relu is NormRelu or expected.norm_add_relu is NormAddRelu
    assert fused.runs_nvidias_kernels(config) is has_kernels


@pytest.mark.parametrize(
    'processors, precision, expected',
    [
        ([AVX2], 'float32', PLAIN),
        ([AVX512, BF16], 'float32', ON_CPU),
        ([AVX512, BF16], 'bfloat16', replace(ON_CPU, pads_images=True)),
    ],
)
def test_layers_of_a_cpu_are_selected_for_processor_and_precision(processors, precision, expected):
    config = replace(CPU, train=replace(CPU.train, precision=precision))
    plain = ModelConfig(fused_bn_relu=False)
    given = replace(config, data=DataConfig(pad_to_4_channels=False), model=plain)
    for processor in processors:
        assert (fusion_of(config, processor), fusion_of(given, processor)) == (expected, PLAIN)


def test_selected_layers_are_stated():
    config = replace(CPU, train=replace(CPU.train, precision='bfloat16'))
    assert fusion_text(config, {}, BF16) == (
        'AVX-512 BF16, bfloat16: layout NCHW; fused operators: BatchNormReLU; the first '
        'convolution adds a channel of zeros'
    )


def on_cpu(**model) -> Config:
    return replace(CPU, model=ModelConfig(**model))


def test_options_without_a_kernel_are_refused():
    norm_relu, norm_add_relu = {'fused_bn_relu': True}, {'fused_bn_add_relu': True}
    for right in (
        with_model(layout=None, **norm_relu),
        with_model(**norm_add_relu),
        on_cpu(**norm_relu),
    ):
        check_values(right)
    for wrong, message in (
        (with_model(layout='NCHW', **norm_relu), 'fused_bn_relu: got true with train.device='),
        (on_cpu(**norm_add_relu), 'fused_bn_add_relu: got true with train.device='),
        (with_model(name='inception_v3'), 'layout: got NHWC with'),
    ):
        with pytest.raises(ConfigError, match=f'^model.{message}.*expected'):
            check_values(wrong)


@pytest.mark.parametrize(
    'device, model, precision, layout',
    json_table("""
"gpu" | {"layout": null}   | "float16" | "NHWC"
"gpu" | {"layout": "NCHW"} | "float16" | "NCHW"
"gpu" | {"layout": null, "name": "inception_v3"} | "float16" | "NCHW"
"cpu" | {}                 | "float32" | "NCHW"
"gpu" | {"layout": null}   | "float32" | "NCHW"
"""),
)
def test_layout_is_channels_last_only_with_nvidias_kernels(
    nvidia, device, model, precision, layout
):
    config = config_for(device, model, precision)
    assert with_layout(config).model.layout == layout and not layout_warnings(with_layout(config))


def test_plain_mxnet_is_channels_first_and_warns_of_channels_last():
    unset = with_model(layout=None)
    assert with_layout(unset).model.layout == 'NCHW' and not layout_warnings(unset)
    [warning] = layout_warnings(GPU)
    assert '880,801 rows in training, which is 70 images of 224 pixels per rank' in warning


# --- equality of the networks


def make_net(fusion, name, **model) -> ResNet:
    mx.random.seed(3)
    config = Config(model=ModelConfig(name=name, **model), data=DataConfig(num_classes=4))
    net = ResNet(config, fusion=fusion)
    net.initialize()
    return net


def trained(net, is_hybrid):
    """Return outputs, gradients and statistics of two passes."""
    if is_hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    random = np.random.default_rng(0)
    for _ in range(2):
        images = mx.nd.array(random.normal(size=(4, 3, 64, 64)))
        images.attach_grad()
        with autograd.record():
            out = net(images)
        out.backward(mx.nd.array(random.normal(size=out.shape)))
    mx.nd.waitall()
    return {'out': out.asnumpy(), 'images': images.grad.asnumpy(), **gradients_of(net)}


@pytest.mark.parametrize(
    'name, is_hybrid, num_norms, fusion',
    [
        ('resnet18', True, 20, BOTH),
        ('resnet18', False, 20, Fusion(NormRelu, None)),
        ('resnet50', False, 53, Fusion(None, NormAddRelu)),
    ],
)
def test_fused_and_unfused_give_the_same_numbers(nvidia, name, is_hybrid, num_norms, fusion):
    plain, net = make_net(PLAIN, name), make_net(fusion, name)
    operators = [n['op'] for n in json.loads(net(mx.sym.var('data')).tojson())['nodes']]
    assert operators.count('BatchNorm') == num_norms
    assert count_flops(net, (3, 64, 64)) == count_flops(plain, (3, 64, 64))
    # also names and order, on which the buckets of the exchange depend
    assert_near(trained(net, is_hybrid), trained(plain, is_hybrid))


def test_a_channel_of_zeros_changes_no_result():
    plain, padded = (make_net(Fusion(pads_images=pads), 'resnet18') for pads in (False, True))
    expected, got = trained(plain, True), trained(padded, True)
    assert got['conv0_weight'].shape == expected['conv0_weight'].shape
    assert_near(got, expected)


def test_last_norm_of_a_unit_is_fused_with_the_addition(nvidia, monkeypatch):
    operator = Mock(side_effect=mx.sym.BatchNormAddRelu)
    monkeypatch.setattr(mx.sym, 'BatchNormAddRelu', operator)
    net = make_net(BOTH, 'resnet50', zero_gamma=True)
    net(mx.sym.var('data'))
    names = {c.kwargs['gamma'].name for c in operator.call_args_list}
    assert len(names) == 16 and all(n.endswith('_bn3_gamma') for n in names)
    assert {n for n, a in arrays_of(net).items() if 'gamma' in n and not a.any()} == names


def test_norms_stay_float32_in_float16(nvidia):
    params = build_model(GPU, mx.cpu(), 0).collect_params()
    assert {np.dtype(p.dtype) for n, p in params.items() if 'bn' in n} == {np.dtype('float32')}
    assert np.dtype(params['conv0_weight'].dtype) == np.float16


def test_saved_weights_are_used_without_fused_operators(nvidia):
    """Evaluation and export, also on other machines, use plain operators."""
    config = with_model(fused_bn_relu=True, fused_bn_add_relu=True)
    net = build_model(config, mx.cpu(), 0)
    arrays, blocks = arrays_of(net), []
    restore_model(config, mx.cpu(), arrays, '').apply(blocks.append)
    assert len(blocks) > 50 and not [b for b in blocks if isinstance(b, NormRelu | NormAddRelu)]
    exported, _ = portable(config, arrays)
    assert exported.model.fused_bn_relu is exported.model.fused_bn_add_relu is None
    check_values(replace(exported, train=replace(exported.train, local_batch_size=1)))


def test_a_run_continues_on_another_kind_of_processor(monkeypatch):
    plan, snapshots = make_plan(SMALL, 1), []
    padded = replace(ON_CPU, pads_images=True)
    for after in (padded, PLAIN):
        states = []
        for fusion in (padded, after):
            monkeypatch.setattr(zoo, 'fusion_of', lambda *_, fusion=fusion: fusion)
            monkeypatch.setattr(resnet, 'pads_images', lambda _, fusion=fusion: fusion.pads_images)
            trainer = trainers.Trainer(plan, Comm(), 0, None)
            if states:
                trainer.load_state(states[0])
            trainer.read(trainer.step(synthetic_batches(SMALL, plan.train_shard(), None), 0, 0.1))
            states.append(trainer.state())
        with trainer.evaluating() as net:
            logits = net(next(synthetic_batches(SMALL, plan.eval_shard(), None)).images).asnumpy()
        snapshots.append({**states[-1].arrays, 'logits': logits})
    assert_near(snapshots[1], snapshots[0], rtol=1e-2, share=1e-3)


def steps_of_two_passes() -> dict[str, bytes]:
    config = replace(SMALL, train=replace(SMALL.train, gradient_accumulation_steps=2))
    plan = make_plan(config, 1)
    trainer = trainers.Trainer(plan, Comm(), 0, None)
    batches = synthetic_batches(config, plan.train_shard(), None)
    for _ in range(2):
        trainer.read(trainer.step(batches, 0, 0.1))
    return {n: a.tobytes() for n, a in trainer.snapshot().items()}


def test_gradients_are_added_explicitly_if_the_kernel_does_not(monkeypatch):
    added = steps_of_two_passes()
    asked = Mock(return_value=True)
    monkeypatch.setattr(trainers, 'runs_nvidias_kernels', asked)
    assert steps_of_two_passes() == added and asked.call_count == 1


# --- channels last


def test_evaluation_network_has_no_norm_in_either_layout():
    """cuDNN refuses inference with a norm of 65,536 rows or more, which every batch with channels
    last exceeds."""
    flops = []
    for layout in ('NCHW', 'NHWC'):
        config = with_model(name='resnet50', layout=layout)
        folded = FoldedResNet(config, mx.cpu()).net
        operators = {n['op'] for n in json.loads(folded(mx.sym.var('data')).tojson())['nodes']}
        layers = 'Convolution Activation Pooling elemwise_add Flatten FullyConnected Cast'
        assert operators == {'null', *layers.split()}
        assert not [n for n in folded.collect_params() if 'bn' in n]
        for net in (folded, ResNet(config)):
            shapes = net(mx.sym.var('data')).infer_shape(data=(2, *image_shape(config)))
            assert shapes[1] == [(2, 4)]
            flops.append(count_flops(net, image_shape(config)))
    assert len(set(flops)) == 1
