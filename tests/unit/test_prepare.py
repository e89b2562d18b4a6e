"""Preparation of digits, folders, ImageNet and CIFAR-10 as RecordIO, and a first configuration."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import call, json_table
from numbered import tar_of
from prepared import bitmap, fill, prepare, shown, stored

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.config_file import resolve_config
from mlperf_rn50.data.prepare import samples
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.command import make_tree
from mlperf_rn50.errors import DataError, UserError
from mlperf_rn50.train.plan import make_plan


@pytest.fixture
def images(tmp_path):
    """Folder with two classes: source/{train,val}/<class>/<image>."""
    files = {
        f'{split}/{name}/{i}.bmp': bitmap(100 * label + i, (40, 30))
        for split, num in (('train', 3), ('val', 2))
        for label, name in enumerate(('n01', 'n02'))
        for i in range(num)
    }
    return fill(tmp_path / 'source', files)


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def test_digits_are_a_fixed_stratified_split():
    data = samples.digits()
    assert (len(data.train), len(data.validation)) == (1437, 360)
    counts = np.bincount([s.label for s in data.validation])
    assert counts.min() >= 35 and counts.max() <= 37
    # the set contains duplicates
    assert len({s.data for s in data.train} & {s.data for s in data.validation}) <= 2


def test_configuration_of_own_images_is_complete_and_that_of_the_user_is_kept(
    images, tmp_path, capsys
):
    out = tmp_path / 'my out'
    words = 'folder', '--source', images, '--out', out
    assert prepare(*words) == 0
    command = f"next: launch/local.sh --config '{out}/train.yaml' --ranks-per-node 2\n"
    assert capsys.readouterr().out.endswith(command)
    config = resolve_config(out / 'train.yaml', [], config_parser())
    data = config.data
    assert (data.dir, data.dataset, config.run.dir) == (str(out), 'source', 'logs/source')
    assert (data.num_train, data.num_val, data.num_classes) == (6, 4, 2)
    assert (data.image_size, data.resize_shorter) == (32, 32)  # of images of 40 x 30
    make_plan(config, 2)
    (out / 'train.yaml').write_text('{}')
    assert prepare(*words) == 0 and (out / 'train.yaml').read_text() == '{}'


def test_single_class_is_refused(tmp_path, out):
    source = fill(tmp_path / 'source', {f'photos/{k}.bmp': bitmap(k) for k in range(9)})
    with pytest.raises(DataError, match=r'got 1 class \(photos\), expected 2 or more; put the'):
        prepare('folder', '--source', source, '--out', out, '--validation', 0.3)
    assert not out.exists()


@pytest.mark.parametrize(
    'num_train, side, expected',
    json_table("""
