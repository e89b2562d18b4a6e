"""Files that prepare finds in --out, resumed preparations, damaged images, and what counts as
prepared: nothing of the user is replaced or stays old."""

import io
import json
import os
import resource
import shutil
from contextlib import redirect_stdout, suppress

import pytest
from helpers import call
from numbered import encoded
from PIL import Image, ImageFile
from prepared import bitmap, fill, greys, prepare, shown, stored

from mlperf_rn50.config_file import load_yaml
from mlperf_rn50.data import images
from mlperf_rn50.data.prepare import pack, samples
from mlperf_rn50.data.prepare.samples import Sample
from mlperf_rn50.data.recordio import RecordFile, load_manifest
from mlperf_rn50.data.verify import dump_manifest, verify
from mlperf_rn50.errors import DataError, UserError
from mlperf_rn50.runfolder.locks import OUTPUT_LOCK, folder_lock

WHOLE = [(0, 0), (0, 1), (0, 2), (1, 10), (1, 11), (1, 12)]


@pytest.fixture
def source(tmp_path):
    """Folder with the classes a (grey 0 to 2, in validation 3) and b (10 to 12, 13)."""
    places = [('train', 0), ('train', 1), ('train', 2), ('val', 3)]
    files = {f'{s}/{c}/{i}.bmp': bitmap(10 * k + i) for k, c in enumerate('ab') for s, i in places}
    return fill(tmp_path / 'source', files)


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


@pytest.fixture
def words(source, out):
    return 'folder', '--source', source, '--out', out


# --- files of the user


@pytest.mark.parametrize('is_link', [False, True], ids=['file', 'dangling link'])
@pytest.mark.parametrize(
    'name',
    'train.rec validation.idx train.index.npy validation.crc.npy train.names.txt manifest.json '
    'damaged.txt train.yaml .parts .parts/notes.txt'.split()
    + [f'.parts/{"a" * 64}/mine.rec', f'.parts/{"a" * 64}', OUTPUT_LOCK],
)
def test_file_that_prepare_did_not_write_is_refused(words, out, tmp_path, name, is_link):
    path = out / name
    path.parent.mkdir(parents=True)
    if is_link:
        path.symlink_to(tmp_path / 'nothing')
    else:
        path.write_bytes(b'precious')
    before = sorted(out.rglob('*'))
    with pytest.raises(UserError) as error:
        prepare(*words)
    assert str(path) in str(error.value) or name == OUTPUT_LOCK and is_link, error.value
    assert sorted(out.rglob('*')) == before
    assert is_link and not (tmp_path / 'nothing').exists() or path.read_bytes() == b'precious'


