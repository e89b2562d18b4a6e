"""Records of im2rec that are used where they are, and the sources of records in messages."""

import os
import re

import numpy as np
import pytest
from helpers import call
from numbered import encoded, ramp, write_records

from mlperf_rn50.config import Config
from mlperf_rn50.data.batches import eval_batches, train_batches
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.prepare import pack
from mlperf_rn50.data.prepare.samples import from_pixels
from mlperf_rn50.data.records import RecordFile, load_manifest
from mlperf_rn50.data.shards import Shard
from mlperf_rn50.data.verify import verify
from mlperf_rn50.errors import DataError

PNGS = [sample.data for sample in from_pixels(ramp(6), range(6), '')]


def write(folder, stem, images, labels, keys=None, has_list=True):
    """Write a .rec, .idx and .lst as im2rec does."""
    folder.mkdir(exist_ok=True)
    keys = keys or range(len(images))
    write_records(folder / f'{stem}.rec', images, labels, keys, keys)
    if has_list:
        (folder / f'{stem}.lst').write_text(
            ''.join(
                f'{key}\t{float(np.atleast_1d(label)[0]):.6f}\tclass/{key}.png\n'
                for key, label in zip(keys, labels)
            )
        )


@pytest.fixture
def source(tmp_path):
    write(
        tmp_path / 'source',
        'my_train',
        PNGS,
        [0, 1, 0, 1, np.array([1.0, 5.0]), 0],
        keys=[7, 3, 1, 9, 4, 8],
    )
    write(tmp_path / 'source', 'my_val', PNGS[:3], [0, 1, 1], has_list=False)
    return tmp_path / 'source'


def adopt(source, out, *options):
    return call('prepare', 'im2rec', '--source', source, '--out', out, '--name', 'mine', *options)


def config_of(folder, **keys) -> Config:
    return Config(
        data=DataConfig(
            dir=str(folder),
            dataset='mine',
            num_train=6,
            num_val=3,
            num_classes=2,
            image_size=8,
            resize_shorter=8,
            crop='none',
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
            mirror_probability=0.0,
            **keys,
        )
    )


@pytest.mark.parametrize('place', ['out', 'source'])
def test_records_are_described_but_neither_copied_nor_changed(source, tmp_path, place, monkeypatch):
    monkeypatch.delattr(pack, 'pack_record')  # no record is written
    before = {p: (p.stat().st_ino, p.read_bytes()) for p in source.iterdir()}
    done = adopt(source, tmp_path / place)
    assert done.returncode == 0, done.stderr
    assert f'{source}/my_train.rec: 6 images, labels 0 to 1\n' in done.stdout
    assert {p: (p.stat().st_ino, p.read_bytes()) for p in before} == before
    out = tmp_path / place
    assert (out / 'train.rec').samefile(source / 'my_train.rec') and not os.readlink(
        out / 'train.rec'
    ).startswith('/')
    assert verify(out, 1) == (
        [
            f'{out}/train.rec: 6 records match their checksums',
            f'{out}/validation.rec: 3 records match their checksums',
        ],
        [],
    )
    manifest = load_manifest(out)
    assert (manifest['dataset'], manifest['classes'], manifest['skipped']) == (
        'mine',
        ['0', '1'],
        [],
    )
    assert (out / 'train.names.txt').read_text().split() == [
        f'class/{k}.png' for k in (7, 3, 1, 9, 4, 8)
    ]
    assert 'is already prepared' in adopt(source, out).stdout


def test_training_reads_the_records_of_im2rec(source, tmp_path):
    assert adopt(source, tmp_path / 'out').returncode == 0
    config = config_of(tmp_path / 'out')
    batch = next(train_batches(config, Shard(6, 0, 1, 6), 1, 0, None))
    found = {
        (image.transpose(1, 2, 0).tobytes(), label)
        for image, label in zip(
            batch.images.asnumpy().astype(np.uint8), batch.labels.asnumpy().tolist()
        )
    }
    assert found == {(image.tobytes(), label) for image, label in zip(ramp(6), [0, 1, 0, 1, 1, 0])}
    assert next(eval_batches(config, Shard(3, 0, 1, 3), None)()).labels.asnumpy().tolist() == [
        0,
        1,
        1,
    ]


