"""Folders and records of other people: what is a split, a class or an image, what is stated, and
what is refused."""

import hashlib
import os
import re

import numpy as np
import pytest
from helpers import call, deny, json_table, table
from numbered import encoded, ramp, write_records
from prepared import fill, stored

from mlperf_rn50.data.prepare import pack
from mlperf_rn50.data.prepare.folders import folder, im2rec
from mlperf_rn50.data.prepare.imagenet import imagenet
from mlperf_rn50.data.prepare.samples import from_pixels
from mlperf_rn50.data.recordio import load_manifest
from mlperf_rn50.data.verify import verify
from mlperf_rn50.errors import DataError


@pytest.fixture
def source(tmp_path):
    """Folder of two classes, with two images for training and one for validation each."""
    names = ('train', 't0'), ('train', 't1'), ('val', 'v0')
    return fill(tmp_path / 'source', [f'{f}/{c}/{n}.jpg' for f, n in names for c in 'ab'])


def partial_imagenet(source, name):
    return imagenet(source, None, True)


def refusal(source, kind='folder', **keys) -> str:
    """Return the only line that prepare prints; it leaves nothing behind."""
    out = source.parent / 'out'
    options = [word for key, value in keys.items() for word in (f'--{key}', value)]
    done = call('prepare', kind, '--source', source, '--out', out, *options)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1), done.stderr
    assert not out.exists()
    return done.stderr


@pytest.mark.parametrize('make', [folder, partial_imagenet])
def test_folders_of_systems_and_hidden_files_shift_no_label(source, make):
    systems = '.ipynb_checkpoints @eaDir __MACOSX lost+found $RECYCLE.BIN'.split()
    places = [f'{split}/{place}' for split in ('train', 'val') for place in ('', 'a/')]
    fill(source, [f'{place}{name}/x.jpg' for place in places for name in systems])
    fill(source, ['train/b/._t0.jpg', '@eaDir/t.jpg', 'train/b/README', 'train/loose.jpg'])
    fill(source, [f'train/a/{name}' for name in ('x.heic', 'y.HEIC', 'more/x.jpg')])
    data = make(source, 'x')
    assert data.classes == ['a', 'b'] and [s.label for s in data.train] == [0, 0, 1, 1]
    assert len(data.validation) == 2
    assert (
        f'{source}/train: not used: $RECYCLE.BIN/ (2), .ipynb_checkpoints/ (2), @eaDir/ (2), '
        '__MACOSX/ (2), lost+found/ (2), .heic (2), folders in classes (1), hidden (1), without '
        'ending (1), images outside classes (1)'
    ) in data.notes


@pytest.mark.parametrize(
    'paths, message',
    table(r"""
val/a/x.jpg valid/a/x.jpg         | /valid, expected one for validation; join all parts
train/a/x.jpg Training/a/x.jpg    | for train; .*, or move those of other data sets
train/c/                          | train/c: got nothing, expected images \(.jpg
train/c/1.heic train/c/2.heic     | train/c: got .heic \(2\), expected images
train/c/images/1.jpg              | train/c: got images/, expected images
val/c/1.jpg                       | class c is only in .*/source/val, expected it in both splits
train/c/1.jpg                     | class c is only in .*/source/train, expected it in both splits
"""),
)
def test_split_or_class_that_is_not_clear_is_refused(source, paths, message):
    assert re.search(message, refusal(fill(source, paths.split())))


MAKERS = {'folder': folder, 'imagenet': partial_imagenet, 'im2rec': im2rec}


@pytest.mark.parametrize(
    'make, paths, message',
    table("""
folder   | a/1.jpg b/1.jpg         | a/, b/, expected train/ and val/ with a folder per class; to
folder   | x.jpg                   | got 1 image such as x.jpg, expected train/ and val/
folder   | train.rec               | for .rec files, use prepare im2rec
folder   | train/1.jpg val/1.jpg   | image such as 1.jpg, expected a folder per class;
folder   | train/n01.tar train/x.tar val/x | got .tar (2), expected a folder per
folder   | train/n01.tar val/a/1.jpg       | per class; unpack each archive of a synset
folder   | train/x.tar val/a/1.jpg | per class; put the images of each class into
folder   | b/1.jpg b/x.md d/t.md x.md      | got b/, d/ with .md (1), .md (1), exp
imagenet | x.tar.gz                | got .gz (1), expected ILSVRC2012_img_train.tar
imagenet | train/a/1.jpg           | got train/, expected ILSVRC2012_img_val.tar or val
imagenet | train/a/1.jpg val/c/1.jpg       | val/c: this class has no training images
im2rec   | train/a/1.jpg x.csv     | got train/, .csv (1), expected train.rec
"""),
)
def test_refusal_names_what_is_there(tmp_path, make, paths, message):
    with pytest.raises(DataError, match=re.escape(message)):
        MAKERS[make](fill(tmp_path, paths.split()), 'x')


