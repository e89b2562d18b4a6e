"""Single image files, transformed by the evaluation pipeline into network inputs."""
import io
import warnings
from itertools import repeat
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from nvidia.dali import backend as dali_backend
from PIL import ExifTags, Image, ImageOps

from mlperf_rn50.config import Config
from mlperf_rn50.data.pipeline import build_pipeline, whole_images
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import read_bytes

# DALI decodes these formats with any bit depth, colours and orientation; it drops alpha and later frames.
_NATIVE_FORMATS = ('JPEG', 'PNG')
_backend: Any = dali_backend  # DALI creates its content at run time, where type checkers cannot see it
# Older releases of DALI ignore the EXIF orientation.
_DALI_HAS_ORIENTATION = 'adjust_orientation' in _backend.GetSchema('decoders__Image').GetArgumentNames()


def encode_picture(path: Path) -> bytes:
    """Return an image file's bytes if DALI can decode them, otherwise its first frame as PNG."""
    try:
        encoded = read_bytes(path)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Pillow warns of a large image and rejects one of twice that size
            with Image.open(io.BytesIO(encoded)) as image:
                is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
                if image.format in _NATIVE_FORMATS and (is_upright or _DALI_HAS_ORIENTATION):
                    return encoded
                return _png(ImageOps.exif_transpose(image))
    except Exception as e:  # Pillow's decoders raise many types of exceptions
        reason = f'{type(e).__name__}: {" ".join(str(e).split())[:120]}'
        if isinstance(e, OSError):
            reason = e.strerror or 'Pillow cannot decode it'
        raise DataError(f'{path}: {reason}; expected an image such as a JPEG or PNG') from e


def _png(image: Image.Image) -> bytes:
    """Return an image as an 8-bit RGB PNG; 16-bit grey is scaled to 8 bits, not truncated."""
    if image.mode.startswith('I'):
        image = Image.fromarray(np.rint(np.clip(np.asarray(image, np.float64), 0, 65535) / 257).astype(np.uint8))
    buffer = io.BytesIO()
    image.convert('RGB').save(buffer, 'PNG')
    return buffer.getvalue()


def transform_picture(encoded: bytes, config: Config, name: str = 'the image') -> mx.nd.NDArray:
    """Return an encoded image as a network input: float32, (1, 3, side, side)."""
    source = repeat(whole_images([np.frombuffer(encoded, np.uint8)]))  # endless, because DALI reads ahead
    try:
        images, _ = build_pipeline(source, 1, config, False, None).run()
    except RuntimeError as e:  # DALI wraps a decoder's message in many lines
        raise DataError(f'{name}: DALI cannot decode it: {" ".join(str(e).split())[:200]}') from e
    return mx.nd.array(np.asarray(images.as_tensor()))