@pytest.mark.parametrize(
    'change, message',
    [
        (
            lambda s: write(s, 'my_train', [*PNGS[:3], encoded('GIF')], [0, 1, 0, 1]),
            '1 image cannot be decoded: class/3.png (ValueError: DALI cannot decode it); run '
            'im2rec again without those',
        ),
        (
            lambda s: write(s, 'my_val', [PNGS[0], b'text'], [0, 1], has_list=False),
            '1 image cannot be decoded: my_val.rec, record 1 (UnidentifiedImageError: ',
        ),
        (
            lambda s: write(s, 'my_train', PNGS, [1, 2, 1, 2, 1, 2]),
            'my_train.rec: got label 2, expected 0 to 1 for the 2 labels of the training images',
        ),
        (
            lambda s: write(s, 'my_val', PNGS[:2], [0, 2]),
            'my_val.rec: got label 2, expected 0 to 1',
        ),
        (
            lambda s: write(s, 'my_val', PNGS[:2], [0, -1]),
            'my_val.rec: got label -1, expected 0 to 1',
        ),
        (
            lambda s: (s / 'my_val.idx').unlink(),
            'my_val.idx: missing; create it with rec2idx.py of MXNet',
        ),
        (
            lambda s: (s / 'my_val.idx').write_text('0\t0\n1\t99999\n'),
            'my_val.idx: the offsets do not match',
        ),
        (
            lambda s: (s / 'my_val.rec').unlink(),
            'got my_train.rec, expected train.rec and val.rec, each with its .idx',
        ),
        (lambda s: write(s, 'train', PNGS, [0, 1, 0, 1, 0, 1]), 'my_train.rec and '),
        (lambda s: (s / 'my_train.lst').write_bytes(b'7\t0\tcaf\xe9\n'), 'my_train.lst: not UTF-8'),
        (
            lambda s: (s / 'my_train.lst').write_text('7\t0\tx\n', 'utf-16'),
            'my_train.lst: not UTF-8',
        ),
    ],
)
def test_records_that_training_cannot_use_are_refused(source, tmp_path, change, message):
    change(source)
    before = {p: p.read_bytes() for p in source.iterdir()}
    done = adopt(source, tmp_path / 'out')
    assert (
        done.returncode == 2
        and message in done.stderr
        and done.stderr.splitlines()[-1].startswith('mlperf-rn50: ')
    )
    assert 'Traceback' not in done.stderr and not [*tmp_path.glob('out/*.rec')]
    assert {p: p.read_bytes() for p in source.iterdir()} == before


REST = 'bytes after it are in no record of the index'


