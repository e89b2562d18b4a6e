"""Single files of pictures, brought to the network by the evaluation's own pipeline."""
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

# What prepared data is made of, and DALI decodes: any depth, grey, CMYK, with alpha (which is left out), turned as
# its EXIF says, the first of several.
_AS_THEY_ARE = ('JPEG', 'PNG')
# DALI makes what is in here at run time, where a type checker does not see it.
_backend: Any = dali_backend
# An older DALI disregards EXIF.
_DALI_TURNS = 'adjust_orientation' in _backend.GetSchema('decoders__Image').GetArgumentNames()


def encode_picture(path: Path) -> bytes:
    """A picture as JPEG or PNG: the file's own bytes where DALI decodes it as it is, else a PNG of its first frame."""
    try:
        encoded = read_bytes(path)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of large ones; twice that size is an error
            with Image.open(io.BytesIO(encoded)) as image:
                is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
                if image.format in _AS_THEY_ARE and (is_upright or _DALI_TURNS):
                    return encoded
                return _png(ImageOps.exif_transpose(image))
    except OSError as e:
        reason = e.strerror or 'not a picture that Pillow can read'
        raise DataError(f'{path}: {reason}; expected a picture, such as a JPEG or PNG') from e
    except Exception as e:  # Pillow's decoders raise errors of many kinds
        raise DataError(f'{path}: {type(e).__name__}: {" ".join(str(e).split())[:120]}; expected a picture, such as a '
                        'JPEG or PNG') from e


def _png(image: Image.Image) -> bytes:
    """8 bits of red, green and blue; 16 bits of grey are scaled, not cut off."""
    if image.mode.startswith('I'):
        image = Image.fromarray(np.rint(np.clip(np.asarray(image, np.float64), 0, 65535) / 257).astype(np.uint8))
    buffer = io.BytesIO()
    image.convert('RGB').save(buffer, 'PNG')
    return buffer.getvalue()


def transform_picture(encoded: bytes, config: Config, name: str = 'the picture') -> mx.nd.NDArray:
    """A picture as the network takes it: float32, (1, 3, side, side)."""
    source = repeat(whole_images([np.frombuffer(encoded, np.uint8)]))  # without end: DALI reads ahead
    try:
        images, _ = build_pipeline(source, 1, config, False, None).run()
    except RuntimeError as e:  # DALI wraps a decoder's message in many lines
        raise DataError(f'{name}: DALI cannot decode it: {" ".join(str(e).split())[:200]}') from e
    return mx.nd.array(np.asarray(images.as_tensor()))
