"""Saved weights: round trip, damage, and transfer to other networks."""

import hashlib
import json
from dataclasses import replace
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_near, table
from nets import arrays_of

from mlperf_rn50 import files
from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.errors import DataError, UserError
from mlperf_rn50.model.options import ModelConfig
from mlperf_rn50.model.weights import (
    describe_weights,
    find_weights,
    load_weights,
    portable,
    put_aside_later,
    save_weights,
    set_weights,
)
from mlperf_rn50.model.zoo import build_model, restore_model
from mlperf_rn50.runfolder.names import RunFolder, new_run
from mlperf_rn50.train.options import TrainConfig

CONFIG = Config(
    data=DataConfig(dataset='squares', num_val=40, num_classes=3, image_size=32, resize_shorter=36),
    model=ModelConfig(name='resnet18', zero_gamma=True),
    train=TrainConfig(local_batch_size=4),
)
pytestmark = pytest.mark.usefixtures('thin_resnets')
ARRAYS = {
    'a_weight': np.arange(6, dtype=np.float32).reshape(2, 3),
    'a_bias': np.ones(2, np.float16),
}


def described(config=CONFIG, **accuracy):
    return describe_weights(config, list('xyz'), 8, 5, 7, is_best=True, is_last=False, **accuracy)


DESCRIPTION = described(top1=0.75, num_top1=30, num_top5=38, num_images=40)


def assert_same(got, expected):
    assert_near(got, expected, rtol=0, share=0)


@pytest.fixture
def saved(tmp_path):
    save_weights(tmp_path / 'weights', 'best', DESCRIPTION, ARRAYS)
    return tmp_path / 'weights'


def test_weights_round_trip(saved):
    description, arrays = load_weights(saved)
    assert replace(description, sha256='') == DESCRIPTION and list(arrays) == list(ARRAYS)
    assert (DESCRIPTION.top1, DESCRIPTION.num_top5, DESCRIPTION.epoch) == (0.75, 38, 5)
    assert DESCRIPTION.train == {'precision': 'float32', 'device': 'cpu', 'eval_batch_size': 8}
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
    assert_same(arrays, ARRAYS)
    assert description.sha256 == hashlib.sha256((saved / 'best.npz').read_bytes()).hexdigest()
    assert {p.name for p in saved.iterdir()} == {'best.npz', 'best.json'}


def test_newest_run_with_weights_is_loaded(tmp_path):
    for k in (0, 2, 10):
        run = RunFolder(tmp_path, k)
        save_weights(run.weights, 'best', replace(DESCRIPTION, seed=k), ARRAYS)
    RunFolder(tmp_path, 11).weights.mkdir()
    (tmp_path / 'weights_backup').mkdir()
    assert load_weights(tmp_path)[0].seed == 10
    assert load_weights(tmp_path / 'weights')[0].seed == 0
    assert load_weights(tmp_path / 'weights_2/best.npz')[0].seed == 2
    assert new_run(tmp_path).index == 12  # the folder of run 11 exists too


def test_last_weights_have_the_most_epochs(saved):
    assert find_weights(saved, 'last').name == 'best.npz'
    later = DESCRIPTION.epoch + 1
    last = replace(DESCRIPTION, epoch=later, is_best=False, is_last=True)
    save_weights(saved, 'last', last, ARRAYS)
    assert find_weights(saved, 'last').name == 'last.npz' and find_weights(saved).name == 'best.npz'
    # last.npz is now from an earlier end of the run.
    save_weights(saved, 'best', replace(DESCRIPTION, epoch=later + 1, is_last=True), ARRAYS)
    assert find_weights(saved, 'last').name == 'best.npz'


def test_networks_of_later_epochs_than_a_resume_are_put_aside(saved):
    put_aside_later(saved, DESCRIPTION.epoch)
    assert find_weights(saved).name == 'best.npz'
    put_aside_later(saved, DESCRIPTION.epoch - 1)
    assert sorted(p.name for p in saved.iterdir()) == ['abandoned_best.json', 'abandoned_best.npz']


def test_network_without_arrays_after_a_kill_is_put_aside(saved):
    (saved / 'best.npz').unlink()
    put_aside_later(saved, DESCRIPTION.epoch - 1)
    assert [p.name for p in saved.iterdir()] == ['abandoned_best.json']


def test_folder_without_weights_is_an_error_with_advice(tmp_path):
    with pytest.raises(
        UserError, match='contains no weights, expected weights/best.npz; a run writes them with '
    ):
        load_weights(tmp_path)
    with pytest.raises(UserError, match='no such file or folder; expected a run folder'):
        load_weights(tmp_path / 'none')
    (tmp_path / 'best.npz').touch()
    with pytest.raises(DataError, match=r'best.json: missing; expected an .npz and a .json'):
        load_weights(tmp_path)


def _update_digest(folder):
    """Update the digest for the changed arrays, as an attacker would."""
    content = json.loads((folder / 'best.json').read_text())
    content['sha256'] = hashlib.sha256((folder / 'best.npz').read_bytes()).hexdigest()
    (folder / 'best.json').write_text(json.dumps(content))


