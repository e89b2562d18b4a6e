"""Preparation of data as RecordIO: all sources, interruptions and damage."""

import gzip
import hashlib
import io
import json
import os
import resource
import shutil
import tarfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from helpers import call
from numbered import encoded, tar_of
from PIL import Image, ImageFile

from mlperf_rn50.cli.parsers import config_parser
from mlperf_rn50.cli.prepare import make_parser
from mlperf_rn50.config_file import load_yaml, resolve_config
from mlperf_rn50.data.prepare import command, pack, samples
from mlperf_rn50.data.prepare.cifar10 import cifar10
from mlperf_rn50.data.prepare.command import make_tree
from mlperf_rn50.data.records import RecordFile, load_manifest
from mlperf_rn50.data.verify import verify
from mlperf_rn50.errors import DataError
from mlperf_rn50.train.plan import make_plan


def picture(seed) -> bytes:
    """Return a JPEG of 40 by 30 pixels."""
    return encoded(
        'JPEG', Image.fromarray(np.random.default_rng(seed).integers(0, 255, (30, 40, 3), np.uint8))
    )


def prepare(*arguments) -> int:
    return command.prepare(make_parser().parse_args([*map(str, arguments)]))


def contents(folder, split):
    """Return (label, bytes) of every record."""
    records = RecordFile(folder / f'{split}.rec')
    return [(r.label, r.image.tobytes()) for r in map(records.read, range(len(records)))]


def write_files(folder, files: dict[str, bytes]):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def pictures(tmp_path):
    """Folder with two classes: source/{train,val}/<class>/<image>."""
    for split, num in (('train', 3), ('val', 2)):
        for label, name in enumerate(('n01', 'n02')):
            write_files(
                tmp_path / 'source' / split / name,
                {f'{name}_{i}.JPEG': picture(100 * label + i) for i in range(num)},
            )
    return tmp_path / 'source'


def test_digits_are_a_fixed_stratified_split():
    data = samples.digits()
    assert (len(data.train), len(data.validation)) == (1437, 360)
    counts = np.bincount([s.label for s in data.validation])
    assert counts.min() >= 35 and counts.max() <= 37
    # the set contains duplicates
    assert len({s.data for s in data.train} & {s.data for s in data.validation}) <= 2


def test_folder_keeps_the_bytes_and_numbers_classes_by_name(pictures, tmp_path):
    done = call(
        'prepare', 'folder', '--source', pictures, '--out', tmp_path / 'out', '--name', 'flowers'
    )
    assert done.returncode == 0 and 'train.rec: 6 images of flowers' in done.stdout
    assert '\r' not in done.stderr  # no progress bar without a terminal
    expected = [(label, picture(100 * label + i)) for label in range(2) for i in range(3)]
    assert contents(tmp_path / 'out', 'train') == expected
    manifest = load_manifest(tmp_path / 'out')
    assert (manifest['dataset'], manifest['classes']) == ('flowers', ['n01', 'n02'])
    assert (
        manifest['splits']['train']['rec_sha256']
        == hashlib.sha256((tmp_path / 'out/train.rec').read_bytes()).hexdigest()
    )


