"""Reading RecordIO: as MXNet writes it, and damaged."""
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from mlperf_rn50.config import DataConfig
from mlperf_rn50.data.records import MAGIC, RecordFile, open_split
from mlperf_rn50.errors import DataError


def write(folder: Path, payloads, labels=None) -> Path:
    path = folder / 'train.rec'
    record = mx.recordio.MXIndexedRecordIO(str(path.with_suffix('.idx')), str(path), 'w')
    for i, payload in enumerate(payloads):
        label = i if labels is None else labels[i]
        record.write_idx(i, mx.recordio.pack(mx.recordio.IRHeader(0, label, 100 + i, 0), payload))
    record.close()
    return path


def test_reads_what_mxnet_wrote(tmp_path):
    payloads = [bytes([i]) * (i + 1) for i in range(9)]
    records = RecordFile(write(tmp_path, payloads))
    assert len(records) == 9
    for i in (8, 0, 3):
        record = records.read(i)
        assert (record.image.tobytes(), record.label, record.sample_id) == (payloads[i], i, 100 + i)


def test_a_payload_with_the_magic_number_is_put_together_again(tmp_path):
    payload = b'abcd' + MAGIC + b'efgh' + MAGIC + b'ij'
    path = write(tmp_path, [b'x', payload, b'y'])
    assert path.read_bytes().count(MAGIC) > 3  # written in parts
    assert RecordFile(path).read(1).image.tobytes() == payload
    assert RecordFile(path).read(2).image.tobytes() == b'y'


def test_a_vector_label_gives_its_first_entry(tmp_path):
    path = write(tmp_path, [b'image'], labels=[np.array([7.0, 1.0, 2.0])])
    record = RecordFile(path).read(0)
    assert (record.label, record.image.tobytes()) == (7, b'image')


@pytest.mark.parametrize('damage, message', [
    (lambda rec, idx: rec.write_bytes(rec.read_bytes()[:-8]), 'not a RecordIO record|cut off|do not fit'),
    (lambda rec, idx: rec.write_bytes(b'\0' * rec.stat().st_size), 'not a RecordIO record'),
    (lambda rec, idx: idx.write_text('0\t0\n1\t7\n2\t80\n'), 'not a RecordIO record|cut off'),
    (lambda rec, idx: idx.write_text('0\t0\n1\t999999\n'), 'do not fit'),
    (lambda rec, idx: idx.write_text('0\t0\n1\n'), 'two per image'),
    (lambda rec, idx: idx.write_text(''), 'two per image'),
    (lambda rec, idx: idx.unlink(), 'make it with'),
])
def test_damage_is_named(tmp_path, damage, message):
    path = write(tmp_path, [b'a' * 40, b'b' * 40, b'c' * 40])
    damage(path, path.with_suffix('.idx'))
    with pytest.raises(DataError, match=message):
        records = RecordFile(path)
        for i in range(len(records)):
            records.read(i)


def test_manifest_and_configuration_must_agree(digits):
    right = DataConfig(dir=str(digits), dataset='digits', num_train=1437, num_val=360, num_classes=10)
    assert len(open_split(right, 'train')) == 1437
    wrong = DataConfig(dir=str(digits), dataset='digits', num_train=1400, num_val=360, num_classes=10)
    with pytest.raises(DataError, match='says 1437, the configuration 1400; set data.num_train'):
        open_split(wrong, 'train')
    with pytest.raises(DataError, match='says digits, the configuration imagenet'):
        open_split(DataConfig(dir=str(digits)), 'train')


def test_missing_folder_says_how_to_make_it(tmp_path):
    with pytest.raises(DataError, match='mlperf-rn50 prepare'):
        open_split(DataConfig(dir=str(tmp_path / 'none')), 'train')