def edit_manifest(out, **values):
    manifest = load_manifest(out)
    (out / 'manifest.json').write_text(json.dumps(manifest | values))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda out: os.truncate(out / 'train.rec', 100), 'train.rec: got 100 bytes, .*; copy the'),
        (lambda out: (out / 'train.rec').unlink(), 'train.rec: missing, expected as listed in'),
        (lambda out: (out / 'validation.crc.npy').unlink(), 'validation.crc.npy: missing'),
        (lambda out: edit_manifest(out, classes=['b', 'a']), 'does not match its own SHA-256'),
        (lambda out: edit_manifest(out, skipped=7), 'manifest.json: not a manifest'),
    ],
)
def test_damaged_data_of_prepare_are_refused_and_not_replaced(words, out, change, message):
    assert prepare(*words) == 0
    change(out)
    before = {p: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(UserError, match=message):
        prepare(*words)
    assert {p: p.read_bytes() for p in out.iterdir()} == before


def test_stop_between_any_two_files_is_resumed(words, out, monkeypatch):
    link, reached = os.link, set()
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
        assert greys(out) == WHOLE
        shutil.rmtree(out)
    assert reached == {*range(12)}


def test_disk_without_hard_links_is_used(words, source, out, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', refuse)
    damaged = source / 'train/b/1.bmp'
    damaged.write_bytes(bitmap(11)[:-9])
    for _ in range(2):
        with pytest.raises(DataError, match='--skip-corrupt'):
            prepare(*words)
    damaged.write_bytes(bitmap(11))
    assert prepare(*words) == prepare(*words) == 0 and verify(out, 1)[1] == []


def test_second_preparation_of_a_folder_and_its_verification_are_refused_meanwhile(words, out):
    in_use = rf'out is in use by process {os.getpid()} on '
    with folder_lock(out, '--out', OUTPUT_LOCK):
        for others in (words, ('digits', '--out', out)):
            with pytest.raises(UserError, match=f'{in_use}.*; wait for it'):
                prepare(*others)
        (out / 'manifest.json').touch()
        with pytest.raises(UserError, match=f'--verify: .*{in_use}'):
            verify(out, 1)
        (out / 'manifest.json').unlink()
    assert not out.exists() and prepare(*words) == 0 and not (out / OUTPUT_LOCK).exists()


# --- interruptions and failures


@pytest.mark.parametrize(
    'pattern, change, options, num_kept',
    [
        ('out/.parts/*/train.rec', lambda rec: rec + b'part of a record', (), 4),
        ('out/.parts/*/train.rec', lambda rec: rec.replace(bitmap(1), bitmap(7)), (), 0),
        ('out/.parts/*/train.rec', lambda rec: rec[:-1], (), 2),
        ('out/.parts/*/train_00001.json', lambda _: b'[1]', (), 2),
        ('out/.parts/*/train_00000.json', lambda _: b'', (), 0),
        ('out/.parts/*/train_00000.json', lambda x: x.replace(b'"sizes":', b'"old":'), (), 0),
        ('source/train/a/2.bmp', lambda _: bitmap(77), (), 2),
        ('source/train/a/2.bmp', bytes, ('--resize-shorter', 2), 0),
    ],
    ids=['more', 'image', 'cut', 'no-part', 'no-list', 'no-sizes', 'source', 'options'],
)
def test_interrupted_preparation_resumes_with_its_whole_parts(
    words, out, tmp_path, monkeypatch, pattern, change, options, num_kept
):
    """It is interrupted after the first two of its parts of two images."""
    monkeypatch.setattr(pack, 'PART_SIZE', 2)
    names, make_record = [], pack.make_record

    def stop_at_fifth(sample, *rest):
        names.append(sample.name)
        if len(names) == 5:
            raise KeyboardInterrupt
        return make_record(sample, *rest)

    monkeypatch.setattr(pack, 'make_record', stop_at_fifth)
    with pytest.raises(KeyboardInterrupt):
        prepare(*words)
    assert not (out / 'manifest.json').exists()
    (path,) = tmp_path.glob(pattern)
    path.write_bytes(change(path.read_bytes()))
    names[:] = [''] * 5
    assert prepare(*words, *options) == 0
    assert len(names[5:]) == len({*names[5:]}) == 8 - num_kept
    changed = shown((tmp_path / 'source/train/a/2.bmp').read_bytes())[0, 0, 0]
    assert greys(out) == [*WHOLE[:2], (0, changed), *WHOLE[3:]]
    assert {shown(image).shape[0] for _, image in stored(out)} == {2 if options else 4}
    assert verify(out, 1)[1] == [] and not (out / '.parts').exists()


def test_failed_write_in_any_file_is_one_line_and_the_next_attempt_completes_the_data(
    words, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(pack, 'PART_SIZE', 2)
    for path in source.rglob('*.bmp'):  # records are smaller than the manifest
        path.write_bytes(encoded('PNG', Image.new('L', (1, 1))))

    def written(out):
        assert prepare(*words[:-1], out) == 0
        config = out / 'train.yaml'  # names its folder
        assert load_yaml(config)['data']['dir'] == str(out)
        config.unlink()
        return {p.name: p.read_bytes() for p in out.iterdir()}

    whole, reached = written(tmp_path / 'whole'), set()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes in range(0, max(map(len, whole.values())), 70):
        out = tmp_path / str(num_bytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
        message = '^--out: .*: File too large; the disk at .* free; free'
        try:
            with redirect_stdout(io.StringIO()), pytest.raises(DataError, match=message):
                prepare(*words[:-1], out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        reached |= {p.name for p in (*out.iterdir(), *(out / '.parts').glob('*/*'))}
        assert written(out) == whole
    assert reached >= {'train_00002.json', 'train.rec', 'validation.rec'}, reached


def test_parallel_workers_write_the_same_file(words, out, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, 'PART_SIZE', 4)
    for workers in (1, 2):
        prepare(*words[:-1], tmp_path / str(workers), '--workers', workers)
    for name in ('train.rec', 'train.idx', 'train.index.npy', 'validation.rec'):
        assert (tmp_path / '1' / name).read_bytes() == (tmp_path / '2' / name).read_bytes()


# --- damaged and huge images


def test_damaged_images_are_listed_and_refused_unless_skipped_or_repaired(words, source, out):
    for name in ('1', '2'):
        (source / f'train/b/{name}.bmp').write_bytes(bitmap(11)[:-9])
        with pytest.raises(DataError, match=r' cannot be decoded: train/b/1.bmp .*--skip-corrupt'):
            prepare(*words)
        assert f'train/b/{name}.bmp' in (out / 'damaged.txt').read_text()
    (source / 'train/b/1.bmp').write_bytes(bitmap(99))
    assert prepare(*words, '--skip-corrupt') == 0
    assert greys(out) == [*WHOLE[:4], (1, 99)] and not (out / 'damaged.txt').exists()
    assert load_manifest(out)['skipped'] == ['train/b/2.bmp']
    records = RecordFile(out / 'train.rec')
    assert records.describe(4) == f'{out}/train.rec, record 4, from train/b/1.bmp'
    assert records.describe(5) == f'{out}/train.rec, record 5'


@pytest.mark.parametrize('split, names', [('train', '012'), ('val', '3')])
def test_class_of_damaged_images_only_is_refused(words, source, split, names):
    for name in names:
        (source / split / f'b/{name}.bmp').write_bytes(bitmap(11)[:-9])
    with pytest.raises(DataError, match='got only damaged images of b, expected one or more'):
        prepare(*words, '--skip-corrupt')


def test_failed_start_of_dali_is_no_fault_of_an_image(words, monkeypatch):
    def refuse(*_):
        raise RuntimeError('thread constructor failed: Resource temporarily unavailable')

    monkeypatch.setattr('nvidia.dali.pipeline.Pipeline.build', refuse)
    with pytest.raises(DataError, match='DALI cannot start: no process or thread'):
        prepare(*words, '--skip-corrupt')


@pytest.mark.parametrize(
    'size, options, num_pixels, advice',
    [
        ((10_000, 9_000), (), '90,000,000', 'resize it, as with'),
        ((1, 30_000), (), '1,966,080,000', 'replace it'),
        ((1, 30_000), ('--resize-shorter', 256), '1,966,080,000', 'replace it'),
    ],
)
def test_small_file_of_a_huge_image_is_refused_undecoded(
    words, source, out, monkeypatch, size, options, num_pixels, advice
):
    (source / 'train/a/1.bmp').write_bytes(encoded('PNG', Image.new('1', size)))
    load, loaded = ImageFile.ImageFile.load, []
    monkeypatch.setattr(
        ImageFile.ImageFile, 'load', lambda image: (loaded.append(image.size), load(image))[1]
    )
    message = f'a/1.bmp .*got {num_pixels} pixels, expected up to 89,478,485; {advice}'
    with pytest.raises(DataError, match=message):
        prepare(*words, *options)
    assert loaded and size not in loaded
    if size == (10_000, 9_000):
        assert prepare(*words, '--resize-shorter', '9') == 0
        assert (9, 10, 3) in {shown(image).shape for _, image in stored(out)}


def test_damaged_image_is_tried_again_when_prepare_is_repeated(words, out, monkeypatch):
    encode = images.encode_image

    def lack_a_codec(encoded, *rest, **keys):
        if encoded == bitmap(11):
            raise OSError('decoder avif not available')
        return encode(encoded, *rest, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(images, 'encode_image', lack_a_codec)
        for _ in range(2):
            with pytest.raises(DataError, match='b/1.bmp .*decoder avif not available'):
                prepare(*words)
    assert prepare(*words) == 0 and greys(out) == WHOLE
    assert not load_manifest(out)['skipped']


def test_image_that_becomes_unreadable_is_not_damaged(words, monkeypatch):
    read = samples.open_regular

    def fail(path):
        if path.endswith('b/1.bmp'):
            raise OSError(5, 'Input/output error', path)
        return read(path)

    monkeypatch.setattr(samples, 'open_regular', fail)
    with pytest.raises(DataError, match='train/b/1.bmp: Input/output error; repair it, and run'):
        prepare(*words, '--skip-corrupt')


# --- what is already prepared


def test_second_preparation_changes_nothing(words, source, out, capsys):
    assert prepare(*words) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert prepare(*words) == 0 and capsys.readouterr().out == (
        f'{out}: source is already prepared; to prepare it again, use another --out\n'
        f'next: launch/local.sh --config {out}/train.yaml --ranks-per-node 2\n'
    )
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(DataError, match='contains source, expected digits; use a new folder'):
        prepare('digits', '--out', out)
    shutil.copy(source / 'train/a/0.bmp', source / 'train/a/more.png')
    with pytest.raises(DataError, match=r'got \[7, 2\] images of 2 classes, expected \[6, 2\]'):
        prepare(*words)
    shutil.rmtree(source)
    assert prepare(*words) == 0


def change_image(source):
    path = source / 'train/a/1.bmp'
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(bitmap(55))
    os.utime(path, ns=times)


def test_other_size_of_images_without_a_source_is_not_already_prepared(out):
    assert prepare('digits', '--out', out) == prepare('digits', '--out', out) == 0
    with pytest.raises(DataError, match='--resize-shorter'):
        prepare('digits', '--out', out, '--resize-shorter', 4)


def test_images_are_read_again_only_if_a_file_has_changed(words, source, tmp_path, monkeypatch):
    assert prepare(*words) == 0
    read, names = Sample.read, []
    monkeypatch.setattr(Sample, 'read', lambda sample: names.append(sample.name) or read(sample))
    assert prepare(*words) == 0 and names == []
    source.rename(tmp_path / 'old')
    shutil.copytree(tmp_path / 'old', source)
    assert prepare(*words) == 0 and len(names) == 8


def test_change_in_a_class_whose_name_ends_like_a_folder_of_parts_is_found(words, source):
    for split in ('train', 'val'):
        (source / split / 'a').rename(source / split / 'a.parts')
    assert prepare(*words) == 0
    shutil.copy(source / 'train/b/0.bmp', source / 'train/a.parts/more.bmp')
    with pytest.raises(DataError, match=r'got \[7, 2\] images'):
        prepare(*words)


def test_manifest_of_an_earlier_version_is_compared_by_numbers(words, source, out):
    assert prepare(*words) == 0
    manifest = {k: v for k, v in load_manifest(out).items() if not k.startswith('source_')}
    dump_manifest(out, manifest)
    change_image(source)
    assert prepare(*words) == 0
    (source / 'train/a/1.bmp').unlink()
    with pytest.raises(DataError, match=r'got \[5, 2\] images'):
        prepare(*words)


def test_names_do_not_control_the_terminal(words, source):
    for split in ('train', 'val'):
        (source / split / 'b').rename(source / split / '\x1b]0;PWNED\x07\x1b[31mred')
        (source / split / 'x\x9b1m.txt').touch()
    for word in ('?]0;PWNED??[31mred', 'is already prepared'):
        done = call('prepare', *words)
        assert done.returncode == 0 and word in done.stdout
        assert not {'\x1b', '\x07', '\x9b'} & {*done.stdout, *done.stderr}


def test_folder_with_data_and_its_source_is_not_recommended_for_removal(source, capsys):
    words = 'folder', '--source', source, '--out', source
    assert prepare(*words) == prepare(*words) == 0
    assert 'is already prepared' in (text := capsys.readouterr().out) and 'remove' not in text