@pytest.mark.parametrize(
    'values, message',
    [
        (None, 'not an .npz'),
        ([0, 1, 2], 'a: got int64, expected float32 or float16'),
        ([1, np.inf], 'a: got 1 non-finite of 2 values'),
    ],
    ids=['cut', 'integers', 'infinity'],
)
def test_invalid_arrays_are_refused_even_with_their_digest(saved, values, message):
    """test_checkpoint has the hostile arrays that the common reader refuses."""
    path = saved / 'best.npz'
    if values is None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        np.savez(path, a=np.array(values))
    with pytest.raises(DataError, match='got SHA-256 .* from best.json'):
        load_weights(saved)
    _update_digest(saved)
    with pytest.raises(DataError, match=message):
        load_weights(saved)


# text: the whole file, or changed keys
@pytest.mark.parametrize(
    'text, message',
    [
        (b'\xff', 'decode'),
        (b'\xff\xfe', 'UTF-16'),
        (b'[' * 100_000, 'nested'),
        *table("""
[]                                   | expected format 1
{"format": 1}                        | missing
= {"format": 2}                      | expected format 1
= {"epoch": "5"}                     | epoch
= {"classes": ["x", "y"]}            | classes: got 2, expected data.num_classes=3 names
= {"model": {"name": "resnet18"}}    | model.layout is missing
= {"model": {"depth": 18, "name": "resnet18", "layout": "NCHW"}} | model.depth: unknown key
"""),
    ],
)
def test_damaged_description_is_refused(saved, text, message):
    path = saved / 'best.json'
    if text[0] == '=':
        text = json.dumps({**json.loads(path.read_text()), **json.loads(text[1:])})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=rf'best.json: not weights of this program \(.*{message}'):
        load_weights(saved)


@pytest.mark.parametrize('place, function', [(np, 'savez'), (files, 'dump_json')])
def test_failed_write_keeps_existing_files(saved, monkeypatch, place, function):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    monkeypatch.setattr(place, function, Mock(side_effect=OSError(28, 'No space left on device')))
    with pytest.raises(UserError, match='cannot write the weights: No space left on device'):
        save_weights(saved, 'best', DESCRIPTION, ARRAYS)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def build(seed=1):
    return build_model(CONFIG, mx.cpu(), seed)


def test_weights_are_set_in_place():
    other = arrays_of(build(2))
    net = build(1)
    net(mx.nd.zeros((1, 3, 32, 32)))  # compiles the graph, which keeps its arrays
    assert set_weights(net, other) == []
    images = mx.nd.random.normal(shape=(2, 3, 32, 32))
    np.testing.assert_array_equal(net(images).asnumpy(), build(2)(images).asnumpy())


def with_part(name, part, **others):
    """Return a function that changes arrays: one becomes a part of itself, others are replaced."""
    return lambda arrays: arrays.update({name: arrays[name][part], **others})


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda a: a.pop('bn0_gamma'), r'bn0_gamma is missing in the weights \(1 such names\)'),
        (lambda a: a.update(x=a['bn0_gamma']), 'x is missing in the network'),
        (
            with_part('conv0_weight', np.s_[:, :2]),
            r'conv0_weight: got shape .*16, 2, 7, 7.*, expected',
        ),
        (with_part('fc1_weight', np.s_[:2], fc1_bias=np.ones(4, np.float32)), 'fc1_weight: got'),
        (
            with_part('fc1_weight', np.s_[:2, :9], fc1_bias=np.ones(2, np.float32)),
            'fc1_weight: got',
        ),
    ],
)
def test_other_differences_are_refused_without_changes(change, message):
    net, arrays = build(1), arrays_of(build(2))
    change(arrays)
    before = arrays_of(net)
    with pytest.raises(UserError, match=message):
        set_weights(net, arrays)
    assert_same(arrays_of(net), before)


@pytest.fixture
def portable_case():
    """Configuration with fused operators and a fourth channel, a network, and its arrays."""
    data = replace(CONFIG.data, pad_to_4_channels=True)
    model = replace(CONFIG.model, fused_bn_relu=True, zero_gamma=False)
    config = replace(CONFIG, data=data, model=model)
    net = build_model(config, mx.cpu(), 2)
    return config, net, *portable(config, arrays_of(net))


def test_portable_network_computes_the_same_in_nchw_float32(portable_case):
    _, net, plain, arrays = portable_case
    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    expected = net(mx.nd.array(np.pad(images, ((0, 0), (0, 1), (0, 0), (0, 0))))).asnumpy()
    got = restore_model(plain, mx.cpu(), arrays, '')(mx.nd.array(images)).asnumpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    other = replace(plain, data=replace(plain.data, num_classes=4))
    with pytest.raises(DataError, match='w.npz: the weights are for 3 classes, the data has 4'):
        restore_model(other, mx.cpu(), arrays, 'w.npz')


def float16(arrays):
    return {name: array.astype(np.float16) for name, array in arrays.items()}


def test_portable_network_of_channels_last_in_float16_is_the_same(portable_case):
    config, net, _, arrays = portable_case
    last = {
        n: np.moveaxis(a, 1, -1) if a.ndim == 4 else a for n, a in float16(arrays_of(net)).items()
    }
    exported, got = portable(replace(config, model=replace(config.model, layout='NHWC')), last)
    assert (exported.model.layout, exported.train.precision) == ('NCHW', 'float32')
    restored = arrays_of(restore_model(exported, mx.cpu(), got, ''))
    assert_same(restored, float16(arrays))
