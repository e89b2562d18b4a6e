"""Files that prepare finds in --out, and what counts as prepared: nothing of the user is replaced
or stays old."""

import io
import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
from helpers import call
from numbered import encoded, tar_of
from PIL import Image

from mlperf_rn50.cli.prepare import make_parser
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.prepare import command, pack
from mlperf_rn50.data.prepare.samples import Sample
from mlperf_rn50.data.records import RecordFile, data_digest, load_manifest
from mlperf_rn50.data.verify import verify
from mlperf_rn50.errors import DataError, UserError
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock


def bitmap(grey) -> bytes:
    """Return an image of 4 x 4 pixels; all have the same size in bytes."""
    return encoded('BMP', Image.new('L', (4, 4), grey))


def prepare(*arguments) -> int:
    return command.prepare(make_parser().parse_args([*map(str, arguments), '--workers', '1']))


def greys(folder, split='train'):
    """Return label and grey of each record."""
    records = RecordFile(folder / f'{split}.rec')
    return [
        (r.label, int(np.asarray(Image.open(io.BytesIO(r.image.tobytes())))[0, 0]))
        for r in map(records.read, range(len(records)))
    ]


@pytest.fixture
def source(tmp_path):
    """Folder with the classes a (grey 0 to 2, in validation 3) and b (10 to 12, 13)."""
    for k, name in enumerate('ab'):
        for split, values in (('train', range(3)), ('val', [3])):
            folder = tmp_path / 'source' / split / name
            folder.mkdir(parents=True)
            for i in values:
                (folder / f'{i}.bmp').write_bytes(bitmap(10 * k + i))
    return tmp_path / 'source'


@pytest.fixture
def words(source, tmp_path):
    return 'folder', '--source', source, '--out', tmp_path / 'out'


@pytest.fixture
def interrupted(words, tmp_path, monkeypatch):
    """Interrupt a preparation after the first two of its parts of two images. Return a function
    that resumes it."""
    monkeypatch.setattr(pack, 'PART_SIZE', 2)
    make_record, calls = pack.make_record, []

    def stop_at_fifth(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return make_record(*arguments)

    def start(*arguments):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pack, 'make_record', stop_at_fifth)
            prepare(*(arguments or words))
        assert [*tmp_path.glob('out/.parts/*/train_00001.json')]

    return start


# --- files of the user
# -------------------------------------------------------------------------------------------

FOREIGN = [
    'train.rec',
    'validation.idx',
    'train.index.npy',
    'validation.crc.npy',
    'train.names.txt',
    'manifest.json',
    'damaged.txt',
    'train.yaml',
    '.parts',
    '.parts/notes.txt',
    '.parts/' + 'a' * 64 + '/mine.rec',
    OUTPUT_LOCK,
]


@pytest.mark.parametrize('is_link', [False, True], ids=['file', 'dangling link'])
@pytest.mark.parametrize('name', FOREIGN)
def test_file_that_prepare_did_not_write_is_refused(words, tmp_path, name, is_link):
    path = tmp_path / 'out' / name
    path.parent.mkdir(parents=True)
    if is_link:
        path.symlink_to(tmp_path / 'nothing')
    else:
        path.write_bytes(b'precious')
    before = sorted((tmp_path / 'out').rglob('*'))
    with pytest.raises(UserError) as error:
        prepare(*words)
    assert str(path) in str(error.value) or name == OUTPUT_LOCK and is_link, error.value
    assert sorted((tmp_path / 'out').rglob('*')) == before
    assert is_link and not (tmp_path / 'nothing').exists() or path.read_bytes() == b'precious'


def test_complete_and_damaged_data_of_prepare_are_not_replaced(words, tmp_path):
    assert prepare(*words) == 0
    os.truncate(tmp_path / 'out/train.rec', 100)
    with pytest.raises(
        UserError, match='train.rec: got 100 bytes, expected .*; copy the folder from an'
    ):
        prepare(*words)
    assert (tmp_path / 'out/train.rec').stat().st_size == 100


def test_stop_between_any_two_files_is_resumed(words, tmp_path, monkeypatch):
    link, out, reached = os.link, tmp_path / 'out', set()
    for num_files in range(12):
        left = iter(range(num_files))

        def stop(*paths, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            link(*paths)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, 'link', stop)
            prepare(*words)
        reached.add(len([*out.glob('*.*')]) - 1)
        assert prepare(*words) == 0 and verify(out, 1)[1] == [] and not (out / '.parts').exists()
        assert greys(out) == [(0, 0), (0, 1), (0, 2), (1, 10), (1, 11), (1, 12)]
        shutil.rmtree(out)
    assert reached == {*range(12)}


