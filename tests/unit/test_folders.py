"""Folders of other people: what is a split, a class or an image, what is stated, and what is
refused."""

import hashlib
import os
import random
import re

import pytest
from helpers import call, deny
from numbered import encoded

from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.records import load_manifest
from mlperf_rn50.errors import DataError

JPEG = encoded('JPEG')


def fill(root, *paths):
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith('/'):
            file.mkdir()
        else:
            file.write_bytes(JPEG)
    return root


@pytest.fixture
def source(tmp_path):
    """Folder of two classes, with two images for training and one for validation each."""
    return fill(
        tmp_path / 'source',
        *(
            f'{f}/{c}/{f[0]}{i}.jpg'
            for f, n in (('train', 2), ('val', 1))
            for c in 'ab'
            for i in range(n)
        ),
    )


def partial_imagenet(source, name):
    return imagenet(source, None, True)


def refusal(source, **keys) -> str:
    """Return the only line that prepare prints; it leaves nothing behind."""
    out = source.parent / 'out'
    options = [word for key, value in keys.items() for word in (f'--{key}', value)]
    done = call('prepare', 'folder', '--source', source, '--out', out, *options)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1), done.stderr
    assert not out.exists()
    return done.stderr


@pytest.mark.parametrize(
    'names, used',
    [
        (('train', 'val'), 'val'),
        (('Training', 'valid'), 'valid'),
        (('train', 'validation', 'test'), 'validation'),
        (('TRAIN', 'dev', 'testing'), 'dev'),
        (('train', 'test'), 'test'),
        (('seg_train', 'seg_test'), 'seg_test'),
    ],
)
def test_splits_have_their_usual_names_and_are_stated(tmp_path, names, used):
    fill(tmp_path, *(f'{n}/{c}/{n}.png' for n in names for c in 'ab'), 'notes.txt', 'more/x.jpg')
    data = folder(tmp_path, 'x')
    assert [s.name for s in data.train] == [f'{names[0]}/{c}/{names[0]}.png' for c in 'ab']
    assert [s.name for s in data.validation] == [f'{used}/{c}/{used}.png' for c in 'ab']
    assert data.notes[:2] == tuple(
        f'{tmp_path / n}: 2 images of 2 classes: a, b' for n in (names[0], used)
    )
    others = ''.join(f', {n}/' for n in sorted({*names[1:]} - {used}))
    assert data.notes[2] == f'{tmp_path}: not used: more/{others}, .txt (1)'


@pytest.mark.parametrize(
    'names', [('val', 'valid'), ('dev', 'validation'), ('Val', 'val'), ('train', 'Training')]
)
def test_two_folders_for_one_split_are_refused(source, names):
    fill(source, *(f'{n}/a/x.jpg' for n in names))
    message = refusal(source)
    assert (
        f'{source}/' in message
        and 'expected one for ' in message
        and 'or move those of other data sets' in message
    )


@pytest.mark.parametrize('make', [folder, partial_imagenet])
def test_folders_of_systems_and_hidden_files_shift_no_label(source, make):
    fill(
        source,
        *(
            f'{split}/{place}{name}/x.jpg'
            for split in ('train', 'val')
            for place in ('', 'a/')
            for name in ('.ipynb_checkpoints', '@eaDir', '__MACOSX', 'lost+found', '$RECYCLE.BIN')
        ),
        'train/b/._t0.jpg',
        '@eaDir/t.jpg',
    )
    data = make(source, 'x')
    assert (
        data.classes == ['a', 'b']
        and [s.label for s in data.train] == [0, 0, 1, 1]
        and len(data.validation) == 2
    )
    assert (
        f'{source}/train: not used: $RECYCLE.BIN/ (2), .ipynb_checkpoints/ (2), @eaDir/ (2), '
        '__MACOSX/ (2), '
        'lost+found/ (2), hidden (1)'
    ) in data.notes


def test_files_that_are_not_read_are_stated_by_ending(source):
    fill(
        source,
        'train/a/x.heic',
        'train/a/y.HEIC',
        'train/b/README',
        'train/loose.jpg',
        'train/a/more/x.jpg',
    )
    assert folder(source, 'x').notes[1] == (
        f'{source}/train: not used: .heic (2), folders in classes (1), without ending (1), images '
        'outside classes (1)'
    )


@pytest.mark.parametrize(
    'paths, message',
    [
        (['train/c/'], 'train/c: got nothing, expected images (.jpg '),
        (['train/c/1.heic', 'train/c/2.heic'], 'train/c: got .heic (2), expected images'),
        (['train/c/images/1.jpg'], 'train/c: got images/, expected images'),
        (['val/c/'], 'val/c: got nothing'),
        (['val/c/1.jpg'], 'class c is only in {source}/val, expected it in both splits'),
        (['train/c/1.jpg'], 'class c is only in {source}/train, expected it in both splits'),
    ],
)
def test_class_without_images_is_refused(source, paths, message):
    fill(source, *paths)
    assert message.format(source=source) in refusal(source)


