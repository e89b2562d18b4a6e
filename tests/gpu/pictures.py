"""Synthetic photographs: JPEG images of several sizes with gradients and noise, without
symmetries.

python tests/gpu/pictures.py FOLDER NUMBER prepares a data set.
"""

import sys
from pathlib import Path

import numpy as np
from numbered import encoded
from PIL import Image

from mlperf_rn50.config import Config
from mlperf_rn50.data.options import DataConfig
from mlperf_rn50.data.prepare.pack import pack
from mlperf_rn50.data.prepare.samples import Dataset, Sample
from mlperf_rn50.data.recordio import load_manifest

NUM_CLASSES = 10
SIZES = ((500, 375), (375, 500), (640, 427), (333, 500))  # (width, height), typical of ImageNet


def picture(number: int) -> bytes:
    """Return the content of a JPEG file that depends only on the number."""
    random, (width, height) = np.random.default_rng(number), SIZES[number % len(SIZES)]
    coarse = random.integers(0, 256, (height // 60 + 2, width // 60 + 2, 3), np.uint8)
    shades = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16
    )
    noise = random.integers(-12, 13, (height, width, 1), np.int16)
    image = Image.fromarray(np.clip(shades + noise, 0, 255).astype(np.uint8))
    return encoded('JPEG', image, quality=92)


def pack_pictures(out: Path, number: int) -> Path:
    """Prepare a number of images, all for training and one per class for validation."""
    samples = [Sample(i % NUM_CLASSES, f'{i}', picture(i)) for i in range(number)]
    classes = list(map(str, range(NUM_CLASSES)))
    pack(Dataset('pictures', 'made up', classes, samples, samples[:NUM_CLASSES]), out)
    return out


def pictures_config(folder: Path, **data) -> Config:
    """Return the configuration for a folder of these images, with pixel values from 0 to 255."""
    number = load_manifest(folder)['splits']['train']['num_images']
    facts = dict(num_train=number, num_val=NUM_CLASSES, num_classes=NUM_CLASSES)
    levels = dict(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), read_threads=2)
    return Config(data=DataConfig(str(folder), 'pictures', **{**facts, **levels, **data}))


if __name__ == '__main__':
    pack_pictures(Path(sys.argv[1]), int(sys.argv[2]))
