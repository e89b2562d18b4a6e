"""Preparation of data sets in this process, and what it stores."""

import io

import numpy as np
from numbered import encoded
from PIL import Image

from mlperf_rn50.cli.prepare import make_parser
from mlperf_rn50.data.prepare.command import prepare as run_command
from mlperf_rn50.data.recordio import RecordFile


def bitmap(grey, size=(4, 4)) -> bytes:
    """Return an image; those of one size have the same number of bytes."""
    return encoded('BMP', Image.new('L', size, grey))


def fill(root, files):
    """Write files from a dict of paths to contents, or JPEGs at the given paths; return root."""
    for path in files:
        place = root / path
        folder = place if path.endswith('/') else place.parent
        folder.mkdir(parents=True, exist_ok=True)
        if folder != place:
            place.write_bytes(files[path] if isinstance(files, dict) else encoded('JPEG'))
    return root


def prepare(*words) -> int:
    return run_command(make_parser().parse_args(['--workers', '1', *map(str, words)]))


def stored(folder, split='train') -> list[tuple[int, bytes]]:
    """Return the label and the image of every record."""
    records = RecordFile(folder / f'{split}.rec')
    return [(r.label, r.image.tobytes()) for r in map(records.read, range(len(records)))]


def shown(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)).convert('RGB'), np.int32)


def greys(folder, split='train') -> list[tuple[int, int]]:
    """Return the label and the first pixel of every record."""
    return [(label, int(shown(image)[0, 0, 0])) for label, image in stored(folder, split)]