# --- files that cannot be read


@pytest.mark.parametrize(
    'make, path, message',
    [
        (lambda p: os.symlink('nowhere', p), 'train/a/x.jpg', 'link to a missing file'),
        (lambda p: os.symlink('nowhere', p), 'train/c', 'link to a missing file'),
        (lambda p: os.symlink('x.jpg', p), 'train/a/x.jpg', 'Too many levels of symbolic links'),
        (os.mkfifo, 'train/a/x.jpg', 'got a named pipe, expected a file'),
        (os.mkfifo, 'train/c', 'got a named pipe'),
        (lambda p: os.symlink('/dev/zero', p), 'val/b/x.png', 'got a device, expected a file'),
        (os.mkdir, 'train/a/x.jpg', 'got a folder, expected a file'),
        (os.mkdir, 'train/caf\udce9', 'the name is not UTF-8 or has a line break'),
        (lambda p: open(p, 'x').close(), 'train/a/caf\udce9.jpg', 'the name is not UTF-8'),
        (lambda p: open(p, 'x').close(), 'train/a/x\n.jpg', 'the name is not UTF-8 or has a line'),
    ],
)
def test_unreadable_entry_is_named_in_one_line(source, make, path, message):
    make(source / path)
    name = repr(os.fsencode(path))[2:-1]
    assert re.search(f"/{re.escape(name)}'?: {message}", refusal(source))


def test_missing_source_is_named_in_one_line(tmp_path):
    (tmp_path / 'file').touch()
    assert '/none: No such file or directory' in refusal(tmp_path / 'none')
    assert '/file: Not a directory' in refusal(tmp_path / 'file')


def test_file_instead_of_a_folder_of_records_is_named(tmp_path):
    (tmp_path / 'train.rec').touch()
    assert '--source: ' in refusal(tmp_path / 'train.rec', 'im2rec')


@pytest.mark.parametrize('place', ['train/a', 'train/a/t1.jpg', 'val'])
def test_missing_permission_is_named_in_one_line(source, monkeypatch, place):
    """Without permission, scandir, access and open fail as for a user who is not root."""
    deny(monkeypatch, str(source / place), 'scandir', 'access', 'open')
    assert f'--source: {source / place}: Permission denied; ' in refusal(source)


# --- split by a hash


def test_output_inside_the_source_is_no_class(tmp_path):
    fill(tmp_path, [f'{c}/{i}.jpg' for c in 'ab' for i in range(4)])
    words = ['folder', '--source', tmp_path, '--out', tmp_path / 'prepared', '--validation', '0.5']
    assert call('prepare', *words).returncode == 0
    fill(tmp_path, ['started/.parts/'])
    assert folder(tmp_path, 'x', 0.5).classes == ['a', 'b']
    (tmp_path / 'a/0.jpg').touch()
    assert 'already prepared' in call('prepare', *words).stdout


@pytest.mark.parametrize('inside', ['', 'train/'])
def test_fraction_of_each_class_is_for_validation_and_stated(tmp_path, inside):
    names = [f'{c}/{i}.jpg' for c in ('bus', 'train') for i in range(60)]
    fill(tmp_path, [inside + name for name in names] + (['test/bus/x.jpg'] if inside else []))
    data = folder(tmp_path, 'x', 0.25)
    train, held = (
        ['/'.join(s.name.split('/')[-2:]) for s in d] for d in (data.train, data.validation)
    )
    assert sorted(train + held) == sorted(names) and data.classes == ['bus', 'train']
    # A quarter of all SHA-256 sums begins with one of these digits.
    quarter = [n for n in names if hashlib.sha256(n.encode()).hexdigest()[0] in '0123']
    assert held == sorted(quarter)
    labels = [s.label for s in data.train + data.validation]
    assert labels == [n.startswith('train') for n in train + held]
    stated = f'{len(held)} of these images are for validation: 0.25 of each class'
    assert stated in data.notes[1]
    assert any('not used: test/' in note for note in data.notes) == bool(inside)


