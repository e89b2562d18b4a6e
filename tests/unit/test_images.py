"""Conversion of images: what is stored is what DALI decodes, with the pixels that Pillow shows."""

import io
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import prepend_path, write_programs
from numbered import RGB, encoded
from nvidia.dali import backend as dali_backend
from PIL import Image, ImageOps
from prepared import shown

from mlperf_rn50.data import images
from mlperf_rn50.data.images import encode_file, encode_image
from mlperf_rn50.data.pipeline import DecoderTest
from mlperf_rn50.data.prepare.pack import make_record
from mlperf_rn50.data.prepare.samples import Sample
from mlperf_rn50.errors import DataError
from mlperf_rn50.system import out_of_memory

PIXELS = np.asarray(RGB)
LATER = [RGB.rotate(180)]
FRACTIONS = Image.fromarray((PIXELS[..., 0] / 255).astype(np.float32))
HOLES = np.where(PIXELS[..., 0] > 99, np.nan, PIXELS[..., 0])  # NaN for no data
DEEP = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)  # 16 bits of grey
TEST = DecoderTest()


BMP_OF_OS2 = (
    b'BM'
    + struct.pack('<IHHIIHHHH', 26 + PIXELS.nbytes, 0, 0, 26, 12, 40, 24, 1, 24)
    + PIXELS[::-1, :, ::-1].tobytes()
)  # imagesize misreads its size


def turned(kind, orientation=6, **keys) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x8769] = orientation, 'maker', {0x9003: '2020'}
    return encoded(kind, exif=exif, **keys)


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    active, most = [], []

    class Slow(DecoderTest):
        def passes(self, _):
            active.append(1)
            most.append(len(active))
            time.sleep(0.01)
            active.pop()
            return True

    monkeypatch.setattr(images, '_LARGE_PIXELS', 1)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(encode_image, [encoded('PNG')] * 8, [Slow()] * 8)) == {encoded('PNG')}
    assert most == [1] * 8


@pytest.mark.parametrize(
    'content',
    [
        encoded('JPEG'),
        encoded('JPEG', RGB.convert('L')),
        encoded('JPEG', RGB.convert('CMYK')),
        encoded('JPEG', progressive=True),
        encoded('MPO', save_all=True, append_images=LATER),
        encoded('PNG', RGB.quantize(8)),
        encoded('PNG', RGB.convert('LA')),
        encoded('PNG', RGB.convert('1')),
        encoded('PNG', save_all=True, append_images=LATER),
        encoded('BMP', RGB.quantize(8)),
        encoded('JPEG') + b'trailing bytes',
        encoded('JPEG', RGB.crop((0, 0, 1, 1))),
    ],
    ids=range(12),
)
def test_image_that_dali_decodes_is_unchanged(content):
    assert TEST.passes(np.frombuffer(content, np.uint8))
    assert encode_image(content, TEST) == content


@pytest.mark.parametrize(
    'content, expected',
    [
        (encoded('GIF', RGB.quantize(8)), RGB.quantize(8)),
        (encoded('GIF', save_all=True, append_images=LATER), None),
        (encoded('TIFF', RGB.convert('CMYK')), RGB.convert('CMYK')),
        (encoded('TIFF', RGB.convert('1')), RGB.convert('1')),
        (BMP_OF_OS2, RGB),
        (encoded('PPM'), RGB),
        (encoded('JPEG2000', no_jp2=True), RGB),
        (encoded('ICO', sizes=[(40, 24)]), None),
        (encoded('PNG')[:-12], RGB),
        (turned('WEBP', lossless=True), RGB.transpose(Image.Transpose.ROTATE_270)),
        (encoded('TIFF', DEEP), Image.fromarray(PIXELS[..., 0])),
    ],
    ids=range(11),
)
def test_other_image_becomes_a_png_of_its_first_frame(content, expected):
    stored = encode_image(content, TEST)
    assert stored.startswith(b'\x89PNG') and TEST.passes(np.frombuffer(stored, np.uint8))
    if expected:
        np.testing.assert_array_equal(shown(stored), np.asarray(expected.convert('RGB'), np.int32))
    else:
        # the later frame is turned: its first pixel is bright
        assert shown(stored)[0, 0].sum() < 100