49      | 48  | [48, 48, 16, 90]
1437    | 300 | [224, 256, 64, 44]
1000000 | 240 | [224, 240, 256, 30]
1       | 8   | [32, 32, 16, 90]
"""),
)
def test_sizes_and_schedule_of_a_configuration_follow_the_images(num_train, side, expected):
    tree = make_tree(Path('x'), 'x', num_train, side)
    sizes = tree['data']['image_size'], tree['data']['resize_shorter']
    batch, epochs = tree['train']['global_batch_size'], tree['schedule']['decay_epochs']
    assert [*sizes, batch, epochs] == expected


@pytest.mark.parametrize('option', ['--resize-shorter', '--workers'])
@pytest.mark.parametrize('value', ['0', '100000', '9.5'])
def test_number_out_of_range_is_refused(option, value):
    with pytest.raises(UserError, match=f'{option}: got {value}, expected a whole number from 1'):
        prepare('digits', option, value)


# --- ImageNet


@pytest.fixture
def tars(tmp_path):
    """Both tar files of ILSVRC2012, with three synsets."""
    inner = {
        f'{s}.tar': tar_of({f'{s}_{i}.JPEG': bitmap(10 * k + i) for i in range(2)})
        for k, s in enumerate(('n03', 'n01', 'n02'))
    }
    val = {f'ILSVRC2012_val_{i:08d}.JPEG': bitmap(90 + i) for i in (2, 1, 3)}
    files = {
        'ILSVRC2012_img_train.tar': tar_of(inner),
        'ILSVRC2012_img_val.tar': tar_of(val),
        'truth.txt': b'n02\nn01\nn03\n',
    }
    return fill(tmp_path / 'ILSVRC2012', files)


def prepare_tars(tars, *options):
    words = 'imagenet', '--source', tars, '--out', tars.parent / 'out'
    return prepare(*words, '--ground-truth', tars / 'truth.txt', *options)


def test_imagenet_from_tars(tars, out):
    with pytest.raises(DataError, match='got 6 training and 3 validation images of 3 classes, exp'):
        prepare_tars(tars)
    assert prepare_tars(tars, '--allow-partial') == 0
    # Labels follow the sorted synsets, and the tar files are in the order n03, n01, n02.
    greys = [(0, 10), (0, 11), (1, 20), (1, 21), (2, 0), (2, 1)]
    assert stored(out) == [(label, bitmap(grey)) for label, grey in greys]
    assert stored(out, 'validation') == [(1, bitmap(91)), (0, bitmap(92)), (2, bitmap(93))]
    # other archives may use a name in several synsets
    first = (out / 'train.names.txt').read_text().splitlines()[0]
    assert first == 'ILSVRC2012_img_train.tar/n01/n01_0.JPEG'


def headers(*members: tuple) -> bytes:
    """Return members of a tar from names and types; a file contains x."""

    def packed(name, kind=tarfile.REGTYPE):
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, int(kind in (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME))
        return info.tobuf(tarfile.GNU_FORMAT) + (b'x' * info.size).ljust(512 * info.size, b'\0')

    return b''.join(packed(*member) for member in members)


def test_entries_of_tars_that_are_no_images_are_not_used(tars, out, capsys):
    names = './._n01440764.tar ._x.JPEG __MACOSX/n01_0.JPEG LICENSE.txt README'.split()
    others = headers(*((name,) for name in names), ('more', tarfile.DIRTYPE))
    long = 'x' * 120  # stored in a member before that of the image
    inner = {
        f'{s}.tar': others + tar_of({f'./{s}/{long}{i}.JPEG': bitmap(i) for i in range(2)})
        for s in ('n01', 'n02', 'n03')
    }
    for name, files in (('train', inner), ('val', {f'v{i}.JPEG': bitmap(i) for i in range(3)})):
        content = (others + tar_of(files)).rstrip(b'\0') + bytes(1024)
        padding = 1 << (9 if name == 'val' else 16)  # as of tar -b 1 and tar -b 128
        padded = content + bytes(-len(content) % padding)
        (tars / f'ILSVRC2012_img_{name}.tar').write_bytes(padded)
    assert prepare_tars(tars, '--allow-partial') == 0
    assert stored(out) == [(label, bitmap(i)) for label in range(3) for i in range(2)]
    assert capsys.readouterr().out.startswith(
        f'{tars}/ILSVRC2012_img_train.tar: not used: hidden (12), .txt (4), without ending (4)\n'
        f'{tars}/ILSVRC2012_img_val.tar: not used: hidden (3), .txt (1), without ending (1)\n'
    )


@pytest.mark.parametrize('is_class', [True, False])
@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda tar: tar.rstrip(b'\0'), 'end of data|it is cut'),
        (lambda tar: tar[:2048], 'it is cut'),
        (lambda tar: tar[:2048] + bytes(512) + tar[2560:], 'a hole at byte 2048'),
        (lambda tar: tar[:2048] + b'\xff' * 512 + tar[2560:], 'a hole at byte 2048'),
        (lambda tar: bytes(len(tar)), 'got nothing, expected files'),
        (lambda tar: tar + bytes(1 << 20), 'a hole at byte 4096'),
        (lambda tar: tar + bytes(10240), 'a hole at byte 4096'),
        (gzip.compress, 'not a readable, uncompressed tar .*; decompress it'),
        (lambda tar: headers(('x.JPEG', tarfile.LNKTYPE)) + tar, 'x.JPEG is a link'),
        (lambda tar: headers(('a/i1.JPEG',)) + tar, 'i1.JPEG is a link, has holes, or is there'),
        (lambda tar: headers(*[('x', tarfile.GNUTYPE_LONGNAME)] * 2000) + tar, 'recursion'),
        (lambda tar: headers(('a.txt',)) + tar_of({}), 'got .txt, expected files such as .jpg'),
    ],
)
def test_tar_that_would_lose_images_is_refused(tars, is_class, damage, message):
    tar = damage(tar_of({f'i{i}.JPEG': bytes([i + 1]) * 1500 for i in range(2)}))
    name, inside = 'ILSVRC2012_img_val.tar', ''
    if is_class:
        tar = tar_of({'n01.tar': tar, 'n02.tar': tar})
        name, inside = 'ILSVRC2012_img_train.tar', 'n01.tar: '
    (tars / name).write_bytes(tar)
    with pytest.raises(DataError, match=f'^imagenet: {tars}/{name}: {inside}.*({message})') as e:
        prepare_tars(tars, '--allow-partial')
    assert '\n' not in str(e.value) and not (tars.parent / 'out').exists()


VAL = 'ILSVRC2012_val_0000000'


@pytest.mark.parametrize(
    'text, message',
    [
        ('1\n2\n3\n', "got '1', expected a synset such as n01 .the class numbers of the develop"),
        ('n01\nn02\n', 'got 2 lines, expected 3'),
        (f'{VAL}1.JPEG n01\n{VAL}2.JPEG n02\nx n03\n', "got 'no line'"),
        (f'n01\n{VAL}2.JPEG n02\nn03\n', f'got the line .{VAL}2.JPEG n02., expected'),
        ('n01\nn02\nn0\n', "00000003.JPEG: got 'n0'"),
        ('n01 a b\n' * 3, 'got the line .n01 a b., expected "synset" on each line'),
    ],
)
def test_wrong_ground_truth_is_refused(tars, text, message):
    (tars / 'truth.txt').write_text(text)
    with pytest.raises(DataError, match=message):
        prepare_tars(tars, '--allow-partial')


@pytest.mark.parametrize(
    'text',
    [
        '\ufeffn02\r\n\nn01\r\nn03',
        '\ufeff' + ''.join(f'{VAL}{i}.JPEG n0{c}\n' for i, c in ((3, 3), (1, 2), (2, 1))),
    ],
)
def test_ground_truth_of_other_editors_is_read(tars, out, text):
    (tars / 'truth.txt').write_text(text, newline='')
    assert prepare_tars(tars, '--allow-partial') == 0
    assert [label for label, _ in stored(out, 'validation')] == [1, 0, 2]


# --- CIFAR-10 in both forms

# six files of four images
PIXELS = np.random.default_rng(0).integers(0, 255, (6, 4, 32, 32, 3), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 10, (6, 4))
FILES = [f'data_batch_{i}' for i in range(1, 6)] + ['test_batch']


def as_binary():
    planes = PIXELS.transpose(0, 1, 4, 2, 3).reshape(6, 4, -1)
    rows = np.concatenate([LABELS[..., None].astype(np.uint8), planes], axis=2)
    return {f'{name}.bin': rows[k].tobytes() for k, name in enumerate(FILES)}


def as_png():
    sheets = samples.from_pixels(PIXELS.reshape(6, 4, 1024, 3), range(6), '')
    return {
        **{f'{n}.png': s.data for n, s in zip(FILES, sheets)},
        'train_lables.json': json.dumps(LABELS[:5].ravel().tolist()).encode(),
        'test_lables.json': json.dumps(LABELS[5].tolist()).encode(),
    }


def test_cifar10_in_both_forms(tmp_path):
    packed = tar_of({f'cifar-10/{name}': content for name, content in as_binary().items()})
    fill(tmp_path, {'cifar.tar.gz': gzip.compress(packed)})
    for source in (tmp_path / 'cifar.tar.gz', fill(tmp_path / 'source', as_png())):
        data = cifar10(source)
        assert [s.label for s in data.train] == LABELS[:5].ravel().tolist()
        decoded = np.stack([shown(s.read()) for s in data.train + data.validation])
        np.testing.assert_array_equal(decoded, PIXELS.reshape(-1, 32, 32, 3))


def test_two_different_files_of_a_batch_are_refused(tmp_path):
    files = as_binary()
    fill(tmp_path, files)
    old = fill(tmp_path / 'old', {'data_batch_2.bin': files['data_batch_2.bin']})
    assert cifar10(tmp_path)
    (old / 'data_batch_2.bin').write_bytes(files['data_batch_3.bin'])
    with pytest.raises(DataError, match='two different files data_batch_2.bin'):
        cifar10(tmp_path)


SHAPE = 'must have the same shape'


@pytest.mark.parametrize(
    'form, name, change, message',
    [
        (as_binary, 'data_batch_4.bin', None, 'data_batch_4'),
        (as_binary, 'data_batch_3.bin', lambda c: c[: 2 * 3073], SHAPE),
        (as_binary, 'test_batch.bin', lambda c: c[:5000], 'ValueError'),
        (as_binary, 'data_batch_1.bin', lambda c: b'\xff' + c[1:], 'expected one each, from 0 to'),
        (as_png, 'train_lables.json', lambda c: c[:20], 'JSONDecodeError'),
        (as_png, 'train_lables.json', lambda c: json.dumps([1] * 18).encode(), SHAPE),
        (as_png, 'test_lables.json', lambda c: b'[1, 2, 3]', SHAPE),
        (as_png, 'test_lables.json', lambda c: b'[0, 1, 2, "x"]', 'from 0 to 9'),
        (as_png, 'test_lables.json', lambda c: b'{"a": 1}', ''),
        (as_png, 'test_batch.png', lambda c: c[:300], ''),
    ],
)
def test_damaged_cifar10_is_refused(tmp_path, form, name, change, message):
    files = form()
    content = files.pop(name)
    fill(tmp_path, files | ({name: change(content)} if change else {}))
    message = f'cifar10: {tmp_path}: .*{message}.*; use cifar-10-binary'
    with pytest.raises(DataError, match=message) as e:
        cifar10(tmp_path)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('dataset', ['cifar10', 'imagenet'])
@pytest.mark.parametrize(
    'make',
    [
        lambda path: path.write_bytes(gzip.compress(tar_of({'x': bytes(range(256)) * 400}))[:200]),
        lambda path: path.write_bytes(b'\x1f\x8b' + b'damaged' * 99),
        os.mkfifo,
        lambda path: path.symlink_to('/dev/zero'),
        lambda path: path.write_bytes(tar_of({'x.tar': b'damaged'})),
    ],
    ids=['cut', 'damaged', 'pipe', 'device', 'inside'],
)
def test_archive_that_cannot_be_read_is_one_line(tmp_path, out, dataset, make):
    source = tmp_path / 'source'
    source.mkdir()
    archive = source / 'ILSVRC2012_img_train.tar'
    make(archive)
    given = archive if dataset == 'cifar10' else source
    done = call('prepare', dataset, '--source', given, '--out', out)
    assert (done.returncode, done.stderr.count('\n')) == (2, 1), done.stderr
    assert str(archive) in done.stderr and not out.exists()