def test_disk_without_hard_links_is_used(words, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', refuse)
    assert prepare(*words) == prepare(*words) == 0 and verify(tmp_path / 'out', 1)[1] == []


def test_list_of_damaged_images_is_replaced_when_they_are_repaired(words, source, tmp_path):
    (source / 'train/b/1.bmp').write_bytes(b'damaged')
    for _ in range(2):
        with pytest.raises(DataError, match='1 image cannot be decoded: train/b/1.bmp'):
            prepare(*words)
        assert 'train/b/1.bmp' in (tmp_path / 'out/damaged.txt').read_text()
    (source / 'train/b/1.bmp').write_bytes(bitmap(99))
    assert prepare(*words) == 0 and (1, 99) in greys(tmp_path / 'out')
    assert not (tmp_path / 'out/damaged.txt').exists()


def test_second_preparation_of_a_folder_and_its_verification_are_refused_meanwhile(words, tmp_path):
    out = tmp_path / 'out'
    with folder_lock(out, '--out', OUTPUT_LOCK):
        for others in (words, ('digits', '--out', out)):
            with pytest.raises(
                UserError, match=rf'out is in use by process {os.getpid()} on .*; wait for it'
            ):
                prepare(*others)
        (out / 'manifest.json').touch()
        with pytest.raises(
            UserError, match=rf'--verify: .*out is in use by process {os.getpid()} on '
        ):
            verify(out, 1)
        (out / 'manifest.json').unlink()
    assert not out.exists() and prepare(*words) == 0 and not (out / OUTPUT_LOCK).exists()


# --- images of a resumed preparation
# -----------------------------------------------------------------------------


def test_replaced_images_of_equal_size_are_packed_again(words, source, interrupted, tmp_path):
    interrupted()
    (source / 'train/a/2.bmp').write_bytes(bitmap(77))
    assert prepare(*words) == 0
    assert greys(tmp_path / 'out') == [(0, 0), (0, 1), (0, 77), (1, 10), (1, 11), (1, 12)]
    assert verify(tmp_path / 'out', 1)[1] == []


def write_tars(folder, grey):
    folder.mkdir(exist_ok=True)
    (folder / 'ILSVRC2012_img_train.tar').write_bytes(
        tar_of(
            {
                f'n{k}.tar': tar_of({f'n{k}_{i}.JPEG': bitmap(grey + 10 * k + i) for i in range(3)})
                for k in range(2)
            }
        )
    )
    (folder / 'ILSVRC2012_img_val.tar').write_bytes(tar_of({'v.JPEG': bitmap(9)}))
    (folder / 'truth.txt').write_text('n1\n')


@pytest.mark.parametrize('is_complete', [False, True])
def test_replaced_images_in_a_tar_of_equal_size_are_noticed(tmp_path, interrupted, is_complete):
    write_tars(tmp_path / 'tars', 0)
    words = (
        'imagenet',
        '--source',
        tmp_path / 'tars',
        '--out',
        tmp_path / 'out',
        '--allow-partial',
        '--ground-truth',
        tmp_path / 'tars/truth.txt',
    )
    if is_complete:
        assert prepare(*words) == prepare(*words) == 0
    else:
        interrupted(*words)
    write_tars(tmp_path / 'tars', 100)
    if is_complete:
        with pytest.raises(DataError, match='--source: got other images'):
            prepare(*words)
    else:
        assert prepare(*words) == 0 and min(grey for _, grey in greys(tmp_path / 'out')) == 100


# --- what is already prepared
# ------------------------------------------------------------------------------------


def swap_classes(source):
    for split in ('train', 'val'):
        (source / split / 'a').rename(source / split / 'c')
        (source / split / 'b').rename(source / split / 'a')
        (source / split / 'c').rename(source / split / 'b')


def change_image(source):
    path = source / 'train/a/1.bmp'
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(bitmap(55))
    os.utime(path, ns=times)


@pytest.mark.parametrize(
    'change',
    [
        swap_classes,
        change_image,
        lambda source: (source / 'train/b/2.bmp').rename(source / 'train/b/9.bmp'),
    ],
    ids=['classes', 'image', 'name'],
)
def test_changed_source_is_not_already_prepared(words, source, change):
    assert prepare(*words) == 0
    change(source)
    with pytest.raises(
        DataError,
        match='--source: got other images, names, labels or --resize-shorter than those in',
    ):
        prepare(*words)


def test_other_size_is_not_already_prepared(words):
    assert prepare(*words) == 0
    with pytest.raises(DataError, match='--resize-shorter'):
        prepare(*words, '--resize-shorter', 2)


def test_images_are_read_again_only_if_a_file_has_changed(words, source, tmp_path, monkeypatch):
    assert prepare(*words) == 0
    read, names = Sample.read, []
    monkeypatch.setattr(Sample, 'read', lambda sample: names.append(sample.name) or read(sample))
    assert prepare(*words) == 0 and names == []
    source.rename(tmp_path / 'old')
    shutil.copytree(tmp_path / 'old', source)
    assert prepare(*words) == 0 and len(names) == 8


def test_manifest_of_an_earlier_version_is_compared_by_numbers(words, source, tmp_path):
    assert prepare(*words) == 0
    manifest = {
        k: v for k, v in load_manifest(tmp_path / 'out').items() if not k.startswith('source_')
    }
    pack.dump_manifest(tmp_path / 'out', manifest)
    change_image(source)
    assert prepare(*words) == 0
    (source / 'train/a/1.bmp').unlink()
    with pytest.raises(DataError, match=r'got \[5, 2\] images'):
        prepare(*words)


def test_records_of_im2rec_are_not_read_again_in_their_own_folder(words, tmp_path, monkeypatch):
    assert prepare(*words) == 0
    (tmp_path / 'records').mkdir()
    for suffix in ('.rec', '.idx'):
        shutil.copy(tmp_path / f'out/train{suffix}', tmp_path / 'records')
        shutil.copy(tmp_path / f'out/validation{suffix}', tmp_path / f'records/val{suffix}')
    again = 'im2rec', '--source', tmp_path / 'records', '--out', tmp_path / 'records'
    before = {p: p.read_bytes() for p in (tmp_path / 'records').iterdir()}
    assert prepare(*again) == 0 and {p: p.read_bytes() for p in before} == before
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, 'read', None)
        assert prepare(*again) == 0
    (tmp_path / 'records/val.idx').touch()
    assert prepare(*again) == 0  # a link to val.rec is not another file of records
    (tmp_path / 'records/val.rec').write_bytes(
        before[tmp_path / 'records/val.rec'][:-64] + bytes(64)
    )
    with pytest.raises(DataError):
        prepare(*again)