@pytest.mark.parametrize(
    'paths, message',
    [
        (
            ['a/1.jpg', 'b/1.jpg'],
            'got a/, b/, expected train/ and val/ with a folder per class; to split class folders, '
            'add --validation 0.1',
        ),
        (['train/a/1.jpg'], 'got train/, expected train/ and val/'),
        (['x.jpg'], 'got 1 image such as x.jpg, expected train/ and val/'),
        (['train.rec'], 'for .rec files, use prepare im2rec'),
        (
            ['train/1.jpg', 'val/1.jpg'],
            'got 1 image such as 1.jpg, expected a folder per class; put',
        ),
    ],
)
def test_folder_without_splits_is_refused(tmp_path, paths, message):
    assert message in refusal(fill(tmp_path / 'source', *paths))


@pytest.mark.parametrize(
    'make, paths, message',
    [
        (
            folder,
            ['train/shard-000000.tar', 'train/shard-000001.tar', 'val/x.tar'],
            '/train: got .tar (2), expected a folder per class; put',
        ),
        (
            folder,
            ['train/n01440764.tar', 'val/a/1.jpg'],
            'got .tar (1), expected a folder per class; unpack each archive',
        ),
        (
            folder,
            ['train/n01440764_1_n01440764.JPEG', 'val/a/1.jpg'],
            'got 1 image such as n01440764_1_n01440764.JPEG, ',
        ),
        (
            folder,
            ['data/t-0.parquet', 'data/v-0.parquet', 'README.md'],
            'got data/ with .parquet (2), .md (1), expected',
        ),
        (
            partial_imagenet,
            ['ILSVRC2012_img_train.tar.gz'],
            'got .gz (1), expected ILSVRC2012_img_train.tar',
        ),
        (
            partial_imagenet,
            ['train/a/1.jpg'],
            'got train/, expected ILSVRC2012_img_val.tar or val/',
        ),
        (im2rec, ['train/a/1.jpg', 'x.csv'], 'got train/, .csv (1), expected train.rec'),
    ],
)
def test_refusal_names_what_is_there(tmp_path, make, paths, message):
    with pytest.raises(DataError, match=re.escape(message)):
        make(fill(tmp_path, *paths), 'x')


def test_names_that_look_alike_are_shown_apart(source):
    fill(source, 'train/caf\xe9/1.jpg', 'val/cafe\u0301/1.jpg')
    for make in (folder, partial_imagenet):
        with pytest.raises(DataError, match=r'cafe\\u0301') as e:
            make(source, 'x')
        assert str(e.value).isascii()
    fill(source, 'train/cafe\u0301/1.jpg', 'val/caf\xe9/1.jpg')
    assert (
        folder(source, 'x').notes[0]
        == f'{source}/train: 6 images of 4 classes: a, b, cafe\\u0301, caf\\xe9'
    )


# --- files that cannot be read
# ---------------------------------------------------------------------


def at(source, *parts):
    """Return a path as bytes, which need not be UTF-8."""
    return os.path.join(os.fsencode(source), *parts)


@pytest.mark.parametrize(
    'make, message',
    [
        (
            lambda s: os.symlink('nowhere', at(s, b'train/a/x.jpg')),
            'train/a/x.jpg: link to a missing file',
        ),
        (lambda s: os.symlink('nowhere', at(s, b'train/c')), 'train/c: link to a missing file'),
        (
            lambda s: os.symlink('x.jpg', at(s, b'train/a/x.jpg')),
            'train/a/x.jpg: Too many levels of symbolic links',
        ),
        (
            lambda s: os.mkfifo(at(s, b'train/a/x.jpg')),
            'train/a/x.jpg: got a named pipe, expected a file',
        ),
        (lambda s: os.mkfifo(at(s, b'train/c')), 'train/c: got a named pipe'),
        (
            lambda s: os.symlink('/dev/zero', at(s, b'val/b/x.png')),
            'val/b/x.png: got a device, expected a file',
        ),
        (
            lambda s: os.mkdir(at(s, b'train/a/x.jpg')),
            'train/a/x.jpg: got a folder, expected a file',
        ),
        (
            lambda s: os.mkdir(at(s, b'train/caf\xe9')),
            r"/train/caf\xe9': the name is not UTF-8 or has a line break",
        ),
        (
            lambda s: open(at(s, b'train/a/caf\xe9.jpg'), 'x').close(),
            r"/train/a/caf\xe9.jpg': the name is not UTF-8",
        ),
        (
            lambda s: open(at(s, b'train/a/x\n.jpg'), 'x').close(),
            r"/train/a/x\n.jpg': the name is not UTF-8 or",
        ),
    ],
)
def test_unreadable_entry_is_named_in_one_line(source, make, message):
    make(source)
    assert message in refusal(source)


