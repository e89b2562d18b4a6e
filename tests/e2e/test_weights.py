"""Saved weights: contents, failures after run_stop, a start from saved weights, evaluation,
classification and export."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from e2e.training import (
    NUM_VAL,
    arguments,
    assert_aborted,
    assert_one_line,
    log_events,
    metrics,
    thin_ranks,
)
from helpers import ROOT, assert_near, call, deny, run
from nets import arrays_of
from PIL import Image

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config_file import load_yaml, resolve_tree
from mlperf_rn50.data.batches import eval_batches
from mlperf_rn50.data.images import encode_file, network_input
from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, digits
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.errors import CheckpointError
from mlperf_rn50.model import export
from mlperf_rn50.model.weights import (
    describe_weights,
    find_weights,
    load_weights,
    portable,
    save_weights,
)
from mlperf_rn50.model.zoo import build_model, restore_model
from mlperf_rn50.runfolder.names import list_checkpoints
from mlperf_rn50.train import loop
from mlperf_rn50.train.checkpoint.best_weights import BackgroundWriter
from mlperf_rn50.train.checkpoint.checkpoint import load
from mlperf_rn50.train.evaluate import Accuracy
from mlperf_rn50.train.run_events import Ended
from mlperf_rn50.train.sinks.metrics_file import Metrics

pytestmark = pytest.mark.usefixtures('thin')
CONVERGES = ['--train.target_accuracy=0.01', '--checkpoint.period_epochs=0']
COUNTS = ('num_top1', 'num_top5', 'num_images')


def config_of(run_dir):
    return resolve_tree(load_yaml(run_dir / 'config.yaml'), '', [], config_parser())


def trained_of(arrays):
    """Return arrays without the running statistics."""
    return {name: array for name, array in arrays.items() if 'running' not in name}


def events_of(run_dir, key):
    return [e for e in log_events(run_dir) if e['key'] == key]


@pytest.fixture(scope='module')
def converged(thin, tiny, tmp_path_factory):
    """Folder of a converged run; tests must not modify it."""
    run_dir = tmp_path_factory.mktemp('converged') / 'run'
    assert call(*arguments(run_dir, tiny, *CONVERGES)).returncode == 0
    return run_dir


def test_converged_run_keeps_one_network_as_best_and_last(converged):
    assert {p.name for p in (converged / 'weights').iterdir()} == {'best.npz', 'best.json'}
    kept, _ = load_weights(converged)
    [evaluated] = metrics(converged, 'eval')
    assert (kept.is_best, kept.is_last, kept.epoch, kept.seed) == (True, True, 1, 3)
    assert [getattr(kept, name) for name in COUNTS] == [evaluated[name] for name in COUNTS]
    assert kept.classes == tuple('0123456789')


def test_aborted_run_keeps_best_and_last_network(tiny, tmp_path, monkeypatch):
    counts = iter([5, 9, 9, 7])
    monkeypatch.setattr(loop, 'evaluate', lambda *_: Accuracy(next(counts), 20, NUM_VAL))
    assert_aborted(call(*arguments(tmp_path, tiny)))
    best, best_arrays = load_weights(tmp_path)
    assert (best.epoch, best.num_top1, best.is_last) == (2, 9, False)
    last, arrays = load_weights(find_weights(tmp_path, 'last'))
    assert (last.epoch, last.is_last, last.is_best, last.num_top1) == (4, True, False, 7)
    checkpoint = load(list_checkpoints(tmp_path / 'checkpoints')[-1])[1].arrays
    # A checkpoint has running variances in float64.
    assert_near(arrays, {n: checkpoint[f'model/{n}'] for n in arrays}, rtol=2e-7, share=0)
    assert any((array != best_arrays[name]).any() for name, array in arrays.items())


@pytest.mark.parametrize('failing', ['writer', 'metrics', 'weights'])
def test_run_stop_and_weights_survive_later_failures(tiny, tmp_path, monkeypatch, failing):
    owner, name = (BackgroundWriter, 'finish') if failing == 'writer' else (Metrics, 'handle')
    original = getattr(owner, name)

    def fail(self, *event):
        if failing == 'weights':
            (tmp_path / 'weights').write_text('a file in the way')
        elif not event or isinstance(event[0], Ended):
            raise CheckpointError('the disk is full')
        original(self, *event)

    monkeypatch.setattr(owner, name, fail)
    done = call(*arguments(tmp_path, tiny, *CONVERGES))
    message = 'cannot write the weights' if failing == 'weights' else 'the disk is full'
    assert done.returncode == 2 and message in done.stderr
    assert [e['metadata']['status'] for e in events_of(tmp_path, 'run_stop')] == ['success']
    assert failing == 'weights' or load_weights(tmp_path)[0].is_last


def test_run_starts_from_weights_of_earlier_run(converged, tiny, tmp_path):
    options = [f'--init-weights={converged}', '--schedule.base_lr=1e-9']
    options += ['--train.max_epochs=1', '--optimizer.weight_decay=0']
    done = call(*arguments(tmp_path, tiny, *options))
    assert_aborted(done)
    assert f'starts from {converged.name} (' in done.stderr
    [event] = events_of(tmp_path, 'initial_weights')
    assert event['value'].startswith(f'{converged.name} (') and 'SHA-256' in event['value']
    assert event['metadata']['notes'] == []
    before, after = (trained_of(load_weights(p)[1]) for p in (converged, tmp_path))
    assert_near(after, before, rtol=1e-6)


@pytest.mark.parametrize('num_ranks', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_different_number_of_classes_reinitialises_last_layer_on_every_rank(
    converged, tiny, tmp_path, num_ranks
):
    options = ['--train.max_epochs=1', '--data.synthetic=true', '--data.num_classes=7']
    words = arguments(tmp_path, tiny, f'--init-weights={converged}', *options)
    done = run(thin_ranks(num_ranks, *words)) if num_ranks else call(*words)
    assert_aborted(done)
    [event] = events_of(tmp_path, 'initial_weights')
    [note] = event['metadata']['notes']
    assert 'for 10 classes, the data has 7' in note and note in done.stderr


@pytest.mark.parametrize(
    'options, message',
    [
        ('--init-weights=/nonexistent', '/nonexistent: no such file or folder'),
        ('--model.name=resnet34', 'expected the same model.name'),
        ('--run.submission_division=closed --data.last_batch=wrap', 'closed division, expected'),
    ],
)
def test_unusable_weights_are_refused_in_one_line(converged, tiny, tmp_path, options, message):
    words = arguments(tmp_path, tiny, f'--init-weights={converged}', *options.split())
    assert_one_line(call(*words), 2, message)


def test_run_without_a_commit_states_the_reason(thin, tiny, tmp_path, monkeypatch):
    (tmp_path / 'bin').mkdir()
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))  # no git
    done = call(*arguments(tmp_path / 'run', tiny, '--train.max_epochs=1'))
    reason = 'git: No such file or directory'
    assert f'the commit of the program is unknown: {reason}; keep a copy of the code' in done.stderr
    assert reason in (tmp_path / 'run/train.log').read_text()
    assert reason in (tmp_path / 'run/env.json').read_text()


# --- evaluation, classification and export


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
    assert {k: result[k] for k in COUNTS} == {k: logged[k] for k in COUNTS}
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
    assert json.loads(call('evaluate', tmp_path, '--format=json').stdout)['logged_top1'] == 0.99
    shutil.copy(kept / 'result_0.txt', tmp_path)
    done = call('evaluate', tmp_path, '--format=markdown')
    assert done.returncode == 1
    assert f'- in the log: {100 * description.top1:.2f} %, NOT THE SAME\n' in done.stdout
    assert '| 3 ' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize('option', ['--data.eval_size=16', '--data.eval_flip=true'])
def test_other_evaluation_is_not_compared(kept, tmp_path, option):
    description, arrays = load_weights(kept)
    old = {k: v for k, v in description.data.items() if k != 'eval_flip'}  # as of 0.6.0
    save_weights(tmp_path / 'weights', 'best', replace(description, data=old, top1=0.99), arrays)
    done = call('evaluate', tmp_path, option)
    assert done.returncode == 0 and 'not compared' in done.stdout, done.stderr


def test_other_images_of_equal_count_are_not_compared_and_other_classes_refused(kept, tmp_path):
    def evaluate(classes):
        folder = tmp_path / classes[0]
        images = whole.train[:5], whole.validation[-NUM_VAL:]
        pack(Dataset('tiny-digits', 'digits', classes, *images), folder)
        return call('evaluate', kept / 'weights/best.npz', f'--data.dir={folder}')

    done = call('evaluate', kept / 'weights/best.npz', '--data.dir=/nowhere')
    assert_one_line(done, 2, '/nowhere/manifest.json: no such file; create the data with')
    whole = digits()
    done = evaluate(whole.classes)
    assert done.returncode == 0 and 'not compared' in done.stdout, done.stderr
    assert f'of {NUM_VAL} images of tiny-digits (not ImageNet)' in done.stdout
    done = evaluate([f'class {i}' for i in range(10)])
    assert_one_line(done, 2, f'got other classes in {tmp_path}/class 0 than those of')


@pytest.mark.parametrize(
    'option, message',
    [
        ('--config=x.yaml', '--config=x.yaml: unknown option'),
        ('--confusions=-1', '--confusions: got -1, expected 0 or more'),
        ('--data.num_val=49', 'set data.num_val'),
    ],
)
def test_usage_errors_of_evaluate(kept, option, message):
    done = call('evaluate', kept, option)
    assert_one_line(done, 2, message)
    assert done.stdout == ''


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
    logits = restore_model(config, mx.cpu(), arrays, '')(batch.images)
    expected = mx.nd.softmax(logits).asnumpy()
    *answers, last = json.loads(done.stdout)['images']
    assert len(answers) == 5 and 'No such file' in last['error']
    for path, answer, images, shares in zip(pictures, answers, batch.images, expected):
        image = network_input(path.read_bytes(), config)[0]
        assert (image == images).asnumpy().all() and answer['file'] == str(path)
        numbers = np.argsort(-shares)[:5]
        classes = [(c['number'], c['name']) for c in answer['classes']]
        assert classes == [(n, description.classes[n]) for n in numbers]
        likeliest = [c['probability'] for c in answer['classes']]
        np.testing.assert_allclose(likeliest, shares[numbers], rtol=1e-4, atol=1e-7)


def test_classification_of_mirrored_evaluations_is_mirrored(kept, pictures):
    def probabilities(*words):
        done = call('classify', kept, pictures[0], '--format=json', *words)
        [image] = json.loads(done.stdout)['images']
        return {c['number']: c['probability'] for c in image['classes']}

    plain = probabilities()
    description = find_weights(kept).with_suffix('.json')
    text = description.read_text()
    try:
        description.write_text(re.sub(r'"eval_flip": false', '"eval_flip": true', text))
        assert probabilities() != plain
    finally:
        description.write_text(text)


def test_unreadable_pictures_are_reported_and_others_classified(
    kept, pictures, tmp_path, monkeypatch
):
    (tmp_path / 'text.png').write_text('not an image')
    (tmp_path / 'cut.png').write_bytes(pictures[0].read_bytes()[:60])
    Image.effect_noise((64, 64), 50).save(tmp_path / 'whole.jpg')
    # decoders fill in the rest
    (tmp_path / 'cut.jpg').write_bytes((tmp_path / 'whole.jpg').read_bytes()[:-600])
    for name in (
        'folder/b/x.PNG',
        'folder/a.png',
        'folder/b/.notes.txt',
        'empty/x.txt',
        'folder/._a.png',
        'folder/@eaDir/a.png',
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(pictures[1], tmp_path / name)
    wrong = [tmp_path / n for n in ('text.png', 'cut.png', 'cut.jpg', 'none.png', 'empty')]
    done = call('classify', kept, wrong[0], pictures[0], *wrong[1:], tmp_path / 'folder')
    assert done.returncode == 2
    assert [line.split(': ')[1] for line in done.stderr.splitlines()] == list(map(str, wrong))
    title, _, *rows = done.stdout.splitlines()
    assert title.split()[:2] == ['file', 'likeliest']
    right = [pictures[0], tmp_path / 'folder/a.png', tmp_path / 'folder/b/x.PNG']
    assert [row.split()[0] for row in rows] == list(map(str, right))
    deny(monkeypatch, '@eaDir', 'scandir')
    assert call('classify', kept, tmp_path / 'folder').returncode == 0


def test_onnx_export_agrees_for_any_number_of_images(kept, tmp_path):
    """Export without fused operators and the fourth channel."""
    import onnxruntime

    config = config_of(kept)
    model = replace(config.model, fused_bn_relu=True)
    config = replace(config, model=model, data=replace(config.data, pad_to_4_channels=True))
    arrays = arrays_of(build_model(config, mx.cpu(), 2))
    description = describe_weights(config, list('0123456789'), 10, 1, 2, is_best=True, is_last=True)
    save_weights(tmp_path / 'weights', 'best', description, arrays)
    out = tmp_path / 'out'
    output = call('export', tmp_path, '--format=onnx', '--out', out).stdout
    assert 'on 50 validation images of tiny-digits (not ImageNet)' in output
    assert 'difference   at most' in output
    assert {p.name for p in out.iterdir()} == {'resnet18_best.onnx', 'resnet18_best.onnx.json'}
    facts = json.loads((out / 'resnet18_best.onnx.json').read_text())
    assert facts['classes'] == list('0123456789')
    assert facts['input']['shape'] == ['batch', 3, 32, 32]
    assert 0 < facts['check']['max_relative_difference'] < 1e-4
    session = onnxruntime.InferenceSession(out / 'resnet18_best.onnx')
    images = np.random.default_rng(0).normal(size=(7, 3, 32, 32)).astype(np.float32)
    got = session.run(None, {facts['input']['name']: images})[0]
    plain, plain_arrays = portable(config, arrays)
    net = restore_model(plain, mx.cpu(), plain_arrays, '')
    expected = net(mx.nd.array(images)).asnumpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_example_of_the_page_classifies_as_the_command_and_onnxruntime_prints_no_warning(
    kept, pictures, tmp_path
):
    assert call('export', kept, '--format=onnx', '--out', tmp_path / 'exported').returncode == 0
    shutil.copy(pictures[0], tmp_path / 'seven.png')
    [code] = re.findall('```python\n(.*?)```', (ROOT / 'docs/weights.md').read_text(), re.DOTALL)
    done = run([sys.executable, '-c', code.replace('resnet50_best', 'resnet18_best')], cwd=tmp_path)
    [image] = json.loads(call('classify', kept, pictures[0], '--format=json').stdout)['images']
    likeliest = image['classes'][0]['name']
    assert (done.returncode, done.stdout, done.stderr) == (0, f'{likeliest}\n', '')


def test_existing_files_are_not_overwritten(kept, tmp_path):
    (tmp_path / 'resnet18_best-0000.params').write_text('existing')
    done = call('export', kept, '--format=gluon', '--out', tmp_path)
    assert_one_line(done, 2, 'exists already and is not replaced')
    assert [p.read_text() for p in tmp_path.iterdir()] == ['existing']


def test_wrong_export_is_refused_and_removed(kept, tmp_path, monkeypatch):
    right = mx.gluon.SymbolBlock.imports

    def wrong(*arguments):
        net = right(*arguments)
        return lambda images: net(images) * (1 + 10 * export.LIMIT)

    monkeypatch.setattr(mx.gluon.SymbolBlock, 'imports', wrong)
    done = call('export', kept, '--format=gluon', '--out', tmp_path)
    assert_one_line(done, 1, 'got logits that differ by')
    assert list(tmp_path.iterdir()) == []


def test_export_check_accepts_a_different_data_folder(kept, tmp_path, tiny):
    description, arrays = load_weights(kept)
    elsewhere = replace(description, data={**description.data, 'dir': '/nonexistent'})
    save_weights(tmp_path / 'weights', 'best', elsewhere, arrays)
    out = tmp_path / 'out'
    words = ['export', tmp_path, '--format=gluon', '--out', out]
    assert_one_line(call(*words), 2, 'set their folder with --data.dir')
    assert not out.exists()
    larger = replace(elsewhere, data={**elsewhere.data, 'num_val': 99})
    save_weights(tmp_path / 'weights', 'best', larger, arrays)
    done = call(*words, '--data.dir', tiny)
    assert_one_line(done, 2, 'data.num_val: ')
    assert 'set data.' not in done.stderr  # which export cannot
    save_weights(tmp_path / 'weights', 'best', elsewhere, arrays)
    assert call(*words, '--data.dir', tiny).returncode == 0
    endings = ('-symbol.json', '-0000.params', '.gluon.json')
    assert {p.name for p in out.iterdir()} == {f'resnet18_best{s}' for s in endings}


@pytest.mark.parametrize(
    'mode, name', [('F', 'x.tiff'), ('CMYK', 'x.jpg'), ('L', 'x.jpg'), ('RGB', 'turned.jpg')]
)
def test_picture_becomes_the_input_of_its_pixels(kept, tmp_path, mode, name):
    """test_data_pictures has other formats, which become PNG."""
    blurred = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    shown = Image.fromarray(blurred).resize((64, 32)).convert(mode)
    expected, config = shown.convert('RGB'), config_of(kept)
    tags = Image.Exif()
    if name.startswith('turned'):
        tags[0x0112] = 6
        expected = expected.transpose(Image.Transpose.ROTATE_270)
    shown.save(tmp_path / name, quality=100, subsampling=0, exif=tags)
    expected.save(tmp_path / 'expected.png')
    got, right = (
        network_input(encode_file(tmp_path / n), config).asnumpy() for n in (name, 'expected.png')
    )
    assert got.shape == right.shape == (1, 3, 32, 32)
    assert np.abs(got - right).mean() < (0.05 if name.endswith('jpg') else 1e-6)
