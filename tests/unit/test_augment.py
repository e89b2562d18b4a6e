"""Crop windows: bounds, area, aspect and distribution."""

import numpy as np
import pytest

from mlperf_rn50.data.augment import NUM_TRIES, padded_crop_anchors, random_resized_crops

AREA, ASPECT = (0.08, 1.0), (0.75, 4 / 3)


def crops(n=2000, h=375, w=500, area=AREA, aspect=ASPECT):
    uniforms = np.random.default_rng(0).random((n, 4 * NUM_TRIES))
    anchor, shape = random_resized_crops(uniforms, np.full((n, 2), [h, w]), area, aspect)
    return anchor * [h, w], shape * [h, w]


def test_area_and_aspect_cover_their_ranges():
    _, shape = crops()
    area, aspect = shape.prod(axis=1) / (375 * 500), shape[:, 1] / shape[:, 0]
    assert 0.078 < area.min() < 0.1 and 0.9 < area.max() <= 1.0
    assert 0.72 < aspect.min() < 0.78 and 1.3 < aspect.max() < 1.37
    assert abs(np.log(aspect).mean()) < 0.05


@pytest.mark.parametrize('h, w', [(375, 500), (1, 1)])
def test_windows_reach_every_border_and_stay_inside(h, w):
    anchor, shape = crops(h=h, w=w)
    assert 0 <= anchor.min() < 0.01 and (shape >= 0.99).all()
    np.testing.assert_allclose((anchor + shape).max(axis=0), [h, w], atol=0.1)
    assert (anchor + shape <= [h + 0.01, w + 0.01]).all()


@pytest.mark.parametrize('h, w', [(100, 1000), (1000, 100)])
def test_centre_crop_if_no_try_fits(h, w):
    anchor, shape = crops(1, h, w, area=(1.0, 1.0))
    assert shape.min() == pytest.approx(100)
    assert shape.max() == pytest.approx(133, abs=1)
    np.testing.assert_allclose(anchor * 2 + shape, [[h, w]], atol=1.01)


def test_padded_anchors_are_uniform_over_shifts():
    anchors = padded_crop_anchors(np.random.default_rng(0).random((9000, 2)), 4)
    values, counts = np.unique(anchors[:, 0], return_counts=True)
    assert list(values) == list(range(-4, 5))
    assert counts.min() > 850