def test_second_preparation_changes_nothing(pictures, tmp_path, capsys):
    out = tmp_path / 'out'
    arguments = ('folder', '--source', pictures, '--out', out)
    assert prepare(*arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert prepare(*arguments) == 0 and capsys.readouterr().out == (
        f'{out}: source is already prepared; to prepare it again, use another --out\n'
        f'next: launch/local.sh --config {out}/train.yaml --ranks-per-node 2\n'
    )
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(DataError, match='contains source, expected digits; use a new folder'):
        prepare('digits', '--out', out)
    shutil.copy(next((pictures / 'train/n01').iterdir()), pictures / 'train/n01/more.png')
    with pytest.raises(
        DataError, match=r'got \[7, 4\] images of 2 classes, expected \[6, 4\] of 2, as in --out'
    ):
        prepare(*arguments)
    shutil.rmtree(pictures)
    assert prepare(*arguments) == 0


@pytest.mark.parametrize(
    'other, is_damaged, num_kept',
    [((), False, 4), ((), True, 2), (('--resize-shorter', 20), False, 0)],
)
def test_interrupted_preparation_resumes_unless_options_changed(
    pictures, tmp_path, monkeypatch, other, is_damaged, num_kept
):
    arguments = ('folder', '--source', pictures, '--out', tmp_path / 'out', '--workers', '1')
    monkeypatch.setattr(pack, 'PART_SIZE', 2)
    names, make_record = [], pack.make_record

    def stop_at_fifth(sample, *rest):
        names.append(sample.name)
        if len(names) == 5:
            raise KeyboardInterrupt
        return make_record(sample, *rest)

    monkeypatch.setattr(pack, 'make_record', stop_at_fifth)
    with pytest.raises(KeyboardInterrupt):
        prepare(*arguments)
    assert not (tmp_path / 'out/manifest.json').exists()
    with next(tmp_path.glob('out/.parts/*/train.rec')).open('ab') as rec:
        rec.write(b'part of a record')
    names[:] = [''] * 5
    if is_damaged:
        next(tmp_path.glob('out/.parts/*/train_00001.json')).write_text('[1]')
    assert prepare(*arguments, *other) == 0
    assert len(names[5:]) == len(set(names[5:])) == 10 - num_kept
    stored = contents(tmp_path / 'out', 'train')
    assert {Image.open(io.BytesIO(image)).size for _, image in stored} == {
        (27, 20) if other else (40, 30)
    }
    assert len(stored) == 6 and verify(tmp_path / 'out', 1)[1] == []
    assert not (tmp_path / 'out/.parts').exists()


def test_failed_write_in_any_file_is_one_line_and_the_next_attempt_completes_the_data(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pack, 'PART_SIZE', 3)
    for split, num in (('train', 10), ('val', 2)):
        write_files(
            tmp_path / 'source' / split / 'cat',
            {f'{i}.png': encoded('PNG', Image.new('L', (1, 1), i)) for i in range(num)},
        )
    arguments = ('folder', '--source', tmp_path / 'source', '--out')
    assert prepare(*arguments, tmp_path / 'whole', '--workers', 1) == 0
    (tmp_path / 'whole/train.yaml').unlink()  # names its folder
    whole = {p.name: p.read_bytes() for p in (tmp_path / 'whole').iterdir()}
    reached, limit = set(), resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes in range(0, max(map(len, whole.values())), 70):
        out = tmp_path / str(num_bytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
        try:
            refused = pytest.raises(
                DataError, match='^--out: .*: File too large; the disk at .* free; free'
            )
            with redirect_stdout(io.StringIO()), refused:
                prepare(*arguments, out, '--workers', 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        reached |= {p.name for p in (*out.iterdir(), *(out / '.parts').glob('*/*'))}
        assert prepare(*arguments, out, '--workers', 1) == 0
        assert load_yaml(out / 'train.yaml')['data']['dir'] == str(out)
        assert {p.name: p.read_bytes() for p in out.iterdir() if p.name != 'train.yaml'} == whole
    assert reached >= {'train_00003.json', 'train.rec', 'validation.rec'}, reached


def test_configuration_of_own_images_is_complete_and_that_of_the_user_is_kept(
    pictures, tmp_path, capsys
):
    out = tmp_path / 'my out'
    assert prepare('folder', '--source', pictures, '--out', out) == 0
    assert capsys.readouterr().out.endswith(
        f"next: launch/local.sh --config '{out}/train.yaml' --ranks-per-node 2\n"
    )
    config = resolve_config(out / 'train.yaml', [], config_parser())
    assert (config.data.dir, config.data.dataset, config.run.dir) == (
        str(out),
        'source',
        'logs/source',
    )
    assert (config.data.num_train, config.data.num_val, config.data.num_classes) == (6, 4, 2)
    assert (config.data.image_size, config.data.resize_shorter) == (32, 32)  # of images of 40 x 30
    make_plan(config, 2)
    (out / 'train.yaml').write_text('{}')
    assert (
        prepare('folder', '--source', pictures, '--out', out) == 0
        and (out / 'train.yaml').read_text() == '{}'
    )


@pytest.mark.parametrize(
    'num_train, side, expected',
    [
        (49, 48, (48, 48, 16, 90)),
        (1437, 300, (224, 256, 64, 44)),
        (10**6, 240, (224, 240, 256, 30)),
        (1, 8, (32, 32, 16, 90)),
    ],
)
def test_sizes_and_schedule_of_a_configuration_follow_the_images(num_train, side, expected):
    tree = make_tree(Path('x'), 'x', num_train, side)
    assert (
        tree['data']['image_size'],
        tree['data']['resize_shorter'],
        tree['train']['global_batch_size'],
        tree['schedule']['decay_epochs'],
    ) == expected


def test_folder_called_imagenet_does_not_count_as_imagenet(pictures, tmp_path):
    assert (
        prepare(
            'folder', '--source', pictures.rename(tmp_path / 'imagenet'), '--out', tmp_path / 'out'
        )
        == 0
    )
    assert load_manifest(tmp_path / 'out')['dataset'] == 'folder'


def test_parallel_workers_write_the_same_file(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, 'PART_SIZE', 4)
    for workers in (1, 2):
        prepare(
            'folder', '--source', pictures, '--out', tmp_path / str(workers), '--workers', workers
        )
    for name in ('train.rec', 'train.idx', 'train.index.npy', 'validation.rec'):
        assert (tmp_path / '1' / name).read_bytes() == (tmp_path / '2' / name).read_bytes()


def test_damaged_images_are_listed_and_refused_unless_skipped(pictures, tmp_path):
    victim = pictures / 'train/n02/n02_1.JPEG'
    victim.write_bytes(victim.read_bytes()[:-200])
    arguments = ('folder', '--source', pictures, '--out', tmp_path / 'out')
    with pytest.raises(
        DataError, match=r'1 image cannot be decoded: train/n02/n02_1.JPEG .*--skip-corrupt'
    ):
        prepare(*arguments)
    assert 'train/n02/n02_1.JPEG' in (tmp_path / 'out/damaged.txt').read_text()
    assert prepare(*arguments, '--skip-corrupt') == 0
    assert load_manifest(tmp_path / 'out')['skipped'] == ['train/n02/n02_1.JPEG']
    assert len(contents(tmp_path / 'out', 'train')) == 5


@pytest.mark.parametrize(
    'size, options, message',
    [
        (
            (10_000, 9_000),
            (),
            'got 90,000,000 pixels, expected up to 89,478,485; resize it, as with --resize-shorter',
        ),
        (
            (1, 30_000),
            ('--resize-shorter', '256'),
            'got 1,966,080,000 pixels, expected up to 89,478,485; resize it',
        ),
    ],
)
def test_small_file_of_a_huge_image_is_refused_undecoded(
    pictures, tmp_path, monkeypatch, size, options, message
):
    (pictures / 'train/n01/n01_1.JPEG').write_bytes(encoded('PNG', Image.new('1', size)))
    load, loaded = ImageFile.ImageFile.load, []
    monkeypatch.setattr(
        ImageFile.ImageFile, 'load', lambda image: (loaded.append(image.size), load(image))[1]
    )
    with pytest.raises(
        DataError, match='1 image cannot be decoded: train/n01/n01_1.JPEG .*' + message
    ):
        prepare('folder', '--source', pictures, '--out', tmp_path / 'out', *options)
    assert loaded and size not in loaded


def test_huge_image_is_stored_in_another_size(pictures, tmp_path):
    (pictures / 'train/n01/n01_1.JPEG').write_bytes(encoded('PNG', Image.new('1', (10_000, 9_000))))
    assert (
        prepare('folder', '--source', pictures, '--out', tmp_path / 'out', '--resize-shorter', '9')
        == 0
    )
    assert (10, 9) in {
        Image.open(io.BytesIO(image)).size for _, image in contents(tmp_path / 'out', 'train')
    }


@pytest.mark.parametrize(
    'option, value',
    [
        (option, value)
        for option in ('--resize-shorter', '--workers')
        for value in ('0', '-1', '100000', 'x', '9.5')
    ],
)
def test_number_out_of_range_is_refused(pictures, tmp_path, option, value):
    done = call('prepare', 'folder', '--source', pictures, '--out', tmp_path / 'out', option, value)
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert f'{option}: got {value}, expected a whole number from 1 to ' in done.stderr


@pytest.fixture
def imagenet_tars(tmp_path):
    """Both tar files of ILSVRC2012, with three synsets."""
    inner = {
        f'{s}.tar': tar_of({f'{s}_{i}.JPEG': picture(10 * k + i) for i in range(2)})
        for k, s in enumerate(('n03', 'n01', 'n02'))
    }
    val = {f'ILSVRC2012_val_{i:08d}.JPEG': picture(90 + i) for i in (2, 1, 3)}
    return write_files(
        tmp_path / 'ILSVRC2012',
        {
            'ILSVRC2012_img_train.tar': tar_of(inner),
            'ILSVRC2012_img_val.tar': tar_of(val),
            'truth.txt': b'n02\nn01\nn03\n',
        },
    )


def prepare_imagenet(tars, *options):
    return prepare(
        'imagenet',
        '--source',
        tars,
        '--out',
        tars.parent / 'out',
        '--ground-truth',
        tars / 'truth.txt',
        *options,
    )


def test_imagenet_from_tars(imagenet_tars, tmp_path):
    out = tmp_path / 'out'
    with pytest.raises(
        DataError, match='got 6 training and 3 validation images of 3 classes, expected 1,281,167'
    ):
        prepare_imagenet(imagenet_tars)
    assert prepare_imagenet(imagenet_tars, '--allow-partial') == 0
    # Labels follow the sorted synsets, and the tar files are in the order n03, n01, n02.
    assert contents(out, 'train') == [
        (k, picture(10 * t + i)) for k, t in ((0, 1), (1, 2), (2, 0)) for i in range(2)
    ]
    assert contents(out, 'validation') == [(1, picture(91)), (0, picture(92)), (2, picture(93))]


@pytest.mark.parametrize('name', ['ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'])
def test_compressed_imagenet_tar_is_refused(imagenet_tars, name):
    path = imagenet_tars / name
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(
        DataError, match=rf'{name}: not a readable, uncompressed tar .*; decompress it, pack'
    ):
        prepare_imagenet(imagenet_tars, '--allow-partial')


def headers(*members: tuple) -> bytes:
    """Return members of a tar from names and types; a file contains x."""

    def packed(name, kind=tarfile.REGTYPE):
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, int(kind in (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME))
        return info.tobuf(tarfile.GNU_FORMAT) + (b'x' * info.size).ljust(512 * info.size, b'\0')

    return b''.join(packed(*member) for member in members)


COMPANIONS = headers(
    ('./._n01440764.tar',),
    ('._x.JPEG',),
    ('__MACOSX/n01_0.JPEG',),
    ('LICENSE.txt',),
    ('README',),
    ('more', tarfile.DIRTYPE),
)


def test_entries_of_tars_that_are_no_images_are_not_used(imagenet_tars, capsys):
    long = 'x' * 120  # stored in a member before that of the image
    inner = {
        f'{s}.tar': COMPANIONS + tar_of({f'./{s}/{long}{i}.JPEG': picture(i) for i in range(2)})
        for s in ('n01', 'n02', 'n03')
    }
    for name, files in (('train', inner), ('val', {f'v{i}.JPEG': picture(i) for i in range(3)})):
        content = (COMPANIONS + tar_of(files)).rstrip(b'\0') + bytes(1024)
        padding = 1 << (9 if name == 'val' else 16)  # as of tar -b 1 and tar -b 128
        (imagenet_tars / f'ILSVRC2012_img_{name}.tar').write_bytes(
            content + bytes(-len(content) % padding)
        )
    assert prepare_imagenet(imagenet_tars, '--allow-partial') == 0
    stored = contents(imagenet_tars.parent / 'out', 'train')
    assert stored == [(label, picture(i)) for label in range(3) for i in range(2)]
    assert capsys.readouterr().out.startswith(
        f'{imagenet_tars}/ILSVRC2012_img_train.tar: not used: hidden (12), .txt (4), without '
        'ending (4)\n'
        f'{imagenet_tars}/ILSVRC2012_img_val.tar: not used: hidden (3), .txt (1), without ending '
        '(1)\n'
    )


@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda tar: tar.rstrip(b'\0'), 'end of data|it is cut'),
        (lambda tar: tar[:3000], 'end of data|it is cut'),
        (lambda tar: tar[:2048], 'it is cut'),
        (lambda tar: tar[:2048] + bytes(512) + tar[2560:], 'a hole at byte 2048'),
        (lambda tar: tar[:2048] + b'\xff' * 512 + tar[2560:], 'a hole at byte 2048'),
        (lambda tar: bytes(len(tar)), 'got nothing, expected files'),
        (lambda tar: tar + tar, 'a hole at byte 4096'),
        (lambda tar: tar + bytes(1 << 20), 'a hole at byte 4096'),
        (lambda tar: tar + bytes(10240), 'a hole at byte 4096'),
        (gzip.compress, 'decompress it'),
        (lambda tar: headers(('x.JPEG', tarfile.LNKTYPE)) + tar, 'x.JPEG is a link'),
        (lambda tar: headers(('x.JPEG', tarfile.SYMTYPE)) + tar, 'x.JPEG is a link'),
        (
            lambda tar: headers(('a/i1.JPEG',)) + tar,
            'i1.JPEG is a link, has holes, or is there twice',
        ),
        (lambda tar: headers(*[('x', tarfile.GNUTYPE_LONGNAME)] * 2000) + tar, 'recursion'),
        (lambda tar: headers(('a.txt',)) + tar_of({}), 'got .txt, expected files such as .jpg'),
        (lambda tar: tar_of({}), 'got nothing, expected files'),
    ],
)
@pytest.mark.parametrize('is_class', [True, False])
def test_tar_that_would_lose_images_is_refused(imagenet_tars, is_class, damage, message):
    tar = damage(tar_of({f'i{i}.JPEG': bytes([i + 1]) * 1500 for i in range(2)}))
    name = f'ILSVRC2012_img_{"train" if is_class else "val"}.tar'
    (imagenet_tars / name).write_bytes(
        tar_of({'n01.tar': tar, 'n02.tar': tar}) if is_class else tar
    )
    where = f'imagenet: {imagenet_tars}/{name}: {"n01.tar: " * is_class}'
    with pytest.raises(DataError, match=f'^{where}.*({message})') as e:
        prepare_imagenet(imagenet_tars, '--allow-partial')
    assert '\n' not in str(e.value) and not (imagenet_tars.parent / 'out').exists()