@pytest.mark.parametrize(
    'name, change, message',
    [
        (
            'my_train.idx',
            lambda lines: [*lines[:3], b'damaged line', *lines[4:]],
            "got the line 'damaged line', ",
        ),
        ('my_train.idx', lambda lines: [*lines[:3], b'4.5\t9', *lines[4:]], "got the line '4.5"),
        (
            'my_train.idx',
            lambda lines: [*lines[:3], bytes(20), *lines[4:]],
            "got the line '.x00.x00",
        ),
        (
            'my_train.idx',
            lambda lines: [*lines[:3], b'4', b'8 8 8', *lines[4:]],
            "got the line '4'",
        ),
        ('my_train.idx', lambda lines: [], "my_train.idx: got the line ''"),
        ('my_train.idx', lambda lines: lines[:4], f'record 3: .* {REST}'),
        ('my_train.idx', lambda lines: lines[:3] + lines[4:], f'record 2: .* {REST}'),
        (
            'my_train.idx',
            lambda lines: [*lines[:-1], lines[-1][:-2]],
            'my_train.rec, record [0-5]: ',
        ),
        (
            'my_train.idx',
            lambda lines: [*lines, lines[2]],
            'my_train.idx: the offsets do not match',
        ),
        ('my_train.idx', lambda lines: lines[1:], 'my_train.idx: the offsets do not match'),
        (
            'my_train.lst',
            lambda lines: lines[:-1],
            'my_train.lst: got no line for number 8, which is in my_train.rec',
        ),
        (
            'my_train.lst',
            lambda lines: [*lines[:-1], b'8\t0.0'],
            'my_train.lst: got no line for number 8, ',
        ),
        (
            'my_train.lst',
            lambda lines: [],
            'my_train.lst: got no line for number 1, which is in my_train.rec',
        ),
        (
            'my_train.lst',
            lambda lines: [*lines[:-1], bytes(9), b'9' * 5000 + b'\t0\tx'],
            'no line for number 8, ',
        ),
    ],
)
def test_damaged_or_cut_index_or_list_is_refused(source, tmp_path, name, change, message):
    lines = (source / name).read_bytes().splitlines()
    (source / name).write_bytes(b''.join(line + b'\n' for line in change(lines)))
    refuse(source, tmp_path, message)


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda rec: rec + bytes(64), f'my_val.rec, record 2: 64 {REST}'),
        (lambda rec: rec + b'x', f'record 2: 1 {REST}'),
        (lambda rec: rec + rec, f'record 2: .* {REST}'),
        (lambda rec: rec[:-4], 'record 2: not a RecordIO record'),
        (lambda rec: rec[:-1], 'record 2: not a RecordIO record'),
        (lambda rec: b'', 'my_val.idx: the offsets do not match'),
        (lambda rec: rec[: len(rec) // 3], 'my_val.idx: the offsets do not match'),
        (lambda rec: bytes(len(rec)), 'record 0: not a RecordIO record'),
    ],
)
def test_records_that_differ_from_their_index_are_refused(source, tmp_path, change, message):
    path = source / 'my_val.rec'
    path.write_bytes(change(path.read_bytes()))
    refuse(source, tmp_path, message)


@pytest.mark.parametrize(
    'names, message',
    [
        (
            [f'my_{k}_{split}.rec' for k in range(2) for split in ('train', 'val')],
            r'got \S+my_0_train.rec and \S+my_1_train.rec, expected one for train; join all parts '
            r'.those of im2rec',
        ),
        (
            [f'train_{k}.rec' for k in range(12)],
            'train_10.rec.* and 7 more, expected train.rec and .*; join all parts',
        ),
        (
            ['train_0.rec', 'val_0.rec'],
            'got train_0.rec, val_0.rec, expected train.rec and val.rec, .*; join all parts',
        ),
    ],
)
def test_records_in_parts_are_refused_with_all_of_them(tmp_path, names, message):
    (tmp_path / 'parts').mkdir()
    for name in names:
        (tmp_path / 'parts' / name).touch()
    refuse(tmp_path / 'parts', tmp_path, message)


def refuse(source, tmp_path, message):
    done = adopt(source, tmp_path / 'out')
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1), done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / 'out').exists()


def test_indexes_and_lists_of_other_editors_are_read(source, tmp_path):
    for name in ('my_train.idx', 'my_val.idx', 'my_train.lst'):
        lines = (source / name).read_bytes().splitlines()
        (source / name).write_bytes(
            b'\xef\xbb\xbf' + b'\r\n'.join(lines[::-1] if 'idx' in name else lines)
        )
    with open(source / 'my_train.lst', 'ab') as f:
        f.write(b'\r\n99\t1.0\tclass/99.png')
    (source / '._my_train.rec').write_bytes(b'companion of macOS')
    done = adopt(source, tmp_path / 'out')
    assert done.returncode == 0, done.stderr
    assert f'{source}/my_train.lst: 1 of its 7 images are not in my_train.rec\n' in done.stdout
    assert (tmp_path / 'out/train.names.txt').read_text().split() == [
        f'class/{k}.png' for k in (8, 4, 9, 1, 3, 7)
    ]
    assert verify(tmp_path / 'out', 1)[1] == []


# --- records in messages
# ---------------------------------------------------------------------------


