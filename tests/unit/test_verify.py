"""prepare --verify: damaged files and records; the sample that the doctor checks."""

import errno
import re
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import call
from numbered import make_config, ramp

from mlperf_rn50.data import recordio
from mlperf_rn50.data.recordio import CHECKSUMS, INDEX, RecordFile, load_manifest
from mlperf_rn50.data.verify import check_sample, verify
from mlperf_rn50.doctor.facts import data_facts
from mlperf_rn50.errors import DataError

NUM_TRAIN, NUM_VAL = 60, 12


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path, ramp(NUM_TRAIN), num_val=NUM_VAL)


@pytest.fixture
def folder(config, tmp_path):
    return tmp_path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def place_of(rec, position) -> slice:
    start, length = np.load(rec.with_suffix(INDEX))[:, position]
    return slice(int(start), int(start + length))


def test_undamaged_folder_passes(folder):
    done = call('prepare', '--verify', folder, '--workers', 3)
    assert (done.returncode, done.stderr) == (0, '')  # no progress bar without a terminal
    assert done.stdout == (
        f'{folder}/train.rec: 60 records match their checksums\n'
        f'{folder}/validation.rec: 12 records match their checksums\n'
    )
    rec = folder / 'train.rec'
    checksums = np.load(rec.with_suffix(CHECKSUMS))
    assert checksums.dtype == np.uint32 and checksums.shape == (NUM_TRAIN,)
    assert int(checksums[30]) == zlib.crc32(rec.read_bytes()[place_of(rec, 30)])


def test_flipped_bits_are_reported_by_record(folder):
    rec = folder / 'train.rec'
    for position in (0, 37, NUM_TRAIN - 1):
        flip(rec, place_of(rec, position).stop - 1 - (position == 0) * 90)
    done = call('prepare', '--verify', folder)
    assert done.returncode == 1
    for text in (
        'train.rec: 3 of 60 records do not match their checksums: 0, 37, 59 (counted from 0)\n',
        'validation.rec: 12 records match their checksums\n',
        f'{folder}: damaged; copy the folder',
    ):
        assert text in done.stdout


def test_truncated_file_lists_ten_records_and_counts_the_rest(folder):
    rec = folder / 'train.rec'
    whole = rec.stat().st_size
    rec.write_bytes(rec.read_bytes()[: place_of(rec, NUM_TRAIN - 12).start + 20])
    size, records = verify(folder, 2)[1]
    assert f'train.rec: got {rec.stat().st_size:,} bytes, expected {whole:,}' in size
    named = ', '.join(map(str, range(48, 58)))
    assert f'12 of 60 records do not match their checksums: {named} and 2 more' in records
    rec.unlink()
    assert verify(folder, 2)[1] == [f'{rec}: No such file or directory']


DIGEST = 'does not match its SHA-256 in manifest.json'
WHOLE = 'train.rec: matches its SHA-256 (no usable record checksums)'


@pytest.mark.parametrize(
    'name, damage, message',
    [
        ('train.rec', lambda p: p.write_bytes(p.read_bytes() + b'x'), r'got .* bytes, expected .*'),
        ('train.idx', Path.unlink, 'No such file or directory'),
        ('train.names.txt', lambda path: path.write_text('0\n'), DIGEST),
        ('train.index.npy', lambda path: flip(path, -3), DIGEST),
        ('validation.crc.npy', lambda path: flip(path, -3), DIGEST),
    ],
)
def test_damaged_file_is_named_and_records_are_still_checked(folder, name, damage, message):
    damage(folder / name)
    [found] = verify(folder, 2)[1]
    assert re.fullmatch(f'{folder}/{name}: {message}', found)
    flip(folder / 'train.rec', 5000)
    found = verify(folder, 2)[1]
    assert len(found) == 2
    assert any('train.rec: 1 of 60 records do not match their checksums: ' in f for f in found)


def test_whole_file_is_checked_if_indexes_are_damaged(folder):
    for name in ('train.idx', 'train.index.npy'):
        flip(folder / name, -3)
    right, problems = verify(folder, 2)
    assert len(problems) == 2 and WHOLE in right[0]


@pytest.mark.parametrize(
    'damage, message',
    [
        (lambda text: text.replace('"0"', '"zero"'), 'does not match its own SHA-256'),
        (lambda text: text[:-40], 'not a manifest'),
    ],
)
def test_damaged_manifest_is_named_also_by_the_doctor(config, folder, damage, message):
    assert data_facts(config, 0).problem == ''
    path = folder / 'manifest.json'
    path.write_text(damage(path.read_text()))
    done = call('prepare', '--verify', folder)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    for text in (done.stdout, data_facts(config, 0).problem):
        assert f'{path}: {message}' in text


def test_failing_storage_is_a_problem_and_no_traceback(config, folder, monkeypatch):
    fault = Mock(side_effect=OSError(errno.EIO, 'Input/output error'))
    monkeypatch.setattr(recordio, 'open_regular', fault)
    assert 'Input/output error' in data_facts(config, 0).problem
    assert all('Input/output error' in text for text in verify(folder, 1)[1])


# --- the sample of the doctor


def sample(folder, num_records, seed):
    records = RecordFile(folder / 'train.rec')
    try:
        return check_sample(records, load_manifest(folder)['splits']['train'], num_records, seed)
    finally:
        records.close()


def test_last_record_is_in_every_sample(folder):
    flip(folder / 'train.rec', -1)
    for seed in range(3):
        with pytest.raises(DataError, match='record 59: does not match its checksum; copy the fo'):
            sample(folder, 2, seed)
    flip(folder / 'train.crc.npy', -1)
    with pytest.raises(DataError, match=f'train.crc.npy: {DIGEST}'):
        sample(folder, 2, 0)


def test_ranks_check_different_records(folder, monkeypatch):
    seen, read = [], RecordFile.read
    monkeypatch.setattr(
        RecordFile, 'read', lambda self, position: (seen.append(position), read(self, position))[1]
    )
    assert [sample(folder, 10, rank) for rank in range(2)] == [10, 10]
    assert len(set(seen[:10])) == len(set(seen[10:])) == 10 and len(set(seen)) > 12
    assert sample(folder, 10**6, 0) == len(set(seen)) == NUM_TRAIN  # all of a small set