def test_hole_between_nested_tars_is_refused(imagenet_tars):
    path = imagenet_tars / 'ILSVRC2012_img_train.tar'
    content = path.read_bytes()
    starts = [
        i
        for i in range(0, len(content), 512)
        if content[i : i + 7] in (b'n01.tar', b'n02.tar', b'n03.tar')
    ]
    for start in starts:
        path.write_bytes(content[:start] + bytes(512) + content[start + 512 :])
        with pytest.raises(
            DataError, match=rf'img_train.tar: not a readable.* a hole at byte {start}\)'
        ):
            prepare_imagenet(imagenet_tars, '--allow-partial')


@pytest.mark.parametrize(
    'text, message',
    [
        (
            '1\n2\n3\n',
            'got .1., expected a synset such as n01 .the class numbers of the development kit',
        ),
        ('n01\nn02\n', 'got 2 lines, expected 3'),
        (
            'ILSVRC2012_val_00000001.JPEG n01\nILSVRC2012_val_00000002.JPEG n02\nx n03\n',
            "got 'no line'",
        ),
        (
            'n01\nILSVRC2012_val_00000002.JPEG n02\nn03\n',
            'got the line .ILSVRC2012_val_00000002.JPEG n02., expected',
        ),
        ('n01\nn02\nn0\n', "00000003.JPEG: got 'n0'"),
        ('n01\nn02\n\0\0\n', 'got .*expected a synset'),
        ('n01 a b\n' * 3, 'got the line .n01 a b., expected "synset" on each line'),
    ],
)
def test_wrong_ground_truth_is_refused(imagenet_tars, text, message):
    (imagenet_tars / 'truth.txt').write_text(text)
    with pytest.raises(DataError, match=message):
        prepare_imagenet(imagenet_tars, '--allow-partial')


