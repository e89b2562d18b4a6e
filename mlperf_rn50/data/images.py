"""Conversion of images to what DALI decodes, and to network inputs by the evaluation pipeline."""

import io
import math
import threading
import warnings
from contextlib import nullcontext, suppress
from itertools import repeat
from pathlib import Path

import imagesize
import mxnet as mx
import numpy as np
from PIL import EpsImagePlugin, ExifTags, Image
from PIL.Image import Transpose

from mlperf_rn50.config import Config
from mlperf_rn50.data.pipeline import (
    DALI_HAS_ORIENTATION,
    DecoderTest,
    build_pipeline,
    run_pipeline,
    whole_images,
)
from mlperf_rn50.errors import DataError
from mlperf_rn50.files import read_bytes
from mlperf_rn50.system.out_of_memory import lack_of

# DALI decodes these formats with any bit depth and colours; it drops alpha and later frames. MPO is
# JPEG with previews.
_NATIVE_FORMATS = ('JPEG', 'MPO', 'PNG', 'BMP', 'WEBP')
# Pillow would run Ghostscript, also for an EPS inside an image of another format.
EpsImagePlugin.gs_binary = False
_TURNS = {  # by EXIF orientation
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
JPEG_QUALITY = 95
# Each epoch decodes every stored image. This is the number from which Pillow warns of a
# decompression bomb; published recipes preallocate 5,980 x 6,430 pixels for the largest images of
# ImageNet.
MAX_STORED_PIXELS = 89_478_485
_LARGE_PIXELS = 1 << 24
_EVALUATED = 256  # usual shorter side in evaluations
# held while a large image is decoded, so that memory does not grow with the threads
_large = threading.Lock()


def encode_image(
    encoded: bytes,
    test: DecoderTest,
    resize_shorter: int | None = None,
    max_pixels: float = math.inf,
    is_fixed: bool = False,
) -> bytes:
    """Return an image unchanged if training can decode it, otherwise its first frame as PNG.

    An image whose shorter side is not resize_shorter (pixels; None: any) is resized and becomes a
    JPEG. With is_fixed, it need not be upright. May raise any exception, because Pillow's decoders
    raise many types; ValueError if the result would have more than max_pixels.
    """
    buffer = io.BytesIO()
    with (
        Image.open(io.BytesIO(encoded)) as image,
        _large if image.width * image.height > _LARGE_PIXELS else nullcontext(),
    ):
        if image.format == 'EPS':
            raise ValueError('got EPS, expected pixels')
        scale = (resize_shorter or min(image.size)) / min(image.size)
        # an evaluation enlarges small images
        largest = max(scale, _EVALUATED / min(image.size))
        if (num_pixels := round(image.width * image.height * largest**2)) > max_pixels:
            resized = image.width * image.height * (512 / min(image.size)) ** 2
            advice = 'replace it'
            if resized <= max_pixels:
                advice = 'resize it, as with --resize-shorter 512'
            raise ValueError(f'got {num_pixels:,} pixels, expected up to {max_pixels:,}; {advice}')
        image.load()
        turn = _turn_of(image)
        if resize_shorter not in (None, min(image.size)):
            rgb = _upright_rgb(image, turn)
            width, height = (max(resize_shorter, round(side * scale)) for side in rgb.size)
            rgb.resize((width, height), Image.Resampling.BICUBIC).save(
                buffer, 'JPEG', quality=JPEG_QUALITY
            )
            return buffer.getvalue()
        # The reader of sizes for training crops knows the orientation of JPEGs only.
        is_jpeg = image.format in ('JPEG', 'MPO')
        is_upright = is_fixed or turn is None or is_jpeg and DALI_HAS_ORIENTATION
        has_size = sorted(imagesize.get(io.BytesIO(encoded))) == sorted(image.size)
        if (
            image.format in _NATIVE_FORMATS
            and is_upright
            and has_size
            and test.passes(np.frombuffer(encoded, np.uint8))
        ):
            return encoded
        _upright_rgb(image, turn).save(buffer, 'PNG')
        return buffer.getvalue()


def _turn_of(image: Image.Image) -> Transpose | None:
    """Return what makes an image upright; None for nothing, or if its metadata is damaged."""
    with suppress(Exception):  # Pillow raises many types
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return None


def _upright_rgb(image: Image.Image, turn: Transpose | None) -> Image.Image:
    """Return an image as upright 8-bit RGB. 16-bit grey is scaled to 8 bits, not truncated."""
    if image.mode == 'F' and not 1 < (most := np.asarray(image).max()) <= 255:  # or NaN
        raise ValueError(f'got floating-point pixels of at most {most:g}, expected 0 to 255')
    if turn is not None:  # ImageOps.exif_transpose fails if other metadata is damaged
        image = image.transpose(turn)
    if image.mode.startswith('I'):
        image = Image.fromarray(
            np.rint(np.clip(np.asarray(image, np.float64), 0, 65535) / 257).astype(np.uint8)
        )
    return image.convert('RGB')


def encode_file(path: Path) -> bytes:
    """Return an image file as encode_image does. Raise DataError if it is not an image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            encoded = read_bytes(path)
            with Image.open(io.BytesIO(encoded)) as image:
                most = max(MAX_STORED_PIXELS, image.width * image.height)
            return encode_image(encoded, DecoderTest(), max_pixels=most)
    except DataError:  # DALI cannot start
        raise
    except Exception as e:
        if why := lack_of(e, 'free memory on this host'):
            raise DataError(f'{path}: {why}') from e
        reason = f'{type(e).__name__}: {" ".join(str(e).split())[:120]}'
        if isinstance(e, OSError):
            reason = e.strerror or 'Pillow cannot decode it'
        raise DataError(f'{path}: {reason}; expected an image such as a JPEG or PNG') from e


def network_input(encoded: bytes, config: Config) -> mx.nd.NDArray:
    """Return an image of encode_file as a network input: float32, (1, 3, side, side)."""
    # endless, because DALI reads ahead
    source = repeat(whole_images([np.frombuffer(encoded, np.uint8)]))
    images, _ = run_pipeline(build_pipeline(source, 1, config, False, None))
    return mx.nd.array(np.asarray(images.as_tensor()))
