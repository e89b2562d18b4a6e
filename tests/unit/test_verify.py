"""prepare --verify: what is not what was written is named; and the sample that the doctor looks at."""
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import call
from numbered import make_config, ramp

from mlperf_rn50.data.records import RecordFile, index_path, load_manifest
from mlperf_rn50.data.verify import check_sample, checksums_path, load_checksums, verify
from mlperf_rn50.errors import DataError

NUM_TRAIN, NUM_VAL = 60, 12


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """A prepared folder of numbered images."""
    folder = tmp_path_factory.mktemp('prepared') / 'numbered'
    make_config(folder, ramp(NUM_TRAIN), num_val=NUM_VAL)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / 'numbered')


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def place_of(rec, position) -> slice:
    start, length = np.load(index_path(rec))[:, position]
    return slice(int(start), int(start + length))


def make_old(folder):
    """Leaves out what older versions did not write: checksums of the records and of the manifest."""
    manifest = load_manifest(folder)
    for name, entry in manifest['splits'].items():
        del entry['crc_sha256']
        checksums_path(folder / f'{name}.rec').unlink()
    manifest.pop('sha256')
    (folder / 'manifest.json').write_text(json.dumps(manifest, indent=1))


def test_what_was_written_is_right(folder):
    done = call('prepare', '--verify', folder, '--workers', 3)
    assert (done.returncode, done.stderr) == (0, '')  # no progress bar without a terminal
    assert done.stdout == (f'{folder}/train.rec: 60 records are as they were written\n'
                           f'{folder}/validation.rec: 12 records are as they were written\n')
    rec = folder / 'train.rec'
    checksums = load_checksums(rec, load_manifest(folder)['splits']['train'])
    assert checksums.dtype == np.uint32 and checksums.shape == (NUM_TRAIN,)
    assert int(checksums[30]) == zlib.crc32(rec.read_bytes()[place_of(rec, 30)])


def test_flipped_bits_are_named_by_their_records(folder):
    rec = folder / 'train.rec'
    for position in (0, 37, NUM_TRAIN - 1):
        flip(rec, place_of(rec, position).stop - 1 - (position == 0) * 90)
    done = call('prepare', '--verify', folder)
    assert done.returncode == 1
    assert 'train.rec: 3 of 60 records are not what was written: 0, 37, 59 (counted from 0)\n' in done.stdout
    assert 'validation.rec: 12 records are as they were written\n' in done.stdout
    assert f'{folder}: not what was written; copy the folder again' in done.stdout


def test_a_file_cut_short_names_ten_records_and_counts_the_rest(folder):
    rec = folder / 'train.rec'
    whole = rec.stat().st_size
    rec.write_bytes(rec.read_bytes()[:place_of(rec, NUM_TRAIN - 12).start + 20])
    size, records = verify(folder, 2)[1]
    assert f'train.rec: got {rec.stat().st_size:,} bytes, expected {whole:,}' in size
    named = ', '.join(map(str, range(48, 58)))
    assert f'12 of 60 records are not what was written: {named} and 2 more' in records


@pytest.mark.parametrize('name, damage, message', [
    ('train.rec', lambda path: path.write_bytes(path.read_bytes() + b'more'), r'got [\d,]+ bytes, expected [\d,]+'),
    ('train.idx', Path.unlink, 'No such file or directory'),
    ('train.index.npy', lambda path: flip(path, -3), 'not the file whose SHA-256 manifest.json holds'),
    ('validation.crc.npy', lambda path: flip(path, -3), 'not the file whose SHA-256 manifest.json holds')])
def test_a_damaged_file_is_named_and_the_records_are_looked_at_all_the_same(folder, name, damage, message):
    damage(folder / name)
    [found] = verify(folder, 2)[1]
    assert re.fullmatch(f'{folder}/{name}: {message}', found)
    flip(folder / 'train.rec', 5000)
    found = verify(folder, 2)[1]
    assert len(found) == 2 and any('train.rec: 1 of 60 records are not what was written: ' in f for f in found)


def test_without_its_indexes_the_whole_file_is_looked_at(folder):
    for name in ('train.idx', 'train.index.npy'):
        flip(folder / name, -3)
    right, found = verify(folder, 2)
    assert len(found) == 2
    assert 'train.rec: as it was written, by the SHA-256 of the whole file (the checksums of its records' in right[0]


@pytest.mark.parametrize('damage, message', [
    (lambda text: text.replace('"0"', '"zero"'), 'manifest.json: changed since it was written'),
    (lambda text: text[:-40], 'manifest.json: not a manifest')])
def test_a_damaged_manifest_is_named(folder, damage, message):
    path = folder / 'manifest.json'
    path.write_text(damage(path.read_text()))
    done = call('prepare', '--verify', folder)
    assert done.returncode == 1 and f'{folder}/{message}' in done.stdout and 'Traceback' not in done.stderr


def test_a_missing_file_is_named(folder):
    (folder / 'train.rec').unlink()
    assert verify(folder, 2)[1] == [f'{folder}/train.rec: No such file or directory']


def test_an_older_folder_is_held_against_what_it_has(folder):
    make_old(folder)
    assert sample(folder, 32, 0) >= 31
    right, found = verify(folder, 2)
    assert not found and len(right) == 2
    assert 'train.rec: as it was written, by the SHA-256 of the whole file (an older folder, without' in right[0]
    flip(folder / 'train.rec', 5000)
    [found] = verify(folder, 2)[1]
    assert 'train.rec: not what was written, by the SHA-256 of the whole file; which records differ' in found


@pytest.mark.parametrize('arguments, message', [
    ([], 'got no data set and no --out DIR, expected a data set and --out, or --verify DIR'),
    (['digits', '--verify', 'x'], '--verify: got a data set as well'),
    (['--verify', 'x', '--skip-corrupt'], '--verify: got --skip-corrupt as well'),
    (['--verify', 'x'], '--verify: x holds no manifest.json; expected a folder that prepare has made')])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message):
    done = call('prepare', *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1


# --- What the doctor looks at ----------------------------------------------------------------------

def sample(folder, num_records, seed):
    records = RecordFile(folder / 'train.rec')
    try:
        return check_sample(records, load_manifest(folder)['splits']['train'], num_records, seed)
    finally:
        records.close()


def test_the_last_record_is_in_every_sample(folder):
    flip(folder / 'train.rec', -1)
    for seed in range(3):
        with pytest.raises(DataError, match='train.rec, record 59: not what was written; copy the folder again'):
            sample(folder, 2, seed)


def test_ranks_look_at_different_records(folder, monkeypatch):
    seen, read = [], RecordFile.read
    monkeypatch.setattr(RecordFile, 'read', lambda self, position: (seen.append(position), read(self, position))[1])
    assert [sample(folder, 10, rank) for rank in range(2)] == [10, 10]
    assert len(set(seen[:10])) == len(set(seen[10:])) == 10 and len(set(seen)) > 12
    assert sample(folder, 10**6, 0) == len(set(seen)) == NUM_TRAIN  # all of a small set


def test_damaged_checksums_are_named(folder):
    flip(folder / 'train.crc.npy', -1)
    with pytest.raises(DataError, match='train.crc.npy: not the file whose SHA-256 manifest.json holds'):
        sample(folder, 2, 0)
    (folder / 'train.crc.npy').unlink()
    with pytest.raises(DataError, match='train.crc.npy: No such file'):
        sample(folder, 2, 0)