@pytest.mark.parametrize(
    'text',
    [
        'n02\r\nn01\r\nn03',
        '\ufeffn02\n\nn01\nn03\n',
        '\ufeff'
        + ''.join(f'ILSVRC2012_val_0000000{i}.JPEG n0{c}\n' for i, c in ((3, 3), (1, 2), (2, 1))),
    ],
)
def test_ground_truth_of_other_editors_is_read(imagenet_tars, text):
    (imagenet_tars / 'truth.txt').write_text(text, newline='')
    assert prepare_imagenet(imagenet_tars, '--allow-partial') == 0
    assert [label for label, _ in contents(imagenet_tars.parent / 'out', 'validation')] == [1, 0, 2]


def test_imagenet_from_folders_or_a_missing_source(pictures, tmp_path):
    assert (
        prepare('imagenet', '--source', pictures, '--out', tmp_path / 'out', '--allow-partial') == 0
    )
    assert [label for label, _ in contents(tmp_path / 'out', 'validation')] == [0, 0, 1, 1]
    with pytest.raises(DataError, match='expected ILSVRC2012_img_train.tar or train/<synset>/'):
        prepare('imagenet', '--source', tmp_path, '--out', tmp_path / 'none')


# --- CIFAR-10 in both forms -------------------------------------------------------------------

