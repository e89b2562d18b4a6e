"""Encoded images with labels, as returned by all sources of data, and the source for digits."""

import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlperf_rn50.errors import DataError
from mlperf_rn50.files import open_regular

# A damaged archive raises these; a compressed one also the errors of its format.
_OF_ZLIB = zlib.error, lzma.LZMAError
TAR_ERRORS = (OSError, EOFError, tarfile.TarError, *_OF_ZLIB, ValueError, RecursionError)


@dataclass(frozen=True)
class Sample:
    """An encoded image, either in memory (data) or as `size` bytes at `offset` in a file, such as a
    tar."""

    label: int
    name: str
    data: bytes | None = None
    path: str = ''
    offset: int = 0
    size: int = 0
    is_record: bool = False  # the image stays in its .rec file

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        try:
            with open_regular(self.path) as f:
                f.seek(self.offset)
                return f.read(self.size)
        except OSError as e:
            raise DataError(
                f'--source: {self.path}: {e.strerror}; repair it, and run prepare again'
            ) from e

    def checksum(self) -> int:
        """Return the CRC-32 of the image as read."""
        return zlib.crc32(self.read())


@dataclass(frozen=True)
class Dataset:
    """Name and source of a data set, class names in the order of their labels, and the splits to
    pack."""

    name: str
    source: str
    classes: list[str]
    train: list[Sample]
    validation: list[Sample]
    # lines that state which parts of the source are used and which are not
    notes: tuple[str, ...] = ()
    # .rec files that contain the splits already
    recs: dict[str, Path] = field(default_factory=dict)


def check_name(name: str) -> str:
    """Return the name of a class or image. Raise DataError if a line of UTF-8 text cannot contain
    it."""
    if '\n' in name or name.encode(errors='replace').decode() != name:
        raise DataError(
            f'--source: {os.fsencode(name)!r}: the name is not UTF-8 or has a line break; rename it'
        )
    return name


def from_pixels(pixels: Iterable[np.ndarray], labels: Iterable[int], prefix: str) -> list[Sample]:
    """Encode images as PNG. Each image is a uint8 array, (height, width) or (height, width, 3)."""
    from PIL import Image

    samples = []
    for i, (image, label) in enumerate(zip(pixels, labels)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, 'PNG')
        samples.append(Sample(int(label), f'{prefix}/{i}', buffer.getvalue()))
    return samples


def digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, 360 of them for validation,
    stratified by class."""
    import sklearn
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    train, validation, train_labels, validation_labels = train_test_split(
        pixels, bunch.target, test_size=360, stratify=bunch.target, random_state=0
    )
    return Dataset(
        'digits',
        f'sklearn.datasets.load_digits, scikit-learn {sklearn.__version__}',
        classes=list('0123456789'),
        train=from_pixels(train, train_labels, 'train'),
        validation=from_pixels(validation, validation_labels, 'validation'),
    )
