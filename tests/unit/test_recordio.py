"""Reads of intact and damaged RecordIO files."""

import errno
import io
import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import HANG_LIMIT_S
from numbered import make_config, ramp, write_records

from mlperf_rn50.data import recordio
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.recordio import (
    INDEX,
    MAGIC,
    Record,
    RecordCache,
    RecordFile,
    class_names,
    data_digest,
    find_split,
    load_manifest,
    pack_record,
    parse_index,
)
from mlperf_rn50.data.verify import verify
from mlperf_rn50.errors import DataError, StorageError


def write(folder: Path, payloads, labels=None) -> Path:
    numbers = range(len(payloads))
    return write_records(
        folder / 'train.rec', payloads, labels or numbers, numbers, [100 + i for i in numbers]
    )


PAYLOADS = [b'a' * 40, b'b' * 40, b'c' * 40]


def read_all(path: Path):
    """Return the payload, the label and the number of each sample."""
    records = RecordFile(path)
    return [
        (r.image.tobytes(), r.label, r.sample_id) for r in map(records.read, range(len(records)))
    ]


def test_split_payload_is_joined_and_the_first_of_several_labels_counts(tmp_path):
    payload = b'abcd' + MAGIC + b'efgh' + MAGIC + b'ij'
    path = write(tmp_path, [b'x', payload, b'y'], labels=[0, 1, np.array([7.0, 1.0, 2.0])])
    assert path.read_bytes().count(MAGIC) > 3  # written in parts
    assert read_all(path) == [(b'x', 0, 100), (payload, 1, 101), (b'y', 7, 102)]


def test_packed_record_has_the_bytes_of_mxnet(tmp_path):
    parts = b'abcd' + MAGIC
    payloads = [
        b'',
        b'x',
        MAGIC,
        MAGIC * 3,
        parts + b'ij',
        b'ab' + MAGIC,
        MAGIC[:3],
        b'abcd' * 9 + parts,
    ]
    packed = b''.join(pack_record(i, 100 + i, payload) for i, payload in enumerate(payloads))
    assert write(tmp_path, payloads).read_bytes() == packed


@pytest.mark.parametrize(
    'end, damage, message',
    [
        ('.rec', lambda c: c[:-8], 'not a RecordIO record|truncated|do not match'),
        ('.rec', lambda c: bytes(len(c)), 'not a RecordIO record'),
        ('.rec', lambda c: c[:8] + b'\xff' * 4 + c[12:], 'got a header of 4294967295 labels'),
        ('.idx', lambda c: b'0\t0\n1\t7\n2\t80\n', 'not a RecordIO record|truncated'),
        ('.idx', lambda c: b'0\t0\n1\t999999\n', 'do not match'),
        ('.idx', lambda c: b'0\t0\n1\n', 'expected two numbers per image'),
        ('.idx', None, 'create it with'),
    ],
)
def test_damage_is_named(tmp_path, end, damage, message):
    path = write(tmp_path, PAYLOADS).with_suffix(end)
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(DataError, match=message):
        read_all(tmp_path / 'train.rec')


@pytest.mark.parametrize('name', ['train.rec', 'train.idx', 'train.index.npy', 'manifest.json'])
def test_named_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    data = make_config(tmp_path, ramp(2)).data
    if name == 'train.idx':
        (tmp_path / 'train.index.npy').unlink()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        DataError, match=rf'^\S+/{name}: .*got a named pipe, expected a file.*; \S+ [^\n]*$'
    ):
        find_split(data, 'train')()


