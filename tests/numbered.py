"""Encoded images, and prepared data sets of numbered images."""

import io
import tarfile
from dataclasses import replace

import numpy as np
from PIL import Image

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, from_pixels

_Y, _X = np.mgrid[:24, :40]
RGB = Image.fromarray(np.stack([_X * 6, _Y * 10, _X + _Y], -1).astype(np.uint8))


def encoded(kind, image=RGB, **keys) -> bytes:
    """Return an image in a format of Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **keys)
    return buffer.getvalue()


def make_config(folder, images, num_val=1, **data) -> Config:
    """Prepare a data set whose i-th training image has label i, so that labels identify samples."""
    samples, num_classes, side = (
        from_pixels(images, range(len(images)), ''),
        max(2, len(images)),
        len(images[0]),
    )
    pack(
        Dataset(
            'numbered', 'test', [str(i) for i in range(num_classes)], samples, samples[:num_val]
        ),
        folder,
    )
    keys = dict(
        dir=str(folder),
        dataset='numbered',
        num_train=len(images),
        num_val=num_val,
        num_classes=num_classes,
        image_size=side,
        resize_shorter=side,
        crop='none',
        mirror_probability=0.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        num_threads=1,
        read_threads=2,
    )
    return Config(data=DataConfig(**{**keys, **data}))


def with_data(config, **keys) -> Config:
    return replace(config, data=replace(config.data, **keys))


def ramp(n):
    """Return n different images of 8x8 pixels whose left and right halves differ."""
    base = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    return [base + np.uint8(i) for i in range(n)]


def write_records(path, payloads, labels, keys, sample_ids):
    """Write a .rec and its .idx with MXNet; return the path."""
    import mxnet as mx  # numbered.py is also for tests without MXNet

    record = mx.recordio.MXIndexedRecordIO(str(path.with_suffix('.idx')), str(path), 'w')
    for payload, label, key, sample_id in zip(payloads, labels, keys, sample_ids):
        record.write_idx(
            key, mx.recordio.pack(mx.recordio.IRHeader(0, label, sample_id, 0), payload)
        )
    record.close()
    return path


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
