"""Random training crops for all images of a batch at once. Pure."""
import numpy as np

# Random numbers per image: NUM_TRIES groups of four (area, aspect, x, y), then one for the mirror.
NUM_TRIES = 10
NUM_DRAWS = 4 * NUM_TRIES + 1


def random_resized_crops(uniforms: np.ndarray, heights: np.ndarray, widths: np.ndarray,
                         area: tuple[float, float], aspect: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return anchors (y, x) and shapes (height, width) of random crops as fractions of the image (float32, (batch, 2)).

    As in Inception training, an image uses its first drawn crop that fits, or else the largest valid centre crop.

    Args:
        uniforms: random numbers in [0, 1), shape (batch, 4 * NUM_TRIES).
        heights, widths: sizes of the images in pixels, each of shape (batch,).
        area: range of the crop's area, as a fraction of the image area.
        aspect: range of the crop's width / height, drawn log-uniformly; a centre crop is valid if within this range.
    """
    u = uniforms.reshape(len(uniforms), NUM_TRIES, 4)
    h, w = heights[:, None].astype(float), widths[:, None].astype(float)
    pixels = (area[0] + (area[1] - area[0]) * u[..., 0]) * h * w
    ratio = np.exp(np.log(aspect[0]) + np.log(aspect[1] / aspect[0]) * u[..., 1])
    crop_w, crop_h = np.rint(np.sqrt(pixels * ratio)), np.rint(np.sqrt(pixels / ratio))
    fits = (crop_w >= 1) & (crop_h >= 1) & (crop_w <= w) & (crop_h <= h)
    x, y = np.floor(u[..., 2] * (w - crop_w + 1)), np.floor(u[..., 3] * (h - crop_h + 1))

    rows, first = np.arange(len(u)), fits.argmax(axis=1)
    picked = [a[rows, first] for a in (y, x, crop_h, crop_w)]
    h, w = h[:, 0], w[:, 0]
    centre_w = np.minimum(w, np.rint(h * np.clip(w / h, *aspect)))
    centre_h = np.minimum(h, np.rint(w / np.clip(w / h, *aspect)))
    centre = [np.floor((h - centre_h) / 2), np.floor((w - centre_w) / 2), centre_h, centre_w]
    y0, x0, height, width = (np.where(fits.any(axis=1), a, b) for a, b in zip(picked, centre))
    return (np.stack([y0 / h, x0 / w], axis=1).astype(np.float32),
            np.stack([height / h, width / w], axis=1).astype(np.float32))


def padded_crop_anchors(uniforms: np.ndarray, padding: int) -> np.ndarray:
    """Return anchors (y, x) of full-size windows on padded images, from -padding to padding pixels; float32, (n, 2)."""
    return (np.floor(uniforms * (2 * padding + 1)) - padding).astype(np.float32)