@pytest.mark.parametrize('fraction', [1e-9, 0.99])
def test_each_split_has_an_image_of_each_class(source, fraction):
    data = folder(source / 'train', 'x', fraction)
    assert [s.label for s in data.train] == [s.label for s in data.validation] == [0, 1]


@pytest.mark.parametrize(
    'paths, fraction, message',
    json_table("""
["a/1.jpg", "a/2.jpg", "b/1.jpg"]  | 0.1   | "got 1 image in b/, expected 2 or more in each"
["train/a/1.jpg", "valid/a/1.jpg"] | 0.1   | "/valid exists; omit the option, or move the"
["a/1.jpg"]                        | 1.5   | "--validation: got 1.5, expected a fraction"
["a/1.jpg"]                        | 0     | "--validation: got 0, "
["a/1.jpg"]                        | "nan" | "--validation: got nan"
"""),
)
def test_impossible_split_is_refused(tmp_path, paths, fraction, message):
    assert message in refusal(fill(tmp_path / 'source', paths), validation=fraction)


# --- records of im2rec, which are used where they are

PNGS = [sample.data for sample in from_pixels(ramp(6), range(6), '')]
KEYS = [7, 3, 1, 9, 4, 8]


def write(folder, stem, images, labels, keys=None, has_list=True):
    """Write a .rec, .idx and .lst as im2rec does."""
    folder.mkdir(exist_ok=True)
    keys = keys or range(len(images))
    write_records(folder / f'{stem}.rec', images, labels, keys, keys)
    rows = [f'{k}\t{np.atleast_1d(n)[0]:.6f}\tclass/{k}.png\n' for k, n in zip(keys, labels)]
    if has_list:
        (folder / f'{stem}.lst').write_text(''.join(rows))


@pytest.fixture
def records(tmp_path):
    folder = tmp_path / 'source'
    write(folder, 'my_train', PNGS, [0, 1, 0, 1, np.array([1.0, 5.0]), 0], keys=KEYS)
    write(folder, 'my_val', PNGS[:3], [0, 1, 1], has_list=False)
    return folder


def adopt(source, out, returncode=0) -> str:
    """Return what prepare prints to stdout, or to stderr if it fails."""
    done = call('prepare', 'im2rec', '--source', source, '--out', out, '--name', 'mine')
    assert done.returncode == returncode, done.stderr
    return done.stderr if returncode else done.stdout


@pytest.mark.parametrize('place', ['out', 'source'])
def test_records_are_described_but_neither_copied_nor_changed(
    records, tmp_path, place, monkeypatch
):
    monkeypatch.delattr(pack, 'pack_record')  # no record is written
    before = {p: (p.stat().st_ino, p.read_bytes()) for p in records.iterdir()}
    out = tmp_path / place
    assert f'{records}/my_train.rec: 6 images, labels 0 to 1\n' in adopt(records, out)
    assert {p: (p.stat().st_ino, p.read_bytes()) for p in before} == before
    assert (out / 'train.rec').samefile(records / 'my_train.rec')
    assert not os.readlink(out / 'train.rec').startswith('/')
    right, wrong = verify(out, 1)
    assert len(right) == 2 and wrong == []
    manifest = load_manifest(out)
    described = [manifest[key] for key in ('dataset', 'classes', 'skipped')]
    assert described == ['mine', ['0', '1'], []]
    names = (out / 'train.names.txt').read_text().split()
    assert names == [f'class/{k}.png' for k in KEYS]
    assert stored(out) == list(zip([0, 1, 0, 1, 1, 0], PNGS))
    assert len(stored(out, 'validation')) == 3
    assert 'is already prepared' in adopt(records, out)


@pytest.mark.parametrize(
    'stem, last, labels, message',
    [
        (
            'my_train',
            encoded('GIF'),
            [0, 1, 0, 1],
            '1 image cannot be decoded: class/3.png (ValueError: training cannot decode it as it '
            'is); run im2rec again without those',
        ),
        ('my_val', b'text', [0, 1], '1 image cannot be decoded: class/1.png (Unidentif'),
        ('my_train', PNGS[0], [1, 2], 'my_train.rec: got label 2, expected 0 to 1 for the 2 '),
        ('my_val', PNGS[0], [0, 2], 'my_val.rec: got label 2, expected 0 to 1'),
        ('my_val', PNGS[0], [0, -1], 'my_val.rec: got label -1, expected 0 to 1'),
        ('train', PNGS[0], [0, 1], 'my_train.rec and '),
    ],
)
def test_records_that_training_cannot_use_are_refused(
    records, tmp_path, stem, last, labels, message
):
    write(records, stem, [*PNGS[1 : len(labels)], last], labels)
    before = {p: p.read_bytes() for p in records.iterdir()}
    printed = adopt(records, tmp_path / 'out', returncode=2)
    *_, line = printed.splitlines()
    assert line.startswith('mlperf-rn50: ') and message in printed
    assert 'Traceback' not in printed and not [*tmp_path.glob('out/*.rec')]
    assert {p: p.read_bytes() for p in records.iterdir()} == before


