"""Saved weights: evaluation on any number of ranks, classification of images, and export."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from e2e.training import NUM_VAL, metrics, thin_ranks
from helpers import ROOT, call, run
from PIL import Image

from mlperf_rn50.cli.evaluate import _logged_top1
from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.cli.weights import load_saved
from mlperf_rn50.config_file import load_yaml, resolve_tree
from mlperf_rn50.data.batches import eval_batches
from mlperf_rn50.data.images import encode_file, network_input
from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, digits
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.model import resnet
from mlperf_rn50.model.weights import describe_weights, load_weights, portable, save_weights
from mlperf_rn50.model.zoo import build_model, restore_model

pytestmark = pytest.mark.usefixtures('thin')


def config_of(run_dir):
    return resolve_tree(load_yaml(run_dir / 'config.yaml'), '', [], config_parser())


@pytest.fixture(scope='module')
def kept(whole_run):
    """Folder of a run of two ranks, with weights."""
    return whole_run[0]


@pytest.mark.parametrize('num_ranks', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_evaluation_on_any_number_of_ranks_repeats_the_logged_accuracy(kept, num_ranks):
    words = ['evaluate', kept, '--format=json', '--confusions=1000', '--train.eval_batch_size=7']
    done = run(thin_ranks(num_ranks, *words)) if num_ranks else call(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    [logged] = [m for m in metrics(kept, 'eval') if m['epoch'] == result['epoch']]
    assert [result[k] for k in ('num_top1', 'num_top5', 'num_images')] == [
        logged[k] for k in ('num_top1', 'num_top5', 'num_images')
    ]
    assert result['is_as_logged'] is True and result['logged_top1'] == result['top1']
    assert result['is_imagenet'] is False and result['num_images'] == NUM_VAL
    # each wrong answer once
    assert sum(c['num_images'] for c in result['confusions']) == NUM_VAL - result['num_top1']


def test_top1_different_from_the_log_is_a_failure(kept, tmp_path):
    description, arrays = load_weights(kept)
    # predicts 3 for every image
    arrays['fc1_bias'] = arrays['fc1_bias'] + np.float32(100) * (np.arange(10) == 3)
    save_weights(tmp_path / 'weights', 'best', replace(description, top1=0.99), arrays)
    # from the description, because there is no log
    assert _logged_top1(load_saved(tmp_path, 'best')) == 0.99
    shutil.copy(kept / 'result_0.txt', tmp_path)
    assert _logged_top1(load_saved(tmp_path, 'best')) == description.top1
    done = call('evaluate', tmp_path)
    assert done.returncode == 1 and 'NOT THE SAME' in done.stdout
    assert ' 3 ' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize('option', ['--data.eval_size=16', '--data.eval_flip=true'])
def test_other_evaluation_is_not_compared(kept, tmp_path, option):
    description, arrays = load_weights(kept)
    old = {k: v for k, v in description.data.items() if k != 'eval_flip'}  # as of 0.6.0
    save_weights(tmp_path / 'weights', 'best', replace(description, data=old, top1=0.99), arrays)
    done = call('evaluate', tmp_path, option)
    assert done.returncode == 0 and 'not compared' in done.stdout, done.stderr


@pytest.mark.parametrize('kind', ['images', 'classes'])
def test_other_images_of_equal_count_are_not_compared_and_other_classes_refused(
    kept, tmp_path, kind
):
    whole, data, classes = digits(), config_of(kept).data, [f'class {i}' for i in range(10)]
    pack(
        Dataset(
            data.dataset,
            'digits',
            whole.classes if kind == 'images' else classes,
            whole.train[:5],
            whole.validation[-data.num_val :],
        ),
        tmp_path,
    )
    done = call('evaluate', kept / 'weights/best.npz', f'--data.dir={tmp_path}')
    if kind == 'images':
        assert done.returncode == 0 and 'not compared' in done.stdout, done.stderr
        assert f'of {NUM_VAL} images of tiny-digits (not ImageNet)' in done.stdout
    else:
        assert (
            done.returncode == 2 and f'got other classes in {tmp_path} than those of' in done.stderr
        )


@pytest.mark.parametrize(
    'words, message',
    [
        (['--config=x.yaml'], '--config=x.yaml: unknown option'),
        (['--confusions=-1'], '--confusions: got -1, expected 0 or more'),
        (['--data.num_val=49'], 'set data.num_val'),
    ],
)
def test_usage_errors_of_evaluate(kept, words, message):
    done = call('evaluate', kept, *words)
    assert (
        (done.returncode, done.stdout) == (2, '')
        and message in done.stderr
        and done.stderr.count('\n') == 1
    )


def described(kept, folder, **data) -> Path:
    """Copy the weights to a folder and change data values in the description; return the path of
    the description."""
    path = shutil.copytree(kept / 'weights', folder / 'weights') / 'best.json'
    content = json.loads(path.read_text())
    content['data'].update(data)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope='module')
def pictures(tmp_path_factory) -> list[Path]:
    """Files with the first five validation images of the digits, as prepared."""
    folder = tmp_path_factory.mktemp('pictures')
    for i, sample in enumerate(digits().validation[:5]):
        (folder / f'{i}.png').write_bytes(sample.read())
    return sorted(folder.iterdir())


def test_classification_agrees_with_the_evaluation(kept, pictures):
    done = call('classify', kept, *pictures, '/none.png', '--format=json')
    assert done.returncode == 2, done.stderr
    description, arrays = load_weights(kept)
    config = config_of(kept)
    batch = next(eval_batches(config, Shard(NUM_VAL, 0, 1, 5), None)())
    logits = restore_model(config, mx.cpu(), arrays, '')(batch.images).asnumpy().astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    *answers, last = json.loads(done.stdout)['images']
    assert len(answers) == 5 and 'No such file' in last['error']
    for i, image in enumerate(answers):
        np.testing.assert_array_equal(
            network_input(pictures[i].read_bytes(), config).asnumpy()[0],
            batch.images[i].asnumpy(),
        )
        classes = image['classes']
        assert image['file'] == str(pictures[i])
        assert [c['number'] for c in classes] == list(np.argsort(-expected[i])[:5])
        assert [c['name'] for c in classes] == [description.classes[c['number']] for c in classes]
        likeliest = np.sort(expected[i])[:-6:-1]
        np.testing.assert_allclose(
            [c['probability'] for c in classes], likeliest, rtol=1e-4, atol=1e-7
        )


def test_unreadable_pictures_are_reported_and_others_classified(kept, pictures, tmp_path):
    (tmp_path / 'text.png').write_text('not an image')
    (tmp_path / 'cut.png').write_bytes(pictures[0].read_bytes()[:60])
    Image.effect_noise((64, 64), 50).save(tmp_path / 'whole.jpg')
    # decoders fill in the rest
    (tmp_path / 'cut.jpg').write_bytes((tmp_path / 'whole.jpg').read_bytes()[:-600])
    (tmp_path / 'empty').mkdir()
    wrong = [tmp_path / n for n in ('text.png', 'cut.png', 'cut.jpg', 'none.png', 'empty')]
    done = call('classify', kept, wrong[0], pictures[0], *wrong[1:], pictures[1])
    assert done.returncode == 2
    assert [line.split(': ')[1] for line in done.stderr.splitlines()] == [str(p) for p in wrong]
    title, _, *rows = done.stdout.splitlines()
    assert title.split()[:2] == ['file', 'likeliest'] and [r.split()[0] for r in rows] == [
        str(p) for p in pictures[:2]
    ]


def test_folders_are_classified_in_order_of_name(kept, pictures, tmp_path):
    for name in ('b/x.PNG', 'a.png', 'b/.notes.txt'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(pictures[0], tmp_path / name)
    done = call('classify', kept, pictures[1], tmp_path, '--format=json')
    assert [image['file'] for image in json.loads(done.stdout)['images']] == [
        str(p) for p in (pictures[1], tmp_path / 'a.png', tmp_path / 'b/x.PNG')
    ] and done.returncode == 0


def test_onnx_export_agrees_for_any_number_of_images(kept, tmp_path, monkeypatch):
    """Export a thin network, without fused operators and the fourth channel."""
    import onnxruntime

    monkeypatch.setattr(resnet, 'STAGE_CHANNELS', (16, 32, 64, 128))
    config = config_of(kept)
    config = replace(
        config,
        model=replace(config.model, fused_bn_relu=True),
        data=replace(config.data, pad_to_4_channels=True),
    )
    arrays = {
        n: p.data().asnumpy() for n, p in build_model(config, mx.cpu(), 2).collect_params().items()
    }
    description = describe_weights(config, list('0123456789'), 10, 1, 2, is_best=True, is_last=True)
    save_weights(tmp_path / 'weights', 'best', description, arrays)
    output = call('export', tmp_path, '--format=onnx', '--out', tmp_path / 'out').stdout
    assert (
        'on 50 validation images of tiny-digits (not ImageNet)' in output
        and 'difference   at most' in output
    )
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {
        'resnet18_best.onnx',
        'resnet18_best.onnx.json',
    }
    facts = json.loads((tmp_path / 'out/resnet18_best.onnx.json').read_text())
    assert facts['classes'] == list('0123456789') and facts['input']['shape'] == [
        'batch',
        3,
        32,
        32,
    ]
    assert 0 < facts['check']['max_relative_difference'] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / 'out/resnet18_best.onnx')
    images = np.random.default_rng(0).normal(size=(7, 3, 32, 32)).astype(np.float32)
    plain, plain_arrays = portable(config, arrays)
    net = restore_model(plain, mx.cpu(), plain_arrays, '')
    np.testing.assert_allclose(
        session.run(None, {facts['input']['name']: images})[0],
        net(mx.nd.array(images)).asnumpy(),
        rtol=1e-3,
        atol=1e-4,
    )


def test_example_of_the_page_classifies_as_the_command_and_onnxruntime_prints_no_warning(
    kept, pictures, tmp_path
):
    assert call('export', kept, '--format=onnx', '--out', tmp_path / 'exported').returncode == 0
    shutil.copy(pictures[0], tmp_path / 'seven.png')
    [code] = re.findall('```python\n(.*?)```', (ROOT / 'docs/weights.md').read_text(), re.DOTALL)
    done = run([sys.executable, '-c', code.replace('resnet50_best', 'resnet18_best')], cwd=tmp_path)
    answer = json.loads(call('classify', kept, pictures[0], '--format=json').stdout)['images'][0][
        'classes'
    ][0]
    assert (done.returncode, done.stdout, done.stderr) == (0, f'{answer["name"]}\n', '')


def test_existing_files_are_not_overwritten(kept, tmp_path):
    (tmp_path / 'resnet18_best-0000.params').write_text('existing')
    done = call('export', kept, '--format=gluon', '--out', tmp_path)
    assert done.returncode == 2 and 'exists already and is not replaced' in done.stderr
    assert [p.read_text() for p in tmp_path.iterdir()] == ['existing']


def test_wrong_export_is_refused_and_removed(kept, tmp_path, monkeypatch):
    from mlperf_rn50.model import export as module

    right = module._run_gluon
    monkeypatch.setattr(module, '_run_gluon', lambda stem, images: right(stem, images) * 1.001)
    done = call('export', kept, '--format=gluon', '--out', tmp_path)
    assert (
        done.returncode == 1
        and 'got logits that differ by' in done.stderr
        and done.stderr.count('\n') == 1
    )
    assert list(tmp_path.iterdir()) == []


def test_export_check_accepts_a_different_data_folder(kept, tmp_path, tiny):
    described(kept, tmp_path, dir='/nonexistent')
    done = call('export', tmp_path, '--format=gluon', '--out', tmp_path / 'out')
    assert done.returncode == 2 and 'set their folder with --data.dir' in done.stderr
    assert not (tmp_path / 'out').exists()
    assert (
        call(
            'export', tmp_path, '--format=gluon', '--out', tmp_path / 'out', '--data.dir', tiny
        ).returncode
        == 0
    )
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {
        f'resnet18_best{s}' for s in ('-symbol.json', '-0000.params', '.gluon.json')
    }


@pytest.mark.parametrize(
    'mode, name, keys',
    [
        ('F', 'x.tiff', {}),
        ('CMYK', 'x.jpg', {'quality': 100}),
        ('L', 'x.jpg', {'quality': 100}),
        ('RGB', 'turned.jpg', {'quality': 100, 'subsampling': 0}),
    ],
)
def test_picture_becomes_the_input_of_its_pixels(kept, tmp_path, mode, name, keys):
    """test_data_pictures has other formats, which become PNG."""
    blurred = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    shown = Image.fromarray(blurred).resize((64, 32)).convert(mode)
    expected, config = shown.convert('RGB'), config_of(kept)
    if name.startswith('turned'):
        keys = {**keys, 'exif': Image.Exif()}
        keys['exif'][0x0112], expected = 6, expected.transpose(Image.Transpose.ROTATE_270)
    shown.save(tmp_path / name, **keys)
    expected.save(tmp_path / 'expected.png')
    got, right = (
        network_input(encode_file(tmp_path / n), config).asnumpy() for n in (name, 'expected.png')
    )
    assert got.shape == right.shape == (1, 3, 32, 32)
    assert np.abs(got - right).mean() < (0.05 if name.endswith('jpg') else 1e-6)