# six files of four images
PIXELS = np.random.default_rng(0).integers(0, 255, (6, 4, 32, 32, 3), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 10, (6, 4))
FILES = [f'data_batch_{i}' for i in range(1, 6)] + ['test_batch']


def as_binary():
    def rows(k):
        planes = PIXELS[k].transpose(0, 3, 1, 2).reshape(4, -1)
        return np.concatenate([LABELS[k][:, None].astype(np.uint8), planes], axis=1).tobytes()

    return {f'{n}.bin': rows(k) for k, n in enumerate(FILES)}


def as_png():
    sheets = samples.from_pixels(PIXELS.reshape(6, 4, 1024, 3), range(6), '')
    return {
        **{f'{n}.png': s.data for n, s in zip(FILES, sheets)},
        'train_lables.json': json.dumps(LABELS[:5].ravel().tolist()).encode(),
        'test_lables.json': json.dumps(LABELS[5].tolist()).encode(),
    }


@pytest.mark.parametrize(
    'form, is_archive', [(as_binary, True), (as_png, False)], ids=['archive-as_binary', 'as_png']
)
def test_cifar10_in_every_form(tmp_path, form, is_archive):
    source = write_files(tmp_path / 'source', form())
    if is_archive:
        source = tmp_path / 'cifar.tar.gz'
        source.write_bytes(
            gzip.compress(tar_of({f'cifar-10/{name}': content for name, content in form().items()}))
        )
    data = cifar10(source)
    assert [s.label for s in data.train] == LABELS[:5].ravel().tolist()
    decoded = np.stack(
        [np.asarray(Image.open(io.BytesIO(s.read()))) for s in data.train + data.validation]
    )
    np.testing.assert_array_equal(decoded, PIXELS.reshape(-1, 32, 32, 3))