def test_names_do_not_control_the_terminal(source, tmp_path):
    for split in ('train', 'val'):
        (source / split / 'b').rename(source / split / '\x1b]0;PWNED\x07\x1b[31mred')
        (source / split / 'x\x9b1m.txt').touch()
    for word in ('?]0;PWNED??[31mred', 'x?[1m is already prepared'):
        done = call(
            'prepare', 'folder', '--source', source, '--out', tmp_path / 'out', '--name', 'x\x1b[1m'
        )
        assert done.returncode == 0 and word in done.stdout
        assert not {'\x1b', '\x07', '\x9b'} & {*done.stdout, *done.stderr}


def test_other_size_of_images_without_a_source_is_not_already_prepared(tmp_path):
    words = 'digits', '--out', tmp_path / 'out'
    assert prepare(*words) == prepare(*words) == 0
    with pytest.raises(DataError, match='--resize-shorter'):
        prepare(*words, '--resize-shorter', 4)


def test_copies_of_a_source_give_the_same_data(words, source, tmp_path):
    """The doctor compares the data of hosts, each of which may have prepared its own copy."""
    copy = shutil.copytree(source, tmp_path / 'copy/source')
    assert prepare(*words) == prepare('folder', '--source', copy, '--out', tmp_path / 'other') == 0
    assert (
        len({data_digest(DataConfig(dir=str(tmp_path / name))) for name in ('out', 'other')}) == 1
    )
    assert len({(tmp_path / name / 'manifest.json').read_bytes() for name in ('out', 'other')}) == 2


@pytest.mark.parametrize(
    'name', ['train.rec', 'train.idx', 'validation.crc.npy', 'train.names.txt']
)
def test_prepared_data_without_one_of_its_files_is_not_called_prepared(source, tmp_path, name):
    words = 'folder', '--source', source, '--out', tmp_path / 'out'
    assert prepare(*words) == 0
    (tmp_path / 'out' / name).unlink()
    with pytest.raises(DataError, match=f'{name}: missing, expected as listed in manifest.json'):
        prepare(*words)


@pytest.mark.parametrize(
    'path, damage',
    [
        ('train.rec', lambda content: content.replace(bitmap(1), bitmap(7))),
        ('train.rec', lambda content: content[:-1]),
        ('train_00000.json', lambda content: b''),
        ('train_00000.json', lambda content: content.replace(b'"sizes":[', b'"old":[')),
    ],
    ids=['image', 'cut', 'no-list', 'no-sizes'],
)
def test_parts_that_have_changed_since_are_packed_again(words, tmp_path, interrupted, path, damage):
    interrupted()
    (part,) = tmp_path.glob(f'out/.parts/*/{path}')
    content = part.read_bytes()
    part.write_bytes(damage(content))
    assert part.read_bytes() != content
    assert prepare(*words) == 0 and greys(tmp_path / 'out') == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 10),
        (1, 11),
        (1, 12),
    ]
    assert verify(tmp_path / 'out', 1)[1] == []


@pytest.mark.parametrize(
    'edit',
    [lambda m: m['classes'].reverse(), lambda m: m.update(skipped=7)],
    ids=['classes', 'skipped'],
)
def test_edited_manifest_is_not_called_prepared(words, tmp_path, edit):
    assert prepare(*words) == 0
    manifest = load_manifest(tmp_path / 'out')
    edit(manifest)
    (tmp_path / 'out/manifest.json').write_text(json.dumps(manifest))
    with pytest.raises(
        DataError, match='manifest.json: (does not match its own SHA-256|not a manifest)'
    ):
        prepare(*words)


def test_folder_with_data_and_its_source_is_not_recommended_for_removal(source, capsys):
    words = 'folder', '--source', source, '--out', source
    assert prepare(*words) == prepare(*words) == 0
    assert 'is already prepared' in (text := capsys.readouterr().out) and 'remove' not in text