REST = 'bytes after it are in no record of the index'
NO_LINE = 'my_train.lst: got no line for number'
OFFSETS = 'the offsets do not match'


@pytest.mark.parametrize(
    'name, change, message',
    [
        ('my_train.idx', lambda x: [*x[1:], b'damaged line'], "the line 'damaged line', "),
        ('my_train.idx', lambda x: [*x[1:], b'4.5\t9'], "got the line '4.5"),
        ('my_train.idx', lambda x: [*x[1:], b'4', b'8 8 8'], "got the line '4'"),
        ('my_train.idx', lambda x: [], "my_train.idx: got the line ''"),
        ('my_train.idx', lambda x: x[:4], f'record 3: .* {REST}'),
        ('my_train.idx', lambda x: [*x[:-1], x[-1][:-2]], 'my_train.rec, record [0-5]: '),
        ('my_train.idx', lambda x: [*x, x[2]], f'my_train.idx: {OFFSETS}'),
        ('my_train.idx', lambda x: x[1:], f'my_train.idx: {OFFSETS}'),
        ('my_val.idx', lambda x: [b'0\t0', b'1\t99999'], f'my_val.idx: {OFFSETS}'),
        ('my_val.idx', None, 'my_val.idx: missing; create it with rec2idx.py of MXNet'),
        ('my_val.rec', None, 'got my_train.rec, expected train.rec and val.rec, each with its'),
        ('my_train.lst', lambda x: x[:-1], f'{NO_LINE} 8, which is in my_train.rec'),
        ('my_train.lst', lambda x: [*x[:-1], b'8\t0.0'], f'{NO_LINE} 8, '),
        ('my_train.lst', lambda x: [*x[:-1], bytes(9), b'9' * 5000 + b'\t0\tx'], f'{NO_LINE} 8, '),
        ('my_train.lst', lambda x: [b'7\t0\tcaf\xe9'], 'my_train.lst: not UTF-8'),
    ],
)
def test_damaged_or_missing_index_or_list_is_refused(records, name, change, message):
    lines = (records / name).read_bytes().splitlines()
    (records / name).unlink()
    if change:
        (records / name).write_bytes(b''.join(line + b'\n' for line in change(lines)))
    assert re.search(message, refusal(records, 'im2rec'))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda rec: rec + bytes(64), f'my_val.rec, record 2: 64 {REST}'),
        (lambda rec: rec + b'x', f'record 2: 1 {REST}'),
        (lambda rec: rec[:-1], 'record 2: not a RecordIO record'),
        (lambda rec: b'', f'my_val.idx: {OFFSETS}'),
        (lambda rec: bytes(len(rec)), 'record 0: not a RecordIO record'),
    ],
)
def test_records_that_differ_from_their_index_are_refused(records, change, message):
    path = records / 'my_val.rec'
    path.write_bytes(change(path.read_bytes()))
    assert re.search(message, refusal(records, 'im2rec'))


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
    ],
)
def test_records_in_parts_are_refused_with_all_of_them(tmp_path, names, message):
    assert re.search(message, refusal(fill(tmp_path / 'parts', names), 'im2rec'))


def test_indexes_and_lists_of_other_editors_are_read(records, tmp_path):
    for name in ('my_train.idx', 'my_val.idx', 'my_train.lst'):
        lines = (records / name).read_bytes().splitlines()
        text = b'\r\n'.join(lines[::-1] if 'idx' in name else [*lines, b'99\t1.0\tclass/99.png'])
        (records / name).write_bytes(b'\xef\xbb\xbf' + text)
    (records / '._my_train.rec').write_bytes(b'companion of macOS')
    out = tmp_path / 'out'
    stated = f'{records}/my_train.lst: 1 of its 7 images are not in my_train.rec\n'
    assert stated in adopt(records, out)
    names = (out / 'train.names.txt').read_text().split()
    assert names == [f'class/{k}.png' for k in KEYS[::-1]] and verify(out, 1)[1] == []