def test_missing_source_is_named_in_one_line(tmp_path):
    (tmp_path / 'file').touch()
    assert '/none: No such file or directory' in refusal(tmp_path / 'none')
    assert '/file: Not a directory' in refusal(tmp_path / 'file')


@pytest.mark.parametrize('place', ['train/a', 'train/a/t1.jpg', 'val'])
def test_missing_permission_is_named_in_one_line(source, monkeypatch, place):
    """Without permission, scandir, access and open fail as for a user who is not root."""
    deny(monkeypatch, str(source / place), 'scandir', 'access', 'open')
    assert f'--source: {source / place}: Permission denied; ' in refusal(source)


# --- split by a hash
# -------------------------------------------------------------------------------


@pytest.mark.parametrize('inside', ['', 'train/'])
def test_fraction_of_each_class_is_for_validation(tmp_path, inside):
    names = [f'{c}/{i}.jpg' for c in ('bus', 'train') for i in range(60)]
    fill(tmp_path, *(inside + name for name in names), *['test/bus/x.jpg'] * bool(inside))
    data = folder(tmp_path, 'x', 0.25)
    found = [
        ['/'.join(s.name.split('/')[-2:]) for s in part] for part in (data.train, data.validation)
    ]
    assert sorted(found[0] + found[1]) == sorted(names) and data.classes == ['bus', 'train']
    # A quarter of all SHA-256 sums begins with one of these digits.
    assert found[1] == sorted(
        n for n in names if hashlib.sha256(n.encode()).hexdigest()[0] in '0123'
    )
    assert [s.label for s in data.train + data.validation] == [
        n.startswith('train') for n in found[0] + found[1]
    ]
    assert any(
        f'{len(found[1])} of these images are for validation: 0.25 of each class' in note
        for note in data.notes
    )
    assert any('not used: test/' in note for note in data.notes) == bool(inside)


def test_added_images_leave_others_in_their_splits(tmp_path):
    names = [f'{c}/{i}.jpg' for c in 'ab' for i in range(40)]
    random.Random(0).shuffle(names)
    before: set[str] = set()
    for count in (30, 50, 80):
        fill(tmp_path, *names[:count])
        held = {s.name for s in folder(tmp_path, 'x', 0.3).validation}
        assert before <= held and len(held - before) < count / 2
        before = held


@pytest.mark.parametrize('fraction', [1e-9, 0.99])
def test_each_split_has_an_image_of_each_class(tmp_path, fraction):
    data = folder(fill(tmp_path, *(f'{c}/{i}.jpg' for c in 'ab' for i in range(3))), 'x', fraction)
    assert min({s.label for s in part} == {0, 1} for part in (data.train, data.validation))


@pytest.mark.parametrize(
    'paths, fraction, message',
    [
        (
            ['a/1.jpg', 'a/2.jpg', 'b/1.jpg'],
            0.1,
            'got 1 image in b/, expected 2 or more in each class',
        ),
        (
            ['train/a/1.jpg', 'valid/a/1.jpg'],
            0.1,
            '/valid exists; omit the option, or move the folder',
        ),
        (['a/1.jpg'], 1.5, '--validation: got 1.5, expected a fraction'),
        (['a/1.jpg'], 0, '--validation: got 0, '),
        (['a/1.jpg'], 'nan', '--validation: got nan'),
    ],
)
def test_impossible_split_is_refused(tmp_path, paths, fraction, message):
    assert message in refusal(fill(tmp_path / 'source', *paths), validation=fraction)


def test_split_is_recorded(tmp_path):
    fill(tmp_path / 'source', *(f'{c}/{i}.jpg' for c in 'ab' for i in range(5)))
    done = call(
        'prepare',
        'folder',
        '--source',
        tmp_path / 'source',
        '--out',
        tmp_path / 'out',
        '--validation',
        '0.4',
    )
    assert done.returncode == 0, done.stderr
    notes = load_manifest(tmp_path / 'out')['notes']
    assert (
        done.stdout.startswith('\n'.join(notes))
        and 'selected by the SHA-256 of CLASS/FILE' in notes[-1]
    )


def test_classes_of_imagenet_are_those_of_training(source):
    fill(source, 'val/c/1.jpg')
    with pytest.raises(DataError, match='val/c: this class has no training images'):
        imagenet(source, None, True)
