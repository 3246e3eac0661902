"""Light augmentation of small images: random shift, rotation and zoom."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHIFT = 0.08
"""Largest shift, as a share of the image's side."""
ROTATION = 10.0
"""Largest rotation, in degrees."""
ZOOM = 0.1
"""Largest change of scale, as a share."""


def augment(images: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Shift, rotate and zoom each image a little, each by its own draw; outside the image the edge is repeated.

    Args:
        images: [n, height, width, channels], float32.
        rng: where the draws come from.

    Returns:
        Images of the same shape and dtype, resampled bilinearly.
    """
    count, height, width, _ = images.shape
    angle = np.deg2rad(rng.uniform(-ROTATION, ROTATION, count))
    scale = 1 / rng.uniform(1 - ZOOM, 1 + ZOOM, count)
    shift = rng.uniform(-SHIFT, SHIFT, (count, 2)) * (height, width)
    row, column = np.meshgrid(np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2, indexing="ij")
    cosine, sine = ((scale * f(angle))[:, None, None] for f in (np.cos, np.sin))
    rows = cosine * row - sine * column + (height - 1) / 2 + shift[:, 0, None, None]
    columns = sine * row + cosine * column + (width - 1) / 2 + shift[:, 1, None, None]
    return _bilinear(images, rows, columns)


def _bilinear(
    images: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """images [n, h, w, c] read at the points (rows, columns), both [n, h, w]."""
    _, height, width, _ = images.shape
    rows, columns = rows.clip(0, height - 1), columns.clip(0, width - 1)
    top, left = rows.astype(np.int64), columns.astype(np.int64)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down = (rows - top).astype(np.float32)[..., None]
    across = (columns - left).astype(np.float32)[..., None]
    which = np.arange(len(images))[:, None, None]
    upper = images[which, top, left] * (1 - across) + images[which, top, right] * across
    lower = images[which, bottom, left] * (1 - across) + images[which, bottom, right] * across
    mixed: NDArray[np.float32] = upper * (1 - down) + lower * down
    return mixed
