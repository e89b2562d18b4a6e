"""What every source delivers: encoded images with their labels, of pixels in memory or of folders of pictures."""
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PICTURES = {'.jpeg', '.jpg', '.png', '.bmp', '.webp'}


@dataclass(frozen=True)
class Sample:
    """An encoded image: its bytes, or a stretch of a file (of a tar, too).

    Args:
        data: the bytes, None for a file.
        offset, size: of the stretch, bytes.
    """

    label: int
    name: str
    data: bytes | None = None
    path: str = ''
    offset: int = 0
    size: int = 0

    def read(self) -> bytes:
        """The encoded image."""
        if self.data is not None:
            return self.data
        with open(self.path, 'rb') as f:
            f.seek(self.offset)
            return f.read(self.size)


@dataclass(frozen=True)
class Dataset:
    """What is to be packed: splits, class names in order of their labels, and where it came from."""

    name: str
    source: str
    classes: list[str]
    train: list[Sample]
    validation: list[Sample]


def _png(pixels: np.ndarray) -> bytes:
    """A uint8 image, (height, width) or (height, width, 3), as PNG."""
    from PIL import Image
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG')
    return buffer.getvalue()


def from_pixels(pixels: np.ndarray, labels: np.ndarray, prefix: str) -> list[Sample]:
    return [Sample(int(label), f'{prefix}/{i}', _png(image)) for i, (image, label) in enumerate(zip(pixels, labels))]


def folder_samples(root: Path, classes: list[str]) -> list[Sample]:
    """The pictures of <root>/<class>/, sorted by name."""
    samples = []
    for label, name in enumerate(classes):
        for entry in sorted(os.scandir(root / name), key=lambda e: e.name) if (root / name).is_dir() else []:
            if Path(entry.name).suffix.lower() in PICTURES:
                samples.append(Sample(label, f'{root.name}/{name}/{entry.name}', None, entry.path, 0,
                                      entry.stat().st_size))
    return samples


def split_folder(source: Path, names: tuple[str, ...]) -> Path | None:
    return next((source / n for n in names if (source / n).is_dir()), None)