@pytest.mark.parametrize(
    'content, message',
    [
        (encoded('JPEG')[:-30], 'truncated'),
        (encoded('PNG')[:-40], 'truncated'),
        (b'', 'cannot identify'),
        (encoded('EPS'), 'got EPS, expected pixels'),
        (encoded('TIFF', FRACTIONS), 'got floating-point pixels of at most 0.9'),
        (encoded('TIFF', Image.fromarray(HOLES.astype(np.float32))), 'of at most nan,'),
        (encoded('TIFF', FRACTIONS.point(lambda x: x * 65535)), 'of at most 60138, expected 0 to'),
    ],
    ids=range(7),
)
def test_damaged_image_is_refused(content, message):
    with pytest.raises(Exception, match=message):
        encode_image(content, TEST)


def test_narrow_image_that_an_evaluation_would_enlarge_is_refused(tmp_path):
    path = tmp_path / 'thin.png'
    path.write_bytes(encoded('PNG', RGB.resize((30_000, 1))))
    with pytest.raises(DataError, match=r'thin.png: ValueError: got 1,966,080,000 pixels'):
        encode_file(path)


@pytest.mark.parametrize('error', [RuntimeError('std::bad_alloc'), MemoryError()])
def test_lack_of_memory_is_no_damage(monkeypatch, error):
    monkeypatch.setattr(out_of_memory, 'soft_limit', lambda kind: None)

    class Full(DecoderTest):
        def _build(self):
            def run():
                raise error

            return SimpleNamespace(feed_input=lambda *_: None, run=run)

    sample = Sample(0, 'a.png', encoded('PNG'))
    with pytest.raises(DataError, match='a.png: out of memory: .*; use fewer --workers'):
        make_record(sample, 0, partial(encode_image, test=Full()))


def test_postscript_inside_another_format_is_not_executed(tmp_path, monkeypatch):
    write_programs(tmp_path, gs=f'touch {tmp_path}/canary')
    prepend_path(monkeypatch, tmp_path)
    with pytest.raises(OSError), Image.open(io.BytesIO(encoded('EPS'))) as image:
        image.load()  # as Pillow loads the embedded image
    assert not (tmp_path / 'canary').exists()


def test_turned_image_of_a_record_stays_as_it_is():
    assert encode_image(turned('PNG'), TEST, is_fixed=True) == turned('PNG')
    assert encode_image(turned('PNG'), TEST) != turned('PNG')


def test_turned_jpeg_is_unchanged_if_dali_turns_it():
    names = dali_backend.GetSchema('decoders__Image').GetArgumentNames()
    content = turned('JPEG')
    assert (encode_image(content, TEST) == content) == ('adjust_orientation' in names)


def test_resized_image_keeps_its_brightness_and_orientation():
    grey = shown(encode_image(encoded('PNG', DEEP), TEST, 12))
    assert abs(grey.mean() - PIXELS[..., 0].mean()) < 2
    small = shown(encode_image(turned('JPEG', quality=95), TEST, 12))
    assert small.shape == (20, 12, 3)
    expected = RGB.transpose(Image.Transpose.ROTATE_270).resize((12, 20), Image.Resampling.BICUBIC)
    assert np.abs(small - np.asarray(expected, np.int32)).mean() < 4


@pytest.mark.parametrize('orientation', range(10))
def test_orientation_is_applied_as_by_pillow(orientation):
    content = turned('PNG', orientation)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image), np.int32)
    np.testing.assert_array_equal(shown(encode_image(content, TEST)), expected)


def test_image_with_damaged_metadata_is_used():
    content, random = turned('JPEG'), np.random.default_rng(0)
    start, end = content.index(b'Exif') + 6, content.index(b'2020')
    for _ in range(500):
        damaged = bytearray(content)
        damaged[random.integers(start, end)] = random.integers(256)
        assert min(shown(encode_image(bytes(damaged), TEST, 12)).shape[:2]) == 12


def test_image_whose_metadata_cannot_be_read_is_used():
    content = encoded('JPEG', dpi=(72, 72), exif=b'Exif\0\0' + bytes(20))
    assert encode_image(content, TEST) == content


def test_decoder_works_after_a_failure():
    test, kinds = DecoderTest(), ('GIF', 'JPEG', 'GIF', 'PNG')
    passed = [test.passes(np.frombuffer(encoded(kind), np.uint8)) for kind in kinds]
    assert passed == [False, True, False, True]