def stored(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_index(path: Path) -> Path:
    index = path.with_suffix(INDEX)
    np.save(index, parse_index(path.with_suffix('.idx'), path.stat().st_size))
    return index


@pytest.mark.parametrize(
    'change',
    [
        lambda index: index + [[4], [0]],
        lambda index: index + [[0], [4]],
        lambda index: index - [[0], [4]],
        lambda index: index + [[0, 0, 0], [0, 1 << 62, 0]],
        lambda index: index * [[1], [0]],
        lambda index: index[:, [0, 0, 2]],  # a record twice
        lambda index: index[:, :2],
        lambda index: index[:1],
    ],
)
def test_index_that_does_not_match_is_a_one_line_error(tmp_path, change):
    path = write_index(write(tmp_path, PAYLOADS))
    np.save(path, change(np.load(path)))
    with pytest.raises(DataError, match='does not match its .rec of .* bytes; remove it') as e:
        read_all(tmp_path / 'train.rec')
    assert '\n' not in str(e.value)


def test_index_with_any_byte_changed_is_read_or_refused(tmp_path):
    path = write(tmp_path, [b'a' * 40, b'b' * 400, b'c' * 4000])
    whole = write_index(path).read_bytes()
    random, num_named = np.random.default_rng(0), 0
    for place in range(len(whole)):
        path.with_suffix(INDEX).write_bytes(whole[:place] + random.bytes(1) + whole[place + 1 :])
        try:
            read_all(path)
        except DataError:
            num_named += 1
    assert num_named > 60


@pytest.mark.parametrize('dataset', ['cifar10', 'imagenet --source DIR', 'flowers'])
def test_command_that_creates_missing_data_is_complete(tmp_path, dataset):
    data = DataConfig(dir=f'{tmp_path}/my data', dataset=dataset.split()[0])
    command = dataset.replace('flowers', 'folder --source DIR')
    for read in (lambda: find_split(data, 'train'), lambda: data_digest(data)):
        with pytest.raises(DataError) as e:
            read()
        assert str(e.value).endswith(f": mlperf-rn50 prepare {command} --out '{tmp_path}/my data'")


@pytest.mark.parametrize('label', [-float('inf'), 1.5])
def test_fractional_or_infinite_label_is_named(tmp_path, label):
    path = write(tmp_path, [b'a', b'b'], labels=[0, label])
    with pytest.raises(DataError, match=f'record 1: got the label {label}, expected a whole'):
        read_all(path)


GOOD = {
    'format': 1,
    'dataset': 'd',
    'classes': ['a', 'b'],
    'splits': {name: {'num_images': 1, 'rec_bytes': 1} for name in ('train', 'validation')},
}


def test_digest_depends_on_contents_and_not_on_the_place(tmp_path):
    first, same, other = (
        make_config(tmp_path / name, images).data
        for name, images in (('a', ramp(4)), ('b', ramp(4)), ('c', ramp(4)[::-1]))
    )
    digest = data_digest(first)
    assert digest == data_digest(same) != data_digest(other) and len(digest) == 64
    manifest = load_manifest(tmp_path / 'b')
    for changes, is_same in (
        ({'source': 'another place'}, True),
        ({'classes': manifest['classes'][::-1]}, False),
    ):
        (tmp_path / 'b/manifest.json').write_text(json.dumps(manifest | changes))
        assert (data_digest(same) == digest) == is_same
    assert data_digest(replace(same, synthetic=True, dir='none')) == ''


class Compared:
    """Checksums that count which are compared."""

    def __init__(self, counts):
        self.counts = counts

    def __getitem__(self, position):
        self.counts[position] += 1
        return -1


def test_every_record_is_compared_with_its_checksum_in_the_course_of_evaluations(tmp_path):
    """Also if the number of reads in a pass is a multiple of the period of comparisons."""
    records = find_split(make_config(tmp_path, ramp(24)).data, 'train')()
    compared = Counter()
    records.checksums = Compared(compared)
    for number in range(40 * 24):
        with suppress(DataError):
            records.read(number % 24)
    assert len(compared) == 24
    assert 0.24 < sum(compared.values()) / (40 * 24) < 0.26


def test_failed_read_names_the_record_and_permits_a_restart(tmp_path, monkeypatch):
    records = find_split(make_config(tmp_path, ramp(4)).data, 'train')()
    monkeypatch.setattr(os, 'pread', Mock(side_effect=OSError(errno.EIO, 'Input/output error')))
    with pytest.raises(StorageError, match='train.rec, record 3: cannot read: Input') as e:
        records.read(3)
    assert e.value.exit_code == 1


def test_manifest_on_failing_storage_permits_a_restart(tmp_path, monkeypatch):
    config = make_config(tmp_path, ramp(4))
    fault = OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr(recordio, 'read_manifest', Mock(side_effect=fault))
    with pytest.raises(StorageError, match='manifest.json: Input/output error; repair the storage'):
        find_split(config.data, 'train')
    monkeypatch.setattr(
        recordio, 'read_manifest', Mock(side_effect=OSError(errno.EACCES, 'denied'))
    )
    with pytest.raises(DataError, match='denied; correct its permissions'):
        find_split(config.data, 'train')


@pytest.mark.parametrize('name', ['train.rec', 'train.index.npy', 'train.crc.npy'])
def test_storage_that_fails_while_records_are_opened_permits_a_restart(tmp_path, monkeypatch, name):
    open_records = find_split(make_config(tmp_path, ramp(4)).data, 'train')
    open_file = recordio.open_regular

    def fail(path):
        if str(path).endswith(name):
            raise OSError(errno.ESTALE, 'Stale file handle', str(path))
        return open_file(path)

    monkeypatch.setattr(recordio, 'open_regular', fail)
    with pytest.raises(StorageError, match=f'{name}: Stale file handle; repair the storage') as e:
        open_records()
    assert e.value.exit_code == 1


def test_edited_records_are_found_as_they_are_read(tmp_path):
    data = make_config(tmp_path, ramp(40)).data
    records = find_split(data, 'train')()
    for position in range(40):
        records.read(position)
    with open(tmp_path / 'train.rec', 'r+b') as f:
        for position in range(40):
            f.seek(records.location(position)[1] + 12)
            f.write(np.float32(1).tobytes())  # another label
    with pytest.raises(DataError, match=r'train.rec, record \d+: does not match its checksum'):
        for position in range(40):
            records.read(position)
    (tmp_path / 'train.crc.npy').unlink()
    with pytest.raises(DataError, match='crc.npy: No such file .*; copy the folder from an intact'):
        find_split(data, 'train')
    manifest = load_manifest(tmp_path)
    del manifest['splits']['train']['crc_sha256']  # as in an older folder
    (tmp_path / 'manifest.json').write_text(json.dumps(manifest))
    assert find_split(data, 'train')().read(0).label == 1


@pytest.mark.parametrize(
    'damage',
    [
        lambda good: b'',
        lambda good: good[:-4],
        lambda good: good + b'\0',
        lambda good: good.replace(b'(12,), }', b'(1%s,), }' % (b'0' * 15)),
        lambda good: good.replace(b'(12,), }', b'(12, , }'),
        lambda good: good[:10] + b'(' * (len(good) - 10),
        lambda good: b'cos\nsystem\n(S"touch x"\ntR.',
        lambda good: stored(np.zeros((12, 1), np.uint32)),
        lambda good: stored(np.zeros(11, np.uint32)),
        lambda good: stored(np.zeros(12)),
        lambda good: stored(np.array([None] * 12, object)),
    ],
)
def test_checksums_that_do_not_fit_are_never_taken_as_missing(tmp_path, damage):
    data, path = make_config(tmp_path, ramp(12)).data, tmp_path / 'train.crc.npy'
    changed = damage(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    message = rf'^{path}: not the checksums of the records \(.*prepare the data again$'
    with pytest.raises(DataError, match=message) as e:
        find_split(data, 'train')()
    assert len(str(e.value)) < 500 and '\n' not in str(e.value)
    assert any(f'{path}: does not match its SHA-256' in line for line in verify(tmp_path, 1)[1])


def test_classes_have_names_or_numbers(tmp_path):
    data = DataConfig(dir=str(tmp_path), num_classes=2)
    assert class_names(data) == ['0', '1']
    (tmp_path / 'manifest.json').write_text(json.dumps(GOOD))
    assert class_names(data) == ['a', 'b']
    assert class_names(replace(data, synthetic=True)) == ['0', '1']
    with pytest.raises(
        DataError, match='got 3, expected 2 from .*; set data.num_classes or data.dir'
    ):
        class_names(replace(data, num_classes=3))


def test_concurrent_reads_of_a_record_count_once():
    together, reads = threading.Barrier(4), Counter()

    def read(position):
        reads[position] += 1
        if position == 0:
            together.wait(HANG_LIMIT_S)  # all four read it before any of them has cached it
        return Record(np.zeros(100, np.uint8), position, position)

    cache = RecordCache(read, 300)
    with ThreadPoolExecutor(4) as pool:
        assert [is_read for _, is_read in pool.map(cache.read, [0] * 4)] == [True] * 4
    again = [cache.read(p)[1] for p in (1, 2, 3, 0, 1, 2, 3)]
    assert again == [True] * 3 + [False] * 3 + [True]
    assert reads == {0: 4, 1: 1, 2: 1, 3: 2}
