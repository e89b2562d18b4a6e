"""Random training crops for all images of a batch at once. Pure."""

import numpy as np

# Random numbers per image: NUM_TRIES groups of four (area, aspect, x, y), then one for the mirror.
NUM_TRIES = 10
NUM_DRAWS = 4 * NUM_TRIES + 1


def random_resized_crops(
    uniforms: np.ndarray, sizes: np.ndarray, area: tuple[float, float], aspect: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return anchors (y, x) and shapes (height, width) of random crops as fractions of the image
    (float32, (batch, 2)).

    As in Inception training, an image uses its first drawn crop that fits, or else the largest
    valid centre crop.

    Args:
        uniforms: random numbers in [0, 1), shape (batch, 4 * NUM_TRIES).
        sizes: (height, width) of the images in pixels, shape (batch, 2).
        area: range of the crop's area, as a fraction of the image area.
        aspect: range of the crop's width / height, drawn log-uniformly; a centre crop is valid if
            within this range.
    """
    u = uniforms.reshape(len(uniforms), NUM_TRIES, 4)
    h, w = sizes.T.astype(float)
    room = sizes[:, None]

    # Draw the sizes and places of all tries.
    pixels = (area[0] + (area[1] - area[0]) * u[..., 0]) * h[:, None] * w[:, None]
    ratio = np.exp(np.log(aspect[0]) + np.log(aspect[1] / aspect[0]) * u[..., 1])
    crops = np.rint(np.sqrt(np.stack([pixels / ratio, pixels * ratio], axis=2)))
    anchors = np.floor(u[..., [3, 2]] * (room - crops + 1))

    # The largest valid centre crop, for images without a try that fits.
    valid = np.clip(w / h, *aspect)
    centre = np.minimum(sizes, np.rint(np.stack([w / valid, h * valid], axis=1)))
    centre_anchor = np.floor((sizes - centre) / 2)

    # The first try of each image that fits.
    fits = ((crops >= 1) & (crops <= room)).all(axis=2)
    has_fit = fits.any(axis=1)[:, None]
    first = np.arange(len(u)), fits.argmax(axis=1)
    anchor = np.where(has_fit, anchors[first], centre_anchor) / sizes
    shape = np.where(has_fit, crops[first], centre) / sizes
    return anchor.astype(np.float32), shape.astype(np.float32)


def padded_crop_anchors(uniforms: np.ndarray, padding: int) -> np.ndarray:
    """Return anchors (y, x) of full-size windows on padded images, from -padding to padding pixels;
    float32, (n, 2)."""
    return (np.floor(uniforms * (2 * padding + 1)) - padding).astype(np.float32)
