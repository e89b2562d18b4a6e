"""Encoded images with labels, as returned by all sources of data, and the sources for digits and image folders."""
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlperf_rn50.errors import DataError

PICTURES = {'.jpeg', '.jpg', '.png', '.bmp', '.webp'}


@dataclass(frozen=True)
class Sample:
    """An encoded image, either in memory (data) or as `size` bytes at `offset` in a file, such as a tar."""

    label: int
    name: str
    data: bytes | None = None
    path: str = ''
    offset: int = 0
    size: int = 0

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with open(self.path, 'rb') as f:
            f.seek(self.offset)
            return f.read(self.size)


@dataclass(frozen=True)
class Dataset:
    """Name and source of a data set, class names in the order of their labels, and the splits to pack."""

    name: str
    source: str
    classes: list[str]
    train: list[Sample]
    validation: list[Sample]


def from_pixels(pixels: Iterable[np.ndarray], labels: Iterable[int], prefix: str) -> list[Sample]:
    """Encode images as PNG. Each image is a uint8 array, (height, width) or (height, width, 3)."""
    from PIL import Image
    samples = []
    for i, (image, label) in enumerate(zip(pixels, labels)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, 'PNG')
        samples.append(Sample(int(label), f'{prefix}/{i}', buffer.getvalue()))
    return samples


def folder_samples(root: Path, classes: list[str]) -> list[Sample]:
    """Return the images of each <root>/<class>/, in order of name; the label is the position in classes."""
    samples = []
    for label, name in enumerate(classes):
        for entry in sorted(os.scandir(root / name), key=lambda e: e.name) if (root / name).is_dir() else []:
            if Path(entry.name).suffix.lower() in PICTURES:
                samples.append(Sample(label, f'{root.name}/{name}/{entry.name}', None, entry.path, 0,
                                      entry.stat().st_size))
    return samples


def split_folder(source: Path, names: tuple[str, ...]) -> Path | None:
    return next((source / n for n in names if (source / n).is_dir()), None)


def digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten digits of 8x8 pixels, 360 of them for validation, stratified by class."""
    import sklearn
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    train, validation, train_labels, validation_labels = train_test_split(
        pixels, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    return Dataset('digits', f'sklearn.datasets.load_digits, scikit-learn {sklearn.__version__}', list('0123456789'),
                   from_pixels(train, train_labels, 'train'), from_pixels(validation, validation_labels, 'validation'))


def folder(source: Path, name: str) -> Dataset:
    """Read images from <source>/{train,val}/<class>/. Labels number the classes in order of name."""
    train, validation = split_folder(source, ('train',)), split_folder(source, ('val', 'validation', 'test'))
    if train is None or validation is None:
        raise DataError(f'--source: {source}: expected folders train/ and val/, each with a folder per class')
    classes = sorted(p.name for p in train.iterdir() if p.is_dir())
    result = Dataset(name, str(source), classes, folder_samples(train, classes), folder_samples(validation, classes))
    unknown = sorted(p.name for p in validation.iterdir() if p.is_dir() and p.name not in classes)
    if unknown:
        raise DataError(f'--source: {validation / unknown[0]}: this class is missing in {train}')
    if not result.train or not result.validation:
        raise DataError(f'--source: {source}: no images ({", ".join(sorted(PICTURES))}) in train/ or val/')
    return result