def test_missing_batch_is_named(tmp_path):
    files = as_binary()
    del files['data_batch_4.bin']
    write_files(tmp_path, files)
    with pytest.raises(DataError, match='data_batch_4.*use cifar-10-binary.tar.gz'):
        cifar10(tmp_path)


def test_two_different_files_of_a_batch_are_refused(tmp_path):
    write_files(tmp_path, as_binary())
    old = write_files(tmp_path / 'old', {'data_batch_2.bin': as_binary()['data_batch_2.bin']})
    assert cifar10(tmp_path)
    (old / 'data_batch_2.bin').write_bytes(as_binary()['data_batch_3.bin'])
    with pytest.raises(DataError, match='two different files data_batch_2.bin'):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    'form, name, change, message',
    [
        (as_binary, 'data_batch_3.bin', lambda c: c[: 2 * 3073], 'must have the same shape'),
        (as_binary, 'test_batch.bin', lambda c: c[:5000], 'ValueError'),
        (as_binary, 'test_batch.bin', lambda c: b'', 'must have the same shape'),
        (
            as_binary,
            'data_batch_1.bin',
            lambda c: b'\xff' + c[1:],
            'expected one each, from 0 to 9',
        ),
        (as_png, 'train_lables.json', lambda c: c[:20], 'JSONDecodeError'),
        (as_png, 'data_batch_2.png', lambda c: c[:300], ''),
        (
            as_png,
            'train_lables.json',
            lambda c: json.dumps([1] * 18).encode(),
            'must have the same shape',
        ),
        (as_png, 'test_lables.json', lambda c: b'[1, 2, 3]', 'must have the same shape'),
        (as_png, 'test_lables.json', lambda c: b'[0, 1, 2, "x"]', 'from 0 to 9'),
        (as_png, 'test_lables.json', bytes, 'JSON'),
        (as_png, 'test_lables.json', lambda c: b'{"a": 1}', ''),
        (as_png, 'test_batch.png', bytes, 'Error'),
    ],
)
def test_cifar10_that_ends_early_is_refused(tmp_path, form, name, change, message):
    source = write_files(tmp_path / 'source', form())
    content = (source / name).read_bytes()
    (source / name).write_bytes(bytes(len(content)) if change is bytes else change(content))
    with pytest.raises(
        DataError, match=f'cifar10: {source}: .*{message}.*; use cifar-10-binary'
    ) as e:
        cifar10(source)
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
def test_archive_that_cannot_be_read_is_one_line(tmp_path, dataset, make):
    source = tmp_path / 'source'
    source.mkdir()
    archive = source / 'ILSVRC2012_img_train.tar'
    make(archive)
    done = call(
        'prepare',
        dataset,
        '--source',
        archive if dataset == 'cifar10' else source,
        '--out',
        tmp_path / 'out',
    )
    assert (done.returncode, done.stderr.count('\n')) == (2, 1) and str(archive) in done.stderr, (
        done.stderr
    )
    assert not (tmp_path / 'out').exists()


def test_image_that_becomes_unreadable_is_not_damaged(pictures, tmp_path, monkeypatch):
    read = samples.open_regular

    def fail(path):
        if path.endswith('n02_1.JPEG'):
            raise OSError(5, 'Input/output error', path)
        return read(path)

    monkeypatch.setattr(samples, 'open_regular', fail)
    with pytest.raises(
        DataError,
        match='train/n02/n02_1.JPEG: Input/output error; repair it, and run prepare again',
    ):
        prepare('folder', '--source', pictures, '--out', tmp_path / 'out', '--skip-corrupt')