@pytest.fixture
def older(tmp_path):
    """Return a function that prepares images without a test of DALI, as earlier versions did."""

    def make(images, labels, monkeypatch):
        write(tmp_path / 'source', 'train', images, labels)
        write(tmp_path / 'source', 'val', PNGS[:3], [0, 1, 0])
        with monkeypatch.context() as patch:
            patch.setattr('mlperf_rn50.data.images.encode_image', lambda content, **_: content)
            assert adopt(tmp_path / 'source', tmp_path / 'out').returncode == 0
        return tmp_path / 'out'

    return make


@pytest.mark.parametrize('crop', ['none', 'random_resized'])
@pytest.mark.parametrize('is_named', [True, False])
def test_image_that_dali_cannot_decode_is_named_with_its_source(older, monkeypatch, crop, is_named):
    images = [*PNGS[:4], encoded('GIF'), PNGS[5]]
    out = older(images, [0, 1, 0, 1, 0, 1], monkeypatch)
    if not is_named:
        (out / 'train.names.txt').unlink()
    config = config_of(out, input_batch_multiplier=2)
    config = Config(data=DataConfig(**{**vars(config.data), 'crop': crop}))
    with pytest.raises(DataError) as e:
        for batch, _ in zip(train_batches(config, Shard(6, 0, 1, 2), 1, 0, None), range(3)):
            batch.images.asnumpy()
    source = ', from class/4.png' if is_named else ''
    found = str(e.value)
    assert found.startswith(
        f'{out}/train.rec, record 4{source}: DALI cannot decode this image (the input pipeline '
    )
    assert (
        found.endswith('); replace it and prepare the data again')
        and '\n' not in found
        and len(found) < 400
    )


def test_image_without_a_size_is_named_with_its_source(older, monkeypatch):
    images = [*PNGS[:5], encoded('JPEG2000', no_jp2=True)]
    out = older(images, [0, 1, 0, 1, 0, 1], monkeypatch)
    config = Config(data=DataConfig(**{**vars(config_of(out).data), 'crop': 'random_resized'}))
    with pytest.raises(
        DataError,
        match='train.rec, record 5, from class/5.png: got an image without a readable size',
    ):
        next(train_batches(config, Shard(6, 0, 1, 6), 1, 0, None))


def test_failure_without_a_damaged_image_keeps_the_reason(older, monkeypatch):
    from mlperf_rn50.data import pipeline

    out = older(PNGS, [0, 1, 0, 1, 0, 1], monkeypatch)

    run = pipeline.run_pipeline

    def fail(pipe):
        run(pipe)
        raise DataError('the input pipeline failed: out of memory')

    monkeypatch.setattr(pipeline, 'run_pipeline', fail)
    for _ in range(2):
        with pytest.raises(DataError, match='^the input pipeline failed: out of memory$'):
            next(train_batches(config_of(out), Shard(6, 0, 1, 6), 1, 0, None))
        # as on an unsupported GPU
        monkeypatch.setattr(pipeline.DecoderTest, 'passes', lambda *_: False)


def test_prepared_records_have_the_names_of_their_files(tmp_path):
    for split, names in (('train', ('b.jpg', 'a.jpg', 'cut.jpg')), ('val', ('c.jpg',))):
        (tmp_path / split / 'x').mkdir(parents=True)
        for name in names:
            (tmp_path / split / 'x' / name).write_bytes(
                encoded('JPEG')[: 100 if name == 'cut.jpg' else None]
            )
    (tmp_path / 'train/x/b.jpg').write_bytes(encoded('GIF'))
    out = tmp_path / 'out'
    done = call('prepare', 'folder', '--source', tmp_path, '--out', out, '--skip-corrupt')
    assert done.returncode == 0, done.stderr
    assert RecordFile(out / 'train.rec').describe(2) == f'{out}/train.rec, record 2'
    assert [RecordFile(out / 'train.rec').describe(i) for i in range(2)] == [
        f'{out}/train.rec, record {i}, from train/x/{name}.jpg' for i, name in enumerate('ab')
    ]
